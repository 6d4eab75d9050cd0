/*
 * Streams and events: kernels in different streams overlap, work in one stream keeps its order,
 * events order streams against each other, are polled and timed, and host functions run in turn.
 */
#include "check.h"

#include <atomic>

extern "C" __global__ void spin(int *flag, int value, long long ns)
{
	long long t0, t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	} while (t - t0 < ns);
	*flag = value;
}

extern "C" __global__ void add_to(int *to, const int *from, int factor)
{
	*to = *to * factor + *from;
}

static std::atomic<int> hostCalls;

static void CUDART_CB count(void *arg)
{
	hostCalls += *(int *)arg;
}

static void CUDART_CB counted(cudaStream_t, cudaError_t err, void *arg)
{
	if (err == cudaSuccess)
		hostCalls += *(int *)arg;
}

int main()
{
	const long long ms = 1000000;
	const int streams = 4;
	cudaStream_t s[streams];
	cudaEvent_t start, stop, done[streams], plain;
	int *d, h[streams + 1], ten = 10, hundred = 100, low, high, polls;
	float took = 0;
	double t0, serial, aside;
	cudaError_t err, early;

	CHECK(cudaMalloc(&d, sizeof h));
	CHECK(cudaMemset(d, 0, sizeof h));
	CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
	REQUIRE(low >= high, "priorities run from %d to %d", low, high);
	for (int i = 0; i < streams; i++) {
		CHECK(cudaStreamCreateWithPriority(&s[i], cudaStreamNonBlocking, i % 2 ? low : high));
		CHECK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
	}
	CHECK(cudaEventCreate(&start));
	CHECK(cudaEventCreate(&stop));
	CHECK(cudaEventCreateWithFlags(&plain, cudaEventDisableTiming | cudaEventBlockingSync));
	spin<<<1, 1, 0, s[0]>>>(d, 0, 1);	/* the module is loaded before anything is timed */
	add_to<<<1, 1, 0, s[0]>>>(d + streams, d, 0);
	CHECK(cudaDeviceSynchronize());

	for (int tries = 1;; tries++) {
		t0 = seconds();
		for (int i = 0; i < streams; i++)
			spin<<<1, 1, 0, s[0]>>>(d + i, 1, 60 * ms);
		CHECK(cudaStreamSynchronize(s[0]));
		serial = seconds() - t0;
		REQUIRE(serial >= 0.24, "four kernels of 60 ms in one stream took %.3f s", serial);
		t0 = seconds();
		for (int i = 0; i < streams; i++)
			spin<<<1, 1, 0, s[i]>>>(d + i, i + 1, 60 * ms);
		CHECK(cudaGetLastError());
		err = cudaStreamQuery(s[0]);
		CHECK(cudaDeviceSynchronize());
		aside = seconds() - t0;
		CHECK(cudaStreamQuery(s[0]));
		if (err == cudaErrorNotReady && aside < 0.75 * serial)
			break;
		/* the machine may have stalled */
		REQUIRE(tries < 5, "a busy stream reports %s; four streams took %.3f s, one stream %.3f s",
			cudaGetErrorName(err), aside, serial);
		cudaGetLastError();
	}
	cudaGetLastError();

	/* every stream waits for the one before it: the sum depends on the order */
	CHECK(cudaMemset(d + streams, 0, sizeof(int)));
	CHECK(cudaDeviceSynchronize());
	for (int i = 0; i < streams; i++) {
		if (i)
			CHECK(cudaStreamWaitEvent(s[i], done[i - 1], 0));
		spin<<<1, 1, 0, s[i]>>>(d + i, i + 1, (streams - i) * 2 * ms);
		add_to<<<1, 1, 0, s[i]>>>(d + streams, d + i, 10);
		CHECK(cudaEventRecord(done[i], s[i]));
	}
	CHECK(cudaEventSynchronize(done[streams - 1]));
	CHECK(cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost));
	REQUIRE(h[streams] == 1234, "streams chained by events made %d, not 1234", h[streams]);

	/* an event is not ready, then ready, and knows the time between */
	for (int tries = 0;; tries++) {
		int length = 30 << tries;

		CHECK(cudaEventRecord(start, s[1]));
		spin<<<1, 1, 0, s[1]>>>(d, 7, length * ms);
		CHECK(cudaEventRecord(stop, s[1]));
		CHECK(cudaEventRecord(plain, s[1]));
		early = cudaEventElapsedTime(&took, start, stop);
		for (polls = 0; (err = cudaEventQuery(stop)) == cudaErrorNotReady;)
			polls++;
		CHECK(err);
		CHECK(cudaEventSynchronize(plain));
		CHECK(cudaEventElapsedTime(&took, start, stop));
		REQUIRE(took > length - 1 && took < length + 470, "%d ms were timed as %.1f ms", length, took);
		if (early == cudaErrorNotReady && polls > 0)
			break;
		/* the machine may have stalled for as long */
		REQUIRE(tries < 4, "the event was ready at once: %s, asked %d times", cudaGetErrorName(early), polls);
		cudaGetLastError();
	}
	EXPECT(cudaEventElapsedTime(&took, start, plain), cudaErrorInvalidResourceHandle);
	cudaGetLastError();

	/* host functions run when their turn comes, before what follows them */
	spin<<<1, 1, 0, s[2]>>>(d, 8, 20 * ms);
	CHECK(cudaLaunchHostFunc(s[2], count, &ten));
	CHECK(cudaStreamAddCallback(s[2], counted, &hundred, 0));
	CHECK(cudaStreamSynchronize(s[2]));
	REQUIRE(hostCalls == 110, "host functions counted to %d", hostCalls.load());

	for (int i = 0; i < streams; i++) {
		CHECK(cudaStreamDestroy(s[i]));
		CHECK(cudaEventDestroy(done[i]));
	}
	CHECK(cudaEventDestroy(start));
	CHECK(cudaEventDestroy(stop));
	CHECK(cudaEventDestroy(plain));
	printf("streams_events: overlap yes, order %d, host calls %d\n", h[streams], hostCalls.load());
	return pass();
}
