/*
 * Copies from the device by bulk connections. A connection's thread reads a part's head, asks delivery.c whether the part is for memory
 * of an open delivery, reads the bytes straight into that memory, and answers. The part says how many frames with bytes the worker
 * sent before it. The thread first waits until the receiver has written those, because they may be of an earlier copy to the same
 * memory. When the receiver ends a delivery with its last frame, it ends such reads as well (delivery.h). Memory is touched in
 * system calls only: if it is protected, the connection ends, and the worker sends the bytes in frames.
 */
#include "bulk.h"
#include "deadline.h"
#include "delivery.h"
#include "log.h"
#include "peer.h"
#include "session.h"
#include "stats.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define ROWS 128	/* in one system call */

static bool read_some(int fd, struct iovec *iov, size_t n, size_t *got)
{
	struct msghdr m = { .msg_iov = iov, .msg_iovlen = n };
	ssize_t r;

	do
		r = recvmsg(fd, &m, MSG_WAITALL);
	while (r < 0 && errno == EINTR);
	if (r <= 0)
		return false;
	*got = (size_t)r;
	__atomic_fetch_add(&sl_stats.bulk_bytes_in, *got, __ATOMIC_RELAXED);
	return true;
}

static bool read_all(int fd, void *p, size_t n)
{
	for (size_t at = 0, got; at < n; at += got)
		if (!read_some(fd, &(struct iovec){ (char *)p + at, n - at }, 1, &got))
			return false;
	return true;
}

static bool discard(int fd, size_t n)
{
	char buf[16 << 10];

	for (size_t k; n; n -= k) {
		k = n < sizeof buf ? n : sizeof buf;
		if (!read_all(fd, buf, k))
			return false;
	}
	return true;
}

/* Where n bytes of a delivery go from off on: as many rows as fit. */
static size_t rows_at(const struct sl_delivery *d, uint64_t off, size_t n, struct iovec *iov)
{
	size_t i;

	if (!d->width) {
		iov[0] = (struct iovec){ d->dst + off, n };
		return 1;
	}
	for (i = 0; n && i < ROWS; i++) {
		uint64_t row = off / d->width, x = off % d->width, k = d->width - x;

		if (k > n)
			k = n;
		iov[i] = (struct iovec){ d->dst + row / d->h * d->slice + row % d->h * d->pitch + x, k };
		off += k;
		n -= k;
	}
	return i;
}

static bool fill(int fd, const struct sl_delivery *d, uint64_t off, size_t n)
{
	struct iovec iov[ROWS];
	size_t got;

	for (; n; off += got, n -= got)
		if (!read_some(fd, iov, rows_at(d, off, n, iov), &got))
			return false;
	return true;
}

static bool answer(int fd, const struct wire_bulk_part *h)
{
	const struct wire_bulk_taken t = { .number = h->number, .offset = h->offset };
	size_t at = 0;

	while (at < sizeof t) {
		ssize_t w = send(fd, (const char *)&t + at, sizeof t - at, MSG_NOSIGNAL);

		if (w < 0 && errno == EINTR)
			continue;
		if (w <= 0)
			return false;
		at += (size_t)w;
	}
	__atomic_fetch_add(&sl_stats.bytes_out, sizeof t, __ATOMIC_RELAXED);
	return true;
}

void sl_bulk_wrote(struct sl_bulk *b)
{
	__atomic_fetch_add(&b->wrote, 1, __ATOMIC_SEQ_CST);
	if (__builtin_expect(__atomic_load_n(&b->wrote_waits, __ATOMIC_SEQ_CST), 0))
		sl_futex_wake(&b->wrote);
}

/*
 * Waits for frames that were sent before a part and may still be on their way over the other connection. False: they do not come
 * soon, and the worker should send the bytes in their place behind them.
 */
static bool in_order(struct sl_peer *t, uint32_t after)
{
	const struct timespec look = { 0, 100000000 };
	int64_t until = sl_now_ms() + t->keepalive_ms;
	struct sl_bulk *b = t->bulk;
	uint32_t seen;
	bool good;

	__atomic_fetch_add(&b->wrote_waits, 1, __ATOMIC_SEQ_CST);
	while (!(good = (int32_t)((seen = __atomic_load_n(&b->wrote, __ATOMIC_SEQ_CST)) - after) >= 0) && !sl_ended() && sl_now_ms() < until)
		sl_futex_wait(&b->wrote, seen, &look);
	__atomic_fetch_sub(&b->wrote_waits, 1, __ATOMIC_SEQ_CST);
	return good;
}

/* Receives one part. */
static bool take(struct sl_bulk_line *l)
{
	struct sl_writer w = { .fd = l->c.fd };
	struct sl_delivery d;
	struct wire_bulk_part h;
	bool good;

	if (!read_all(w.fd, &h, sizeof h))
		return false;
	if (!h.size || h.size > SL_MAX_BULK_PART || h.number > UINT32_MAX) {
		sl_log(SL_WARN, "malformed part of a copy from the device");
		return false;
	}
	if (!in_order(l->t, h.after)) {
		sl_log(SL_DEBUG, "a part of a copy from the device came long before frames that were sent earlier");
		return false;
	}
	switch (sl_delivery_write(&w, (uint32_t)h.number, h.offset, h.size, &d)) {
	case SL_WRITE_GO:
		good = fill(w.fd, &d, h.offset, h.size);
		sl_delivery_written(&w);
		if (good)
			__atomic_fetch_add(&sl_stats.bulk_in, h.size, __ATOMIC_RELAXED);
		break;
	case SL_WRITE_NONE:
		good = discard(w.fd, h.size);
		break;
	default:
		sl_log(SL_WARN, "a part of a copy from the device is beyond the memory that it was asked for");
		return false;
	}
	return good && answer(w.fd, &h);
}

bool sl_bulk_receive(struct sl_bulk_line *l)
{
	struct sl_bulk *b = l->t->bulk;
	struct pollfd p = { .fd = l->c.fd, .events = POLLIN };

	while (!sl_ended()) {
		int n = poll(&p, 1, SL_BULK_IDLE_MS);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return !n;
		if (!take(l))
			return false;
		pthread_mutex_lock(&b->lock);
		l->failed = 0;
		pthread_mutex_unlock(&b->lock);
	}
	return true;
}
