/*
 * content KIND MIB CHANGED TIMES: copies the same random bytes to the same memory of the device as many times, and compares what has arrived each time.
 *
 * KIND is what they are copied from: pageable memory; locked memory; or async: locked memory, in a stream, and all of them at once. In each piece of 4 MiB whose number
 * is divided by CHANGED a byte is another than for other numbers; 0 changes none. It prints the milliseconds of each copy. With COMPARE=0 in its
 * environment it compares one page of each 4 MiB.
 *
 * It needs a C compiler and libcuda.so.1 at run time, no header of NVIDIA's.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define PROGRAM "content"
#include "plain.h"

enum { PIECE = 4 << 20, PAGE = 4096 };

static int (*cu_init)(unsigned);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_alloc)(uint64_t *, size_t);
static int (*cu_host_alloc)(void **, size_t, unsigned);
static int (*cu_set)(uint64_t, unsigned char, size_t);
static int (*cu_htod)(uint64_t, const void *, size_t);
static int (*cu_htod_async)(uint64_t, const void *, size_t, void *);
static int (*cu_dtoh)(void *, uint64_t, size_t);
static int (*cu_stream)(void **, unsigned);
static int (*cu_sync)(void);

static const struct function functions[] = {
	{ &cu_init, "cuInit" }, { &cu_retain, "cuDevicePrimaryCtxRetain" }, { &cu_set_current, "cuCtxSetCurrent" }, { &cu_alloc, "cuMemAlloc_v2" },
	{ &cu_host_alloc, "cuMemHostAlloc" }, { &cu_set, "cuMemsetD8_v2" }, { &cu_htod, "cuMemcpyHtoD_v2" }, { &cu_htod_async, "cuMemcpyHtoDAsync_v2" },
	{ &cu_dtoh, "cuMemcpyDtoH_v2" }, { &cu_stream, "cuStreamCreate" }, { &cu_sync, "cuCtxSynchronize" },
};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void fill(uint8_t *p, size_t n, size_t changed)
{
	uint64_t s = 11;

	for (size_t i = 0; i < n / 4; i++) {
		uint32_t v;

		s = s * 6364136223846793005u + 1442695040888963407u;
		v = (uint32_t)(s >> 32);
		memcpy(p + 4 * i, &v, 4);
	}
	for (size_t at = 0; changed && at < n; at += PIECE)
		if (at / PIECE % changed == 0)
			p[at + at / PIECE % 1000] ^= (uint8_t)changed;
}

static void compare(const uint8_t *sent, uint64_t dev, size_t n, uint8_t *back, bool whole)
{
	for (size_t at = 0; at < n; at += PIECE) {
		size_t left = n - at < PIECE ? n - at : PIECE;
		size_t m = !whole && left > PAGE ? PAGE : left;

		CHECK(cu_dtoh(back, dev + at, m));
		if (memcmp(sent + at, back, m)) {
			fprintf(stderr, PROGRAM ": other bytes have arrived in piece %zu\n", at / PIECE);
			exit(1);
		}
	}
}

int main(int argc, char **argv)
{
	const char *kind = argc > 1 ? argv[1] : "", *v = getenv("COMPARE");
	bool pageable = !strcmp(kind, "pageable"), async = !strcmp(kind, "async");
	size_t n, changed, times;
	uint8_t *host, *back = malloc(PIECE);
	void *ctx, *stream;
	uint64_t dev;

	if (argc != 5 || (!pageable && !async && strcmp(kind, "locked"))) {
		fprintf(stderr, "usage: content pageable|locked|async MIB CHANGED TIMES\n");
		return 1;
	}
	n = (size_t)atoi(argv[2]) << 20;
	changed = (size_t)atoi(argv[3]);
	times = (size_t)atoi(argv[4]);
	load(functions, sizeof functions / sizeof *functions);
	CHECK(cu_init(0));
	CHECK(cu_retain(&ctx, 0));
	CHECK(cu_set_current(ctx));
	CHECK(cu_stream(&stream, 1));
	if (pageable)
		host = malloc(n);
	else
		CHECK(cu_host_alloc((void **)&host, n, 0));
	fill(host, n, changed);
	CHECK(cu_alloc(&dev, n));
	printf("{\"ms\": [");
	for (size_t i = 0; i < times; i++) {
		double began;

		CHECK(cu_set(dev, 0, n));
		CHECK(cu_sync());
		began = now();
		for (size_t at = 0, m; at < n; at += m) {
			m = async && n - at > n / 4 ? n / 4 : n - at;
			if (async)
				CHECK(cu_htod_async(dev + at, host + at, m, stream));
			else
				CHECK(cu_htod(dev + at, host + at, m));
		}
		CHECK(cu_sync());
		printf("%s%.1f", i ? ", " : "", now() - began);
		fflush(stdout);
		compare(host, dev, n, back, !(v && !strcmp(v, "0")));
	}
	printf("]}\n");
	return 0;
}
