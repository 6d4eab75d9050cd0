/* Twins of tenant.c's kernels, for the simulated GPU (see remoting/simgpu/simkernel.h). */
#include "simkernel.h"

/* burn(ns, tag): has the GPU for ns; the trace shows the process by its tag. */
SIM_KERNEL(burn, SIM_PARAMS(8, 8))
{
	sim_tag(SIM_ARG(1, uint64_t));
	sim_cost_ns(SIM_ARG(0, uint64_t));
}
