/*
 * tenant LOAD TAG: works on the GPU without end, as fast as it can, until it is ended. Its commands come on stdin, one
 * a line: "pause" and "go", "once NS" for a kernel of that length, "hold" for a host function that does not return before
 * "release". On stdout it says its lease's socket, "ready" after its first work, "paused" and "once" when that is done, and
 * "held" and "released" in that function.
 *
 *	gemm	kernels of 613 us, a hundred or two queued
 *	copy	copies within the GPU, many queued
 *	small	items of 16 kernels of 25 us
 *	sync	a kernel of 90 us and a wait for it
 *	graph	a graph of 9 kernels of 60 us
 *	mixed	64 KiB to the GPU, a kernel of 300 us, 64 KiB back
 *	long	kernels of 25 ms
 *	longer	kernels of 60 ms
 *	sly	kernels of 25 ms, and in another stream a host function that does not return, with a kernel behind it
 *	slier	the same with kernels of 60 ms
 *	trickle	kernels of 15 ms, and in another stream functions that do return, each with a kernel behind it
 *	before	a kernel that does not end, and only then the function that does not return
 *	endless	a kernel that does not end, once stdin is closed
 *	queued	the same with 8 kernels of 500 ms behind a wait for a value, which it then writes
 *	none	nothing but what "once" asks for
 *
 * All calls are the driver's, found by name at run time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KIB 1024ULL

static void *cu;
static uint64_t tag;
static void *burn_kernel, *stream, *graph;
static unsigned long long a, b;
static char *host;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t told = PTHREAD_COND_INITIALIZER;
static int paused, hold, holding, heard;
static unsigned long long once;
static atomic_int news;

static void *entry(const char *name)
{
	void *f = dlsym(cu, name);

	if (!f) {
		fprintf(stderr, "tenant: %s\n", dlerror());
		exit(1);
	}
	return f;
}

static void check(int rc, const char *what)
{
	if (!rc)
		return;
	fprintf(stderr, "tenant: %s: error %d\n", what, rc);
	exit(1);
}

#define CALL(name, types, ...) do { \
	static int (*f_) types; \
	if (!f_) \
		*(void **)&f_ = entry(#name); \
	check(f_ __VA_ARGS__, #name); } while (0)

static void burn(uint64_t ns)
{
	void *args[] = { &ns, &tag };

	CALL(cuLaunchKernel, (void *, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
			      unsigned int, void *, void **, void **), (burn_kernel, 1, 1, 1, 1, 1, 1, 0, stream, args, NULL));
}

static void finish(void)
{
	CALL(cuStreamSynchronize, (void *), (stream));
}

/* Keeps up to two batches of work queued, so that there is always some; that of a batch is far more than a turn's. */
static void deep(unsigned int i, unsigned int batch)
{
	static void *mark[2];
	static int made[2];
	unsigned int k = i / batch % 2;

	if (i % batch != batch - 1)
		return;
	if (!made[k]++)
		CALL(cuEventCreate, (void **, unsigned int), (&mark[k], 2));
	CALL(cuEventRecord, (void *, void *), (mark[k], stream));
	if (made[!k])
		CALL(cuEventSynchronize, (void *), (mark[!k]));
}

static void gemm(unsigned int i)
{
	burn(613000);
	deep(i, 100);
}

static void copy(unsigned int i)
{
	CALL(cuMemcpyDtoDAsync_v2, (unsigned long long, unsigned long long, size_t, void *), (b, a, 256 * KIB, stream));
	deep(i, 400);
}

static void small(unsigned int i)
{
	(void)i;
	for (int k = 0; k < 16; k++)
		burn(25000);
	finish();
}

static void sync_each(unsigned int i)
{
	(void)i;
	burn(90000);
	finish();
}

static void graphs(unsigned int i)
{
	CALL(cuGraphLaunch, (void *, void *), (graph, stream));
	deep(i, 100);
}

static void mixed(unsigned int i)
{
	(void)i;
	CALL(cuMemcpyHtoDAsync_v2, (unsigned long long, const void *, size_t, void *), (a, host, 64 * KIB, stream));
	burn(300000);
	CALL(cuMemcpyDtoHAsync_v2, (void *, unsigned long long, size_t, void *), (host, a, 64 * KIB, stream));
	finish();
}

static void longs(unsigned int i)
{
	(void)i;
	burn(25000000);
	finish();
}

static void linger(void *arg)
{
	(void)arg;
	pause();
}

static void nothing(void *arg)
{
	(void)arg;
}

/* Work in another stream, behind a function. */
static void behind(void (*f)(void *))
{
	static void *aside;
	void *own = stream;

	if (!aside)
		CALL(cuStreamCreate, (void **, unsigned int), (&aside, 1));
	CALL(cuLaunchHostFunc, (void *, void (*)(void *), void *), (aside, f, NULL));
	stream = aside;
	burn(1000);
	stream = own;
}

static void ask_for_time(void)
{
	static int asked;

	if (!asked++)
		behind(linger);
}

static void sly(unsigned int i)
{
	(void)i;
	ask_for_time();
	burn(25000000);
	finish();
}

static void longer(unsigned int i)
{
	(void)i;
	burn(60000000);
	finish();
}

static void slier(unsigned int i)
{
	ask_for_time();
	longer(i);
}

static void trickle(unsigned int i)
{
	(void)i;
	for (int k = 0; k < 10; k++)
		behind(nothing);
	burn(15000000);
	finish();
}

static void before(unsigned int i)
{
	(void)i;
	for (int k = 0; k < 6; k++) {
		burn(1000);
		finish();
	}
	burn(1000000000000);
	ask_for_time();
	finish();
}

/* Processes of one lease begin together: when their stdin is closed. */
static void begin(void)
{
	pthread_mutex_lock(&lock);
	while (!heard)
		pthread_cond_wait(&told, &lock);
	pthread_mutex_unlock(&lock);
}

static void endless(unsigned int i)
{
	(void)i;
	begin();
	burn(1000000000000);
	finish();
}

static void queued(unsigned int i)
{
	static unsigned long long value;
	static void *aside;

	begin();
	if (!aside) {
		CALL(cuStreamCreate, (void **, unsigned int), (&aside, 1));
		CALL(cuMemAlloc_v2, (unsigned long long *, size_t), (&value, 4));
		CALL(cuMemsetD32Async, (unsigned long long, unsigned int, size_t, void *), (value, 0, 1, aside));
		CALL(cuStreamSynchronize, (void *), (aside));
	}
	CALL(cuStreamWaitValue32_v2, (void *, unsigned long long, unsigned int, unsigned int), (stream, value, i + 1, 0));
	for (int k = 0; k < 8; k++)
		burn(500000000);
	CALL(cuStreamWriteValue32_v2, (void *, unsigned long long, unsigned int, unsigned int), (aside, value, i + 1, 0));
	finish();
}

static const struct { const char *name; void (*item)(unsigned int i); } loads[] = {
	{ "gemm", gemm }, { "copy", copy }, { "small", small }, { "sync", sync_each }, { "graph", graphs },
	{ "mixed", mixed }, { "long", longs }, { "longer", longer }, { "sly", sly }, { "slier", slier }, { "trickle", trickle }, { "before", before },
	{ "endless", endless }, { "queued", queued }, { "none", NULL },
};

static void make_graph(void)
{
	void *g;

	CALL(cuStreamBeginCapture_v2, (void *, int), (stream, 2));
	for (int i = 0; i < 9; i++)
		burn(60000);
	CALL(cuStreamEndCapture, (void *, void **), (stream, &g));
	CALL(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long), (&graph, g, 0));
}

static void *listen_stdin(void *arg)
{
	char line[64];

	while (fgets(line, sizeof(line), stdin)) {
		pthread_mutex_lock(&lock);
		if (!strcmp(line, "pause\n"))
			paused = 1;
		else if (!strcmp(line, "go\n"))
			paused = 0;
		else if (!strcmp(line, "hold\n"))
			hold = holding = 1;
		else if (!strcmp(line, "release\n"))
			holding = 0;
		else
			sscanf(line, "once %llu", &once);
		atomic_store(&news, 1);
		pthread_cond_broadcast(&told);
		pthread_mutex_unlock(&lock);
	}
	pthread_mutex_lock(&lock);
	heard = 1;
	pthread_cond_broadcast(&told);
	pthread_mutex_unlock(&lock);
	return arg;
}

static void say(const char *what)
{
	puts(what);
	fflush(stdout);
}

static void held(void *arg)
{
	(void)arg;
	say("held");
	pthread_mutex_lock(&lock);
	while (holding)
		pthread_cond_wait(&told, &lock);
	pthread_mutex_unlock(&lock);
	say("released");
}

/* Does as it is told; returns when there is to be work. */
static void obey(int idle)
{
	unsigned long long ns;
	int was = 0;

	pthread_mutex_lock(&lock);
	do {
		atomic_store(&news, 0);
		ns = once;
		once = 0;
		if (hold) {
			hold = 0;
			CALL(cuLaunchHostFunc, (void *, void (*)(void *), void *), (stream, held, NULL));
		}
		if (ns) {
			pthread_mutex_unlock(&lock);
			burn(ns);
			finish();
			say("once");
			pthread_mutex_lock(&lock);
			continue;
		}
		if (paused && !was) {
			finish();
			say("paused");
			was = 1;
		}
		if ((paused || idle) && !atomic_load(&news))
			pthread_cond_wait(&told, &lock);
	} while (paused || idle || once);
	pthread_mutex_unlock(&lock);
}

int main(int argc, char **argv)
{
	static const char ptx[] = ".version 7.0\n.target sm_52\n.address_size 64\n"
				  ".visible .entry burn(.param .u64 ns, .param .u64 tag) { ret; }\n";
	void (*item)(unsigned int) = NULL;
	void *ctx, *module;
	pthread_t t;
	size_t l;

	for (l = 0; argc == 3 && l < sizeof(loads) / sizeof(loads[0]) && strcmp(loads[l].name, argv[1]); l++)
		;
	if (argc != 3 || l == sizeof(loads) / sizeof(loads[0])) {
		fprintf(stderr, "usage: tenant LOAD TAG\n");
		return 2;
	}
	item = loads[l].item;
	tag = strtoull(argv[2], NULL, 10);
	cu = dlopen("libcuda.so.1", RTLD_NOW);
	if (!cu) {
		fprintf(stderr, "tenant: %s\n", dlerror());
		return 1;
	}
	host = calloc(1, 64 * KIB);
	CALL(cuInit, (unsigned int), (0));
	CALL(cuDevicePrimaryCtxRetain, (void **, int), (&ctx, 0));
	CALL(cuCtxSetCurrent, (void *), (ctx));
	CALL(cuModuleLoadData, (void **, const void *), (&module, ptx));
	CALL(cuModuleGetFunction, (void **, void *, const char *), (&burn_kernel, module, "burn"));
	CALL(cuStreamCreate, (void **, unsigned int), (&stream, 1));
	CALL(cuMemAlloc_v2, (unsigned long long *, size_t), (&a, 256 * KIB));
	CALL(cuMemAlloc_v2, (unsigned long long *, size_t), (&b, 256 * KIB));
	make_graph();
	burn(1000);
	finish();
	printf("lease %s\n", getenv("SLUICE_SOCKET") ? getenv("SLUICE_SOCKET") : "-");
	say("ready");
	if (pthread_create(&t, NULL, listen_stdin, NULL))
		return 1;
	for (unsigned int i = 0;; i++) {
		if (!item || atomic_load(&news))
			obey(!item);
		item(i);
	}
}
