/*
 * pipeline [fault|shared|gone]: a ring of work, as programs overlap copies and kernels: each item is a kernel, a
 * copy to the host and an event, and the program waits for the oldest item while newer ones are under way. What an
 * event says is done must be there. fault: after a while a kernel writes to a wild address; the wait must say so.
 * shared: two threads record one event, a third waits for it. gone: the event goes while a thread waits for it,
 * which CUDA leaves open and some drivers may not survive: the wait ends, and nothing else does. And two threads
 * destroy one event, or one stream: it goes once.
 */
#include "check.h"

#include <atomic>
#include <string.h>
#include <thread>
#include <unistd.h>

enum { DEPTH = 8, ROUNDS = 600, N = 1024, WAITING = 600, SHARED = 1500, GONE = 60, TWICE = 500 };

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

/*
 * An event stands for its newest record, and those recorded before that one do not wait for it: the first is done while the second is not.
 * A machine that is busy, or a cut of the connection, may be late to see that, so there are several rounds.
 */
static void anew(void)
{
	const long long ms = 1000000;
	int seen = 0;

	for (int round = 0; round < 10 && seen < 3; round++) {
		cudaError_t err;

		CHECK(cudaEventRecord(done[0], stream[0]));
		stage<<<1, 256, 0, stream[0]>>>(device[1], N, 0, 2 * ms);
		CHECK(cudaEventRecord(done[1], stream[0]));
		stage<<<1, 256, 0, stream[0]>>>(device[0], N, 0, WAITING * ms);
		CHECK(cudaEventRecord(done[0], stream[0]));
		stage<<<1, 256, 0, stream[0]>>>(device[0], N, 0, 1000);
		CHECK(cudaEventSynchronize(done[1]));
		err = cudaEventQuery(done[0]);
		REQUIRE(!err || err == cudaErrorNotReady, "%s", cudaGetErrorName(err));
		seen += err == cudaErrorNotReady;
		CHECK(cudaEventSynchronize(done[0]));
		CHECK(cudaStreamSynchronize(stream[0]));
	}
	REQUIRE(seen, "an event waited for another's newer record in each of ten rounds");
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

/* What a wait for the stream has covered is done for a query too, also where two threads have used the stream. */
static void covered(void)
{
	cudaStream_t s;
	cudaError_t err;

	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	std::thread([=] { CHECK(cudaMemsetAsync(device[1], 0, sizeof(int), s)); }).join();
	for (int round = 0; round < 20; round++) {
		stage<<<1, 256, 0, s>>>(device[0], N, 0, round % 3 * 200000);
		CHECK(cudaEventRecord(done[0], s));
		err = cudaEventQuery(done[0]);
		REQUIRE(!err || err == cudaErrorNotReady, "%s", cudaGetErrorName(err));
		CHECK(cudaStreamSynchronize(s));
		CHECK(cudaEventQuery(done[0]));
	}
	CHECK(cudaStreamDestroy(s));
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

/* One thread's items, in a stream of its own, each recorded in the event that is both threads'. */
static void record(int k, std::atomic<int> *given, std::atomic<int> *left)
{
	cudaStream_t s = stream[k];

	for (int i = 0; i < k * 200; i++) /* the streams are not to be at the same place */
		CHECK(cudaMemsetAsync(device[k], 0, sizeof(int), s));
	CHECK(cudaStreamSynchronize(s));
	for (int i = 1; i <= SHARED; i++) {
		stage<<<1, 1, 0, s>>>(device[k], 1, i, 20000);
		CHECK(cudaMemcpyAsync(host[k], device[k], sizeof(int), cudaMemcpyDeviceToHost, s));
		CHECK(cudaEventRecord(done[0], s));
		*given = i;
		if (i % (3 + k) == 0)
			CHECK(cudaStreamSynchronize(s));
	}
	CHECK(cudaStreamSynchronize(s));
	--*left;
}

/* Whichever record is the newest: those of one thread, at least, are done as far as they had been given. */
static int shared(void)
{
	std::atomic<int> given[2], left(2);
	volatile int *there[2] = { host[0], host[1] };
	std::thread thread[2];
	cudaError_t err;

	for (int k = 0; k < 2; k++) {
		given[k] = *there[k] = 0;
		thread[k] = std::thread(record, k, &given[k], &left);
	}
	for (int i = 0; left; i++) {
		int a = given[0], b = given[1];

		err = i % 4 ? cudaEventQuery(done[0]) : cudaEventSynchronize(done[0]);
		REQUIRE(!err || (i % 4 && err == cudaErrorNotReady), "%s", cudaGetErrorName(err));
		if (!err)
			REQUIRE(*there[0] >= a || *there[1] >= b, "done, with %d of %d there and %d of %d", *there[0], a, *there[1], b);
	}
	for (int k = 0; k < 2; k++)
		thread[k].join();
	CHECK(cudaEventQuery(done[0]));
	REQUIRE(*there[0] == SHARED && *there[1] == SHARED, "%d and %d", *there[0], *there[1]);
	printf("pipeline: an event of two threads, %d records each\n", SHARED);
	return pass();
}

static void make(void)
{
	for (int i = 0; i < 2; i++)
		CHECK(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
	for (int k = 0; k < DEPTH; k++) {
		CHECK(cudaEventCreateWithFlags(&done[k], cudaEventDisableTiming));
		CHECK(cudaMalloc(&device[k], N * sizeof(int)));
		CHECK(cudaMallocHost(&host[k], N * sizeof(int)));
	}
}

static void destroy(void)
{
	CHECK(cudaEventDestroy(done[0]));
	CHECK(cudaEventCreateWithFlags(&done[0], cudaEventDisableTiming));
}

static void reset(void)
{
	CHECK(cudaDeviceReset());
	make();
}

/* Another event comes where one has gone: it is done when its own item is. */
static void gone(void (*go)(void), int round)
{
	std::atomic<bool> waits(false);
	cudaEvent_t e = done[0];

	for (int i = 0; i < 4; i++) {
		stage<<<1, 256, 0, stream[0]>>>(device[0], N, 0, i < 3 ? 1000 : 3000000);
		CHECK(cudaEventRecord(e, stream[0]));
		stage<<<1, 256, 0, stream[0]>>>(device[0], N, 0, 1000);
		if (i < 3)
			CHECK(cudaEventSynchronize(e));
	}
	std::thread thread([&] {
		waits = true;
		cudaEventSynchronize(e);
	});
	while (!waits)
		;
	usleep(round % 4 * 200);
	go();
	give(round * DEPTH);
	take(round * DEPTH);
	thread.join();
}

template <class T> static void twice(cudaError_t (*create)(T *), cudaError_t (*destroy)(T))
{
	std::atomic<int> there(0), went(0);
	T made;

	CHECK(create(&made));
	auto go = [&] {
		there++;
		while (there < 2)
			;
		went += destroy(made) == cudaSuccess;
	};
	std::thread other(go);
	go();
	other.join();
	REQUIRE(went == 1, "destroyed %d times", (int)went);
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "";

	make();
	if (!strcmp(how, "shared"))
		return shared();
	if (!strcmp(how, "gone")) {
		for (int round = 0; round < GONE; round++)
			gone(round % 10 ? destroy : reset, round);
		for (int round = 0; round < TWICE; round++) {
			twice<cudaEvent_t>(cudaEventCreate, cudaEventDestroy);
			twice<cudaStream_t>(cudaStreamCreate, cudaStreamDestroy);
		}
		CHECK(cudaDeviceSynchronize());
		printf("pipeline: %d events gone under a wait\n", GONE);
		return pass();
	}
	for (int i = 0; i < ROUNDS; i++) {
		if (i >= DEPTH)
			take(i - DEPTH);
		give(i);
	}
	for (int i = ROUNDS - DEPTH; i < ROUNDS; i++)
		take(i);
	if (!strcmp(how, "fault"))
		return fault();
	anew();
	captured();
	covered();
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
