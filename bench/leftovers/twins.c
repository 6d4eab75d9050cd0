/*
 * Host twins of leftovers.cu's kernels, for the simulated GPU (see remoting/simgpu/simkernel.h). It has no memory on a
 * chip, so those of shared and local memory do nothing.
 */
#include "simkernel.h"

#define MARK 0x5ec7e7a11f0a9b3dull

SIM_GLOBAL(marks, 8);
SIM_GLOBAL(filled, 8);

SIM_KERNEL(_Z4fillPym, SIM_PARAMS(8, 8))
{
	uint64_t *p = SIM_ARG(0, uint64_t *), n = SIM_ARG(1, uint64_t);

	sim_check(p, n * 8);
	for (uint64_t i = 0; i < n; i++)
		p[i] = MARK;
}

SIM_KERNEL(_Z4lookPKym, SIM_PARAMS(8, 8))
{
	const uint64_t *p = SIM_ARG(0, const uint64_t *);
	uint64_t n = SIM_ARG(1, uint64_t), *m = SIM_SYMBOL(marks, uint64_t), *f = SIM_SYMBOL(filled, uint64_t);

	sim_check(p, n * 8);
	for (uint64_t i = 0; m && f && i < n; i++) {
		*m += p[i] == MARK;
		*f += p[i] != 0;
	}
}

SIM_KERNEL(_Z11fill_sharedm, SIM_PARAMS(8))
{
}

SIM_KERNEL(_Z11look_sharedm, SIM_PARAMS(8))
{
}

SIM_KERNEL(_Z10fill_localPVi, SIM_PARAMS(8))
{
}

SIM_KERNEL(_Z10look_localPVi, SIM_PARAMS(8))
{
}

SIM_KERNEL(_Z7endlessPVi, SIM_PARAMS(8))
{
	sim_cost_ns(3600000000000); /* an hour is for ever */
}
