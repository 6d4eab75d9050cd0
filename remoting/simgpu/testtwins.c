/* Twins for the simulator's own tests. */
#include <time.h>

#include "simkernel.h"

SIM_GLOBAL(counter, 4);
static const int seed[4] = { 1, 2, 3, 4 };
SIM_GLOBAL_INIT(table, sizeof(seed), seed);

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

SIM_KERNEL(_Z6vecaddPKfS0_Pfi, SIM_PARAMS(8, 8, 8, 4), .regs = 16)
{
	const float *a = SIM_ARG(0, const float *);
	const float *b = SIM_ARG(1, const float *);
	float *c = SIM_ARG(2, float *);
	size_t n = (size_t)SIM_ARG(3, int);

	sim_check(c, n * sizeof(float));
	SIM_FOR_1D(i)
		if (i < n)
			c[i] = a[i] + b[i];
}

SIM_KERNEL(_Z4nonev, SIM_NO_PARAMS)
{
}

/* Takes ms milliseconds. */
SIM_KERNEL(_Z5sleepi, SIM_PARAMS(4))
{
	sim_cost_ns((uint64_t)SIM_ARG(0, int) * 1000000);
}

/* *p = v after ms milliseconds. */
SIM_KERNEL(_Z5storePiii, SIM_PARAMS(8, 4, 4))
{
	struct timespec t = { 0, SIM_ARG(2, int) * 1000000L };

	nanosleep(&t, NULL);
	*SIM_ARG(0, int *) = SIM_ARG(1, int);
}

/* *p = *p * k + add: the order of two of these shows. */
SIM_KERNEL(_Z3madPiii, SIM_PARAMS(8, 4, 4))
{
	int *p = SIM_ARG(0, int *);

	sim_check(p, sizeof(*p));
	*p = *p * SIM_ARG(1, int) + SIM_ARG(2, int);
}

SIM_KERNEL(_Z3sayi, SIM_PARAMS(4))
{
	SIM_FOR_BLOCKS(b)
		SIM_FOR_THREADS(t)
			sim_printf("block %u thread %u says %d\n", b.x, t.x, SIM_ARG(0, int));
}

SIM_KERNEL(_Z5countv, SIM_NO_PARAMS)
{
	int *c = SIM_SYMBOL(counter, int);
	const int *t = SIM_SYMBOL(table, int);

	*c += t[3];
}

SIM_KERNEL(_Z5faulti, SIM_PARAMS(4))
{
	sim_fault(SIM_ARG(0, int));
}

struct odd { char c[3]; };

SIM_KERNEL(_Z6layoutc3oddsPx, SIM_PARAMS_AT(0, 1, 1, 3, 4, 2, 8, 8), .static_shared = 1024, .max_threads = 256)
{
	struct odd o = SIM_ARG(1, struct odd);
	long long *p = SIM_ARG(3, long long *);

	*p = SIM_ARG(0, char) * 1000000LL + o.c[0] * 10000 + o.c[2] * 100 + SIM_ARG(2, short);
}

SIM_KERNEL(_Z5stampPy, SIM_PARAMS(8))
{
	*SIM_ARG(0, uint64_t *) = now();
}
