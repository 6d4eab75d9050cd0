/* Host threads: each with a stream, memory and results of its own, all through one context. */
#include "check.h"

#include <thread>
#include <vector>

extern "C" __global__ void step(unsigned *v, int n, unsigned add)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = v[i] * 3 + add;
}

static void work(int me, int rounds, unsigned *result)
{
	const int n = 4096;
	std::vector<unsigned> h(n);
	cudaStream_t s;
	unsigned *d, want = 0;

	CHECK(cudaSetDevice(0));
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	for (int r = 0; r < rounds; r++) {
		cudaStream_t use = r % 3 == 2 ? cudaStreamPerThread : s;

		want = 0;
		CHECK(cudaMalloc(&d, n * sizeof(unsigned)));
		CHECK(cudaMemsetAsync(d, 0, n * sizeof(unsigned), use));
		for (int i = 0; i < 8; i++) {
			step<<<(n + 127) / 128, 128, 0, use>>>(d, n, me + i);
			want = want * 3 + me + i;
		}
		CHECK(cudaGetLastError());
		CHECK(cudaMemcpyAsync(h.data(), d, n * sizeof(unsigned), cudaMemcpyDeviceToHost, use));
		CHECK(cudaStreamSynchronize(use));
		for (int i = 0; i < n; i++)
			REQUIRE(h[i] == want, "thread %d round %d element %d: %u, not %u", me, r, i, h[i], want);
		CHECK(cudaFree(d));
	}
	CHECK(cudaStreamDestroy(s));
	*result = want;
}

int main()
{
	const int threads = 6, rounds = 30;
	std::vector<std::thread> t;
	std::vector<unsigned> result(threads);
	unsigned sum = 0;

	for (int i = 0; i < threads; i++)
		t.emplace_back(work, i, rounds, &result[i]);
	for (int i = 0; i < threads; i++) {
		t[i].join();
		sum += result[i];
	}
	printf("threads: %d threads, sum %u\n", threads, sum);
	return pass();
}
