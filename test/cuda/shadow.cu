/*
 * The program has memory at all addresses at which the device could have any: copies that say their direction are right all the same, and one
 * that does not is refused.
 */
#include "driver.h"

#include <stdint.h>
#include <sys/mman.h>

extern "C" __global__ void shadow_add(unsigned *p, int n, unsigned by)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		p[i] += by;
}

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* Takes the addresses that the kernel gives to programs, without memory behind them. */
static void take_all(void)
{
	const uint64_t gib = 1ull << 30;

	for (uint64_t p = 0x7c0000000000; p < 0x7fff00000000; p += gib) {
		void *got = mmap((void *)p, gib, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);

		if (got != MAP_FAILED && got != (void *)p)
			munmap(got, gib);
	}
}

int main()
{
	const int n = 1 << 16;
	unsigned *d, *host;

	take_all();
	CHECK(cudaMalloc(&d, n * sizeof *d));
	host = d; /* the program's memory at the same address */
	for (int i = 0; i < n; i++)
		host[i] = i;
	CHECK(cudaMemcpy(d, host, n * sizeof *d, cudaMemcpyHostToDevice));
	shadow_add<<<n / 256, 256>>>(d, n, 5);
	CHECK(cudaGetLastError());
	CHECK(cudaDeviceSynchronize());
	REQUIRE(host[7] == 7, "the program's memory has changed: %u", host[7]);
	EXPECT_DRIVER(CU(cuMemcpy)((CUdeviceptr)(d + n / 2), (CUdeviceptr)d, 64), CUDA_ERROR_NOT_SUPPORTED);
	CHECK(cudaMemcpy(d + n / 2, d, n / 2 * sizeof *d, cudaMemcpyDeviceToDevice));
	CHECK(cudaMemcpyAsync(host, d, n * sizeof *d, cudaMemcpyDeviceToHost, 0));
	CHECK(cudaStreamSynchronize(0));
	for (int i = 0; i < n; i++)
		REQUIRE(host[i] == i % (n / 2) + 5u, "word %d is %u", i, host[i]);
	CHECK(cudaFree(d));
	printf("shadow: %d words each way\n", n);
	return pass();
}
