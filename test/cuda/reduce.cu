/*
 * Reduction in shared memory: static and dynamic shared memory, more than 48 KiB of it after
 * cudaFuncSetAttribute, a template kernel, a __device__ and a __constant__ variable.
 */
#include "check.h"

#include <vector>

__device__ unsigned long long total;
__constant__ int weight;

template <typename T> __global__ void reduce(const T *in, T *out, int n)
{
	__shared__ T part[256];
	T sum = 0;

	for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256)
		sum += in[i];
	part[threadIdx.x] = sum;
	__syncthreads();
	for (int half = 128; half; half /= 2) {
		if (threadIdx.x < half)
			part[threadIdx.x] += part[threadIdx.x + half];
		__syncthreads();
	}
	if (!threadIdx.x)
		out[blockIdx.x] = part[0];
}

extern "C" __global__ void reduce_dynamic(const int *in, int n, int words)
{
	extern __shared__ int wide[];
	long long sum = 0;

	for (int i = threadIdx.x; i < words; i += blockDim.x)
		wide[i] = i < n ? in[i] : 0;
	__syncthreads();
	if (!threadIdx.x) {
		for (int i = 0; i < words; i++)
			sum += wide[i];
		atomicAdd(&total, (unsigned long long)(sum * weight));
	}
}

int main()
{
	const int n = 1000003, blocks = 64, wide = 60 * 1024, words = wide / 4;
	std::vector<int> in(n), out(blocks);
	std::vector<double> din(n), dout(blocks);
	long long want = 0, got = 0, head = 0;
	unsigned long long sum;
	int *d, *dpart, three = 3, most = 0;
	double *dd, *ddpart, fsum = 0;
	cudaFuncAttributes attr;

	for (int i = 0; i < n; i++) {
		in[i] = i % 1013 - 500;
		din[i] = in[i] * 0.25;
		want += in[i];
		if (i < words)
			head += in[i];
	}
	CHECK(cudaMalloc(&d, n * sizeof(int)));
	CHECK(cudaMalloc(&dpart, blocks * sizeof(int)));
	CHECK(cudaMalloc(&dd, n * sizeof(double)));
	CHECK(cudaMalloc(&ddpart, blocks * sizeof(double)));
	CHECK(cudaMemcpy(d, in.data(), n * sizeof(int), cudaMemcpyHostToDevice));
	CHECK(cudaMemcpy(dd, din.data(), n * sizeof(double), cudaMemcpyHostToDevice));
	reduce<int><<<blocks, 256>>>(d, dpart, n);
	reduce<double><<<blocks, 256>>>(dd, ddpart, n);
	CHECK(cudaMemcpy(out.data(), dpart, blocks * sizeof(int), cudaMemcpyDeviceToHost));
	CHECK(cudaMemcpy(dout.data(), ddpart, blocks * sizeof(double), cudaMemcpyDeviceToHost));
	for (int i = 0; i < blocks; i++) {
		got += out[i];
		fsum += dout[i];
	}
	REQUIRE(got == want, "the sum is %lld, not %lld", got, want);
	REQUIRE(fsum == want * 0.25, "the sum is %f, not %f", fsum, want * 0.25);

	CHECK(cudaFuncGetAttributes(&attr, reduce<int>));
	REQUIRE(attr.sharedSizeBytes == 1024, "%zu bytes of static shared memory reported", attr.sharedSizeBytes);
	CHECK(cudaMemcpyToSymbol(weight, &three, sizeof three));
	CHECK(cudaFuncSetAttribute(reduce_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, wide));
	CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, reduce_dynamic, 128, wide));
	REQUIRE(most >= 1, "no block of %d bytes fits", wide);
	reduce_dynamic<<<1, 128, wide>>>(d, n, words);
	CHECK(cudaGetLastError());
	CHECK(cudaMemcpyFromSymbol(&sum, total, sizeof sum));
	REQUIRE((long long)sum == 3 * head, "the weighted sum is %lld, not %lld", (long long)sum, 3 * head);
	printf("reduce: int=%lld double=%.2f wide=%lld\n", got, fsum, (long long)sum);
	return pass();
}
