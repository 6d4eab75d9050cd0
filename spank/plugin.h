/*
 * What the files of the plug-in share. One file per context: local.c (srun),
 * allocator.c (sbatch, salloc), remote.c (slurmstepd); dispatch.c says which is called.
 *
 * Nothing here starts a thread, changes a signal, a limit or the working directory,
 * or leaves a descriptor open: a task must be as it is without the plug-in. No function
 * of Slurm's is given a positive code: Slurm logs those as failures and goes on.
 */
#ifndef SLUICE_SPANK_PLUGIN_H
#define SLUICE_SPANK_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

/* What Slurm calls is all that the plug-in exports. */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

#define SL_SOCKET "/run/sluice/job.sock"
#define SL_TEXT_MAX 1024
#define SL_BODY_MAX (64 * 1024)

/* --- settings.c: the arguments in plugstack.conf --- */

struct sl_settings {
	char socket[sizeof((struct sockaddr_un *)0)->sun_path];
};

/* Reads the arguments. What is wrong with them is told to say, and does not count. */
void sl_settings_read(struct sl_settings *s, int ac, char **av, void (*say)(const char *, ...));

/* --- wish.c: the options --- */

/* Adds the options to the command line. */
void sl_wish_register(spank_t sp);
/* The value of wish i as it was given and found good, NULL if it was not given. */
const char *sl_wish_value(int i);
/* Reads value as wish i; the normal form goes to out. False if it is out of range. */
bool sl_wish_parse(int i, const char *value, char out[80]);
/* Tells the wishes to Slurm, which shows them to Prologs and Epilogs. */
int sl_wish_send(spank_t sp);

/* --- answer.c: what the daemon answered --- */

enum sl_kind {
	SL_NONE,   /* the job asked for no fraction */
	SL_ENV,    /* body is changes of the environment */
	SL_ERROR,  /* text is why the job must not run */
	SL_SILENT, /* there is no answer to that; text is why */
};

struct sl_answer {
	enum sl_kind kind;
	char text[SL_TEXT_MAX + 1];
	char *body;
	size_t len;
};

/* Reads the n bytes at buf, which a->body points into afterwards. */
void sl_answer_read(struct sl_answer *a, char *buf, size_t n);

/* The next change of a->body: false at the end or, with kind SL_ERROR then, at a bad one. */
struct sl_change {
	char separator; /* 0: set; else put before what is there, with it between */
	const char *name, *value;
};
bool sl_answer_next(struct sl_answer *a, struct sl_change *c);

/* The list with item first and nowhere else or, without add, nowhere; malloc'd, NULL without memory. */
char *sl_list_change(const char *item, const char *list, char separator, bool add);

/* --- ask.c: the daemon's socket --- */

/* Asks for the environment of a step. absent_ms is how long a daemon that is not there is
 * waited for, and answer_ms how long all of it may take. free(a->memory). */
char *sl_ask(struct sl_answer *a, const char *socket, uint32_t job, uint32_t step, int absent_ms, int answer_ms);

/* --- the contexts --- */

int sl_local_init_post_opt(spank_t sp);
int sl_allocator_init_post_opt(spank_t sp);
int sl_remote_user_init(spank_t sp, const struct sl_settings *s);
int sl_remote_task_init(spank_t sp);

#endif
