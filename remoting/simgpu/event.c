/*
 * Events. A record is an empty op in its stream, to which the event holds a
 * reference: whether that op is done, and when, is all that an event knows.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

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
	if (flags & CU_EVENT_INTERPROCESS) {
		e->share = state_share_new(0) + 1;
		if (!e->share) {
			obj_del(e);
			return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
		}
	}
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
	if (e->share)
		state_share_drop(e->share - 1, false);
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
	if (e->share) {
		w.kind = W_SIGNAL;
		w.val.addr = (uintptr_t)&state_share(e->share - 1)->completed;
		w.val.value = state_share_record(e->share - 1);
	}
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

/* The record of an interprocess event that is not complete yet, by whichever process; 0 if there is none. */
static uint64_t shared_pending(const struct event *e)
{
	const struct sim_share *s = state_share(e->share - 1);
	uint64_t n = atomic_load(&s->recorded);

	return atomic_load(&s->completed) < n ? n : 0;
}

/* Waits for an event that another process may have recorded. Called under the lock, which it leaves. */
static CUresult shared_wait(const struct event *e)
{
	const struct sim_share *s = state_share(e->share - 1);
	const struct timespec nap = { 0, 50000 };
	struct ctx *c = e->obj.ctx;
	uint64_t n = shared_pending(e);

	while (atomic_load(&s->completed) < n && !c->dying) {
		pthread_mutex_unlock(&sim.lock);
		nanosleep(&nap, NULL);
		pthread_mutex_lock(&sim.lock);
	}
	ctx_print_flush(c);
	return sim_leave(c->sticky);
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
	if (e->share)
		return sim_leave(shared_pending(e) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
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
	if (e->share)
		return shared_wait(e);
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
	if (e->share) {
		w.val.value = shared_pending(e);
		if (!w.val.value)
			return sim_leave(CUDA_SUCCESS);
		w.kind = W_WAIT;
		w.val.addr = (uintptr_t)&state_share(e->share - 1)->completed;
		w.val.flags = CU_STREAM_WAIT_VALUE_GEQ;
		w.val.wide = true;
		return sim_leave(stream_queue(s, &w, NULL, NULL));
	}
	if (!e->op || e->op->done)
		return sim_leave(CUDA_SUCCESS);
	return sim_leave(stream_queue(s, &w, e->op, NULL));
}

API CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned int f) { return wait_event(s, NULL, e, f); }

API CUresult cuStreamWaitEvent_ptsz(CUstream s, CUevent e, unsigned int f)
{
	return wait_event(s, CU_STREAM_PER_THREAD, e, f);
}
