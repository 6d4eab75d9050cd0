/*
 * Honest memory: what is reported free can be allocated but for one granule of 2 MiB, one byte past
 * it fails at once, and what was freed can be had again.
 *
 * memcheck [cap in MiB]: with a cap, the device's total must be just that.
 */
#include "check.h"

int main(int argc, char **argv)
{
	const size_t granule = 2 << 20;
	size_t free0, total, free1, all, left;
	cudaDeviceProp prop;
	void *p, *q;
	double t0, took;

	CHECK(cudaFree(0));
	CHECK(cudaGetDeviceProperties(&prop, 0));
	for (int round = 0; round < 3; round++) {
		CHECK(cudaMemGetInfo(&free0, &total));
		REQUIRE(total == prop.totalGlobalMem, "cudaMemGetInfo says %zu bytes, the properties %zu", total, prop.totalGlobalMem);
		REQUIRE(free0 > 2 * granule && free0 <= total, "%zu of %zu bytes free", free0, total);
		if (argc > 1)
			REQUIRE(total == (size_t)atoll(argv[1]) << 20, "the total is %zu bytes, not %s MiB", total, argv[1]);
		all = free0 - granule;
		CHECK(cudaMalloc(&p, all));
		CHECK(cudaMemset((char *)p + all - 256, 1, 256));
		CHECK(cudaMemGetInfo(&left, &total));
		REQUIRE(left <= granule, "%zu bytes are free after all but a granule was taken", left);
		t0 = seconds();
		EXPECT(cudaMalloc(&q, 2 * granule), cudaErrorMemoryAllocation);
		took = seconds() - t0;
		REQUIRE(took < 1, "the refusal took %.1f s", took);
		EXPECT(cudaGetLastError(), cudaErrorMemoryAllocation);
		EXPECT(cudaGetLastError(), cudaSuccess);
		CHECK(cudaFree(p));
		CHECK(cudaMemGetInfo(&free1, &total));
		REQUIRE(free1 == free0, "%zu bytes free before, %zu after", free0, free1);
	}
	EXPECT(cudaMalloc(&p, total + 1), cudaErrorMemoryAllocation);
	cudaGetLastError();
	printf("memcheck: what is reported free can be allocated\n");
	return pass();
}
