/*
 * Launches as before CUDA 4: a function has a block shape, a size of shared memory and a
 * buffer of parameters, which calls of their own set and cuLaunch and its kin use. All of it is
 * kept here; the launch is cuLaunchKernel's.
 *
 * Locking: the setting of each function has a lock, which a launch holds while it copies
 * the parameters. Its memory stays with the kernel's, see handles.h.
 */
#include "legacy.h"
#include "ctx.h"
#include "device.h"
#include "gen.h"
#include "handles.h"
#include "kernel.h"

#include <stdlib.h>
#include <string.h>

struct sl_legacy {
	pthread_mutex_t lock;
	unsigned block[3], shared;
	size_t size; /* of the parameters */
	uint8_t params[SL_LEGACY_PARAMS];
};

static void reset(struct sl_legacy *l)
{
	l->block[0] = l->block[1] = l->block[2] = 1;
	l->shared = 0;
	l->size = 0;
	memset(l->params, 0, sizeof l->params);
}

void sl_legacy_reset(struct sl_legacy *l)
{
	if (!l)
		return;
	pthread_mutex_lock(&l->lock);
	reset(l);
	pthread_mutex_unlock(&l->lock);
}

/* The setting of a function, made at its first use. The caller unlocks it. */
static CUresult setting(CUfunction f, struct sl_legacy **out)
{
	struct sl_kernel *k = sl_handle_state(SL_KERNEL, f);
	struct sl_legacy *l, *was = NULL;

	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	l = atomic_load(&k->legacy);
	if (!l) {
		l = calloc(1, sizeof *l);
		if (!l)
			return CUDA_ERROR_OUT_OF_MEMORY;
		pthread_mutex_init(&l->lock, NULL);
		reset(l);
		if (!atomic_compare_exchange_strong(&k->legacy, &was, l)) {
			free(l);
			l = was;
		}
	}
	pthread_mutex_lock(&l->lock);
	*out = l;
	return CUDA_SUCCESS;
}

/* What the driver says of a function on the current context's device. */
static CUresult layout(CUfunction f, struct sl_launch_info *k, int *dev)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	*dev = c->dev;
	return sl_kernel_layout(f, c->dev, k);
}

CUresult sl_cuFuncSetBlockShape(CUfunction f, int x, int y, int z)
{
	const int shape[3] = { x, y, z };
	struct sl_launch_info k;
	struct sl_legacy *l;
	uint64_t threads = 1;
	int dev;
	CUresult err = layout(f, &k, &dev);

	if (err)
		return err;
	for (unsigned i = 0; i < 3; i++) {
		int most = sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i);

		if (shape[i] <= 0 || (most && shape[i] > most))
			return CUDA_ERROR_INVALID_VALUE;
		threads *= (unsigned)shape[i];
	}
	if (threads > (unsigned)sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK))
		return CUDA_ERROR_INVALID_VALUE;
	err = setting(f, &l);
	if (err)
		return err;
	for (unsigned i = 0; i < 3; i++)
		l->block[i] = (unsigned)shape[i];
	pthread_mutex_unlock(&l->lock);
	return CUDA_SUCCESS;
}

CUresult sl_cuFuncSetSharedSize(CUfunction f, unsigned int bytes)
{
	struct sl_launch_info k;
	struct sl_legacy *l;
	int dev;
	CUresult err = layout(f, &k, &dev);

	if (err)
		return err;
	if (k.max_dynamic >= 0 && bytes > (unsigned)k.max_dynamic)
		return CUDA_ERROR_INVALID_VALUE;
	err = setting(f, &l);
	if (err)
		return err;
	l->shared = bytes;
	pthread_mutex_unlock(&l->lock);
	return CUDA_SUCCESS;
}

CUresult sl_cuParamSetSize(CUfunction f, unsigned int n)
{
	struct sl_legacy *l;
	CUresult err;

	if (n > SL_LEGACY_PARAMS)
		return sl_handle_state(SL_KERNEL, f) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
	err = setting(f, &l);
	if (err)
		return err;
	l->size = n;
	pthread_mutex_unlock(&l->lock);
	return CUDA_SUCCESS;
}

CUresult sl_cuParamSetv(CUfunction f, int offset, void *p, unsigned int n)
{
	struct sl_legacy *l;
	CUresult err;

	if (!sl_handle_state(SL_KERNEL, f))
		return CUDA_ERROR_INVALID_HANDLE;
	if (offset < 0 || n > SL_LEGACY_PARAMS || (unsigned)offset > SL_LEGACY_PARAMS - n || (n && !p))
		return CUDA_ERROR_INVALID_VALUE;
	err = setting(f, &l);
	if (err)
		return err;
	memcpy(l->params + offset, p, n);
	pthread_mutex_unlock(&l->lock);
	return CUDA_SUCCESS;
}

CUresult sl_cuParamSeti(CUfunction f, int offset, unsigned int value)
{
	return sl_cuParamSetv(f, offset, &value, sizeof value);
}

CUresult sl_cuParamSetf(CUfunction f, int offset, float value)
{
	return sl_cuParamSetv(f, offset, &value, sizeof value);
}

CUresult sl_cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream)
{
	void *extra[5];
	struct sl_launch_info k;
	struct sl_legacy *l;
	size_t size;
	int dev;
	CUresult err = layout(f, &k, &dev);

	if (err)
		return err;
	if (width <= 0 || height <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	err = setting(f, &l);
	if (err)
		return err;
	/* Parameters that were not set are zero. */
	size = k.param_bytes > l->size ? k.param_bytes : l->size;
	extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
	extra[1] = l->params;
	extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
	extra[3] = &size;
	extra[4] = CU_LAUNCH_PARAM_END;
	if (size > sizeof l->params)
		err = CUDA_ERROR_INVALID_VALUE;
	else
		err = sl_cuLaunchKernel(f, (unsigned)width, (unsigned)height, 1, l->block[0], l->block[1], l->block[2], l->shared, stream, NULL, extra);
	pthread_mutex_unlock(&l->lock);
	return err;
}

CUresult sl_cuLaunchGrid(CUfunction f, int width, int height)
{
	return sl_cuLaunchGridAsync(f, width, height, NULL);
}

CUresult sl_cuLaunch(CUfunction f)
{
	return sl_cuLaunchGridAsync(f, 1, 1, NULL);
}
