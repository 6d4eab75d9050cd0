/*
 * Calls that wait for their reply. The caller adds itself to the peer's table of waiting
 * calls, sends its frame, drains the ring, and sleeps until the receiver has stored the
 * reply. Locks: peer.h.
 */
#include "wait.h"
#include "ctx.h"
#include "attention.h"
#include "codec.h"
#include "entry.h"
#include "forms.h"
#include "log.h"
#include "peer.h"
#include "print.h"
#include "session.h"
#include "stats.h"
#include "waits.h"

/* Checks a call before it is sent, and makes its reply one without payload. */
static CUresult prepare(const struct sl_peer *t, uint16_t op, const sl_buf *b, sl_reply *r)
{
	CUresult err = sl_dead();

	r->data = r->inl;
	r->n = r->off = 0;
	r->bad = false;
	r->result = err;
	if (err)
		return err;
	if (__builtin_expect(b->mixed, 0))
		return r->result = sl_refuse_with(sl_op_name(op), SL_MIXED);
	if (__builtin_expect(t->lacks != NULL, 0) && sl_forms_lack(t->lacks, op))
		return r->result = sl_refuse_with(sl_op_name(op), SL_OTHER_RELEASE);
	if (b->failed)
		return r->result = CUDA_ERROR_OUT_OF_MEMORY;
	r->session = t->index;
	__atomic_fetch_add(&sl_stats.calls, 1, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

/* Sends a call whose reply is w's; waits: a thread does nothing else until it has come. */
static void ask(struct sl_peer *t, struct wire_request *h, const sl_buf *b, struct sl_waiter *w, bool waits)
{
	pthread_mutex_lock(&t->order);
	if (!++t->call)
		t->call = 1;
	h->call = w->call = t->call;
	pthread_mutex_lock(&t->wait_lock);
	w->next = t->waiting[w->call % SL_WAIT_BUCKETS];
	t->waiting[w->call % SL_WAIT_BUCKETS] = w;
	if (waits)
		sl_waiters_add(&t->waiters, 1);
	/* If the receiver has ended before this, it has woken its list already. */
	if (sl_ended()) {
		t->waiting[w->call % SL_WAIT_BUCKETS] = w->next;
		w->done = 1;
		w->r->result = sl_dead();
	}
	pthread_mutex_unlock(&t->wait_lock);
	if (!w->done)
		sl_send_frame(t, h, b->p, b->n, NULL, 0);
	pthread_mutex_unlock(&t->order);
	if (!__atomic_load_n(&w->done, __ATOMIC_ACQUIRE))
		sl_drain(t);
}

CUresult sl_ask(uint16_t op, const sl_buf *b, struct sl_question *q)
{
	struct wire_request h = { .size = (uint32_t)b->n, .op = op, .flags = SL_FLAG_WAIT };
	struct sl_peer *t = sl_peer_route(b, &h.ctx);
	CUresult err = prepare(t, op, b, &q->reply);

	if (err)
		return err;
	q->w = (struct sl_waiter){ .r = &q->reply };
	sl_log(SL_DEBUG, "ask %s", sl_op_name(op));
	ask(t, &h, b, &q->w, false);
	return CUDA_SUCCESS;
}

bool sl_has_answer(const struct sl_question *q)
{
	return __atomic_load_n(&q->w.done, __ATOMIC_ACQUIRE);
}

CUresult sl_wait(uint16_t op, const sl_buf *b, sl_reply *r)
{
	struct wire_request h = { .size = (uint32_t)b->n, .op = op, .flags = SL_FLAG_WAIT };
	struct sl_peer *t = sl_peer_route(b, &h.ctx);
	sl_reply own;
	struct sl_waiter w = { .r = r ? r : &own };
	CUresult err = prepare(t, op, b, w.r);
	int64_t since = 0, began;
	unsigned slot = sl_op_slot(op);

	if (err)
		return err;
	__atomic_fetch_add(&sl_stats.waits, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&sl_stats.waits_by_op[slot], 1, __ATOMIC_RELAXED);
	sl_log(SL_DEBUG, "wait %s", sl_op_name(op));
	began = sl_waits_begin();
	ask(t, &h, b, &w, true);
	for (int i = 0; i < 100 && !__atomic_load_n(&w.done, __ATOMIC_ACQUIRE); i++)
		__builtin_ia32_pause();
	while (!__atomic_load_n(&w.done, __ATOMIC_ACQUIRE))
		if (!sl_look(&since, NULL))
			sl_futex_wait(&w.done, 0, NULL);
	sl_waiters_add(&t->waiters, -1);
	sl_waits_end(began, true);
	if (!sl_tls()->no_print)
		sl_print_flush();
	if (w.r->result == CUDA_ERROR_INVALID_CONTEXT && !h.ctx)
		w.r->result = sl_ctx_missing();
	err = w.r->result;
	if (!r)
		sl_reply_free(&own);
	return err;
}

void sl_expect(unsigned session, int threads)
{
	sl_waiters_add(&sl_peers[session].waiters, threads);
}

struct sl_waiter *sl_waiter_take(struct sl_peer *t, uint32_t call)
{
	struct sl_waiter **p, *w;

	pthread_mutex_lock(&t->wait_lock);
	for (p = &t->waiting[call % SL_WAIT_BUCKETS]; (w = *p) && w->call != call; p = &w->next)
		;
	if (w)
		*p = w->next;
	pthread_mutex_unlock(&t->wait_lock);
	return w;
}

sl_reply *sl_waiter_reply(struct sl_waiter *w)
{
	return w->r;
}

void sl_waiter_wake(struct sl_waiter *w)
{
	/* w lies on its caller's stack and may be gone once done is set: only its address is used after that. */
	uint32_t *done = &w->done;

	__atomic_store_n(done, 1, __ATOMIC_RELEASE);
	sl_futex_wake(done);
}

void sl_waiters_attend(struct sl_peer *t, uint32_t us)
{
	if (!sl_attend(&t->attend_again, us))
		return;
	pthread_mutex_lock(&t->wait_lock);
	for (int i = 0; i < SL_WAIT_BUCKETS; i++)
		for (struct sl_waiter *w = t->waiting[i]; w; w = w->next)
			sl_futex_wake(&w->done);
	pthread_mutex_unlock(&t->wait_lock);
}

void sl_waiters_end(struct sl_peer *t)
{
	pthread_mutex_lock(&t->wait_lock);
	for (int i = 0; i < SL_WAIT_BUCKETS; i++)
		while (t->waiting[i]) {
			struct sl_waiter *w = t->waiting[i];

			t->waiting[i] = w->next;
			w->r->result = sl_dead();
			sl_waiter_wake(w);
		}
	pthread_mutex_unlock(&t->wait_lock);
}
