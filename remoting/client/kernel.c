/*
 * Kernels and functions: one object, known by two values. A CUfunction taken from a
 * CUkernel is the kernel's value with a bit set, so that a program sees two
 * handles, and both launch the same kernel.
 *
 * What the driver says of a kernel on a device (parameter layout, attributes) is
 * fetched in one round trip when first needed, and read without a lock afterwards;
 * values that the program sets are updated in it, so that setting one to its
 * present value costs nothing.
 */
#include "kernel.h"
#include "codec.h"
#include "ctx.h"
#include "device.h"
#include "gen.h"
#include "handles.h"
#include "legacy.h"
#include "module.h"
#include "route.h"
#include "wait.h"

#include <stdlib.h>
#include <string.h>

#define MAX_PARAMS 8192
#define MAX_PARAM_BYTES (1u << 16)

static struct sl_pool kernels = { .size = sizeof(struct sl_kernel) };

struct sl_kernel *sl_kernel_new(struct sl_module *m, const char *name)
{
	struct sl_kernel *k = sl_pool_get(&kernels);
	char *copy = k ? strdup(name) : NULL;

	if (!copy) {
		sl_pool_put(&kernels, k);
		return NULL;
	}
	k->owner = m;
	k->name = copy;
	k->cache_config = 0;
	sl_legacy_reset(atomic_load(&k->legacy));
	atomic_store(&k->id, 0);
	return k;
}

void sl_kernel_free(struct sl_kernel *k)
{
	sl_handle_free(SL_KERNEL, atomic_exchange(&k->id, 0));
	for (int d = 0; d < SL_MAX_DEVICES; d++) {
		struct sl_kernel_info *i = atomic_exchange(&k->info[d], NULL);

		if (i)
			free(i->offset);
		free(i);
	}
	free((void *)(uintptr_t)k->name);
	k->name = NULL;
	k->owner = NULL;
	sl_pool_put(&kernels, k);
}

static CUresult fetch(struct sl_kernel *k, int dev, struct sl_kernel_info **out)
{
	struct sl_kernel_info *info = calloc(1, sizeof *info);
	struct wire_kernel_info_reply head = { 0 };
	sl_reply r = { 0 };
	CUresult err;
	sl_buf b;

	if (!info)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_buf_init(&b);
	sl_route(&b, SL_KERNEL, sl_handle_value(SL_KERNEL, atomic_load(&k->id)));
	sl_route_dev(&b, dev);
	sl_put(&b, struct wire_kernel_info, .kernel = atomic_load(&k->id), .device = (uint32_t)sl_dev_wire(dev));
	err = sl_wait(CTL_KERNEL_INFO, &b, &r);
	sl_buf_free(&b);
	if (!err) {
		sl_get_bytes(&r, &head, sizeof head);
		info->nparams = head.nparams;
		if (info->nparams > MAX_PARAMS || info->nparams > (r.n - r.off) / sizeof(struct wire_kernel_param))
			err = CUDA_ERROR_UNKNOWN;
	}
	if (!err) {
		info->offset = calloc(2 * (size_t)info->nparams + 1, sizeof *info->offset);
		info->size = info->offset + info->nparams;
		err = info->offset ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	}
	for (uint32_t i = 0; !err && i < info->nparams; i++) {
		struct wire_kernel_param p = { 0 };

		sl_get_bytes(&r, &p, sizeof p);
		info->offset[i] = p.offset;
		info->size[i] = p.size;
		if (info->offset[i] > MAX_PARAM_BYTES || info->size[i] > MAX_PARAM_BYTES)
			err = CUDA_ERROR_UNKNOWN;
		else if (info->offset[i] + info->size[i] > info->param_bytes)
			info->param_bytes = info->offset[i] + info->size[i];
	}
	if (!err) {
		uint32_t n = sl_get_u32(&r);

		for (uint32_t i = 0; i < n && !r.bad; i++) {
			struct wire_kernel_attr a = { 0 };

			sl_get_bytes(&r, &a, sizeof a);
			if (i < CU_FUNC_ATTRIBUTE_MAX) {
				info->attr[i].result = a.result;
				atomic_store(&info->attr[i].value, a.value);
				info->nattr = i + 1;
			}
		}
		if (r.bad)
			err = CUDA_ERROR_UNKNOWN;
	}
	sl_reply_free(&r);
	if (err) {
		free(info->offset);
		free(info);
		return err;
	}
	*out = info;
	return CUDA_SUCCESS;
}

CUresult sl_kernel_info(struct sl_kernel *k, int dev, struct sl_kernel_info **out)
{
	struct sl_kernel_info *info;
	CUresult err = CUDA_SUCCESS;

	if (dev < 0 || dev >= SL_MAX_DEVICES)
		return CUDA_ERROR_INVALID_DEVICE;
	info = atomic_load_explicit(&k->info[dev], memory_order_acquire);
	if (__builtin_expect(!info, 0)) {
		pthread_mutex_lock(&k->fetch);
		info = atomic_load(&k->info[dev]);
		if (!info) {
			err = fetch(k, dev, &info);
			if (!err)
				atomic_store_explicit(&k->info[dev], info, memory_order_release);
		}
		pthread_mutex_unlock(&k->fetch);
	}
	*out = info;
	return err;
}

CUresult sl_kernel_layout(CUfunction f, int dev, struct sl_launch_info *out)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, f);
	struct sl_kernel_info *info;
	CUresult err;

	if (__builtin_expect(!k, 0))
		return CUDA_ERROR_INVALID_HANDLE;
	err = sl_kernel_info(k, dev, &info);
	if (__builtin_expect(err, 0))
		return err;
	out->id = atomic_load_explicit(&k->id, memory_order_relaxed);
	out->nparams = info->nparams;
	out->param_bytes = info->param_bytes;
	out->offset = info->offset;
	out->size = info->size;
	out->registers = info->attr[CU_FUNC_ATTRIBUTE_NUM_REGS].value;
	out->max_threads = info->attr[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK].value;
	out->shared_static = info->attr[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES].value;
	out->max_dynamic = info->attr[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES].value;
	out->cluster_required = info->attr[CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET].value != 0;
	return CUDA_SUCCESS;
}

/* --- names and owners --- */

CUresult sl_cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, kernel);
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (!pFunc)
		return CUDA_ERROR_INVALID_VALUE;
	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!err)
		*pFunc = sl_kernel_function(sl_handle_bare(kernel));
	return err;
}

CUresult sl_cuKernelGetLibrary(CUlibrary *pLib, CUkernel kernel)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, kernel);

	if (!pLib)
		return CUDA_ERROR_INVALID_VALUE;
	if (!k || !k->owner->library)
		return CUDA_ERROR_INVALID_HANDLE;
	*pLib = sl_handle_value(SL_LIBRARY, k->owner->id);
	return CUDA_SUCCESS;
}

CUresult sl_cuKernelGetName(const char **name, CUkernel hfunc)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, hfunc);

	if (!name || !hfunc)
		return CUDA_ERROR_INVALID_VALUE;
	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	*name = k->name;
	return CUDA_SUCCESS;
}

CUresult sl_cuFuncGetName(const char **name, CUfunction hfunc)
{
	return sl_cuKernelGetName(name, (CUkernel)(void *)hfunc);
}

CUresult sl_cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, hfunc);

	if (!hmod || !hfunc)
		return CUDA_ERROR_INVALID_VALUE;
	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	if (k->owner->library)
		return sl_cuLibraryGetModule(hmod, sl_handle_value(SL_LIBRARY, k->owner->id));
	*hmod = sl_handle_value(SL_MODULE, k->owner->id);
	return CUDA_SUCCESS;
}

/* When a kernel is loaded is up to the worker's driver and never visible here. */
CUresult sl_cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
	if (!state)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_handle_state(SL_KERNEL, function))
		return CUDA_ERROR_INVALID_HANDLE;
	*state = 1;
	return CUDA_SUCCESS;
}

CUresult sl_cuFuncLoad(CUfunction function)
{
	return sl_handle_state(SL_KERNEL, function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* --- layout --- */

/* The device a function belongs to: its module's, or the current context's. */
static CUresult device_of(struct sl_kernel *k, int *dev)
{
	struct sl_ctx *c;
	CUresult err;

	if (!k->owner->library) {
		*dev = k->owner->dev;
		return CUDA_SUCCESS;
	}
	err = sl_ctx_peek(&c);
	if (!err)
		*dev = c->dev;
	return err;
}

static CUresult param_info(struct sl_kernel *k, int dev, size_t i, size_t *offset, size_t *size)
{
	struct sl_kernel_info *info;
	CUresult err = sl_kernel_info(k, dev, &info);

	if (err)
		return err;
	if (i >= info->nparams || !offset)
		return CUDA_ERROR_INVALID_VALUE;
	*offset = info->offset[i];
	if (size)
		*size = info->size[i];
	return CUDA_SUCCESS;
}

CUresult sl_cuFuncGetParamInfo(CUfunction func, size_t i, size_t *offset, size_t *size)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, func);
	CUresult err;
	int dev;

	if (!k)
		return func ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	err = device_of(k, &dev);
	return err ? err : param_info(k, dev, i, offset, size);
}

CUresult sl_cuKernelGetParamInfo(CUkernel kernel, size_t i, size_t *offset, size_t *size)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, kernel);
	int dev = 0;

	if (!k)
		return kernel ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	if (device_of(k, &dev))
		dev = 0;
	return param_info(k, dev, i, offset, size);
}

/* --- attributes --- */

static CUresult get_attribute(struct sl_kernel *k, int dev, CUfunction_attribute a, int *pi)
{
	struct sl_kernel_info *info;
	CUresult err;

	if (!pi || a >= CU_FUNC_ATTRIBUTE_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_kernel_info(k, dev, &info);
	if (err)
		return err;
	if (a >= info->nattr)
		return CUDA_ERROR_INVALID_VALUE;
	if (info->attr[a].result)
		return info->attr[a].result;
	*pi = atomic_load_explicit(&info->attr[a].value, memory_order_relaxed);
	return CUDA_SUCCESS;
}

CUresult sl_cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, kernel);

	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	return get_attribute(k, dev, attrib, pi);
}

CUresult sl_cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, hfunc);
	CUresult err;
	int dev;

	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	err = device_of(k, &dev);
	return err ? err : get_attribute(k, dev, attrib, pi);
}

/*
 * Whether the driver would accept the value. What it would refuse must be refused
 * here, because the frame that sets it has no answer. *same: the value is set
 * already.
 */
static CUresult check_set(struct sl_kernel *k, int dev, CUfunction_attribute a, int v, struct sl_kernel_info **info, bool *same)
{
	CUresult err;

	if (a < CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || a >= CU_FUNC_ATTRIBUTE_MAX || a == CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_kernel_info(k, dev, info);
	if (err)
		return err;
	if (a >= (*info)->nattr)
		return CUDA_ERROR_INVALID_VALUE;
	*same = !(*info)->attr[a].result && atomic_load(&(*info)->attr[a].value) == v;
	if (*same)
		return CUDA_SUCCESS;
	switch (a) {
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: {
		int most = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
		int base = atomic_load(&(*info)->attr[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES].value);

		if (v < 0 || (most && v > most - base))
			return CUDA_ERROR_INVALID_VALUE;
		break;
	}
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
		if (v < -1 || v > 100)
			return CUDA_ERROR_INVALID_VALUE;
		break;
	default:
		if (v < 0)
			return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult sl_cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, kernel);
	struct sl_kernel_info *info;
	bool same = false;
	CUresult err;

	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	err = check_set(k, dev, attrib, val, &info, &same);
	if (err || same)
		return err;
	err = fw_cuKernelSetAttribute(attrib, val, kernel, dev);
	if (!err)
		atomic_store(&info->attr[attrib].value, val);
	return err;
}

CUresult sl_cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, hfunc);
	struct sl_kernel_info *info;
	bool same = false;
	CUresult err;
	int dev;

	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	err = device_of(k, &dev);
	if (!err)
		err = check_set(k, dev, attrib, value, &info, &same);
	if (err || same)
		return err;
	err = fw_cuFuncSetAttribute(hfunc, attrib, value);
	if (!err)
		atomic_store(&info->attr[attrib].value, value);
	return err;
}

/* Programs repeat these hints in loops: one is sent only when it changes. */
CUresult sl_cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, hfunc);
	CUresult err;

	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	if (config > CU_FUNC_CACHE_PREFER_EQUAL)
		return CUDA_ERROR_INVALID_VALUE;
	if (__atomic_load_n(&k->cache_config, __ATOMIC_RELAXED) == config)
		return CUDA_SUCCESS;
	err = fw_cuFuncSetCacheConfig(hfunc, config);
	if (!err)
		__atomic_store_n(&k->cache_config, config, __ATOMIC_RELAXED);
	return err;
}

CUresult sl_cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev)
{
	if (!sl_handle_state(SL_KERNEL, kernel))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	if (config > CU_FUNC_CACHE_PREFER_EQUAL)
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuKernelSetCacheConfig(kernel, config, dev);
}

CUresult sl_cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config)
{
	if (!sl_handle_state(SL_KERNEL, hfunc))
		return CUDA_ERROR_INVALID_HANDLE;
	if (config > 2)
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuFuncSetSharedMemConfig(hfunc, config);
}
