/*
 * The way out. A frame is appended to the peer's ring under its order lock, or kept behind a copy (background.h). The sender
 * thread writes the ring to the socket; a call that waits, or whose payload is too
 * large for the ring, writes it itself instead of waiting for that thread. Locks:
 * peer.h.
 */
#include "send.h"
#include "attention.h"
#include "background.h"
#include "codec.h"
#include "ctx.h"
#include "gen.h"
#include "entry.h"
#include "forms.h"
#include "peer.h"
#include "resume.h"
#include "session.h"
#include "shmring.h"
#include "stats.h"
#include "../verbs/rdma.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define BULK_MIN (16u << 10)	/* payloads of this size and more go directly to the socket */
#define BULK_PART (256u << 10)	/* of a payload that goes through the ring */
#define LINE 64			/* bytes of the processor's cache */
#define FETCH_AHEAD 512		/* bytes: two to four frames */
#define POLL_NS 25000		/* sender's nap while calls come in */
#define POLL_ROUNDS 40		/* empty naps before it sleeps until it is woken */

bool sl_send_parts(struct sl_peer *t, struct iovec *iov, int n)
{
	while (n) {
		struct msghdr m = { .msg_iov = iov, .msg_iovlen = (size_t)n };
		ssize_t w;

		if (t->shm)
			w = sl_shm_write(t->shm, iov, n, (int)t->keepalive_ms);
		else if (t->rdma)
			w = sl_rdma_write(t->rdma, iov, n, (int)t->keepalive_ms);
		else
			w = syscall(SYS_sendmsg, t->fd, &m, MSG_NOSIGNAL); /* no cancellation point: locks are held */

		if (w < 0) {
			if (errno == EINTR)
				continue;
			return false;
		}
		__atomic_fetch_add(&sl_stats.bytes_out, (uint64_t)w, __ATOMIC_RELAXED);
		__atomic_fetch_add(&t->uploads.throughput.written, (uint64_t)w, __ATOMIC_RELAXED);
		while (n && (size_t)w >= iov->iov_len) {
			w -= (ssize_t)iov->iov_len;
			iov++;
			n--;
		}
		if (n) {
			iov->iov_base = (char *)iov->iov_base + w;
			iov->iov_len -= (size_t)w;
		}
	}
	return true;
}

static void tx(struct sl_peer *t, struct iovec *iov, int n)
{
	if (!sl_send_parts(t, iov, n))
		sl_die(CUDA_ERROR_DEVICE_UNAVAILABLE, strerror(errno));
}

/* Writes what the ring holds now. Called with drain held. */
static void drain_locked(struct sl_peer *t)
{
	if (t->again) {
		sl_resume_send(t);
		return;
	}
	for (;;) {
		uint64_t tail = t->tail, head = __atomic_load_n(&t->head, __ATOMIC_ACQUIRE);
		size_t n = (size_t)(head - tail), at = tail % SL_RING, first = SL_RING - at;
		struct iovec iov[2];

		if (!n)
			return;
		if (first > n)
			first = n;
		iov[0] = (struct iovec){ t->ring + at, first };
		iov[1] = (struct iovec){ t->ring, n - first };
		/* A session that has ended discards what is left, so that no caller waits for room. */
		if (!sl_broken())
			tx(t, iov, n > first ? 2 : 1);
		__atomic_store_n(&t->tail, head, __ATOMIC_RELEASE);
	}
}

void sl_drain(struct sl_peer *t)
{
	int64_t since = 0;

	/* Another thread holds the lock while it writes, for some microseconds: to sleep meanwhile takes longer. */
	while (pthread_mutex_trylock(&t->drain)) {
		if (sl_look(&since, NULL))
			continue;
		pthread_mutex_lock(&t->drain);
		break;
	}
	drain_locked(t);
	pthread_mutex_unlock(&t->drain);
}

static void ring_copy(struct sl_peer *t, uint64_t pos, const void *p, size_t n)
{
	size_t at = pos & (t->ring_size - 1), first = t->ring_size - at;

	if (first > n)
		first = n;
	memcpy(t->ring + at, p, first);
	memcpy(t->ring, (const char *)p + first, n - first);
}

static void make_room(struct sl_peer *t, size_t n)
{
	if (t->again)
		sl_resume_room(t, n);
	else
		sl_drain(t);
}

static void wake_sender(struct sl_peer *t)
{
	if (__builtin_expect(__atomic_load_n(&t->sender_sleeps, __ATOMIC_SEQ_CST), 0)) {
		__atomic_store_n(&t->sender_sleeps, 0, __ATOMIC_RELEASE);
		sl_futex_wake(&t->sender_sleeps);
	}
}

/* Appends bytes piece by piece; the sender thread sends one while the next is copied. Called with order held. */
static void append_part(struct sl_peer *t, const uint8_t *p, size_t n)
{
	for (size_t k; n; p += k, n -= k) {
		k = n < BULK_PART ? n : BULK_PART;
		if (t->head + k - __atomic_load_n(&t->tail, __ATOMIC_ACQUIRE) > t->ring_size)
			make_room(t, k);
		ring_copy(t, t->head, p, k);
		__atomic_store_n(&t->head, t->head + k, __ATOMIC_SEQ_CST);
		if (k == BULK_PART)
			wake_sender(t);
	}
}

/*
 * Has the processor fetch the part of the ring that the next frames will be written to. They were read by another
 * processor or, in a large ring, have left the cache, and the store of head waits for all writes before it.
 */
static void fetch_ahead(struct sl_peer *t, uint64_t head, size_t n)
{
	if (n > FETCH_AHEAD)
		n = FETCH_AHEAD;
	for (uint64_t pos = head; pos < head + n + LINE; pos += LINE)
		__asm__ volatile("prefetchw %0" : : "m"(t->ring[(pos + FETCH_AHEAD) & (t->ring_size - 1)]));
}

/* Appends one frame. Called with order held. */
static void append(struct sl_peer *t, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb)
{
	size_t n = sizeof *h + na + nb;
	uint64_t head = t->head;

	if (__builtin_expect(head + n - __atomic_load_n(&t->tail, __ATOMIC_ACQUIRE) > t->ring_size, 0))
		make_room(t, n);
	ring_copy(t, head, h, sizeof *h);
	ring_copy(t, head + sizeof *h, a, na);
	if (nb)
		ring_copy(t, head + sizeof *h + na, b, nb);
	__atomic_store_n(&t->head, head + n, __ATOMIC_SEQ_CST);
	fetch_ahead(t, head, n);
}

static CUresult send_now(struct sl_peer *t, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb)
{
	if (na + nb < BULK_MIN) {
		append(t, h, a, na, b, nb);
		return CUDA_SUCCESS;
	}
	if (t->again) {
		append_part(t, (const uint8_t *)h, sizeof *h);
		append_part(t, a, na);
		append_part(t, b, nb);
		sl_drain(t);
		return sl_dead();
	}
	pthread_mutex_lock(&t->drain);
	drain_locked(t);
	tx(t, (struct iovec[]){ { (void *)(uintptr_t)h, sizeof *h }, { (void *)(uintptr_t)a, na }, { (void *)(uintptr_t)b, nb } }, nb ? 3 : 2);
	pthread_mutex_unlock(&t->drain);
	return sl_dead();
}

/*
 * Sends a frame that is not kept. Other threads can keep theirs meanwhile: the order lock is not held while the frame is written to the
 * socket, or while there is no room for it in the ring that can be sent again.
 */
static CUresult send_apart(struct sl_peer *t, const struct wire_request *h, const sl_buf *head, const void *data, size_t n)
{
	size_t all = sizeof *h + head->n + n;

	pthread_mutex_lock(&t->order);
	if (t->again) {
		while (t->head + all - __atomic_load_n(&t->tail, __ATOMIC_ACQUIRE) > t->ring_size) {
			pthread_mutex_unlock(&t->order);
			sl_resume_room(t, all);
			pthread_mutex_lock(&t->order);
		}
		append_part(t, (const uint8_t *)h, sizeof *h);
		append_part(t, head->p, head->n);
		append_part(t, data, n);
		pthread_mutex_unlock(&t->order);
		sl_drain(t);
		return sl_dead();
	}
	pthread_mutex_lock(&t->drain);
	drain_locked(t);
	pthread_mutex_unlock(&t->order);
	tx(t, (struct iovec[]){ { (void *)(uintptr_t)h, sizeof *h }, { head->p, head->n }, { (void *)(uintptr_t)data, n } }, 3);
	pthread_mutex_unlock(&t->drain);
	return sl_dead();
}

CUresult sl_send_frame(struct sl_peer *t, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb)
{
	if (__builtin_expect(t->background.open, 0) && !sl_tls()->unkept && sl_background_keep(t, h, a, na, b, nb))
		return sl_dead();
	return send_now(t, h, a, na, b, nb);
}

void sl_send_kept(struct sl_peer *t, const uint8_t *p, size_t n)
{
	append_part(t, p, n);
	wake_sender(t);
}

static struct sl_peer *route_slow(const sl_buf *b, uint32_t *ctx)
{
	unsigned to = b->to ? b->to - 1u : *ctx ? sl_ctx_session(*ctx) : 0;
	struct sl_peer *t = &sl_peers[to];

	if (b->to && *ctx && sl_ctx_session(*ctx) != to)
		*ctx = b->to_ctx;
	if (*ctx && *ctx <= SL_MAX_DEVICES)
		*ctx -= t->first;
	return t;
}

static inline struct sl_peer *route(const sl_buf *b, uint32_t *ctx)
{
	*ctx = sl_current_ctx_id();
	return __builtin_expect(sl_sessions == 1, 1) ? &sl_peers[0] : route_slow(b, ctx);
}

struct sl_peer *sl_peer_route(const sl_buf *b, uint32_t *ctx)
{
	return route(b, ctx);
}

bool sl_worker_lacks(const sl_buf *b, uint16_t op)
{
	uint32_t ctx;
	const struct sl_peer *t = sl_peer_route(b, &ctx);

	return t->lacks && sl_forms_lack(t->lacks, op);
}

SL_HOT CUresult oneway(struct sl_peer *t, uint32_t ctx, uint16_t op, const sl_buf *head, const void *data, size_t n)
{
	struct wire_request h = { .size = (uint32_t)(head->n + n), .op = op, .ctx = ctx };
	CUresult err = sl_dead();

	if (err)
		return err;
	if (__builtin_expect(head->mixed, 0))
		return sl_refuse_with(sl_op_name(op), SL_MIXED);
	if (__builtin_expect(t->lacks != NULL, 0) && sl_forms_lack(t->lacks, op))
		return sl_refuse_with(sl_op_name(op), SL_OTHER_RELEASE);
	if (head->failed || head->n + n > SL_MAX_PAYLOAD)
		return CUDA_ERROR_OUT_OF_MEMORY;
	__atomic_fetch_add(&sl_stats.calls, 1, __ATOMIC_RELAXED);
	if (n >= BULK_MIN && sl_tls()->unkept)
		return send_apart(t, &h, head, data, n);
	pthread_mutex_lock(&t->order);
	err = sl_send_frame(t, &h, head->p, head->n, data, n);
	pthread_mutex_unlock(&t->order);
	wake_sender(t);
	return err;
}

CUresult sl_oneway_bulk(uint16_t op, const sl_buf *head, const void *data, size_t n)
{
	uint32_t ctx;
	struct sl_peer *t = route(head, &ctx);

	return oneway(t, ctx, op, head, data, n);
}

CUresult sl_oneway_copy(const struct sl_copy_in *c, uint16_t op, const sl_buf *head, const void *data, size_t n)
{
	return oneway(c->t, c->ctx, op, head, data, n);
}

bool sl_send_soon(struct sl_peer *t, uint16_t op, const void *p, uint32_t n)
{
	struct wire_request h = { .size = n, .op = op };
	bool room;

	if (pthread_mutex_trylock(&t->order))
		return false;
	if (t->background.open) {
		room = sl_background_keep_soon(t, &h, p, n);
	} else {
		room = t->head + sizeof h + n - __atomic_load_n(&t->tail, __ATOMIC_ACQUIRE) <= t->ring_size;
		if (room)
			append(t, &h, p, n, NULL, 0);
	}
	pthread_mutex_unlock(&t->order);
	wake_sender(t);
	return room;
}

CUresult sl_oneway(uint16_t op, const sl_buf *b)
{
	uint32_t ctx;
	struct sl_peer *t = route(b, &ctx);

	return oneway(t, ctx, op, b, NULL, 0);
}

static bool pending(struct sl_peer *t)
{
	if (t->again)
		return sl_resume_pending(t);
	return __atomic_load_n(&t->head, __ATOMIC_SEQ_CST) != __atomic_load_n(&t->tail, __ATOMIC_SEQ_CST);
}

void *sl_sender(void *arg)
{
	struct sl_peer *t = arg;
	const struct timespec nap = { 0, POLL_NS }, beat = { (time_t)(t->keepalive_ms / 2000 + 1), 0 };
	int idle = 0;

	prctl(PR_SET_NAME, "sluice-send");
	prctl(PR_SET_TIMERSLACK, 1UL);
	while (!sl_ended()) {
		if (pending(t)) {
			sl_drain(t);
			idle = 0;
			continue;
		}
		if (idle++ < POLL_ROUNDS) {
			nanosleep(&nap, NULL);
			continue;
		}
		__atomic_store_n(&t->sender_sleeps, 1, __ATOMIC_SEQ_CST);
		if (!pending(t))
			sl_futex_wait(&t->sender_sleeps, 1, &beat);
		if (__atomic_exchange_n(&t->sender_sleeps, 0, __ATOMIC_SEQ_CST)) {
			struct wire_request h = { .op = CTL_BEAT };

			pthread_mutex_lock(&t->order);
			append(t, &h, NULL, 0, NULL, 0);
			pthread_mutex_unlock(&t->order);
		}
		idle = 0;
	}
	return NULL;
}
