/* Device printf: the lines come out on the program's own stdout, before the synchronising call returns. */
#include "check.h"

extern "C" __global__ void greet(int n)
{
	for (int i = 0; i < n; i++)
		printf("printf: device line %d of %d, %s %.2f\n", i, n, i % 2 ? "odd" : "even", i * 0.25);
}

int main()
{
	printf("printf: before\n");
	fflush(stdout);
	greet<<<1, 1>>>(4);
	CHECK(cudaGetLastError());
	CHECK(cudaDeviceSynchronize());
	printf("printf: after\n");
	return pass();
}
