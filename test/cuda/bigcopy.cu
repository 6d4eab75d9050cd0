/* bigcopy [MiB, default 5120]: one cudaMemcpy each way of more than 4 GiB, checked on both sides. */
#include "check.h"

#include <stdint.h>
#include <sys/mman.h>

__host__ __device__ static inline uint64_t pattern(uint64_t i)
{
	return i * 0x9e3779b97f4a7c15ull ^ (i >> 7);
}

/* check_flip: count the words that are not the pattern, then turn every bit over. */
extern "C" __global__ void check_flip(uint64_t *v, uint64_t n, unsigned long long *wrong)
{
	for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
		if (v[i] != pattern(i))
			atomicAdd(wrong, 1ull);
		v[i] = ~v[i];
	}
}

int main(int argc, char **argv)
{
	const size_t mib = argc > 1 ? atoll(argv[1]) : 5120, size = (mib << 20) + 24, n = size / 8;
	unsigned long long *dwrong, wrong = 0;
	uint64_t *h, *d, sum = 0;

	h = (uint64_t *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	REQUIRE(h != MAP_FAILED, "no memory on the host");
	for (size_t i = 0; i < n; i++)
		h[i] = pattern(i);
	CHECK(cudaMalloc(&d, size));
	CHECK(cudaMalloc(&dwrong, sizeof *dwrong));
	CHECK(cudaMemset(dwrong, 0, sizeof *dwrong));
	CHECK(cudaMemcpy(d, h, size, cudaMemcpyHostToDevice));
	check_flip<<<512, 256>>>(d, n, dwrong);
	CHECK(cudaGetLastError());
	CHECK(cudaMemcpy(&wrong, dwrong, sizeof wrong, cudaMemcpyDeviceToHost));
	REQUIRE(!wrong, "%llu words arrived wrong on the device", wrong);
	CHECK(cudaMemcpy(h, d, size, cudaMemcpyDeviceToHost));
	for (size_t i = 0; i < n; i++) {
		REQUIRE(h[i] == ~pattern(i), "word %zu came back as %016llx", i, (unsigned long long)h[i]);
		sum += h[i];
	}
	CHECK(cudaFree(d));
	printf("bigcopy: %zu bytes each way, sum %016llx\n", size, (unsigned long long)sum);
	return pass();
}
