/*
 * Events. Every record gives an event a new generation, which the worker counts
 * alike. A query is answered here once the generation is known complete: because
 * the worker said so (in a reply or a requested EVENT frame), or because a later
 * wait on the stream covered it. Otherwise the shim asks once (EVENT_WATCH) and
 * then answers "not ready" here until the EVENT frame comes.
 *
 * A wait is sent in order with all calls, so the worker answers it after the work
 * submitted since the record. So an event that was waited for while newer work was
 * under way is followed: from then on each record requests its EVENT frame at once,
 * and the wait is for that frame. Where there is no newer work, waiting in order is
 * faster.
 *
 * The fields are atomics, in groups by the thread that writes them. The receiver
 * thread writes `completed` through sl_on_event, which only ever raises it. Threads
 * that record one event take turns: meanwhile `stream_seq` is RECORDING, which no
 * wait covers.
 */
#define _GNU_SOURCE
#include "event.h"
#include "attention.h"
#include "codec.h"
#include "ctx.h"
#include "errstate.h"
#include "gen.h"
#include "green.h"
#include "handles.h"
#include "ipc.h"
#include "mapped.h"
#include "print.h"
#include "route.h"
#include "send.h"
#include "session.h"
#include "stats.h"
#include "stream.h"
#include "wait.h"
#include "waits.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RECORDING UINT64_MAX

struct sl_event {
	void *link;
	uint32_t id;
	uint32_t ctx_id;
	unsigned flags;

	/* The last record: by the thread that records. */
	_Atomic uint32_t recorded;  /* its generation */
	_Atomic uint32_t stream;    /* id of its stream (0 legacy), and .. */
	_Atomic uint64_t stream_seq;/* .. the mark of that stream then; 0 unknown */
	_Atomic uint64_t calls;	    /* sl_calls then */
	_Atomic bool forward;	    /* the shim cannot count it, because of a capture: always ask */
	_Atomic bool external;	    /* for good: graphs, launches or other processes record the event too: always ask */

	/* What is known of it: by the receiver and by threads that wait. */
	_Atomic uint32_t completed; /* highest generation known complete */
	_Atomic uint32_t fetched;   /* generation after which mapped memory was fetched */
	_Atomic uint32_t sleepers;  /* threads asleep until `completed` changes */

	/* What the worker was asked: by threads that query, wait or record. */
	_Atomic uint64_t asked;	    /* sl_waited when the worker was last asked */
	_Atomic uint32_t watched;   /* generation that a query asked the worker to report; 0 none */
	_Atomic uint32_t followed;  /* generation whose EVENT frame its record requested; 0 none */
	_Atomic bool follow;	    /* each record requests an EVENT frame */
	_Atomic bool wanted;	    /* queried or waited for since its last record */
};

static struct sl_pool events = { .size = sizeof(struct sl_event) };

static void futex(_Atomic uint32_t *w, int op, uint32_t v, const struct timespec *t)
{
	syscall(SYS_futex, w, op | FUTEX_PRIVATE_FLAG, v, t, NULL, 0);
}

static void raise_completed(struct sl_event *e, uint32_t generation)
{
	uint32_t old = atomic_load_explicit(&e->completed, memory_order_relaxed);

	while ((int32_t)(generation - old) > 0 && !atomic_compare_exchange_weak(&e->completed, &old, generation))
		;
}

static void wake(struct sl_event *e)
{
	if (atomic_load(&e->sleepers))
		futex(&e->completed, FUTEX_WAKE, INT_MAX, NULL);
}

/* No EVENT frame will come for its last record: the next wait has to ask. */
static void unfollow(struct sl_event *e)
{
	atomic_store(&e->followed, 0);
	wake(e);
}

void sl_on_event(uint32_t id, uint32_t generation)
{
	struct sl_event *e = sl_handle_state_by_id(SL_EVENT, id);

	if (!e)
		return;
	raise_completed(e, generation);
	wake(e);
}

void sl_on_event_error(uint32_t id)
{
	struct sl_event *e = sl_handle_state_by_id(SL_EVENT, id);

	if (!e)
		return;
	atomic_store(&e->watched, 0);
	unfollow(e);
}

CUresult sl_event_new(CUevent *phEvent, unsigned flags, CUresult (*ask)(uint32_t id, void *arg), void *arg)
{
	struct sl_event *e;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);
	uint32_t id, generation;
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
	/* Not from 0: EVENT frames for the event that had this memory before may still come. */
	generation = atomic_load(&e->recorded) + 1;
	atomic_store(&e->recorded, generation);
	atomic_store(&e->completed, generation);
	atomic_store(&e->watched, 0);
	atomic_store(&e->stream, 0);
	atomic_store(&e->stream_seq, 0);
	atomic_store(&e->forward, false);
	atomic_store(&e->external, (flags & CU_EVENT_INTERPROCESS) != 0); /* other processes may record it */
	atomic_store(&e->fetched, 0);
	atomic_store(&e->follow, false);
	atomic_store(&e->wanted, false);
	atomic_store(&e->followed, 0);
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
	unfollow(e);
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

/* Called before the frame is sent. Returns the stream_seq to restore if it cannot be sent. */
static uint64_t recording(struct sl_event *e)
{
	const struct timespec nap = { 0, 1000 };
	uint64_t was;

	while ((was = atomic_exchange(&e->stream_seq, RECORDING)) == RECORDING)
		nanosleep(&nap, NULL);
	return was;
}

/* Called after the frame is sent: a generation is never ahead of the worker's. */
static void recorded(struct sl_event *e, CUstream s)
{
	CUresult ignored = CUDA_SUCCESS;
	struct sl_mark *m = sl_stream_mark(s, NULL);
	uint64_t seq;

	atomic_store_explicit(&e->forward, sl_capturing_any(), memory_order_relaxed);
	if (sl_capturing_any()) /* the worker does not look for an event that is being captured */
		unfollow(e);
	atomic_store_explicit(&e->stream, sl_stream_id_only(s, &ignored), memory_order_release);
	atomic_fetch_add_explicit(&e->recorded, 1, memory_order_release);
	atomic_store_explicit(&e->stream_seq, m && sl_mark_begin(m, &seq) ? seq : 0, memory_order_release);
}

void sl_event_external(CUevent h)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, h);

	if (e)
		atomic_store(&e->external, true);
}

/* The shim cannot count the event's records. */
static bool must_ask(const struct sl_event *e)
{
	return atomic_load(&e->forward) || atomic_load(&e->external);
}

/* Whether any call was made since the event was recorded. */
static bool newer(const struct sl_event *e)
{
	return sl_calls() != atomic_load_explicit(&e->calls, memory_order_relaxed);
}

/* Requests the EVENT frame of the last record, if this event is followed. */
static void follow(struct sl_event *e)
{
	uint32_t generation = atomic_load(&e->recorded);
	sl_buf b;

	/* The record before was never queried: stop following. */
	if (!atomic_exchange(&e->wanted, false))
		atomic_store(&e->follow, false);
	if (!must_ask(e) && atomic_load_explicit(&e->follow, memory_order_relaxed)) {
		sl_buf_init(&b);
		sl_route(&b, SL_EVENT, sl_handle_value(SL_EVENT, e->id));
		sl_put(&b, struct wire_event_watch, .event = e->id, .recording = generation, .stream = atomic_load(&e->stream));
		atomic_store(&e->asked, atomic_load(&sl_waited));
		atomic_store(&e->followed, generation);
		if (sl_oneway(CTL_EVENT_WATCH, &b))
			atomic_store(&e->followed, 0);
		sl_buf_free(&b);
	} else if (atomic_load(&e->followed)) {
		unfollow(e);
	}
	atomic_store_explicit(&e->calls, sl_calls(), memory_order_relaxed);
}

CUresult sl_cuEventRecord(CUevent hEvent, CUstream hStream)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, hEvent);
	CUresult err;
	uint64_t was;

	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	was = recording(e);
	err = fw_cuEventRecord(hEvent, hStream);
	if (!err) {
		recorded(e, hStream);
		follow(e);
	} else {
		atomic_store(&e->stream_seq, was);
	}
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
	uint64_t was;

	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL)
		return CUDA_ERROR_INVALID_VALUE;
	if (!flags)
		return sl_cuEventRecord(hEvent, hStream);
	was = recording(e);
	err = fw_cuEventRecordWithFlags(hEvent, hStream, flags);
	if (!err) {
		recorded(e, hStream);
		/* In a capture the record becomes a node, which records whenever the graph runs. */
		atomic_store(&e->forward, true);
		unfollow(e);
	} else {
		atomic_store(&e->stream_seq, was);
	}
	return err;
}

/* Records behind all streams of a context, or of a green one. */
static CUresult record_behind_all(CUcontext hCtx, CUgreenCtx green, CUevent hEvent)
{
	struct sl_event *e = sl_handle_state(SL_EVENT, hEvent);
	CUresult err;
	uint64_t was;

	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	was = recording(e);
	err = green ? fw_cuGreenCtxRecordEvent(green, hEvent) : fw_cuCtxRecordEvent(hCtx, hEvent);
	if (!err) {
		atomic_fetch_add(&e->recorded, 1);
		unfollow(e);
	}
	atomic_store(&e->stream_seq, err ? was : 0);
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
	if (!sl_mapped_any() || (atomic_load(&e->fetched) == generation && !must_ask(e)))
		return;
	sl_mirror_stale();
	atomic_store(&e->fetched, generation);
}

static bool is_complete(struct sl_event *e, uint32_t generation)
{
	uint64_t seq;
	struct sl_mark *m;

	if (must_ask(e))
		return false;
	if ((int32_t)(atomic_load_explicit(&e->completed, memory_order_acquire) - generation) >= 0)
		return true;
	seq = atomic_load(&e->stream_seq);
	if (!seq)
		return false;
	if (atomic_load(&e->stream)) {
		struct sl_stream *s = sl_handle_state_by_id(SL_STREAM, atomic_load(&e->stream));

		m = s ? &s->mark : NULL;
	} else {
		struct sl_ctx *c = sl_handle_state_by_id(SL_CTX, e->ctx_id);

		m = c ? &c->legacy : NULL;
	}
	/* The stream and the mark belong to one record only if no other record came in between. */
	if (!m || atomic_load_explicit(&m->synced, memory_order_acquire) < seq || atomic_load(&e->stream_seq) != seq)
		return false;
	raise_completed(e, generation);
	return true;
}

/*
 * Reports whether the last record is known complete and every earlier error has been returned to the program: an error
 * is returned before the completion of what follows it.
 */
static bool known_complete(struct sl_event *e, uint32_t generation)
{
	return is_complete(e, generation) && !sl_error_pending();
}

/*
 * The first step of a query and of a wait: finds the event and its last record. *complete: the record is known complete,
 * and the program may now read what is behind it.
 */
static CUresult resolve(CUevent hEvent, struct sl_event **event, uint32_t *generation, bool *complete)
{
	struct sl_event *e = *event = sl_handle_state(SL_EVENT, hEvent);
	CUresult err = sl_sticky();

	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (err)
		return err;
	atomic_store_explicit(&e->wanted, true, memory_order_relaxed);
	*generation = atomic_load_explicit(&e->recorded, memory_order_acquire);
	*complete = known_complete(e, *generation);
	if (*complete)
		seen_complete(e, *generation);
	return CUDA_SUCCESS;
}

/* The last step of both: the worker has answered err for the record. */
static CUresult answered(struct sl_event *e, uint32_t generation, CUresult err)
{
	if (err)
		return err;
	seen_complete(e, generation);
	if (!must_ask(e))
		raise_completed(e, generation);
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
	err = sl_wait(CTL_EVENT_WATCH, &b, NULL);
	sl_buf_free(&b);
	return err;
}

CUresult sl_cuEventQuery(CUevent hEvent)
{
	struct sl_event *e;
	uint32_t generation;
	bool complete;
	CUresult err = resolve(hEvent, &e, &generation, &complete);

	if (err || complete)
		return err;
	/* The EVENT frame may come after the reply to a wait that covers the record. */
	if (!must_ask(e) && !sl_error_pending() && atomic_load(&e->asked) == atomic_load(&sl_waited) &&
	    (atomic_load(&e->watched) == generation || atomic_load(&e->followed) == generation)) {
		err = sl_dead();
		return err ? err : CUDA_ERROR_NOT_READY;
	}
	if (newer(e))
		atomic_store_explicit(&e->follow, true, memory_order_relaxed);
	sl_error_collect();
	atomic_store(&e->asked, atomic_load(&sl_waited));
	err = watch(e, generation);
	if (err == CUDA_ERROR_NOT_READY && !must_ask(e))
		atomic_store(&e->watched, generation);
	return answered(e, generation, err);
}

/* Waits for the EVENT frame of a record. False: the caller must ask in order. */
static bool await(struct sl_event *e, uint32_t generation)
{
	const struct timespec nap = { 0, 1000000 }; /* to notice an announced turn, and the end of the session */
	int64_t since = 0, began = sl_waits_begin();
	unsigned session;
	uint32_t done;
	sl_buf b;

	sl_buf_init(&b);
	sl_route(&b, SL_EVENT, sl_handle_value(SL_EVENT, e->id));
	session = b.to ? b.to - 1u : 0;
	sl_expect(session, 1);
	while ((int32_t)((done = atomic_load(&e->completed)) - generation) < 0) {
		if (atomic_load(&e->followed) != generation || sl_dead() || sl_error_pending())
			break;
		if (sl_look(&since, NULL))
			continue;
		atomic_fetch_add(&e->sleepers, 1);
		futex(&e->completed, FUTEX_WAIT, done, &nap);
		atomic_fetch_sub(&e->sleepers, 1);
	}
	sl_expect(session, -1);
	sl_waits_end(began, false);
	return (int32_t)(done - generation) >= 0 && !sl_error_pending();
}

static CUresult synchronize(CUevent hEvent)
{
	struct sl_event *e;
	uint32_t generation;
	bool complete;
	CUresult err = resolve(hEvent, &e, &generation, &complete);

	if (err)
		return err;
	if (!complete && !must_ask(e) && newer(e) && atomic_load(&e->followed) == generation && await(e, generation)) {
		complete = true;
		seen_complete(e, generation);
	}
	if (complete) {
		sl_print_flush();
		return sl_dead();
	}
	atomic_store_explicit(&e->follow, newer(e), memory_order_relaxed);
	sl_error_collect();
	err = fw_cuEventSynchronize(hEvent);
	if (!err)
		atomic_fetch_add(&sl_waited, 1);
	return answered(e, generation, err);
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
