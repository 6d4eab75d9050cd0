/*
 * Page-locked host memory, which is the program's alone (the worker stages copies, so "page-locked" means here that a copy may
 * continue after the call has returned), and its registration.
 */
#include "hostmem.h"
#include "background.h"
#include "ctx.h"
#include "delivery.h"
#include "device.h"
#include "entry.h"
#include "gen.h"
#include "guard.h"
#include "hostfn.h"
#include "log.h"
#include "mapped.h"
#include "nccl.h"
#include "ranges.h"
#include "session.h"
#include "shared.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

size_t sl_host_pages(size_t n)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	return (n + page - 1) & ~(page - 1);
}

CUresult sl_host_map(struct sl_range *r)
{
	void *p;

	r->map_size = sl_host_pages(r->size);
	if (r->map_size < r->size)
		return CUDA_ERROR_OUT_OF_MEMORY;
	r->memfd = sl_shared_new(r->map_size);
	p = sl_guard_place(r->map_size, r->memfd);
	r->base = (uint64_t)(uintptr_t)p;
	if (p && !sl_range_add(r))
		return CUDA_SUCCESS;
	if (p)
		munmap(p, r->map_size);
	sl_shared_close(r->memfd);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sl_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags, const void *caller)
{
	struct sl_range r = { .type = SL_RANGE_HOST, .flags = Flags, .size = bytesize };
	struct sl_ctx *c;
	CUresult err;

	if (!pp || Flags & ~7u)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_ctx_peek(&c);
	if (err)
		return err;
	if (!bytesize) {
		*pp = NULL;
		return CUDA_SUCCESS;
	}
	if (!sl_shared_can())
		r.use = sl_nccl_use(caller, bytesize);
	if (r.use == SL_HOST_NCCL_NETWORK) {
		sl_log(SL_WARN, "NCCL over a network is not supported: its kernels and its network thread would wait for each other in %zu bytes of "
				"page-locked memory; GPUs of one owner that reach each other's memory need no network", bytesize);
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	r.ctx_id = atomic_load(&c->id);
	r.dev = c->dev;
	err = sl_host_map(&r);
	if (!err)
		*pp = (void *)(uintptr_t)r.base;
	return err;
}

CUresult sl_cuMemAllocHost_v2(void **pp, size_t bytesize)
{
	return sl_cuMemHostAlloc(pp, bytesize, 0, NULL);
}

CUresult sl_cuMemAllocHost(void **pp, unsigned int bytesize)
{
	return sl_cuMemHostAlloc(pp, bytesize, 0, NULL);
}

/*
 * Waits until no stream uses this page-locked memory any more. After an error, which ends the session, a copy may
 * have been written in part.
 */
static CUresult settle(const struct sl_range *r)
{
	CUresult err = sl_hostfns_wait_inside();

	sl_background_wait((void *)(uintptr_t)r->base, r->size);
	return err ? err : sl_delivery_wait_range((void *)(uintptr_t)r->base, r->size);
}

void sl_host_end(const struct sl_range *r, bool passed)
{
	void *p = (void *)(uintptr_t)r->base;

	sl_mapped_drop(r);
	sl_shared_close(r->memfd);
	if (!(passed ? sl_delivery_wait_range(p, r->size) : settle(r))) /* otherwise the memory stays allocated */
		munmap(p, r->map_size);
}

CUresult sl_cuMemFreeHost(void *p)
{
	struct sl_range r;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!p)
		return CUDA_SUCCESS;
	/* A pool's memory is not freed by this function. */
	if (sl_range_find((uint64_t)(uintptr_t)p, &r) && r.type == SL_RANGE_HOST && r.pool)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_range_remove((uint64_t)(uintptr_t)p, SL_RANGE_HOST, &r))
		return CUDA_ERROR_INVALID_VALUE;
	sl_host_end(&r, false);
	return CUDA_SUCCESS;
}

/* Whether any part of [p, p+n) is mapped in the program. */
static bool is_mapped(uint64_t p, size_t n)
{
	unsigned char in[4096];
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), at = p & ~(page - 1);

	if (p + n < p)
		return false;
	for (; at < p + n; at += sizeof in * page) {
		size_t m = p + n - at < sizeof in * page ? p + n - at : sizeof in * page;

		if (mincore((void *)(uintptr_t)at, m, in) && errno == ENOMEM)
			return false;
	}
	return true;
}

CUresult sl_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
	struct sl_range r = { .type = SL_RANGE_REGISTERED, .flags = Flags };
	struct sl_ctx *c;
	CUresult err;

	/* The program's memory is not a device's: the driver finds it invalid as I/O memory, too. */
	if (!p || !bytesize || Flags & ~(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY))
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_ctx_peek(&c);
	if (err)
		return err;
	r.base = (uint64_t)(uintptr_t)p;
	r.size = bytesize;
	r.ctx_id = atomic_load(&c->id);
	r.dev = c->dev;
	if (!is_mapped(r.base, bytesize))
		return CUDA_ERROR_INVALID_VALUE;
	if (sl_range_overlaps(r.base, bytesize))
		return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	return sl_range_add(&r) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult sl_cuMemHostUnregister(void *p)
{
	struct sl_range r;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_range_remove((uint64_t)(uintptr_t)p, SL_RANGE_REGISTERED, &r))
		return sl_range_find((uint64_t)(uintptr_t)p, &r) && r.type == SL_RANGE_REGISTERED ? CUDA_ERROR_INVALID_VALUE :
											       CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	sl_mapped_drop(&r);
	settle(&r);
	return CUDA_SUCCESS;
}

CUresult sl_cuMemHostGetFlags(unsigned int *pFlags, void *p)
{
	struct sl_range r;

	if (!pFlags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_range_find((uint64_t)(uintptr_t)p, &r) || (r.type != SL_RANGE_HOST && r.type != SL_RANGE_REGISTERED))
		return CUDA_ERROR_INVALID_VALUE;
	/* As the driver answers where addresses are unified. */
	*pFlags = (r.flags & (r.type == SL_RANGE_REGISTERED ? CU_MEMHOSTREGISTER_PORTABLE : CU_MEMHOSTALLOC_WRITECOMBINED)) | CU_MEMHOSTALLOC_DEVICEMAP;
	return CUDA_SUCCESS;
}

CUresult sl_cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
	struct sl_range r;

	if (!pdptr || Flags || !sl_range_find((uint64_t)(uintptr_t)p, &r) ||
	    (r.type != SL_RANGE_HOST && r.type != SL_RANGE_REGISTERED))
		return CUDA_ERROR_INVALID_VALUE;
	return sl_mapped_address(pdptr, (uint64_t)(uintptr_t)p, &r);
}
