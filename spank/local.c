/*
 * srun, as the user. Outside of a job it submits one. Within a job it starts a step,
 * and the job has its lease already: an option comes too late.
 */
#include "plugin.h"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>

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

int sl_local_init_post_opt(spank_t sp)
{
	drop_overridden();
	if (!getenv("SLURM_JOB_ID"))
		return sl_option_send(sp);
	for (int i = 0; i < SL_OPTIONS; i++)
		if (sl_option_value(i) && !sl_options[i].step)
			slurm_spank_log("sluice: --%s has no effect on a step: its job has its lease already; give the option to sbatch or salloc",
					sl_options[i].name);
	return 0;
}
