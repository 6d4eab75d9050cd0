/*
 * A program that has many maps of its own, and many small blocks of managed memory, of which it writes to every second one: together
 * more maps than the kernel allows a process, if the protection of each block needed one of its own.
 */
#include "check.h"

#include <sys/mman.h>
#include <vector>

enum { OWN = 30000, BLOCKS = 40000, PAGE = 4096 };

extern "C" __global__ void crowd_add(unsigned **v, int n, unsigned what)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		*v[i] += what;
}

/* The sum of i * *v[i], to see each of them by one number. */
extern "C" __global__ void crowd_sum(unsigned **v, int n, unsigned long long *sum)
{
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		atomicAdd(sum, (unsigned long long)i * *v[i]);
}

int main(void)
{
	std::vector<unsigned *> v(BLOCKS);
	unsigned **there;
	unsigned long long *sum, got, want = 0;
	char *own = (char *)mmap(NULL, (size_t)OWN * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	REQUIRE(own != MAP_FAILED, "no memory");
	for (int i = 1; i < OWN; i += 2)
		REQUIRE(!mprotect(own + (size_t)i * PAGE, PAGE, PROT_NONE), "map %d", i);
	for (int i = 0; i < BLOCKS; i++) {
		CHECK(cudaMallocManaged(&v[i], sizeof *v[i]));
		if (i % 2)
			*v[i] = i;
	}
	CHECK(cudaMalloc(&there, BLOCKS * sizeof *there));
	CHECK(cudaMalloc(&sum, sizeof *sum));
	CHECK(cudaMemset(sum, 0, sizeof *sum));
	CHECK(cudaMemcpy(there, v.data(), BLOCKS * sizeof *there, cudaMemcpyHostToDevice));
	crowd_add<<<64, 256>>>(there, BLOCKS, 1);
	CHECK(cudaDeviceSynchronize());
	for (int i = 0; i < BLOCKS; i += 2)
		*v[i] = 2 * i;
	for (int i = 1; i < BLOCKS; i += 64)
		REQUIRE(*v[i] == i + 1u, "block %d has %u", i, *v[i]);
	crowd_sum<<<64, 256>>>(there, BLOCKS, sum);
	CHECK(cudaMemcpy(&got, sum, sizeof got, cudaMemcpyDeviceToHost));
	for (int i = 0; i < BLOCKS; i++)
		want += (unsigned long long)i * (i % 2 ? i + 1u : 2u * i);
	REQUIRE(got == want, "the sum is %llu instead of %llu", got, want);
	printf("crowded: %d blocks\n", BLOCKS);
	return pass();
}
