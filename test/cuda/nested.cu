/*
 * Kernels that launch kernels (dynamic parallelism). The device's runtime, libcudadevrt, is linked to the program's code and
 * brings kernels of its own.
 */
#include "check.h"

extern "C" __global__ void nested_add(int *v, int d)
{
	atomicAdd(&v[blockIdx.x * blockDim.x + threadIdx.x], d);
	if (!blockIdx.x && !threadIdx.x)
		printf("nested: %d added\n", d);
}

/* Adds depth, depth - 1 ... 0 to each element, one after the other. */
extern "C" __global__ void nested_start(int *v, int depth)
{
	if (threadIdx.x)
		return;
	nested_add<<<2, 32>>>(v, depth);
	if (depth)
		nested_start<<<1, 32>>>(v, depth - 1);
}

/* What cannot be launched on the device is an error there. */
extern "C" __global__ void nested_wrong(int *v)
{
	nested_add<<<1, 4096>>>(v, 1);
	*v = cudaGetLastError() != cudaSuccess;
}

int main()
{
	int *v, h[64], sum = 0;

	CHECK(cudaMalloc(&v, sizeof h));
	CHECK(cudaMemset(v, 0, sizeof h));
	nested_start<<<1, 32>>>(v, 3);
	CHECK(cudaGetLastError());
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaMemcpy(h, v, sizeof h, cudaMemcpyDeviceToHost));
	for (int i = 0; i < 64; i++)
		sum += h[i];
	nested_wrong<<<1, 1>>>(v);
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaMemcpy(h, v, sizeof *h, cudaMemcpyDeviceToHost));
	printf("nested: sum %d, a wrong launch is %s\n", sum, h[0] ? "refused" : "taken");
	return pass();
}
