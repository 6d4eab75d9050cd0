/*
 * srun, as the user. Outside of a job it submits one. Within a job it starts a step,
 * and the job has its lease already: an option comes too late.
 */
#include "plugin.h"
#include "options.h"

#include <stdlib.h>

int sl_local_init_post_opt(spank_t sp)
{
	if (!getenv("SLURM_JOB_ID"))
		return sl_option_send(sp);
	for (int i = 0; i < SL_OPTIONS; i++)
		if (sl_option_value(i))
			slurm_spank_log("sluice: --%s has no effect on a step: its job has its lease already; give the option to sbatch or salloc",
					sl_options[i].name);
	return 0;
}
