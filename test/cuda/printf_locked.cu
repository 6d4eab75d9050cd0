/* Device printf while the thread that synchronises holds stdout: nobody may wait for that lock but a writer. */
#include "check.h"

extern "C" __global__ void greet(int n)
{
	for (int i = 0; i < n; i++)
		printf("printf: device line %d of %d, %s %.2f\n", i, n, i % 2 ? "odd" : "even", i * 0.25);
}

int main()
{
	int *p;

	flockfile(stdout);
	printf("printf_locked: before\n");
	greet<<<1, 1>>>(2);
	CHECK(cudaGetLastError());
	CHECK(cudaMalloc(&p, 4096));
	CHECK(cudaDeviceSynchronize());
	printf("printf_locked: after\n");
	funlockfile(stdout);
	return pass();
}
