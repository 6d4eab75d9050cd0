/*
 * srun, as the user. Outside of a job it submits one. Within a job it starts a step,
 * and the job has its lease already: an option comes too late, but for those of a step. A step may have a part
 * of its job's fraction, by a --gres of its own.
 */
#include "plugin.h"
#include "options.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define COMMAND_MAX (64 * 1024) /* what is read of a command line: srun's options come first */

/*
 * Slurm passes a step the options of its job as if they were its own. So slurmstepd lets a variable override an option, and a
 * variable that an option of this srun overrides must not get there.
 */
static void drop_overridden(void)
{
	char name[80];

	for (int i = 0; i < SL_OPTIONS; i++) {
		if (!sl_option_value(i) || !sl_options[i].step)
			continue;
		snprintf(name, sizeof name, "SLURM_%s", sl_options[i].env);
		unsetenv(name);
	}
}

/* Which options srun's command line has. Arguments of the program, which follow there, may be mistaken for them. */
struct command {
	bool gres;  /* --gres, --tres-per-task=gres/... */
	bool jobid; /* --jobid, or as much of it as means nothing else */
};

static struct command read_command(void)
{
	struct command c = { 0 };
	char *text = malloc(COMMAND_MAX);
	int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	ssize_t n = 0, more;

	while (text && fd >= 0 && n < COMMAND_MAX - 1 && (more = read(fd, text + n, (size_t)(COMMAND_MAX - 1 - n))) > 0)
		n += more;
	if (fd >= 0)
		close(fd);
	if (text)
		text[n] = 0;
	for (char *word = text; text && word < text + n; word += strlen(word) + 1) {
		c.gres = c.gres || !strncmp(word, "--gres", 6) || strstr(word, "gres/") || strstr(word, "gres:");
		c.jobid = c.jobid || !strncmp(word, "--jobi", 6);
	}
	free(text);
	return c;
}

/* Tells slurmstepd whether the step may have a gres of its own. SPANK does not show that; the daemon asks slurmctld. */
static void tell_step(const struct command *c)
{
	const char *mem = sl_option_value(SL_RGPU_MEM);
	char value[100];

	if (!c->gres && !getenv("SLURM_STEP_GRES") && !getenv("SLURM_GRES") && !mem)
		return;
	snprintf(value, sizeof value, "gres%s%s", mem ? ":" : "", mem ? mem : "");
	setenv(SL_STEP_ENV, value, 1);
}

int sl_local_init_post_opt(spank_t sp)
{
	struct command c = read_command();

	drop_overridden();
	unsetenv(SL_STEP_ENV); /* an outer step's */
	if (!getenv("SLURM_JOB_ID") && !c.jobid)
		return sl_option_send(sp);
	tell_step(&c);
	if (!sl_option_value(SL_RGPU_BIND))
		sl_option_variable_ok(SL_RGPU_BIND); /* the variable that slurmstepd reads */
	for (int i = 0; i < SL_OPTIONS; i++)
		if (sl_option_value(i) && !sl_options[i].step && i != SL_RGPU_MEM)
			slurm_spank_log("sluice: --%s has no effect on a step: its job has its lease already; give the option to sbatch or salloc",
					sl_options[i].name);
	return 0;
}
