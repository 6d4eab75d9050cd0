/*
 * longwait MS MIB: a kernel of MS milliseconds, and copies of MIB MiB behind it in the same stream, more than the worker takes in while the
 * kernel runs. They arrive.
 */
#include "check.h"

#include <stdlib.h>
#include <string.h>

LASTING(minute)

int main(int argc, char **argv)
{
	long long ms = argc > 1 ? atoll(argv[1]) : 100;
	size_t n = (size_t)(argc > 2 ? atoi(argv[2]) : 8) << 20;
	unsigned char *from = (unsigned char *)malloc(n), *back = (unsigned char *)malloc(n);
	cudaStream_t s;
	void *d;

	for (size_t i = 0; i < n; i++)
		from[i] = (unsigned char)(i * 2654435761u >> 13);
	CHECK(cudaMalloc(&d, n));
	CHECK(cudaStreamCreate(&s));
	minute<<<1, 1, 0, s>>>(ms * 1000000);
	CHECK(cudaMemcpyAsync(d, from, n, cudaMemcpyHostToDevice, s));
	CHECK(cudaStreamSynchronize(s));
	CHECK(cudaMemcpy(back, d, n, cudaMemcpyDeviceToHost));
	REQUIRE(!memcmp(from, back, n), "the copy is wrong");
	printf("longwait: the copies arrive\nPASS\n");
	return 0;
}
