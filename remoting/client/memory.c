/*
 * Device memory: allocations, which wait for the worker because they may fail, and queries
 * about pointers, which the ranges (ranges.c) answer.
 */
#include "ctx.h"
#include "delivery.h"
#include "device.h"
#include "gen.h"
#include "graphhost.h"
#include "guard.h"
#include "handles.h"
#include "hostpool.h"
#include "hostfn.h"
#include "log.h"
#include "mapped.h"
#include "ranges.h"
#include "route.h"
#include "session.h"
#include "stream.h"

#include <string.h>

static CUresult add_device(struct sl_ctx *c, CUdeviceptr p, size_t n, enum sl_range_type type, CUmemoryPool pool, bool shadowed)
{
	struct sl_range r = { .base = p, .size = n, .shadowed = shadowed, .type = type, .ctx_id = atomic_load(&c->id), .dev = c->dev, .pool = pool,
			      .sync_memops = type == SL_RANGE_DEVICE };

	return sl_range_add(&r) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* An allocation request of any form. It is kept because it may have to be repeated. */
struct request {
	enum { LINEAR, PITCH, ASYNC, FROM_POOL } form;
	size_t n, height, pitch;
	unsigned element;
	CUstream stream;
	CUmemoryPool pool;
	CUdeviceptr p;
	bool shadowed;
};

static CUresult request_once(struct request *a)
{
	switch (a->form) {
	case LINEAR:
		return fw_cuMemAlloc_v2(&a->p, a->n);
	case PITCH:
		return fw_cuMemAllocPitch_v2(&a->p, &a->pitch, a->n, a->height, a->element);
	case ASYNC:
		return fw_cuMemAllocAsync(&a->p, a->n, a->stream);
	default:
		return fw_cuMemAllocFromPoolAsync(&a->p, a->n, a->pool, a->stream);
	}
}

/* Frees an address in the current context's session only: another session may have memory at the same address. */
static void release(const struct request *a, CUdeviceptr p)
{
	struct sl_thread *t = sl_tls();

	t->here = true;
	if (a->form == ASYNC || a->form == FROM_POOL)
		fw_cuMemFreeAsync(p, a->stream);
	else
		fw_cuMemFree_v2(p);
	t->here = false;
}

#define CLASHES 64

/*
 * Workers coordinate addresses neither with each other nor with this process. A new allocation
 * may overlap another device's memory or the program's own, and the address alone would not say
 * which is meant. Such an allocation is kept until the worker returns another address, and then freed.
 *
 * There may be no other address, for example for an allocation of most of the device. The program may then have memory at the same
 * addresses, and the range is marked as shadowed: the direction of a call decides which memory it means, and a call without one is refused.
 */
static CUresult request_distinct(struct request *a, unsigned session)
{
	CUdeviceptr held[CLASHES], fallback = 0;
	unsigned n = 0;
	CUresult err;

	while (!(err = request_once(a)) && a->p) {
		size_t size = a->form == PITCH ? a->pitch * a->height : a->n;
		bool clash = sl_sessions > 1 && sl_range_clash(a->p, size, session);

		if (sl_guard_reserve(a->p, size) && !clash)
			break;
		/* The program's memory overlaps it, or is merely close to it: usable if there is no better address. */
		if (!clash)
			fallback = a->p;
		held[n++] = a->p;
		if (n == CLASHES) {
			err = CUDA_ERROR_OUT_OF_MEMORY;
			break;
		}
	}
	if (err && fallback) {
		a->p = fallback;
		a->shadowed = sl_guard_taken(fallback, a->form == PITCH ? a->pitch * a->height : a->n);
		err = CUDA_SUCCESS;
	}
	if (n)
		sl_log(err ? SL_WARN : SL_DEBUG, "an allocation was repeated: %u addresses that the worker returned were in use already; result %d", n, err);
	while (n--)
		if (err || held[n] != a->p)
			release(a, held[n]);
	return err;
}

static CUresult allocate(struct request *a, CUdeviceptr *dptr, enum sl_range_type type, CUmemoryPool pool)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (!err)
		err = request_distinct(a, sl_ctx_session(atomic_load(&c->id)));
	if (err)
		return err;
	*dptr = a->p;
	if (__builtin_expect(sl_capturing_any(), 0) && a->p && type == SL_RANGE_POOL && sl_stream_captures(a->stream))
		return sl_graph_memory(a->p, a->n);
	return a->p ? add_device(c, a->p, a->form == PITCH ? a->pitch * a->height : a->n, type, pool, a->shadowed) : CUDA_SUCCESS;
}

CUresult sl_range_here(struct sl_range r)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	r.ctx_id = atomic_load(&c->id);
	r.dev = c->dev;
	return sl_range_add(&r) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult sl_graph_memory(CUdeviceptr p, size_t n)
{
	sl_guard_reserve(p, n);
	return sl_range_here((struct sl_range){ .base = p, .size = n, .type = SL_RANGE_POOL, .graph = true });
}

CUresult sl_device_alloc(CUdeviceptr *p, size_t n)
{
	struct request a = { .form = LINEAR, .n = n };
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (!err)
		err = request_distinct(&a, sl_ctx_session(atomic_load(&c->id)));
	*p = a.p;
	return err;
}

CUresult sl_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	if (!dptr || !bytesize)
		return CUDA_ERROR_INVALID_VALUE;
	return allocate(&(struct request){ .form = LINEAR, .n = bytesize }, dptr, SL_RANGE_DEVICE, NULL);
}

CUresult sl_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t width, size_t height, unsigned int element)
{
	struct request a = { .form = PITCH, .n = width, .height = height, .element = element };
	CUresult err;

	if (!dptr || !pPitch || !width || !height || (element != 4 && element != 8 && element != 16))
		return CUDA_ERROR_INVALID_VALUE;
	err = allocate(&a, dptr, SL_RANGE_DEVICE, NULL);
	if (!err)
		*pPitch = a.pitch;
	return err;
}

CUresult sl_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
	if (!dptr)
		return CUDA_ERROR_INVALID_VALUE;
	return allocate(&(struct request){ .form = ASYNC, .n = bytesize, .stream = hStream }, dptr, SL_RANGE_POOL, NULL);
}

CUresult sl_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
	struct sl_hostpool *host = sl_hostpool_of(pool);

	if (!dptr)
		return CUDA_ERROR_INVALID_VALUE;
	if (host)
		return sl_hostpool_alloc(host, dptr, bytesize, hStream);
	return allocate(&(struct request){ .form = FROM_POOL, .n = bytesize, .pool = pool, .stream = hStream }, dptr, SL_RANGE_POOL, pool);
}

static CUresult free_foreign(void *p)
{
	return fw_cuMemFree_v2(*(CUdeviceptr *)p);
}

static CUresult free_async_foreign(void *p)
{
	return fw_cuMemFreeAsync(*(CUdeviceptr *)p, NULL);
}

/*
 * Removes the range of an allocation that the program frees. It returns false for an unknown pointer: that is refused here, because the
 * worker does not answer the frame. A graph's range stays, because the graph may allocate it again.
 */
static bool forget(CUdeviceptr p, struct sl_range *r)
{
	if (sl_range_find(p, r) && r->graph)
		return r->base == p;
	return sl_range_remove(p, SL_RANGE_DEVICE, r) || sl_range_remove(p, SL_RANGE_POOL, r);
}

/* Reports whether p was allocated from a pool of host memory. */
static bool of_host_pool(CUdeviceptr p, struct sl_range *r)
{
	return __builtin_expect(sl_locked_maybe(p), 0) && sl_range_find(p, r) && r->type == SL_RANGE_HOST && r->pool;
}

static CUresult free_here(void *dptr)
{
	return sl_cuMemFree_v2(*(CUdeviceptr *)dptr);
}

CUresult sl_cuMemFree_v2(CUdeviceptr dptr)
{
	struct sl_ctx *c, *there;
	struct sl_range r;
	CUresult err, waited;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	err = sl_ctx_use(&c);
	/* CUDA needs no current context here: the memory's own context serves. */
	if (err == CUDA_ERROR_INVALID_CONTEXT && dptr && sl_range_find(dptr, &r) && (c = sl_handle_state_by_id(SL_CTX, r.ctx_id)))
		return sl_ctx_with(c, free_here, &dptr);
	if (err)
		return err;
	if (!dptr)
		return CUDA_SUCCESS;
	if (of_host_pool(dptr, &r)) {
		err = sl_cuCtxSynchronize();
		return err ? err : sl_hostpool_free(dptr, NULL, false);
	}
	there = sl_ptr_foreign(dptr);
	if (!forget(dptr, &r))
		return CUDA_ERROR_INVALID_VALUE;
	/* Freeing waits for host functions. A host function may have to fetch memory, which must not be queued behind this call. */
	if (__builtin_expect(atomic_load(&sl_mirrors) && sl_hostfns_open(), 0))
		sl_hostfns_wait();
	/* CUDA waits for all work. A wait for the context would end another thread's capture. */
	waited = sl_delivery_wait_all();
	if (r.managed)
		err = sl_managed_free(&r);
	else
		err = __builtin_expect(there != NULL, 0) ? sl_ctx_with(there, free_foreign, &dptr) : fw_cuMemFree_v2(dptr);
	return waited ? waited : err;
}

CUresult sl_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
	struct sl_ctx *c, *there;
	struct sl_range r;
	CUresult err;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	err = sl_ctx_use(&c);
	if (err)
		return err;
	if (!dptr)
		return CUDA_SUCCESS;
	if (of_host_pool(dptr, &r))
		return sl_hostpool_free(dptr, hStream, true);
	if (sl_range_find(dptr, &r) && r.managed)
		return CUDA_ERROR_INVALID_VALUE;
	there = sl_ptr_foreign(dptr);
	/* In a capture the program keeps the memory until the graph has run. */
	if (!sl_capturing_any() && !forget(dptr, &r))
		return CUDA_ERROR_INVALID_VALUE;
	return __builtin_expect(there != NULL, 0) ? sl_copy_elsewhere(there, free_async_foreign, &dptr, hStream) : fw_cuMemFreeAsync(dptr, hStream);
}

/* The oldest form of the function has 32 bits; larger values saturate. */
CUresult sl_cuMemGetInfo(unsigned int *free, unsigned int *total)
{
	size_t f, t;
	CUresult err;

	if (!free || !total)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuMemGetInfo_v2(&f, &t);
	if (!err) {
		*free = f > ~0u ? ~0u : (unsigned)f;
		*total = t > ~0u ? ~0u : (unsigned)t;
	}
	return err;
}

CUresult sl_cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
	size_t n;
	CUresult err = sl_cuDeviceTotalMem_v2(&n, dev);

	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*bytes = n > ~0u ? ~0u : (unsigned)n;
	return err;
}

/* --- queries about pointers --- */

CUresult sl_cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	struct sl_range r;

	if (!sl_range_find(dptr, &r) || r.type == SL_RANGE_VA)
		return CUDA_ERROR_NOT_FOUND;
	if (pbase)
		*pbase = r.base;
	if (psize)
		*psize = r.size;
	return CUDA_SUCCESS;
}

static bool on_host(const struct sl_range *r)
{
	return r->type == SL_RANGE_HOST || r->type == SL_RANGE_REGISTERED;
}

#define PUT(type, v) do { type v_ = (type)(v); memcpy(data, &v_, sizeof v_); } while (0)

static CUresult attribute(void *data, CUpointer_attribute a, CUdeviceptr p, const struct sl_range *r)
{
	switch (a) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		PUT(void *, r->type == SL_RANGE_MAPPED || r->type == SL_RANGE_POOL || !r->ctx_id ? NULL : sl_handle_value(SL_CTX, r->ctx_id));
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		PUT(unsigned, on_host(r) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: {
		uint64_t there = p;

		sl_mapped_twin(&there);
		PUT(CUdeviceptr, there);
		return CUDA_SUCCESS;
	}
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!on_host(r) && !r->managed)
			return CUDA_ERROR_INVALID_VALUE;
		PUT(uint64_t, p);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
		PUT(unsigned, r->sync_memops);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
		PUT(uint64_t, r->buffer_id);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		PUT(unsigned, r->managed);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		PUT(unsigned, r->type == SL_RANGE_DEVICE && !r->managed);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
	case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
		PUT(unsigned, 0);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		PUT(int, r->dev);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
	case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
		PUT(uint64_t, r->base);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
	case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
		PUT(size_t, r->size);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		PUT(unsigned, r->type != SL_RANGE_VA);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		PUT(uint64_t, CU_MEM_HANDLE_TYPE_NONE);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
		PUT(unsigned, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		if (r->type == SL_RANGE_POOL && !r->pool)
			return sl_cuDeviceGetDefaultMemPool(data, r->dev);
		PUT(void *, r->pool);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
		return CUDA_ERROR_NOT_SUPPORTED;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

/* Writes the value that cuPointerGetAttributes returns for an attribute that does not apply to the pointer. */
static void absent(void *data, CUpointer_attribute a)
{
	switch (a) {
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		PUT(int, -2);
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		break; /* CUDA leaves these unchanged */
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
	case CU_POINTER_ATTRIBUTE_MAPPED:
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
	case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
		PUT(unsigned, 0);
		break;
	default:
		PUT(uint64_t, 0);
	}
}

CUresult sl_cuPointerGetAttribute(void *data, CUpointer_attribute a, CUdeviceptr ptr)
{
	struct sl_range r;

	if (!data)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_range_find(ptr, &r))
		return CUDA_ERROR_INVALID_VALUE;
	return attribute(data, a, ptr, &r);
}

CUresult sl_cuPointerGetAttributes(unsigned int n, CUpointer_attribute *a, void **data, CUdeviceptr ptr)
{
	struct sl_range r;
	bool found;

	if (!n || !a || !data)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	found = sl_range_find(ptr, &r);
	for (unsigned i = 0; i < n; i++) {
		if (!data[i] || a[i] < CU_POINTER_ATTRIBUTE_CONTEXT || a[i] > CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE)
			return CUDA_ERROR_INVALID_VALUE;
		if (a[i] == CU_POINTER_ATTRIBUTE_P2P_TOKENS)
			return CUDA_ERROR_INVALID_VALUE;
		if (!found || attribute(data[i], a[i], ptr, &r))
			absent(data[i], a[i]);
	}
	return CUDA_SUCCESS;
}

CUresult sl_cuPointerSetAttribute(const void *value, CUpointer_attribute a, CUdeviceptr ptr)
{
	unsigned on;

	if (!value || a != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(&on, value, sizeof on);
	return sl_range_sync_memops(ptr, on != 0) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
