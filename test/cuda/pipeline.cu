/*
 * pipeline [fault]: a ring of work, as programs overlap copies and kernels: each item is a kernel, a copy to the
 * host and an event, and the program waits for the oldest item while newer ones are under way. What an event says
 * is done must be there. fault: after a while a kernel writes to a wild address; the wait must say so.
 */
#include "check.h"

#include <string.h>

enum { DEPTH = 8, ROUNDS = 600, N = 1024, WAITING = 600 };

/* All of v to the host, after some time. */
extern "C" __global__ void stage(int *v, int n, int what, long long ns)
{
	long long t0, t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	} while (t - t0 < ns);
	for (int i = threadIdx.x; i < n; i += blockDim.x)
		v[i] = what + i;
}

static cudaStream_t stream[2];
static cudaEvent_t done[DEPTH];
static int *device[DEPTH], *host[DEPTH];

static void give(int i)
{
	int k = i % DEPTH;

	stage<<<1, 256, 0, stream[i % 2]>>>(device[k], N, i, 20000);
	CHECK(cudaMemcpyAsync(host[k], device[k], N * sizeof(int), cudaMemcpyDeviceToHost, stream[i % 2]));
	CHECK(cudaEventRecord(done[k], stream[i % 2]));
}

/* Every third by asking again and again. */
static void take(int i)
{
	int k = i % DEPTH;
	cudaError_t err;

	if (i % 3)
		CHECK(cudaEventSynchronize(done[k]));
	else
		while ((err = cudaEventQuery(done[k])))
			REQUIRE(err == cudaErrorNotReady, "item %d: %s", i, cudaGetErrorName(err));
	for (int j = 0; j < N; j++)
		REQUIRE(host[k][j] == i + j, "item %d: place %d has %d", i, j, host[k][j]);
	memset(host[k], 0, N * sizeof(int));
}

/* An event stands for its newest record, and those recorded before that one do not wait for it. */
static void anew(void)
{
	const long long ms = 1000000;
	double t0;

	for (int round = 0; round < 3; round++) {
		CHECK(cudaEventRecord(done[0], stream[0]));
		stage<<<1, 256, 0, stream[0]>>>(device[1], N, 0, 2 * ms);
		CHECK(cudaEventRecord(done[1], stream[0]));
		stage<<<1, 256, 0, stream[0]>>>(device[0], N, 0, WAITING * ms);
		CHECK(cudaEventRecord(done[0], stream[0]));
		stage<<<1, 256, 0, stream[0]>>>(device[0], N, 0, 1000);
		t0 = seconds();
		CHECK(cudaEventSynchronize(done[1]));
		REQUIRE(seconds() - t0 < WAITING * 1e-3 / 2, "an event waited for another's newer record, %.3f s", seconds() - t0);
		EXPECT(cudaEventQuery(done[0]), cudaErrorNotReady);
		CHECK(cudaEventSynchronize(done[0]));
		CHECK(cudaStreamSynchronize(stream[0]));
	}
}

/* An event whose last record is not done yet may be recorded in a capture, and is the capture's from then on. */
static void captured(void)
{
	const long long ms = 1000000;
	cudaGraphExec_t exec;
	cudaGraph_t graph;

	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < 3; i++) {
			CHECK(cudaEventRecord(done[0], stream[0]));
			stage<<<1, 256, 0, stream[0]>>>(device[0], N, 0, 1000);
			CHECK(cudaEventSynchronize(done[0]));
		}
		stage<<<1, 256, 0, stream[0]>>>(device[0], N, 0, 20 * ms);
		CHECK(cudaEventRecord(done[0], stream[0]));
		CHECK(cudaStreamBeginCapture(stream[1], cudaStreamCaptureModeThreadLocal));
		stage<<<1, 256, 0, stream[1]>>>(device[1], N, round, 1000);
		CHECK(cudaEventRecord(done[0], stream[1]));
		stage<<<1, 256, 0, stream[1]>>>(device[2], N, round, 1000);
		CHECK(cudaStreamEndCapture(stream[1], &graph));
		CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
		CHECK(cudaGraphLaunch(exec, stream[1]));
		CHECK(cudaStreamSynchronize(stream[1]));
		CHECK(cudaGraphExecDestroy(exec));
		CHECK(cudaGraphDestroy(graph));
		CHECK(cudaStreamSynchronize(stream[0]));
	}
}

static int fault(void)
{
	cudaError_t err;

	stage<<<1, 256, 0, stream[0]>>>((int *)0x10, 1, 0, 1000000);
	CHECK(cudaEventRecord(done[0], stream[0]));
	stage<<<1, 256, 0, stream[0]>>>(device[1], N, 0, 1000);
	err = cudaEventSynchronize(done[0]);
	REQUIRE(err == cudaErrorIllegalAddress, "%s", cudaGetErrorName(err));
	EXPECT(cudaEventQuery(done[0]), cudaErrorIllegalAddress);
	printf("pipeline: a wait tells of the wild address\n");
	return pass();
}

int main(int argc, char **argv)
{
	for (int i = 0; i < 2; i++)
		CHECK(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
	for (int k = 0; k < DEPTH; k++) {
		CHECK(cudaEventCreateWithFlags(&done[k], cudaEventDisableTiming));
		CHECK(cudaMalloc(&device[k], N * sizeof(int)));
		CHECK(cudaMallocHost(&host[k], N * sizeof(int)));
	}
	for (int i = 0; i < ROUNDS; i++) {
		if (i >= DEPTH)
			take(i - DEPTH);
		give(i);
	}
	for (int i = ROUNDS - DEPTH; i < ROUNDS; i++)
		take(i);
	if (argc > 1 && !strcmp(argv[1], "fault"))
		return fault();
	anew();
	captured();
	/* gone while the other side may still be looking for it */
	give(0);
	give(1);
	CHECK(cudaEventDestroy(done[0]));
	CHECK(cudaEventDestroy(done[1]));
	CHECK(cudaDeviceSynchronize());
	/* and all that they belong to */
	give(2);
	give(3);
	CHECK(cudaDeviceReset());
	CHECK(cudaMalloc(&device[0], N * sizeof(int)));
	CHECK(cudaDeviceSynchronize());
	printf("pipeline: %d items, each there when its event said so\n", ROUNDS);
	return pass();
}
