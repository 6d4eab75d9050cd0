/*
 * A test is a function that runs in a process of its own, forked before
 * anything touches CUDA, with its own shared state and environment.
 */
#ifndef SLUICE_SIM_TESTING_H
#define SLUICE_SIM_TESTING_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <libgen.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../api/cuprotos.h"

struct test {
	const char *name;
	void (*fn)(void);
	const char *env[6];		/* NAME=VALUE */
};

static char test_dir[4000];		/* where libraries and twins are */
static int test_bad;

#define CHECK(e) do { \
	if (!(e)) { \
		fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #e); \
		test_bad++; \
	} } while (0)
#define IS(e, want) do { \
	CUresult r_ = (e); \
	if (r_ != (want)) { \
		fprintf(stderr, "%s:%d: %s is %d, not %d\n", __FILE__, __LINE__, #e, r_, (int)(want)); \
		test_bad++; \
	} } while (0)
/* What must work for the rest to make sense. */
#define CU(e) do { \
	CUresult r_ = (e); \
	if (r_) { \
		fprintf(stderr, "%s:%d: %s is %d\n", __FILE__, __LINE__, #e, r_); \
		_exit(3); \
	} } while (0)

#define MIB (1ULL << 20)

__attribute__((unused)) static double now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* PTX as far as the simulator reads it, naming these functions. */
__attribute__((unused)) static const char *ptx(const char *first, ...)
{
	static char text[4096];
	size_t n = (size_t)snprintf(text, sizeof(text), ".version 7.0\n.target sm_52\n.address_size 64\n");
	va_list ap;

	va_start(ap, first);
	for (const char *s = first; s; s = va_arg(ap, const char *))
		n += (size_t)snprintf(text + n, sizeof(text) - n, ".visible .entry %s() { ret; }\n", s);
	va_end(ap);
	return text;
}

/* Device 0's primary context, current. */
__attribute__((unused)) static CUcontext begin(void)
{
	CUcontext c;

	CU(cuInit(0));
	CU(cuDevicePrimaryCtxRetain(&c, 0));
	CU(cuCtxSetCurrent(c));
	return c;
}

__attribute__((unused)) static CUfunction kernel(const char *name)
{
	CUfunction f;
	CUmodule m;

	CU(cuModuleLoadData(&m, ptx(name, NULL)));
	CU(cuModuleGetFunction(&f, m, name));
	return f;
}

__attribute__((unused)) static CUresult run1(CUfunction f, CUstream s, void **args)
{
	return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, args, NULL);
}

static void test_child(const struct test *t)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/state.%d", test_dir, (int)getpid());
	setenv("SLUICE_SIM_STATE", path, 1);
	snprintf(path, sizeof(path), "%s/twins.so", test_dir);
	setenv("SLUICE_SIM_KERNELS", path, 1);
	for (int i = 0; i < 6 && t->env[i]; i++)
		putenv(strdup(t->env[i]));
	alarm(60);
	t->fn();
	unlink(getenv("SLUICE_SIM_STATE"));
	exit(test_bad ? 1 : 0);
}

__attribute__((unused)) static int run_tests(const struct test *t, int argc, char **argv)
{
	char self[4000];
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
	int bad = 0;

	if (n < 0)
		return 1;
	self[n] = 0;
	snprintf(test_dir, sizeof(test_dir), "%s", dirname(self));
	for (; t->name; t++) {
		double start = now_ms();
		int st = 0;
		pid_t pid;

		if (argc > 1 && strcmp(argv[1], t->name))
			continue;
		fflush(NULL);
		pid = fork();
		if (!pid)
			test_child(t);
		while (waitpid(pid, &st, 0) < 0 && errno == EINTR)
			;
		if (st) {
			char path[4096];

			snprintf(path, sizeof(path), "%s/state.%d", test_dir, (int)pid);
			unlink(path);
			bad++;
		}
		printf("%-4s %s: %s (%.0f ms)\n", st ? "FAIL" : "ok", basename(argv[0]), t->name, now_ms() - start);
	}
	return bad != 0;
}

#endif
