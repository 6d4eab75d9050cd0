/*
 * Device memory. Each device is an arena of address space, four times its memory,
 * so that fragmentation never fails an allocation that the account allows. It is
 * divided in granules of 2 MiB. An allocation of more than 1 MiB owns whole
 * granules; smaller ones share a granule, a slab of 512-byte units. A granule is
 * charged to the machine's account (state.c) from its first use to its last, and
 * then its pages go back to the host.
 *
 * Other ranges that a call may name (host memory, see hostmem.c; reserved and
 * mapped addresses, see vmm.c) are in one array sorted by address. All under
 * sim.lock.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim.h"

#define ARENA_FACTOR 4

CUresult mem_init(void)
{
	for (int i = 0; i < sim.cfg.ndev; i++) {
		struct device *d = &sim.dev[i];
		uint64_t size = sim.cfg.mem * ARENA_FACTOR;
		char *p = mmap(NULL, size + GRANULE, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (p == MAP_FAILED)
			return CUDA_ERROR_OPERATING_SYSTEM;
		madvise(p, size + GRANULE, MADV_DONTDUMP);
		d->arena = ROUND_UP((uint64_t)(uintptr_t)p, GRANULE);
		d->ngran = size / GRANULE;
		d->gran = xcalloc(d->ngran, sizeof(*d->gran));
		d->pool = obj_new(K_POOL, NULL, sizeof(*d->pool));
		if (!d->pool)
			return CUDA_ERROR_OUT_OF_MEMORY;
		d->pool->dev = i;
		d->pool->dflt = true;
		d->pool->access = access_own(i);
		d->pool->attr[1] = d->pool->attr[2] = d->pool->attr[3] = 1;
		d->pool->props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
		d->pool->props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		d->pool->props.location.id = i;
		d->current_pool = d->pool;
	}
	return CUDA_SUCCESS;
}

/* SLUICE_SIM_FAULT alloc=nth */
bool alloc_must_fail(void)
{
	return sim.alloc_fail && ++sim.alloc_count == sim.alloc_fail;
}

struct device *dev_of(uint64_t p)
{
	for (int i = 0; i < sim.cfg.ndev; i++)
		if (p - sim.dev[i].arena < sim.dev[i].ngran * GRANULE)
			return &sim.dev[i];
	return NULL;
}

/* The index of the first of n free granules in a row, next fit; d->ngran if there is none. */
static size_t gran_find(struct device *d, size_t n)
{
	size_t run = 0, i = d->cursor, looked;

	for (looked = 0; looked < d->ngran + n; looked++, i++) {
		if (i >= d->ngran) {
			i = 0;
			run = 0;
		}
		run = d->gran[i] ? 0 : run + 1;
		if (run == n) {
			d->cursor = i + 1;
			return i + 1 - n;
		}
	}
	return d->ngran;
}

/* Charges n bytes, first from what the pool keeps idle. */
static bool charge(int dev, struct pool *pool, uint64_t n)
{
	uint64_t kept = pool && pool->idle >= n ? n : 0;

	if (pool && pool->props.maxSize && pool->reserved + n - kept > pool->props.maxSize)
		return false;
	if (!kept && !state_charge(dev, n)) {
		/* idle memory of the default pools is for all allocations */
		pool_release(sim.dev[dev].pool, 0);
		if (sim.dev[dev].current_pool != sim.dev[dev].pool)
			pool_release(sim.dev[dev].current_pool, 0);
		if (!state_charge(dev, n))
			return false;
	}
	if (pool) {
		pool->idle -= kept;
		pool->reserved += n - kept;
		if (pool->reserved > pool->attr[CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH])
			pool->attr[CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] = pool->reserved;
	}
	return true;
}

static void uncharge(int dev, struct pool *pool, uint64_t n)
{
	if (pool)
		pool->idle += n;	/* pool_release() decides */
	else
		state_uncharge(dev, n);
}

static uint64_t gran_take(int dev, struct pool *pool, uint64_t n, uintptr_t owner)
{
	struct device *d = &sim.dev[dev];
	size_t k = n / GRANULE, at;

	if (!charge(dev, pool, n))
		return 0;
	at = gran_find(d, k);
	if (at == d->ngran) {
		uncharge(dev, pool, n);
		return 0;
	}
	for (size_t i = 0; i < k; i++)
		d->gran[at + i] = owner;
	return d->arena + at * GRANULE;
}

static void gran_give(int dev, struct pool *pool, uint64_t base, uint64_t n)
{
	struct device *d = &sim.dev[dev];
	size_t at = (base - d->arena) / GRANULE;

	for (size_t i = 0; i < n / GRANULE; i++)
		d->gran[at + i] = 0;
	if (!ipc_freed(base))
		madvise((void *)(uintptr_t)base, n, MADV_DONTNEED);
	uncharge(dev, pool, n);
}

/* First fit in one slab; a failed search corrects run. */
static int slab_find(struct slab *s, unsigned int units)
{
	unsigned int run = 0, best = 0;

	if (s->run < units || s->free < units)
		return -1;
	for (unsigned int i = 0; i < SLAB_UNITS; i++) {
		if (s->at[i]) {
			const struct alloc *a = s->at[i];

			i = (unsigned int)((a->base + ROUND_UP(a->size, UNIT) - s->base) / UNIT) - 1;
			run = 0;
			continue;
		}
		if (++run == units)
			return (int)(i + 1 - units);
		if (run > best)
			best = run;
	}
	s->run = best;
	return -1;
}

static struct slab *slab_new(int dev, struct pool *pool, struct slab_list *owner)
{
	struct slab *s = xcalloc(1, sizeof(*s));

	s->base = gran_take(dev, pool, GRANULE, (uintptr_t)s | 1);
	if (!s->base) {
		free(s);
		return NULL;
	}
	s->dev = dev;
	s->free = s->run = SLAB_UNITS;
	s->owner = owner;
	s->next = owner->head;
	if (s->next)
		s->next->prev = s;
	owner->head = s;
	return s;
}

static CUresult slab_alloc(struct slab_list *l, struct alloc *a)
{
	unsigned int units = (unsigned int)(ROUND_UP(a->size, UNIT) / UNIT);
	struct slab *s;
	int at = -1;

	for (s = l->head; s; s = s->next) {
		at = slab_find(s, units);
		if (at >= 0)
			break;
	}
	if (!s) {
		s = slab_new(a->dev, a->pool, l);
		if (!s)
			return CUDA_ERROR_OUT_OF_MEMORY;
		at = 0;
	}
	for (unsigned int i = 0; i < units; i++)
		s->at[(unsigned int)at + i] = a;
	s->free -= units;
	a->slab = s;
	a->base = s->base + (uint64_t)at * UNIT;
	return CUDA_SUCCESS;
}

static void slab_release(struct alloc *a)
{
	struct slab *s = a->slab;
	unsigned int units = (unsigned int)(ROUND_UP(a->size, UNIT) / UNIT);
	unsigned int at = (unsigned int)((a->base - s->base) / UNIT);

	for (unsigned int i = 0; i < units; i++)
		s->at[at + i] = NULL;
	s->free += units;
	s->run = s->free;	/* an upper bound again */
	if (s->free < SLAB_UNITS)
		return;
	if (s->prev)
		s->prev->next = s->next;
	else
		s->owner->head = s->next;
	if (s->next)
		s->next->prev = s->prev;
	gran_give(s->dev, a->pool, s->base, GRANULE);
	free(s);
}

static void link_ctx(struct alloc *a)
{
	if (!a->ctx)
		return;
	a->next = a->ctx->allocs;
	if (a->next)
		a->next->prev = a;
	a->ctx->allocs = a;
}

static void unlink_ctx(struct alloc *a)
{
	if (!a->ctx)
		return;
	if (a->prev)
		a->prev->next = a->next;
	else
		a->ctx->allocs = a->next;
	if (a->next)
		a->next->prev = a->prev;
}

CUresult mem_alloc(struct ctx *c, int dev, enum akind kind, struct pool *pool, size_t n, struct alloc **out)
{
	struct alloc *a;
	CUresult r = CUDA_SUCCESS;

	if (!n)
		return CUDA_ERROR_INVALID_VALUE;
	if (n > sim.cfg.mem || alloc_must_fail())
		return CUDA_ERROR_OUT_OF_MEMORY;
	a = xcalloc(1, sizeof(*a));
	a->size = n;
	a->akind = kind;
	a->dev = dev;
	a->ctx = c;
	a->pool = pool;
	a->accessible = true;
	a->id = ++sim.serial;
	if (n <= SMALL_MAX) {
		r = slab_alloc(pool ? &pool->slabs : &c->slabs, a);
	} else {
		a->charge = ROUND_UP(n, GRANULE);
		a->base = gran_take(dev, pool, a->charge, (uintptr_t)a);
		if (!a->base)
			r = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (r) {
		free(a);
		return r;
	}
	if (pool) {
		pool->live++;
		pool->used += n;
		if (pool->used > pool->attr[CU_MEMPOOL_ATTR_USED_MEM_HIGH])
			pool->attr[CU_MEMPOOL_ATTR_USED_MEM_HIGH] = pool->used;
	}
	link_ctx(a);
	*out = a;
	return CUDA_SUCCESS;
}

void mem_free(struct alloc *a)
{
	struct pool *pool = a->pool;

	unlink_ctx(a);
	if (a->slab)
		slab_release(a);
	else
		gran_give(a->dev, pool, a->base, a->charge);
	if (pool) {
		pool->live--;
		pool->used -= a->size;
		pool_release(pool, pool->attr[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD]);
		if (pool->destroyed && !pool->live)
			obj_del(pool);
	}
	free(a);
}

/* ranges */

/* The index of the first range that ends after p. */
size_t range_at(uint64_t p)
{
	size_t lo = 0, hi = sim.nrange;

	while (lo < hi) {
		size_t mid = (lo + hi) / 2;

		if (sim.range[mid]->base + sim.range[mid]->size <= p)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

/* True when no range touches [base, base + n). */
bool range_free(uint64_t base, size_t n)
{
	size_t i = range_at(base);

	return i == sim.nrange || sim.range[i]->base >= base + n;
}

struct alloc *range_add(struct ctx *c, enum akind kind, uint64_t base, size_t n)
{
	struct alloc *a = xcalloc(1, sizeof(*a));
	size_t i = range_at(base);

	a->base = base;
	a->size = n;
	a->akind = kind;
	a->dev = c ? c->dev : -1;
	a->ctx = c;
	a->accessible = true;
	a->id = ++sim.serial;
	sim.range = xgrow(sim.range, sim.nrange + 1, &sim.caprange, sizeof(*sim.range));
	memmove(sim.range + i + 1, sim.range + i, (sim.nrange - i) * sizeof(*sim.range));
	sim.range[i] = a;
	sim.nrange++;
	link_ctx(a);
	return a;
}

void range_del(struct alloc *a)
{
	size_t i = range_at(a->base);

	while (i < sim.nrange && sim.range[i] != a)
		i++;
	if (i < sim.nrange) {
		memmove(sim.range + i, sim.range + i + 1, (sim.nrange - i - 1) * sizeof(*sim.range));
		sim.nrange--;
	}
	unlink_ctx(a);
	free(a);
}

/* The allocation that holds address p. A reservation without memory is not one. */
struct alloc *mem_find(uint64_t p)
{
	struct device *d = dev_of(p);
	struct alloc *a;
	size_t i;

	if (d) {
		uintptr_t g = d->gran[(p - d->arena) / GRANULE];

		if (!g)
			return NULL;
		if (g & 1) {
			struct slab *s = (struct slab *)(g & ~(uintptr_t)1);

			a = s->at[(p - s->base) / UNIT];
		} else {
			a = (struct alloc *)g;
		}
		return a && p < a->base + a->size ? a : NULL;
	}
	for (i = range_at(p); i < sim.nrange && sim.range[i]->base <= p; i++)
		if (p < sim.range[i]->base + sim.range[i]->size)
			return sim.range[i];
	return NULL;
}

bool mem_ok(uint64_t p, size_t n)
{
	while (n) {
		struct alloc *a = mem_find(p);
		size_t left;

		if (!a || !a->accessible)
			return false;
		left = a->base + a->size - p;
		if (left >= n)
			return true;
		if (a->akind != A_MAPPED)
			return false;
		p += left;
		n -= left;
	}
	return true;
}

bool mem_device(uint64_t p)
{
	struct alloc *a;

	if (dev_of(p) || ipc_device(p))
		return true;
	for (a = sim.reserved; a; a = a->next)
		if (p - a->base < a->size)
			return true;
	return false;
}

void mem_ctx_destroy(struct ctx *c)
{
	while (c->allocs) {
		struct alloc *a = c->allocs;

		if (a->akind == A_DEVICE || a->akind == A_POOL || a->akind == A_MANAGED) {
			mem_free(a);
			continue;
		}
		if (a->akind == A_SHARED)
			ipc_unmap(a);
		if (a->akind == A_HOST)
			munmap((void *)(uintptr_t)a->base, ROUND_UP(a->size, 4096));
		range_del(a);
	}
}

/* linear memory */

API CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = capture_unsafe();
	if (!r)
		r = p ? mem_alloc(c, c->dev, A_DEVICE, NULL, n, &a) : CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*p = a->base;
	return sim_leave(r);
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *p, size_t *pitch, size_t width, size_t height, unsigned int elem)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);
	size_t row;

	if (r)
		return r;
	if (!p || !pitch || !width || !height || (elem != 4 && elem != 8 && elem != 16) || width > 1ULL << 40 ||
	    height > 1ULL << 40)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = capture_unsafe();
	if (r)
		return sim_leave(r);
	row = ROUND_UP(width, 512);
	if (height > sim.cfg.mem / row)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	r = mem_alloc(c, c->dev, A_DEVICE, NULL, row * height, &a);
	if (!r) {
		*p = a->base;
		*pitch = row;
	}
	return sim_leave(r);
}

API CUresult cuMemAllocManaged(CUdeviceptr *p, size_t n, unsigned int flags)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!p || (flags != 1 && flags != 2))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = capture_unsafe();
	if (!r)
		r = mem_alloc(c, c->dev, A_MANAGED, NULL, n, &a);
	if (!r)
		*p = a->base;
	return sim_leave(r);
}

/* Freeing waits for the device, so that no queued work loses its memory. */
API CUresult cuMemFree_v2(CUdeviceptr p)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);
	uint64_t id;

	if (r)
		return r;
	if (!p)
		return sim_leave(CUDA_SUCCESS);
	r = capture_unsafe();
	if (r)
		return sim_leave(r);
	a = dev_of(p) || ipc_device(p) ? mem_find(p) : NULL;
	if (!a || a->base != p || a->freeing || (a->akind == A_SHARED && !a->pool))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (a->gmem) {
		ctx_wait(c);
		a = mem_find(p);
		return sim_leave(a && a->gmem ? gmem_release(a) : CUDA_ERROR_INVALID_VALUE);
	}
	a->freeing = true;
	id = a->id;
	ctx_wait(a->ctx ? a->ctx : c);
	a = mem_find(p);
	if (a && a->id == id && a->akind == A_SHARED)
		ipc_close(a);
	else if (a && a->id == id)	/* it may have ended with its context meanwhile */
		mem_free(a);
	return sim_leave(c->sticky);
}

API CUresult cuMemGetInfo_v2(size_t *avail, size_t *total)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);
	uint64_t used;

	if (r)
		return r;
	used = state_used(c->dev);
	if (avail)
		*avail = used < sim.cfg.mem ? sim.cfg.mem - used : 0;
	if (total)
		*total = sim.cfg.mem;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	a = mem_find(p);
	if (!a)
		return sim_leave(CUDA_ERROR_NOT_FOUND);
	if (base)
		*base = a->base;
	if (size)
		*size = a->size;
	return sim_leave(CUDA_SUCCESS);
}
