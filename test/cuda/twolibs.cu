/*
 * Several runtimes in one process: two shared objects and the program each carry a static cudart of
 * their own, and share the primary context. Built three times, see the Makefile: with LIB=1 and 2
 * as the shared objects, without LIB as the program.
 */
#include "check.h"

#ifdef LIB

#define NAME_(a, b) a##b
#define NAME(a, b) NAME_(a, b)

extern "C" __global__ void NAME(lib_kernel, LIB)(int *v, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = v[i] * 10 + LIB;
}

extern "C" __attribute__((visibility("default"))) cudaError_t NAME(lib_run, LIB)(int *v, int n, cudaStream_t s)
{
	NAME(lib_kernel, LIB)<<<(n + 63) / 64, 64, 0, s>>>(v, n);
	return cudaGetLastError();
}

#else

extern "C" cudaError_t lib_run1(int *v, int n, cudaStream_t s);
extern "C" cudaError_t lib_run2(int *v, int n, cudaStream_t s);

extern "C" __global__ void main_kernel(int *v, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = v[i] * 10 + 3;
}

int main()
{
	const int n = 1000;
	cudaStream_t s;
	int *d, h[n];

	CHECK(cudaMalloc(&d, sizeof h));
	CHECK(cudaMemset(d, 0, sizeof h));
	CHECK(cudaStreamCreate(&s));
	CHECK(lib_run1(d, n, s));
	CHECK(lib_run2(d, n, s));
	main_kernel<<<(n + 63) / 64, 64, 0, s>>>(d, n);
	CHECK(cudaGetLastError());
	CHECK(lib_run1(d, n, s));
	CHECK(cudaStreamSynchronize(s));
	CHECK(cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost));
	for (int i = 0; i < n; i++)
		REQUIRE(h[i] == 1231, "element %d is %d, not 1231", i, h[i]);
	printf("twolibs: %d\n", h[0]);
	return pass();
}

#endif
