/*
 * arrive [rows|large]: what was copied to the device is there for all work that the program gives after the copy, or after its
 * wait for the copy's stream, whichever stream that work is in and whatever else is under way. First of all, before the program
 * has any other stream: a copy between two kernels in the default stream, read in the first non-blocking stream. Then copies and
 * waits in one stream, read in another, by one thread and by several, and memory that goes away once the copy has been waited for.
 */
#include "driver.h"

#include <string.h>
#include <thread>
#include <vector>

enum { SMALL = 1 << 10, LARGE = 2 << 20, ROUNDS = 24, THREADS = 3 };

__global__ void arrive_hold(long long ns)
{
	long long t0, t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	} while (t - t0 < ns);
}

/* How many of the n words are not what they should be. */
extern "C" __global__ void arrive_count(const unsigned *v, int n, unsigned want, unsigned *wrong)
{
	for (int i = threadIdx.x; i < n; i += blockDim.x)
		if (v[i] != want + i)
			atomicAdd(wrong, 1);
}

static void fill(std::vector<unsigned> &h, unsigned first)
{
	for (size_t i = 0; i < h.size(); i++)
		h[i] = first + i;
}

/* Counts in stream s what is wrong. Waits for it. */
static unsigned wrong_in(cudaStream_t s, const unsigned *d, int n, unsigned first, unsigned *count)
{
	unsigned wrong;

	arrive_count<<<1, 256, 0, s>>>(d, n, first, count);
	CHECK(cudaMemcpyAsync(&wrong, count, sizeof wrong, cudaMemcpyDeviceToHost, s));
	CHECK(cudaStreamSynchronize(s));
	return wrong;
}

static void first_stream(const char *what)
{
	int n = !strcmp(what, "large") ? LARGE : SMALL;
	std::vector<unsigned> h(n);
	unsigned *d, *count, wrong;
	cudaStream_t s;

	CHECK(cudaMalloc(&d, n * sizeof *d));
	CHECK(cudaMalloc(&count, sizeof *count));
	CHECK(cudaMemset(d, 0, n * sizeof *d));
	CHECK(cudaMemset(count, 0, sizeof *count));
	arrive_hold<<<1, 1>>>(1);
	CHECK(cudaDeviceSynchronize());
	fill(h, 5);
	arrive_hold<<<1, 1>>>(80000000ll);
	if (!strcmp(what, "rows"))
		CHECK(cudaMemcpy2D(d, 128, h.data(), 128, 128, n * sizeof *d / 128, cudaMemcpyHostToDevice));
	else
		CHECK(cudaMemcpy(d, h.data(), n * sizeof *d, cudaMemcpyHostToDevice));
	fill(h, 0);
	arrive_hold<<<1, 1>>>(80000000ll);
	CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	wrong = wrong_in(s, d, n, 5, count);
	REQUIRE(!wrong, "%u words are not there in the first stream", wrong);
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaStreamDestroy(s));
	CHECK(cudaFree(d));
	CHECK(cudaFree(count));
}

/* Copies in one stream, which it waits for, and looks in another. */
static void rounds(cudaStream_t copying, cudaStream_t looking, int n)
{
	std::vector<unsigned> h(n);
	unsigned *d, *count;

	CHECK(cudaMalloc(&d, n * sizeof *d));
	CHECK(cudaMalloc(&count, sizeof *count));
	CHECK(cudaMemset(count, 0, sizeof *count));
	CHECK(cudaDeviceSynchronize());
	for (int r = 0; r < ROUNDS; r++) {
		unsigned wrong;

		fill(h, r);
		for (int part = 0; part < 4; part++) {
			size_t k = n / 4;

			CHECK(cudaMemcpyAsync(d + part * k, h.data() + part * k, k * sizeof *d, cudaMemcpyHostToDevice, copying));
			if (part % 2)
				CHECK(cudaStreamSynchronize(copying));
		}
		CHECK(cudaStreamQuery(copying));
		fill(h, 0);
		wrong = wrong_in(looking, d, n, r, count);
		REQUIRE(!wrong, "round %d: %u words of %d are not there", r, wrong, n);
		if (r % 3 == 0) { /* a wait for something else than copies */
			arrive_hold<<<1, 1, 0, copying>>>(1000);
			CHECK(cudaStreamSynchronize(copying));
		}
	}
	CHECK(cudaFree(d));
	CHECK(cudaFree(count));
}

static void wait_for(void *go)
{
	while (!__atomic_load_n((int *)go, __ATOMIC_ACQUIRE))
		std::this_thread::yield();
}

/*
 * Work that the GPU has before the copies waits for the program to set it on: by a word in memory that both reach, alone or in a block of so many bytes,
 * or, if there is none, by the end of a host function. The program does that when it has waited for the copies.
 */
static void set_on(cudaStream_t copying, cudaStream_t waiting, size_t block)
{
	std::vector<unsigned> h(SMALL);
	unsigned *d, *count, *word, *wrong;
	void *there;
	int go;

	CHECK(cudaMalloc(&d, SMALL * sizeof *d));
	CHECK(cudaMalloc(&count, sizeof *count));
	CHECK(cudaMemset(count, 0, sizeof *count));
	CHECK(cudaMallocHost(&wrong, sizeof *wrong));
	if (block) {
		CHECK(cudaHostAlloc(&word, block, cudaHostAllocMapped));
		CHECK(cudaHostGetDevicePointer(&there, word, 0));
		*word = 0;
	}
	CHECK(cudaDeviceSynchronize());
	for (unsigned r = 1; r <= 200; r++) {
		__atomic_store_n(&go, 0, __ATOMIC_RELAXED);
		if (block)
			DRIVER(CU(cuStreamWaitValue32)(waiting, (CUdeviceptr)there, r, CU_STREAM_WAIT_VALUE_GEQ));
		else
			CHECK(cudaLaunchHostFunc(waiting, wait_for, &go));
		arrive_count<<<1, 256, 0, waiting>>>(d, SMALL, r, count);
		CHECK(cudaMemcpyAsync(wrong, count, sizeof *wrong, cudaMemcpyDeviceToHost, waiting));
		fill(h, r);
		CHECK(cudaMemcpyAsync(d, h.data(), SMALL * sizeof *d, cudaMemcpyHostToDevice, copying));
		CHECK(cudaStreamSynchronize(copying));
		if (block)
			__atomic_store_n(word, r, __ATOMIC_RELEASE);
		else
			__atomic_store_n(&go, 1, __ATOMIC_RELEASE);
		CHECK(cudaStreamSynchronize(waiting));
		REQUIRE(!*wrong, "round %u: %u words are not there for work that was set on behind them, block of %zu", r, *wrong, block);
	}
	if (block)
		CHECK(cudaFreeHost(word));
	CHECK(cudaFreeHost(wrong));
	CHECK(cudaFree(count));
	CHECK(cudaFree(d));
}

/* A blocking copy waits for what was given to its stream before: what that copies to host memory is there. */
static void blocking_copy(bool rows)
{
	std::vector<unsigned> h(SMALL);
	unsigned *d, *count, *word;

	CHECK(cudaMalloc(&d, SMALL * sizeof *d));
	CHECK(cudaMalloc(&count, sizeof *count));
	CHECK(cudaMallocHost(&word, sizeof *word));
	*word = 0;
	CHECK(cudaMemset(d, 0, SMALL * sizeof *d));
	CHECK(cudaMemset(count, 0, sizeof *count));
	CHECK(cudaDeviceSynchronize());
	arrive_hold<<<1, 1>>>(30000000ll);
	arrive_count<<<1, 256>>>(d, SMALL, 1, count);
	CHECK(cudaMemcpyAsync(word, count, sizeof *word, cudaMemcpyDeviceToHost, 0));
	if (rows)
		CHECK(cudaMemcpy2D(d, 128, h.data(), 128, 128, 2, cudaMemcpyHostToDevice));
	else
		CHECK(cudaMemcpy(d, h.data(), 256, cudaMemcpyDefault));
	REQUIRE(*(volatile unsigned *)word == SMALL, "a blocking copy has not waited for work before it: %u", *word);
	CHECK(cudaFreeHost(word));
	CHECK(cudaFree(count));
	CHECK(cudaFree(d));
}

/* A word that the GPU writes behind a copy to the host comes with that copy's bytes, for a program that polls it. */
static void word_behind(cudaStream_t s, int n)
{
	unsigned *d, *h, *word;
	void *there;

	CHECK(cudaMalloc(&d, n * sizeof *d));
	CHECK(cudaMallocHost(&h, n * sizeof *h));
	CHECK(cudaHostAlloc(&word, sizeof *word, cudaHostAllocMapped));
	CHECK(cudaHostGetDevicePointer(&there, word, 0));
	*word = 0;
	memset(h, 0, n * sizeof *h);
	for (unsigned r = 1; r <= 100; r++) {
		CHECK(cudaMemsetAsync(d, (int)r, n * sizeof *d, s));
		CHECK(cudaMemcpyAsync(h, d, n * sizeof *d, cudaMemcpyDeviceToHost, s));
		DRIVER(CU(cuStreamWriteValue32)(s, (CUdeviceptr)there, r, 0));
		while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != r)
			std::this_thread::yield();
		REQUIRE(h[0] == r * 0x01010101u && h[n - 1] == h[0], "round %u of %d words: %x and %x behind the word", r, n, h[0], h[n - 1]);
	}
	CHECK(cudaStreamSynchronize(s));
	CHECK(cudaFreeHost(word));
	CHECK(cudaFreeHost(h));
	CHECK(cudaFree(d));
}

static void set_word(void *word)
{
	*(unsigned *)word = 9;
}

/* A blocking copy waits for a host function before it. */
static void behind_function(void)
{
	unsigned *d, word = 0;

	CHECK(cudaMalloc(&d, sizeof *d));
	arrive_hold<<<1, 1>>>(10000000ll);
	CHECK(cudaLaunchHostFunc(0, set_word, &word));
	CHECK(cudaMemcpy(d, "abc", 4, cudaMemcpyHostToDevice));
	REQUIRE(word == 9, "a blocking copy has not waited for a host function: %u", word);
	CHECK(cudaFree(d));
}

/* A context ends when all of its work has. */
static void context_ends(void)
{
	CUcontext before, own;
	CUdeviceptr d;
	void *host = malloc(64 << 10);
	unsigned word = 0, *pinned;
	CUstream s;

	DRIVER(CU(cuCtxGetCurrent)(&before));
	DRIVER(CU(cuMemHostRegister_v2)(host, 64 << 10, CU_MEMHOSTREGISTER_PORTABLE));
	pinned = (unsigned *)host;
	pinned[0] = 0;
	DRIVER(CU(cuCtxCreate_v2)(&own, 0, 0));
	DRIVER(CU(cuStreamCreate)(&s, CU_STREAM_NON_BLOCKING));
	DRIVER(CU(cuMemAlloc_v2)(&d, 4));
	DRIVER(CU(cuMemsetD32_v2)(d, 5, 1));
	DRIVER(CU(cuCtxSynchronize)());
	DRIVER(CU(cuLaunchHostFunc)(s, set_word, &word));
	DRIVER(CU(cuMemcpyDtoHAsync_v2)(pinned, d, 4, s));
	DRIVER(CU(cuCtxDestroy_v2)(own));
	REQUIRE(pinned[0] == 5 && word == 9, "a context was destroyed before its work ended: %u, %u", pinned[0], word);
	DRIVER(CU(cuCtxSetCurrent)(before));
	DRIVER(CU(cuMemHostUnregister)(host));
	free(host);
}

/* Memory is freed when all work has ended, and what that work has copied to host memory is there. */
static void freed(cudaStream_t copying)
{
	unsigned *d, *word;
	void *other;

	CHECK(cudaMalloc(&d, sizeof *d));
	CHECK(cudaMalloc(&other, 1 << 20));
	CHECK(cudaMallocHost(&word, sizeof *word));
	*word = 0;
	CHECK(cudaMemset(d, 7, sizeof *d));
	CHECK(cudaDeviceSynchronize());
	arrive_hold<<<1, 1, 0, copying>>>(30000000ll);
	CHECK(cudaMemcpyAsync(word, d, sizeof *word, cudaMemcpyDeviceToHost, copying));
	CHECK(cudaFree(other));
	REQUIRE(*(volatile unsigned *)word == 0x07070707, "memory was freed before work ended: %x", *word);
	CHECK(cudaFreeHost(word));
	CHECK(cudaFree(d));
}

/* A wait covers what the default stream was given before copies in a stream that is ordered behind it. */
static void behind_default(void)
{
	std::vector<unsigned> h(SMALL);
	unsigned *d, *pinned;
	cudaStream_t s;

	CHECK(cudaStreamCreate(&s));
	CHECK(cudaMalloc(&d, 2 * SMALL * sizeof *d));
	CHECK(cudaMallocHost(&pinned, SMALL * sizeof *pinned));
	fill(h, 3);
	CHECK(cudaMemcpy(d, h.data(), SMALL * sizeof *d, cudaMemcpyHostToDevice));
	for (cudaStream_t copying : { s, cudaStreamPerThread }) {
		memset(pinned, 0, SMALL * sizeof *pinned);
		CHECK(cudaDeviceSynchronize());
		arrive_hold<<<1, 1>>>(30000000ll);
		CHECK(cudaMemcpyAsync(pinned, d, SMALL * sizeof *d, cudaMemcpyDeviceToHost, 0));
		CHECK(cudaMemcpyAsync(d + SMALL, h.data(), SMALL * sizeof *d, cudaMemcpyHostToDevice, copying));
		CHECK(cudaStreamSynchronize(copying));
		REQUIRE(pinned[SMALL - 1] == 3 + SMALL - 1, "the default stream's copy is not there: %u", pinned[SMALL - 1]);
	}
	CHECK(cudaStreamDestroy(s));
	CHECK(cudaFree(d));
	CHECK(cudaFreeHost(pinned));
}

/* Memory that is unmapped once the copy to it has been waited for: nothing is left that could touch it. */
static void unmapped(cudaStream_t copying)
{
	CUmemAllocationProp p;
	CUmemAccessDesc access;
	CUmemGenericAllocationHandle memory;
	CUdeviceptr at;
	size_t size = 8 << 20;
	std::vector<unsigned> h(size / sizeof(unsigned));

	memset(&p, 0, sizeof p);
	p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	access.location = p.location;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	DRIVER(CU(cuMemAddressReserve)(&at, size, 0, 0, 0));
	for (int r = 0; r < 4; r++) {
		DRIVER(CU(cuMemCreate)(&memory, size, &p, 0));
		DRIVER(CU(cuMemMap)(at, size, 0, memory, 0));
		DRIVER(CU(cuMemSetAccess)(at, size, &access, 1));
		CHECK(cudaMemcpyAsync((void *)at, h.data(), size, cudaMemcpyHostToDevice, copying));
		CHECK(cudaStreamSynchronize(copying));
		DRIVER(CU(cuMemUnmap)(at, size));
		DRIVER(CU(cuMemRelease)(memory));
	}
	DRIVER(CU(cuMemAddressFree)(at, size));
	CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "linear";
	cudaStream_t a, b, c;
	std::vector<std::thread> threads;

	blocking_copy(!strcmp(what, "rows"));
	behind_function();
	first_stream(what);
	context_ends();
	CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
	CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
	CHECK(cudaStreamCreate(&c));
	for (int n : { (int)SMALL, (int)LARGE }) {
		rounds(a, b, n);
		rounds(cudaStreamPerThread, a, n);
		rounds(c, b, n);
		rounds(a, 0, n);
		rounds(0, a, n);
	}
	behind_default();
	freed(a);
	freed(c);
	unmapped(a);
	for (size_t block : { 0, 4, 64 << 10 })
		set_on(a, b, block);
	for (int n : { (int)SMALL, 16 * SMALL, (int)LARGE })
		word_behind(a, n);
	for (int i = 0; i < THREADS; i++)
		threads.emplace_back([a] { rounds(cudaStreamPerThread, a, 2 * SMALL); });
	for (std::thread &t : threads)
		t.join();
	CHECK(cudaDeviceSynchronize());
	printf("arrive: %s, all there\n", what);
	return pass();
}
