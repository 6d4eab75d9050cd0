/*
 * What an inference engine does with memory. Its weights and cache lie in address ranges of its own, whose memory it gives
 * back to sleep and maps anew to wake; graphs of several batch sizes, captured once, read them at the same addresses ever
 * after. A step's input is written to page-locked host memory that the graph's kernel reads, in two buffers by turns, so
 * that one is written while a step reads the other.
 */
#include "driver.h"

#include <string.h>

enum { WORDS = 2 << 20, SIZES = 7, LARGEST = 1 << (SIZES - 1), BUFFERS = 2, STEPS = 60, SLEEP_EVERY = 15 };

extern "C" __global__ void engine_step(const unsigned *weights, const unsigned *tokens, unsigned *cache, unsigned *out, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n) {
		cache[i] += weights[tokens[i]];
		out[i] = cache[i] * 3 + tokens[i];
	}
}

/* An address range that keeps its address while its memory comes and goes. */
struct range {
	CUdeviceptr at;
	size_t size;
	CUmemGenericAllocationHandle memory;

	void reserve(size_t bytes)
	{
		CUmemAllocationProp p = prop();
		size_t unit;

		DRIVER(CU(cuMemGetAllocationGranularity)(&unit, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
		size = (bytes + unit - 1) / unit * unit;
		DRIVER(CU(cuMemAddressReserve)(&at, size, 0, 0, 0));
	}

	void wake()
	{
		CUmemAllocationProp p = prop();
		CUmemAccessDesc access;

		DRIVER(CU(cuMemCreate)(&memory, size, &p, 0));
		DRIVER(CU(cuMemMap)(at, size, 0, memory, 0));
		access.location = p.location;
		access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
		DRIVER(CU(cuMemSetAccess)(at, size, &access, 1));
	}

	void sleep()
	{
		DRIVER(CU(cuMemUnmap)(at, size));
		DRIVER(CU(cuMemRelease)(memory));
	}

	void *pointer() const { return (void *)at; }

	static CUmemAllocationProp prop()
	{
		CUmemAllocationProp p;

		memset(&p, 0, sizeof p);
		p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
		p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		return p;
	}
};

static struct range weights, cache;
static unsigned *saved; /* the weights while the engine sleeps */
static unsigned *tokens[BUFFERS], *out[BUFFERS], want[BUFFERS][LARGEST], mirror[LARGEST];
static int batch[BUFFERS];
static cudaEvent_t done[BUFFERS];
static cudaGraphExec_t graphs[SIZES][BUFFERS];

static unsigned weight(unsigned i) { return i * 2654435761u; }

static size_t free_memory()
{
	size_t available, total;

	CHECK(cudaMemGetInfo(&available, &total));
	return available;
}

static void capture(cudaStream_t stream, unsigned *results)
{
	for (int s = 0; s < SIZES; s++)
		for (int b = 0; b < BUFFERS; b++) {
			cudaGraph_t g;
			unsigned *view;
			int n = 1 << s;

			CHECK(cudaHostGetDevicePointer((void **)&view, tokens[b], 0));
			CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
			engine_step<<<1, LARGEST, 0, stream>>>((unsigned *)weights.pointer(), view, (unsigned *)cache.pointer(), results, n);
			CHECK(cudaMemcpyAsync(out[b], results, n * sizeof *results, cudaMemcpyDeviceToHost, stream));
			CHECK(cudaStreamEndCapture(stream, &g));
			CHECK(cudaGraphInstantiate(&graphs[s][b], g, NULL, NULL, 0));
			CHECK(cudaGraphDestroy(g));
		}
}

/* Waits for the step that last used a buffer, by polling, and looks at what it computed. */
static void collect(int b)
{
	cudaError_t err;

	if (!batch[b])
		return;
	while ((err = cudaEventQuery(done[b])) == cudaErrorNotReady)
		;
	CHECK(err);
	for (int i = 0; i < batch[b]; i++)
		REQUIRE(out[b][i] == want[b][i], "batch of %d: output %d is %u, not %u", batch[b], i, out[b][i], want[b][i]);
	batch[b] = 0;
}

static void step(cudaStream_t stream, int k)
{
	int b = k % BUFFERS, s = k * 5 % SIZES, n = 1 << s;

	collect(b);
	for (int i = 0; i < n; i++) {
		unsigned t = (k * 7919u + i * 104729u) % WORDS;

		tokens[b][i] = t;
		mirror[i] += weight(t);
		want[b][i] = mirror[i] * 3 + t;
	}
	CHECK(cudaGraphLaunch(graphs[s][b], stream));
	CHECK(cudaEventRecord(done[b], stream));
	batch[b] = n;
}

/* Gives the memory of weights and cache back, sees that it is free, and maps other memory at the same addresses. */
static void sleep_and_wake(cudaStream_t stream)
{
	size_t before, asleep;

	for (int b = 0; b < BUFFERS; b++)
		collect(b);
	CHECK(cudaDeviceSynchronize());
	before = free_memory();
	memset(saved, 0, WORDS * sizeof *saved);
	CHECK(cudaMemcpy(saved, weights.pointer(), WORDS * sizeof *saved, cudaMemcpyDeviceToHost));
	weights.sleep();
	cache.sleep();
	asleep = free_memory();
	REQUIRE(asleep >= before + weights.size + cache.size, "%zu bytes free awake, %zu asleep", before, asleep);
	weights.wake();
	CHECK(cudaMemcpy(weights.pointer(), saved, WORDS * sizeof *saved, cudaMemcpyHostToDevice));
	cache.wake();
	CHECK(cudaMemsetAsync(cache.pointer(), 0, cache.size, stream));
	memset(mirror, 0, sizeof mirror);
	REQUIRE(free_memory() <= asleep - weights.size - cache.size, "awake, yet %zu bytes free", free_memory());
}

int main(void)
{
	cudaStream_t stream;
	unsigned *results;
	int slept = 0;

	CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	CHECK(cudaMalloc(&results, LARGEST * sizeof *results));
	CHECK(cudaHostAlloc((void **)&saved, WORDS * sizeof *saved, cudaHostAllocDefault));
	for (int b = 0; b < BUFFERS; b++) {
		CHECK(cudaHostAlloc((void **)&tokens[b], LARGEST * sizeof **tokens, cudaHostAllocDefault));
		CHECK(cudaHostAlloc((void **)&out[b], LARGEST * sizeof **out, cudaHostAllocDefault));
		CHECK(cudaEventCreateWithFlags(&done[b], cudaEventDisableTiming));
	}
	weights.reserve(WORDS * sizeof(unsigned));
	cache.reserve(1 << 20);
	weights.wake();
	cache.wake();
	for (unsigned i = 0; i < WORDS; i++)
		saved[i] = weight(i);
	CHECK(cudaMemcpy(weights.pointer(), saved, WORDS * sizeof *saved, cudaMemcpyHostToDevice));
	CHECK(cudaMemset(cache.pointer(), 0, cache.size));
	CHECK(cudaDeviceSynchronize());
	capture(stream, results);
	for (int k = 0; k < STEPS; k++) {
		if (k && k % SLEEP_EVERY == 0) {
			sleep_and_wake(stream);
			slept++;
		}
		step(stream, k);
	}
	for (int b = 0; b < BUFFERS; b++)
		collect(b);
	weights.sleep();
	cache.sleep();
	DRIVER(CU(cuMemAddressFree)(weights.at, weights.size));
	DRIVER(CU(cuMemAddressFree)(cache.at, cache.size));
	printf("engine: %d sizes, %d steps, asleep %d times\n", SIZES, STEPS, slept);
	return pass();
}
