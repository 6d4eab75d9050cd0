/* Vector addition: the smallest program that allocates, copies, launches and reads back. */
#include "check.h"

#include <vector>

__global__ void vecadd(const float *a, const float *b, float *c, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		c[i] = a[i] + b[i];
}

int main()
{
	const int n = 1 << 20;
	std::vector<float> a(n), b(n), c(n);
	float *da, *db, *dc;
	double sum = 0;

	for (int i = 0; i < n; i++) {
		a[i] = i % 1000;
		b[i] = 2 * (i % 777);
	}
	CHECK(cudaMalloc(&da, n * sizeof(float)));
	CHECK(cudaMalloc(&db, n * sizeof(float)));
	CHECK(cudaMalloc(&dc, n * sizeof(float)));
	CHECK(cudaMemcpy(da, a.data(), n * sizeof(float), cudaMemcpyHostToDevice));
	CHECK(cudaMemcpy(db, b.data(), n * sizeof(float), cudaMemcpyHostToDevice));
	vecadd<<<(n + 255) / 256, 256>>>(da, db, dc, n);
	CHECK(cudaGetLastError());
	CHECK(cudaMemcpy(c.data(), dc, n * sizeof(float), cudaMemcpyDeviceToHost));
	for (int i = 0; i < n; i++) {
		REQUIRE(c[i] == a[i] + b[i], "element %d: %g + %g came back as %g", i, a[i], b[i], c[i]);
		sum += c[i];
	}
	CHECK(cudaFree(da));
	CHECK(cudaFree(db));
	CHECK(cudaFree(dc));
	printf("vecadd: n=%d sum=%.0f\n", n, sum);
	return pass();
}
