/*
 * OpenMP or OpenACC on the GPU by GCC: libgomp's plug-in links the program's PTX with its own at run time, by the
 * driver's interface alone. Compiled twice, with -fopenmp and with -fopenacc.
 */
#include <stdio.h>
#include <stdlib.h>

#define N 1000

#ifdef _OPENACC
#include <openacc.h>

#define NAME "acc"

__attribute__((noinline)) static void where_acc(int *host)
{
	int is = -1;

#pragma acc parallel copyout(is)
	is = acc_on_device(acc_device_host);
	*host = is;
}

/* Twice, the second time behind the first in a stream. */
__attribute__((noinline)) static void scale_acc(int *v)
{
#pragma acc data copy(v[0:N])
	{
#pragma acc parallel loop present(v[0:N])
		for (int i = 0; i < N; i++)
			v[i] = v[i] * 3 + 1;
#pragma acc parallel loop present(v[0:N]) async(1)
		for (int i = 0; i < N; i++)
			v[i] = v[i] * 3 + 1;
#pragma acc wait
	}
}

#define where where_acc
#define scale scale_acc
#else
#include <omp.h>

#define NAME "omp"

__attribute__((noinline)) static void where_omp(int *host)
{
	int is = -1;

#pragma omp target map(from: is)
	is = omp_is_initial_device();
	*host = is;
}

__attribute__((noinline)) static void scale_omp(int *v)
{
#pragma omp target data map(tofrom: v[0:N])
	for (int times = 0; times < 2; times++) {
#pragma omp target teams distribute parallel for
		for (int i = 0; i < N; i++)
			v[i] = v[i] * 3 + 1;
	}
}

#define where where_omp
#define scale scale_omp
#endif

int main(void)
{
	int *v = malloc(N * sizeof *v), host = -1;
	long sum = 0;

	if (!v)
		return 1;
	for (int i = 0; i < N; i++)
		v[i] = i;
	where(&host);
	scale(v);
	for (int i = 0; i < N; i++)
		sum += v[i];
	printf("offload: %s, on the host %d, sum %ld\n", NAME, host, sum);
	free(v);
	puts("PASS");
	return 0;
}
