/*
 * Host twins of the loads' kernels, for the simulated GPU (see remoting/simgpu/simkernel.h). They compute
 * nothing: what counts is that a kernel is given, takes its time and ends.
 *
 * Each takes about what its kernel takes on an H200, by the place it has in a load.
 */
#include "simkernel.h"

SIM_KERNEL(_Z6k_gemmPKfS0_Pfiiii, SIM_PARAMS(8, 8, 8, 4, 4, 4, 4))
{
	uint64_t rows = SIM_ARG(3, int), depth = SIM_ARG(5, int), rounds = SIM_ARG(6, int);

	/* 613 us for 4096 rows of depth 512 */
	sim_cost_ns(rows * depth * rounds * 613000 / (4096 * 512));
}

SIM_KERNEL(_Z7k_smallPf, SIM_PARAMS(8))
{
	sim_cost_ns(2500);
}

SIM_KERNEL(_Z6k_fillPfmj, SIM_PARAMS(8, 8, 4))
{
	sim_cost_ns(50000);
}

/* An hour is for ever. */
SIM_KERNEL(_Z6k_spinyPf, SIM_PARAMS(8, 8))
{
	uint64_t ns = SIM_ARG(0, uint64_t);

	sim_cost_ns(ns ? ns : 3600000000000);
}
