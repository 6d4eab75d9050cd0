/* Graphs: captured from two streams, replayed, cloned; and a capture that is spoilt. */
#include "check.h"

extern "C" __global__ void affine(int *v, int n, int mul, int add)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = v[i] * mul + add;
}

int main()
{
	const int n = 1024;
	int *a, *b, h[n], first;
	cudaStream_t s, t;
	cudaEvent_t fork, join;
	cudaGraph_t graph, clone;
	cudaGraphExec_t exec, exec2;
	cudaStreamCaptureStatus status;
	size_t nodes;

	CHECK(cudaMalloc(&a, n * sizeof(int)));
	CHECK(cudaMalloc(&b, n * sizeof(int)));
	CHECK(cudaMemset(a, 0, n * sizeof(int)));
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	CHECK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
	CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
	CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
	CHECK(cudaDeviceSynchronize());

	CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
	affine<<<n / 128, 128, 0, s>>>(a, n, 1, 1);
	CHECK(cudaEventRecord(fork, s));
	CHECK(cudaStreamWaitEvent(t, fork, 0));
	CHECK(cudaMemsetAsync(b, 0, n * sizeof(int), t));
	affine<<<n / 128, 128, 0, t>>>(b, n, 1, 5);
	CHECK(cudaEventRecord(join, t));
	affine<<<n / 128, 128, 0, s>>>(a, n, 1, 2);
	CHECK(cudaStreamIsCapturing(s, &status));
	REQUIRE(status == cudaStreamCaptureStatusActive, "the stream's capture status is %d", (int)status);
	CHECK(cudaStreamWaitEvent(s, join, 0));
	CHECK(cudaStreamEndCapture(s, &graph));
	CHECK(cudaGraphGetNodes(graph, NULL, &nodes));
	REQUIRE(nodes == 4, "%zu nodes were captured, not 4", nodes);
	CHECK(cudaMemcpy(h, a, sizeof h, cudaMemcpyDeviceToHost));
	REQUIRE(h[0] == 0, "capturing ran a kernel");
#if CUDART_VERSION >= 12000
	CHECK(cudaGraphInstantiate(&exec, graph, 0));
#else
	CHECK(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
#endif
	for (int i = 0; i < 10; i++)
		CHECK(cudaGraphLaunch(exec, s));
	CHECK(cudaStreamSynchronize(s));
	CHECK(cudaMemcpy(h, a, sizeof h, cudaMemcpyDeviceToHost));
	for (int i = 0; i < n; i++)
		REQUIRE(h[i] == 30, "element %d is %d after ten replays, not 30", i, h[i]);
	first = h[0];
	CHECK(cudaMemcpy(h, b, sizeof h, cudaMemcpyDeviceToHost));
	for (int i = 0; i < n; i++)
		REQUIRE(h[i] == 5, "element %d of the side stream is %d, not 5", i, h[i]);

	/* a captured graph may be instantiated again, and its clone too */
	CHECK(cudaGraphClone(&clone, graph));
#if CUDART_VERSION >= 12000
	CHECK(cudaGraphInstantiate(&exec2, clone, 0));
#else
	CHECK(cudaGraphInstantiate(&exec2, clone, NULL, NULL, 0));
#endif
	CHECK(cudaGraphDestroy(graph));
	CHECK(cudaGraphLaunch(exec2, t));
	CHECK(cudaGraphLaunch(exec2, t));
	CHECK(cudaStreamSynchronize(t));
	CHECK(cudaMemcpy(h, a, sizeof h, cudaMemcpyDeviceToHost));
	REQUIRE(h[0] == 36 && h[n - 1] == 36, "the clone made %d and %d, not 36", h[0], h[n - 1]);

	/* a capture that is spoilt says so, and the stream is usable again */
	CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
	EXPECT(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
	EXPECT(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
	cudaGetLastError();
	affine<<<n / 128, 128, 0, s>>>(a, n, 0, 7);
	CHECK(cudaStreamSynchronize(s));

	CHECK(cudaGraphExecDestroy(exec));
	CHECK(cudaGraphExecDestroy(exec2));
	CHECK(cudaGraphDestroy(clone));
	printf("graph: replayed %d, cloned %d\n", first, h[0]);
	return pass();
}
