/*
 * steady [MS]: a small sum on every device, checked, every MS milliseconds (20) until SIGTERM. A job that
 * must notice nothing of what happens to the daemons beside it.
 */
#include "check.h"

#include <signal.h>
#include <unistd.h>
#include <vector>

static volatile sig_atomic_t stop;

static void on_term(int) { stop = 1; }

__global__ void vecadd(const float *a, const float *b, float *c, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		c[i] = a[i] + b[i];
}

int main(int argc, char **argv)
{
	const int n = 1 << 10;
	const int ms = argc > 1 ? atoi(argv[1]) : 20;
	std::vector<float> a(n), b(n), c(n);
	double longest = 0, last;
	int devices, rounds = 0;

	signal(SIGTERM, on_term);
	CHECK(cudaGetDeviceCount(&devices));
	std::vector<float *> da(devices), db(devices), dc(devices);
	for (int d = 0; d < devices; d++) {
		CHECK(cudaSetDevice(d));
		CHECK(cudaMalloc(&da[d], n * sizeof(float)));
		CHECK(cudaMalloc(&db[d], n * sizeof(float)));
		CHECK(cudaMalloc(&dc[d], n * sizeof(float)));
	}
	printf("steady: %d devices\n", devices);
	fflush(stdout);
	last = seconds();
	for (; !stop; rounds++) {
		for (int d = 0; d < devices; d++) {
			CHECK(cudaSetDevice(d));
			for (int i = 0; i < n; i++) {
				a[i] = i + d;
				b[i] = rounds % 1000;
			}
			CHECK(cudaMemcpy(da[d], a.data(), n * sizeof(float), cudaMemcpyHostToDevice));
			CHECK(cudaMemcpy(db[d], b.data(), n * sizeof(float), cudaMemcpyHostToDevice));
			vecadd<<<(n + 255) / 256, 256>>>(da[d], db[d], dc[d], n);
			CHECK(cudaGetLastError());
			CHECK(cudaMemcpy(c.data(), dc[d], n * sizeof(float), cudaMemcpyDeviceToHost));
			for (int i = 0; i < n; i++)
				REQUIRE(c[i] == a[i] + b[i], "round %d, device %d, element %d: %g", rounds, d, i, c[i]);
		}
		usleep(ms * 1000);
		if (seconds() - last > longest)
			longest = seconds() - last;
		last = seconds();
	}
	printf("steady: %d rounds, the longest %.0f ms\n", rounds, longest * 1e3);
	return pass();
}
