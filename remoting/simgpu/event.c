/*
 * Events. A record is an empty op in its stream, to which the event holds a
 * reference: whether that op is done, and when, is all that an event knows.
 */
#include <stdlib.h>

#include "sim.h"

#define EVENT_FLAGS (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)

API CUresult cuEventCreate(CUevent *out, unsigned int flags)
{
	struct event *e;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (!out || flags & ~(unsigned int)EVENT_FLAGS ||
	    ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	e = obj_new(K_EVENT, c, sizeof(*e));
	if (!e)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	e->flags = flags;
	*out = HANDLE(CUevent, e);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuEventDestroy_v2(CUevent h)
{
	CUresult r = sim_enter();
	struct event *e;

	if (r)
		return r;
	e = obj_get(h, K_EVENT);
	if (!e)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	event_uncapture(e);
	op_unref(e->op);
	obj_del(e);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuEventDestroy(CUevent h) { return cuEventDestroy_v2(h); }

/* Under the lock. */
CUresult event_record(struct event *e, struct stream *s)
{
	struct work w = { .kind = W_EMPTY };
	struct op *op;
	CUresult r;

	if (e->obj.ctx != s->obj.ctx)
		return CUDA_ERROR_INVALID_HANDLE;
	if (s->cap)
		return capture_record(s, e);
	r = stream_queue(s, &w, NULL, &op);
	if (r)
		return r;
	event_uncapture(e);
	op_unref(e->op);
	e->op = op;
	return CUDA_SUCCESS;
}

static CUresult record(CUevent h, CUstream st, CUstream dflt, unsigned int flags)
{
	struct event *e;
	struct stream *s;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (flags & ~1U)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	e = obj_get(h, K_EVENT);
	if (!e)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	r = stream_get(st, dflt, c, &s);
	if (r)
		return sim_leave(r);
	return sim_leave(event_record(e, s));
}

API CUresult cuEventRecord(CUevent h, CUstream s) { return record(h, s, NULL, 0); }
API CUresult cuEventRecord_ptsz(CUevent h, CUstream s) { return record(h, s, CU_STREAM_PER_THREAD, 0); }
API CUresult cuEventRecordWithFlags(CUevent h, CUstream s, unsigned int f) { return record(h, s, NULL, f); }

API CUresult cuEventRecordWithFlags_ptsz(CUevent h, CUstream s, unsigned int f)
{
	return record(h, s, CU_STREAM_PER_THREAD, f);
}

static CUresult event_enter(CUevent h, struct event **e)
{
	CUresult r = sim_enter();
	struct ctx *c;

	if (r)
		return r;
	*e = obj_get(h, K_EVENT);
	if (!*e)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	c = (*e)->obj.ctx;
	if (ctx_broken(c))
		return sim_leave(c->sticky);
	if ((*e)->cap)
		return sim_leave(CUDA_ERROR_CAPTURED_EVENT);
	return CUDA_SUCCESS;
}

API CUresult cuEventQuery(CUevent h)
{
	struct event *e;
	CUresult r = event_enter(h, &e);

	if (r)
		return r;
	r = capture_unsafe();
	if (r)
		return sim_leave(r);
	return sim_leave(e->op && !e->op->done ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

API CUresult cuEventSynchronize(CUevent h)
{
	struct event *e;
	struct ctx *c;
	CUresult r = event_enter(h, &e);

	if (r)
		return r;
	r = capture_unsafe();
	if (r)
		return sim_leave(r);
	c = e->obj.ctx;
	op_wait(e->op);
	ctx_print_flush(c);
	return sim_leave(c->sticky);
}

static CUresult elapsed(float *ms, CUevent h0, CUevent h1)
{
	struct event *a, *b;
	CUresult r = event_enter(h0, &a);

	if (r)
		return r;
	b = obj_get(h1, K_EVENT);
	if (!b || a->obj.ctx != b->obj.ctx)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	if (!ms)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (b->cap)
		return sim_leave(CUDA_ERROR_CAPTURED_EVENT);
	if (!a->op || !b->op || (a->flags | b->flags) & CU_EVENT_DISABLE_TIMING)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	if (!a->op->done || !b->op->done)
		return sim_leave(CUDA_ERROR_NOT_READY);
	*ms = (float)((double)(int64_t)(b->op->t - a->op->t) / 1e6);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b) { return elapsed(ms, a, b); }
API CUresult cuEventElapsedTime_v2(float *ms, CUevent a, CUevent b) { return elapsed(ms, a, b); }

static CUresult wait_event(CUstream st, CUstream dflt, CUevent h, unsigned int flags)
{
	struct work w = { .kind = W_EMPTY };
	struct event *e;
	struct stream *s;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	if (flags & ~1U)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	e = obj_get(h, K_EVENT);
	if (!e)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	r = stream_get(st, dflt, c, &s);
	if (r)
		return sim_leave(r);
	if (e->cap || s->cap)
		return sim_leave(capture_wait(s, e));
	if (!e->op || e->op->done)
		return sim_leave(CUDA_SUCCESS);
	return sim_leave(stream_queue(s, &w, e->op, NULL));
}

API CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned int f) { return wait_event(s, NULL, e, f); }

API CUresult cuStreamWaitEvent_ptsz(CUstream s, CUevent e, unsigned int f)
{
	return wait_event(s, CU_STREAM_PER_THREAD, e, f);
}
