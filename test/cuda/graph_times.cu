/*
 * What a benchmark of graphs does: it times launches of a captured graph by events, into an idle stream,
 * behind a kernel that still runs, and after an upload in another stream. Each time must be more than
 * nothing, and the graph's kernels must have run as often as it was launched. With "pinned" the kernel
 * in front reports into pinned memory by the host's own pointer, and waits for a word in it.
 */
#include "check.h"

#include <string.h>

struct report {
	long long took;
	int timed_out;
	volatile int latch;
};

extern "C" __global__ void graph_times_step(int *count)
{
	++*count;
}

/* Waits for the latch, for so long at most. */
extern "C" __global__ void graph_times_hold(long long ns, struct report *r)
{
	long long t0, t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	} while (t - t0 < ns && !r->latch);
	r->took = t - t0;
	r->timed_out = !r->latch;
}

static cudaStream_t s[2];
static cudaEvent_t from, to, uploaded;
static int *count, launches;
static struct report *report; /* what the kernel writes */
static bool pinned;

static const int length = 20;
static const long long limit = 20000000; /* ns */

static cudaGraph_t captured(void)
{
	cudaGraph_t g;

	CHECK(cudaStreamBeginCapture(s[0], cudaStreamCaptureModeGlobal));
	for (int i = 0; i < length; i++)
		graph_times_step<<<1, 1, 0, s[0]>>>(count);
	CHECK(cudaGetLastError());
	CHECK(cudaStreamEndCapture(s[0], &g));
	return g;
}

/* Launches the graph between two events and lets go of the kernel in front, if there is one. */
static void timed(cudaGraphExec_t e, bool busy, const char *what)
{
	float ms = -1;

	if (busy) {
		graph_times_hold<<<1, 1, 0, s[0]>>>(limit, report);
		CHECK(cudaGetLastError());
	}
	CHECK(cudaEventRecord(from, s[0]));
	CHECK(cudaGraphLaunch(e, s[0]));
	CHECK(cudaEventRecord(to, s[0]));
	launches++;
	if (busy && pinned)
		report->latch = 1;
	CHECK(cudaStreamSynchronize(s[0]));
	CHECK(cudaEventElapsedTime(&ms, from, to));
	REQUIRE(ms > 0 && ms < 10000, "%s took %g ms", what, ms);
	if (busy && pinned) {
		REQUIRE(report->took > 0, "the kernel in front reported nothing");
		memset((void *)report, 0, sizeof *report);
	}
}

int main(int argc, char **argv)
{
	cudaGraphExec_t e;
	cudaGraph_t g;
	float ms = -1;
	int ran;

	pinned = argc > 1 && !strcmp(argv[1], "pinned");
	CHECK(cudaMalloc(&count, sizeof *count));
	CHECK(cudaMemset(count, 0, sizeof *count));
	if (pinned) {
		CHECK(cudaMallocHost(&report, sizeof *report));
		memset((void *)report, 0, sizeof *report);
	} else {
		CHECK(cudaMalloc(&report, sizeof *report));
		CHECK(cudaMemset(report, 0, sizeof *report));
	}
	CHECK(cudaStreamCreate(&s[0]));
	CHECK(cudaStreamCreate(&s[1]));
	CHECK(cudaEventCreate(&from));
	CHECK(cudaEventCreate(&to));
	CHECK(cudaEventCreateWithFlags(&uploaded, cudaEventDisableTiming));
	g = captured();
	CHECK(cudaGraphInstantiateWithFlags(&e, g, 0));
	timed(e, false, "the first launch");
	timed(e, true, "a launch behind a kernel");

	CHECK(cudaGraphExecDestroy(e));
	CHECK(cudaGraphInstantiateWithFlags(&e, g, 0));
	CHECK(cudaEventRecord(from, s[1]));
	CHECK(cudaGraphUpload(e, s[1]));
	CHECK(cudaEventRecord(to, s[1]));
	CHECK(cudaEventRecord(uploaded, s[1]));
	CHECK(cudaStreamWaitEvent(s[0], uploaded, 0));
	CHECK(cudaGraphLaunch(e, s[0]));
	launches++;
	CHECK(cudaEventSynchronize(uploaded));
	CHECK(cudaStreamSynchronize(s[0]));
	CHECK(cudaEventElapsedTime(&ms, from, to));
	REQUIRE(ms >= 0 && ms < 10000, "the upload took %g ms", ms);
	timed(e, true, "a launch after an upload");

	CHECK(cudaMemcpy(&ran, count, sizeof ran, cudaMemcpyDeviceToHost));
	REQUIRE(ran == launches * length, "%d kernels ran in %d launches", ran, launches);
	CHECK(cudaGraphExecDestroy(e));
	CHECK(cudaGraphDestroy(g));
	printf("graph_times: %d launches, %d kernels, each time is more than nothing\n", launches, ran);
	return pass();
}
