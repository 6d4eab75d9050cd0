/*
 * Stream-ordered allocation. The address exists at once, and the memory counts at
 * once; a free takes effect when its stream reaches it. A pool may keep free memory
 * up to its release threshold: the machine still counts it (reserved), and an
 * allocation that would fail takes it first.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

/* Gives back idle memory beyond keep bytes reserved. */
void pool_release(struct pool *p, uint64_t keep)
{
	uint64_t n;

	if (p->reserved <= keep || !p->idle)
		return;
	n = p->reserved - keep;
	n = ROUND_UP(n, GRANULE);
	if (n > p->idle)
		n = p->idle;
	p->idle -= n;
	p->reserved -= n;
	state_uncharge(p->dev, n);
}

static CUresult enter_pool(CUmemoryPool h, struct pool **p)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*p = obj_get(h, K_POOL);
	return *p && !(*p)->destroyed ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_VALUE);
}

static CUresult dev_pool(CUmemoryPool *out, CUdevice dev, bool dflt)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	r = dev_check(dev);
	if (!r && !out)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*out = HANDLE(CUmemoryPool, dflt ? sim.dev[dev].pool : sim.dev[dev].current_pool);
	return sim_leave(r);
}

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice dev) { return dev_pool(out, dev, true); }
API CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice dev) { return dev_pool(out, dev, false); }

API CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool h)
{
	struct pool *p;
	CUresult r = enter_pool(h, &p);

	if (r)
		return r;
	r = dev_check(dev);
	if (!r && p->dev != dev)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		sim.dev[dev].current_pool = p;
	return sim_leave(r);
}

static CUresult location_pool(CUmemoryPool *out, const CUmemLocation *at, CUmemAllocationType type, bool dflt)
{
	if (!at || type != CU_MEM_ALLOCATION_TYPE_PINNED)
		return CUDA_ERROR_INVALID_VALUE;
	return at->type == CU_MEM_LOCATION_TYPE_DEVICE ? dev_pool(out, at->id, dflt) : CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *at, CUmemAllocationType type)
{
	return location_pool(out, at, type, true);
}

API CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *at, CUmemAllocationType type)
{
	return location_pool(out, at, type, false);
}

API CUresult cuMemSetMemPool(CUmemLocation *at, CUmemAllocationType type, CUmemoryPool h)
{
	if (!at || type != CU_MEM_ALLOCATION_TYPE_PINNED)
		return CUDA_ERROR_INVALID_VALUE;
	return at->type == CU_MEM_LOCATION_TYPE_DEVICE ? cuDeviceSetMemPool(at->id, h) : CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props)
{
	CUresult r = sim_enter();
	struct pool *p;

	if (r)
		return r;
	if (!out || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (props->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
	    (props->handleTypes & ~(unsigned int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
		return sim_leave(CUDA_ERROR_NOT_SUPPORTED);
	r = dev_check(props->location.id);
	if (r)
		return sim_leave(r);
	p = obj_new(K_POOL, NULL, sizeof(*p));
	if (!p)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	p->dev = props->location.id;
	p->props = *props;
	p->access = access_own(p->dev);
	p->attr[1] = p->attr[2] = p->attr[3] = 1;
	*out = HANDLE(CUmemoryPool, p);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemPoolDestroy(CUmemoryPool h)
{
	struct pool *p;
	CUresult r = enter_pool(h, &p);

	if (r)
		return r;
	if (p->dflt)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (p->imported > 1) {
		p->imported--;
		return sim_leave(CUDA_SUCCESS);
	}
	pool_release(p, 0);
	if (sim.dev[p->dev].current_pool == p)
		sim.dev[p->dev].current_pool = sim.dev[p->dev].pool;
	p->attr[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD] = 0;
	p->destroyed = true;	/* remaining allocations keep it */
	if (!p->live)
		obj_del(p);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemPoolTrimTo(CUmemoryPool h, size_t keep)
{
	struct pool *p;
	CUresult r = enter_pool(h, &p);

	if (r)
		return r;
	pool_release(p, keep);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool h, CUmemPool_attribute a, void *v)
{
	struct pool *p;
	CUresult r = enter_pool(h, &p);

	if (r)
		return r;
	if (!v || p->imported)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	switch (a) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)v = (int)p->attr[a]; break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)v = p->reserved; break;
	case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)v = p->used; break;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *(cuuint64_t *)v = p->attr[a]; break;
	default: r = CUDA_ERROR_INVALID_VALUE; break;
	}
	return sim_leave(r);
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool h, CUmemPool_attribute a, void *v)
{
	struct pool *p;
	CUresult r = enter_pool(h, &p);

	if (r)
		return r;
	if (!v)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	switch (a) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: p->attr[a] = *(int *)v != 0; break;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: p->attr[a] = *(cuuint64_t *)v; break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		if (*(cuuint64_t *)v)
			r = CUDA_ERROR_INVALID_VALUE;
		else
			p->attr[a] = a == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? p->used : p->reserved;
		break;
	default: r = CUDA_ERROR_INVALID_VALUE; break;
	}
	return sim_leave(r);
}

API CUresult cuMemPoolSetAccess(CUmemoryPool h, const CUmemAccessDesc *map, size_t n)
{
	struct pool *p;
	CUresult r = enter_pool(h, &p);

	if (r)
		return r;
	if (n && !map)
		r = CUDA_ERROR_INVALID_VALUE;
	/* A device keeps its own memory. */
	for (size_t i = 0; !r && i < n; i++)
		if (map[i].location.id == p->dev && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			r = CUDA_ERROR_INVALID_DEVICE;
	return sim_leave(r ? r : access_set(&p->access, p->dev, map, n));
}

API CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool h, CUmemLocation *at)
{
	struct pool *p;
	CUresult r = enter_pool(h, &p);

	if (r)
		return r;
	if (!flags || !at || at->type != CU_MEM_LOCATION_TYPE_DEVICE || dev_check(at->id))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*flags = access_of(p->access, at->id);
	return sim_leave(CUDA_SUCCESS);
}

static CUresult alloc(CUdeviceptr *out, size_t n, CUmemoryPool ph, CUstream h, CUstream dflt)
{
	struct stream *s;
	struct alloc *a;
	struct pool *p;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = stream_get(h, dflt, c, &s);
	if (r)
		return sim_leave(r);
	p = ph ? obj_get(ph, K_POOL) : sim.dev[c->dev].current_pool;
	if (!out || !p || p->destroyed || p->imported)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (s->cap)
		return sim_leave(gmem_capture(s, c, p->dev, n, out));
	if (!n) {
		*out = 0;
		return sim_leave(CUDA_SUCCESS);
	}
	r = mem_alloc(c, p->dev, A_POOL, p, n, &a);
	if (!r)
		*out = a->base;
	return sim_leave(r);
}

API CUresult cuMemAllocAsync(CUdeviceptr *p, size_t n, CUstream h) { return alloc(p, n, NULL, h, NULL); }

API CUresult cuMemAllocAsync_ptsz(CUdeviceptr *p, size_t n, CUstream h)
{
	return alloc(p, n, NULL, h, CU_STREAM_PER_THREAD);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *p, size_t n, CUmemoryPool pool, CUstream h)
{
	return pool ? alloc(p, n, pool, h, NULL) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *p, size_t n, CUmemoryPool pool, CUstream h)
{
	return pool ? alloc(p, n, pool, h, CU_STREAM_PER_THREAD) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult release(CUdeviceptr p, CUstream h, CUstream dflt)
{
	struct work w = { .kind = W_FREE };
	struct stream *s;
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = stream_get(h, dflt, c, &s);
	if (r || !p)
		return sim_leave(r);
	if (s->cap)
		return sim_leave(gmem_capture_free(s, p));
	a = mem_find(p);
	if (a && a->gmem && a->base == p)
		return sim_leave(gmem_release(a));
	if (!a || a->base != p || a->freeing || (a->akind != A_POOL && a->akind != A_DEVICE && !(a->akind == A_SHARED && a->pool)))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	a->freeing = true;
	w.free.addr = p;
	w.free.id = a->id;
	r = stream_put(s, &w);
	if (r)
		a->freeing = false;
	return sim_leave(r);
}

API CUresult cuMemFreeAsync(CUdeviceptr p, CUstream h) { return release(p, h, NULL); }
API CUresult cuMemFreeAsync_ptsz(CUdeviceptr p, CUstream h) { return release(p, h, CU_STREAM_PER_THREAD); }
