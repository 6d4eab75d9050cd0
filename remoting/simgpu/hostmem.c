/*
 * Page-locked host memory: allocated by the driver or registered with it. Both are
 * ranges (memory.c) of the context that was current. Freeing and unregistering wait
 * for all queued work, which may use the memory; the lock is not held meanwhile, so
 * the range is looked up again by its id. All under sim.lock.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>

#include "sim.h"

static CUresult host_alloc(void **pp, size_t n, unsigned int flags)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);
	void *p;

	if (r)
		return r;
	if (!pp || flags & ~7U)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (!n) {
		*pp = NULL;
		return sim_leave(CUDA_SUCCESS);
	}
	r = capture_unsafe();
	if (!r && alloc_must_fail())
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (r)
		return sim_leave(r);
	p = mmap(NULL, ROUND_UP(n, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	range_add(c, A_HOST, (uintptr_t)p, n)->flags = flags;
	*pp = p;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemHostAlloc(void **pp, size_t n, unsigned int flags) { return host_alloc(pp, n, flags); }
API CUresult cuMemAllocHost_v2(void **pp, size_t n) { return host_alloc(pp, n, 0); }

static struct alloc *host_find(const void *p, enum akind kind)
{
	struct alloc *a = mem_find((uintptr_t)p);

	return a && a->akind == kind ? a : NULL;
}

API CUresult cuMemFreeHost(void *p)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);
	uint64_t id;

	if (r)
		return r;
	r = capture_unsafe();
	if (r)
		return sim_leave(r);
	a = host_find(p, A_HOST);
	if (!a || a->base != (uintptr_t)p || a->freeing)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	a->freeing = true;
	id = a->id;
	all_wait();
	a = host_find(p, A_HOST);
	if (a && a->id == id) {
		munmap(p, ROUND_UP(a->size, 4096));
		range_del(a);
	}
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned int flags)
{
	uint64_t lo = (uintptr_t)p & ~4095ULL;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!p || !n || flags & ~11U || dev_of((uintptr_t)p) || (uintptr_t)p + n < n)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (!range_free((uintptr_t)p, n))
		return sim_leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	if (msync((void *)(uintptr_t)lo, ROUND_UP((uintptr_t)p + n - lo, 4096), MS_ASYNC) && errno == ENOMEM)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);	/* not all of it is mapped */
	range_add(c, A_REGISTERED, (uintptr_t)p, n)->flags = flags;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemHostRegister(void *p, size_t n, unsigned int flags) { return cuMemHostRegister_v2(p, n, flags); }

API CUresult cuMemHostUnregister(void *p)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);
	uint64_t id;

	if (r)
		return r;
	a = host_find(p, A_REGISTERED);
	if (!a)
		return sim_leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	if (a->base != (uintptr_t)p)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	id = a->id;
	all_wait();
	a = host_find(p, A_REGISTERED);
	if (a && a->id == id)
		range_del(a);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *p, unsigned int flags)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	a = mem_find((uintptr_t)p);
	if (!out || flags || !a || (a->akind != A_HOST && a->akind != A_REGISTERED))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = (uintptr_t)p;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuMemHostGetFlags(unsigned int *flags, void *p)
{
	struct alloc *a;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	a = host_find(p, A_HOST);
	if (!a)
		a = host_find(p, A_REGISTERED);
	if (!flags || !a)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*flags = a->flags | CU_MEMHOSTALLOC_DEVICEMAP;
	return sim_leave(CUDA_SUCCESS);
}
