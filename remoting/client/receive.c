/*
 * The way in. The receiver thread reads frames: a REPLY wakes its caller, DATA goes straight
 * from the socket to the program's memory, and everything else is handed to the part it
 * belongs to, which must not block. Nothing is written anywhere before its size is checked.
 */
#include "attention.h"
#include "bulk.h"
#include "codec.h"
#include "delivery.h"
#include "entry.h"
#include "errstate.h"
#include "event.h"
#include "gen.h"
#include "hostfn.h"
#include "log.h"
#include "mapped.h"
#include "peer.h"
#include "print.h"
#include "resume.h"
#include "session.h"
#include "shmring.h"
#include "timeline.h"
#include "../verbs/rdma.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

ssize_t sl_socket_read(struct sl_peer *t, void *p, size_t n)
{
	int64_t since = 0;

	while (sl_look(&since, &t->waiters)) {
		ssize_t r = t->rdma ? sl_rdma_read(t->rdma, p, n, 0) : recv(t->fd, p, n, MSG_DONTWAIT);

		if (r >= 0 || errno != EAGAIN)
			return r;
	}
	return t->rdma ? sl_rdma_read(t->rdma, p, n, (int)t->keepalive_ms) : recv(t->fd, p, n, 0);
}

/* Receives some bytes; 0 at the end, -1 with errno. */
static ssize_t rx_some(struct sl_peer *t, void *p, size_t n)
{
	if (t->shm)
		return sl_shm_read(t->shm, p, n, &t->waiters, (int)t->keepalive_ms);
	if (t->again)
		return sl_resume_read(t, p, n);
	return sl_socket_read(t, p, n);
}

/*
 * How much is read into rx at once; more than that goes straight to where it belongs. What a session that is resumed has
 * read lies in a buffer of pieces: to take little of it costs no system call, and to take much is a copy for nothing.
 */
static size_t rx_most(const struct sl_peer *t)
{
	return t->again ? 2048 : SL_RXBUF;
}

static bool rx_fill(struct sl_peer *t)
{
	for (;;) {
		ssize_t n = rx_some(t, t->rx, rx_most(t));

		if (n > 0) {
			t->rx_at = 0;
			t->rx_n = (size_t)n;
			t->bytes_in += (uint64_t)n;
			return true;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			sl_die(CUDA_ERROR_DEVICE_UNAVAILABLE, "the worker closed the connection");
		else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETIMEDOUT)
			sl_die(CUDA_ERROR_DEVICE_UNAVAILABLE, "no sign of life from the worker within the keep-alive time");
		else
			sl_die(CUDA_ERROR_DEVICE_UNAVAILABLE, strerror(errno));
		return false;
	}
}

/* Reads exactly n bytes; large ones go directly from the socket to dst. dst NULL discards them. */
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
		if (p && n >= rx_most(t)) {
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

/* From then on the gate is closed: calls that are answered here must return a sticky error too. */
static void note_error(CUresult r)
{
	if (sl_error_result(r))
		sl_gate_close();
}

static bool rx_reply(struct sl_peer *t, const struct wire_reply *h)
{
	struct sl_waiter *w = sl_waiter_take(t, h->call);
	sl_reply *r;
	bool ok;

	if (!w)
		return rx(t, NULL, h->size);
	r = sl_waiter_reply(w);
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
	sl_answered(&t->waiters);
	sl_waiter_wake(w);
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
		sl_die(CUDA_ERROR_UNKNOWN, "malformed data frame");
		return false;
	}
	if (!rx(t, &head, sizeof head))
		return false;
	off = head.offset;
	open = sl_delivery_find(h->call, &d);
	if (!open) {
		ok = rx(t, NULL, n);
	} else if (off > d.n || n > d.n - off) {
		sl_die(CUDA_ERROR_UNKNOWN, "data frame beyond the memory it was asked for");
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

static bool rx_host(struct sl_peer *t, uint32_t n)
{
	struct wire_host_merge head;
	uint8_t *rest;
	bool ok;

	if (n < sizeof head || !rx(t, &head, sizeof head))
		return false;
	n -= sizeof head;
	if (!head.size || head.size % 8 || head.size > SL_MAX_MERGE || n != head.size / 8 + head.size) {
		sl_die(CUDA_ERROR_UNKNOWN, "malformed frame of host memory");
		return false;
	}
	rest = malloc(n);
	if (!rest) {
		sl_die(CUDA_ERROR_OUT_OF_MEMORY, "no memory for what the GPU has written");
		return false;
	}
	ok = rx(t, rest, n);
	if (ok)
		sl_mapped_changed(head.dst, head.size, rest, rest + head.size / 8);
	free(rest);
	return ok;
}

static bool rx_print(struct sl_peer *t, uint32_t stream, uint32_t n)
{
	char buf[4096];

	while (n) {
		uint32_t k = n < sizeof buf ? n : (uint32_t)sizeof buf;

		if (!rx(t, buf, k))
			return false;
		sl_print_add(stream == SL_PRINT_STDERR, buf, k);
		n -= k;
	}
	return true;
}

static bool rx_trace(struct sl_peer *t, const struct wire_reply *h)
{
	uint8_t *p = malloc(h->size + 1u);
	bool ok = rx(t, p, h->size);

	if (ok)
		sl_timeline_add(t, p, p ? h->size : 0, h->arg & SL_TRACE_LAST);
	free(p);
	return ok;
}

/* The program's memory has what a frame brought. */
static bool wrote(struct sl_peer *t)
{
	if (t->bulk)
		sl_bulk_wrote(t->bulk);
	return true;
}

static bool rx_frame(struct sl_peer *t)
{
	struct wire_reply h;

	if (!rx(t, &h, sizeof h))
		return false;
	if (h.size > SL_MAX_PAYLOAD) {
		sl_die(CUDA_ERROR_UNKNOWN, "frame beyond its limit");
		return false;
	}
	switch (h.kind) {
	case SL_FRAME_REPLY:
		return rx_reply(t, &h);
	case SL_FRAME_DATA:
		return rx_data(t, &h) && wrote(t);
	case SL_FRAME_EVENT:
		if (h.result) {
			if (sl_error_oneway(h.result))
				sl_gate_close();
			sl_on_event_error(h.arg);
		} else {
			sl_on_event(h.arg, h.call);
		}
		break;
	case SL_FRAME_ERROR:
		if (h.op == CTL_HOST_MERGE && h.result == CUDA_ERROR_NOT_SUPPORTED)
			sl_mirror_clashed();
		else
			sl_log(SL_WARN, "%s failed on the worker: error %d", sl_op_name(h.op), h.result);
		if (sl_error_oneway(h.result))
			sl_gate_close();
		break;
	case SL_FRAME_PRINT:
		return rx_print(t, h.arg, h.size);
	case SL_FRAME_HOST:
		return rx_host(t, h.size) && wrote(t);
	case SL_FRAME_HOSTFN:
		sl_on_hostfn(h.arg, h.result);
		break;
	case SL_FRAME_HOSTFN_GONE:
		sl_on_hostfn_gone(h.arg);
		break;
	case SL_FRAME_BYE: {
		char why[512] = "";
		uint32_t n = h.size < sizeof why - 1 ? h.size : (uint32_t)sizeof why - 1;

		if (rx(t, why, n))
			sl_die(h.result ? h.result : CUDA_ERROR_DEVICE_UNAVAILABLE, why);
		return false;
	}
	case SL_FRAME_BEAT:
		break;
	case SL_FRAME_TRACE:
		return rx_trace(t, &h);
	case SL_FRAME_TURN:
		sl_waiters_attend(t, h.arg);
		break;
	default:
		sl_die(CUDA_ERROR_UNKNOWN, "frame of unknown kind");
		return false;
	}
	return rx(t, NULL, h.size);
}

void *sl_receiver(void *arg)
{
	struct sl_peer *t = arg;

	prctl(PR_SET_NAME, "sluice-recv");
	while (rx_frame(t))
		;
	sl_die(CUDA_ERROR_DEVICE_UNAVAILABLE, "receiver ended");
	while (sl_exiting()) /* threads that wait end with the process, and see no error before (end_sessions) */
		pause();
	sl_delivery_settle();
	sl_waiters_end(t);
	sl_delivery_wake();
	return NULL;
}

void *sl_watcher(void *arg)
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
