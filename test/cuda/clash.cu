/*
 * clash managed|variable|mapped same|neighbours|different: the program writes to memory that a kernel writes to, before it waits
 * for the kernel. Each writes words of its own, or both write the same value to one, or different ones: then the wait
 * returns an error, natively one of the two values is lost.
 */
#include "check.h"

#include <string.h>

enum { N = 1 << 16 };

__managed__ int variable[N];

/* Every other word of v, from the first on. */
extern "C" __global__ void clash_set(int *v, int n, int value)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n / 2; i += gridDim.x * blockDim.x)
		v[2 * i] = value;
}

int main(int argc, char **argv)
{
	const char *where = argc > 1 ? argv[1] : "managed", *how = argc > 2 ? argv[2] : "neighbours";
	cudaError_t err;
	int *v = variable;

	if (!strcmp(where, "managed"))
		CHECK(cudaMallocManaged(&v, N * sizeof *v));
	else if (!strcmp(where, "mapped"))
		CHECK(cudaHostAlloc(&v, N * sizeof *v, cudaHostAllocMapped));
	for (int round = 1; round <= 3; round++) {
		memset(v, 0, N * sizeof *v);
		clash_set<<<8, 128>>>(v, N, round);
		if (!strcmp(how, "neighbours"))
			for (int i = 1; i < N; i += 2)
				v[i] = round * i;
		else
			v[2000] = !strcmp(how, "same") ? round : 100;
		err = cudaDeviceSynchronize();
		if (!strcmp(how, "different")) {
			/* The worker tells of it with the wait after the one that finds it. */
			if (err == cudaSuccess)
				err = cudaDeviceSynchronize();
			REQUIRE(err == cudaErrorNotSupported, "round %d: %s", round, cudaGetErrorName(err));
			continue;
		}
		CHECK(err);
		for (int i = 0; i < N; i++)
			REQUIRE(v[i] == (i % 2 == 0 ? round : !strcmp(how, "neighbours") ? round * i : 0), "round %d, word %d is %d", round, i, v[i]);
	}
	printf("clash: %s %s\n", where, how);
	return pass();
}
