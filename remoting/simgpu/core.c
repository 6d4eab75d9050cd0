/*
 * The one lock, the checks that every call begins with, and the registry of
 * handles. A handle is a number that holds an index and a generation, never an
 * address: a stale, foreign or invented one is recognised, not followed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

struct sim sim = { .lock = PTHREAD_MUTEX_INITIALIZER };
__thread bool sim_in_host_fn;

#define TAG 0x5aULL			/* bits 47..40 of every handle */
#define INDEX_BITS 20

struct slot { struct obj *o; uint16_t gen; };
static struct slot *slots;
static size_t nslots, capslots;
static uint32_t *freelist;
static size_t nfree, capfree;

void *xcalloc(size_t n, size_t size)
{
	void *p = calloc(n ? n : 1, size ? size : 1);

	if (!p) {
		fprintf(stderr, "simgpu: out of host memory\n");
		abort();
	}
	return p;
}

/* Grows p, which has room for *cap elements of size bytes, to n; new elements are zeroed. */
void *xgrow(void *p, size_t n, size_t *cap, size_t size)
{
	size_t want = *cap ? *cap : 8;

	if (n <= *cap)
		return p;
	while (want < n)
		want *= 2;
	p = realloc(p, want * size);
	if (!p) {
		fprintf(stderr, "simgpu: out of host memory\n");
		abort();
	}
	memset((char *)p + *cap * size, 0, (want - *cap) * size);
	*cap = want;
	return p;
}

uint64_t sim_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

uint64_t sim_time(int dev)
{
	return engine_on() ? engine_now(dev) : sim_now();
}

void *obj_new(enum kind kind, struct ctx *c, size_t size)
{
	struct obj *o = xcalloc(1, size);
	uint32_t i;

	if (nfree) {
		i = freelist[--nfree];
	} else {
		if (nslots >= 1U << INDEX_BITS) {
			free(o);
			return NULL;
		}
		slots = xgrow(slots, nslots + 1, &capslots, sizeof(*slots));
		i = (uint32_t)nslots++;
		slots[i].gen = 1;
	}
	slots[i].o = o;
	o->kind = kind;
	o->ctx = c;
	o->handle = TAG << 40 | (uint64_t)slots[i].gen << 24 | (uint64_t)i << 4;
	return o;
}

void *obj_get_id(uint64_t h, enum kind kind)
{
	uint64_t i = h >> 4 & ((1U << INDEX_BITS) - 1);

	if (h >> 40 != TAG || (h & 15) || i >= nslots || !slots[i].o || slots[i].gen != (uint16_t)(h >> 24) ||
	    slots[i].o->kind != kind)
		return NULL;
	return slots[i].o;
}

/* A real driver follows a handle wherever it leads. With SLUICE_SIM_STRICT so does this one, which then ends. */
static void follow(uint64_t h)
{
	uint64_t i = h >> 4 & ((1U << INDEX_BITS) - 1);

	if (!sim.strict || !h || (h >> 40 == TAG && !(h & 15) && i < nslots && slots[i].o && slots[i].gen == (uint16_t)(h >> 24)))
		return;
	fprintf(stderr, "simgpu: %#llx is no handle%s\n", (unsigned long long)h,
		h >> 40 == TAG && i < nslots ? " any more" : "");
	abort();
}

/* For the handles that a program gives. */
void *obj_get(const void *handle, enum kind kind)
{
	void *o = obj_get_id((uintptr_t)handle, kind);

	if (!o)
		follow((uintptr_t)handle);
	return o;
}

void obj_forget(void *p)
{
	struct obj *o = p;
	uint64_t i = o->handle >> 4 & ((1U << INDEX_BITS) - 1);

	if (slots[i].o != o)
		return;
	slots[i].o = NULL;
	if (!++slots[i].gen)
		slots[i].gen = 1;
	freelist = xgrow(freelist, nfree + 1, &capfree, sizeof(*freelist));
	freelist[nfree++] = (uint32_t)i;
}

void obj_del(void *o)
{
	obj_forget(o);
	free(o);
}

/* The next object that belongs to c. */
struct obj *obj_next(size_t *it, struct ctx *c)
{
	while (*it < nslots) {
		struct obj *o = slots[(*it)++].o;

		if (o && o->ctx == c)
			return o;
	}
	return NULL;
}

CUresult sim_enter(void)
{
	pthread_mutex_lock(&sim.lock);
	if (sim.exiting)
		return sim_leave(CUDA_ERROR_DEINITIALIZED);
	if (sim_in_host_fn)
		return sim_leave(CUDA_ERROR_NOT_PERMITTED);
	if (!sim.inited || sim.pid != getpid())
		return sim_leave(sim.init_result ? sim.init_result : CUDA_ERROR_NOT_INITIALIZED);
	return CUDA_SUCCESS;
}

CUresult sim_enter_ctx(struct ctx **out)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	c = ctx_current();
	if (!c)
		return sim_leave(ctx_dangling() ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT);
	if (!ctx_usable(c))
		return sim_leave(c->ever ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT);
	if (ctx_broken(c))
		return sim_leave(c->sticky);
	*out = c;
	return CUDA_SUCCESS;
}

CUresult sim_leave(CUresult r)
{
	pthread_mutex_unlock(&sim.lock);
	return r;
}

static CUresult start(void)
{
	const char *strict = getenv("SLUICE_SIM_STRICT");
	pthread_condattr_t a;
	CUresult r;

	if (state_config(&sim.cfg) || engine_config())
		return CUDA_ERROR_INVALID_VALUE;
	sim.strict = strict && *strict;
	r = fault_init();		/* init=CODE ends here */
	if (r)
		return r;
	if (state_open(&sim.cfg, true)) {
		fprintf(stderr, "simgpu: cannot open the shared state; see SLUICE_SIM_STATE\n");
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
	state_visible(&sim.cfg);
	if (!sim.cfg.ndev)
		return CUDA_ERROR_NO_DEVICE;
	pthread_condattr_init(&a);
	pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
	pthread_cond_init(&sim.progress, &a);
	pthread_condattr_destroy(&a);
	r = mem_init();
	if (!r)
		r = twins_init();
	return r;
}

API CUresult cuInit(unsigned int flags)
{
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim.lock);
	if (sim.exiting)
		return sim_leave(CUDA_ERROR_DEINITIALIZED);
	if (sim.inited)		/* CUDA cannot be used in a forked child */
		return sim_leave(sim.pid == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED);
	sim.init_result = start();
	if (sim.init_result == CUDA_SUCCESS) {
		sim.pid = getpid();
		sim.inited = true;
	}
	return sim_leave(sim.init_result);
}

API CUresult cuDriverGetVersion(int *version)
{
	struct sim_config cfg;

	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	if (state_config(&cfg))
		return CUDA_ERROR_INVALID_VALUE;
	*version = cfg.driver;
	return CUDA_SUCCESS;
}

/*
 * At exit streams may still run, so nothing is freed that they use: later calls are
 * refused, and the memory is given back to the machine.
 */
__attribute__((destructor)) static void leave(void)
{
	if (pthread_mutex_trylock(&sim.lock))
		return;
	sim.exiting = true;
	if (sim.inited && sim.pid == getpid())
		state_leave();
	pthread_mutex_unlock(&sim.lock);
}
