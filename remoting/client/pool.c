/*
 * Memory pools: those of a location, and attributes. The wire carries eight bytes; in the program's memory
 * the first three attributes are ints and the others 64-bit numbers. Pools of devices are the worker's, those of the host
 * are here (hostpool.h).
 */
#include <stdatomic.h>
#include <stdbool.h>

#include "entry.h"
#include "gen.h"
#include "handles.h"
#include "hostpool.h"
#include "wire.h"

static bool is_int(CUmemPool_attribute attr)
{
	return attr <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

CUresult sl_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	struct sl_hostpool *host = sl_hostpool_of(pool);
	uint64_t v;

	if (!value)
		return CUDA_ERROR_INVALID_VALUE;
	v = is_int(attr) ? (uint64_t)*(int *)value : *(uint64_t *)value;
	if (host)
		return sl_hostpool_set(host, attr, v);
	return fw_cuMemPoolSetAttribute(pool, attr, &v);
}

CUresult sl_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	struct sl_hostpool *host = sl_hostpool_of(pool);
	uint64_t v = 0;
	CUresult err;

	if (!value)
		return CUDA_ERROR_INVALID_VALUE;
	err = host ? sl_hostpool_get(host, attr, &v) : fw_cuMemPoolGetAttribute(pool, attr, &v);
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

/* Managed memory has no pools: on a device without concurrent access the driver has none either. */
static CUresult pool_of(CUmemoryPool *pool, const CUmemLocation *at, CUmemAllocationType type, const char *function,
			CUresult (*of_device)(CUmemoryPool *, CUdevice), bool current)
{
	if (!pool || !at)
		return CUDA_ERROR_INVALID_VALUE;
	if (at->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED)
		return of_device(pool, at->id);
	if (at->type == CU_MEM_LOCATION_TYPE_HOST && type == CU_MEM_ALLOCATION_TYPE_PINNED)
		return sl_hostpool_default(pool, current);
	return sl_refuse_with(function, "a pool of managed memory or of a NUMA node");
}

CUresult sl_cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type)
{
	return pool_of(pool_out, location, type, "cuMemGetDefaultMemPool", sl_cuDeviceGetDefaultMemPool, false);
}

CUresult sl_cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	return pool_of(pool, location, type, "cuMemGetMemPool", sl_cuDeviceGetMemPool, true);
}

CUresult sl_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
	return sl_hostpool_of(pool) ? CUDA_ERROR_INVALID_VALUE : fw_cuDeviceSetMemPool(dev, pool);
}

CUresult sl_cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
	struct sl_hostpool *host = sl_hostpool_of(pool);

	if (!location)
		return CUDA_ERROR_INVALID_VALUE;
	if (!host && location->type == CU_MEM_LOCATION_TYPE_DEVICE)
		return fw_cuMemSetMemPool(location, type, pool);
	if (!host || location->type != CU_MEM_LOCATION_TYPE_HOST || type != CU_MEM_ALLOCATION_TYPE_PINNED)
		return CUDA_ERROR_INVALID_VALUE; /* a pool of another place or kind */
	return sl_hostpool_set_current(host);
}

CUresult sl_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
	void *h;
	uint32_t id;
	CUresult err;

	if (!pool || !poolProps)
		return CUDA_ERROR_INVALID_VALUE;
	if (poolProps->location.type == CU_MEM_LOCATION_TYPE_HOST && poolProps->allocType == CU_MEM_ALLOCATION_TYPE_PINNED)
		return sl_hostpool_create(pool, poolProps);
	id = sl_handle_new(SL_POOL, NULL, &h);
	if (!id)
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = fw_cuMemPoolCreate(id, poolProps);
	if (!err)
		*pool = h;
	else
		sl_handle_free(SL_POOL, id);
	return err;
}

CUresult sl_cuMemPoolDestroy(CUmemoryPool pool)
{
	struct sl_hostpool *host = sl_hostpool_of(pool);

	return host ? sl_hostpool_destroy(host) : fw_cuMemPoolDestroy(pool);
}

CUresult sl_cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
	struct sl_hostpool *host = sl_hostpool_of(pool);

	return host ? sl_hostpool_trim(host) : fw_cuMemPoolTrimTo(pool, minBytesToKeep);
}

CUresult sl_cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
	struct sl_hostpool *host = sl_hostpool_of(pool);

	if (!host)
		return fw_cuMemPoolSetAccess(pool, map, count);
	return count && !map ? CUDA_ERROR_INVALID_VALUE : sl_hostpool_set_access(host, map, count);
}

CUresult sl_cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location)
{
	struct sl_hostpool *host = sl_hostpool_of(memPool);

	if (!host)
		return fw_cuMemPoolGetAccess(flags, memPool, location);
	return flags && location ? sl_hostpool_access(host, flags, location) : CUDA_ERROR_INVALID_VALUE;
}
