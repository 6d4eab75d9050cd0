/*
 * Virtual memory management, as far as the shim must know it: reservations and
 * mappings are ranges, so that a pointer into them is known as the device's.
 */
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "gen.h"
#include "guard.h"
#include "handles.h"
#include "ranges.h"
#include "route.h"
#include "session.h"

#include <pthread.h>

CUresult sl_cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)
{
	struct sl_range r = { .type = SL_RANGE_VA, .size = size };
	static uint8_t once;
	CUresult err;

	if (!ptr || !size || flags)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuMemAddressReserve(ptr, size, alignment, addr, flags);
	if (err)
		return err;
	if (sl_sessions > 1 && sl_range_clash(*ptr, size, sl_ctx_cur() ? sl_ctx_session(sl_ctx_cur()) : 0)) {
		sl_tls()->here = true;
		fw_cuMemAddressFree(*ptr, size);
		sl_tls()->here = false;
		return sl_refuse("cuMemAddressReserve where another owner's addresses are", &once);
	}
	r.base = *ptr;
	sl_guard_reserve(*ptr, size);
	return sl_range_add(&r) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

struct reservation {
	CUdeviceptr p;
	size_t n;
};

static CUresult free_there(void *arg)
{
	struct reservation *r = arg;

	return fw_cuMemAddressFree(r->p, r->n);
}

CUresult sl_cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
	struct sl_ctx *there = sl_ptr_foreign(ptr);
	struct sl_range r;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!size || !sl_range_remove(ptr, SL_RANGE_VA, &r))
		return CUDA_ERROR_INVALID_VALUE;
	if (r.size != size) {
		sl_range_add(&r);
		return CUDA_ERROR_INVALID_VALUE;
	}
	return there ? sl_ctx_with(there, free_there, &(struct reservation){ ptr, size }) : fw_cuMemAddressFree(ptr, size);
}

CUresult sl_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	struct sl_range r = { .base = ptr, .size = size, .type = SL_RANGE_MAPPED, .handle = handle }, va;
	CUmemAllocationProp prop;
	struct sl_ctx *c;
	CUresult err;

	if (!size || flags || !sl_range_find(ptr, &va) || va.type != SL_RANGE_VA || size > va.size - (ptr - va.base))
		return CUDA_ERROR_INVALID_VALUE;
	r.dev = sl_ctx_peek(&c) ? 0 : c->dev;
	/* The memory may be another device's than the current one. */
	if (sl_dev_count() > 1 && !fw_cuMemGetAllocationPropertiesFromHandle(&prop, handle))
		r.dev = prop.location.id;
	err = fw_cuMemMap(ptr, size, offset, handle, flags);
	if (err)
		return err;
	return sl_range_add(&r) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult sl_cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	CUdeviceptr at = ptr;
	struct sl_range r;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	/* One call may unmap several mappings, but only whole ones. */
	while (at - ptr < size) {
		if (!sl_range_find(at, &r) || r.type != SL_RANGE_MAPPED || r.base != at || r.size > size - (at - ptr))
			return CUDA_ERROR_INVALID_VALUE;
		at += r.size;
	}
	for (at = ptr; at - ptr < size && sl_range_remove(at, SL_RANGE_MAPPED, &r); at += r.size)
		;
	return fw_cuMemUnmap(ptr, size);
}

/*
 * CUDA counts the uses of a handle: each retain gives the same handle again, and takes a release of its own. The count
 * beyond the first lies in the handle's state. The worker knows of one use.
 */
static pthread_mutex_t uses_lock = PTHREAD_MUTEX_INITIALIZER;

static bool use_again(uint64_t handle)
{
	void *h = (void *)(uintptr_t)handle;
	CUresult err = CUDA_SUCCESS;

	if (!handle || !sl_handle_id(SL_MEMHANDLE, h, &err))
		return false;
	return sl_handle_set_state(SL_MEMHANDLE, h, (char *)sl_handle_state(SL_MEMHANDLE, h) + 1);
}

CUresult sl_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	CUdeviceptr p = (uintptr_t)addr;
	CUresult err = CUDA_SUCCESS;
	struct sl_range r;
	uint32_t id;
	void *h;

	if (!handle)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&uses_lock);
	if (!sl_range_find(p, &r) || r.type != SL_RANGE_MAPPED) {
		err = CUDA_ERROR_INVALID_VALUE;
	} else if (use_again(r.handle)) {
		*handle = r.handle;
	} else {
		id = sl_handle_new(SL_MEMHANDLE, NULL, &h);
		err = id ? fw_cuMemRetainAllocationHandle(id, p) : CUDA_ERROR_OUT_OF_MEMORY;
		if (!err) {
			*handle = (CUmemGenericAllocationHandle)(uintptr_t)h;
			sl_range_set_handle(p, *handle);
		} else if (id) {
			sl_handle_free(SL_MEMHANDLE, id);
		}
	}
	pthread_mutex_unlock(&uses_lock);
	return err;
}

CUresult sl_cuMemRelease(CUmemGenericAllocationHandle handle)
{
	void *h = (void *)(uintptr_t)handle;
	CUresult err = CUDA_SUCCESS;
	char *more;

	pthread_mutex_lock(&uses_lock);
	more = sl_handle_state(SL_MEMHANDLE, h);
	if (more) {
		sl_handle_set_state(SL_MEMHANDLE, h, more - 1);
	} else {
		sl_ranges_forget_handle(handle);
		err = fw_cuMemRelease(handle);
	}
	pthread_mutex_unlock(&uses_lock);
	return err;
}
