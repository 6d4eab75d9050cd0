/*
 * Attributes of kernels and functions, and occupancy by the rules of sm_90.
 */
#include <string.h>

#include "sim.h"

#define SM_THREADS 2048
#define SM_BLOCKS 32
#define SM_REGS 65536
#define SM_SHARED 233472
#define BLOCK_RESERVED 1024
#define SHARED_OPTIN 232448

static int regs_of(const struct twin *t) { return t->k->regs ? t->k->regs : 32; }
static int threads_of(const struct twin *t) { return t->k->max_threads ? t->k->max_threads : 1024; }

static CUresult attr_get(const struct twin *t, const struct image *im, int max_dyn, int carveout, CUfunction_attribute a,
			 int *v)
{
	switch (a) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *v = threads_of(t); break;
	case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *v = t->k->static_shared; break;
	case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: *v = t->k->const_bytes; break;
	case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *v = t->k->local_bytes; break;
	case CU_FUNC_ATTRIBUTE_NUM_REGS: *v = regs_of(t); break;
	case CU_FUNC_ATTRIBUTE_PTX_VERSION:
	case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *v = im->sm; break;
	case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: *v = 0; break;
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *v = max_dyn; break;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *v = carveout; break;
	case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
	case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
	case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: *v = 0; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

static CUresult attr_set(const struct twin *t, CUfunction_attribute a, int v, int *max_dyn, int *carveout)
{
	switch (a) {
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		if (v < 0 || v > SHARED_OPTIN - t->k->static_shared)
			return CUDA_ERROR_INVALID_VALUE;
		*max_dyn = v;
		return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
		if (v < -1 || v > 100)
			return CUDA_ERROR_INVALID_VALUE;
		*carveout = v;
		return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
	case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
	case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
		return v < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult enter_func(CUfunction h, struct func **f)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	*f = obj_get(h, K_FUNC);
	return *f ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_HANDLE);
}

static CUresult enter_kernel(CUkernel h, struct kernel **k)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*k = obj_get(h, K_KERNEL);
	return *k ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction h)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	if (r)
		return r;
	if (!v)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	return sim_leave(attr_get(f->twin, f->module->image, f->max_dyn, f->carveout, a, v));
}

API CUresult cuFuncSetAttribute(CUfunction h, CUfunction_attribute a, int v)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	return r ? r : sim_leave(attr_set(f->twin, a, v, &f->max_dyn, &f->carveout));
}

API CUresult cuFuncSetCacheConfig(CUfunction h, CUfunc_cache config)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	if (r)
		return r;
	if (config > CU_FUNC_CACHE_PREFER_EQUAL)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	f->cache = config;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuFuncSetSharedMemConfig(CUfunction h, CUsharedconfig config)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	return r ? r : sim_leave(config > 2 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

API CUresult cuFuncGetModule(CUmodule *out, CUfunction h)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = HANDLE(CUmodule, f->module);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuFuncGetName(const char **out, CUfunction h)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = f->twin->k->name;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult param_info(const struct twin *t, size_t i, size_t *offset, size_t *size)
{
	if (i >= t->k->nparams || !offset)
		return CUDA_ERROR_INVALID_VALUE;
	*offset = t->offset[i];
	if (size)
		*size = t->size[i];
	return CUDA_SUCCESS;
}

API CUresult cuFuncGetParamInfo(CUfunction h, size_t i, size_t *offset, size_t *size)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	return r ? r : sim_leave(param_info(f->twin, i, offset, size));
}

API CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction h)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	if (r)
		return r;
	if (!state)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*state = 1;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuFuncLoad(CUfunction h)
{
	struct func *f;
	CUresult r = enter_func(h, &f);

	return r ? r : sim_leave(CUDA_SUCCESS);
}

API CUresult cuKernelGetAttribute(int *v, CUfunction_attribute a, CUkernel h, CUdevice dev)
{
	struct kernel *k;
	CUresult r = enter_kernel(h, &k);

	if (r)
		return r;
	r = dev_check(dev);
	if (!r && !v)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		r = attr_get(k->twin, k->lib->image, k->max_dyn[dev], k->carveout[dev], a, v);
	return sim_leave(r);
}

API CUresult cuKernelSetAttribute(CUfunction_attribute a, int v, CUkernel h, CUdevice dev)
{
	struct kernel *k;
	CUresult r = enter_kernel(h, &k);

	if (r)
		return r;
	r = dev_check(dev);
	if (!r)
		r = attr_set(k->twin, a, v, &k->max_dyn[dev], &k->carveout[dev]);
	for (size_t i = 0; !r && i < k->lib->nmodules; i++) {	/* functions of it get the value too */
		struct module *m = k->lib->modules[i];

		if (m->obj.ctx->dev == dev && m->funcs[k->index]) {
			m->funcs[k->index]->max_dyn = k->max_dyn[dev];
			m->funcs[k->index]->carveout = k->carveout[dev];
		}
	}
	return sim_leave(r);
}

API CUresult cuKernelSetCacheConfig(CUkernel h, CUfunc_cache config, CUdevice dev)
{
	struct kernel *k;
	CUresult r = enter_kernel(h, &k);

	if (r)
		return r;
	r = dev_check(dev);
	return sim_leave(r ? r : config > CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

API CUresult cuKernelGetName(const char **out, CUkernel h)
{
	struct kernel *k;
	CUresult r = enter_kernel(h, &k);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = k->twin->k->name;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuKernelGetParamInfo(CUkernel h, size_t i, size_t *offset, size_t *size)
{
	struct kernel *k;
	CUresult r = enter_kernel(h, &k);

	return r ? r : sim_leave(param_info(k->twin, i, offset, size));
}

API CUresult cuKernelGetLibrary(CUlibrary *out, CUkernel h)
{
	struct kernel *k;
	CUresult r = enter_kernel(h, &k);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = HANDLE(CUlibrary, k->lib);
	return sim_leave(CUDA_SUCCESS);
}

/* occupancy */

static int blocks_per_sm(const struct twin *t, int block, size_t dyn)
{
	int warps = (block + 31) / 32, n = SM_BLOCKS, by;
	size_t shared = dyn + (size_t)t->k->static_shared + BLOCK_RESERVED;

	if (block <= 0 || block > threads_of(t) || shared > SHARED_OPTIN + BLOCK_RESERVED)
		return 0;
	by = SM_THREADS / (warps * 32);
	n = by < n ? by : n;
	by = SM_REGS / (warps * 32 * ((regs_of(t) + 7) / 8 * 8));
	n = by < n ? by : n;
	by = (int)(SM_SHARED / ROUND_UP(shared, 128));
	return by < n ? by : n;
}

static CUresult occupancy(int *n, CUfunction h, int block, size_t dyn, unsigned int flags)
{
	struct func *f;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = func_get(c, h, &f);
	if (!r && (!n || block <= 0 || flags > 1))
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r)
		*n = blocks_per_sm(f->twin, block, dyn);
	return sim_leave(r);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t dyn)
{
	return occupancy(n, f, block, dyn, 0);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, CUfunction f, int block, size_t dyn,
								  unsigned int flags)
{
	return occupancy(n, f, block, dyn, flags);
}

static CUresult potential(int *grid, int *block, CUfunction h, CUoccupancyB2DSize size, size_t dyn, int limit)
{
	int best = 0, at = 0, max;
	struct twin *t;
	struct func *f;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = func_get(c, h, &f);
	if (!r && (!grid || !block))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r)
		return sim_leave(r);
	t = f->twin;
	sim_leave(CUDA_SUCCESS);	/* the size comes from the program's own function */
	max = limit > 0 && limit < threads_of(t) ? limit : threads_of(t);
	for (int b = max; b > 0; b = b % 32 ? b / 32 * 32 : b - 32) {
		int n = blocks_per_sm(t, b, size ? size(b) : dyn);

		if (n * b > best * at) {
			best = n;
			at = b;
		}
	}
	*block = at;
	*grid = best * 132;
	return at ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction f, CUoccupancyB2DSize size, size_t dyn,
					      int limit)
{
	return potential(grid, block, f, size, dyn, limit);
}

API CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction f, CUoccupancyB2DSize size,
						       size_t dyn, int limit, unsigned int flags)
{
	return flags > 1 ? CUDA_ERROR_INVALID_VALUE : potential(grid, block, f, size, dyn, limit);
}

API CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *n, CUfunction h, int blocks, int block)
{
	struct func *f;
	struct ctx *c;
	size_t each;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = func_get(c, h, &f);
	if (!r && (!n || blocks <= 0 || block <= 0 || blocks_per_sm(f->twin, block, 0) < blocks))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r)
		return sim_leave(r);
	each = SM_SHARED / (size_t)blocks / 128 * 128;
	each -= BLOCK_RESERVED + (size_t)f->twin->k->static_shared;
	*n = each > SHARED_OPTIN ? SHARED_OPTIN : each;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult cluster(int *n, CUfunction h, const CUlaunchConfig *cfg, bool size)
{
	unsigned int dim = 1;
	struct func *f;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = func_get(c, h, &f);
	if (!r && (!n || !cfg || (cfg->numAttrs && !cfg->attrs)))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r)
		return sim_leave(r);
	for (unsigned int i = 0; i < cfg->numAttrs; i++)
		if (cfg->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
			dim = cfg->attrs[i].value.clusterDim.x * cfg->attrs[i].value.clusterDim.y *
			      cfg->attrs[i].value.clusterDim.z;
	if (size)
		*n = 8;
	else if (!dim || dim > 16)
		r = CUDA_ERROR_INVALID_CLUSTER_SIZE;
	else
		*n = 132 * blocks_per_sm(f->twin, (int)(cfg->blockDimX * cfg->blockDimY * cfg->blockDimZ),
					 cfg->sharedMemBytes) / (int)dim;
	return sim_leave(r);
}

API CUresult cuOccupancyMaxPotentialClusterSize(int *n, CUfunction f, const CUlaunchConfig *cfg)
{
	return cluster(n, f, cfg, true);
}

API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *cfg)
{
	return cluster(n, f, cfg, false);
}
