/* Host twins of the kernels that the tests launch on the simulated GPU. */
#include "simkernel.h"

SIM_KERNEL(vecadd, SIM_PARAMS(8, 8, 8, 4))
{
	const float *a = SIM_ARG(0, const float *);
	const float *b = SIM_ARG(1, const float *);
	float *c = SIM_ARG(2, float *);
	int n = SIM_ARG(3, int);

	sim_check(c, n * sizeof(float));
	SIM_FOR_1D(i)
		if (i < n)
			c[i] = a[i] + b[i];
}

SIM_KERNEL(slow, SIM_PARAMS(8))
{
	sim_cost_ns(SIM_ARG(0, uint64_t));
}

SIM_KERNEL(hello, SIM_PARAMS(4))
{
	sim_printf("hello %d\n", SIM_ARG(0, int));
}

SIM_KERNEL(crash, SIM_PARAMS(8))
{
	sim_check(SIM_ARG(0, void *), 4);
}

/* 4 KiB of local memory beyond the first for each of 270,336 threads: 1,056 MiB. */
SIM_KERNEL(deep, SIM_PARAMS(4), .local_bytes = 5120)
{
}

SIM_GLOBAL(table, 67108864);
