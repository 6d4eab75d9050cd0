/*
 * churn: work without an end - allocations, copies both ways, kernels, events, two threads - until
 * somebody kills it or a call fails; then it names the error and exits with status 3 within a moment.
 */
#include "check.h"

#include <string.h>
#include <thread>
#include <unistd.h>
#include <vector>

extern "C" __global__ void churn_step(unsigned *v, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] += i;
}

static void end_on(cudaError_t err, const char *what)
{
	if (err == cudaSuccess)
		return;
	printf("churn: %s: %s\n", what, cudaGetErrorName(err));
	fflush(stdout);
	_exit(3);
}

#define DO(call) end_on(call, #call)

static void churn(int me)
{
	const int n = 256 << 10;
	std::vector<unsigned> plain(n);
	unsigned *d, *pinned, want = 0;
	cudaStream_t s;
	cudaEvent_t e;

	DO(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	DO(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
	DO(cudaMallocHost(&pinned, n * sizeof *pinned));
	for (unsigned round = 1;; round++) {
		DO(cudaMalloc(&d, n * sizeof *d * (1 + round % 3)));
		DO(cudaMemcpyAsync(d, plain.data(), n * sizeof *d, cudaMemcpyHostToDevice, s));
		for (int i = 0; i < 20; i++)
			churn_step<<<n / 256, 256, 0, s>>>(d, n);
		DO(cudaGetLastError());
		DO(cudaMemcpyAsync(pinned, d, n * sizeof *d, cudaMemcpyDeviceToHost, s));
		DO(cudaEventRecord(e, s));
		DO(cudaEventSynchronize(e));
		want = plain[n - 1] + 20u * (n - 1);
		REQUIRE(pinned[n - 1] == want, "thread %d round %u: %u, not %u", me, round, pinned[n - 1], want);
		DO(cudaMemcpy(plain.data(), d, n * sizeof *d, cudaMemcpyDeviceToHost));
		DO(cudaFree(d));
		if (!me && round == 1) {
			printf("churn: running\n");
			fflush(stdout);
		}
	}
}

int main()
{
	std::thread second(churn, 1);

	churn(0);
	second.join();
	return 0;
}
