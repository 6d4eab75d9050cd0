/*
 * The session's transport; session.h says what flows where.
 *
 * Locks, in the order they are taken: order (who may append to the ring; gives
 * all calls of all threads one order), then drain (who may write to the
 * socket). The ring's head is written under order and its tail under drain;
 * both are read by either. The waiters have a lock that is held for a few
 * instructions only. The receiver thread alone reads the socket, and it
 * alone wakes waiting callers: whoever finds the session broken shuts the
 * socket down, which ends the receiver, which wakes everybody.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "gen.h"
#include "attention.h"
#include "conf.h"
#include "connect.h"
#include "delivery.h"
#include "errstate.h"
#include "shmring.h"
#include "version.h"

#define RING (1u << 20)
#define BULK_MIN (16u << 10)	/* payloads from here on go straight to the socket */
#define RXBUF (64u << 10)
#define POLL_NS 25000		/* sender's nap while calls come in */
#define CONNECT_MS 10000
#define POLL_ROUNDS 40		/* empty naps before it sleeps in earnest */

enum { ST_NEW, ST_LIVE, ST_DEAD, ST_EXITING };

struct waiter {
	struct waiter *next;
	uint32_t call;
	uint32_t done;	/* futex */
	sl_reply *r;
};

#define WAIT_BUCKETS 64

/* The connection to one owner's worker. */
struct sl_peer {
	int fd;
	unsigned index;
	uint32_t keepalive_ms;
	uint32_t first;	/* its first device among all */
	struct sl_shm *shm;	/* NULL: the socket carries the frames */

	pthread_mutex_t order, drain;
	uint8_t *ring;
	uint64_t head, tail;
	uint32_t sender_sleeps;	/* futex */
	uint32_t call;

	pthread_mutex_t wait_lock;
	struct waiter *waiting[WAIT_BUCKETS];
	uint32_t owed;	/* how many */
	int64_t attend_again;	/* the receiver's */

	uint8_t *rx;
	size_t rx_at, rx_n;
	uint64_t bytes_in;
};

/* What all of them share: the process lives and dies with every one. */
static struct {
	pthread_mutex_t start_lock;
	int state;	/* ST_* */
	CUresult error;	/* what calls return when not live */
	pid_t pid;
	struct sl_snapshot snap; /* the devices of all owners, one list */

	uint64_t calls, waits, bytes_out;
	uint32_t *waits_by_op;	/* SL_NOPS table rows, then the control operations */
} S = {
	.start_lock = PTHREAD_MUTEX_INITIALIZER,
};

static struct sl_peer peers[SL_MAX_OWNERS];
unsigned sl_sessions = 1;	/* set before the first call, then constant */
static uint8_t peer_of[SL_MAX_DEVICES];	/* by a device's place in the list */

static uint32_t not_live;
uint32_t *sl_live = &not_live;

/* ---- small things ---- */

static void futex_wait(uint32_t *w, uint32_t v, const struct timespec *t)
{
	syscall(SYS_futex, w, FUTEX_WAIT_PRIVATE, v, t, NULL, 0);
}

static void futex_wake(uint32_t *w)
{
	syscall(SYS_futex, w, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

bool sl_tracing;

const char sl_log_prefix[] = "sluice: ";
const int sl_log_default = SL_ERROR;

CUresult sl_traced(const char *function, CUresult result)
{
	sl_log(SL_TRACE, "%s = %d", function, result);
	return result;
}

CUresult sl_refuse(const char *function, uint8_t *once)
{
	if (!__atomic_exchange_n(once, 1, __ATOMIC_RELAXED))
		sl_log(SL_WARN, "%s is not supported; see docs/coverage.md", function);
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- life and death ---- */

bool sl_forked(void)
{
	return S.pid && S.state != ST_NEW && getpid() != S.pid;
}

bool sl_exiting(void)
{
	return __atomic_load_n(&S.state, __ATOMIC_ACQUIRE) == ST_EXITING;
}

CUresult sl_dead(void)
{
	int st = __atomic_load_n(&S.state, __ATOMIC_ACQUIRE);

	if (st == ST_LIVE)
		return sl_sticky();
	return st == ST_NEW ? CUDA_ERROR_NOT_INITIALIZED : S.error;
}

uint64_t sl_calls(void)
{
	return __atomic_load_n(&S.calls, __ATOMIC_RELAXED);
}

bool sl_ended(void)
{
	return __atomic_load_n(&S.state, __ATOMIC_ACQUIRE) != ST_LIVE;
}

CUresult sl_gate_slow(void)
{
	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	return sl_dead();
}

const struct sl_snapshot *sl_snapshot(void)
{
	return S.state == ST_NEW ? NULL : &S.snap;
}

static void gate_close(void)
{
	__atomic_store_n(sl_live, 0, __ATOMIC_RELEASE);
}

/* Ends the session; the receiver notices the socket and wakes everybody. */
static void die(CUresult error, const char *why)
{
	int live = ST_LIVE;
	CUresult none = CUDA_SUCCESS;

	/* The first reason counts. */
	__atomic_compare_exchange_n(&S.error, &none, error, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
	if (!__atomic_compare_exchange_n(&S.state, &live, ST_DEAD, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		return;
	gate_close();
	sl_log(SL_ERROR, "session with the worker ended: %s", why);
	for (unsigned i = 0; i < sl_sessions; i++) {
		struct sl_peer *t = &peers[i];

		if (t->shm)
			sl_shm_close(t->shm);
		shutdown(t->fd, SHUT_RDWR);
	}
}

/* Calls that are answered here must tell a sticky error too. */
static void note_error(CUresult r)
{
	if (sl_error_result(r))
		gate_close();
}

static void write_stats(void)
{
	uint64_t bytes_in = 0;
	const char *path = sl_config("SLUICE_STATS"), *trace = sl_config("SLUICE_TRACE");
	char head[256];
	FILE *f;
	int n;

	for (unsigned i = 0; i < sl_sessions; i++)
		bytes_in += peers[i].bytes_in;
	if (trace && *trace == '1') {
		n = snprintf(head, sizeof head, "sluice: calls=%llu oneway=%llu waits=%llu bytes_out=%llu bytes_in=%llu\n",
			     (unsigned long long)S.calls, (unsigned long long)(S.calls - S.waits), (unsigned long long)S.waits,
			     (unsigned long long)S.bytes_out, (unsigned long long)bytes_in);
		if (write(2, head, (size_t)n) < 0)
			return;
	}
	if (!path || !*path || !(f = fopen(path, "a")))
		return;
	fprintf(f, "{\"pid\":%d,\"calls\":%llu,\"oneway\":%llu,\"waits\":%llu,\"bytes_out\":%llu,\"bytes_in\":%llu,\"waits_by_function\":{",
		(int)getpid(), (unsigned long long)S.calls, (unsigned long long)(S.calls - S.waits), (unsigned long long)S.waits,
		(unsigned long long)S.bytes_out, (unsigned long long)bytes_in);
	n = 0;
	for (unsigned i = 0; i < SL_NOPS + SL_NCONTROLS; i++)
		if (S.waits_by_op[i])
			fprintf(f, "%s\"%s\":%u", n++ ? "," : "", sl_op_name((uint16_t)(i < SL_NOPS ? i : SL_OP_CONTROL + i - SL_NOPS)), S.waits_by_op[i]);
	fprintf(f, "}}\n");
	fclose(f);
}

/* From here on the driver answers DEINITIALIZED, as CUDA's does. */
static void at_exit(void *arg)
{
	int live = ST_LIVE;

	(void)arg;
	if (getpid() != S.pid)
		return;
	S.error = CUDA_ERROR_DEINITIALIZED;
	if (!__atomic_compare_exchange_n(&S.state, &live, ST_EXITING, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		__atomic_store_n(&S.state, ST_EXITING, __ATOMIC_RELEASE);
	gate_close();
	/* Not behind a stdout that another thread holds: the process is ending. */
	if (!ftrylockfile(stdout)) {
		sl_print_flush();
		funlockfile(stdout);
	}
	write_stats();
}

/*
 * A child must not hold the socket: the worker ends when the last copy closes.
 * Weak, because musl has no such symbol; there the copy stays until the child ends.
 */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));
extern int __cxa_atexit(void (*)(void *), void *, void *);

static void in_child(void)
{
	for (unsigned i = 0; i < sl_sessions; i++) {
		if (peers[i].fd >= 0)
			close(peers[i].fd);
		peers[i].fd = -1;
	}
	gate_close();	/* where the kernel has not wiped the page */
}

/* ---- out ---- */

static bool tx(struct sl_peer *t, struct iovec *iov, int n)
{
	while (n) {
		struct msghdr m = { .msg_iov = iov, .msg_iovlen = (size_t)n };
		ssize_t w = t->shm ? sl_shm_write(t->shm, iov, n, (int)t->keepalive_ms) : 
				    syscall(SYS_sendmsg, t->fd, &m, MSG_NOSIGNAL); /* no cancellation point: locks are held */

		if (w < 0) {
			if (errno == EINTR)
				continue;
			die(CUDA_ERROR_DEVICE_UNAVAILABLE, strerror(errno));
			return false;
		}
		__atomic_fetch_add(&S.bytes_out, (uint64_t)w, __ATOMIC_RELAXED);
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

/* Writes what the ring holds now. Called with drain held. */
static void drain_locked(struct sl_peer *t)
{
	for (;;) {
		uint64_t tail = t->tail, head = __atomic_load_n(&t->head, __ATOMIC_ACQUIRE);
		size_t n = (size_t)(head - tail), at = tail % RING, first = RING - at;
		struct iovec iov[2];

		if (!n)
			return;
		if (first > n)
			first = n;
		iov[0] = (struct iovec){ t->ring + at, first };
		iov[1] = (struct iovec){ t->ring, n - first };
		/* A dead session swallows what is left, so that nobody waits for room. */
		if (__atomic_load_n(&S.state, __ATOMIC_RELAXED) != ST_DEAD)
			tx(t, iov, n > first ? 2 : 1);
		__atomic_store_n(&t->tail, head, __ATOMIC_RELEASE);
	}
}

static void drain(struct sl_peer *t)
{
	pthread_mutex_lock(&t->drain);
	drain_locked(t);
	pthread_mutex_unlock(&t->drain);
}

static void ring_copy(struct sl_peer *t, uint64_t pos, const void *p, size_t n)
{
	size_t at = pos % RING, first = RING - at;

	if (first > n)
		first = n;
	memcpy(t->ring + at, p, first);
	memcpy(t->ring, (const char *)p + first, n - first);
}

/* Appends one frame. Called with order held. */
static void append(struct sl_peer *t, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb)
{
	size_t n = sizeof *h + na + nb;
	uint64_t head = t->head;

	if (head + n - __atomic_load_n(&t->tail, __ATOMIC_ACQUIRE) > RING)
		drain(t);
	ring_copy(t, head, h, sizeof *h);
	ring_copy(t, head + sizeof *h, a, na);
	if (nb)
		ring_copy(t, head + sizeof *h + na, b, nb);
	__atomic_store_n(&t->head, head + n, __ATOMIC_SEQ_CST);
}

static void wake_sender(struct sl_peer *t)
{
	if (__builtin_expect(__atomic_load_n(&t->sender_sleeps, __ATOMIC_SEQ_CST), 0)) {
		__atomic_store_n(&t->sender_sleeps, 0, __ATOMIC_RELEASE);
		futex_wake(&t->sender_sleeps);
	}
}

static CUresult send_frame(struct sl_peer *t, const struct wire_request *h, const void *a, size_t na, const void *b, size_t nb)
{
	if (na + nb < BULK_MIN) {
		append(t, h, a, na, b, nb);
		return CUDA_SUCCESS;
	}
	pthread_mutex_lock(&t->drain);
	drain_locked(t);
	tx(t, (struct iovec[]){ { (void *)(uintptr_t)h, sizeof *h }, { (void *)(uintptr_t)a, na }, { (void *)(uintptr_t)b, nb } }, nb ? 3 : 2);
	pthread_mutex_unlock(&t->drain);
	return sl_dead();
}

/* The peer that a call goes to, and the context it goes with as that peer knows it. */
static struct sl_peer *route_slow(const sl_buf *b, uint32_t *ctx)
{
	unsigned to = b->to ? b->to - 1u : *ctx ? sl_ctx_session(*ctx) : 0;
	struct sl_peer *t = &peers[to];

	if (b->to && *ctx && sl_ctx_session(*ctx) != to)
		*ctx = b->to_ctx;
	if (*ctx && *ctx <= SL_MAX_DEVICES)
		*ctx -= t->first;
	return t;
}

static inline struct sl_peer *route(const sl_buf *b, uint32_t *ctx)
{
	*ctx = sl_current_ctx_id();
	return __builtin_expect(sl_sessions == 1, 1) ? &peers[0] : route_slow(b, ctx);
}

/* An operation's place among all: the table's rows, then the control operations. */
static unsigned slot_of(uint16_t op)
{
	return op < SL_NOPS ? op : SL_NOPS + (op - SL_OP_CONTROL);
}

/* One call cannot be carried out by two owners. */
static CUresult refuse_mixed(uint16_t op)
{
	static uint8_t once[SL_NOPS + SL_NCONTROLS];
	unsigned slot = slot_of(op);

	if (!__atomic_exchange_n(&once[slot], 1, __ATOMIC_RELAXED))
		sl_log(SL_WARN, "%s with devices of several owners is not supported; see docs/coverage.md", sl_op_name(op));
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sl_oneway_bulk(uint16_t op, const sl_buf *head, const void *data, size_t n)
{
	struct wire_request h = { .size = (uint32_t)(head->n + n), .op = op };
	struct sl_peer *t = route(head, &h.ctx);
	CUresult err = sl_dead();

	if (err)
		return err;
	if (__builtin_expect(head->mixed, 0))
		return refuse_mixed(op);
	if (head->failed || head->n + n > SL_MAX_PAYLOAD)
		return CUDA_ERROR_OUT_OF_MEMORY;
	__atomic_fetch_add(&S.calls, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&t->order);
	err = send_frame(t, &h, head->p, head->n, data, n);
	pthread_mutex_unlock(&t->order);
	wake_sender(t);
	return err;
}

CUresult sl_oneway(uint16_t op, const sl_buf *b)
{
	return sl_oneway_bulk(op, b, NULL, 0);
}

static void *sender(void *arg)
{
	struct sl_peer *t = arg;
	const struct timespec nap = { 0, POLL_NS }, beat = { (time_t)(t->keepalive_ms / 2000 + 1), 0 };
	int idle = 0;

	prctl(PR_SET_NAME, "sluice-send");
	prctl(PR_SET_TIMERSLACK, 1UL);
	while (__atomic_load_n(&S.state, __ATOMIC_ACQUIRE) == ST_LIVE) {
		if (__atomic_load_n(&t->head, __ATOMIC_ACQUIRE) != __atomic_load_n(&t->tail, __ATOMIC_ACQUIRE)) {
			drain(t);
			idle = 0;
			continue;
		}
		if (idle++ < POLL_ROUNDS) {
			nanosleep(&nap, NULL);
			continue;
		}
		__atomic_store_n(&t->sender_sleeps, 1, __ATOMIC_SEQ_CST);
		if (__atomic_load_n(&t->head, __ATOMIC_SEQ_CST) == __atomic_load_n(&t->tail, __ATOMIC_SEQ_CST))
			futex_wait(&t->sender_sleeps, 1, &beat);
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

/* ---- what kernels printed ---- */

#define PRINT_MAX (16u << 20)

/* For stdout, and for stderr: the argument of a PRINT frame. */
static struct print {
	char *text;
	size_t n, cap;
} prints[2];

static pthread_mutex_t print_lock = PTHREAD_MUTEX_INITIALIZER;
static bool printed; /* there may be something in them */

/* Not under the lock while a stream is written: who holds the stream may come here too. */
static void print_slow(void)
{
	struct print had[2];

	pthread_mutex_lock(&print_lock);
	memcpy(had, prints, sizeof had);
	memset(prints, 0, sizeof prints);
	__atomic_store_n(&printed, false, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&print_lock);
	for (int i = 0; i < 2; i++) {
		if (had[i].n)
			fwrite(had[i].text, 1, had[i].n, i ? stderr : stdout);
		free(had[i].text);
	}
}

void sl_print_flush(void)
{
	if (__builtin_expect(__atomic_load_n(&printed, __ATOMIC_ACQUIRE), 0))
		print_slow();
}

/* ---- waiting ---- */

CUresult sl_wait(uint16_t op, const sl_buf *b, sl_reply *r)
{
	struct wire_request h = { .size = (uint32_t)b->n, .op = op, .flags = SL_FLAG_WAIT };
	struct sl_peer *t = route(b, &h.ctx);
	sl_reply own;
	struct waiter w = { .r = r ? r : &own };
	CUresult err = sl_dead();
	int64_t since = 0;
	unsigned slot = slot_of(op);

	w.r->data = w.r->inl;
	w.r->n = w.r->off = 0;
	w.r->bad = false;
	w.r->result = err;
	if (err)
		return err;
	if (__builtin_expect(b->mixed, 0))
		return w.r->result = refuse_mixed(op);
	if (b->failed)
		return w.r->result = CUDA_ERROR_OUT_OF_MEMORY;
	w.r->session = t->index;
	__atomic_fetch_add(&S.calls, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&S.waits, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&S.waits_by_op[slot], 1, __ATOMIC_RELAXED);
	sl_log(SL_DEBUG, "wait %s", sl_op_name(op));

	pthread_mutex_lock(&t->order);
	if (!++t->call)
		t->call = 1;
	h.call = w.call = t->call;
	pthread_mutex_lock(&t->wait_lock);
	w.next = t->waiting[w.call % WAIT_BUCKETS];
	t->waiting[w.call % WAIT_BUCKETS] = &w;
	__atomic_fetch_add(&t->owed, 1, __ATOMIC_RELAXED);
	/* A receiver that ended before has woken its list already. */
	if (__atomic_load_n(&S.state, __ATOMIC_ACQUIRE) != ST_LIVE) {
		t->waiting[w.call % WAIT_BUCKETS] = w.next;
		w.done = 1;
		w.r->result = sl_dead();
	}
	pthread_mutex_unlock(&t->wait_lock);
	if (!w.done)
		send_frame(t, &h, b->p, b->n, NULL, 0);
	pthread_mutex_unlock(&t->order);
	if (!w.done)
		drain(t);

	for (int i = 0; i < 100 && !__atomic_load_n(&w.done, __ATOMIC_ACQUIRE); i++)
		__builtin_ia32_pause();
	while (!__atomic_load_n(&w.done, __ATOMIC_ACQUIRE))
		if (!sl_look(&since, true))
			futex_wait(&w.done, 0, NULL);
	__atomic_fetch_sub(&t->owed, 1, __ATOMIC_RELAXED);
	sl_print_flush();
	err = w.r->result;
	if (!r)
		sl_reply_free(&own);
	return err;
}

void sl_expect(unsigned session, int threads)
{
	__atomic_fetch_add(&peers[session].owed, (uint32_t)threads, __ATOMIC_RELAXED);
}

static struct waiter *take_waiter(struct sl_peer *t, uint32_t call)
{
	struct waiter **p, *w;

	pthread_mutex_lock(&t->wait_lock);
	for (p = &t->waiting[call % WAIT_BUCKETS]; (w = *p) && w->call != call; p = &w->next)
		;
	if (w)
		*p = w->next;
	pthread_mutex_unlock(&t->wait_lock);
	return w;
}

static void wake_waiter(struct waiter *w)
{
	/* w lies on its caller's stack: after done it may be gone, the address alone is used. */
	uint32_t *done = &w->done;

	__atomic_store_n(done, 1, __ATOMIC_RELEASE);
	futex_wake(done);
}

/* A turn of this session is about to begin: those who wait had better be awake. */
static void attend(struct sl_peer *t, uint32_t us)
{
	if (!sl_attend(&t->attend_again, us))
		return;
	pthread_mutex_lock(&t->wait_lock);
	for (int i = 0; i < WAIT_BUCKETS; i++)
		for (struct waiter *w = t->waiting[i]; w; w = w->next)
			futex_wake(&w->done);
	pthread_mutex_unlock(&t->wait_lock);
}

/* ---- in ---- */

/* Some bytes, 0 at the end, -1 with errno. */
static ssize_t rx_some(struct sl_peer *t, void *p, size_t n)
{
	int64_t since = 0;

	if (t->shm)
		return sl_shm_read(t->shm, p, n, &t->owed, (int)t->keepalive_ms);
	while (sl_look(&since, __atomic_load_n(&t->owed, __ATOMIC_RELAXED))) {
		ssize_t r = recv(t->fd, p, n, MSG_DONTWAIT);

		if (r >= 0 || errno != EAGAIN)
			return r;
	}
	return recv(t->fd, p, n, 0);
}

static bool rx_fill(struct sl_peer *t)
{
	for (;;) {
		ssize_t n = rx_some(t, t->rx, RXBUF);

		if (n > 0) {
			t->rx_at = 0;
			t->rx_n = (size_t)n;
			t->bytes_in += (uint64_t)n;
			return true;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			die(CUDA_ERROR_DEVICE_UNAVAILABLE, "the worker closed the connection");
		else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETIMEDOUT)
			die(CUDA_ERROR_DEVICE_UNAVAILABLE, "no sign of life from the worker within the keep-alive time");
		else
			die(CUDA_ERROR_DEVICE_UNAVAILABLE, strerror(errno));
		return false;
	}
}

/* Reads exactly n bytes; large ones go from the socket to their place. dst NULL discards. */
static bool rx(struct sl_peer *t, void *dst, size_t n)
{
	uint8_t *p = dst;

	while (n) {
		size_t k = t->rx_n - t->rx_at;

		if (k) {
			if (k > n)
				k = n;
			if (p) {
				memcpy(p, t->rx + t->rx_at, k);
				p += k;
			}
			t->rx_at += k;
			n -= k;
			continue;
		}
		if (p && n >= RXBUF) {
			ssize_t r = rx_some(t, p, n);

			if (r > 0) {
				t->bytes_in += (uint64_t)r;
				p += r;
				n -= (size_t)r;
				continue;
			}
			if (r < 0 && errno == EINTR)
				continue;
		}
		if (!rx_fill(t))
			return false;
	}
	return true;
}

static bool rx_reply(struct sl_peer *t, const struct wire_reply *h)
{
	struct waiter *w = take_waiter(t, h->call);
	sl_reply *r;
	bool ok;

	if (!w)
		return rx(t, NULL, h->size);
	r = w->r;
	if (h->size > sizeof r->inl)
		r->data = malloc(h->size);
	if (!r->data) {
		r->data = r->inl;
		ok = rx(t, NULL, h->size);
		r->result = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		ok = rx(t, r->data, h->size);
		r->n = ok ? h->size : 0;
		r->result = !ok ? sl_dead() : (CUresult)h->result;
	}
	note_error(r->result);
	wake_waiter(w);
	return ok;
}

static bool rx_data(struct sl_peer *t, const struct wire_reply *h)
{
	struct sl_delivery d;
	bool open;
	struct wire_data head;
	uint64_t off, n = h->size - sizeof head;
	bool ok;

	if (h->size < sizeof head) {
		die(CUDA_ERROR_UNKNOWN, "malformed data frame");
		return false;
	}
	if (!rx(t, &head, sizeof head))
		return false;
	off = head.offset;
	open = sl_delivery_find(h->call, &d);
	if (!open) {
		ok = rx(t, NULL, n);
	} else if (off > d.n || n > d.n - off) {
		die(CUDA_ERROR_UNKNOWN, "data frame beyond the memory it was asked for");
		return false;
	} else if (!d.width) {
		ok = rx(t, d.dst + off, n);
	} else {
		for (ok = true; ok && n;) {
			uint64_t row = off / d.width, x = off % d.width, k = d.width - x;

			if (k > n)
				k = n;
			ok = rx(t, d.dst + row / d.h * d.slice + row % d.h * d.pitch + x, k);
			off += k;
			n -= k;
		}
	}
	if (ok && (h->arg & SL_DATA_LAST))
		sl_delivery_drop(h->call);
	return ok;
}

/*
 * What kernels printed is kept for the next thread that comes back from a wait, as
 * CUDA prints when the program synchronises. Never written here: stdout may be locked
 * by a thread that waits for us.
 */
static bool rx_print(struct sl_peer *t, uint32_t stream, uint32_t n)
{
	struct print *p = &prints[stream == SL_PRINT_STDERR];
	char buf[4096];

	while (n) {
		uint32_t k = n < sizeof buf ? n : (uint32_t)sizeof buf;

		if (!rx(t, buf, k))
			return false;
		pthread_mutex_lock(&print_lock);
		if (p->n + k > p->cap && p->cap < PRINT_MAX) {
			size_t cap = p->cap ? p->cap * 4 : 64u << 10;
			char *text = realloc(p->text, cap);

			if (text) {
				p->text = text;
				p->cap = cap;
			}
		}
		/* What finds no room is lost, as with CUDA's own buffer. */
		if (p->n + k <= p->cap) {
			memcpy(p->text + p->n, buf, k);
			p->n += k;
			__atomic_store_n(&printed, true, __ATOMIC_RELEASE);
		}
		pthread_mutex_unlock(&print_lock);
		n -= k;
	}
	return true;
}

static bool rx_frame(struct sl_peer *t)
{
	struct wire_reply h;

	if (!rx(t, &h, sizeof h))
		return false;
	if (h.size > SL_MAX_PAYLOAD) {
		die(CUDA_ERROR_UNKNOWN, "frame beyond its limit");
		return false;
	}
	switch (h.kind) {
	case SL_FRAME_REPLY:
		return rx_reply(t, &h);
	case SL_FRAME_DATA:
		return rx_data(t, &h);
	case SL_FRAME_EVENT:
		if (h.result) {
			if (sl_error_oneway(h.result))
				gate_close();
			sl_on_event_error(h.arg);
		} else {
			sl_on_event(h.arg, h.call);
		}
		break;
	case SL_FRAME_ERROR:
		sl_log(SL_WARN, "%s failed on the worker: error %d", sl_op_name(h.op), h.result);
		if (sl_error_oneway(h.result))
			gate_close();
		break;
	case SL_FRAME_PRINT:
		return rx_print(t, h.arg, h.size);
	case SL_FRAME_HOSTFN:
		sl_on_hostfn(h.arg, h.result);
		break;
	case SL_FRAME_BYE: {
		char why[512] = "";
		uint32_t n = h.size < sizeof why - 1 ? h.size : (uint32_t)sizeof why - 1;

		if (rx(t, why, n))
			die(h.result ? h.result : CUDA_ERROR_DEVICE_UNAVAILABLE, why);
		return false;
	}
	case SL_FRAME_BEAT:
		break;
	case SL_FRAME_TURN:
		attend(t, h.arg);
		break;
	default:
		die(CUDA_ERROR_UNKNOWN, "frame of unknown kind");
		return false;
	}
	return rx(t, NULL, h.size);
}

static void *receiver(void *arg)
{
	struct sl_peer *t = arg;

	prctl(PR_SET_NAME, "sluice-recv");
	while (rx_frame(t))
		;
	die(CUDA_ERROR_DEVICE_UNAVAILABLE, "receiver ended");
	pthread_mutex_lock(&t->wait_lock);
	for (int i = 0; i < WAIT_BUCKETS; i++)
		while (t->waiting[i]) {
			struct waiter *w = t->waiting[i];

			t->waiting[i] = w->next;
			w->r->result = sl_dead();
			wake_waiter(w);
		}
	pthread_mutex_unlock(&t->wait_lock);
	sl_delivery_wake();
	return NULL;
}

/* With shared memory nothing comes over the socket but its end. */
static void *watcher(void *arg)
{
	struct sl_peer *t = arg;
	struct timeval never = { 0, 0 };
	ssize_t n;
	char c;

	prctl(PR_SET_NAME, "sluice-watch");
	setsockopt(t->fd, SOL_SOCKET, SO_RCVTIMEO, &never, sizeof never);
	do
		n = recv(t->fd, &c, 1, 0);
	while (n > 0 || (n < 0 && errno == EINTR));
	sl_shm_close(t->shm);
	return NULL;
}

/* ---- start ---- */

static CUresult start_threads(struct sl_peer *t)
{
	pthread_attr_t attr;
	sigset_t all, old;
	pthread_t thread;
	int err;

	/* The program's signals are the program's: ours are all blocked. */
	sigfillset(&all);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 256 << 10);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	err = pthread_create(&thread, &attr, receiver, t);
	if (!err)
		err = pthread_create(&thread, &attr, sender, t);
	if (!err && t->shm)
		err = pthread_create(&thread, &attr, watcher, t);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	return err ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult connect_error(enum sl_connected rc)
{
	switch (rc) {
	case SL_CONNECTED:
		return CUDA_SUCCESS;
	case SL_NOWHERE:
		return CUDA_ERROR_NO_DEVICE;
	case SL_MISMATCH:
		return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
	case SL_DENIED:
		return CUDA_ERROR_NOT_PERMITTED;
	case SL_NO_ROOM:
	case SL_NO_MEMORY:
		return CUDA_ERROR_OUT_OF_MEMORY;
	default:
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
}

/* Connects to one owner and makes its devices the next of the list. */
static CUresult start_peer(struct sl_peer *t, unsigned i, struct sl_snapshot *snap, unsigned *owners)
{
	const struct sl_ask ask = { .kind = SL_SESSION_COMPUTE, .owner = i, .patience_ms = CONNECT_MS, .shm = true };
	struct sl_snapshot *all = &S.snap;
	struct sl_connection c;
	CUresult err;

	*t = (struct sl_peer){ .fd = -1, .index = i, .first = i ? all->ndev : 0 };
	err = connect_error(sl_connect(&ask, &c, snap));
	if (err)
		return err;
	t->fd = c.fd;
	*owners = c.owners;
	t->keepalive_ms = snap->keepalive_ms;
	if (c.shm >= 0 && !(t->shm = sl_shm_attach(c.shm))) {
		sl_log(SL_ERROR, "the worker's shared memory cannot be mapped: %s", strerror(errno));
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
	pthread_mutex_init(&t->order, NULL);
	pthread_mutex_init(&t->drain, NULL);
	pthread_mutex_init(&t->wait_lock, NULL);
	t->ring = mmap(NULL, RING, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	t->rx = malloc(RXBUF);
	if (t->ring == MAP_FAILED || !t->rx)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!i)
		all->ndev = 0;
	if (!sl_snapshot_add(all, snap))
		return CUDA_ERROR_INVALID_DEVICE;
	for (uint32_t d = t->first; d < all->ndev; d++)
		peer_of[d] = (uint8_t)i;
	return CUDA_SUCCESS;
}

static void drop_peer(struct sl_peer *t)
{
	if (t->fd >= 0)
		close(t->fd);
	if (t->ring && t->ring != MAP_FAILED)
		munmap(t->ring, RING);
	free(t->rx);
	*t = (struct sl_peer){ .fd = -1 };
}

static CUresult start(void)
{
	struct sl_snapshot *snap = malloc(sizeof *snap);
	unsigned n = 1, ignored, made = 0;
	CUresult err = snap ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	uint32_t *page;

	while (!err && made < n) {
		err = start_peer(&peers[made], made, snap, made ? &ignored : &n);
		made++;
	}
	free(snap);
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	S.waits_by_op = calloc(SL_NOPS + SL_NCONTROLS, sizeof *S.waits_by_op);
	if (!err && (page == MAP_FAILED || !S.waits_by_op))
		err = CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		while (made--)
			drop_peer(&peers[made]);
		if (page != MAP_FAILED)
			munmap(page, 4096);
		free(S.waits_by_op);
		return err;
	}
#ifdef MADV_WIPEONFORK
	madvise(page, 4096, MADV_WIPEONFORK);
#endif
	sl_sessions = n;
	S.pid = getpid();
	*page = 1;
	__atomic_store_n(&S.state, ST_LIVE, __ATOMIC_RELEASE);
	sl_live = page;
	for (unsigned i = 0; i < n && !err; i++)
		err = start_threads(&peers[i]);
	if (err) {
		die(err, "no thread could be started");
		return err;
	}
	if (__register_atfork)
		__register_atfork(NULL, NULL, in_child, NULL);
	__cxa_atexit(at_exit, NULL, NULL);
	sl_log(SL_INFO, "%s", sl_version);
	return CUDA_SUCCESS;
}

unsigned sl_dev_session(uint32_t place)
{
	return place < SL_MAX_DEVICES ? peer_of[place] : 0;
}

uint32_t sl_session_first(unsigned session)
{
	return peers[session].first;
}

CUresult sl_session_start(void)
{
	static CUresult outcome;
	static bool tried;
	static time_t failed_at;
	struct timespec now;
	CUresult err;

	if (sl_forked())
		return CUDA_ERROR_NOT_INITIALIZED;
	sl_tracing = sl_log_level() >= SL_TRACE;
	pthread_mutex_lock(&S.start_lock);
	clock_gettime(CLOCK_MONOTONIC, &now);
	/*
	 * Only success is remembered: a job may wait for its worker and try again. But the runtime
	 * asks twice in a row as it starts, and shall not wait for a silent worker twice.
	 */
	if (!tried || (outcome && S.state == ST_NEW && now.tv_sec - failed_at > 1)) {
		outcome = start();
		tried = true;
		clock_gettime(CLOCK_MONOTONIC, &now);
		failed_at = now.tv_sec;
	}
	err = S.state == ST_NEW || S.state == ST_LIVE ? outcome : sl_dead();
	pthread_mutex_unlock(&S.start_lock);
	return err;
}
