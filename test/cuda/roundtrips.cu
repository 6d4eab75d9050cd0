/*
 * roundtrips WHAT: ROUNDS rounds of WHAT, for counting what each waits for.
 *
 *	pageable, pinned	a kernel, and one word of its result by an asynchronous copy and a wait, as PyTorch's item()
 *	questions		attributes of the device, of streams, kernels and pointers, and occupancy: the same questions again and again
 *	limits			a limit of the context, its memory pool and the pool's threshold
 *	memory			how much memory is free
 *	managed, mapped		256 KiB of such memory that the program writes, a kernel adds, and the program reads
 *	corner			the same with 4 MiB of managed memory, of which the program reads all for ten rounds and then one word
 *	upload			nine times a word to the device and a wait, in the thread's stream, as llama.cpp does for a token, then a kernel in another
 *	library			the same beside a word of host memory that kernels reach, as cuDNN and cuBLAS have; then a word to that memory, which the program reads
 *	blocking		a blocking copy of a word to the device, and a kernel in a stream that is not ordered behind it
 *	behind			a kernel, a word to the device behind it and a wait: that one has something to wait for
 *	allocate		memory of two sizes, allocated and freed, plainly and in a stream's order
 */
#include "check.h"

#include <string.h>

static const int rounds = 100;

__global__ void vecadd(const float *a, const float *b, float *c, int n)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < n)
		c[i] = a[i] + b[i];
}

static void item(bool pinned, float *d, cudaStream_t s)
{
	float pageable = 0, *to = &pageable;

	if (pinned)
		CHECK(cudaMallocHost(&to, sizeof *to));
	for (int i = 0; i < rounds; i++) {
		vecadd<<<1, 32, 0, s>>>(d, d, d, 1);
		CHECK(cudaMemcpyAsync(to, d, sizeof *to, cudaMemcpyDeviceToHost, s));
		CHECK(cudaStreamSynchronize(s));
		REQUIRE(*to == 0, "round %d has %g", i, *to);
	}
}

static void questions(float *d, cudaStream_t s)
{
	for (int i = 0; i < rounds; i++) {
		cudaPointerAttributes p;
		cudaFuncAttributes f;
		cudaDeviceProp prop;
		unsigned flags;
		int v, w;

		CHECK(cudaDeviceGetAttribute(&v, cudaDevAttrMultiProcessorCount, 0));
		CHECK(cudaGetDeviceProperties(&prop, 0));
		CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&v, vecadd, 256, 0));
		CHECK(cudaOccupancyMaxPotentialBlockSize(&v, &w, vecadd, 0, 0));
		CHECK(cudaFuncGetAttributes(&f, vecadd));
		CHECK(cudaFuncSetAttribute(vecadd, cudaFuncAttributePreferredSharedMemoryCarveout, 50));
		CHECK(cudaStreamGetPriority(s, &v));
		CHECK(cudaStreamGetFlags(s, &flags));
		CHECK(cudaDeviceGetStreamPriorityRange(&v, &w));
		CHECK(cudaPointerGetAttributes(&p, d));
		CHECK(cudaPointerGetAttributes(&p, &v));
		CHECK(cudaDeviceCanAccessPeer(&v, 0, 0));
	}
}

static void upload(const char *what, float *words, cudaStream_t s)
{
	bool blocking = !strcmp(what, "blocking"), behind = !strcmp(what, "behind");
	cudaStream_t copying = behind ? s : cudaStreamPerThread;

	for (int i = 0; i < rounds; i++) {
		float v = (float)i, back, *d = words + i;

		if (behind)
			vecadd<<<1, 32, 0, s>>>(d, d, d, 1);
		for (int k = 0; k < (blocking || behind ? 1 : 9); k++) {
			if (blocking)
				CHECK(cudaMemcpy(d, &v, sizeof v, cudaMemcpyHostToDevice));
			else
				CHECK(cudaMemcpyAsync(d, &v, sizeof v, cudaMemcpyHostToDevice, copying));
			if (!blocking)
				CHECK(cudaStreamSynchronize(copying));
		}
		if (!behind)
			vecadd<<<1, 32, 0, s>>>(d, d, d, 1);
		if (i % 10)
			continue;
		CHECK(cudaMemcpyAsync(&back, d, sizeof back, cudaMemcpyDeviceToHost, s));
		CHECK(cudaStreamSynchronize(s));
		REQUIRE(back == (behind ? v : 2 * v), "round %d has %g", i, back);
		CHECK(cudaDeviceSynchronize());
	}
}

static void library(float *words, cudaStream_t s)
{
	float *own, *there, v = 3;

	CHECK(cudaHostAlloc(&own, sizeof *own, cudaHostAllocMapped));
	CHECK(cudaHostGetDevicePointer(&there, own, 0));
	upload("upload", words, s);
	CHECK(cudaMemcpyAsync(there, &v, sizeof v, cudaMemcpyHostToDevice, s));
	CHECK(cudaStreamSynchronize(s));
	REQUIRE(*(volatile float *)own == v, "the program reads %g", *own);
	CHECK(cudaMemcpy(there, words, sizeof v, cudaMemcpyDeviceToDevice));
	v = 4;
	CHECK(cudaMemcpy(there, &v, sizeof v, cudaMemcpyHostToDevice));
	REQUIRE(*(volatile float *)own == v, "after a blocking copy the program reads %g", *own);
}

static void limits(void)
{
	for (int i = 0; i < rounds; i++) {
		cudaMemPool_t pool;
		size_t n;

		CHECK(cudaDeviceGetLimit(&n, cudaLimitStackSize));
		CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
		CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &n));
	}
}

static void allocate(cudaStream_t s)
{
	for (int i = 0; i < rounds; i++) {
		void *small, *large, *ordered;

		CHECK(cudaMalloc(&small, 512));
		CHECK(cudaMalloc(&large, 4 << 20));
		CHECK(cudaMallocAsync(&ordered, 1 << 20, s));
		CHECK(cudaFreeAsync(ordered, s));
		CHECK(cudaFree(small));
		CHECK(cudaFree(large));
	}
}

static void shared(const char *what, cudaStream_t s)
{
	bool corner = !strcmp(what, "corner");
	int n = (corner ? 4 << 20 : 256 << 10) / (int)sizeof(float);
	float *v[3];

	for (int i = 0; i < 3; i++) {
		if (strcmp(what, "mapped"))
			CHECK(cudaMallocManaged(&v[i], n * sizeof(float)));
		else
			CHECK(cudaHostAlloc(&v[i], n * sizeof(float), cudaHostAllocMapped));
	}
	for (int r = 0; r < rounds; r++) {
		for (int i = 0; i < n && (!corner || !r); i++) {
			v[0][i] = r + i;
			v[1][i] = 2 * r;
		}
		vecadd<<<n / 256, 256, 0, s>>>(v[0], v[1], v[2], n);
		CHECK(cudaStreamSynchronize(s));
		for (int i = 0; i < (corner && r >= 10 ? 1 : n); i++)
			REQUIRE(v[2][i] == (corner ? i : i + 3 * r), "round %d, place %d has %g", r, i, v[2][i]);
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "questions";
	cudaStream_t s;
	float *d;

	CHECK(cudaMalloc(&d, rounds * sizeof *d));
	CHECK(cudaMemset(d, 0, rounds * sizeof *d));
	if (!strcmp(what, "upload") || !strcmp(what, "library") || !strcmp(what, "blocking"))
		CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
	else
		CHECK(cudaStreamCreate(&s));
	vecadd<<<1, 32, 0, s>>>(d, d, d, 1);
	CHECK(cudaDeviceSynchronize());
	if (!strcmp(what, "pageable") || !strcmp(what, "pinned"))
		item(!strcmp(what, "pinned"), d, s);
	else if (!strcmp(what, "upload") || !strcmp(what, "blocking") || !strcmp(what, "behind"))
		upload(what, d, s);
	else if (!strcmp(what, "library"))
		library(d, s);
	else if (!strcmp(what, "questions"))
		questions(d, s);
	else if (!strcmp(what, "limits"))
		limits();
	else if (!strcmp(what, "managed") || !strcmp(what, "mapped") || !strcmp(what, "corner"))
		shared(what, s);
	else if (!strcmp(what, "allocate"))
		allocate(s);
	else
		for (int i = 0; i < rounds; i++) {
			size_t free, total;

			CHECK(cudaMemGetInfo(&free, &total));
		}
	printf("roundtrips: %d rounds of %s\n", rounds, what);
	return pass();
}
