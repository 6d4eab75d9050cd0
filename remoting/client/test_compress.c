/*
 * What is compressed stands for the same bytes again, whatever they are; how much shorter it is; and that memory which
 * changes meanwhile breaks no block. An argument N: the speed, measured N times.
 */
#include "compress.h"
#include "test.h"
#include "wire.h"

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#define MOST (1u << 20)

static struct sl_compressor *c;
static uint8_t src[MOST + 8], back[MOST];
static uint64_t seed = 3;

/* Reads the specification: every block is in form, and all of them stand for n bytes. */
static void decompress(const uint8_t *p, size_t size, size_t n)
{
	const uint8_t *end = p + size;
	size_t at = 0;

	while (p < end) {
		struct wire_block b;
		uint32_t table[SL_PALETTE_WORDS];
		bool half;

		CHECK((size_t)(end - p) >= sizeof b);
		memcpy(&b, p, sizeof b);
		p += sizeof b;
		CHECK(b.size && b.size <= n - at, "%u bytes at %zu of %zu", b.size, at, n);
		if (b.codec == SL_BLOCK_PLAIN) {
			CHECK(!b.words && b.size <= (size_t)(end - p));
			memcpy(back + at, p, b.size);
			p += b.size;
			at += b.size;
			continue;
		}
		CHECK(b.codec == SL_BLOCK_PALETTE && b.words && b.words <= SL_PALETTE_WORDS && b.size % 4 == 0);
		CHECK(4u * b.words <= (size_t)(end - p));
		memcpy(table, p, 4u * b.words);
		p += 4u * b.words;
		half = b.words <= SL_PALETTE_NIBBLES;
		for (size_t i = 0; i < b.size / 4; i++) {
			unsigned k = 0;

			if (b.words > 1) {
				CHECK(p < end);
				k = half ? *p >> (i % 2 * 4) & 15 : *p;
				CHECK(!half || i + 1 < b.size / 4 || i % 2 || *p < 16, "what pads is not zero");
				p += half ? i % 2 || i + 1 == b.size / 4 : 1;
			}
			CHECK(k < b.words, "index %u of %u words", k, b.words);
			memcpy(back + at, table + k, 4);
			at += 4;
		}
	}
	CHECK(p == end && at == n, "%zu of %zu bytes", at, n);
}

/* Compresses n bytes from src + off; the size of what came of it, which is n where it was not worth it. */
static size_t round_trip(size_t off, size_t n)
{
	const uint8_t *out;
	size_t size = sl_compress(c, src + off, n, &out);

	if (!size)
		return n;
	CHECK(size <= n - n / 4, "%zu of %zu bytes", size, n);
	decompress(out, size, n);
	CHECK(!memcmp(back, src + off, n), "%zu bytes at %zu differ", n, off);
	return size;
}

static void put(size_t word, uint32_t v)
{
	memcpy(src + 4 * word, &v, 4);
}

/* A plane of an image as PyTorch normalises it. */
static void plane(size_t word, size_t words, float mean, float std)
{
	for (size_t i = 0; i < words; i++) {
		float f = ((float)(next_random(&seed) % 256) / 255.0f - mean) / std;
		uint32_t v;

		memcpy(&v, &f, 4);
		put(word + i, v);
	}
}

static void images(void)
{
	const size_t words = 224 * 224, all = MOST / 4;
	size_t size;

	for (size_t at = 0, i = 0; at < all; at += words, i++)
		plane(at, at + words < all ? words : all - at, i % 3 == 0 ? 0.485f : i % 3 == 1 ? 0.456f : 0.406f, i % 3 == 0 ? 0.229f : 0.225f);
	size = round_trip(0, MOST);
	CHECK(size < MOST * 10 / 39, "images: %zu bytes", size);
	/* At any alignment, and of any length. */
	for (size_t off = 1; off < 4; off++) {
		memmove(src + off, src, MOST - 8);
		round_trip(off, MOST - 8 - off);
		memmove(src, src + off, MOST - 8);
	}
	for (size_t n = 0; n < 5000; n += 1 + next_random(&seed) % 50)
		round_trip(next_random(&seed) % 4, n);
}

static void extremes(void)
{
	size_t size;

	memset(src, 0, MOST);
	size = round_trip(0, MOST);
	CHECK(size <= 24, "zeroes: %zu bytes", size);
	for (size_t i = 0; i < MOST / 4; i++)
		put(i, next_random(&seed) % 16);
	size = round_trip(0, MOST);
	CHECK(size < MOST / 8 + 200, "16 words: %zu bytes", size);
	round_trip(0, MOST - 4);
	round_trip(0, MOST - 1);
	for (size_t i = 0; i < MOST / 4; i++)
		put(i, next_random(&seed) % 17);
	size = round_trip(0, MOST);
	CHECK(size < MOST / 4 + 200, "17 words: %zu bytes", size);
	for (size_t i = 0; i < MOST / 4; i++)
		put(i, next_random(&seed));
	CHECK(round_trip(0, MOST) == MOST, "random bytes became fewer");
	/* 257 words in turn have no block, and 256 have one. */
	for (size_t i = 0; i < MOST / 4; i++)
		put(i, (uint32_t)i % 257);
	CHECK(round_trip(0, MOST) == MOST);
	for (size_t i = 0; i < MOST / 4; i++)
		put(i, (uint32_t)i % 256 << 24);
	CHECK(round_trip(0, MOST) < MOST / 4 + 1100);
	/* Words that all want the same place in the table. */
	for (uint32_t i = 0, v = 0; i < MOST / 4; i++, v++) {
		if (i % 200 == 0)
			v = 0;
		while ((v * 0x9e3779b1u) >> 19 != 7)
			v++;
		put(i, v);
	}
	CHECK(round_trip(0, MOST) < MOST / 4 + 1100);
}

/* Stretches of everything. */
static void mixtures(void)
{
	for (int round = 0; round < 300; round++) {
		size_t n = 1 + next_random(&seed) % (MOST / 4), at = 0;

		while (at < n / 4) {
			size_t m = 1 + next_random(&seed) % (1u << next_random(&seed) % 16);
			uint32_t kinds = 1u << next_random(&seed) % 11, base = next_random(&seed);

			for (; m && at < n / 4; m--, at++)
				put(at, base + next_random(&seed) % kinds);
		}
		round_trip(next_random(&seed) % 8, n);
	}
}

static bool stop;

static void *change(void *arg)
{
	uint64_t s = 77;

	(void)arg;
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		uint32_t r = next_random(&s);

		for (size_t i = r % (MOST / 4), k = 0; i < MOST / 4 && k < 4096; i++, k++)
			__atomic_store_n((uint32_t *)(void *)(src + 4 * i), r % 7 ? next_random(&s) % 300 : next_random(&s), __ATOMIC_RELAXED);
	}
	return NULL;
}

/* The program writes while it is compressed: the blocks are in form all the same. */
static void changing(void)
{
	pthread_t t;

	memset(src, 0, MOST);
	CHECK(!pthread_create(&t, NULL, change, NULL));
	for (int i = 0; i < 200; i++) {
		const uint8_t *out;
		size_t size;

		for (size_t k = 0; k < MOST / 4; k++)
			__atomic_store_n((uint32_t *)(void *)(src + 4 * k), (uint32_t)k % 200, __ATOMIC_RELAXED);
		size = sl_compress(c, src, MOST, &out);
		if (size)
			decompress(out, size, MOST);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	pthread_join(t, NULL);
}

static double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void speed(int times)
{
	static const char *const names[] = { "images", "random bytes", "zeroes" };
	const uint8_t *out;

	for (int what = 0; what < 3; what++) {
		double begun;
		size_t size = 0;

		for (size_t i = 0; i < MOST / 4; i++)
			put(i, what ? what == 1 ? next_random(&seed) : 0 : next_random(&seed) % 256 * 99991);
		begun = seconds();
		for (int i = 0; i < times; i++)
			size = sl_compress(c, src, MOST, &out);
		printf("%s: %.0f MB/s, %zu of %u bytes\n", names[what], MOST / 1e6 * times / (seconds() - begun), size, MOST);
	}
}

int main(int argc, char **argv)
{
	c = sl_compressor_new(MOST);
	CHECK(c != NULL);
	if (argc > 1) {
		speed(atoi(argv[1]));
		return 0;
	}
	images();
	extremes();
	mixtures();
	changing();
	free(c);
	printf("test_compress: ok\n");
	return 0;
}
