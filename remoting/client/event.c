/*
 * Events. A query is answered here once the last record is known to be complete: because the worker said so, or because
 * a wait for the stream covered it. Otherwise the shim asks once (EVENT_WATCH) and then answers "not ready" here until
 * the EVENT frame comes. record.h has the states.
 *
 * The worker answers a wait after the work submitted since the record, because the wait is sent in order with all calls.
 * So an event that the program waits for while newer work is under way is followed: from then on each record requests
 * its EVENT frame at once, and the wait is for that frame. Where there is no newer work, waiting in order is faster.
 */
#define _GNU_SOURCE
#include "event.h"
#include "attention.h"
#include "background.h"
#include "codec.h"
#include "ctx.h"
#include "errstate.h"
#include "gen.h"
#include "green.h"
#include "handles.h"
#include "ipc.h"
#include "mapped.h"
#include "print.h"
#include "record.h"
#include "route.h"
#include "send.h"
#include "session.h"
#include "stats.h"
#include "stream.h"
#include "wait.h"
#include "waits.h"

struct sl_event {
	void *link;
	uint32_t id;
	uint32_t ctx_id;
	unsigned flags;
	struct sl_record record;
};

static struct sl_pool events = { .size = sizeof(struct sl_event) };

void sl_on_event(uint32_t id, uint32_t generation)
{
	struct sl_event *e = sl_handle_state_by_id(SL_EVENT, id);

	if (e)
		sl_record_complete(&e->record, generation);
}

void sl_on_event_error(uint32_t id)
{
	struct sl_event *e = sl_handle_state_by_id(SL_EVENT, id);

	if (e)
		sl_record_unwatch(&e->record);
}

CUresult sl_event_new(CUevent *phEvent, unsigned flags, CUresult (*ask)(uint32_t id, void *arg), void *arg)
{
	struct sl_event *e;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);
	uint32_t id;
	void *h;

	if (err)
		return err;
	e = sl_pool_get(&events);
	id = e ? sl_handle_new(SL_EVENT, NULL, &h) : 0;
	if (!id) {
		sl_pool_put(&events, e);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	e->id = id;
	e->ctx_id = atomic_load(&c->id);
	e->flags = flags;
	sl_record_reset(&e->record, (flags & CU_EVENT_INTERPROCESS) != 0); /* other processes may record it */
	err = ask(id, arg);
	if (err) {
		sl_handle_free(SL_EVENT, id);
		sl_pool_put(&events, e);
		return err;
	}
	sl_handle_set_state(SL_EVENT, h, e);
	*phEvent = h;
	return CUDA_SUCCESS;
}

static CUresult ask_create(uint32_t id, void *flags)
{
	return fw_cuEventCreate(id, *(unsigned *)flags);
}

CUresult sl_cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
	if (!phEvent || Flags & ~7u)
		return CUDA_ERROR_INVALID_VALUE;
	if (Flags & CU_EVENT_INTERPROCESS && !(Flags & CU_EVENT_DISABLE_TIMING))
		return CUDA_ERROR_INVALID_VALUE;
	return sl_event_new(phEvent, Flags, ask_create, &Flags);
}

/* No thread waits for it any more. */
static void put(struct sl_event *e)
{
	sl_record_unwatch(&e->record);
	sl_handle_free(SL_EVENT, e->id);
	sl_pool_put(&events, e);
}

CUresult sl_cuEventDestroy_v2(CUevent hEvent)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, hEvent);
	CUresult err;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!e || !sl_handle_claim(SL_EVENT, sl_handle_bare(hEvent)))
		return CUDA_ERROR_INVALID_HANDLE;
	err = fw_cuEventDestroy_v2(hEvent);
	put(e);
	return err;
}

static void drop(uint32_t id, void *state, void *arg)
{
	struct sl_event *e = state;

	if (e && e->ctx_id == *(uint32_t *)arg && sl_handle_claim(SL_EVENT, id))
		put(e);
}

void sl_events_drop(uint32_t ctx_id)
{
	sl_handle_each(SL_EVENT, drop, &ctx_id);
}

/* Requests the EVENT frame of a record. */
static void follow(struct sl_event *e, const struct sl_made *made)
{
	sl_buf b;

	sl_buf_init(&b);
	sl_route(&b, SL_EVENT, sl_handle_value(SL_EVENT, e->id));
	sl_put(&b, struct wire_event_watch, .event = e->id, .recording = made->generation, .stream = made->stream);
	if (sl_oneway(CTL_EVENT_WATCH, &b))
		sl_record_unwatch(&e->record);
	sl_buf_free(&b);
}

/* Counts a record in a stream, once it has been sent: a generation is never ahead of the worker's. */
static void recorded(struct sl_event *e, CUstream s, uint64_t behind, bool external)
{
	CUresult ignored = CUDA_SUCCESS;
	struct sl_mark *m = sl_stream_mark(s, NULL);
	struct sl_made made = {
		.stream = sl_stream_id_only(s, &ignored), .one_stream = true, .waited = atomic_load(&sl_waited), .behind = behind,
		/* The worker does not look for an event that is being captured. */
		.forward = external || sl_capturing_any(),
	};

	if (!m || !sl_mark_begin(m, &made.seq))
		made.seq = 0;
	if (sl_record_made(&e->record, &made))
		follow(e, &made);
}

void sl_event_external(CUevent h)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, h);

	if (e)
		sl_record_external(&e->record);
}

CUresult sl_cuEventRecord(CUevent hEvent, CUstream hStream)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, hEvent);
	uint64_t behind;
	CUresult err;

	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	sl_record_begin(&e->record);
	behind = sl_background_taken();
	err = fw_cuEventRecord(hEvent, hStream);
	if (!err)
		recorded(e, hStream, behind, false);
	sl_record_end(&e->record, !err, sl_calls());
	return err || !(e->flags & CU_EVENT_INTERPROCESS) ? err : sl_ipc_fence();
}

CUresult sl_cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, hEvent);
	CUresult err;

	if (__builtin_expect(sl_sessions > 1, 0)) {
		bool done;

		err = sl_across_cuStreamWaitEvent(hStream, hEvent, Flags, &done);
		if (done || err)
			return err;
	}
	err = fw_cuStreamWaitEvent(hStream, hEvent, Flags);
	return err || !e || !(e->flags & CU_EVENT_INTERPROCESS) ? err : sl_ipc_fence();
}

CUresult sl_cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, hEvent);
	CUresult err;

	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL)
		return CUDA_ERROR_INVALID_VALUE;
	if (!flags)
		return sl_cuEventRecord(hEvent, hStream);
	sl_record_begin(&e->record);
	err = fw_cuEventRecordWithFlags(hEvent, hStream, flags);
	if (!err) /* in a capture the record becomes a node, which records whenever the graph runs */
		recorded(e, hStream, 0, true);
	sl_record_end(&e->record, !err, sl_calls());
	return err;
}

/* Records behind all streams of a context, or of a green one. */
static CUresult record_behind_all(CUcontext hCtx, CUgreenCtx green, CUevent hEvent)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, hEvent);
	struct sl_made made = { .forward = sl_capturing_any() };
	CUresult err;

	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	sl_record_begin(&e->record);
	made.behind = sl_background_taken();
	err = green ? fw_cuGreenCtxRecordEvent(green, hEvent) : fw_cuCtxRecordEvent(hCtx, hEvent);
	if (!err)
		sl_record_made(&e->record, &made);
	sl_record_end(&e->record, !err, sl_calls());
	return err;
}

CUresult sl_cuCtxRecordEvent(CUcontext hCtx, CUevent hEvent)
{
	return record_behind_all(hCtx, sl_green_handle(hCtx), hEvent);
}

CUresult sl_cuGreenCtxRecordEvent(CUgreenCtx hCtx, CUevent hEvent)
{
	return hCtx ? record_behind_all(NULL, hCtx, hEvent) : CUDA_ERROR_INVALID_CONTEXT;
}

/* The program is about to learn that a record is complete, and may then read mapped memory. */
static void seen_complete(struct sl_event *e, uint32_t generation)
{
	if (!sl_mapped_any() || sl_record_fetched(&e->record, generation))
		return;
	sl_mirror_stale();
	sl_record_fetch(&e->record, generation);
}

/* Whether a wait for its stream has covered a record. */
static bool covered(const struct sl_event *e, const struct sl_recorded *last)
{
	struct sl_mark *m;

	if (last->ask || !last->seq)
		return false;
	if (last->stream) {
		struct sl_stream *s = sl_handle_state_by_id(SL_STREAM, last->stream);

		m = s ? &s->mark : NULL;
	} else {
		struct sl_ctx *c = sl_handle_state_by_id(SL_CTX, e->ctx_id);

		m = c ? &c->legacy : NULL;
	}
	return m && atomic_load_explicit(&m->synced, memory_order_acquire) >= last->seq;
}

/*
 * The first step of a query and of a wait: finds the event and its last record. With last->complete the record is known to
 * be complete, and the program may now read what is behind it. An error that is pending is returned to the program
 * before the completion of what follows it.
 */
static CUresult resolve(CUevent hEvent, struct sl_event **event, struct sl_recorded *last)
{
	struct sl_event *e = *event = sl_handle_state(SL_EVENT, hEvent);
	CUresult err = sl_sticky();

	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (err)
		return err;
	*last = sl_record_look(&e->record, atomic_load(&sl_waited), sl_calls());
	if (!last->complete && covered(e, last)) {
		sl_record_complete(&e->record, last->generation);
		last->complete = true;
	}
	last->complete = last->complete && !sl_error_pending();
	if (last->complete)
		seen_complete(e, last->generation);
	return CUDA_SUCCESS;
}

/* The last step of both: the worker has answered err for the record. */
static CUresult answered(struct sl_event *e, uint32_t generation, CUresult err)
{
	if (err)
		return err;
	seen_complete(e, generation);
	sl_record_answered(&e->record, generation);
	return CUDA_SUCCESS;
}

/* Asks the worker, which promises an EVENT frame if the answer is "not ready". */
static CUresult watch(struct sl_event *e, uint32_t generation)
{
	CUresult err;
	sl_buf b;

	sl_buf_init(&b);
	sl_route(&b, SL_EVENT, sl_handle_value(SL_EVENT, e->id));
	sl_put(&b, struct wire_event_watch, .event = e->id, .recording = generation);
	sl_record_ask(&e->record, generation, atomic_load(&sl_waited));
	err = sl_wait(CTL_EVENT_WATCH, &b, NULL);
	if (err && err != CUDA_ERROR_NOT_READY)
		sl_record_unwatch(&e->record);
	sl_buf_free(&b);
	return err;
}

CUresult sl_cuEventQuery(CUevent hEvent)
{
	struct sl_event *e;
	struct sl_recorded last;
	CUresult err = resolve(hEvent, &e, &last);

	if (err || last.complete)
		return err;
	/* The EVENT frame may come after the reply to a wait that covers the record. A question would wait for the copies that the record stands behind. */
	if ((last.reported || sl_background_unsent(last.behind)) && !sl_error_pending()) {
		err = sl_dead();
		return err ? err : CUDA_ERROR_NOT_READY;
	}
	if (last.newer)
		sl_record_follow(&e->record, true);
	sl_error_collect();
	return answered(e, last.generation, watch(e, last.generation));
}

/* Waits for the EVENT frame of a record. False: the caller must ask in order. */
static bool await(struct sl_event *e, uint32_t generation)
{
	int64_t since = 0, began = sl_waits_begin();
	unsigned session;
	uint32_t seen;
	bool done;
	sl_buf b;

	sl_buf_init(&b);
	sl_route(&b, SL_EVENT, sl_handle_value(SL_EVENT, e->id));
	session = b.to ? b.to - 1u : 0;
	sl_expect(session, 1);
	while (!(done = sl_record_done(&e->record, generation, &seen))) {
		if (!sl_record_followed(&e->record, generation) || sl_dead() || sl_error_pending())
			break;
		if (!sl_look(&since, NULL))
			sl_record_sleep(&e->record, seen);
	}
	sl_expect(session, -1);
	sl_waits_end(began, false);
	return done && !sl_error_pending();
}

static CUresult synchronize(CUevent hEvent)
{
	struct sl_event *e;
	struct sl_recorded last;
	CUresult err = resolve(hEvent, &e, &last);

	if (err)
		return err;
	if (!last.complete && last.followed && last.newer && await(e, last.generation)) {
		last.complete = true;
		seen_complete(e, last.generation);
	}
	if (last.complete) {
		sl_print_flush();
		return sl_dead();
	}
	sl_record_follow(&e->record, last.newer);
	sl_error_collect();
	err = fw_cuEventSynchronize(hEvent);
	if (!err)
		atomic_fetch_add(&sl_waited, 1);
	return answered(e, last.generation, err);
}

CUresult sl_cuEventSynchronize(CUevent hEvent)
{
	CUresult err = synchronize(hEvent);

	return err ? err : sl_mirror_clash();
}

CUresult sl_cuEventElapsedTime_v2(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
	struct sl_event *a = sl_handle_state(SL_EVENT, hStart), *b = sl_handle_state(SL_EVENT, hEnd);

	if (!pMilliseconds)
		return CUDA_ERROR_INVALID_VALUE;
	if (!a || !b || (a->flags | b->flags) & CU_EVENT_DISABLE_TIMING)
		return CUDA_ERROR_INVALID_HANDLE;
	return fw_cuEventElapsedTime_v2(pMilliseconds, hStart, hEnd);
}
