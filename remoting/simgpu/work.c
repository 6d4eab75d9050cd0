/*
 * What an op does when its turn comes. It runs on a stream's thread (or the thread
 * of a call that waits), without the lock: a work holds plain addresses that were
 * checked when it was made, and freeing memory waits for the device.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

static void copy_run(const struct copy *c)
{
	for (size_t z = 0; z < c->depth; z++)
		for (size_t y = 0; y < c->height; y++)
			memmove(c->dst + z * c->dst_slice + y * c->dst_pitch,
				c->src + z * c->src_slice + y * c->src_pitch, c->width);
}

static void set_run(const CUDA_MEMSET_NODE_PARAMS *p)
{
	for (size_t y = 0; y < p->height; y++) {
		char *row = (char *)(uintptr_t)p->dst + y * p->pitch;
		uint16_t v16 = (uint16_t)p->value;
		uint32_t v32 = p->value;

		switch (p->elementSize) {
		case 1:
			memset(row, (int)(p->value & 255), p->width);
			break;
		case 2:
			for (size_t i = 0; i < p->width; i++)
				memcpy(row + 2 * i, &v16, 2);
			break;
		default:
			for (size_t i = 0; i < p->width; i++)
				memcpy(row + 4 * i, &v32, 4);
			break;
		}
	}
}

static bool value_met(uint64_t have, uint64_t want, unsigned int how, bool wide)
{
	switch (how & 3) {
	case CU_STREAM_WAIT_VALUE_GEQ:
		return wide ? (int64_t)(have - want) >= 0 : (int32_t)((uint32_t)have - (uint32_t)want) >= 0;
	case CU_STREAM_WAIT_VALUE_EQ:
		return have == want;
	case CU_STREAM_WAIT_VALUE_AND:
		return (have & want) != 0;
	default:
		return wide ? ~(have | want) != 0 : (uint32_t)~(have | want) != 0;
	}
}

static void wait_value(struct work *w, struct ctx *c)
{
	void *p = (void *)(uintptr_t)w->val.addr;
	struct timespec nap = { 0, 50000 };
	bool dying = false;

	while (!dying) {
		uint64_t have = w->val.wide ? __atomic_load_n((uint64_t *)p, __ATOMIC_ACQUIRE)
					    : __atomic_load_n((uint32_t *)p, __ATOMIC_ACQUIRE);

		if (value_met(have, w->val.wide ? w->val.value : (uint32_t)w->val.value, w->val.flags, w->val.wide))
			return;
		nanosleep(&nap, NULL);
		pthread_mutex_lock(&sim.lock);
		dying = c->dying;
		pthread_mutex_unlock(&sim.lock);
	}
}

static void write_value(struct work *w)
{
	void *p = (void *)(uintptr_t)w->val.addr;

	if (w->val.wide)
		__atomic_store_n((uint64_t *)p, w->val.value, __ATOMIC_RELEASE);
	else
		__atomic_store_n((uint32_t *)p, (uint32_t)w->val.value, __ATOMIC_RELEASE);
}

/* Several processes may record one event: its number never falls. */
static void signal_run(struct work *w)
{
	_Atomic uint64_t *p = (_Atomic uint64_t *)(uintptr_t)w->val.addr;
	uint64_t old = atomic_load(p);

	while (old < w->val.value && !atomic_compare_exchange_weak(p, &old, w->val.value))
		;
}

static void free_run(struct work *w)
{
	struct alloc *a;

	pthread_mutex_lock(&sim.lock);
	a = mem_find(w->free.addr);
	if (a && a->id == w->free.id && a->akind == A_SHARED)
		ipc_close(a);
	else if (a && a->id == w->free.id)
		mem_free(a);
	pthread_mutex_unlock(&sim.lock);
}

/* Copying takes time on the device too, if the engine simulates it. */
static void moved(struct ctx *c, uint64_t bytes, uint64_t p, uint64_t q)
{
	uint64_t ns;
	bool inner;

	if (!engine_on())
		return;
	pthread_mutex_lock(&sim.lock);
	inner = mem_device(p) && mem_device(q);
	pthread_mutex_unlock(&sim.lock);
	for (ns = engine_bytes(bytes, inner); ns;)
		ns -= engine_step(c->dev, ns, !inner);
}

CUresult work_run(struct work *w, struct ctx *c)
{
	switch (w->kind) {
	case W_KERNEL:
		return kernel_run(&w->kernel, c);
	case W_COPY:
		copy_run(&w->copy.c);
		moved(c, w->copy.c.width * w->copy.c.height * w->copy.c.depth, (uintptr_t)w->copy.c.dst,
		      (uintptr_t)w->copy.c.src);
		break;
	case W_SET:
		set_run(&w->set.p);
		moved(c, w->set.p.width * w->set.p.elementSize * w->set.p.height, w->set.p.dst, w->set.p.dst);
		break;
	case W_HOST:
		sim_in_host_fn = true;
		w->host.fn(w->host.arg);
		sim_in_host_fn = false;
		break;
	case W_CALLBACK:
		sim_in_host_fn = true;
		w->callback.fn(w->callback.stream, w->callback.status, w->callback.arg);
		sim_in_host_fn = false;
		break;
	case W_GRAPH:
		plan_begin(w->graph.plan);
		return plan_run(w->graph.plan, c);
	case W_COND:
		return cond_run(w, c);
	case W_WAIT:
		wait_value(w, c);
		break;
	case W_WRITE:
		write_value(w);
		break;
	case W_SIGNAL:
		signal_run(w);
		break;
	case W_FREE:
		free_run(w);
		break;
	default:
		break;
	}
	return CUDA_SUCCESS;
}

/* Frees what w owns. Called with the lock held. */
void work_drop(struct work *w)
{
	switch (w->kind) {
	case W_KERNEL:
		free(w->kernel.params);
		w->kernel.params = NULL;
		if (w->kernel.module)
			module_unref(w->kernel.module);
		w->kernel.module = NULL;
		break;
	case W_COPY:
		free(w->copy.c.own);
		w->copy.c.own = NULL;
		break;
	case W_GRAPH:
		if (w->graph.plan)
			plan_unref(w->graph.plan);
		w->graph.plan = NULL;
		break;
	case W_ALLOC:
	case W_GFREE:
		if (w->gmem.m)
			gmem_unref(w->gmem.m);
		w->gmem.m = NULL;
		break;
	case W_COND:
		for (size_t i = 0; i < w->cond.n; i++)
			plan_unref(w->cond.body[i]);
		free(w->cond.body);
		w->cond.body = NULL;
		w->cond.n = 0;
		if (w->cond.c)
			cond_unref(w->cond.c);
		w->cond.c = NULL;
		break;
	default:
		break;
	}
}

/* Makes a copy of a work that stays: for graph nodes. Called with the lock held. */
void work_clone(struct work *to, const struct work *from)
{
	*to = *from;
	switch (from->kind) {
	case W_KERNEL:
		to->kernel.params = xcalloc(1, from->kernel.nbytes);
		memcpy(to->kernel.params, from->kernel.params, from->kernel.nbytes);
		if (to->kernel.module)
			to->kernel.module->refs++;
		break;
	case W_COPY:
		if (from->copy.c.own) {
			to->copy.c.own = xcalloc(1, from->copy.c.width);
			memcpy(to->copy.c.own, from->copy.c.own, from->copy.c.width);
			to->copy.c.src = to->copy.c.own;
		}
		break;
	case W_GRAPH:
		if (to->graph.plan)
			to->graph.plan->refs++;
		break;
	case W_ALLOC:
	case W_GFREE:
		to->gmem.m->refs++;
		break;
	case W_COND:
		to->cond.c->refs++;
		to->cond.body = xcalloc(from->cond.n, sizeof(*to->cond.body));
		for (size_t i = 0; i < from->cond.n; i++) {
			to->cond.body[i] = from->cond.body[i];
			to->cond.body[i]->refs++;
		}
		break;
	default:
		break;
	}
}
