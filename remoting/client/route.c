/*
 * Which session a call belongs to, when there are several. A handle belongs to the
 * context that was current when it was made, an address to the context it was
 * allocated in, a device to its owner; libraries and their kernels are in every
 * session. A call that names things of two sessions is refused (sl_buf.mixed).
 * Copies and waiting for an event are possible all the same: they are made here in
 * steps, each in one session.
 *
 * Nothing here runs with one session. It takes no lock but those of the tables it
 * reads.
 */
#include "route.h"
#include "codec.h"
#include "copy.h"
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "gen.h"
#include "handles.h"
#include "kernel.h"
#include "mapped.h"
#include "module.h"
#include "ranges.h"
#include "session.h"
#include "stream.h"

#include <stdlib.h>

static void to(sl_buf *b, unsigned session, uint32_t ctx_id)
{
	struct sl_ctx *c;

	if (b->to && b->to != session + 1) {
		b->mixed = true;
		return;
	}
	b->to = (uint8_t)(session + 1);
	if (!b->to_ctx)
		b->to_ctx = ctx_id;
	/* The default stream of a context that is not current may get work: it is never known idle again. */
	if (ctx_id && ctx_id != sl_ctx_cur() && (c = sl_handle_state_by_id(SL_CTX, ctx_id))) {
		atomic_store_explicit(&c->legacy.shared, true, memory_order_relaxed);
		atomic_store_explicit(&c->direct.shared, true, memory_order_relaxed);
	}
}

void sl_route_slow(sl_buf *b, int kind, const void *h)
{
	struct sl_kernel *k;
	struct sl_ctx *c;
	uint32_t ctx;

	switch (kind) {
	case SL_CTX:
		c = sl_handle_state(SL_CTX, h);
		if (c)
			to(b, sl_dev_session((uint32_t)sl_dev_place(c->dev)), atomic_load(&c->id));
		return;
	case SL_LIBRARY:
		return;
	case SL_KERNEL:
		k = sl_handle_state(SL_KERNEL, h);
		if (!k || !k->owner || k->owner->library)
			return;
		to(b, sl_ctx_session(k->owner->ctx_id), k->owner->ctx_id);
		return;
	}
	ctx = sl_handle_ctx(kind, h);
	if (ctx)
		to(b, sl_ctx_session(ctx), ctx);
}

void sl_route_ptr_slow(sl_buf *b, uint64_t p)
{
	struct sl_range r;

	if (!sl_tls()->here && sl_range_find(p, &r) && r.home && r.type != SL_RANGE_HOST && r.type != SL_RANGE_REGISTERED)
		to(b, sl_ctx_session(r.home), r.home);
}

void sl_route_dev_slow(sl_buf *b, int dev)
{
	if (sl_dev(dev))
		to(b, sl_dev_session((uint32_t)sl_dev_place(dev)), 0);
}

void sl_route_current_slow(sl_buf *b)
{
	if (sl_ctx_cur())
		to(b, sl_ctx_session(sl_ctx_cur()), 0);
}

struct sl_ctx *sl_ptr_ctx_slow(uint64_t p)
{
	struct sl_range r;

	if (!sl_range_find(p, &r))
		return NULL;
	if (r.type == SL_RANGE_HOST || r.type == SL_RANGE_REGISTERED)
		return sl_mapped_ctx(p);
	if (!r.home)
		return NULL;
	return sl_handle_state_by_id(SL_CTX, r.home);
}

static unsigned session_of(const struct sl_ctx *c)
{
	return sl_dev_session((uint32_t)sl_dev_place(c->dev));
}

bool sl_ctx_foreign(const struct sl_ctx *c)
{
	uint32_t cur = sl_ctx_cur();

	return c && (!cur || sl_ctx_session(cur) != session_of(c));
}

/* --- copies between sessions: through this process, in pieces --- */

#define PIECE (4u << 20)

struct piece {
	uint64_t dev;
	void *host;
	size_t n;
};

static CUresult fetch(void *arg)
{
	struct piece *p = arg;

	return sl_cuMemcpyDtoH_v2(p->host, p->dev, p->n, NULL);
}

static CUresult store(void *arg)
{
	struct piece *p = arg;

	return sl_cuMemcpyHtoD_v2(p->dev, p->host, p->n, NULL);
}

static CUresult settle(void *arg)
{
	(void)arg;
	return sl_cuCtxSynchronize();
}

CUresult sl_copy_across(struct sl_ctx *dst_ctx, uint64_t dst, struct sl_ctx *src_ctx, uint64_t src, size_t n, CUstream s)
{
	struct piece p = { 0 };
	CUresult err = sl_capture_check(s, "a copy between devices of several owners");

	/* Work that was enqueued before the copy comes before it, and the copy is complete on return. */
	if (!err)
		err = sl_cuStreamSynchronize(s);
	if (!err)
		err = sl_ctx_with(src_ctx, settle, NULL);
	if (!err && dst_ctx != src_ctx)
		err = sl_ctx_with(dst_ctx, settle, NULL);
	if (err || !n)
		return err;
	p.host = malloc(n < PIECE ? n : PIECE);
	if (!p.host)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (size_t at = 0; at < n && !err; at += p.n) {
		p.n = n - at < PIECE ? n - at : PIECE;
		p.dev = src + at;
		err = sl_ctx_with(src_ctx, fetch, &p);
		p.dev = dst + at;
		if (!err)
			err = sl_ctx_with(dst_ctx, store, &p);
	}
	if (!err)
		err = sl_ctx_with(dst_ctx, settle, NULL);
	free(p.host);
	return err;
}

CUresult sl_copy_elsewhere(struct sl_ctx *c, CUresult (*f)(void *), void *arg, CUstream s)
{
	CUresult err = sl_capture_check(s, "a copy between devices of several owners");

	if (!err)
		err = sl_cuStreamSynchronize(s);
	if (!err)
		err = sl_ctx_with(c, f, arg);
	return err ? err : sl_ctx_with(c, settle, NULL);
}

/* --- calls that name things of two sessions --- */

CUresult sl_across_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_ctx, CUdeviceptr src, CUcontext src_ctx, size_t n, CUstream s, bool *done)
{
	struct sl_ctx *d = sl_ctx_of(dst_ctx), *f = sl_ctx_of(src_ctx);

	*done = true;
	if (!d || !f)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (session_of(d) != session_of(f) || sl_ctx_foreign(d))
		return sl_copy_across(d, dst, f, src, n, s);
	*done = false;
	return CUDA_SUCCESS;
}

/* The session of a stream: its own, or the current context's for a default stream. */
static unsigned stream_session(CUstream s)
{
	uint32_t ctx = sl_handle_ctx(SL_STREAM, s);

	if (!ctx)
		ctx = sl_ctx_cur();
	return ctx ? sl_ctx_session(ctx) : 0;
}

CUresult sl_across_cuStreamWaitEvent(CUstream s, CUevent event, unsigned flags, bool *done)
{
	uint32_t ctx = sl_handle_ctx(SL_EVENT, event);
	static uint8_t once;

	(void)flags;
	*done = ctx && sl_ctx_session(ctx) != stream_session(s);
	if (!*done)
		return CUDA_SUCCESS;
	if (sl_capturing_any())
		return sl_refuse("cuStreamWaitEvent of another owner's event in a stream capture", &once);
	/* No owner can wait for another's event: this thread waits, which is a stronger order. */
	return sl_cuEventSynchronize(event);
}
