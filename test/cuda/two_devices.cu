/*
 * Two devices or more in one process: each computes, data goes from one to the next by every way
 * there is, events order them, and a thread that has one device current uses what belongs to another.
 */
#include "check.h"

#include <string.h>
#include <thread>
#include <vector>

__global__ void vecadd(const float *a, const float *b, float *c, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		c[i] = a[i] + b[i];
}

static const int N = 1 << 19;
static const size_t BYTES = N * sizeof(float);

struct device {
	float *a, *b, *c;
	cudaStream_t stream;
	cudaEvent_t done;
};

static void add(const device &d, cudaStream_t s)
{
	vecadd<<<(N + 255) / 256, 256, 0, s>>>(d.a, d.b, d.c, N);
	CHECK(cudaGetLastError());
}

static double sum_of(const float *p)
{
	std::vector<float> h(N);
	double sum = 0;

	CHECK(cudaMemcpy(h.data(), p, BYTES, cudaMemcpyDeviceToHost));
	for (float x : h)
		sum += x;
	return sum;
}

/* A copy from pageable memory may still be under way on return: streams that do not wait for it could be faster. */
static void fill(float *p, float v)
{
	std::vector<float> h(N, v);

	CHECK(cudaMemcpy(p, h.data(), BYTES, cudaMemcpyHostToDevice));
	CHECK(cudaStreamSynchronize(0));
}

/* What a graph of one device does, made and run while that device is current. */
static void graph_on(device &d)
{
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	cudaGraphNode_t nodes[8];
	size_t n = 8;

	CHECK(cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeThreadLocal));
	add(d, d.stream);
	CHECK(cudaMemcpyAsync(d.b, d.c, BYTES, cudaMemcpyDeviceToDevice, d.stream));
	CHECK(cudaStreamEndCapture(d.stream, &graph));
	CHECK(cudaGraphGetNodes(graph, nodes, &n));
	REQUIRE(n == 2, "%zu nodes", n);
	CHECK(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
	for (int i = 0; i < 3; i++)
		CHECK(cudaGraphLaunch(exec, d.stream));
	CHECK(cudaStreamSynchronize(d.stream));
	CHECK(cudaGraphExecDestroy(exec));
	CHECK(cudaGraphDestroy(graph));
}

/* All at once, each from a thread of its own, with a graph. */
static void together(std::vector<device> &dev, int rounds)
{
	std::vector<std::thread> threads;

	for (size_t i = 0; i < dev.size(); i++)
		threads.emplace_back([&dev, i, rounds] {
			device &d = dev[i];

			CHECK(cudaSetDevice((int)i));
			for (int round = 0; round < rounds; round++) {
				fill(d.a, 2);
				fill(d.b, round % 5);
				graph_on(d);
				REQUIRE(sum_of(d.b) == (round % 5 + 6.0) * N, "device %zu, round %d", i, round);
			}
		});
	for (auto &t : threads)
		t.join();
}

int main(int argc, char **)
{
	int count = 0, can;
	size_t before[16], free_now, total;

	CHECK(cudaGetDeviceCount(&count));
	REQUIRE(count >= 2 && count <= 16, "%d devices", count);
	std::vector<device> dev(count);
	for (int i = 0; i < count; i++) {
		CHECK(cudaSetDevice(i));
		CHECK(cudaFree(0));
		CHECK(cudaMemGetInfo(&before[i], &total));
		device &d = dev[i];
		CHECK(cudaMalloc(&d.a, BYTES));
		CHECK(cudaMalloc(&d.b, BYTES));
		CHECK(cudaMalloc(&d.c, BYTES));
		CHECK(cudaStreamCreateWithFlags(&d.stream, cudaStreamNonBlocking));
		CHECK(cudaEventCreateWithFlags(&d.done, cudaEventDisableTiming));
		cudaPointerAttributes attr;
		CHECK(cudaPointerGetAttributes(&attr, d.a));
		REQUIRE(attr.device == i, "memory of device %d is said to be %d's", i, attr.device);
	}

	/* Each for itself. */
	for (int i = 0; i < count; i++) {
		CHECK(cudaSetDevice(i));
		fill(dev[i].a, 1 + i);
		fill(dev[i].b, 10);
		add(dev[i], 0);
		REQUIRE(sum_of(dev[i].c) == (11.0 + i) * N, "device %d", i);
	}

	/* All from device 0: memory, streams and events of the others. */
	CHECK(cudaSetDevice(0));
	for (int i = 1; i < count; i++) {
		device &d = dev[i];

		fill(d.a, 100 + i);
		CHECK(cudaMemset(d.b, 0, BYTES));
		REQUIRE(sum_of(d.b) == 0, "memset of device %d", i);
		REQUIRE(sum_of(d.a) == (100.0 + i) * N, "copies of device %d", i);
		CHECK(cudaEventRecord(d.done, d.stream));
		CHECK(cudaEventSynchronize(d.done));
		CHECK(cudaEventQuery(d.done));
		CHECK(cudaStreamSynchronize(d.stream));
	}

	/* From each to the next. */
	for (int i = 0; i < count; i++) {
		int next = (i + 1) % count;
		device &from = dev[i], &to = dev[next];

		CHECK(cudaDeviceCanAccessPeer(&can, i, next));
		CHECK(cudaSetDevice(i));
		fill(from.a, 7 + i);
		CHECK(cudaMemcpyPeer(to.b, next, from.a, i, BYTES));
		REQUIRE(sum_of(to.b) == (7.0 + i) * N, "cudaMemcpyPeer %d to %d", i, next);
		fill(from.a, 8 + i);
		CHECK(cudaMemcpyPeerAsync(to.b, next, from.a, i, BYTES, from.stream));
		CHECK(cudaStreamSynchronize(from.stream));
		REQUIRE(sum_of(to.b) == (8.0 + i) * N, "cudaMemcpyPeerAsync %d to %d", i, next);
		fill(from.a, 9 + i);
		CHECK(cudaMemcpy(to.b, from.a, BYTES, cudaMemcpyDefault));
		REQUIRE(sum_of(to.b) == (9.0 + i) * N, "cudaMemcpy %d to %d", i, next);
		CHECK(cudaMemset(to.b, 0, BYTES));
		/* The left half of 256 rows. */
		CHECK(cudaMemcpy2D(to.b, BYTES / 256, from.a, BYTES / 256, BYTES / 512, 256, cudaMemcpyDeviceToDevice));
		REQUIRE(sum_of(to.b) == (9.0 + i) * N / 2, "cudaMemcpy2D %d to %d", i, next);
	}

	/* A chain: each waits for the one before, and adds one to what it made. */
	CHECK(cudaSetDevice(0));
	fill(dev[0].c, 0);
	CHECK(cudaEventRecord(dev[0].done, dev[0].stream));
	for (int i = 1; i < count; i++) {
		CHECK(cudaSetDevice(i));
		fill(dev[i].b, 1);
		CHECK(cudaStreamWaitEvent(dev[i].stream, dev[i - 1].done, 0));
		CHECK(cudaMemcpyPeerAsync(dev[i].a, i, dev[i - 1].c, i - 1, BYTES, dev[i].stream));
		add(dev[i], dev[i].stream);
		CHECK(cudaEventRecord(dev[i].done, dev[i].stream));
	}
	CHECK(cudaEventSynchronize(dev[count - 1].done));
	REQUIRE(sum_of(dev[count - 1].c) == (count - 1.0) * N, "the chain");

	/* With an argument, until something ends it. */
	together(dev, argc > 1 ? 1 << 30 : 5);

	/* What belongs to the others is freed from here, and free again there. */
	CHECK(cudaSetDevice(0));
	for (int i = count; i--;) {
		device &d = dev[i];

		CHECK(cudaEventDestroy(d.done));
		CHECK(cudaStreamDestroy(d.stream));
		CHECK(cudaFree(d.a));
		CHECK(cudaFree(d.b));
		CHECK(cudaFree(d.c));
	}
	for (int i = 0; i < count; i++) {
		CHECK(cudaSetDevice(i));
		CHECK(cudaDeviceSynchronize());
		CHECK(cudaMemGetInfo(&free_now, &total));
		REQUIRE(free_now + (8u << 20) >= before[i], "device %d: %zu bytes are free, %zu were", i, free_now, before[i]);
	}
	printf("two_devices: ok\n");
	return pass();
}
