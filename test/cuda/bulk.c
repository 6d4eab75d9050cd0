/*
 * bulk [ROUNDS [MIB]]: large copies in both directions, by two threads with a stream each, from and to page-locked and pageable memory, blocking
 * and asynchronous, of odd sizes and from odd addresses, in rows, and one after another to the same memory. All bytes are compared;
 * what was copied in one piece is fetched, or was sent, in small ones.
 *
 * It needs a C compiler and libcuda.so.1 at run time, no header of NVIDIA's.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRAM "bulk"
#include "plain.h"

enum { THREADS = 2, SMALL = 1 << 20, HOST = 1, DEVICE = 2 };

/* CUDA_MEMCPY2D */
struct rows {
	size_t src_x, src_y;
	unsigned src_type;
	const void *src_host;
	uint64_t src_device;
	void *src_array;
	size_t src_pitch;
	size_t dst_x, dst_y;
	unsigned dst_type;
	void *dst_host;
	uint64_t dst_device;
	void *dst_array;
	size_t dst_pitch;
	size_t width, height;
};

static int (*cu_init)(unsigned);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_alloc)(uint64_t *, size_t);
static int (*cu_free)(uint64_t);
static int (*cu_host_alloc)(void **, size_t, unsigned);
static int (*cu_host_free)(void *);
static int (*cu_set)(uint64_t, unsigned char, size_t, void *);
static int (*cu_htod)(uint64_t, const void *, size_t);
static int (*cu_dtoh)(void *, uint64_t, size_t);
static int (*cu_htod_async)(uint64_t, const void *, size_t, void *);
static int (*cu_dtoh_async)(void *, uint64_t, size_t, void *);
static int (*cu_rows_async)(const struct rows *, void *);
static int (*cu_stream)(void **, unsigned);
static int (*cu_stream_sync)(void *);

static void *ctx;
static size_t mib = 24;
static int rounds = 4;

static const struct function functions[] = {
	{ &cu_init, "cuInit" }, { &cu_retain, "cuDevicePrimaryCtxRetain" }, { &cu_set_current, "cuCtxSetCurrent" },
	{ &cu_alloc, "cuMemAlloc_v2" }, { &cu_free, "cuMemFree_v2" }, { &cu_host_alloc, "cuMemHostAlloc" },
	{ &cu_host_free, "cuMemFreeHost" }, { &cu_set, "cuMemsetD8Async" }, { &cu_htod, "cuMemcpyHtoD_v2" },
	{ &cu_dtoh, "cuMemcpyDtoH_v2" }, { &cu_htod_async, "cuMemcpyHtoDAsync_v2" }, { &cu_dtoh_async, "cuMemcpyDtoHAsync_v2" },
	{ &cu_rows_async, "cuMemcpy2DAsync_v2" }, { &cu_stream, "cuStreamCreate" }, { &cu_stream_sync, "cuStreamSynchronize" },
};

static uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static void fill(uint8_t *p, size_t n, uint64_t *state)
{
	for (size_t i = 0; i < n; i += 8) {
		uint64_t v = next_random(state);

		memcpy(p + i, &v, n - i < 8 ? n - i : 8);
	}
}

static void same(const uint8_t *a, const uint8_t *b, size_t n, const char *what)
{
	if (!memcmp(a, b, n))
		return;
	for (size_t i = 0; i < n; i++)
		if (a[i] != b[i]) {
			fprintf(stderr, "bulk: %s: byte %zu of %zu differs\n", what, i, n);
			exit(1);
		}
}

/* One thread's memory: the device's, two buffers that copies use, and one that they do not. */
struct lane {
	uint64_t state, dev;
	size_t n;
	uint8_t *buf[2], *other;
	void *stream;
};

static void send_small(const struct lane *l, uint64_t to, const uint8_t *p, size_t n)
{
	for (size_t at = 0; at < n; at += SMALL)
		CHECK(cu_htod_async(to + at, p + at, n - at < SMALL ? n - at : SMALL, l->stream));
	CHECK(cu_stream_sync(l->stream));
}

static void fetch_small(const struct lane *l, uint8_t *p, uint64_t from, size_t n)
{
	for (size_t at = 0; at < n; at += SMALL)
		CHECK(cu_dtoh_async(p + at, from + at, n - at < SMALL ? n - at : SMALL, l->stream));
	CHECK(cu_stream_sync(l->stream));
}

static void up(struct lane *l, uint8_t *p, size_t n, size_t off, bool async)
{
	fill(p, n, &l->state);
	check(async ? cu_htod_async(l->dev + off, p, n, l->stream) : cu_htod(l->dev + off, p, n), "a copy to the device");
	CHECK(cu_stream_sync(l->stream));
	memset(l->other, 0x55, n);
	fetch_small(l, l->other, l->dev + off, n);
	same(l->other, p, n, "to the device");
}

static void down(struct lane *l, uint8_t *p, size_t n, size_t off, bool async)
{
	fill(l->other, n, &l->state);
	send_small(l, l->dev + off, l->other, n);
	memset(p, 0xaa, n);
	check(async ? cu_dtoh_async(p, l->dev + off, n, l->stream) : cu_dtoh(p, l->dev + off, n), "a copy from the device");
	CHECK(cu_stream_sync(l->stream));
	same(p, l->other, n, "from the device");
}

/* Copies and other work that follow each other, to the same memory: the last one counts. */
static void in_order(struct lane *l, uint8_t *p, uint8_t *q, size_t n)
{
	const size_t half = n / 2 | 1;

	fill(p, n, &l->state);
	fill(q, n, &l->state);
	CHECK(cu_htod_async(l->dev, p, n, l->stream));
	CHECK(cu_htod_async(l->dev, q, n, l->stream));
	CHECK(cu_set(l->dev + 1000, 0x77, half, l->stream));
	CHECK(cu_htod_async(l->dev + 2000, p, half - 2000, l->stream));
	memcpy(l->other, q, n);
	memset(l->other + 1000, 0x77, half);
	memcpy(l->other + 2000, p, half - 2000);
	CHECK(cu_stream_sync(l->stream));
	memset(q, 0, n);
	fetch_small(l, q, l->dev, n);
	same(q, l->other, n, "to the device, one after another");

	/* What comes from the device: the whole of it, changed, some of the start, and the whole again. */
	CHECK(cu_dtoh_async(p, l->dev, n, l->stream));
	CHECK(cu_set(l->dev + 5, 0x11, half, l->stream));
	CHECK(cu_dtoh_async(p, l->dev, n, l->stream));
	CHECK(cu_set(l->dev + 6, 0x22, 9, l->stream));
	CHECK(cu_dtoh_async(p, l->dev, 100000, l->stream));
	CHECK(cu_set(l->dev + 7, 0x33, n - 7, l->stream));
	CHECK(cu_dtoh_async(p, l->dev, n, l->stream));
	CHECK(cu_set(l->dev + 70, 0x44, 70000, l->stream));
	CHECK(cu_dtoh_async(p + 64, l->dev + 64, 80000, l->stream));
	CHECK(cu_stream_sync(l->stream));
	memset(l->other + 5, 0x11, half);
	memset(l->other + 6, 0x22, 9);
	memset(l->other + 7, 0x33, n - 7);
	memset(l->other + 70, 0x44, 70000);
	same(p, l->other, n, "from the device, one after another");
}

/* Rows that lie apart on the host, and not on the device. */
static void in_rows(struct lane *l, uint8_t *p, size_t n, size_t width)
{
	const size_t pitch = width + width / 4 + 3, height = n / pitch;
	struct rows r = { .src_type = DEVICE, .src_device = l->dev, .src_pitch = width, .dst_type = HOST, .dst_host = p,
			  .dst_pitch = pitch, .width = width, .height = height };

	fill(l->other, width * height, &l->state);
	send_small(l, l->dev, l->other, width * height);
	memset(p, 0xaa, n);
	CHECK(cu_rows_async(&r, l->stream));
	CHECK(cu_stream_sync(l->stream));
	for (size_t y = 0; y < height; y++) {
		same(p + y * pitch, l->other + y * width, width, "rows from the device");
		for (size_t x = width; x < pitch; x++)
			check(p[y * pitch + x] != 0xaa, "what lies between rows");
	}
	fill(p, n, &l->state);
	r = (struct rows){ .src_type = HOST, .src_host = p, .src_pitch = pitch, .dst_type = DEVICE, .dst_device = l->dev, .dst_pitch = width,
			   .width = width, .height = height };
	CHECK(cu_rows_async(&r, l->stream));
	memset(l->other, 0, width * height);
	fetch_small(l, l->other, l->dev, width * height);
	for (size_t y = 0; y < height; y++)
		same(l->other + y * width, p + y * pitch, width, "rows to the device");
}

static void *run(void *arg)
{
	struct lane *l = arg;
	uint8_t *pageable = malloc(l->n);

	l->other = malloc(l->n);
	CHECK(cu_set_current(ctx));
	CHECK(cu_stream(&l->stream, 1));
	CHECK(cu_alloc(&l->dev, l->n));
	for (int i = 0; i < 2; i++)
		CHECK(cu_host_alloc((void **)&l->buf[i], l->n, 0));
	for (int i = 0; i < rounds; i++) {
		size_t odd = next_random(&l->state) % 5000, n = l->n - 2 * odd - next_random(&l->state) % (l->n / 4);

		up(l, l->buf[0] + odd, n, 0, true);
		if (!i)
			begun();
		up(l, pageable + odd, n, odd, false);
		up(l, pageable, l->n, 0, true);
		down(l, l->buf[1] + odd, n, odd, true);
		down(l, pageable + odd, n, 0, false);
		down(l, l->buf[0], l->n, 0, false);
		in_order(l, l->buf[0], l->buf[1], n);
		in_rows(l, l->buf[0], l->n, i % 2 ? 37 : 3000 + odd);
		in_rows(l, pageable, l->n, (2 << 20) + odd);
	}
	CHECK(cu_free(l->dev));
	for (int i = 0; i < 2; i++)
		CHECK(cu_host_free(l->buf[i]));
	free(l->other);
	free(pageable);
	return NULL;
}

int main(int argc, char **argv)
{
	struct lane lane[THREADS];
	pthread_t thread[THREADS];

	rounds = argc > 1 ? atoi(argv[1]) : rounds;
	mib = argc > 2 ? (size_t)atoi(argv[2]) : mib;
	if (rounds < 1 || mib < 1) {
		fprintf(stderr, "usage: bulk [ROUNDS [MIB]]\n");
		return 2;
	}
	load(functions, sizeof functions / sizeof *functions);
	CHECK(cu_init(0));
	CHECK(cu_retain(&ctx, 0));
	for (int i = 0; i < THREADS; i++) {
		lane[i] = (struct lane){ .state = 88172645463325252u + (uint64_t)i, .n = (mib << 20) + 12345 };
		check(pthread_create(&thread[i], NULL, run, &lane[i]), "pthread_create");
	}
	for (int i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	puts("PASS");
	return 0;
}
