/*
 * Managed variables: the program and kernels use them by their names. Small ones share a page.
 */
#include "check.h"

#include <string.h>

enum { MANY = 300000 };

struct mv_pair {
	struct mv_pair *other;
	unsigned value;
};

__managed__ unsigned mv_count = 41;
__managed__ unsigned mv_words[700] = { 7, 8, 9 };
__managed__ struct mv_pair mv_first, mv_second;
__managed__ unsigned mv_many[MANY];
__device__ unsigned mv_plain = 5;

extern "C" __global__ void mv_use(unsigned what)
{
	mv_count += what;
	mv_words[2] += mv_plain;
	mv_first.other->value++;
	for (int i = 0; i < MANY; i++)
		mv_many[i] += i;
}

int main()
{
	cudaPointerAttributes a;
	unsigned seen = 0, *p;

	REQUIRE(mv_count == 41 && mv_words[1] == 8 && mv_words[699] == 0, "at the start: %u %u %u", mv_count, mv_words[1], mv_words[699]);
	mv_first.other = &mv_second;
	mv_second.other = &mv_first;
	mv_second.value = 3;
	for (unsigned round = 0; round < 3; round++) {
		mv_words[0] = round;
		mv_many[MANY - 1] = round;
		mv_use<<<1, 1>>>(round);
		CHECK(cudaDeviceSynchronize());
		REQUIRE(mv_count == 41 + round * (round + 1) / 2 && mv_words[2] == 9 + 5 * (round + 1) && mv_words[0] == round, "round %u: %u %u %u", round,
			mv_count, mv_words[2], mv_words[0]);
		REQUIRE(mv_second.value == 4 + round && mv_first.other == &mv_second, "round %u: the second of a pair is %u", round, mv_second.value);
		REQUIRE(mv_many[MANY - 1] == MANY - 1 + round && mv_many[1] == round + 1, "round %u: %u %u", round, mv_many[MANY - 1], mv_many[1]);
	}
	CHECK(cudaGetSymbolAddress((void **)&p, mv_count));
	REQUIRE(p == &mv_count, "its address is %p for the device and %p for the program", (void *)p, (void *)&mv_count);
	CHECK(cudaPointerGetAttributes(&a, &mv_count));
	REQUIRE(a.type == cudaMemoryTypeManaged, "its memory is of type %d", (int)a.type);
	CHECK(cudaMemcpyFromSymbol(&seen, mv_count, sizeof seen));
	REQUIRE(seen == 44, "a copy of it is %u", seen);
	seen = 100;
	CHECK(cudaMemcpyToSymbol(mv_count, &seen, sizeof seen));
	CHECK(cudaDeviceSynchronize());
	REQUIRE(mv_count == 100, "after a copy to it, it is %u", mv_count);
	CHECK(cudaMemset(mv_words, 0, sizeof mv_words));
	CHECK(cudaDeviceSynchronize());
	REQUIRE(mv_words[2] == 0 && mv_count == 100, "after a fill: %u %u", mv_words[2], mv_count);
	printf("managedvar: %u\n", mv_count);
	return pass();
}
