/*
 * Memory pools: those of a location, and attributes. The wire carries eight bytes; in the program's memory
 * the first three attributes are ints and the others 64-bit numbers.
 */
#include <stdatomic.h>
#include <stdbool.h>

#include "entry.h"
#include "gen.h"
#include "wire.h"

static bool is_int(CUmemPool_attribute attr)
{
	return attr <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

CUresult sl_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	uint64_t v;

	if (!value)
		return CUDA_ERROR_INVALID_VALUE;
	v = is_int(attr) ? (uint64_t)*(int *)value : *(uint64_t *)value;
	return fw_cuMemPoolSetAttribute(pool, attr, &v);
}

CUresult sl_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	uint64_t v = 0;
	CUresult err;

	if (!value)
		return CUDA_ERROR_INVALID_VALUE;
	err = fw_cuMemPoolGetAttribute(pool, attr, &v);
	if (!err && is_int(attr))
		*(int *)value = (int)v;
	else if (!err)
		*(uint64_t *)value = v;
	return err;
}

/* A device has the same default pool as long as the session lasts. */
CUresult sl_cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
	static _Atomic(CUmemoryPool) known[SL_MAX_DEVICES];
	bool any = dev >= 0 && dev < SL_MAX_DEVICES;
	CUmemoryPool pool = any ? atomic_load(&known[dev]) : NULL;
	CUresult err = CUDA_SUCCESS;

	if (!pool_out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!pool)
		err = fw_cuDeviceGetDefaultMemPool(&pool, dev);
	if (err)
		return err;
	if (any)
		atomic_store(&known[dev], pool);
	*pool_out = pool;
	return CUDA_SUCCESS;
}

/* Pools of the host's or of managed memory would give addresses that the program may use itself: there are none. */
static CUresult pool_of(CUmemoryPool *pool, const CUmemLocation *at, CUmemAllocationType type, const char *function,
			CUresult (*of_device)(CUmemoryPool *, CUdevice))
{
	if (!pool || !at)
		return CUDA_ERROR_INVALID_VALUE;
	if (at->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED)
		return of_device(pool, at->id);
	return sl_refuse_with(function, "a pool of host or managed memory");
}

CUresult sl_cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type)
{
	return pool_of(pool_out, location, type, "cuMemGetDefaultMemPool", sl_cuDeviceGetDefaultMemPool);
}

CUresult sl_cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	return pool_of(pool, location, type, "cuMemGetMemPool", sl_cuDeviceGetMemPool);
}
