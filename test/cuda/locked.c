/*
 * locked WHAT: page-locked memory whose copies are on their way, and what a program may do meanwhile. WHAT is
 *
 *	exit	it ends
 *	cancel	a thread is cancelled that waits for a host function, which may write to the memory, before it copies
 *	reach	another thread gives kernels the memory's address, and waits for the device
 *	query	it asks whether events and streams are through
 *	behind	a host function runs that they are behind, for longer than as many bytes take to be sent as the worker takes ahead of it
 *
 * It ends with PASS. It needs a C compiler and libcuda.so.1 at run time, no header of NVIDIA's.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define PROGRAM "locked"
#include "plain.h"

static int (*cu_init)(unsigned);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_alloc)(uint64_t *, size_t);
static int (*cu_host_alloc)(void **, size_t, unsigned);
static int (*cu_host_free)(void *);
static int (*cu_host_pointer)(uint64_t *, void *, unsigned);
static int (*cu_htod)(uint64_t, const void *, size_t);
static int (*cu_dtoh)(void *, uint64_t, size_t);
static int (*cu_htod_async)(uint64_t, const void *, size_t, void *);
static int (*cu_stream)(void **, unsigned);
static int (*cu_stream_sync)(void *);
static int (*cu_stream_query)(void *);
static int (*cu_stream_wait)(void *, void *, unsigned);
static int (*cu_ctx_sync)(void);
static int (*cu_event)(void **, unsigned);
static int (*cu_record)(void *, void *);
static int (*cu_event_query)(void *);
static int (*cu_host_function)(void *, void (*)(void *), void *);

static const struct function functions[] = {
	{ &cu_init, "cuInit" }, { &cu_retain, "cuDevicePrimaryCtxRetain" }, { &cu_set_current, "cuCtxSetCurrent" }, { &cu_alloc, "cuMemAlloc_v2" },
	{ &cu_host_alloc, "cuMemHostAlloc" }, { &cu_host_free, "cuMemFreeHost" }, { &cu_host_pointer, "cuMemHostGetDevicePointer_v2" },
	{ &cu_htod, "cuMemcpyHtoD_v2" }, { &cu_dtoh, "cuMemcpyDtoH_v2" }, { &cu_htod_async, "cuMemcpyHtoDAsync_v2" }, { &cu_stream, "cuStreamCreate" },
	{ &cu_stream_sync, "cuStreamSynchronize" }, { &cu_stream_query, "cuStreamQuery" }, { &cu_stream_wait, "cuStreamWaitEvent" }, { &cu_ctx_sync, "cuCtxSynchronize" },
	{ &cu_event, "cuEventCreate" }, { &cu_record, "cuEventRecord" }, { &cu_event_query, "cuEventQuery" }, { &cu_host_function, "cuLaunchHostFunc" },
};

enum { NOT_READY = 600, MIB = 1 << 20, ALL = 48 * MIB };

static void *ctx, *stream, *other;
static struct { uint64_t *p, device; _Atomic unsigned copies; _Atomic bool done; } shared;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void fail(const char *what)
{
	fprintf(stderr, PROGRAM ": %s\n", what);
	exit(1);
}

static void fill(uint64_t *p, size_t n, uint64_t seed)
{
	for (size_t i = 0; i < n / 8; i++)
		p[i] = ((seed << 32) + i) * 0x9e3779b97f4a7c15;
}

/* Page-locked memory, and device memory for it. */
static uint64_t *locked(size_t n, uint64_t *device)
{
	void *p;

	CHECK(cu_host_alloc(&p, n, 0));
	CHECK(cu_alloc(device, n));
	fill(p, n, n);
	return p;
}

/* The next copy finds that the link is slow, so that it is made in the background. */
static void measure(void)
{
	uint64_t device, *p = locked(4 * MIB, &device);

	CHECK(cu_htod(device, p, 4 * MIB));
}

static void ends(void)
{
	uint64_t device, *p;

	measure();
	p = locked(ALL, &device);
	CHECK(cu_htod_async(device, p, ALL, stream));
	usleep(300000); /* now its bytes wait in every buffer of the way */
}

static _Atomic bool runs;

static void slow(void *arg)
{
	(void)arg;
	runs = true;
	usleep(700000);
}

static void *waits(void *arg)
{
	CHECK(cu_set_current(ctx));
	cu_htod(shared.device, shared.p, MIB); /* if the wait is a cancellation point, the thread ends in it */
	for (;;)
		pause();
	return arg;
}

static void cancel(void)
{
	pthread_t t;

	shared.p = locked(MIB, &shared.device);
	CHECK(cu_host_function(stream, slow, NULL));
	while (!runs)
		usleep(1000);
	if (pthread_create(&t, NULL, waits, NULL))
		fail("no thread");
	usleep(200000); /* by now it waits, most likely */
	pthread_cancel(t);
	pthread_join(t, NULL);
	CHECK(cu_host_function(stream, slow, NULL));
	CHECK(cu_stream_sync(stream));
	CHECK(cu_htod(shared.device, shared.p, MIB));
	CHECK(cu_host_free(shared.p));
}

static void *copies(void *arg)
{
	uint64_t *back = malloc(ALL);

	CHECK(cu_set_current(ctx));
	while (!shared.done) {
		shared.copies++;
		CHECK(cu_htod(shared.device, shared.p, ALL));
	}
	CHECK(cu_dtoh(back, shared.device, ALL));
	if (memcmp(back, shared.p, ALL))
		fail("a copy is wrong");
	free(back);
	return arg;
}

static void reach(void)
{
	pthread_t t;

	for (unsigned i = 0; i < 4; i++) {
		uint64_t there;

		shared.p = locked(ALL, &shared.device);
		shared.copies = 0;
		shared.done = false;
		if (pthread_create(&t, NULL, copies, NULL))
			fail("no thread");
		while (shared.copies < 1 + i % 2)
			usleep(1000);
		usleep(20000); /* in the middle of a copy, most likely */
		CHECK(cu_host_pointer(&there, shared.p, 0));
		CHECK(cu_ctx_sync());
		shared.done = true;
		pthread_join(t, NULL);
		CHECK(cu_host_free(shared.p));
	}
}

/* Asks until the answer is that it is through, and returns how long the longest question took. */
static double ask(int (*query)(void *), void *what, const char *call)
{
	double longest = 0;
	int rc;

	do {
		double began = now();

		rc = query(what);
		if (now() - began > longest)
			longest = now() - began;
		usleep(1000);
	} while (rc == NOT_READY);
	check(rc, call);
	return longest;
}

static void queries(void)
{
	uint64_t device, look[2], *p;
	double longest[3], took;
	void *e;

	measure();
	p = locked(ALL, &device);
	CHECK(cu_event(&e, 0));
	for (int i = 0; i < 3; i++) {
		double began = now();

		fill(p, ALL, (uint64_t)i);
		CHECK(cu_htod_async(device, p, ALL, stream));
		CHECK(cu_record(e, stream));
		CHECK(cu_stream_wait(other, e, 0));
		longest[i] = i ? ask(cu_stream_query, i == 1 ? stream : other, "cuStreamQuery") : ask(cu_event_query, e, "cuEventQuery");
		took = now() - began;
		CHECK(cu_dtoh(look, device + ALL - sizeof look, sizeof look));
		if (memcmp(look, (char *)p + ALL - sizeof look, sizeof look))
			fail("the copy was not through");
		if (longest[i] > took / 4) {
			fprintf(stderr, PROGRAM ": question %d took %.1f of %.1f ms\n", i, longest[i], took);
			exit(1);
		}
	}
}

static void slower(void *arg)
{
	(void)arg;
	usleep(2500000);
}

/* Copies of pageable and of page-locked memory, in one piece and in many. */
static void behind(void)
{
	enum { LONG = 200 * MIB };
	uint64_t device, *p = locked(LONG, &device), *back = malloc(LONG), *own = malloc(LONG);

	measure();
	for (int i = 0; i < 3; i++) {
		uint64_t *from = i == 1 ? p : own;
		size_t part = i == 2 ? 4 * MIB : LONG;

		fill(from, LONG, (uint64_t)i);
		CHECK(cu_host_function(stream, slower, NULL));
		for (size_t at = 0; at < LONG; at += part)
			CHECK(cu_htod_async(device + at, (char *)from + at, part, stream));
		CHECK(cu_stream_sync(stream));
		CHECK(cu_dtoh(back, device, LONG));
		if (memcmp(back, from, LONG))
			fail("a copy behind a host function is wrong");
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	load(functions, sizeof functions / sizeof *functions);
	CHECK(cu_init(0));
	CHECK(cu_retain(&ctx, 0));
	CHECK(cu_set_current(ctx));
	CHECK(cu_stream(&stream, 1));
	CHECK(cu_stream(&other, 1));
	if (!strcmp(what, "exit"))
		ends();
	else if (!strcmp(what, "cancel"))
		cancel();
	else if (!strcmp(what, "reach"))
		reach();
	else if (!strcmp(what, "query"))
		queries();
	else if (!strcmp(what, "behind"))
		behind();
	else
		fail("exit, cancel, reach, query or behind");
	puts("PASS");
	return 0;
}
