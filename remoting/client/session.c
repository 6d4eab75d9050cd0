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
#include <stdarg.h>
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
#include "connect.h"
#include "delivery.h"
#include "shmring.h"

#define RING (1u << 20)
#define BULK_MIN (16u << 10)	/* payloads from here on go straight to the socket */
#define MAX_FRAME (16u << 20)
#define RXBUF (64u << 10)
#define POLL_NS 25000		/* sender's nap while calls come in */
#define POLL_ROUNDS 40		/* empty naps before it sleeps in earnest */
#define F_WAIT 1u

enum { K_REPLY = 1, K_DATA, K_EVENT, K_ERROR, K_PRINT, K_HOSTFN, K_BYE, K_BEAT };
enum { ST_NEW, ST_LIVE, ST_DEAD, ST_EXITING };

struct out_hdr {
	uint32_t size;
	uint16_t op, flags;
	uint32_t call, ctx;
};

struct in_hdr {
	uint32_t size;
	uint16_t kind, op;
	uint32_t call;
	int32_t result;
	uint32_t arg;
	int32_t deferred;
};

struct waiter {
	struct waiter *next;
	uint32_t call;
	uint32_t done;	/* futex */
	sl_reply *r;
};

#define WAIT_BUCKETS 64

static struct {
	pthread_mutex_t start_lock;
	int state;	/* ST_* */
	CUresult error;	/* what calls return when not live */
	CUresult sticky;	/* CUDA's own sticky error, 0 if none */
	CUresult deferred;	/* first error of a one-way call not yet told */
	pid_t pid;
	int fd;
	struct sl_shm *shm;	/* NULL: the socket carries the frames */
	struct sl_snapshot snap;

	pthread_mutex_t order, drain;
	uint8_t *ring;
	uint64_t head, tail;
	uint32_t sender_sleeps;	/* futex */
	uint32_t call;

	pthread_mutex_t wait_lock;
	struct waiter *waiting[WAIT_BUCKETS];

	uint8_t *rx;
	size_t rx_at, rx_n;

	uint64_t calls, waits, bytes_out, bytes_in;
	uint32_t *waits_by_op;	/* SL_NOPS table rows, then 16 control operations */
} S = {
	.start_lock = PTHREAD_MUTEX_INITIALIZER,
	.order = PTHREAD_MUTEX_INITIALIZER,
	.drain = PTHREAD_MUTEX_INITIALIZER,
	.wait_lock = PTHREAD_MUTEX_INITIALIZER,
	.fd = -1,
};

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

static int log_level(void)
{
	static int level = -1;

	if (level < 0) {
		const char *s = sl_config("SLUICE_LOG");

		level = !s ? SL_ERROR : !strcmp(s, "warn") ? SL_WARN : !strcmp(s, "info") ? SL_INFO : !strcmp(s, "debug") ? SL_DEBUG : !strcmp(s, "trace") ? SL_TRACE : SL_ERROR;
		sl_tracing = level == SL_TRACE;
	}
	return level;
}

void sl_log(int level, const char *fmt, ...)
{
	char line[1024];
	va_list ap;
	int n;

	if (level > log_level())
		return;
	n = snprintf(line, sizeof line, "sluice: ");
	va_start(ap, fmt);
	vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
	va_end(ap);
	n = (int)strlen(line);
	line[n++] = '\n';
	if (write(2, line, (size_t)n) < 0)
		return;
}

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
		return __atomic_load_n(&S.sticky, __ATOMIC_RELAXED);
	return st == ST_NEW ? CUDA_ERROR_NOT_INITIALIZED : S.error;
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
	if (S.shm)
		sl_shm_close(S.shm);
	shutdown(S.fd, SHUT_RDWR);
}

static bool is_sticky(CUresult r)
{
	return r == CUDA_ERROR_ILLEGAL_ADDRESS || r == CUDA_ERROR_LAUNCH_TIMEOUT || r == CUDA_ERROR_ASSERT ||
	       (r >= CUDA_ERROR_HARDWARE_STACK_ERROR && r <= CUDA_ERROR_LAUNCH_FAILED);
}

static void note_error(CUresult r)
{
	if (is_sticky(r) && !__atomic_exchange_n(&S.sticky, r, __ATOMIC_RELAXED))
		gate_close();
}

static void write_stats(void)
{
	const char *path = sl_config("SLUICE_STATS"), *trace = sl_config("SLUICE_TRACE");
	char head[256];
	FILE *f;
	int n;

	if (trace && *trace == '1') {
		n = snprintf(head, sizeof head, "sluice: calls=%llu oneway=%llu waits=%llu bytes_out=%llu bytes_in=%llu\n",
			     (unsigned long long)S.calls, (unsigned long long)(S.calls - S.waits), (unsigned long long)S.waits,
			     (unsigned long long)S.bytes_out, (unsigned long long)S.bytes_in);
		if (write(2, head, (size_t)n) < 0)
			return;
	}
	if (!path || !*path || !(f = fopen(path, "a")))
		return;
	fprintf(f, "{\"pid\":%d,\"calls\":%llu,\"oneway\":%llu,\"waits\":%llu,\"bytes_out\":%llu,\"bytes_in\":%llu,\"waits_by_function\":{",
		(int)getpid(), (unsigned long long)S.calls, (unsigned long long)(S.calls - S.waits), (unsigned long long)S.waits,
		(unsigned long long)S.bytes_out, (unsigned long long)S.bytes_in);
	n = 0;
	for (unsigned i = 0; i < SL_NOPS + 16; i++)
		if (S.waits_by_op[i])
			fprintf(f, "%s\"%s\":%u", n++ ? "," : "", sl_op_name((uint16_t)(i < SL_NOPS ? i : 0xf000 + i - SL_NOPS)), S.waits_by_op[i]);
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
	if (S.fd >= 0)
		close(S.fd);
	S.fd = -1;
	gate_close();	/* where the kernel has not wiped the page */
}

/* ---- out ---- */

static bool tx(struct iovec *iov, int n)
{
	while (n) {
		struct msghdr m = { .msg_iov = iov, .msg_iovlen = (size_t)n };
		ssize_t w = S.shm ? sl_shm_write(S.shm, iov, n, (int)S.snap.keepalive_ms) : 
				    syscall(SYS_sendmsg, S.fd, &m, MSG_NOSIGNAL); /* no cancellation point: locks are held */

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
static void drain_locked(void)
{
	for (;;) {
		uint64_t tail = S.tail, head = __atomic_load_n(&S.head, __ATOMIC_ACQUIRE);
		size_t n = (size_t)(head - tail), at = tail % RING, first = RING - at;
		struct iovec iov[2];

		if (!n)
			return;
		if (first > n)
			first = n;
		iov[0] = (struct iovec){ S.ring + at, first };
		iov[1] = (struct iovec){ S.ring, n - first };
		/* A dead session swallows what is left, so that nobody waits for room. */
		if (__atomic_load_n(&S.state, __ATOMIC_RELAXED) != ST_DEAD)
			tx(iov, n > first ? 2 : 1);
		__atomic_store_n(&S.tail, head, __ATOMIC_RELEASE);
	}
}

static void drain(void)
{
	pthread_mutex_lock(&S.drain);
	drain_locked();
	pthread_mutex_unlock(&S.drain);
}

static void ring_copy(uint64_t pos, const void *p, size_t n)
{
	size_t at = pos % RING, first = RING - at;

	if (first > n)
		first = n;
	memcpy(S.ring + at, p, first);
	memcpy(S.ring, (const char *)p + first, n - first);
}

/* Appends one frame. Called with order held. */
static void append(const struct out_hdr *h, const void *a, size_t na, const void *b, size_t nb)
{
	size_t n = sizeof *h + na + nb;
	uint64_t head = S.head;

	if (head + n - __atomic_load_n(&S.tail, __ATOMIC_ACQUIRE) > RING)
		drain();
	ring_copy(head, h, sizeof *h);
	ring_copy(head + sizeof *h, a, na);
	if (nb)
		ring_copy(head + sizeof *h + na, b, nb);
	__atomic_store_n(&S.head, head + n, __ATOMIC_SEQ_CST);
}

static void wake_sender(void)
{
	if (__builtin_expect(__atomic_load_n(&S.sender_sleeps, __ATOMIC_SEQ_CST), 0)) {
		__atomic_store_n(&S.sender_sleeps, 0, __ATOMIC_RELEASE);
		futex_wake(&S.sender_sleeps);
	}
}

static CUresult send_frame(const struct out_hdr *h, const void *a, size_t na, const void *b, size_t nb)
{
	if (na + nb < BULK_MIN) {
		append(h, a, na, b, nb);
		return CUDA_SUCCESS;
	}
	pthread_mutex_lock(&S.drain);
	drain_locked();
	tx((struct iovec[]){ { (void *)(uintptr_t)h, sizeof *h }, { (void *)(uintptr_t)a, na }, { (void *)(uintptr_t)b, nb } }, nb ? 3 : 2);
	pthread_mutex_unlock(&S.drain);
	return sl_dead();
}

CUresult sl_oneway_bulk(uint16_t op, const sl_buf *head, const void *data, size_t n)
{
	struct out_hdr h = { .size = (uint32_t)(head->n + n), .op = op, .ctx = sl_current_ctx_id() };
	CUresult err = sl_dead();

	if (err)
		return err;
	if (head->failed || head->n + n > MAX_FRAME)
		return CUDA_ERROR_OUT_OF_MEMORY;
	__atomic_fetch_add(&S.calls, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&S.order);
	err = send_frame(&h, head->p, head->n, data, n);
	pthread_mutex_unlock(&S.order);
	wake_sender();
	return err;
}

CUresult sl_oneway(uint16_t op, const sl_buf *b)
{
	return sl_oneway_bulk(op, b, NULL, 0);
}

static void *sender(void *arg)
{
	const struct timespec nap = { 0, POLL_NS }, beat = { (time_t)(S.snap.keepalive_ms / 2000 + 1), 0 };
	int idle = 0;

	(void)arg;
	prctl(PR_SET_NAME, "sluice-send");
	prctl(PR_SET_TIMERSLACK, 1UL);
	while (__atomic_load_n(&S.state, __ATOMIC_ACQUIRE) == ST_LIVE) {
		if (__atomic_load_n(&S.head, __ATOMIC_ACQUIRE) != __atomic_load_n(&S.tail, __ATOMIC_ACQUIRE)) {
			drain();
			idle = 0;
			continue;
		}
		if (idle++ < POLL_ROUNDS) {
			nanosleep(&nap, NULL);
			continue;
		}
		__atomic_store_n(&S.sender_sleeps, 1, __ATOMIC_SEQ_CST);
		if (__atomic_load_n(&S.head, __ATOMIC_SEQ_CST) == __atomic_load_n(&S.tail, __ATOMIC_SEQ_CST))
			futex_wait(&S.sender_sleeps, 1, &beat);
		if (__atomic_exchange_n(&S.sender_sleeps, 0, __ATOMIC_SEQ_CST)) {
			struct out_hdr h = { .op = CTL_BEAT };

			pthread_mutex_lock(&S.order);
			append(&h, NULL, 0, NULL, 0);
			pthread_mutex_unlock(&S.order);
		}
		idle = 0;
	}
	return NULL;
}

/* ---- waiting ---- */

CUresult sl_wait(uint16_t op, const sl_buf *b, sl_reply *r)
{
	struct out_hdr h = { .size = (uint32_t)b->n, .op = op, .flags = F_WAIT, .ctx = sl_current_ctx_id() };
	sl_reply own;
	struct waiter w = { .r = r ? r : &own };
	CUresult err = sl_dead();
	unsigned slot = op < SL_NOPS ? op : SL_NOPS + (op & 15u);

	w.r->data = w.r->inl;
	w.r->n = w.r->off = 0;
	w.r->bad = false;
	w.r->result = err;
	if (err)
		return err;
	if (b->failed)
		return w.r->result = CUDA_ERROR_OUT_OF_MEMORY;
	__atomic_fetch_add(&S.calls, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&S.waits, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&S.waits_by_op[slot], 1, __ATOMIC_RELAXED);
	sl_log(SL_DEBUG, "wait %s", sl_op_name(op));

	pthread_mutex_lock(&S.order);
	if (!++S.call)
		S.call = 1;
	h.call = w.call = S.call;
	pthread_mutex_lock(&S.wait_lock);
	w.next = S.waiting[w.call % WAIT_BUCKETS];
	S.waiting[w.call % WAIT_BUCKETS] = &w;
	/* A receiver that ended before has woken its list already. */
	if (__atomic_load_n(&S.state, __ATOMIC_ACQUIRE) != ST_LIVE) {
		S.waiting[w.call % WAIT_BUCKETS] = w.next;
		w.done = 1;
		w.r->result = sl_dead();
	}
	pthread_mutex_unlock(&S.wait_lock);
	if (!w.done)
		send_frame(&h, b->p, b->n, NULL, 0);
	pthread_mutex_unlock(&S.order);
	if (!w.done)
		drain();

	for (int i = 0; i < 100 && !__atomic_load_n(&w.done, __ATOMIC_ACQUIRE); i++)
		__builtin_ia32_pause();
	while (!__atomic_load_n(&w.done, __ATOMIC_ACQUIRE))
		futex_wait(&w.done, 0, NULL);
	err = w.r->result;
	if (!r)
		sl_reply_free(&own);
	return err;
}

static struct waiter *take_waiter(uint32_t call)
{
	struct waiter **p, *w;

	pthread_mutex_lock(&S.wait_lock);
	for (p = &S.waiting[call % WAIT_BUCKETS]; (w = *p) && w->call != call; p = &w->next)
		;
	if (w)
		*p = w->next;
	pthread_mutex_unlock(&S.wait_lock);
	return w;
}

static void wake_waiter(struct waiter *w)
{
	/* w lies on its caller's stack: after done it may be gone, the address alone is used. */
	uint32_t *done = &w->done;

	__atomic_store_n(done, 1, __ATOMIC_RELEASE);
	futex_wake(done);
}

/* ---- in ---- */

/* Some bytes, 0 at the end, -1 with errno. */
static ssize_t rx_some(void *p, size_t n)
{
	return S.shm ? sl_shm_read(S.shm, p, n, (int)S.snap.keepalive_ms) : recv(S.fd, p, n, 0);
}

static bool rx_fill(void)
{
	for (;;) {
		ssize_t n = rx_some(S.rx, RXBUF);

		if (n > 0) {
			S.rx_at = 0;
			S.rx_n = (size_t)n;
			S.bytes_in += (uint64_t)n;
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
static bool rx(void *dst, size_t n)
{
	uint8_t *p = dst;

	while (n) {
		size_t k = S.rx_n - S.rx_at;

		if (k) {
			if (k > n)
				k = n;
			if (p) {
				memcpy(p, S.rx + S.rx_at, k);
				p += k;
			}
			S.rx_at += k;
			n -= k;
			continue;
		}
		if (p && n >= RXBUF) {
			ssize_t r = rx_some(p, n);

			if (r > 0) {
				S.bytes_in += (uint64_t)r;
				p += r;
				n -= (size_t)r;
				continue;
			}
			if (r < 0 && errno == EINTR)
				continue;
		}
		if (!rx_fill())
			return false;
	}
	return true;
}

/*
 * What a call is told. An error of an earlier one-way call is kept for the next
 * call by which the program asks how the device fares: another that succeeded, an
 * allocation say, must not seem to have failed.
 */
static CUresult told(const struct in_hdr *h)
{
	CUresult none = CUDA_SUCCESS, kept;

	if (h->deferred)
		__atomic_compare_exchange_n(&S.deferred, &none, h->deferred, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
	if (h->result && h->result != CUDA_ERROR_NOT_READY)
		return h->result;
	switch (h->op) {
	case SL_OP_cuStreamSynchronize:
	case SL_OP_cuCtxSynchronize:
	case SL_OP_cuEventSynchronize:
	case SL_OP_cuStreamQuery:
	case CTL_EVENT_WATCH:
	case CTL_COPY_OUT:
	case CTL_COPY_OUT_3D:
		kept = __atomic_exchange_n(&S.deferred, CUDA_SUCCESS, __ATOMIC_RELAXED);
		return kept ? kept : h->result;
	}
	return h->result;
}

static bool rx_reply(const struct in_hdr *h)
{
	struct waiter *w = take_waiter(h->call);
	sl_reply *r;
	bool ok;

	if (!w)
		return rx(NULL, h->size);
	r = w->r;
	if (h->size > sizeof r->inl)
		r->data = malloc(h->size);
	if (!r->data) {
		r->data = r->inl;
		ok = rx(NULL, h->size);
		r->result = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		ok = rx(r->data, h->size);
		r->n = ok ? h->size : 0;
		r->result = !ok ? sl_dead() : told(h);
	}
	note_error(r->result);
	wake_waiter(w);
	return ok;
}

static bool rx_data(const struct in_hdr *h)
{
	struct sl_delivery d;
	bool open;
	uint64_t off = 0, n = h->size - 8;
	bool ok;

	if (h->size < 8) {
		die(CUDA_ERROR_UNKNOWN, "malformed data frame");
		return false;
	}
	if (!rx(&off, 8))
		return false;
	open = sl_delivery_find(h->call, &d);
	if (!open) {
		ok = rx(NULL, n);
	} else if (off > d.n || n > d.n - off) {
		die(CUDA_ERROR_UNKNOWN, "data frame beyond the memory it was asked for");
		return false;
	} else if (!d.width) {
		ok = rx(d.dst + off, n);
	} else {
		for (ok = true; ok && n;) {
			uint64_t row = off / d.width, x = off % d.width, k = d.width - x;

			if (k > n)
				k = n;
			ok = rx(d.dst + row / d.h * d.slice + row % d.h * d.pitch + x, k);
			off += k;
			n -= k;
		}
	}
	if (ok && (h->arg & 1))
		sl_delivery_drop(h->call);
	return ok;
}

static bool rx_print(uint32_t n)
{
	char buf[4096];

	while (n) {
		uint32_t k = n < sizeof buf ? n : (uint32_t)sizeof buf;

		if (!rx(buf, k))
			return false;
		fwrite(buf, 1, k, stdout);
		n -= k;
	}
	return true;
}

static bool rx_frame(void)
{
	struct in_hdr h;

	if (!rx(&h, sizeof h))
		return false;
	if (h.size > MAX_FRAME) {
		die(CUDA_ERROR_UNKNOWN, "frame beyond its limit");
		return false;
	}
	switch (h.kind) {
	case K_REPLY:
		return rx_reply(&h);
	case K_DATA:
		return rx_data(&h);
	case K_EVENT:
		if (h.result) {
			note_error(h.result);
			sl_on_error(h.op, h.result);
			sl_on_event_error(h.arg);
		} else {
			sl_on_event(h.arg, h.call);
		}
		break;
	case K_ERROR:
		sl_log(SL_WARN, "%s failed on the worker: error %d", sl_op_name(h.op), h.result);
		note_error(h.result);
		sl_on_error(h.op, h.result);
		break;
	case K_PRINT:
		return rx_print(h.size);
	case K_HOSTFN:
		sl_on_hostfn(h.arg);
		break;
	case K_BYE: {
		char why[512] = "";
		uint32_t n = h.size < sizeof why - 1 ? h.size : (uint32_t)sizeof why - 1;

		if (rx(why, n))
			die(h.result ? h.result : CUDA_ERROR_DEVICE_UNAVAILABLE, why);
		return false;
	}
	case K_BEAT:
		break;
	default:
		die(CUDA_ERROR_UNKNOWN, "frame of unknown kind");
		return false;
	}
	return rx(NULL, h.size);
}

static void *receiver(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "sluice-recv");
	while (rx_frame())
		;
	die(CUDA_ERROR_DEVICE_UNAVAILABLE, "receiver ended");
	pthread_mutex_lock(&S.wait_lock);
	for (int i = 0; i < WAIT_BUCKETS; i++)
		while (S.waiting[i]) {
			struct waiter *w = S.waiting[i];

			S.waiting[i] = w->next;
			w->r->result = sl_dead();
			wake_waiter(w);
		}
	pthread_mutex_unlock(&S.wait_lock);
	sl_delivery_wake();
	return NULL;
}

/* With shared memory nothing comes over the socket but its end. */
static void *watcher(void *arg)
{
	struct timeval never = { 0, 0 };
	ssize_t n;
	char c;

	(void)arg;
	prctl(PR_SET_NAME, "sluice-watch");
	setsockopt(S.fd, SOL_SOCKET, SO_RCVTIMEO, &never, sizeof never);
	do
		n = recv(S.fd, &c, 1, 0);
	while (n > 0 || (n < 0 && errno == EINTR));
	sl_shm_close(S.shm);
	return NULL;
}

/* ---- start ---- */

static CUresult start_threads(void)
{
	pthread_attr_t attr;
	sigset_t all, old;
	pthread_t t;
	int err;

	/* The program's signals are the program's: ours are all blocked. */
	sigfillset(&all);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 256 << 10);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	err = pthread_create(&t, &attr, receiver, NULL);
	if (!err)
		err = pthread_create(&t, &attr, sender, NULL);
	if (!err && S.shm)
		err = pthread_create(&t, &attr, watcher, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	return err ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult start(void)
{
	CUresult err;
	uint32_t *page;
	int shm;

	err = sl_connect(1, &S.fd, &S.snap, &shm);
	if (err)
		return err;
	if (shm >= 0 && !(S.shm = sl_shm_attach(shm))) {
		sl_log(SL_ERROR, "the worker's shared memory cannot be mapped: %s", strerror(errno));
		close(S.fd);
		return CUDA_ERROR_SYSTEM_NOT_READY;
	}
	S.ring = mmap(NULL, RING, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	S.rx = malloc(RXBUF);
	S.waits_by_op = calloc(SL_NOPS + 16, sizeof *S.waits_by_op);
	if (S.ring == MAP_FAILED || page == MAP_FAILED || !S.rx || !S.waits_by_op) {
		close(S.fd);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
#ifdef MADV_WIPEONFORK
	madvise(page, 4096, MADV_WIPEONFORK);
#endif
	S.pid = getpid();
	*page = 1;
	__atomic_store_n(&S.state, ST_LIVE, __ATOMIC_RELEASE);
	sl_live = page;
	err = start_threads();
	if (err) {
		die(err, "no thread could be started");
		return err;
	}
	if (__register_atfork)
		__register_atfork(NULL, NULL, in_child, NULL);
	__cxa_atexit(at_exit, NULL, NULL);
	return CUDA_SUCCESS;
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
	log_level();
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
