/*
 * Green contexts: numbers of multiprocessors, and streams of the primary context that say which green context they are
 * of. Kernels run on all of the device all the same. A green context as a CUcontext is a context whose home is the
 * primary one: what is made while it is current belongs there.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define SPLIT 8u			/* multiprocessors in the smallest group */
#define KEY 0x9e3779b9u			/* what the driver alone writes and reads of a resource */

struct desc {
	struct obj obj;
	unsigned int sms;
	int dev;
};

struct green {
	struct obj obj;
	struct ctx *as_ctx;
	unsigned int sms;
	uint64_t id;
};

static void resource(CUdevResource *r, int dev, unsigned int sms)
{
	uint32_t hidden[2] = { KEY ^ sms, (uint32_t)dev };

	memset(r, 0, sizeof(*r));
	r->type = CU_DEV_RESOURCE_TYPE_SM;
	memcpy(r->_internal_padding + 4, hidden, sizeof(hidden));
	r->sm.smCount = sms;
	r->sm.minSmPartitionSize = SPLIT;
	r->sm.smCoscheduledAlignment = SPLIT;
}

/* The device of a resource that this driver has made; an error for any other. */
static CUresult known(const CUdevResource *r, int *dev)
{
	uint32_t hidden[2];

	memcpy(hidden, r->_internal_padding + 4, sizeof(hidden));
	*dev = (int)hidden[1];
	return r->type == CU_DEV_RESOURCE_TYPE_SM && (hidden[0] ^ KEY) == r->sm.smCount && !dev_check(*dev) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_RESOURCE_TYPE;
}

static unsigned int all_of(int dev)
{
	int n = 0;

	dev_attr(dev, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &n);
	return (unsigned int)n;
}

API CUresult cuDeviceGetDevResource(CUdevice dev, CUdevResource *r, CUdevResourceType type)
{
	CUresult e = sim_enter();

	if (e)
		return e;
	e = dev_check(dev);
	if (!e && !r)
		e = CUDA_ERROR_INVALID_VALUE;
	if (!e && type != CU_DEV_RESOURCE_TYPE_SM)
		e = CUDA_ERROR_INVALID_RESOURCE_TYPE;
	if (!e)
		resource(r, dev, all_of(dev));
	return sim_leave(e);
}

static CUresult green_enter(CUgreenCtx h, struct green **g)
{
	CUresult e = sim_enter();

	if (e)
		return e;
	*g = obj_get(h, K_GREEN);
	return *g ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_CONTEXT);
}

static struct green *green_of(const struct ctx *c)
{
	return c && c->home ? obj_get_id(c->green, K_GREEN) : NULL;
}

API CUresult cuCtxGetDevResource(CUcontext h, CUdevResource *r, CUdevResourceType type)
{
	CUresult e = sim_enter();
	struct green *g;
	struct ctx *c;

	if (e)
		return e;
	c = obj_get(h, K_CTX);
	if (!c || !r || type != CU_DEV_RESOURCE_TYPE_SM)
		return sim_leave(!c ? CUDA_ERROR_INVALID_CONTEXT : !r ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_RESOURCE_TYPE);
	g = green_of(c);
	resource(r, c->dev, g ? g->sms : all_of(c->dev));
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGreenCtxGetDevResource(CUgreenCtx h, CUdevResource *r, CUdevResourceType type)
{
	struct green *g;
	CUresult e = green_enter(h, &g);

	if (e)
		return e;
	if (!r || type != CU_DEV_RESOURCE_TYPE_SM)
		return sim_leave(r ? CUDA_ERROR_INVALID_RESOURCE_TYPE : CUDA_ERROR_INVALID_VALUE);
	resource(r, g->as_ctx->dev, g->sms);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *n, const CUdevResource *in, CUdevResource *rest,
					 unsigned int flags, unsigned int least)
{
	unsigned int size = (least + SPLIT - 1) / SPLIT * SPLIT, groups;
	int dev;
	CUresult e;

	(void)flags;
	if (!n || !in || (result && !*n))
		return CUDA_ERROR_INVALID_VALUE;
	e = sim_enter();
	if (e)
		return e;
	e = known(in, &dev);
	if (!size)
		size = SPLIT;
	if (!e && size > in->sm.smCount)
		e = CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
	if (e)
		return sim_leave(e);
	groups = in->sm.smCount / size;
	if (result && groups > *n)
		groups = *n;
	for (unsigned int i = 0; result && i < groups; i++)
		resource(&result[i], dev, size);
	if (rest)
		resource(rest, dev, in->sm.smCount - (result ? groups * size : 0));
	*n = groups;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *r, unsigned int n)
{
	struct desc *d;
	unsigned int sms = 0;
	int dev = 0;
	CUresult e;

	if (!out || !r || !n)
		return CUDA_ERROR_INVALID_VALUE;
	e = sim_enter();
	if (e)
		return e;
	for (unsigned int i = 0; i < n && !e; i++) {
		e = known(&r[i], &dev);
		sms += r[i].sm.smCount;
	}
	if (e)
		return sim_leave(e);
	d = obj_new(K_DESC, NULL, sizeof(*d));
	if (!d)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	d->sms = sms;
	d->dev = dev;
	*out = HANDLE(CUdevResourceDesc, d);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc h, CUdevice dev, unsigned int flags)
{
	struct desc *d;
	struct green *g;
	struct ctx *primary;
	CUcontext retained;
	CUresult e;

	if (!out || flags != CU_GREEN_CTX_DEFAULT_STREAM)
		return CUDA_ERROR_INVALID_VALUE;
	e = cuDevicePrimaryCtxRetain(&retained, dev);
	if (e)
		return e;
	e = sim_enter();
	if (e)
		return e;
	d = obj_get(h, K_DESC);
	primary = obj_get(retained, K_CTX);
	g = d && primary && d->dev == dev ? obj_new(K_GREEN, NULL, sizeof(*g)) : NULL;
	if (g)
		g->as_ctx = ctx_green(primary, g->obj.handle);
	if (!g || !g->as_ctx) {
		if (g)
			obj_del(g);
		sim_leave(CUDA_SUCCESS);
		cuDevicePrimaryCtxRelease_v2(dev);
		return CUDA_ERROR_INVALID_VALUE;
	}
	g->sms = d->sms;
	g->id = ++sim.serial;
	*out = HANDLE(CUgreenCtx, g);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGreenCtxDestroy(CUgreenCtx h)
{
	struct green *g;
	CUresult e = green_enter(h, &g);
	int dev;

	if (e)
		return e;
	dev = g->as_ctx->dev;
	ctx_green_end(g->as_ctx);
	obj_del(g);
	sim_leave(CUDA_SUCCESS);
	return cuDevicePrimaryCtxRelease_v2(dev);
}

API CUresult cuGreenCtxGetId(CUgreenCtx h, unsigned long long *id)
{
	struct green *g;
	CUresult e = green_enter(h, &g);

	if (e)
		return e;
	if (!id)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*id = g->id;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx h)
{
	struct green *g;
	CUresult e = green_enter(h, &g);

	if (e)
		return e;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = HANDLE(CUcontext, g->as_ctx);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx h, unsigned int flags, int priority)
{
	struct green *g;
	struct stream *s;
	CUresult e = green_enter(h, &g);

	if (e)
		return e;
	if (!out || flags != CU_STREAM_NON_BLOCKING)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	s = stream_new(g->as_ctx->home, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
	if (!s)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	s->green = g->obj.handle;
	*out = HANDLE(CUstream, s);
	return sim_leave(CUDA_SUCCESS);
}

/* The simulator has few streams: it waits for all of the context, and the event is complete at once. */
API CUresult cuGreenCtxRecordEvent(CUgreenCtx h, CUevent event)
{
	struct green *g;
	struct event *ev;
	CUresult e = green_enter(h, &g);

	if (e)
		return e;
	ev = obj_get(event, K_EVENT);
	if (!ev)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	ctx_wait(g->as_ctx->home);
	return sim_leave(event_record(ev, g->as_ctx->home->legacy));
}

API CUresult cuGreenCtxWaitEvent(CUgreenCtx h, CUevent event)
{
	struct green *g;
	struct event *ev;
	CUresult e = green_enter(h, &g);

	if (e)
		return e;
	ev = obj_get(event, K_EVENT);
	if (!ev)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	if (ev->op)
		op_wait(ev->op);
	return sim_leave(CUDA_SUCCESS);
}

struct ctx *green_ctx(uint64_t handle)
{
	struct green *g = obj_get_id(handle, K_GREEN);

	return g ? g->as_ctx : NULL;
}
