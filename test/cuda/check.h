/*
 * What every test program shares: a check that names the failing call, and the closing line.
 *
 * The programs are plain CUDA C++ and know nothing of Sluice: natively and remotely they must print
 * the same lines, of which the last is PASS.
 */
#ifndef CHECK_H
#define CHECK_H

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(call) \
	do { \
		cudaError_t check_err = (call); \
		if (check_err != cudaSuccess) { \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(check_err)); \
			exit(1); \
		} \
	} while (0)

/* EXPECT: the call must fail, with just this error. */
#define EXPECT(call, want) \
	do { \
		cudaError_t check_err = (call); \
		if (check_err != (want)) { \
			fprintf(stderr, "%s:%d: %s: got %s, want %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(check_err), cudaGetErrorName(want)); \
			exit(1); \
		} \
	} while (0)

#define REQUIRE(condition, ...) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
			fprintf(stderr, __VA_ARGS__); \
			fputc('\n', stderr); \
			exit(1); \
		} \
	} while (0)

/* A kernel of that name that lasts for ns nanoseconds. */
#define LASTING(name) \
	extern "C" __global__ void name(long long ns) \
	{ \
		long long t0, t; \
 \
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0)); \
		do { \
			asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); \
		} while (t - t0 < ns); \
	}

static inline double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static inline int pass(void)
{
	puts("PASS");
	fflush(stdout);
	return 0;
}

#endif
