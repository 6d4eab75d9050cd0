/*
 * background [STEPS [MIB]]: copies from page-locked memory that the program does not wait for, and work behind them: copies and fills in the same stream
 * and in another, events, host functions, downloads into the memory that was copied from, memory that is freed or unregistered and changed at once, and
 * a little memory that the GPU reads and writes itself, as cuDNN and cuBLAS have. Every byte is compared. It prints the milliseconds that the calls of STEPS copies and of the work behind them took, and those that all of it took.
 *
 * It needs a C compiler and libcuda.so.1 at run time, no header of NVIDIA's.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#define PROGRAM "background"
#include "plain.h"

enum { BUFFERS = 3, KEEP = 64 << 10, CELLS = 8 };

static int (*cu_init)(unsigned);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_alloc)(uint64_t *, size_t);
static int (*cu_free)(uint64_t);
static int (*cu_host_alloc)(void **, size_t, unsigned);
static int (*cu_host_address)(uint64_t *, void *, unsigned);
static int (*cu_host_free)(void *);
static int (*cu_register)(void *, size_t, unsigned);
static int (*cu_unregister)(void *);
static int (*cu_fill)(uint64_t, unsigned char, size_t, void *);
static int (*cu_htod)(uint64_t, const void *, size_t);
static int (*cu_dtoh)(void *, uint64_t, size_t);
static int (*cu_htod_async)(uint64_t, const void *, size_t, void *);
static int (*cu_dtoh_async)(void *, uint64_t, size_t, void *);
static int (*cu_dtod_async)(uint64_t, uint64_t, size_t, void *);
static int (*cu_stream)(void **, unsigned);
static int (*cu_stream_sync)(void *);
static int (*cu_stream_wait)(void *, void *, unsigned);
static int (*cu_event)(void **, unsigned);
static int (*cu_record)(void *, void *);
static int (*cu_event_sync)(void *);
static int (*cu_event_query)(void *);
static int (*cu_ctx_create)(void **, unsigned, int);
static int (*cu_ctx_destroy)(void *);
static int (*cu_batch)(uint64_t *, uint64_t *, size_t *, size_t, void *, size_t *, size_t, void *);
static int (*cu_wait_value)(void *, uint64_t, uint64_t, unsigned);
static int (*cu_write_value)(void *, uint64_t, uint64_t, unsigned);
static int (*cu_host_function)(void *, void (*)(void *), void *);

static const struct function functions[] = {
	{ &cu_init, "cuInit" }, { &cu_retain, "cuDevicePrimaryCtxRetain" }, { &cu_set_current, "cuCtxSetCurrent" },
	{ &cu_alloc, "cuMemAlloc_v2" }, { &cu_free, "cuMemFree_v2" }, { &cu_host_alloc, "cuMemHostAlloc" }, { &cu_host_address, "cuMemHostGetDevicePointer_v2" }, { &cu_host_free, "cuMemFreeHost" },
	{ &cu_register, "cuMemHostRegister_v2" }, { &cu_unregister, "cuMemHostUnregister" }, { &cu_fill, "cuMemsetD8Async" }, { &cu_htod, "cuMemcpyHtoD_v2" }, { &cu_dtoh, "cuMemcpyDtoH_v2" },
	{ &cu_htod_async, "cuMemcpyHtoDAsync_v2" }, { &cu_dtoh_async, "cuMemcpyDtoHAsync_v2" }, { &cu_dtod_async, "cuMemcpyDtoDAsync_v2" },
	{ &cu_stream, "cuStreamCreate" }, { &cu_stream_sync, "cuStreamSynchronize" }, { &cu_stream_wait, "cuStreamWaitEvent" }, { &cu_event, "cuEventCreate" },
	{ &cu_record, "cuEventRecord" }, { &cu_event_sync, "cuEventSynchronize" }, { &cu_event_query, "cuEventQuery" }, { &cu_host_function, "cuLaunchHostFunc" }, { &cu_wait_value, "cuStreamWaitValue64_v2" }, { &cu_write_value, "cuStreamWriteValue64_v2" }, { &cu_ctx_create, "cuCtxCreate_v2" }, { &cu_ctx_destroy, "cuCtxDestroy_v2" },
	{ &cu_batch, "cuMemcpyBatchAsync_v2" },
};

enum { NOT_READY = 600 };

static void *stream, *other;
static uint64_t *cell, cells;	/* 2 * CELLS words of page-locked memory, and their device address */
static size_t n = 8 << 20;
static double in_calls;	/* of steps */
static bool went_on;	/* word_for_gpu: before the copies were made */

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* CUmemcpyAttributes and CUmemLocation */
struct attributes { unsigned order; struct { int type, id; } from, to; unsigned flags; };

enum { DURING_API_CALL = 2 };

static void copy(uint64_t to, const void *from, size_t size)
{
	CHECK(cu_htod_async(to, from, size, stream));
}

static uint64_t word(uint64_t seed, size_t i)
{
	uint64_t v = (seed << 32) + i + 1;

	v *= 0x9e3779b97f4a7c15;
	return v ^ v >> 29;
}

static void fill(uint64_t *p, uint64_t seed)
{
	for (size_t i = 0; i < n / 8; i++)
		p[i] = word(seed, i);
}

static void expect(const uint64_t *p, uint64_t seed, const char *what)
{
	for (size_t i = 0; i < n / 8; i++)
		if (p[i] != word(seed, i)) {
			fprintf(stderr, PROGRAM ": %s: byte %zu of copy %llu is wrong\n", what, 8 * i, (unsigned long long)seed);
			exit(1);
		}
}

static void expect_device(uint64_t at, uint64_t seed, const char *what)
{
	uint64_t *p = malloc(n);

	for (size_t i = 0; i < n; i += KEEP)
		CHECK(cu_dtoh((char *)p + i, at + i, n - i < KEEP ? n - i : KEEP));
	expect(p, seed, what);
	free(p);
}

/* As a training loop does: buffers in turn, each filled anew once its copy is over, and work behind every copy. */
static void steps(unsigned count)
{
	uint64_t *from[BUFFERS], *back, *read, device, work, seen;
	double began;
	void *copied[BUFFERS];

	CHECK(cu_alloc(&seen, count * sizeof *read));
	CHECK(cu_alloc(&device, n));
	CHECK(cu_alloc(&work, count * n));
	CHECK(cu_host_alloc((void **)&back, n, 0));
	for (int i = 0; i < BUFFERS; i++) {
		CHECK(cu_host_alloc((void **)&from[i], n, 0));
		CHECK(cu_event(&copied[i], 0));
	}
	for (unsigned i = 0; i < count; i++) {
		unsigned k = i % BUFFERS;

		if (i == 1)
			begun();
		if (i >= BUFFERS)
			CHECK(cu_event_sync(copied[k]));
		fill(from[k], i);
		cell[i % CELLS] = word(i, 0);
		began = now();
		copy(device, from[k], n);
		CHECK(cu_dtod_async(seen + i * sizeof *read, cells + i % CELLS * sizeof *read, sizeof *read, stream));
		CHECK(cu_dtod_async(cells + (CELLS + i % CELLS) * sizeof *read, device, sizeof *read, stream));
		CHECK(cu_record(copied[k], stream));
		CHECK(cu_stream_wait(other, copied[k], 0));
		for (int part = 0; part < 4; part++)
			CHECK(cu_dtod_async(work + i * n + (size_t)part * (n / 4), device + (size_t)part * (n / 4), n / 4, part % 2 ? other : stream));
		CHECK(cu_record(copied[k], other));
		CHECK(cu_stream_wait(stream, copied[k], 0));
		CHECK(cu_fill(device, 0xee, n, stream));
		CHECK(cu_record(copied[k], stream));
		in_calls += now() - began;
	}
	CHECK(cu_dtoh_async(back, work + (count - 1) * n, n, stream));
	CHECK(cu_stream_sync(stream));
	expect(back, count - 1, "the last step");
	read = malloc(count * sizeof *read);
	CHECK(cu_dtoh(read, seen, count * sizeof *read));
	for (unsigned i = 0; i < count; i++) {
		expect_device(work + i * n, i, "a step");
		if (read[i] != word(i, 0) || (i + CELLS >= count && cell[CELLS + i % CELLS] != word(i, 0))) {
			fprintf(stderr, PROGRAM ": step %u: the GPU read %llx from host memory, and the program reads %llx\n", i,
				(unsigned long long)read[i], (unsigned long long)cell[CELLS + i % CELLS]);
			exit(1);
		}
	}
	free(read);
	CHECK(cu_free(seen));
	for (int i = 0; i < BUFFERS; i++)
		CHECK(cu_host_free(from[i]));
	CHECK(cu_host_free(back));
	CHECK(cu_free(work));
	CHECK(cu_free(device));
}

struct turn { uint64_t *p, seed; };

static void change(void *arg)
{
	struct turn *t = arg;

	fill(t->p, t->seed);
	cell[0] = t->seed;
}

/* The memory is changed in the stream's order: by a host function, by a download, by a fill. */
static void changed_in_order(void)
{
	uint64_t *from, one, two, three;
	struct turn t;

	CHECK(cu_host_alloc((void **)&from, n, 0));
	CHECK(cu_alloc(&one, n));
	CHECK(cu_alloc(&two, n));
	CHECK(cu_alloc(&three, n));
	fill(from, 1);
	cell[0] = 1;
	copy(one, from, n);
	t = (struct turn){ from, 2 };
	CHECK(cu_host_function(stream, change, &t));
	CHECK(cu_dtod_async(cells + sizeof *cell, cells, sizeof *cell, stream));
	copy(two, from, n);
	CHECK(cu_dtoh_async(from, one, n, stream));
	copy(three, from, n);
	CHECK(cu_dtoh_async(from, two, n, stream));
	CHECK(cu_stream_sync(stream));
	if (cell[1] != 2) {
		fprintf(stderr, PROGRAM ": the GPU read %llu behind a host function that had written 2\n", (unsigned long long)cell[1]);
		exit(1);
	}
	expect(from, 2, "a download");
	expect_device(one, 1, "before a host function");
	expect_device(two, 2, "behind a host function");
	expect_device(three, 1, "behind a download");
	CHECK(cu_free(one));
	CHECK(cu_free(two));
	CHECK(cu_free(three));
	CHECK(cu_host_free(from));
}

/* Work that waits for a word of the program's goes on when the program writes it, and not only when the copies before have been sent. */
static void word_for_gpu(void)
{
	uint64_t *from, device;
	void *copied;

	CHECK(cu_host_alloc((void **)&from, n, 0));
	CHECK(cu_alloc(&device, n));
	CHECK(cu_event(&copied, 0));
	fill(from, 1);
	cell[2] = cell[3] = 0;
	CHECK(cu_wait_value(other, cells + 2 * sizeof *cell, 1, 0));
	CHECK(cu_write_value(other, cells + 3 * sizeof *cell, 1, 0));
	for (int i = 0; i < 3; i++)
		copy(device, from, n);
	CHECK(cu_record(copied, stream));
	cell[2] = 1;
	while (!__atomic_load_n(&cell[3], __ATOMIC_ACQUIRE))
		nanosleep(&(struct timespec){ 0, 100000 }, NULL);
	went_on = cu_event_query(copied) == NOT_READY;
	CHECK(cu_stream_sync(stream));
	CHECK(cu_stream_sync(other));
	CHECK(cu_free(device));
	CHECK(cu_host_free(from));
}

/* The memory goes at once, and what takes its place is other memory. */
static void memory_goes(void)
{
	uint64_t one, two, *from, *own = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (own == MAP_FAILED)
		exit(1);
	CHECK(cu_alloc(&one, n));
	CHECK(cu_alloc(&two, n));
	CHECK(cu_register(own, n, 0));
	fill(own, 7);
	copy(one, own, n);
	CHECK(cu_unregister(own));
	memset(own, 0x11, n);
	munmap(own, n);
	CHECK(cu_host_alloc((void **)&from, n, 0));
	fill(from, 8);
	copy(two, from, n);
	CHECK(cu_host_free(from));
	CHECK(cu_host_alloc((void **)&from, n, 0));
	memset(from, 0x22, n);
	CHECK(cu_stream_sync(stream));
	expect_device(one, 7, "memory that was unregistered");
	expect_device(two, 8, "memory that was freed");
	CHECK(cu_host_free(from));
	CHECK(cu_free(one));
	CHECK(cu_free(two));
}

/* A wait for the stream is a wait for the memory, and so is a copy that the program waits for. */
static void waits(void *in)
{
	uint64_t *from, *own = malloc(n), one, two;

	CHECK(cu_alloc(&one, n));
	CHECK(cu_alloc(&two, n));
	CHECK(cu_host_alloc((void **)&from, n, 0));
	for (uint64_t seed = 30; seed < 33; seed++) {
		fill(from, seed);
		CHECK(cu_htod_async(one, from, n, in));
		CHECK(cu_stream_sync(in));
		memset(from, 0x33, n);
		expect_device(one, seed, "a copy that was waited for");
	}
	fill(from, 33);
	fill(own, 34);
	CHECK(cu_htod_async(one, from, n, NULL));
	CHECK(cu_htod(two, own, n / 8));
	memset(from, 0x44, n);
	memset(own, 0x44, n);
	CHECK(cu_htod(two + n / 8, from, n - n / 8));
	expect_device(one, 33, "before a copy that was waited for");
	CHECK(cu_host_free(from));
	CHECK(cu_free(one));
	CHECK(cu_free(two));
	free(own);
}

/* A context ends, and its copies with it; the memory that they read may be anything then. */
static void context_ends(void *ours)
{
	void *ctx, *s, *own = mmap(NULL, 4 * n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t device;

	if (own == MAP_FAILED)
		exit(1);
	CHECK(cu_ctx_create(&ctx, 0, 0));
	CHECK(cu_stream(&s, 1));
	CHECK(cu_register(own, 4 * n, 0));
	CHECK(cu_alloc(&device, 4 * n));
	CHECK(cu_htod_async(device, own, 4 * n, s));
	CHECK(cu_ctx_destroy(ctx));
	munmap(own, 4 * n);
	CHECK(cu_set_current(ours));
}

/* A copy in a batch may say that its memory is read before the call returns. */
static void batch(void)
{
	struct attributes how[2] = { { .order = 1 }, { .order = DURING_API_CALL } };
	size_t first[2] = { 0, 1 }, sizes[3] = { n, n, n };
	uint64_t *from[3], to[3], sources[3];

	for (int i = 0; i < 3; i++) {
		CHECK(cu_host_alloc((void **)&from[i], n, 0));
		CHECK(cu_alloc(&to[i], n));
		fill(from[i], 40 + (uint64_t)i);
		sources[i] = (uint64_t)(uintptr_t)from[i];
	}
	CHECK(cu_batch(to, sources, sizes, 3, how, first, 2, stream));
	memset(from[1], 0x55, n);
	memset(from[2], 0x55, n);
	CHECK(cu_stream_sync(stream));
	for (int i = 0; i < 3; i++) {
		expect_device(to[i], 40 + (uint64_t)i, "a copy of a batch");
		CHECK(cu_host_free(from[i]));
		CHECK(cu_free(to[i]));
	}
}

/* An event behind a copy is complete when the copy is, and not before. */
static void events(void)
{
	uint64_t *from, device, look[2];
	void *e;
	int rc;

	CHECK(cu_alloc(&device, n));
	CHECK(cu_event(&e, 0));
	CHECK(cu_host_alloc((void **)&from, n, 0));
	for (uint64_t seed = 20; seed < 24; seed++) {
		fill(from, seed);
		copy(device, from, n);
		CHECK(cu_record(e, stream));
		while ((rc = cu_event_query(e)) == NOT_READY)
			nanosleep(&(struct timespec){ 0, 100000 }, NULL);
		check(rc, "cuEventQuery");
		CHECK(cu_dtoh(look, device + n - sizeof look, sizeof look));
		if (look[1] != word(seed, n / 8 - 1)) {
			fprintf(stderr, PROGRAM ": an event is complete before its copy\n");
			exit(1);
		}
	}
	CHECK(cu_host_free(from));
	CHECK(cu_free(device));
}

int main(int argc, char **argv)
{
	unsigned count = argc > 1 ? (unsigned)atoi(argv[1]) : 6;
	double began, all;
	void *ctx;

	if (argc > 2)
		n = (size_t)atoi(argv[2]) << 20;
	load(functions, sizeof functions / sizeof *functions);
	CHECK(cu_init(0));
	CHECK(cu_retain(&ctx, 0));
	CHECK(cu_set_current(ctx));
	CHECK(cu_host_alloc((void **)&cell, 2 * CELLS * sizeof *cell, 0));
	CHECK(cu_host_address(&cells, cell, 0));
	waits(NULL);
	CHECK(cu_stream(&stream, 1));
	CHECK(cu_stream(&other, 1));
	began = now();
	steps(count);
	all = now() - began;
	waits(stream);
	batch();
	context_ends(ctx);
	changed_in_order();
	word_for_gpu();
	memory_goes();
	events();
	printf("{\"calls_ms\": %.1f, \"all_ms\": %.1f, \"went_on\": %s}\n", in_calls, all, went_on ? "true" : "false");
	return 0;
}
