/*
 * With CUDA_LAUNCH_BLOCKING=1 a kernel or a graph has ended when its launch returns, in whatever stream, and the launch
 * returns the kernel's error; a launch into a stream that is being captured does not wait. Without it a launch returns at once.
 */
#include "check.h"

#include <string.h>

extern "C" __global__ void bl_hold(long long ns)
{
	long long t0, t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	} while (t - t0 < ns);
}

extern "C" __global__ void bl_store(int *p)
{
	*p = 1;
}

static void launch(cudaStream_t s, cudaGraphExec_t graph, bool blocking)
{
	cudaError_t after;

	if (graph) {
		CHECK(cudaGraphLaunch(graph, s));
	} else {
		bl_hold<<<1, 1, 0, s>>>(150000000ll);
		CHECK(cudaGetLastError());
	}
	after = cudaStreamQuery(s);
	REQUIRE(after == (blocking ? cudaSuccess : cudaErrorNotReady), "behind the launch: %s", cudaGetErrorName(after));
	cudaGetLastError();
	CHECK(cudaStreamSynchronize(s));
}

int main(int argc, char **argv)
{
	bool blocking = argc > 1 && !strcmp(argv[1], "blocking");
	cudaStream_t s, other;
	cudaGraphExec_t exec;
	cudaGraph_t graph;

	if (blocking)
		setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
	else
		unsetenv("CUDA_LAUNCH_BLOCKING");
	CHECK(cudaStreamCreate(&s));
	CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
	bl_hold<<<1, 1>>>(1);
	CHECK(cudaDeviceSynchronize());
	launch(s, NULL, blocking);
	if (blocking) {
		launch(0, NULL, blocking);
		launch(other, NULL, blocking);
	}
	CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
	bl_hold<<<1, 1, 0, s>>>(150000000ll);
	CHECK(cudaGetLastError());
	CHECK(cudaStreamEndCapture(s, &graph));
	CHECK(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
	launch(s, exec, blocking);
	bl_store<<<1, 1, 0, s>>>((int *)16);
	EXPECT(cudaGetLastError(), blocking ? cudaErrorIllegalAddress : cudaSuccess);
	EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
	printf("blocking: %s\n", blocking ? "each launch waits" : "no launch waits");
	return pass();
}
