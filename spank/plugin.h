/*
 * What the files of the plug-in share. There is one file per context: local.c (srun),
 * allocator.c (sbatch, salloc), remote.c (slurmstepd); dispatch.c chooses.
 *
 * Nothing here starts a thread, changes a signal, a limit or the working directory, or
 * leaves a descriptor open: without the plug-in a task would be the same. No function
 * returns a positive code to Slurm, which logs those as failures and goes on.
 */
#ifndef SLUICE_SPANK_PLUGIN_H
#define SLUICE_SPANK_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

#include "options.h"

/* The plug-in exports only what Slurm calls. */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

#define SL_SOCKET "/run/sluice/job.sock"

/* --- settings.c: the arguments in plugstack.conf --- */

struct sl_settings {
	char socket[sizeof((struct sockaddr_un *)0)->sun_path];
};

/* Reads the arguments. A wrong one is reported by say, and ignored. */
void sl_settings_read(struct sl_settings *s, int ac, char **av, void (*say)(const char *, ...));

/* --- option.c: the options that users give --- */

/* Adds the options to the command line. */
void sl_option_register(spank_t sp);
/* The valid value that was given for option i, in its normal form; NULL if none was. */
const char *sl_option_value(int i);
/* Parses a value of option i; its normal form goes to out. False if it is not valid. */
bool sl_option_parse(int i, const char *value, char out[80]);
/*
 * srun tells slurmstepd by this variable that the step may have a gres of its own: "gres", or "gres:SIZE" with --rgpu-mem. Slurm
 * passes variables with this beginning in any case.
 */
#define SL_STEP_ENV "SLURM_RGPU_STEP"

/* Whether the variable of option i, if it is set, has a valid value. Says what is wrong with another one. */
bool sl_option_variable_ok(int i);
/* Passes the options on to Slurm, which shows them to Prologs and Epilogs. */
int sl_option_send(spank_t sp);

/* --- answer.c: what the daemon answered --- */

enum sl_kind {
	SL_NONE,   /* the job asked for no fraction */
	SL_ENV,    /* body is the changes to the environment */
	SL_ERROR,  /* text says why the job must not run */
	SL_SILENT, /* there was no answer; text says why */
};

struct sl_answer {
	enum sl_kind kind;
	char text[SL_TEXT_MAX + 1];
	char *body;
	size_t len;
};

/* Parses the n bytes at buf; a->body points into them afterwards. */
void sl_answer_read(struct sl_answer *a, char *buf, size_t n);

/* The next change in a->body. False at the end, and at a malformed one, where kind becomes SL_ERROR. */
struct sl_change {
	char separator; /* 0: set the variable; otherwise put the value before its present one, with this between them */
	const char *name, *value;
};
bool sl_answer_next(struct sl_answer *a, struct sl_change *c);

/*
 * With add, the list with item first and nowhere else; without, the list without item. malloc'd;
 * NULL when memory ran out.
 */
char *sl_list_change(const char *item, const char *list, char separator, bool add);

/* --- ask.c: the daemon's socket --- */

/*
 * Asks for the environment of a step. own is what follows the step's number in the request: " gres" and such, or "". absent_ms is how long to wait for a daemon that is
 * not there, answer_ms the limit for all of it. The caller frees the memory that is
 * returned.
 */
char *sl_ask(struct sl_answer *a, const char *socket, uint32_t job, uint32_t step, const char *own, int absent_ms, int answer_ms);

/* --- the contexts --- */

int sl_local_init_post_opt(spank_t sp);
int sl_allocator_init_post_opt(spank_t sp);
int sl_remote_user_init(spank_t sp, const struct sl_settings *s);
int sl_remote_task_init(spank_t sp);

#endif
