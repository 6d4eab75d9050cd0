/*
 * A kernel whose parameter is a structure of 4,096 bytes is given as many of them as it reads, by the driver's interface
 * and with launch attributes, as NCCL launches its kernels. More than it declares is refused.
 */
#include "driver.h"

#include <string.h>

struct work {
	unsigned *out;
	unsigned n, first;
	char more[4080];
};

extern "C" __global__ void packed_count(const __grid_constant__ work w)
{
	unsigned i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < w.n)
		w.out[i] = w.first + i;
}

int main()
{
	const unsigned n = 1000;
	unsigned h[n], sum = 0;
	CUlaunchAttribute attr[2] = {};
	CUlaunchConfig c = {};
	size_t bytes[] = { 16, 64, sizeof(work), sizeof(work) + 64 };
	char room[sizeof(work) + 64] = {};
	cudaFunction_t f;
	unsigned *d;
	work w = {};

	CHECK(cudaMalloc(&d, sizeof h));
	CHECK(cudaGetFuncBySymbol(&f, (const void *)packed_count));
	attr[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
	attr[0].value.clusterDim.x = attr[0].value.clusterDim.y = attr[0].value.clusterDim.z = 1;
	attr[1].id = CU_LAUNCH_ATTRIBUTE_IGNORE;
	c.gridDimX = 4;
	c.blockDimX = 256;
	c.gridDimY = c.gridDimZ = c.blockDimY = c.blockDimZ = 1;
	c.attrs = attr;
	c.numAttrs = 2;
	for (unsigned k = 0; k < sizeof bytes / sizeof *bytes; k++) {
		void *extra[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, room, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes[k], CU_LAUNCH_PARAM_END };
		CUresult err;

		w.out = d;
		w.n = n;
		w.first = k;
		memcpy(room, &w, 16);
		CHECK(cudaMemset(d, 0, sizeof h));
		err = k % 2 ? CU(cuLaunchKernelEx)(&c, (CUfunction)f, NULL, extra) :
			      CU(cuLaunchKernel)((CUfunction)f, 4, 1, 1, 256, 1, 1, 0, NULL, NULL, extra);
		if (bytes[k] > sizeof w) {
			REQUIRE(err == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "%zu bytes of parameters: %d", bytes[k], (int)err);
			CHECK(cudaDeviceSynchronize());
			continue;
		}
		REQUIRE(err == CUDA_SUCCESS, "%zu bytes of parameters: %d", bytes[k], (int)err);
		CHECK(cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost));
		for (unsigned i = 0; i < n; i++)
			REQUIRE(h[i] == k + i, "%zu bytes of parameters: word %u is %u", bytes[k], i, h[i]);
		sum += h[n - 1];
	}
	CHECK(cudaFree(d));
	printf("packed: %u\n", sum);
	return pass();
}
