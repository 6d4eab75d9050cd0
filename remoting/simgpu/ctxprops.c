/* What can be set of a context, and read: limits, preferences of caches, priorities of streams. */
#include "sim.h"

API CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!value)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	/* sm_90 has no device-side synchronisation; CIG is a graphics matter */
	if (limit >= SIM_LIMITS || limit == CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH || limit > CU_LIMIT_PERSISTING_L2_CACHE_SIZE)
		return sim_leave(limit < CU_LIMIT_MAX ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_ERROR_INVALID_VALUE);
	*value = c->limits[limit];
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (limit == CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH || limit > CU_LIMIT_PERSISTING_L2_CACHE_SIZE)
		return sim_leave(limit < CU_LIMIT_MAX ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_ERROR_INVALID_VALUE);
	if (limit == CU_LIMIT_STACK_SIZE && (r = ctx_local(c, value, true)))
		return sim_leave(r);
	c->limits[limit] = value;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetCacheConfig(CUfunc_cache *config)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!config)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*config = c->cache_config;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxSetCacheConfig(CUfunc_cache config)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (config > CU_FUNC_CACHE_PREFER_EQUAL)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	c->cache_config = config;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetSharedMemConfig(CUsharedconfig *config)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!config)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*config = 1;		/* four-byte banks, the only kind left */
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxSetSharedMemConfig(CUsharedconfig config)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	return sim_leave(config > 2 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxResetPersistingL2Cache(void)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	return r ? r : sim_leave(CUDA_SUCCESS);
}
