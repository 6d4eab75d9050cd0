/*
 * A separately compiled program (nvcc -rdc=true): its kernels use functions and variables of other
 * files, and nvlink puts them together. Compiled three times, see the Makefile: with PART=0 as the
 * program, and with PART=1 and 2.
 */
#include "check.h"

extern __constant__ int separate_table[4];
extern __device__ int separate_count;
extern __device__ int separate_mix(int x);
extern cudaError_t separate_run(int *v, int n);

#if PART == 1

__constant__ int separate_table[4];
__device__ int separate_count;

__device__ __noinline__ int separate_mix(int x)
{
	return x * separate_table[1] + separate_table[x & 3];
}

#elif PART == 2

extern "C" __global__ void separate_chain(int *v, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n) {
		v[i] = separate_mix(v[i]) - separate_table[3];
		atomicAdd(&separate_count, 1);
	}
}

cudaError_t separate_run(int *v, int n)
{
	separate_chain<<<(n + 63) / 64, 64>>>(v, n);
	return cudaGetLastError();
}

#else

extern "C" __global__ void separate_start(int *v, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = separate_mix(i);
}

extern "C" __global__ void separate_say(int n)
{
	for (int i = 0; i < n; i++)
		printf("separate: the device has %d of %d\n", separate_mix(i), separate_count);
}

int main()
{
	const int n = 1000, table[4] = { 5, 3, 11, 2 };
	int *d, h[n], sum = 0, count = 0;

	CHECK(cudaMemcpyToSymbol(separate_table, table, sizeof table));
	CHECK(cudaMalloc(&d, sizeof h));
	separate_start<<<(n + 63) / 64, 64>>>(d, n);
	CHECK(cudaGetLastError());
	CHECK(separate_run(d, n));
	CHECK(cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost));
	for (int i = 0; i < n; i++) {
		int x = i * table[1] + table[i & 3], want = x * table[1] + table[x & 3] - table[3];

		REQUIRE(h[i] == want, "element %d is %d, not %d", i, h[i], want);
		sum += h[i];
	}
	CHECK(cudaMemcpyFromSymbol(&count, separate_count, sizeof count));
	printf("separate: sum %d, count %d\n", sum, count);
	fflush(stdout);
	separate_say<<<1, 1>>>(2);
	CHECK(cudaGetLastError());
	CHECK(cudaDeviceSynchronize());
	return pass();
}

#endif
