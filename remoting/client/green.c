/*
 * Green contexts. The worker has them and their streams. A thread that makes one current has its primary context current, with
 * the green context's default stream in the place of the primary context's (stream.c). So memory, modules and events that the
 * program makes then are the primary context's, as natively, and outlive the green context.
 *
 * A green context as a CUcontext is a handle of its own whose state is the primary context. Structs come from a pool
 * that never returns memory; a struct whose id has changed is another's. Nothing here locks.
 */
#include "green.h"
#include "ctx.h"
#include "device.h"
#include "gen.h"
#include "handles.h"
#include "session.h"
#include "stream.h"

static struct sl_pool greens = { .size = sizeof(struct sl_green) };
/* How many there are: a program without any pays one load. */
static _Atomic uint32_t count;

struct search {
	CUcontext h;
	struct sl_green *found;
};

static void compare(uint32_t id, void *state, void *arg)
{
	struct search *s = arg;
	struct sl_green *g = state;

	(void)id;
	if (g && g->as_ctx == s->h)
		s->found = g;
}

struct sl_green *sl_green_of(CUcontext h, const struct sl_ctx *c)
{
	struct search s = { .h = h };

	if (!atomic_load_explicit(&count, memory_order_relaxed) || sl_handle_bare(h) == atomic_load(&c->id))
		return NULL;
	sl_handle_each(SL_GREEN, compare, &s);
	return s.found;
}

struct sl_green *sl_green_or_current(CUcontext h, const struct sl_ctx *c)
{
	return h ? sl_green_of(h, c) : sl_tls()->green;
}

CUgreenCtx sl_green_handle(CUcontext h)
{
	struct sl_ctx *c = sl_ctx_of(h);
	struct sl_green *g = c ? sl_green_of(h, c) : NULL;

	return g ? sl_handle_value(SL_GREEN, atomic_load(&g->id)) : NULL;
}

CUstream sl_green_stream(const struct sl_thread *t)
{
	/* A handle that is none makes the caller answer as for a stream that was destroyed. */
	return atomic_load(&t->green->id) == t->green_id ? t->green->stream : sl_handle_value(SL_STREAM, 0);
}

CUresult sl_green_or_plain(CUstream *out, unsigned flags, int priority)
{
	struct sl_thread *t = sl_tls();

	if (t->green && atomic_load(&t->green->id) != t->green_id)
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	return sl_stream_create(out, flags, priority, t->green);
}

/* --- life --- */

struct make {
	struct sl_green *g;
	CUdevResourceDesc desc;
	CUdevice dev;
	unsigned flags;
	uint32_t id;
	void *h;
};

/* With the primary context current. */
static CUresult make(void *arg)
{
	struct make *m = arg;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);
	uint32_t id;
	void *h;

	if (!err)
		err = fw_cuGreenCtxCreate(m->id, m->desc, m->dev, m->flags);
	if (err)
		return err;
	m->g->ctx = c;
	m->g->uid = sl_next_uid();
	m->g->as_ctx = NULL;
	atomic_store(&m->g->id, m->id);
	id = sl_handle_new(SL_CTX, c, &h);
	err = id ? sl_stream_create(&m->g->stream, CU_STREAM_NON_BLOCKING, 0, m->g) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		sl_handle_free(SL_CTX, id);
		fw_cuGreenCtxDestroy(m->h);
		atomic_store(&m->g->id, 0);
		return err;
	}
	sl_handle_set_wire(SL_CTX, id, 1u + (uint32_t)sl_dev_wire(m->dev));
	m->g->as_ctx = h;
	return CUDA_SUCCESS;
}

CUresult sl_cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
	struct make m = { .desc = desc, .dev = dev, .flags = flags };
	CUcontext primary;
	CUresult err;

	if (!phCtx || !desc || flags != CU_GREEN_CTX_DEFAULT_STREAM)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_cuDevicePrimaryCtxRetain(&primary, dev);
	if (err)
		return err;
	m.g = sl_pool_get(&greens);
	m.id = m.g ? sl_handle_new(SL_GREEN, NULL, &m.h) : 0;
	err = m.id ? sl_ctx_with(sl_primary[dev], make, &m) : CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		sl_handle_free(SL_GREEN, m.id);
		sl_pool_put(&greens, m.g);
		sl_cuDevicePrimaryCtxRelease_v2(dev);
		return err;
	}
	atomic_fetch_add(&count, 1);
	sl_handle_set_state(SL_GREEN, m.h, m.g);
	*phCtx = m.h;
	return CUDA_SUCCESS;
}

/* Forgets a green context that the caller has claimed. Streams of it stay until they are destroyed. */
static void forget(struct sl_green *g)
{
	uint32_t id = atomic_exchange(&g->id, 0);

	sl_stream_forget(g->stream);
	sl_handle_free(SL_CTX, sl_handle_bare(g->as_ctx));
	sl_handle_free(SL_GREEN, id);
	sl_pool_put(&greens, g);
	atomic_fetch_sub(&count, 1);
}

static CUresult destroy(void *arg)
{
	return fw_cuGreenCtxDestroy(arg);
}

CUresult sl_cuGreenCtxDestroy(CUgreenCtx hCtx)
{
	struct sl_green *g = sl_handle_state(SL_GREEN, hCtx);
	CUresult err;
	int dev;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!g || !sl_handle_claim(SL_GREEN, sl_handle_bare(hCtx)))
		return CUDA_ERROR_INVALID_CONTEXT;
	dev = g->ctx->dev;
	err = sl_ctx_with(g->ctx, destroy, hCtx);
	forget(g);
	sl_cuDevicePrimaryCtxRelease_v2(dev);
	return err;
}

static void drop(uint32_t id, void *state, void *arg)
{
	struct sl_green *g = state;

	if (g && g->ctx == arg && sl_handle_claim(SL_GREEN, id))
		forget(g);
}

void sl_greens_drop(struct sl_ctx *c)
{
	if (atomic_load(&count))
		sl_handle_each(SL_GREEN, drop, c);
}

/* --- the calls --- */

CUresult sl_cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx)
{
	struct sl_green *g = sl_handle_state(SL_GREEN, hCtx);

	if (!pContext)
		return CUDA_ERROR_INVALID_VALUE;
	if (!g)
		return CUDA_ERROR_INVALID_CONTEXT;
	*pContext = g->as_ctx;
	return CUDA_SUCCESS;
}

CUresult sl_cuGreenCtxGetId(CUgreenCtx hCtx, unsigned long long *greenCtxId)
{
	struct sl_green *g = sl_handle_state(SL_GREEN, hCtx);

	if (!greenCtxId)
		return CUDA_ERROR_INVALID_VALUE;
	if (!g)
		return CUDA_ERROR_INVALID_CONTEXT;
	*greenCtxId = g->uid;
	return CUDA_SUCCESS;
}

struct create_stream {
	CUstream *out;
	struct sl_green *g;
	unsigned flags;
	int priority;
};

static CUresult create_stream(void *arg)
{
	struct create_stream *a = arg;

	return sl_stream_create(a->out, a->flags, a->priority, a->g);
}

CUresult sl_cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx hCtx, unsigned int flags, int priority)
{
	struct sl_green *g = sl_handle_state(SL_GREEN, hCtx);

	if (!phStream || flags != CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	if (!g)
		return CUDA_ERROR_INVALID_CONTEXT;
	return sl_ctx_with(g->ctx, create_stream, &(struct create_stream){ phStream, g, flags, priority });
}

CUresult sl_cuCtxWaitEvent(CUcontext hCtx, CUevent hEvent)
{
	CUgreenCtx green = sl_green_handle(hCtx);

	sl_stream_ctx_waits();
	return green ? fw_cuGreenCtxWaitEvent(green, hEvent) : fw_cuCtxWaitEvent(hCtx, hEvent);
}

CUresult sl_cuGreenCtxWaitEvent(CUgreenCtx hCtx, CUevent hEvent)
{
	sl_stream_ctx_waits();
	return fw_cuGreenCtxWaitEvent(hCtx, hEvent);
}

/* --- resources --- */

CUresult sl_cuCtxGetDevResource(CUcontext hCtx, CUdevResource *resource, CUdevResourceType type)
{
	struct sl_ctx *c = sl_ctx_of(hCtx);
	struct sl_green *g;

	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!resource)
		return CUDA_ERROR_INVALID_VALUE;
	g = sl_green_of(hCtx, c);
	return g ? fw_cuGreenCtxGetDevResource(sl_handle_value(SL_GREEN, atomic_load(&g->id)), resource, type) :
		   fw_cuDeviceGetDevResource(c->dev, resource, type);
}

/* Asks for the groups one by one: a round trip for each. */
CUresult sl_cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *nbGroups, const CUdevResource *input, CUdevResource *remaining,
					unsigned int useFlags, unsigned int minCount)
{
	unsigned int want, made = 0;
	CUresult err;

	if (!nbGroups || !input)
		return CUDA_ERROR_INVALID_VALUE;
	want = *nbGroups;
	err = fw_cuDevSmResourceSplitByCount(&made, result, remaining, input, want, result ? 0 : ~0u, useFlags, minCount);
	for (unsigned int i = 1; result && i < made && !err; i++)
		err = fw_cuDevSmResourceSplitByCount(&made, &result[i], NULL, input, want, i, useFlags, minCount);
	if (!err)
		*nbGroups = made;
	return err;
}
