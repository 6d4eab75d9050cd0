/* Which processes can give a device no work at the moment, see idle.c. Times are real times (CLOCK_MONOTONIC, ns). */
#ifndef SLUICE_SIM_IDLE_H
#define SLUICE_SIM_IDLE_H

#include "state.h"

/* After this many ms without work a process may be idle. */
void idle_config(double ms);
/* The file by which to ask whether a process is idle, of SIM_MAX_PROC struct sim_watch; -1: it cannot be used. */
int idle_watch(const char *path);
/* Whether that much time has passed. */
bool idle_due(uint64_t since, uint64_t real);
/* Whether a process is stopped, dead or gone. */
bool idle_stopped(int pid);
/* Whether any thread of a process, other than the caller, can run now. */
bool idle_runs(int pid);
/* Whether a process is idle; dev is the machine's number. */
bool idle_is(struct sim_proc *p, int dev, uint64_t real);

#endif
