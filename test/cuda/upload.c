/*
 * upload KIND MIB COPIES: so many copies to the device, each to a place of its own, which come back and are compared.
 *
 * KIND is what is copied: images (planes of 224 x 224 normalised floats that were bytes), random, zeroes, mixed (all of them in
 * turn, from an odd address), or changing: small numbers that a thread changes while they are copied, of which each
 * that arrives must be one of them.
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

#define PROGRAM "upload"
#include "plain.h"

enum { PLANE = 224 * 224, NUMBERS = 200, GUARD = 4096 };

static int (*cu_init)(unsigned);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_alloc)(uint64_t *, size_t);
static int (*cu_free)(uint64_t);
static int (*cu_set)(uint64_t, unsigned char, size_t);
static int (*cu_htod)(uint64_t, const void *, size_t);
static int (*cu_dtoh)(void *, uint64_t, size_t);

static void require(bool good, const char *what)
{
	if (!good) {
		fprintf(stderr, "upload: %s\n", what);
		exit(1);
	}
}

static const struct function functions[] = {
	{ &cu_init, "cuInit" }, { &cu_retain, "cuDevicePrimaryCtxRetain" }, { &cu_set_current, "cuCtxSetCurrent" },
	{ &cu_alloc, "cuMemAlloc_v2" }, { &cu_free, "cuMemFree_v2" }, { &cu_set, "cuMemsetD8_v2" },
	{ &cu_htod, "cuMemcpyHtoD_v2" }, { &cu_dtoh, "cuMemcpyDtoH_v2" },
};

static uint32_t next(void)
{
	static uint64_t s = 11;

	s = s * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(s >> 32);
}

static void images(uint8_t *p, size_t n)
{
	static const float mean[] = { 0.485f, 0.456f, 0.406f }, std[] = { 0.229f, 0.224f, 0.225f };

	for (size_t i = 0; i < n / 4; i++) {
		size_t channel = i / PLANE % 3;
		float f = ((float)(next() >> 24) / 255.0f - mean[channel]) / std[channel];

		memcpy(p + 4 * i, &f, 4);
	}
}

static void random_bytes(uint8_t *p, size_t n)
{
	for (size_t i = 0; i < n / 4; i++) {
		uint32_t v = next();

		memcpy(p + 4 * i, &v, 4);
	}
}

static void fill(const char *kind, uint8_t *p, size_t n)
{
	if (!strcmp(kind, "images")) {
		images(p, n);
	} else if (!strcmp(kind, "random")) {
		random_bytes(p, n);
	} else if (!strcmp(kind, "mixed")) {
		for (size_t at = 0, m; at < n; at += m) {
			m = next() % (3u << 20);
			m = m < n - at ? m : n - at;
			if (next() % 3 == 0)
				random_bytes(p + at, m);
			else if (next() % 2)
				images(p + at, m);
		}
	} else {
		require(!strcmp(kind, "zeroes") || !strcmp(kind, "changing"), "KIND is images, random, zeroes, mixed or changing");
	}
}

static uint32_t *changed;
static size_t words;
static bool stop;

static void *change(void *arg)
{
	(void)arg;
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
		__atomic_store_n(&changed[next() % words], next() % NUMBERS, __ATOMIC_RELAXED);
	return NULL;
}

/* What came back is what was sent. */
static void compare(const uint8_t *sent, const uint8_t *back, size_t n, bool changing)
{
	if (!changing) {
		require(!memcmp(sent, back, n), "other bytes came back");
		return;
	}
	for (size_t i = 0; i < n / 4; i++) {
		uint32_t v;

		memcpy(&v, back + 4 * i, 4);
		require(v < NUMBERS, "a word came back that the program never wrote");
	}
}

int main(int argc, char **argv)
{
	size_t n, copies, off;
	uint8_t *host, *back;
	bool changing;
	pthread_t thread;
	uint64_t dev;
	void *ctx;

	require(argc == 4, "usage: upload KIND MIB COPIES");
	changing = !strcmp(argv[1], "changing");
	off = strcmp(argv[1], "mixed") ? 0 : 3;
	n = ((size_t)atoi(argv[2]) << 20) + off;
	copies = (size_t)atoi(argv[3]);
	host = calloc(n + off, 1);
	back = malloc(n + GUARD);
	require(n && copies && host && back, "no memory");
	fill(argv[1], host + off, n);
	load(functions, sizeof functions / sizeof *functions);
	CHECK(cu_init(0));
	CHECK(cu_retain(&ctx, 0));
	CHECK(cu_set_current(ctx));
	CHECK(cu_alloc(&dev, copies * (n + GUARD)));
	CHECK(cu_set(dev, 0x5a, copies * (n + GUARD)));
	changed = (uint32_t *)(void *)host;
	words = n / 4;
	if (changing)
		require(!pthread_create(&thread, NULL, change, NULL), "no thread");
	for (size_t i = 0; i < copies; i++)
		CHECK(cu_htod(dev + i * (n + GUARD), host + off, n));
	if (changing) {
		__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
		pthread_join(thread, NULL);
	}
	for (size_t i = 0; i < copies; i++) {
		CHECK(cu_dtoh(back, dev + i * (n + GUARD), n + GUARD));
		compare(host + off, back, n, changing);
		for (size_t k = 0; k < GUARD; k++)
			require(back[n + k] == 0x5a, "bytes behind the end were written");
	}
	CHECK(cu_free(dev));
	printf("upload: %zu copies of %zu bytes\nPASS\n", copies, n);
	return 0;
}
