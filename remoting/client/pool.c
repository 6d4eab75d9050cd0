/*
 * Memory pool attributes. The wire carries eight bytes; in the program's memory
 * the first three attributes are ints and the others 64-bit numbers.
 */
#include <stdbool.h>

#include "gen.h"

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
