/*
 * Random work of every kind that moves bytes between program and GPU, on two threads, each of which knows what its memory must
 * hold: an operation that is lost, done twice or out of order changes it. Tests cut the connection meanwhile.
 * Arguments: a seed and the number of operations of each thread.
 */
#include "check.h"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

enum { WORDS = 1 << 20, SHORT = 1 << 14 };

extern "C" __global__ void step(unsigned *v, int n, unsigned add)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		v[i] = v[i] * 3 + add;
}

static void CUDART_CB count(void *arg)
{
	++*(std::atomic<int> *)arg;
}

struct worker {
	std::mt19937 rnd;
	std::vector<unsigned> want, buf;
	unsigned *d, *pinned, *mapped, *on_device;
	cudaStream_t s;
	cudaEvent_t done;
	std::atomic<int> called{0};
	int calls = 0;

	explicit worker(unsigned seed) : rnd(seed), want(WORDS), buf(WORDS) {}

	unsigned below(unsigned n) { return rnd() % n; }

	/* A range of any magnitude. */
	void range(int *at, int *n)
	{
		int most = WORDS >> below(18);

		*n = 1 + below(most);
		*at = below(WORDS - *n + 1);
	}

	void expect(const unsigned *got, int at, int n, const char *what)
	{
		for (int i = 0; i < n; i++)
			REQUIRE(got[i] == want[at + i], "%s: word %d is %u, not %u", what, at + i, got[i], want[at + i]);
	}

	void launch(int at, int n, unsigned add)
	{
		step<<<(n + 127) / 128, 128, 0, s>>>(d + at, n, add);
		CHECK(cudaGetLastError());
		for (int i = 0; i < n; i++)
			want[at + i] = want[at + i] * 3 + add;
	}

	void steps()
	{
		for (int k = 1 + below(64); k; k--) {
			int n = 1 + below(SHORT);

			launch(below(WORDS - n + 1), n, rnd());
		}
	}

	void to_device(bool async)
	{
		unsigned *from = async ? pinned : buf.data();
		int at, n;

		range(&at, &n);
		for (int i = 0; i < n; i++)
			from[i] = want[at + i] = rnd();
		if (async) {
			CHECK(cudaMemcpyAsync(d + at, from, n * 4ul, cudaMemcpyHostToDevice, s));
			CHECK(cudaStreamSynchronize(s));
		} else {
			CHECK(cudaStreamSynchronize(s));
			CHECK(cudaMemcpy(d + at, from, n * 4ul, cudaMemcpyHostToDevice));
			CHECK(cudaStreamSynchronize(0)); /* it may return before the bytes are there */
		}
		memset(from, 0, n * 4ul);
	}

	void from_device(bool async)
	{
		int at, n;

		range(&at, &n);
		if (async) {
			CHECK(cudaMemcpyAsync(pinned, d + at, n * 4ul, cudaMemcpyDeviceToHost, s));
			CHECK(cudaEventRecord(done, s));
			while (cudaEventQuery(done) == cudaErrorNotReady)
				std::this_thread::yield();
			CHECK(cudaEventQuery(done));
		} else {
			CHECK(cudaMemcpyAsync(buf.data(), d + at, n * 4ul, cudaMemcpyDeviceToHost, s));
			CHECK(cudaStreamSynchronize(s));
		}
		expect(async ? pinned : buf.data(), at, n, async ? "asynchronous copy" : "copy");
	}

	void host_functions()
	{
		for (int k = 1 + below(4); k; k--, calls++) {
			CHECK(cudaLaunchHostFunc(s, count, &called));
			launch(0, 100, k);
		}
		CHECK(cudaStreamSynchronize(s));
		REQUIRE(called == calls, "host functions: %d calls, not %d", called.load(), calls);
	}

	void graph()
	{
		int n = 1 + below(SHORT), at = below(WORDS - n + 1), times = 1 + below(4);
		unsigned add = rnd();
		cudaGraph_t g;
		cudaGraphExec_t e;

		CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
		step<<<(n + 127) / 128, 128, 0, s>>>(d + at, n, add);
		step<<<(n + 127) / 128, 128, 0, s>>>(d + at, n, add + 1);
		CHECK(cudaStreamEndCapture(s, &g));
		CHECK(cudaGraphInstantiate(&e, g, NULL, NULL, 0));
		for (int k = 0; k < times; k++) {
			CHECK(cudaGraphLaunch(e, s));
			for (int i = 0; i < n; i++)
				want[at + i] = (want[at + i] * 3 + add) * 3 + add + 1;
		}
		CHECK(cudaStreamSynchronize(s));
		CHECK(cudaGraphExecDestroy(e));
		CHECK(cudaGraphDestroy(g));
	}

	void host_memory()
	{
		unsigned add = rnd(), base = rnd();
		int n = 1 + below(SHORT);

		for (int i = 0; i < n; i++)
			mapped[i] = base + i;
		step<<<(n + 127) / 128, 128, 0, s>>>(on_device, n, add);
		CHECK(cudaStreamSynchronize(s));
		for (int i = 0; i < n; i++)
			REQUIRE(mapped[i] == (base + i) * 3 + add, "mapped memory: word %d is %u, not %u", i, mapped[i], (base + i) * 3 + add);
	}

	void fill()
	{
		int at, n;
		unsigned c = below(256);

		range(&at, &n);
		CHECK(cudaMemsetAsync(d + at, c, n * 4ul, s));
		for (int i = 0; i < n; i++)
			want[at + i] = c * 0x01010101u;
	}

	void run(int operations)
	{
		CHECK(cudaSetDevice(0));
		CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
		CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
		CHECK(cudaMalloc(&d, WORDS * 4ul));
		CHECK(cudaMemsetAsync(d, 0, WORDS * 4ul, s));
		CHECK(cudaHostAlloc(&pinned, WORDS * 4ul, cudaHostAllocDefault));
		CHECK(cudaHostAlloc(&mapped, SHORT * 4ul, cudaHostAllocMapped));
		CHECK(cudaHostGetDevicePointer(&on_device, mapped, 0));
		for (int i = 0; i < operations; i++) {
			switch (below(10)) {
			case 0: to_device(false); break;
			case 1: to_device(true); break;
			case 2: from_device(false); break;
			case 3: from_device(true); break;
			case 4: host_functions(); break;
			case 5: graph(); break;
			case 6: host_memory(); break;
			case 7: fill(); break;
			default: steps(); break;
			}
		}
		CHECK(cudaMemcpyAsync(buf.data(), d, WORDS * 4ul, cudaMemcpyDeviceToHost, s));
		CHECK(cudaStreamSynchronize(s));
		expect(buf.data(), 0, WORDS, "at the end");
		CHECK(cudaFree(d));
		CHECK(cudaFreeHost(pinned));
		CHECK(cudaFreeHost(mapped));
		CHECK(cudaEventDestroy(done));
		CHECK(cudaStreamDestroy(s));
	}
};

int main(int argc, char **argv)
{
	unsigned seed = argc > 1 ? strtoul(argv[1], NULL, 0) : 1, sum = 0;
	int operations = argc > 2 ? atoi(argv[2]) : 100;
	worker a(seed), b(seed + 1);
	std::thread t([&] { b.run(operations); });

	a.run(operations);
	t.join();
	for (int i = 0; i < WORDS; i++)
		sum = sum * 31 + a.want[i] + 7 * b.want[i];
	printf("paused: seed %u, checksum %08x\n", seed, sum);
	return pass();
}
