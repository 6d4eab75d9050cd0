/*
 * Kernel launches: the hot path. A launch is one one-way frame built on the
 * caller's stack: the kernel's id, the geometry, and the parameters packed by the
 * layout that the driver reports (kernel.c). A launch that CUDA refuses at the call
 * is refused here, as far as the device's limits and the kernel's attributes tell.
 */
#include "launch.h"
#include "codec.h"
#include "copy.h"
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "event.h"
#include "gen.h"
#include "handles.h"
#include "kernel.h"
#include "mapped.h"
#include "ranges.h"
#include "route.h"
#include "send.h"
#include "stream.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define MOST_ATTRS 64
#define OLD_PARAM_BYTES 4096 /* the most that a kernel could declare before CUDA 12.1 */

struct geometry {
	unsigned grid[3], block[3], shared;
};

/* Device limits that every launch is compared with. One that the device does not tell is the greatest number. */
struct limits {
	_Atomic bool known;
	unsigned grid[3], block[3], threads, registers, shared_optin;
};

static unsigned limit(int dev, CUdevice_attribute a)
{
	unsigned v = (unsigned)sl_dev_attr(dev, a);

	return v ? v : UINT_MAX;
}

static void __attribute__((noinline)) read_limits(int dev, struct limits *l)
{
	for (unsigned i = 0; i < 3; i++) {
		l->grid[i] = limit(dev, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i);
		l->block[i] = limit(dev, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i);
	}
	l->threads = limit(dev, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
	l->registers = (unsigned)sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
	l->shared_optin = (unsigned)sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
	atomic_store_explicit(&l->known, true, memory_order_release);
}

static inline const struct limits *limits_of(int dev)
{
	static struct limits all[SL_MAX_DEVICES];
	struct limits *l = &all[dev];

	if (__builtin_expect(!atomic_load_explicit(&l->known, memory_order_acquire), 0))
		read_limits(dev, l);
	return l;
}

/*
 * The registers that a block of so many threads takes: whole warps, four by four, in units of 256. A block that the registers
 * do not suffice for is one error, a block beyond the kernel's launch bounds another: seen with driver 580.
 */
static uint64_t registers(const struct sl_launch_info *k, uint64_t threads)
{
	uint64_t warp = (32 * (uint64_t)k->registers + 255) / 256 * 256;

	return (threads + 127) / 128 * 4 * warp;
}

SL_HOT CUresult check(const struct geometry *g, const struct sl_launch_info *k, const struct limits *l)
{
	uint64_t threads = (uint64_t)g->block[0] * g->block[1] * g->block[2];

	for (int i = 0; i < 3; i++)
		if (g->grid[i] - 1 >= l->grid[i] || g->block[i] - 1 >= l->block[i]) /* 0 - 1 is greater than any limit */
			return CUDA_ERROR_INVALID_VALUE;
	if (threads > l->threads)
		return CUDA_ERROR_INVALID_VALUE;
	if (k->max_threads && threads > (unsigned)k->max_threads)
		return registers(k, threads) > l->registers ? CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES : CUDA_ERROR_INVALID_VALUE;
	if (k->max_dynamic >= 0 && g->shared > (unsigned)k->max_dynamic)
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

/*
 * A parameter of n bytes that may point into page-locked host memory: the device's address (mapped.h) is put in its
 * place. Where the device cannot reach it, the launch is refused; but within a structure a pointer is left as it is then,
 * since nothing says that the kernel follows it.
 */
static CUresult reach_slow(uint8_t *p, uint32_t n)
{
	for (uint32_t i = 0; i + 8 <= n; i += 8) {
		CUdeviceptr there;
		struct sl_range r;
		uint64_t v;
		CUresult err;

		memcpy(&v, p + i, 8);
		if (!sl_locked_maybe(v) || !sl_range_find(v, &r) || (r.type != SL_RANGE_HOST && r.type != SL_RANGE_REGISTERED))
			continue;
		err = sl_mapped_address(&there, v, &r);
		if (err && n > 8)
			continue;
		if (err)
			return err;
		memcpy(p + i, &there, 8);
	}
	return CUDA_SUCCESS;
}

static inline CUresult reach(uint8_t *p, uint32_t n)
{
	uint64_t v;

	for (uint32_t i = 0; i + 8 <= n; i += 8) {
		memcpy(&v, p + i, 8);
		if (__builtin_expect(sl_locked_maybe(v), 0))
			return reach_slow(p, n);
	}
	return CUDA_SUCCESS;
}

/* Appends the parameters from the extra array, packed; their bytes in *n. */
static CUresult put_extra(sl_buf *b, const struct sl_launch_info *k, void **extra, uint32_t *n)
{
	const void *buffer = NULL;
	CUresult err = CUDA_SUCCESS;
	size_t size = 0;
	uint8_t *to;

	for (unsigned i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
		if (i > 16)
			return CUDA_ERROR_INVALID_VALUE;
		if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
			buffer = extra[i + 1];
		else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[i + 1])
			size = *(size_t *)extra[i + 1];
		else
			return CUDA_ERROR_INVALID_VALUE;
	}
	if ((size && !buffer) || size > (1u << 16) || (k->param_bytes && !size))
		return CUDA_ERROR_INVALID_VALUE;
	/* More than the kernel declares, and than any kernel had before CUDA 12.1; seen on an H200 with driver 580. */
	if (size > k->param_bytes && size > OLD_PARAM_BYTES)
		return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
	/* The buffer may be shorter than the parameters: NCCL gives the part that its kernels read. */
	*n = size < k->param_bytes ? k->param_bytes : (uint32_t)size;
	to = sl_buf_room(b, *n);
	if (!to)
		return *n ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
	if (size)
		memcpy(to, buffer, size);
	memset(to + size, 0, *n - size);
	for (uint32_t i = 0; i < k->nparams && !err; i++)
		err = reach(to + k->offset[i], k->size[i]);
	return err;
}

/* Appends the parameters, packed, from the list of pointers or from the extra array; their bytes in *n. */
SL_HOT CUresult put_params(sl_buf *b, const struct sl_launch_info *k, void **params, void **extra, uint32_t *n)
{
	uint8_t *to;

	if (__builtin_expect(extra != NULL, 0))
		return params ? CUDA_ERROR_INVALID_VALUE : put_extra(b, k, extra, n);
	if (k->nparams && !params)
		return CUDA_ERROR_INVALID_VALUE;
	*n = k->param_bytes;
	to = sl_buf_room(b, k->param_bytes);
	if (!to)
		return k->param_bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
	for (uint32_t i = 0, end = 0; i < k->nparams; i++) {
		CUresult err;

		if (k->offset[i] > end)
			memset(to + end, 0, k->offset[i] - end);
		memcpy(to + k->offset[i], params[i], k->size[i]);
		end = k->offset[i] + k->size[i];
		err = reach(to + k->offset[i], k->size[i]);
		if (__builtin_expect(err, 0))
			return err;
	}
	return CUDA_SUCCESS;
}

/* Launch attributes; events in them are sent as their ids. */
static CUresult put_attrs(sl_buf *b, const CUlaunchAttribute *attrs, unsigned n, uint32_t *sent)
{
	static uint8_t once;
	CUresult err = CUDA_SUCCESS;

	*sent = 0;
	for (unsigned i = 0; i < n; i++) {
		struct wire_launch_attr a = { .id = attrs[i].id };
		CUlaunchAttributeValue v = attrs[i].value;
		uint64_t id;

		_Static_assert(sizeof a.value == sizeof v, "a launch attribute's value");

		switch (attrs[i].id) {
		case CU_LAUNCH_ATTRIBUTE_IGNORE:
			continue;
		case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
			id = sl_handle_id(SL_EVENT, v.programmaticEvent.event, &err);
			sl_event_external(v.programmaticEvent.event);
			memcpy(&v.programmaticEvent.event, &id, sizeof id);
			break;
		case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
			id = sl_handle_id(SL_EVENT, v.launchCompletionEvent.event, &err);
			sl_event_external(v.launchCompletionEvent.event);
			memcpy(&v.launchCompletionEvent.event, &id, sizeof id);
			break;
		case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
			if (v.deviceUpdatableKernelNode.deviceUpdatable)
				return sl_refuse("cuLaunchKernelEx with a device-updatable node", &once);
			continue;
		default:
			break;
		}
		if (err)
			return err;
		memcpy(a.value, &v, sizeof v);
		sl_put_bytes(b, &a, sizeof a);
		(*sent)++;
	}
	return CUDA_SUCCESS;
}

CUresult sl_launch_pack(sl_buf *b, CUfunction f, const unsigned grid[3], const unsigned block[3], unsigned shared, void **params, void **extra,
			uint32_t *n)
{
	struct geometry g = { { grid[0], grid[1], grid[2] }, { block[0], block[1], block[2] }, shared };
	struct sl_launch_info k;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (!err)
		err = sl_kernel_layout(f, c->dev, &k);
	if (!err)
		err = check(&g, &k, limits_of(c->dev));
	if (!err)
		err = put_params(b, &k, params, extra, n);
	return !err && b->failed ? CUDA_ERROR_OUT_OF_MEMORY : err;
}

/* A cooperative launch needs room for all of its blocks at once. */
static CUresult check_cooperative(CUfunction f, const struct geometry *g, int dev, const CUlaunchAttribute *attrs, unsigned nattrs, unsigned flags)
{
	bool cooperative = flags & SL_LAUNCH_COOPERATIVE;
	uint64_t blocks = (uint64_t)g->grid[0] * g->grid[1] * g->grid[2];
	int at_once = 0;
	CUresult err;

	for (unsigned i = 0; i < nattrs; i++)
		cooperative |= attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && attrs[i].value.cooperative;
	if (!cooperative)
		return CUDA_SUCCESS;
	err = sl_cuOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, f, (int)(g->block[0] * g->block[1] * g->block[2]), g->shared);
	if (err)
		return err;
	return blocks > (uint64_t)at_once * (unsigned)sl_dev_attr(dev, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) ?
		       CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE : CUDA_SUCCESS;
}

/* What CUDA_LAUNCH_BLOCKING says. Like the driver, the shim reads it once. */
static inline bool blocking(void)
{
	static _Atomic signed char known; /* 0: not read yet, 1: no, 2: yes */
	signed char k = atomic_load_explicit(&known, memory_order_relaxed);

	if (__builtin_expect(!k, 0)) {
		const char *v = getenv("CUDA_LAUNCH_BLOCKING");

		k = v && atoi(v) ? 2 : 1;
		atomic_store_explicit(&known, k, memory_order_relaxed);
	}
	return k == 2;
}

CUresult sl_launch_end(CUstream s)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

	if (__builtin_expect(!blocking(), 1))
		return CUDA_SUCCESS;
	if (sl_capturing_any() && (sl_cuStreamIsCapturing(s, &status) || status != CU_STREAM_CAPTURE_STATUS_NONE))
		return CUDA_SUCCESS;
	return sl_cuStreamSynchronize(s);
}

SL_HOT CUresult launch(CUfunction f, const struct geometry *g, CUstream stream, void **params, void **extra,
		       const CUlaunchAttribute *attrs, unsigned nattrs, unsigned flags)
{
	struct sl_launch_info k;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);
	uint32_t sent = 0, nparam = 0;
	struct wire_launch head;
	sl_buf b;

	if (__builtin_expect(err, 0))
		return err;
	err = sl_kernel_layout(f, c->dev, &k);
	if (__builtin_expect(err, 0))
		return err;
	err = check(g, &k, limits_of(c->dev));
	if (!err && __builtin_expect(flags != 0, 0))
		err = check_cooperative(f, g, c->dev, attrs, nattrs, flags);
	if (__builtin_expect(err, 0))
		return err;
	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, stream);
	sl_route(&b, SL_KERNEL, f);
	head = (struct wire_launch){ .kernel = k.id, .stream = sl_stream_id(stream, &err), .shared = g->shared, .flags = (uint16_t)flags };
	memcpy(head.grid, g->grid, sizeof head.grid);
	memcpy(head.block, g->block, sizeof head.block);
	sl_mapped_send();
	sl_buf_room(&b, sizeof head);
	if (!err)
		err = put_params(&b, &k, params, extra, &nparam);
	if (!err && nattrs)
		err = put_attrs(&b, attrs, nattrs, &sent);
	if (b.failed)
		err = CUDA_ERROR_OUT_OF_MEMORY;
	if (!err) {
		head.nparam = nparam;
		head.nattrs = (uint16_t)sent;
		memcpy(b.p, &head, sizeof head);
		err = sl_oneway(CTL_LAUNCH, &b);
	}
	sl_buf_free(&b);
	return __builtin_expect(!err && blocking(), 0) ? sl_launch_end(stream) : err;
}

CUresult sl_cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
			   unsigned int bz, unsigned int shared, CUstream hStream, void **params, void **extra)
{
	const struct geometry g = { { gx, gy, gz }, { bx, by, bz }, shared };

	return launch(f, &g, hStream, params, extra, NULL, 0, 0);
}

CUresult sl_cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
				      unsigned int bz, unsigned int shared, CUstream hStream, void **params)
{
	const struct geometry g = { { gx, gy, gz }, { bx, by, bz }, shared };

	return launch(f, &g, hStream, params, NULL, NULL, 0, SL_LAUNCH_COOPERATIVE);
}

CUresult sl_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
	struct geometry g;

	if (!config || config->numAttrs > MOST_ATTRS || (config->numAttrs && !config->attrs))
		return CUDA_ERROR_INVALID_VALUE;
	g = (struct geometry){ { config->gridDimX, config->gridDimY, config->gridDimZ },
			       { config->blockDimX, config->blockDimY, config->blockDimZ },
			       config->sharedMemBytes };
	return launch(f, &g, config->hStream, params, extra, config->attrs, config->numAttrs, SL_LAUNCH_EXTENDED);
}
