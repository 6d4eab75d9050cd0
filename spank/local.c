/*
 * srun, as the user. Outside of a job it submits one; within, it starts a step, and the
 * job's lease has been made already: an option comes too late.
 */
#include "plugin.h"
#include "options.h"

#include <stdlib.h>

int sl_local_init_post_opt(spank_t sp)
{
	if (!getenv("SLURM_JOB_ID"))
		return sl_wish_send(sp);
	for (int i = 0; i < WISHES; i++)
		if (sl_wish_value(i))
			slurm_spank_log("sluice: --%s has no effect on a step: its job has its fractions already; give it to sbatch or salloc",
					wishes[i].name);
	return 0;
}
