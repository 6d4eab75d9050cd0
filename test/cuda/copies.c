/*
 * copies [--repeats N] [--sizes BYTES,BYTES...] [--kinds pinned,pageable]: the rate of copies between host and device.
 *
 * For each kind of host memory, direction and size, one line of JSON: the median, the least and the greatest of the repeats,
 * in GB/s, and the median time of one copy in us. A copy of pinned memory is asynchronous, followed by a wait for its stream;
 * one of pageable memory is blocking. Up to 1 MiB a repeat is the mean of many copies. The bytes that come back are compared.
 *
 * It needs a C compiler and libcuda.so.1 at run time, no header of NVIDIA's.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define PROGRAM "copies"
#include "plain.h"

enum { MAX_REPEATS = 100, MAX_SIZES = 16 };

static int (*cu_init)(unsigned);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_alloc)(uint64_t *, size_t);
static int (*cu_free)(uint64_t);
static int (*cu_host_alloc)(void **, size_t, unsigned);
static int (*cu_host_free)(void *);
static int (*cu_htod)(uint64_t, const void *, size_t);
static int (*cu_dtoh)(void *, uint64_t, size_t);
static int (*cu_htod_async)(uint64_t, const void *, size_t, void *);
static int (*cu_dtoh_async)(void *, uint64_t, size_t, void *);
static int (*cu_stream)(void **, unsigned);
static int (*cu_stream_sync)(void *);

static void *stream;

static const struct function functions[] = {
	{ &cu_init, "cuInit" }, { &cu_retain, "cuDevicePrimaryCtxRetain" }, { &cu_set_current, "cuCtxSetCurrent" },
	{ &cu_alloc, "cuMemAlloc_v2" }, { &cu_free, "cuMemFree_v2" }, { &cu_host_alloc, "cuMemHostAlloc" },
	{ &cu_host_free, "cuMemFreeHost" }, { &cu_htod, "cuMemcpyHtoD_v2" }, { &cu_dtoh, "cuMemcpyDtoH_v2" },
	{ &cu_htod_async, "cuMemcpyHtoDAsync_v2" }, { &cu_dtoh_async, "cuMemcpyDtoHAsync_v2" },
	{ &cu_stream, "cuStreamCreate" }, { &cu_stream_sync, "cuStreamSynchronize" },
};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void one_copy(int pinned, int to_host, void *h, uint64_t d, size_t n)
{
	if (!pinned) {
		check(to_host ? cu_dtoh(h, d, n) : cu_htod(d, h, n), to_host ? "cuMemcpyDtoH" : "cuMemcpyHtoD");
		return;
	}
	check(to_host ? cu_dtoh_async(h, d, n, stream) : cu_htod_async(d, h, n, stream), to_host ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync");
	CHECK(cu_stream_sync(stream));
}

static void measure(int pinned, int to_host, void *h, uint64_t d, size_t n, int repeats)
{
	const int copies = n <= 64 << 10 ? 500 : n <= 1 << 20 ? 100 : 1;
	double s[MAX_REPEATS], median;

	one_copy(pinned, to_host, h, d, n);
	for (int i = 0; i < repeats; i++) {
		double begun = now();

		for (int k = 0; k < copies; k++)
			one_copy(pinned, to_host, h, d, n);
		/* A blocking copy to the device may return before the device has the bytes. */
		CHECK(cu_stream_sync(NULL));
		s[i] = (now() - begun) / copies;
	}
	qsort(s, (size_t)repeats, sizeof *s, by_value);
	median = s[repeats / 2];
	printf("{\"memory\": \"%s\", \"direction\": \"%s\", \"bytes\": %zu, \"gb_s\": %.3f, \"least\": %.3f, \"greatest\": %.3f, \"us\": %.2f}\n",
	       pinned ? "pinned" : "pageable", to_host ? "d2h" : "h2d", n, (double)n / median / 1e9, (double)n / s[repeats - 1] / 1e9,
	       (double)n / s[0] / 1e9, median * 1e6);
	fflush(stdout);
}

static void kind(int pinned, const size_t *sizes, int count, int repeats)
{
	size_t most = 0;
	uint64_t *h, d;

	for (int i = 0; i < count; i++)
		most = sizes[i] > most ? sizes[i] : most;
	if (pinned) {
		CHECK(cu_host_alloc((void **)&h, most, 0));
	} else {
		h = mmap(NULL, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		check(h == MAP_FAILED, "memory");
	}
	CHECK(cu_alloc(&d, most));
	for (size_t i = 0; i < most / 8; i++)
		h[i] = i * 0x9e3779b97f4a7c15u;
	for (int i = 0; i < count; i++)
		measure(pinned, 0, h, d, sizes[i], repeats);
	one_copy(pinned, 0, h, d, most);
	memset(h, 0, most);
	for (int i = 0; i < count; i++)
		measure(pinned, 1, h, d, sizes[i], repeats);
	one_copy(pinned, 1, h, d, most);
	for (size_t i = 0; i < most / 8; i++)
		check(h[i] != i * 0x9e3779b97f4a7c15u, "what came back is not what was sent");
	CHECK(cu_free(d));
	if (pinned)
		CHECK(cu_host_free(h));
	else
		munmap(h, most);
}

int main(int argc, char **argv)
{
	size_t sizes[MAX_SIZES] = { 4 << 10, 1 << 20, 64 << 20, 1 << 30 };
	const char *kinds = "pinned,pageable";
	int count = 4, repeats = 5;
	void *ctx;

	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--repeats"))
			repeats = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--kinds"))
			kinds = argv[i + 1];
		else if (!strcmp(argv[i], "--sizes"))
			for (char *p = argv[i + 1 + (count = 0)]; *p && count < MAX_SIZES; p += *p == ',')
				sizes[count++] = strtoull(p, &p, 10);
	}
	if (repeats < 1 || repeats > MAX_REPEATS || !count)
		return 2;
	load(functions, sizeof functions / sizeof *functions);
	CHECK(cu_init(0));
	CHECK(cu_retain(&ctx, 0));
	CHECK(cu_set_current(ctx));
	CHECK(cu_stream(&stream, 1 /* non-blocking */));
	if (strstr(kinds, "pinned"))
		kind(1, sizes, count, repeats);
	if (strstr(kinds, "pageable"))
		kind(0, sizes, count, repeats);
	return 0;
}
