/*
 * srun, as the user. Outside of a job it submits one; within, it starts a step, and the
 * job's lease has been made already. A step inherits the options of its job through the
 * environment, so only a value that differs from the job's is worth a word.
 */
#include "plugin.h"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int sl_local_init_post_opt(spank_t sp)
{
	if (!getenv("SLURM_JOB_ID"))
		return sl_wish_send(sp);
	for (int i = 0; i < WISHES; i++) {
		const char *value = sl_wish_value(i), *job;
		char name[80];

		snprintf(name, sizeof name, "SLURM_SPANK_%s", wishes[i].env);
		job = getenv(name);
		if (value && (!job || strcmp(job, value)))
			slurm_spank_log("sluice: --%s=%s has no effect on a step: its job has its fractions already; give it to sbatch or salloc",
					wishes[i].name, value);
	}
	return 0;
}
