/*
 * Contexts: which one is current, and how they begin and end; ctxprops.c has their
 * properties. A thread's stack of contexts is its own and needs no lock. Primary
 * contexts are handles of this process from the start and cost the worker nothing: the
 * first call that needs one makes it exist there (activate), and its reference count
 * here decides when it ends there. The lock below guards those counts and flags; a
 * context's mutex makes one thread activate it while the others wait.
 */
#include "ctx.h"
#include "background.h"
#include "codec.h"
#include "ctxlocal.h"
#include "device.h"
#include "errstate.h"
#include "event.h"
#include "gen.h"
#include "green.h"
#include "handles.h"
#include "mapped.h"
#include "module.h"
#include "ranges.h"
#include "route.h"
#include "session.h"
#include "stream.h"
#include "wait.h"

#include <stdlib.h>
#include <string.h>

struct sl_ctx *sl_primary[SL_MAX_DEVICES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sl_pool ctxs = { .size = sizeof(struct sl_ctx) };
static _Atomic uint64_t last_uid, last_tid;
static pthread_key_t thread_key;
static pthread_once_t thread_once = PTHREAD_ONCE_INIT;
static __thread struct sl_thread self;

uint64_t sl_next_uid(void)
{
	return atomic_fetch_add(&last_uid, 1) + 1;
}

static void thread_gone(void *arg)
{
	struct sl_thread *t = arg;

	sl_thread_streams_drop(t);
	free(t->stack);
	t->stack = NULL;
	t->depth = t->cap = 0;
	t->cur = NULL;
	t->known = false;
}

static void make_key(void)
{
	pthread_key_create(&thread_key, thread_gone);
}

struct sl_thread *sl_tls(void)
{
	struct sl_thread *t = &self;

	if (__builtin_expect(!t->known, 0)) {
		t->known = true;
		if (!t->tid)
			t->tid = atomic_fetch_add(&last_tid, 1) + 1;
		pthread_once(&thread_once, make_key);
		pthread_setspecific(thread_key, t);
	}
	return t;
}

static void ctx_reset_fields(struct sl_ctx *c)
{
	for (unsigned i = 0; i < sizeof c->limit / sizeof c->limit[0]; i++)
		atomic_store(&c->limit[i], 0);
	atomic_store(&c->cache_config, CU_FUNC_CACHE_PREFER_NONE);
	atomic_store(&c->shared_config, 0);
	sl_mark_reset(&c->legacy);
	sl_mark_reset(&c->direct);
	c->uid = sl_next_uid();
	atomic_fetch_add(&c->epoch, 1);
}

void sl_ctx_setup(void)
{
	for (int d = 0; d < sl_dev_count(); d++) {
		struct sl_ctx *c = sl_pool_get(&ctxs);

		if (!c)
			return;
		c->dev = d;
		c->primary = true;
		c->api_version = 3020;
		ctx_reset_fields(c);
		/* Each worker knows the primary contexts of its own devices as 1, 2, ... */
		atomic_store(&c->id, 1u + (uint32_t)sl_dev_place(d));
		sl_handle_take(SL_CTX, atomic_load(&c->id), c);
		sl_handle_set_wire(SL_CTX, atomic_load(&c->id), 1u + (uint32_t)sl_dev_wire(d));
		sl_primary[d] = c;
	}
}

/* Makes the current context exist in the worker. Its id, or 0 with the thread's ctx_error set. */
static uint32_t activate(struct sl_thread *t, struct sl_ctx *c)
{
	CUresult err = CUDA_SUCCESS;

	if (atomic_load(&c->id) != t->cur_id || (c->primary && !__atomic_load_n(&c->refs, __ATOMIC_ACQUIRE))) {
		t->ctx_error = CUDA_ERROR_CONTEXT_IS_DESTROYED;
		return 0;
	}
	pthread_mutex_lock(&c->activate);
	if (!atomic_load(&c->active)) {
		sl_buf b;

		t->no_ctx = true;
		sl_stream_new_ctx(sl_dev_session((uint32_t)sl_dev_place(c->dev)));
		sl_buf_init(&b);
		sl_route_dev(&b, c->dev);
		sl_put(&b, struct wire_ctx_activate, .device = (uint32_t)sl_dev_wire(c->dev));
		err = sl_wait(CTL_CTX_ACTIVATE, &b, NULL);
		sl_buf_free(&b);
		t->no_ctx = false;
		if (!err)
			atomic_store(&c->active, true);
	}
	pthread_mutex_unlock(&c->activate);
	t->ctx_error = err;
	return err ? 0 : t->cur_id;
}

uint32_t sl_current_ctx_id(void)
{
	struct sl_thread *t = sl_tls();
	struct sl_ctx *c = t->cur;

	if (!c || t->no_ctx)
		return 0;
	if (__builtin_expect(atomic_load_explicit(&c->active, memory_order_acquire) &&
			     atomic_load_explicit(&c->id, memory_order_relaxed) == t->cur_id, 1))
		return t->cur_id;
	return activate(t, c);
}

CUresult sl_ctx_missing(void)
{
	const struct sl_thread *t = sl_tls();

	return t->cur && !t->no_ctx && t->ctx_error ? t->ctx_error : CUDA_ERROR_INVALID_CONTEXT;
}

uint32_t sl_ctx_cur(void)
{
	return sl_tls()->cur_id;
}

unsigned sl_ctx_session(uint32_t id)
{
	struct sl_ctx *c;

	if (id && id <= SL_MAX_DEVICES)
		return sl_dev_session(id - 1);
	c = sl_handle_state_by_id(SL_CTX, id);
	return c ? sl_dev_session((uint32_t)sl_dev_place(c->dev)) : 0;
}

CUresult sl_ctx_peek(struct sl_ctx **out)
{
	struct sl_thread *t = sl_tls();

	*out = NULL;
	if (!t->cur)
		return sl_initialized() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_NOT_INITIALIZED;
	if (atomic_load_explicit(&t->cur->id, memory_order_relaxed) != t->cur_id)
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	*out = t->cur;
	return CUDA_SUCCESS;
}

CUresult sl_ctx_use(struct sl_ctx **out)
{
	struct sl_thread *t = sl_tls();
	struct sl_ctx *c = t->cur;
	CUresult err = sl_sticky();

	*out = c;
	if (__builtin_expect(err, 0))
		return err;
	if (__builtin_expect(c && atomic_load_explicit(&c->active, memory_order_acquire) &&
			     atomic_load_explicit(&c->id, memory_order_relaxed) == t->cur_id, 1))
		return CUDA_SUCCESS;
	err = sl_ctx_peek(out);
	if (err)
		return err;
	return activate(t, c) ? CUDA_SUCCESS : t->ctx_error;
}

struct sl_ctx *sl_ctx_of(CUcontext h)
{
	return sl_handle_state(SL_CTX, h);
}

CUcontext sl_ctx_primary_handle(CUdevice dev)
{
	return sl_dev(dev) ? sl_ctx_handle(sl_primary[dev]) : NULL;
}

CUresult sl_ctx_with(struct sl_ctx *c, CUresult (*f)(void *), void *arg)
{
	struct sl_thread *t = sl_tls();
	struct sl_ctx *was = t->cur;
	struct sl_green *green = t->green;
	uint32_t was_id = t->cur_id;
	CUresult err;

	t->cur = c;
	t->cur_id = atomic_load(&c->id);
	t->green = NULL;
	err = f(arg);
	t->cur = was;
	t->cur_id = was_id;
	t->green = green;
	return err;
}

CUresult sl_ctx_or_current(CUcontext h, struct sl_ctx **out)
{
	if (!h)
		return sl_ctx_peek(out);
	*out = sl_ctx_of(h);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/*
 * Forgets all handles and ranges of a context that is being destroyed. Its work ends first: what that copies to host memory is there then, and its
 * host functions have run.
 */
static void drop_contents(struct sl_ctx *c)
{
	uint32_t id = atomic_load(&c->id);

	if (atomic_load(&c->active))
		sl_ctx_synchronize(c);
	sl_local_drop(c);
	sl_greens_drop(c);
	sl_mapped_drop_ctx(id);
	sl_streams_drop(id);
	sl_events_drop(id);
	sl_modules_drop(id);
	sl_background_sent(); /* a copy may read memory that is registered */
	sl_ranges_drop(id);
}

/* --- primary contexts --- */

CUresult sl_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	struct sl_ctx *c;

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	if (!pctx)
		return CUDA_ERROR_INVALID_VALUE;
	c = sl_primary[dev];
	pthread_mutex_lock(&lock);
	__atomic_store_n(&c->refs, c->refs + 1, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	*pctx = sl_ctx_handle(c);
	return CUDA_SUCCESS;
}

/* Ends or resets a primary context. The worker is asked only if it has it. */
static CUresult primary_end(struct sl_ctx *c, bool reset)
{
	struct sl_thread *t = sl_tls();
	CUresult err = CUDA_SUCCESS;
	bool was = t->no_ctx;

	drop_contents(c);
	pthread_mutex_lock(&c->activate);
	if (atomic_load(&c->active)) {
		t->no_ctx = true;
		err = reset ? fw_cuDevicePrimaryCtxReset_v2(c->dev) : fw_cuDevicePrimaryCtxRelease_v2(c->dev);
		t->no_ctx = was;
		atomic_store(&c->active, false);
	}
	ctx_reset_fields(c);
	pthread_mutex_unlock(&c->activate);
	return err;
}

CUresult sl_cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	struct sl_ctx *c;
	bool last;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	c = sl_primary[dev];
	pthread_mutex_lock(&lock);
	if (!c->refs) {
		pthread_mutex_unlock(&lock);
		return CUDA_ERROR_INVALID_CONTEXT;
	}
	__atomic_store_n(&c->refs, c->refs - 1, __ATOMIC_RELEASE);
	last = !c->refs;
	pthread_mutex_unlock(&lock);
	return last ? primary_end(c, false) : CUDA_SUCCESS;
}

CUresult sl_cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	struct sl_ctx *c;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	c = sl_primary[dev];
	pthread_mutex_lock(&lock);
	__atomic_store_n(&c->refs, 0, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return primary_end(c, true);
}

CUresult sl_cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
	struct sl_ctx *c;

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	if (flags & ~(unsigned)CU_CTX_FLAGS_MASK)
		return CUDA_ERROR_INVALID_VALUE;
	c = sl_primary[dev];
	pthread_mutex_lock(&lock);
	c->flags = flags;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

CUresult sl_cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
	struct sl_ctx *c;

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	if (!flags || !active)
		return CUDA_ERROR_INVALID_VALUE;
	c = sl_primary[dev];
	*flags = c->flags;
	*active = __atomic_load_n(&c->refs, __ATOMIC_ACQUIRE) != 0;
	return CUDA_SUCCESS;
}

/* --- the thread's stack --- */

/* h is the program's handle of c, or of one of c's green contexts. */
static void make_current(struct sl_thread *t, struct sl_ctx *c, CUcontext h)
{
	t->cur = c;
	t->cur_id = c ? atomic_load(&c->id) : 0;
	t->green = c ? sl_green_of(h, c) : NULL;
	t->green_id = t->green ? atomic_load(&t->green->id) : 0;
}

static CUcontext current(const struct sl_thread *t)
{
	if (!t->cur)
		return NULL;
	return t->green ? t->green->as_ctx : sl_handle_value(SL_CTX, t->cur_id);
}

static CUresult push(struct sl_thread *t, struct sl_ctx *c, CUcontext h)
{
	if (t->depth == t->cap) {
		unsigned cap = t->cap ? t->cap * 2 : 8;
		void *p = realloc(t->stack, cap * sizeof *t->stack);

		if (!p)
			return CUDA_ERROR_OUT_OF_MEMORY;
		t->stack = p;
		t->cap = cap;
	}
	/* The stack holds the contexts below the current one. */
	t->stack[t->depth].ctx = t->cur;
	t->stack[t->depth].id = t->cur_id;
	t->stack[t->depth].green = t->green;
	t->stack[t->depth].green_id = t->green_id;
	t->depth++;
	make_current(t, c, h);
	return CUDA_SUCCESS;
}

static void pop(struct sl_thread *t)
{
	if (t->depth) {
		t->depth--;
		t->cur = t->stack[t->depth].ctx;
		t->cur_id = t->cur ? t->stack[t->depth].id : 0;
		t->green = t->stack[t->depth].green;
		t->green_id = t->stack[t->depth].green_id;
	} else {
		make_current(t, NULL, NULL);
	}
}

CUresult sl_cuCtxPushCurrent_v2(CUcontext ctx)
{
	struct sl_ctx *c = sl_ctx_of(ctx);

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	return c ? push(sl_tls(), c, ctx) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult sl_cuCtxPopCurrent_v2(CUcontext *pctx)
{
	struct sl_thread *t = sl_tls();

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!t->cur)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (pctx)
		*pctx = current(t);
	pop(t);
	return CUDA_SUCCESS;
}

CUresult sl_cuCtxSetCurrent(CUcontext ctx)
{
	struct sl_thread *t = sl_tls();
	struct sl_ctx *c;

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!ctx) {
		pop(t);
		return CUDA_SUCCESS;
	}
	c = sl_ctx_of(ctx);
	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	make_current(t, c, ctx);
	return CUDA_SUCCESS;
}

CUresult sl_cuCtxGetCurrent(CUcontext *pctx)
{
	struct sl_thread *t = sl_tls();

	if (!pctx)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	*pctx = current(t);
	return CUDA_SUCCESS;
}

CUresult sl_cuCtxGetDevice(CUdevice *device)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (!device)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*device = c->dev;
	return err;
}

CUresult sl_cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_or_current(ctx, &c);

	if (!device)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*device = c->dev;
	return err;
}

/* --- contexts that programs make --- */

CUresult sl_cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	struct sl_thread *t = sl_tls();
	struct sl_ctx *c;
	CUresult err;
	uint32_t id;
	void *h;

	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!pctx || flags & ~(unsigned)CU_CTX_FLAGS_MASK)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_dev(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	c = sl_pool_get(&ctxs);
	id = c ? sl_handle_new(SL_CTX, NULL, &h) : 0;
	if (!id) {
		sl_pool_put(&ctxs, c);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	c->dev = dev;
	c->primary = false;
	c->flags = flags;
	c->refs = 1;
	c->api_version = 3020;
	atomic_store(&c->locals, NULL);
	ctx_reset_fields(c);
	t->no_ctx = true;
	sl_stream_new_ctx(sl_dev_session((uint32_t)sl_dev_place(dev)));
	err = fw_cuCtxCreate_v2(id, flags, dev);
	t->no_ctx = false;
	if (err) {
		sl_handle_free(SL_CTX, id);
		sl_pool_put(&ctxs, c);
		return err;
	}
	atomic_store(&c->active, true);
	atomic_store(&c->id, id);
	sl_handle_set_state(SL_CTX, h, c);
	*pctx = h;
	return push(t, c, h);
}

CUresult sl_cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *params, int n, unsigned int flags, CUdevice dev)
{
	if (n < 0 || (n && !params))
		return CUDA_ERROR_INVALID_VALUE;
	if (n)
		return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	return sl_cuCtxCreate_v2(pctx, flags, dev);
}

CUresult sl_cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *params, unsigned int flags, CUdevice dev)
{
	if (params && params->cigParams)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (params && params->numExecAffinityParams)
		return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	return sl_cuCtxCreate_v2(pctx, flags, dev);
}

CUresult sl_cuCtxDestroy_v2(CUcontext ctx)
{
	struct sl_thread *t = sl_tls();
	struct sl_ctx *c = sl_ctx_of(ctx);
	CUresult err;
	uint32_t id;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!sl_initialized())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!c || c->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	id = atomic_load(&c->id);
	if (!sl_handle_claim(SL_CTX, id))
		return CUDA_ERROR_INVALID_CONTEXT;
	drop_contents(c);
	if (t->cur == c && t->cur_id == id)
		pop(t);
	t->no_ctx = true;
	err = fw_cuCtxDestroy_v2(ctx);
	t->no_ctx = false;
	atomic_store(&c->id, 0);
	atomic_store(&c->active, false);
	sl_handle_free(SL_CTX, id);
	sl_pool_put(&ctxs, c);
	return err;
}

CUresult sl_cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
	struct sl_ctx *c;
	CUresult err = sl_ctx_peek(&c);

	if (!pctx || flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (err)
		return err;
	if (c->primary)
		return CUDA_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&lock);
	c->refs++;
	pthread_mutex_unlock(&lock);
	*pctx = sl_ctx_handle(c);
	return CUDA_SUCCESS;
}

CUresult sl_cuCtxDetach(CUcontext ctx)
{
	struct sl_ctx *c = sl_ctx_of(ctx);
	bool last;

	if (!c || c->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&lock);
	last = --c->refs == 0;
	pthread_mutex_unlock(&lock);
	return last ? sl_cuCtxDestroy_v2(ctx) : CUDA_SUCCESS;
}
