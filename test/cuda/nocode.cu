/*
 * A program with no code for the GPU, see the Makefile: the launch says so, nothing else fails, and
 * nothing that waits afterwards says that the kernel ran.
 */
#include "check.h"

extern "C" __global__ void nocode_kernel(int *v)
{
	*v = 1;
}

int main()
{
	int *d, h = 7;

	CHECK(cudaMalloc(&d, sizeof h));
	CHECK(cudaMemcpy(d, &h, sizeof h, cudaMemcpyHostToDevice));
	nocode_kernel<<<1, 1>>>(d);
	/* which error it is depends on the driver and the runtime */
	REQUIRE(cudaGetLastError() != cudaSuccess, "a kernel without code was launched");
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaMemcpy(&h, d, sizeof h, cudaMemcpyDeviceToHost));
	printf("nocode: the kernel is refused, %d\n", h);
	return pass();
}
