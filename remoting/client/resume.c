/* See resume.h. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "resume.h"
#include "connect.h"
#include "deadline.h"
#include "log.h"
#include "peer.h"
#include "rdmalink.h"
#include "session.h"
#include "../verbs/rdma.h"

#define RAW (64u << 10)		/* pieces that have been read and not taken apart */
#define STRAIGHT (32u << 10)	/* reads of this size and more go past them */
#define PIECE_MOST (1u << 20)	/* bytes in one piece */
#define TELL (SL_PIECE_WINDOW / 4)	/* after so many received bytes a piece acknowledges them, even if there is nothing to send */
#define ATTEMPT_MS 5000		/* patience of one attempt, for each step */
#define NAP_LEAST_MS 10
#define NAP_MOST_MS 500

struct sl_resume {
	uint8_t key[16];
	uint32_t session;
	uint32_t grace_ms;
	char owner[64];		/* for messages */
	struct sl_connection next; /* being made */

	/* under drain */
	uint64_t sent;
	bool cut;

	/* between threads */
	uint64_t got;		/* bytes of the stream that have been received; the receiver's */
	uint32_t due;		/* a piece is to be sent even if it is empty */
	uint32_t room, waits;	/* room is a futex */

	/* the receiver's */
	uint64_t told;		/* got when due was last set */
	size_t left;		/* bytes of the present piece that have not been taken */
	size_t at, n;
	uint8_t raw[RAW];
};

struct sl_pauses sl_pauses;

static void name_owner(int fd, char *to, size_t cap)
{
	union {
		struct sockaddr any;
		struct sockaddr_in v4;
		struct sockaddr_in6 v6;
	} a;
	socklen_t len = sizeof a;
	char host[INET6_ADDRSTRLEN] = "";

	snprintf(to, cap, "the owner of the GPU");
	if (getpeername(fd, &a.any, &len))
		return;
	if (a.any.sa_family == AF_INET && inet_ntop(AF_INET, &a.v4.sin_addr, host, sizeof host))
		snprintf(to, cap, "%s:%u", host, ntohs(a.v4.sin_port));
	else if (a.any.sa_family == AF_INET6 && inet_ntop(AF_INET6, &a.v6.sin6_addr, host, sizeof host))
		snprintf(to, cap, "[%s]:%u", host, ntohs(a.v6.sin6_port));
}

/* Sends a piece whole, or gives the connection up: the receiver finds out. */
static bool send_piece(struct sl_peer *t, struct iovec *iov, int n)
{
	if (sl_send_parts(t, iov, n))
		return true;
	__atomic_store_n(&t->again->cut, true, __ATOMIC_RELEASE);
	shutdown(t->fd, SHUT_RDWR);
	return false;
}

/* Tells the worker that its WELCOME has come, so that a lost connection is waited for. */
static void confirm(struct sl_peer *t)
{
	struct wire_piece h = { .size = 0 };

	send_piece(t, &(struct iovec){ &h, sizeof h }, 1);
}

bool sl_resume_start(struct sl_peer *t, const struct sl_connection *c)
{
	struct sl_resume *r = calloc(1, sizeof *r);

	if (!r)
		return false;
	memcpy(r->key, c->again.key, sizeof r->key);
	r->session = c->again.session;
	r->grace_ms = c->again.grace_ms;
	r->next.fd = r->next.shm = -1;
	name_owner(c->fd, r->owner, sizeof r->owner);
	t->again = r;
	confirm(t);
	return true;
}

void sl_resume_drop(struct sl_peer *t)
{
	free(t->again);
	t->again = NULL;
}

/* ---- out ---- */

bool sl_resume_pending(struct sl_peer *t)
{
	const struct sl_resume *r = t->again;

	return !__atomic_load_n(&r->cut, __ATOMIC_ACQUIRE) &&
	       (__atomic_load_n(&r->due, __ATOMIC_ACQUIRE) ||
		__atomic_load_n(&t->head, __ATOMIC_ACQUIRE) != __atomic_load_n(&r->sent, __ATOMIC_ACQUIRE));
}

void sl_resume_send(struct sl_peer *t)
{
	struct sl_resume *r = t->again;

	for (;;) {
		uint64_t head = __atomic_load_n(&t->head, __ATOMIC_ACQUIRE), n = head - r->sent;
		bool due = __atomic_exchange_n(&r->due, 0, __ATOMIC_ACQ_REL);
		size_t at = r->sent & (t->ring_size - 1), first = t->ring_size - at;
		struct wire_piece h;
		struct iovec iov[3];

		/* A session that has ended discards what is left, so that no caller waits for room, and the end of the process not for a slow link. */
		if (sl_ended()) {
			__atomic_store_n(&r->sent, head, __ATOMIC_RELEASE);
			__atomic_store_n(&t->tail, head, __ATOMIC_RELEASE);
			return;
		}
		if (r->cut || (!n && !due))
			return;
		if (n > PIECE_MOST)
			n = PIECE_MOST;
		if (first > n)
			first = n;
		h = (struct wire_piece){ .received = __atomic_load_n(&r->got, __ATOMIC_ACQUIRE), .size = (uint32_t)n };
		iov[0] = (struct iovec){ &h, sizeof h };
		iov[1] = (struct iovec){ t->ring + at, first };
		iov[2] = (struct iovec){ t->ring, n - first };
		if (!send_piece(t, iov, n > first ? 3 : n ? 2 : 1))
			return;
		__atomic_store_n(&r->sent, r->sent + n, __ATOMIC_RELEASE);
	}
}

void sl_resume_room(struct sl_peer *t, size_t n)
{
	const struct timespec look = { 0, 100000000 };
	struct sl_resume *r = t->again;

	for (;;) {
		uint32_t seen = __atomic_load_n(&r->room, __ATOMIC_SEQ_CST);

		if (__atomic_load_n(&t->head, __ATOMIC_RELAXED) + n - __atomic_load_n(&t->tail, __ATOMIC_ACQUIRE) <= t->ring_size)
			return;
		sl_drain(t);
		__atomic_store_n(&r->waits, 1, __ATOMIC_SEQ_CST);
		if (__atomic_load_n(&t->head, __ATOMIC_RELAXED) + n - __atomic_load_n(&t->tail, __ATOMIC_SEQ_CST) > t->ring_size)
			sl_futex_wait(&r->room, seen, &look);
	}
}

static void wake_room(struct sl_resume *r)
{
	if (__atomic_exchange_n(&r->waits, 0, __ATOMIC_SEQ_CST)) {
		__atomic_fetch_add(&r->room, 1, __ATOMIC_SEQ_CST);
		sl_futex_wake(&r->room);
	}
}

/* ---- in ---- */

/* Has the sender say what has been received. The receiver must not write to the socket: it might wait for itself. */
static void tell(struct sl_peer *t)
{
	struct sl_resume *r = t->again;

	r->told = r->got;
	__atomic_store_n(&r->due, 1, __ATOMIC_SEQ_CST);
	if (__atomic_exchange_n(&t->sender_sleeps, 0, __ATOMIC_SEQ_CST))
		sl_futex_wake(&t->sender_sleeps);
}

static void took(struct sl_peer *t, size_t n)
{
	struct sl_resume *r = t->again;

	r->left -= n;
	__atomic_store_n(&r->got, r->got + n, __ATOMIC_RELEASE);
	if (r->got - r->told >= TELL)
		tell(t);
}

/* Begins a piece; false if it makes no sense. */
static bool piece(struct sl_peer *t)
{
	struct sl_resume *r = t->again;
	struct wire_piece h;
	uint64_t tail = t->tail;

	memcpy(&h, r->raw + r->at, sizeof h);
	r->at += sizeof h;
	if (h.flags || h.size > SL_PIECE_WINDOW || h.received < tail || h.received > __atomic_load_n(&t->head, __ATOMIC_ACQUIRE)) {
		sl_die(CUDA_ERROR_UNKNOWN, "malformed piece of the stream");
		return false;
	}
	r->left = h.size;
	if (h.received != tail) {
		__atomic_store_n(&t->tail, h.received, __ATOMIC_SEQ_CST);
		wake_room(r);
	}
	return true;
}

static bool make_again(struct sl_peer *t, const char *why);

/* Reads from the socket; 0 when another connection has taken its place, and the present piece is none any more. */
static ssize_t socket_read(struct sl_peer *t, void *p, size_t n)
{
	ssize_t k;

	do
		k = sl_socket_read(t, p, n);
	while (k < 0 && errno == EINTR);
	if (k > 0)
		return k;
	if (make_again(t, k == 0 ? "it was closed" : errno == EAGAIN ? "no sign of life" : strerror(errno)))
		return 0;
	errno = ECONNRESET;
	return -1;
}

ssize_t sl_resume_read(struct sl_peer *t, void *p, size_t n)
{
	struct sl_resume *r = t->again;
	ssize_t k;

	for (;;) {
		if (r->left && r->at < r->n) {
			size_t have = r->n - r->at;

			if (have > r->left)
				have = r->left;
			if (have > n)
				have = n;
			memcpy(p, r->raw + r->at, have);
			r->at += have;
			took(t, have);
			return (ssize_t)have;
		}
		if (r->left >= STRAIGHT && n >= STRAIGHT) {
			k = socket_read(t, p, n < r->left ? n : r->left);
			if (k > 0)
				took(t, (size_t)k);
			if (k)
				return k;
			continue;
		}
		if (!r->left && r->n - r->at >= sizeof(struct wire_piece)) {
			if (!piece(t)) {
				errno = EPROTO;
				return -1;
			}
			continue;
		}
		memmove(r->raw, r->raw + r->at, r->n - r->at);
		r->n -= r->at;
		r->at = 0;
		k = socket_read(t, r->raw + r->n, RAW - r->n);
		if (k < 0)
			return -1;
		r->n += (size_t)k;
	}
}

/* ---- making the connection again ---- */

static const char *duration(char *to, size_t cap, uint64_t ms)
{
	if (ms < 60000)
		snprintf(to, cap, "%llu.%llus", (unsigned long long)ms / 1000, (unsigned long long)ms % 1000 / 100);
	else
		snprintf(to, cap, "%llum%llus", (unsigned long long)ms / 60000, (unsigned long long)ms % 60000 / 1000);
	return to;
}

/* Puts the new connection in the place of the old one; false when the session has ended. */
static bool go_on(struct sl_peer *t, const struct wire_attached *a)
{
	struct sl_resume *r = t->again;
	bool good, ended;

	pthread_mutex_lock(&t->drain);
	good = a->received >= t->tail && a->received <= __atomic_load_n(&t->head, __ATOMIC_ACQUIRE) && syscall(SYS_dup3, r->next.fd, t->fd, O_CLOEXEC) >= 0;
	if (good) {
		memcpy(r->key, a->key, sizeof r->key);
		r->at = r->n = r->left = 0;
		__atomic_store_n(&r->sent, a->received, __ATOMIC_RELEASE);
		__atomic_store_n(&t->tail, a->received, __ATOMIC_SEQ_CST);
		__atomic_store_n(&r->cut, false, __ATOMIC_RELEASE);
	}
	close(r->next.fd);
	r->next.fd = -1;
	/* Over another connection the stream goes by TCP: what has failed may fail again. */
	sl_rdma_drop(t);
	/* The session may have ended meanwhile, and sl_die have shut down the old connection. A process that ends says goodbye over the new one. */
	ended = sl_broken();
	if (ended)
		shutdown(t->fd, SHUT_RDWR);
	pthread_mutex_unlock(&t->drain);
	if (!good) {
		sl_die(CUDA_ERROR_UNKNOWN, "the worker says to have received what was not sent");
		return false;
	}
	wake_room(r);
	if (ended)
		return false;
	tell(t);
	return true;
}

static bool try_until(struct sl_peer *t, int64_t deadline, const char *grace)
{
	struct sl_resume *r = t->again;
	int nap = NAP_LEAST_MS;
	char why[600];

	for (;;) {
		struct wire_attach a = { .received = r->got };
		struct wire_attached answer;
		char reason[512] = "";
		int64_t left;
		const struct sl_ask ask = { .kind = SL_SESSION_ATTACH, .owner = t->index, .quiet = true, .patience_ms = ATTEMPT_MS, .until = deadline };
		enum sl_connected rc;

		if (sl_ended())
			return false;
		memcpy(a.key, r->key, sizeof a.key);
		rc = sl_connect_again(&ask, r->session, &a, t->keepalive_ms, &r->next, &answer, reason, sizeof reason);
		if (!rc)
			return go_on(t, &answer);
		if (rc == SL_DENIED) {
			snprintf(why, sizeof why, "the connection to %s was lost, and the session has ended%s%s", r->owner, *reason ? ": " : "", reason);
			sl_die(CUDA_ERROR_DEVICE_UNAVAILABLE, why);
			return false;
		}
		left = deadline - sl_now_ms();
		if (left <= 0) {
			snprintf(why, sizeof why, "the connection to %s was lost, and could not be made again within %s%s%s", r->owner, grace,
				 *reason ? ": " : "", reason);
			sl_die(CUDA_ERROR_DEVICE_UNAVAILABLE, why);
			return false;
		}
		nanosleep(&(struct timespec){ 0, (left < nap ? left : nap) * 1000000L }, NULL);
		if ((nap *= 2) > NAP_MOST_MS)
			nap = NAP_MOST_MS;
	}
}

/* The connection is lost; false when the session has ended. */
static bool make_again(struct sl_peer *t, const char *why)
{
	struct sl_resume *r = t->again;
	int64_t began = sl_now_ms(), lost = sl_clock_ms(CLOCK_BOOTTIME), took_ms;
	char grace[32], lasted[32];
	bool back;

	if (sl_ended())
		return false;
	shutdown(t->fd, SHUT_RDWR); /* the thread that writes to it holds drain */
	pthread_mutex_lock(&t->drain);
	__atomic_store_n(&r->cut, true, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&t->drain);
	sl_log(SL_ERROR, "connection to %s lost (%s), trying again for up to %s", r->owner, why, duration(grace, sizeof grace, r->grace_ms));
	back = try_until(t, began + r->grace_ms, grace);
	took_ms = sl_clock_ms(CLOCK_BOOTTIME) - lost; /* with the time that the machine was suspended */
	__atomic_fetch_add(&sl_pauses.number, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&sl_pauses.ms, (uint64_t)took_ms, __ATOMIC_RELAXED);
	if (back)
		sl_log(SL_ERROR, "connection to %s is back after %s", r->owner, duration(lasted, sizeof lasted, (uint64_t)took_ms));
	return back;
}

/* ---- ends ---- */

/* Sends the last n bytes over the socket, which may be full of what a copy has left there. */
static bool send_last(struct sl_peer *t, const void *p, size_t n, int64_t deadline)
{
	for (;;) {
		struct pollfd w = { .fd = t->fd, .events = POLLOUT };
		int64_t left = deadline - sl_now_ms();

		if (send(t->fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)n)
			return true;
		if (errno != EAGAIN || left <= 0 || poll(&w, 1, (int)left) < 0)
			return false;
	}
}

bool sl_resume_bye(struct sl_peer *t, int64_t deadline)
{
	struct wire_piece h = { .received = t->again->got, .flags = SL_PIECE_BYE };
	const struct timespec nap = { 0, 100000 };
	int queued = 0;
	bool sent = false;

	while (pthread_mutex_trylock(&t->drain)) {
		if (sl_now_ms() >= deadline)
			return false;
		nanosleep(&nap, NULL);
	}
	if (!t->again->cut)
		sent = t->rdma ? sl_rdma_last(t->rdma, &h, sizeof h, deadline) : send_last(t, &h, sizeof h, deadline);
	if (sent) {
		/* The worker may be busy, and looks at what it has been sent once the stream ends. */
		shutdown(t->fd, SHUT_WR);
		/* A process that ends with bytes that it has not read takes back what its kernel has not sent. */
		while (!ioctl(t->fd, SIOCOUTQ, &queued) && queued > 0 && sl_now_ms() < deadline)
			nanosleep(&nap, NULL);
	}
	t->again->cut = true;
	pthread_mutex_unlock(&t->drain);
	return sent && queued <= 0;
}

void sl_resume_forked(struct sl_peer *t)
{
	if (t->again->next.fd >= 0)
		close(t->again->next.fd);
}
