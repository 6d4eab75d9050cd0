/*
 * Streams. Creating and destroying one is a one-way frame; its properties never
 * leave this process. A stream knows whether work was enqueued on it since the last
 * completed wait (struct sl_mark in stream.h), so that waiting twice costs one
 * round trip. The legacy default stream waits for all blocking streams of its
 * context, so work on one of those counts as its work too.
 *
 * A wait is answered here as well where only copies to the device are pending whose bytes have left this process. One frame
 * (ARRIVED) then tells the worker that the program considers them complete, and the worker orders later work of other
 * streams behind them.
 *
 * Marks are atomics; only the owning thread advances one. The per-thread default
 * stream is a stream like others; its thread makes it on first use, and it ends
 * with the thread.
 */
#include "stream.h"
#include "background.h"
#include "codec.h"
#include "ctx.h"
#include "device.h"
#include "entry.h"
#include "errstate.h"
#include "gen.h"
#include "green.h"
#include "handles.h"
#include "hostfn.h"
#include "ipc.h"
#include "mapped.h"
#include "peer.h"
#include "route.h"
#include "send.h"
#include "session.h"

#include <stdlib.h>
#include <string.h>

static struct sl_pool streams = { .size = sizeof(struct sl_stream) };
/* Captures begun and not yet ended in this process. While there are any, the worker is asked. */
static _Atomic int capturing;

bool sl_capturing_any(void)
{
	return __builtin_expect(atomic_load_explicit(&capturing, memory_order_relaxed) > 0, 0);
}

void sl_capturing_add(int n)
{
	if (atomic_fetch_add(&capturing, n) + n < 0)
		atomic_store(&capturing, 0);
}

static inline void mark(struct sl_mark *m, uint64_t tid, bool copying)
{
	uint64_t seq;
	uint64_t owner = atomic_load_explicit(&m->owner, memory_order_relaxed);

	if (__builtin_expect(__atomic_load_n(&sl_peers[0].background.open, __ATOMIC_RELAXED), 0))
		atomic_store_explicit(&m->behind, sl_background_taken(), memory_order_relaxed);
	if (__builtin_expect(owner != tid, 0)) {
		if (owner || !atomic_compare_exchange_strong(&m->owner, &owner, tid)) {
			atomic_store_explicit(&m->shared, true, memory_order_relaxed);
			return;
		}
	}
	seq = atomic_load_explicit(&m->seq, memory_order_relaxed) + 1;
	if (!copying)
		atomic_store_explicit(&m->other, seq, memory_order_relaxed);
	atomic_store_explicit(&m->seq, seq, memory_order_relaxed);
}

/* Whether the process ever had a stream that is not ordered with the legacy default stream, or a second context. */
static _Atomic bool unordered;
/* Whether all streams of a context were ever made to wait for an event, which their marks do not show. */
static _Atomic bool ctx_waits;

_Atomic uint64_t sl_waited;

bool sl_mark_begin(struct sl_mark *m, uint64_t *seq)
{
	uint64_t owner = atomic_load_explicit(&m->owner, memory_order_relaxed);

	*seq = atomic_load_explicit(&m->seq, memory_order_relaxed);
	return !atomic_load_explicit(&m->shared, memory_order_relaxed) && owner == sl_tls()->tid;
}

void sl_mark_synced(struct sl_mark *m, uint64_t seq)
{
	if (atomic_load_explicit(&m->synced, memory_order_relaxed) < seq)
		atomic_store_explicit(&m->synced, seq, memory_order_release);
}

/* True if nothing can be running or pending: then a wait may be answered here. */
static bool idle(struct sl_mark *m)
{
	uint64_t owner = atomic_load_explicit(&m->owner, memory_order_relaxed);

	if (sl_error_pending() || sl_capturing_any() || atomic_load_explicit(&ctx_waits, memory_order_relaxed) ||
	    atomic_load_explicit(&m->shared, memory_order_relaxed))
		return false;
	return owner == sl_tls()->tid &&
	       atomic_load_explicit(&m->synced, memory_order_acquire) == atomic_load_explicit(&m->seq, memory_order_relaxed);
}

void sl_mark_reset(struct sl_mark *m)
{
	atomic_store(&m->owner, 0);
	atomic_store(&m->shared, false);
	atomic_store(&m->seq, 0);
	atomic_store(&m->other, 0);
	atomic_store(&m->behind, 0);
	atomic_store(&m->synced, 0);
}

static void init_stream(struct sl_stream *s, struct sl_ctx *c, unsigned flags, int priority)
{
	s->ctx = c;
	s->ctx_id = atomic_load(&c->id);
	s->flags = flags;
	s->priority = priority;
	s->uid = sl_next_uid();
	s->per_thread = false;
	s->green = NULL;
	sl_mark_reset(&s->mark);
}

/* The calling thread's default stream in its current context. */
static struct sl_stream *thread_stream(struct sl_thread *t, CUresult *err)
{
	struct sl_stream *s;
	struct sl_ctx *c;
	uint32_t id, epoch;
	unsigned slot = SL_THREAD_STREAMS;
	sl_buf b;
	void *h;

	if (!t->cur) {
		*err = CUDA_ERROR_INVALID_CONTEXT;
		return NULL;
	}
	epoch = atomic_load_explicit(&t->cur->epoch, memory_order_relaxed);
	for (unsigned i = 0; i < SL_THREAD_STREAMS; i++) {
		if (t->streams[i].s && t->streams[i].ctx_id == t->cur_id && t->streams[i].epoch == epoch)
			return t->streams[i].s;
		if (!t->streams[i].s && slot == SL_THREAD_STREAMS)
			slot = i;
	}
	*err = sl_ctx_use(&c);
	if (*err)
		return NULL;
	if (slot == SL_THREAD_STREAMS) {
		sl_handle_free(SL_STREAM, t->streams[0].s->id);
		slot = 0;
	}
	s = sl_pool_get(&streams);
	id = s ? sl_handle_new(SL_STREAM, s, &h) : 0;
	if (!id) {
		sl_pool_put(&streams, s);
		*err = CUDA_ERROR_OUT_OF_MEMORY;
		return NULL;
	}
	init_stream(s, c, CU_STREAM_DEFAULT, 0);
	s->id = s->at = id;
	s->per_thread = true;
	sl_buf_init(&b);
	sl_put(&b, struct wire_thread_stream, .stream = id);
	*err = sl_oneway(CTL_THREAD_STREAM, &b);
	sl_buf_free(&b);
	if (*err) {
		sl_handle_free(SL_STREAM, id);
		sl_pool_put(&streams, s);
		return NULL;
	}
	t->streams[slot].s = s;
	t->streams[slot].ctx_id = t->cur_id;
	t->streams[slot].epoch = epoch;
	return s;
}

void sl_thread_streams_drop(struct sl_thread *t)
{
	for (unsigned i = 0; i < SL_THREAD_STREAMS; i++) {
		struct sl_stream *s = t->streams[i].s;
		CUstream h;

		t->streams[i].s = NULL;
		if (!s)
			continue;
		h = sl_handle_value(SL_STREAM, s->id);
		if (sl_handle_state(SL_STREAM, h) != s || !sl_handle_claim(SL_STREAM, s->id))
			continue;
		t->no_ctx = true;
		if (!sl_exiting() && !sl_forked() && !sl_dead())
			fw_cuStreamDestroy_v2(h);
		t->no_ctx = false;
		sl_handle_free(SL_STREAM, s->id);
		sl_pool_put(&streams, s);
	}
}

/* The stream behind a handle other than the legacy one. */
static inline struct sl_stream *stream_of(CUstream h, CUresult *err)
{
	struct sl_stream *s;

	if (h == CU_STREAM_PER_THREAD && !sl_tls()->green)
		return thread_stream(sl_tls(), err);
	if ((uintptr_t)h <= 2)
		h = sl_green_stream(sl_tls());
	s = sl_handle_state(SL_STREAM, h);
	if (!s)
		*err = CUDA_ERROR_INVALID_HANDLE;
	return s;
}

/* The legacy default stream of a context that is not a green one; those have a stream of their own in its place. */
static inline bool is_legacy(CUstream h)
{
	return (uintptr_t)h <= 1 && __builtin_expect(!sl_tls()->green, 1);
}

struct sl_stream *sl_stream_of(CUstream h, CUresult *err)
{
	return is_legacy(h) ? NULL : stream_of(h, err);
}

static inline uint32_t marked(CUstream h, bool copying, CUresult *err)
{
	struct sl_thread *t = sl_tls();
	struct sl_stream *s;

	if (is_legacy(h)) {
		if (!t->cur) {
			*err = CUDA_ERROR_INVALID_CONTEXT;
			return 0;
		}
		if (!t->no_mark) {
			mark(&t->cur->legacy, t->tid, copying);
			mark(&t->cur->direct, t->tid, copying);
		}
		return 0;
	}
	s = stream_of(h, err);
	if (!s)
		return 0;
	if (!t->no_mark) {
		mark(&s->mark, t->tid, copying);
		if (!(s->flags & CU_STREAM_NON_BLOCKING))
			mark(&s->ctx->legacy, t->tid, copying);
	}
	return s->at;
}

uint32_t sl_stream_id(CUstream h, CUresult *err)
{
	return marked(h, false, err);
}

uint32_t sl_stream_id_copying(CUstream h, CUresult *err)
{
	return marked(h, true, err);
}

uint32_t sl_stream_id_only(CUstream h, CUresult *err)
{
	struct sl_stream *s;

	if (is_legacy(h)) {
		if (!sl_tls()->cur)
			*err = CUDA_ERROR_INVALID_CONTEXT;
		return 0;
	}
	s = stream_of(h, err);
	return s ? s->at : 0;
}

struct sl_mark *sl_stream_mark(CUstream h, struct sl_ctx **ctx)
{
	CUresult err = CUDA_SUCCESS;
	struct sl_stream *s;

	if (is_legacy(h)) {
		struct sl_ctx *c = sl_tls()->cur;

		if (ctx)
			*ctx = c;
		return c ? &c->legacy : NULL;
	}
	s = stream_of(h, &err);
	if (ctx)
		*ctx = s ? s->ctx : NULL;
	return s ? &s->mark : NULL;
}

/* --- copies that are taken as arrived --- */

/* The stream's copies have left this process. */
static CUresult send_arrived(CUstream h, bool later)
{
	struct sl_thread *own = sl_tls();
	CUresult err = CUDA_SUCCESS;
	uint32_t id = sl_stream_id_only(h, &err);
	bool unkept = own->unkept;
	sl_buf b;

	if (err)
		return err;
	sl_buf_init(&b);
	sl_route(&b, SL_STREAM, h);
	sl_put(&b, struct wire_arrived, .stream = id, .later = later);
	own->unkept = true; /* it stands before what the program writes to memory that kernels reach, whatever copies other threads have begun since (background.h) */
	err = sl_oneway(CTL_ARRIVED, &b);
	own->unkept = unkept;
	sl_buf_free(&b);
	return err;
}

/* True if this thread alone has used the stream, and nothing is pending but copies whose bytes have left this process. */
static bool copies_alone(struct sl_mark *m)
{
	return atomic_load_explicit(&m->owner, memory_order_relaxed) == sl_tls()->tid && !atomic_load_explicit(&m->shared, memory_order_relaxed) &&
	       atomic_load_explicit(&m->other, memory_order_relaxed) <= atomic_load_explicit(&m->synced, memory_order_acquire);
}

/*
 * True if a wait for the stream would tell nothing but that such copies have arrived. Copies in a blocking stream come after what was
 * given to the default stream, which may wait for any blocking stream; so the default stream must have nothing pending at all.
 */
static bool only_copies(CUstream h)
{
	CUresult err = CUDA_SUCCESS;
	struct sl_stream *s = sl_stream_of(h, &err);
	struct sl_mark *direct;

	if (err || sl_sessions > 1 || sl_error_pending() || sl_capturing_any() || sl_ipc_any() || atomic_load(&ctx_waits))
		return false;
	/* Work that the worker has already may wait for a word in memory that it shares, or for a host function; the copies must be there before the program sets it on. */
	if (atomic_load_explicit(&sl_mapped_reached, memory_order_relaxed) || sl_hostfns_open() || sl_hostfns_in_graphs())
		return false;
	if (!s)
		return copies_alone(&sl_tls()->cur->legacy);
	if (s->at != s->id || !copies_alone(&s->mark))
		return false;
	direct = &s->ctx->direct;
	return s->flags & CU_STREAM_NON_BLOCKING || !atomic_load(&direct->owner) || idle(direct);
}

bool sl_stream_alone(CUstream h)
{
	return is_legacy(h) && !atomic_load(&unordered);
}

CUresult sl_stream_arrived(CUstream h, bool marked)
{
	CUresult err = CUDA_SUCCESS;

	if (sl_capturing_any())
		return CUDA_SUCCESS;
	sl_background_sent(); /* the copy stands behind them */
	if (!marked && sl_stream_alone(h))
		err = send_arrived(h, true);
	/* Asked again: by now another thread may have made a stream, which the worker knew before the copy. */
	return err || sl_stream_alone(h) ? err : sl_cuStreamSynchronize(h);
}

void sl_stream_new_ctx(unsigned session)
{
	static _Atomic bool any[SL_MAX_DEVICES];

	if (atomic_exchange(&any[session], true))
		atomic_store(&unordered, true);
}

void sl_stream_ctx_waits(void)
{
	atomic_store(&ctx_waits, true);
}

/* --- life --- */

/*
 * The streams of a green context are non-blocking. One that shall be ordered with the default stream is the default
 * stream under another name.
 */
static CUresult green_create(struct sl_stream *s, struct sl_green *green)
{
	CUresult err = CUDA_SUCCESS;

	s->green = green;
	s->green_id = atomic_load(&green->id);
	if (s->flags & CU_STREAM_NON_BLOCKING)
		return fw_cuGreenCtxStreamCreate(s->id, sl_handle_value(SL_GREEN, s->green_id), s->flags, s->priority);
	s->at = sl_stream_id_only(green->stream, &err);
	return err;
}

CUresult sl_stream_create(CUstream *out, unsigned flags, int priority, struct sl_green *green)
{
	struct sl_stream *s;
	struct sl_ctx *c;
	CUresult err;
	uint32_t id;
	void *h;

	if (!out || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	err = sl_ctx_use(&c);
	if (err)
		return err;
	if (flags & CU_STREAM_NON_BLOCKING)
		atomic_store(&unordered, true);
	/* CUDA clamps priorities to the device's range. */
	if (priority < sl_dev(c->dev)->prio_greatest)
		priority = sl_dev(c->dev)->prio_greatest;
	if (priority > sl_dev(c->dev)->prio_least)
		priority = sl_dev(c->dev)->prio_least;
	s = sl_pool_get(&streams);
	if (!s)
		return CUDA_ERROR_OUT_OF_MEMORY;
	init_stream(s, c, flags, priority);
	id = sl_handle_new(SL_STREAM, NULL, &h);
	if (!id) {
		sl_pool_put(&streams, s);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	s->id = s->at = id;
	err = green ? green_create(s, green) : fw_cuStreamCreateWithPriority(id, flags, priority);
	if (err) {
		sl_handle_free(SL_STREAM, id);
		sl_pool_put(&streams, s);
		return err;
	}
	sl_handle_set_state(SL_STREAM, h, s);
	*out = h;
	return CUDA_SUCCESS;
}

CUresult sl_cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
	return sl_green_or_plain(phStream, Flags, 0);
}

CUresult sl_cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
	return sl_green_or_plain(phStream, flags, priority);
}

CUresult sl_cuStreamDestroy_v2(CUstream hStream)
{
	struct sl_stream *s = sl_handle_state(SL_STREAM, hStream);
	CUresult err;

	if (sl_exiting())
		return CUDA_ERROR_DEINITIALIZED;
	if (!s || s->per_thread || !sl_handle_claim(SL_STREAM, sl_handle_bare(hStream)))
		return CUDA_ERROR_INVALID_HANDLE;
	err = s->at == s->id ? fw_cuStreamDestroy_v2(hStream) : CUDA_SUCCESS;
	sl_handle_free(SL_STREAM, s->id);
	sl_pool_put(&streams, s);
	return err;
}

void sl_stream_forget(CUstream h)
{
	struct sl_stream *s = sl_handle_state(SL_STREAM, h);

	if (s && sl_handle_claim(SL_STREAM, s->id)) {
		sl_handle_free(SL_STREAM, s->id);
		sl_pool_put(&streams, s);
	}
}

static void drop(uint32_t id, void *state, void *arg)
{
	struct sl_stream *s = state;

	if (s && s->ctx_id == *(uint32_t *)arg && sl_handle_claim(SL_STREAM, s->id)) {
		sl_handle_free(SL_STREAM, id);
		sl_pool_put(&streams, s);
	}
}

void sl_streams_drop(uint32_t ctx_id)
{
	sl_handle_each(SL_STREAM, drop, &ctx_id);
}

/* --- properties --- */

/* Like stream_of, but the legacy stream gives NULL without an error and the current context. */
static CUresult look(CUstream h, struct sl_stream **s, struct sl_ctx **c)
{
	CUresult err = CUDA_SUCCESS;

	*s = NULL;
	if (is_legacy(h))
		return sl_ctx_peek(c);
	*s = stream_of(h, &err);
	if (*s)
		*c = (*s)->ctx;
	return err;
}

CUresult sl_cuStreamGetPriority(CUstream hStream, int *priority)
{
	struct sl_stream *s;
	struct sl_ctx *c;
	CUresult err = look(hStream, &s, &c);

	if (!priority)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*priority = s ? s->priority : 0;
	return err;
}

CUresult sl_cuStreamGetFlags(CUstream hStream, unsigned int *flags)
{
	struct sl_stream *s;
	struct sl_ctx *c;
	CUresult err = look(hStream, &s, &c);

	if (!flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*flags = s ? s->flags : CU_STREAM_DEFAULT;
	return err;
}

CUresult sl_cuStreamGetId(CUstream hStream, unsigned long long *streamId)
{
	struct sl_stream *s;
	struct sl_ctx *c;
	CUresult err = look(hStream, &s, &c);

	if (!streamId)
		return CUDA_ERROR_INVALID_VALUE;
	/* The legacy stream's id is made from its context's; those of other streams never get that large. */
	if (!err)
		*streamId = s ? s->uid : c->uid << 32;
	return err;
}

CUresult sl_cuStreamGetDevice(CUstream hStream, CUdevice *device)
{
	struct sl_stream *s;
	struct sl_ctx *c;
	CUresult err = look(hStream, &s, &c);

	if (!device)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*device = c->dev;
	return err;
}

/* The green context of a stream, NULL if it has none; an error if that has been destroyed. */
static CUresult green_of(CUstream h, struct sl_ctx **c, struct sl_green **green)
{
	struct sl_stream *s;
	CUresult err = look(h, &s, c);

	*green = NULL;
	if (err || !s || !s->green)
		return err;
	if (atomic_load(&s->green->id) != s->green_id)
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	*green = s->green;
	return CUDA_SUCCESS;
}

CUresult sl_cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
{
	struct sl_green *green;
	struct sl_ctx *c;
	CUresult err = green_of(hStream, &c, &green);

	if (!pctx)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*pctx = green ? green->as_ctx : sl_ctx_handle(c);
	return err;
}

CUresult sl_cuStreamGetCtx_v2(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx)
{
	struct sl_green *green;
	struct sl_ctx *c;
	CUresult err = green_of(hStream, &c, &green);

	if (!pCtx)
		return CUDA_ERROR_INVALID_VALUE;
	if (err)
		return err;
	*pCtx = green ? green->as_ctx : sl_ctx_handle(c);
	if (pGreenCtx)
		*pGreenCtx = green ? sl_handle_value(SL_GREEN, atomic_load(&green->id)) : NULL;
	return CUDA_SUCCESS;
}

CUresult sl_cuStreamGetGreenCtx(CUstream hStream, CUgreenCtx *phCtx)
{
	struct sl_green *green;
	struct sl_ctx *c;
	CUresult err = green_of(hStream, &c, &green);

	if (!phCtx)
		return CUDA_ERROR_INVALID_VALUE;
	if (!err)
		*phCtx = green ? sl_handle_value(SL_GREEN, atomic_load(&green->id)) : NULL;
	return err;
}

/* --- waiting --- */

/* Notes what will be known complete once a wait for h succeeds. */
void sl_cover(struct sl_covered *w, CUstream h)
{
	struct sl_ctx *c = sl_tls()->cur;

	w->m = sl_stream_mark(h, NULL);
	w->track = w->m && sl_mark_begin(w->m, &w->seq);
	w->direct = c && w->m == &c->legacy && sl_mark_begin(&c->direct, &w->direct_seq) ? &c->direct : NULL;
}

static void covered(const struct sl_covered *w)
{
	if (!w->track || sl_capturing_any())
		return;
	sl_mark_synced(w->m, w->seq);
	if (w->direct)
		sl_mark_synced(w->direct, w->direct_seq);
}

void sl_cover_done(const struct sl_covered *w)
{
	atomic_fetch_add(&sl_waited, 1);
	covered(w);
}

CUresult sl_cuStreamSynchronize(CUstream hStream)
{
	struct sl_covered w;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	sl_cover(&w, hStream);
	if (w.track && idle(w.m))
		return sl_dead();
	if (w.track && only_copies(hStream)) {
		sl_background_sent();
		err = send_arrived(hStream, false);
		if (!err)
			covered(&w);
		return err;
	}
	err = SL_UNMARKED(fw_cuStreamSynchronize(hStream));
	if (!err) {
		sl_mirror_stale();
		sl_cover_done(&w);
		err = sl_mirror_clash();
	}
	return err;
}

CUresult sl_cuStreamQuery(CUstream hStream)
{
	struct sl_covered w;
	struct sl_ctx *c;
	CUresult err = sl_ctx_use(&c);

	if (err)
		return err;
	sl_cover(&w, hStream);
	if (w.track && idle(w.m))
		return sl_dead();
	/* A question would wait for the copies that its last work stands behind. */
	if (w.m && !sl_error_pending() && !sl_capturing_any() &&
	    sl_background_unsent(atomic_load_explicit(w.m == &c->legacy ? &c->direct.behind : &w.m->behind, memory_order_relaxed))) {
		err = sl_dead();
		return err ? err : CUDA_ERROR_NOT_READY;
	}
	err = SL_UNMARKED(fw_cuStreamQuery(hStream));
	if (!err) {
		sl_mirror_stale();
		/* A query of the legacy stream does not cover the streams that it would wait for. */
		w.track &= hStream && hStream != CU_STREAM_LEGACY;
		sl_cover_done(&w);
	}
	return err;
}
