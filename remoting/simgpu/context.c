/*
 * Contexts: the stack of every thread, primary contexts, and what a context frees
 * when it ends.
 */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include "sim.h"

#define STACK_MAX 64

static __thread struct { uint64_t ctx[STACK_MAX]; int n; } stack;

CUresult dev_check(CUdevice dev)
{
	return dev < 0 || dev >= sim.cfg.ndev ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

/* True when the current context was destroyed under this thread. */
bool ctx_dangling(void)
{
	return stack.n && !ctx_current();
}

static struct ctx *top(void)
{
	return stack.n ? obj_get_id(stack.ctx[stack.n - 1], K_CTX) : NULL;
}

struct ctx *ctx_current(void)
{
	struct ctx *c = top();

	return c && c->home ? c->home : c;
}

struct ctx *ctx_current_green(void)
{
	struct ctx *c = top();

	return c && c->home ? c : NULL;
}

bool ctx_usable(struct ctx *c)
{
	return c->active && !c->dying;
}

static void set_top(struct ctx *c)
{
	if (stack.n)
		stack.n--;
	if (c)
		stack.ctx[stack.n++] = c->obj.handle;
}

static struct ctx *ctx_make(int dev, unsigned int flags, bool primary)
{
	static const size_t limits[SIM_LIMITS] = { 1024, 1048576, 8388608, 2, 2048, 128, 0, 0, 0, 0 };
	struct ctx *c = obj_new(K_CTX, NULL, sizeof(*c));

	if (!c)
		return NULL;
	c->dev = dev;
	c->flags = flags;
	c->primary = primary;
	c->version = 3020;
	c->id = ++sim.serial;
	memcpy(c->limits, limits, sizeof(limits));
	return c;
}

struct ctx *ctx_green(struct ctx *primary, uint64_t green)
{
	struct ctx *c = ctx_make(primary->dev, primary->flags, false);

	if (!c)
		return NULL;
	c->home = primary;
	c->green = green;
	c->active = c->ever = true;
	c->legacy = stream_new(primary, CU_STREAM_NON_BLOCKING, 0);
	if (c->legacy)
		c->legacy->green = green;
	return c;
}

void ctx_green_end(struct ctx *c)
{
	obj_forget(c);		/* as with other contexts, the struct stays */
	c->dead = sim.dead;
	sim.dead = c;
}

static struct ctx *primary_ctx(int dev)
{
	struct device *d = &sim.dev[dev];

	if (!d->primary)
		d->primary = ctx_make(dev, 0, true);
	return d->primary;
}

/* Makes c exist: takes its memory and makes its default stream. */
CUresult ctx_activate(struct ctx *c)
{
	if (c->active)
		return CUDA_SUCCESS;
	if (alloc_must_fail() || !state_charge(c->dev, sim.cfg.ctx_mem))
		return CUDA_ERROR_OUT_OF_MEMORY;
	c->overhead = sim.cfg.ctx_mem;
	c->legacy = stream_new(c, 0, 0);
	if (!c->legacy) {
		state_uncharge(c->dev, c->overhead);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	state_contexts(c->dev, 1);
	c->active = c->ever = true;
	c->sticky = CUDA_SUCCESS;
	return CUDA_SUCCESS;
}

/*
 * Reserves bytes of local memory for every thread that can be resident; exact also releases what
 * is reserved beyond that. A context has 1 KiB for each thread from its start.
 */
CUresult ctx_local(struct ctx *c, uint64_t bytes, bool exact)
{
	int sms = 0, threads = 0;
	uint64_t want;

	dev_attr(c->dev, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &sms);
	dev_attr(c->dev, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, &threads);
	want = bytes > 1024 ? (bytes - 1024) * (uint64_t)sms * (uint64_t)threads : 0;
	want = (want + (2ULL << 20) - 1) & ~((2ULL << 20) - 1);
	if (want > c->local && !state_charge(c->dev, want - c->local))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (want > c->local) {
		c->overhead += want - c->local;
		c->local = want;
	} else if (exact) {
		state_uncharge(c->dev, c->local - want);
		c->overhead -= c->local - want;
		c->local = want;
	}
	return CUDA_SUCCESS;
}

/* Writes what device printf and assertions have produced so far. Called with the lock held, at synchronisations. */
void ctx_print_flush(struct ctx *c)
{
	if (c->print.n)
		fwrite(c->print.text, 1, c->print.n, stdout);
	if (c->failed.n)
		fwrite(c->failed.text, 1, c->failed.n, stderr);
	c->print.n = c->failed.n = 0;
}

/* The error that sticks to c, for a call that reports it; output from before the error is written first. */
CUresult ctx_broken(struct ctx *c)
{
	if (c->sticky)
		ctx_print_flush(c);
	return c->sticky;
}

/* Ends everything in c; the struct stays. May release the lock meanwhile. */
static void ctx_empty(struct ctx *c)
{
	struct obj *o;
	size_t it;

	c->dying = true;
	pthread_cond_broadcast(&sim.progress);	/* hung kernels see that they should end */
	stream_ctx_destroy(c);
	ctx_print_flush(c);
	for (it = 0; (o = obj_next(&it, c));) {
		switch (o->kind) {
		case K_EVENT:
			event_uncapture((struct event *)o);
			op_unref(((struct event *)o)->op);
			obj_del(o);
			break;
		case K_MODULE:
			module_destroy((struct module *)o);
			break;
		case K_ARRAY:
			if (!((struct array *)o)->parent)
				array_free((struct array *)o);
			break;
		case K_MIPMAP:
			for (unsigned int i = 0; i < ((struct mipmap *)o)->levels; i++)
				array_free(((struct mipmap *)o)->level[i]);
			obj_del(o);
			break;
		case K_TEXREF:		/* those of modules end with them */
			if (!texref_module((struct texref *)o))
				texref_free((struct texref *)o);
			break;
		case K_TEXOBJ:
			obj_del(o);
			break;
		default:
			break;
		}
	}
	mem_ctx_destroy(c);
	state_uncharge(c->dev, c->overhead);
	state_contexts(c->dev, -1);
	free(c->print.text);
	free(c->failed.text);
	c->print = c->failed = (struct output){ 0 };
	c->overhead = c->local = 0;
	c->active = c->dying = false;
	c->sticky = CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	if (!pctx)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = dev_check(dev);
	if (r)
		return sim_leave(r);
	c = primary_ctx(dev);
	if (!c)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	while (c->dying)
		pthread_cond_wait(&sim.progress, &sim.lock);
	r = ctx_activate(c);
	if (r)
		return sim_leave(r);
	c->primary_refs++;
	*pctx = HANDLE(CUcontext, c);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	r = dev_check(dev);
	if (r)
		return sim_leave(r);
	c = primary_ctx(dev);
	if (!c || !c->primary_refs || c->dying)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (--c->primary_refs == 0 && c->active) {
		ctx_empty(c);
		pthread_cond_broadcast(&sim.progress);
	}
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice dev) { return cuDevicePrimaryCtxRelease_v2(dev); }

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	r = dev_check(dev);
	if (r)
		return sim_leave(r);
	c = primary_ctx(dev);
	if (c && c->active && !c->dying) {
		c->primary_refs = 0;
		ctx_empty(c);
		pthread_cond_broadcast(&sim.progress);
	}
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxReset(CUdevice dev) { return cuDevicePrimaryCtxReset_v2(dev); }

API CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	r = dev_check(dev);
	if (r)
		return sim_leave(r);
	c = primary_ctx(dev);
	if (flags)
		*flags = c ? c->flags : 0;
	if (active)
		*active = c && c->active;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult flags_check(unsigned int flags)
{
	unsigned int sched = flags & CU_CTX_SCHED_MASK;

	if (flags & ~(unsigned int)CU_CTX_FLAGS_MASK)
		return CUDA_ERROR_INVALID_VALUE;
	return sched == 0 || sched == 1 || sched == 2 || sched == 4 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	r = dev_check(dev);
	if (!r)
		r = flags_check(flags);
	if (r)
		return sim_leave(r);
	c = primary_ctx(dev);
	if (c)
		c->flags = flags;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)
{
	return cuDevicePrimaryCtxSetFlags_v2(dev, flags);
}

static CUresult create(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	r = dev_check(dev);
	if (!r)
		r = flags_check(flags);
	if (!r && !pctx)
		r = CUDA_ERROR_INVALID_VALUE;
	if (!r && stack.n == STACK_MAX)
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (r)
		return sim_leave(r);
	c = ctx_make(dev, flags, false);
	if (!c)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	r = ctx_activate(c);
	if (r) {
		obj_del(c);
		return sim_leave(r);
	}
	stack.ctx[stack.n++] = c->obj.handle;
	*pctx = HANDLE(CUcontext, c);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) { return create(pctx, flags, dev); }

API CUresult cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *p, int n, unsigned int flags, CUdevice dev)
{
	if (n < 0 || (n && !p))
		return CUDA_ERROR_INVALID_VALUE;
	return n ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : create(pctx, flags, dev);
}

API CUresult cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *p, unsigned int flags, CUdevice dev)
{
	if (p && p->numExecAffinityParams)
		return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	if (p && p->cigParams)
		return CUDA_ERROR_NOT_SUPPORTED;
	return create(pctx, flags, dev);
}

API CUresult cuCtxDestroy_v2(CUcontext h)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	c = obj_get(h, K_CTX);
	if (!c || c->primary || c->home || c->dying)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (stack.n && stack.ctx[stack.n - 1] == c->obj.handle)
		stack.n--;
	ctx_empty(c);
	obj_forget(c);		/* the struct stays: a thread may still wait in one of its calls */
	c->dead = sim.dead;
	sim.dead = c;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxDestroy(CUcontext h) { return cuCtxDestroy_v2(h); }

API CUresult cuCtxPushCurrent_v2(CUcontext h)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	c = obj_get(h, K_CTX);
	if (!c)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (stack.n == STACK_MAX)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	stack.ctx[stack.n++] = c->obj.handle;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxPushCurrent(CUcontext h) { return cuCtxPushCurrent_v2(h); }

API CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!stack.n)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	stack.n--;
	if (out)
		*out = (CUcontext)(uintptr_t)stack.ctx[stack.n];
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxPopCurrent(CUcontext *out) { return cuCtxPopCurrent_v2(out); }

API CUresult cuCtxSetCurrent(CUcontext h)
{
	CUresult r = sim_enter();
	struct ctx *c = NULL;

	if (r)
		return r;
	if (h) {
		c = obj_get(h, K_CTX);
		if (!c)
			return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	}
	set_top(c);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetCurrent(CUcontext *out)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = stack.n ? (CUcontext)(uintptr_t)stack.ctx[stack.n - 1] : NULL;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult get_device(CUdevice *dev, CUcontext h)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	c = h ? obj_get(h, K_CTX) : ctx_current();
	if (!c || !dev)
		return sim_leave(c ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT);
	*dev = c->dev;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetDevice(CUdevice *dev) { return get_device(dev, NULL); }
API CUresult cuCtxGetDevice_v2(CUdevice *dev, CUcontext h) { return get_device(dev, h); }

static CUresult synchronize(CUcontext h)
{
	struct ctx *c;
	CUresult r;

	if (h) {
		r = sim_enter();
		if (r)
			return r;
		c = obj_get(h, K_CTX);
		if (!c || !ctx_usable(c))
			return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
		if (ctx_broken(c))
			return sim_leave(c->sticky);
	} else {
		r = sim_enter_ctx(&c);
		if (r)
			return r;
	}
	for (struct stream *s = c->streams; s; s = s->next) {
		if (s->cap) {
			capture_break(s);
			return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
		}
	}
	ctx_wait(c);
	ctx_print_flush(c);
	return sim_leave(c->sticky);
}

API CUresult cuCtxSynchronize(void) { return synchronize(NULL); }
API CUresult cuCtxSynchronize_v2(CUcontext h) { return synchronize(h); }

API CUresult cuCtxGetFlags(unsigned int *flags)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!flags)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*flags = c->flags;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxSetFlags(unsigned int flags)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = flags_check(flags);
	if (!r)
		c->flags = flags;
	return sim_leave(r);
}

API CUresult cuCtxGetId(CUcontext h, unsigned long long *id)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	c = h ? obj_get(h, K_CTX) : ctx_current();
	if (!c || !c->active)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!id)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*id = c->id;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetApiVersion(CUcontext h, unsigned int *version)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	c = h ? obj_get(h, K_CTX) : ctx_current();
	if (!c || !c->active)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!version)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*version = c->version;
	return sim_leave(CUDA_SUCCESS);
}
