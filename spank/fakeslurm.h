/* A stand-in for Slurm, for the tests: it provides what the plug-in calls, and records what the plug-in does. */
#ifndef SLUICE_SPANK_FAKESLURM_H
#define SLUICE_SPANK_FAKESLURM_H

#include <stddef.h>
#include <stdint.h>

/* Forgets everything; context is a spank_context_t. */
void fake_reset(int context, uint32_t job, uint32_t step, int task);
/* A variable of the job. */
void fake_setenv(const char *name, const char *value);
const char *fake_getenv(const char *name);
/* The variables set by spank_job_control_setenv. */
const char *fake_control(const char *name);
/* All that was logged, a line each. */
const char *fake_log(void);
/* Gives an option on the command line: what the plug-in's callback returns, -2 if it has none. */
int fake_option(const char *name, const char *value, int remote);
/* How many tasks the step has on this node. */
void fake_tasks(int local);
/* From now on spank_setenv fails. */
void fake_full(void);
/* Log lines go to stderr too. */
void fake_loud(void);

#endif
