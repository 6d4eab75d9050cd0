/*
 * Copies to the device by bulk connections. The caller makes a job and waits for it; one job of a session at a time. It is a thread of the
 * program's, or the one for copies in the background (background.h). The threads of connections take parts of the job and send them, at
 * most UNANSWERED before the first of them is answered. The caller sends a frame for each part, once it knows what became of the part:
 * COPY_IN_BULK if the worker has answered it, the bytes themselves if its connection has failed. So it knows which frame is the last.
 * While no connection is up, it sends all bytes in frames.
 *
 * The threads of connections touch the source in system calls only. If its memory is protected, the connection ends, and the
 * caller sends the bytes as it does without a connection. The job is on the caller's stack. It ends when no thread has a part of it.
 */
#include "bulk.h"
#include "ctx.h"
#include "deadline.h"
#include "peer.h"
#include "send.h"
#include "session.h"
#include "stats.h"
#include "upload.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define UNANSWERED 2
#define ROOM 64		/* parts that threads have, or that have no frame yet */

enum { TAKEN, LOST, UNSENT };

struct part {
	const uint8_t *from;
	size_t at;
	uint32_t size;
	uint64_t number;
	int state;
};

struct sl_bulk_job {
	const uint8_t *src;
	size_t n, next;		/* bytes, and those of them that were given out as parts */
	unsigned out;		/* parts that threads have */
	unsigned ndone;
	struct part done[ROOM];
};

_Static_assert(SL_MAX_BULK * UNANSWERED < ROOM && SL_MAX_BULK * UNANSWERED < SL_MAX_BULK_DROPS, "too many parts at a time");

/* ---- a connection ---- */

enum step { SEND, READ, END };

/* The next part of a job. Called with the lock held. */
static struct part cut(struct sl_bulk_job *j)
{
	size_t left = j->n - j->next;
	struct part p = { .from = j->src + j->next, .at = j->next, .state = UNSENT, .size = left < SL_MAX_BULK_PART ? (uint32_t)left : SL_MAX_BULK_PART };

	j->next += p.size;
	return p;
}

/* The next step of a connection with n unanswered parts. A part to send is at *p. */
static enum step next(struct sl_bulk_line *l, unsigned n, struct part *p)
{
	struct sl_bulk *b = l->t->bulk;
	int64_t until = sl_now_ms() + SL_BULK_IDLE_MS, left;
	enum step what = n ? READ : END;

	pthread_mutex_lock(&b->lock);
	for (;;) {
		struct sl_bulk_job *j = b->job;

		if (sl_ended())
			what = END;
		if (sl_ended() || n == UNANSWERED)
			break;
		if (j && j->next < j->n && j->out + j->ndone < ROOM) {
			*p = cut(j);
			p->number = ++b->number;
			j->out++;
			what = SEND;
			break;
		}
		left = until - sl_now_ms();
		if (n || left <= 0)
			break;
		sl_cond_wait(&b->work, &b->lock, left);
	}
	if (what == END)
		sl_bulk_down(l);
	pthread_mutex_unlock(&b->lock);
	return what;
}

/* Gives parts back to the program's thread, once it is known whether the worker has them. Called with the lock held. */
static void give(struct sl_bulk *b, const struct part *p, unsigned n)
{
	struct sl_bulk_job *j = b->job;

	for (unsigned i = 0; i < n; i++) {
		j->done[j->ndone++] = p[i];
		j->out--;
	}
	sl_cond_broadcast(&b->change);
}

static bool send_part(struct sl_bulk_line *l, struct part *p)
{
	struct wire_bulk_part h = { .number = p->number, .size = p->size };
	struct iovec iov[2] = { { &h, sizeof h }, { (void *)(uintptr_t)p->from, p->size } };
	struct msghdr m = { .msg_iov = iov, .msg_iovlen = 2 };

	while (m.msg_iovlen) {
		ssize_t w = sendmsg(l->c.fd, &m, MSG_NOSIGNAL);

		if (w < 0 && errno == EINTR)
			continue;
		if (w <= 0)
			return false;
		__atomic_fetch_add(&sl_stats.bytes_out, (uint64_t)w, __ATOMIC_RELAXED);
		while (m.msg_iovlen && (size_t)w >= m.msg_iov->iov_len) {
			w -= (ssize_t)m.msg_iov->iov_len;
			m.msg_iov++;
			m.msg_iovlen--;
		}
		if (m.msg_iovlen) {
			m.msg_iov->iov_base = (char *)m.msg_iov->iov_base + w;
			m.msg_iov->iov_len -= (size_t)w;
		}
	}
	/* Before this the worker cannot have the whole part, and never will. */
	p->state = LOST;
	__atomic_fetch_add(&sl_stats.bulk_out, p->size, __ATOMIC_RELAXED);
	return true;
}

/* Reads the answer to a part. */
static bool answered(struct sl_bulk_line *l, struct part *p)
{
	struct sl_bulk *b = l->t->bulk;
	struct wire_bulk_taken h;

	do {
		for (size_t got = 0; got < sizeof h;) {
			ssize_t r = recv(l->c.fd, (char *)&h + got, sizeof h - got, MSG_WAITALL);

			if (r < 0 && errno == EINTR)
				continue;
			if (r <= 0)
				return false;
			got += (size_t)r;
		}
		__atomic_fetch_add(&sl_stats.bulk_bytes_in, sizeof h, __ATOMIC_RELAXED);
	} while (!h.number && !h.offset && !sl_ended()); /* the part waits for memory */
	if (h.number != p->number || h.offset)
		return false;
	p->state = TAKEN;
	pthread_mutex_lock(&b->lock);
	l->failed = 0;
	give(b, p, 1);
	pthread_mutex_unlock(&b->lock);
	return true;
}

bool sl_bulk_send(struct sl_bulk_line *l)
{
	struct sl_bulk *b = l->t->bulk;
	struct part part[UNANSWERED];
	enum step what;
	unsigned n = 0;
	bool good = true;

	while (good && (what = next(l, n, &part[n < UNANSWERED ? n : 0])) != END) {
		if (what == SEND) {
			good = send_part(l, &part[n++]);
		} else if ((good = answered(l, &part[0]))) {
			n--;
			for (unsigned i = 0; i < n; i++)
				part[i] = part[i + 1];
		}
	}
	pthread_mutex_lock(&b->lock);
	sl_bulk_down(l);
	if (n)
		give(b, part, n);
	pthread_mutex_unlock(&b->lock);
	return good;
}

/* ---- the caller ---- */

/*
 * Parts whose frames can be sent, or none. While no connection takes parts, the caller's thread takes the next one. *all: there will be no
 * more. Called with the lock held.
 */
static unsigned collect(struct sl_bulk *b, struct sl_bulk_job *j, struct part *to, bool *all)
{
	unsigned n = j->ndone;

	for (unsigned i = 0; i < n; i++)
		to[i] = j->done[i];
	j->ndone = 0;
	if (!n && j->next < j->n && !b->up[SL_BULK_TO_WORKER])
		to[n++] = cut(j);
	*all = j->next == j->n && !j->out;
	return n;
}

struct way {
	const struct sl_copy_in *c;
	sl_bulk_plain *plain;
	void *arg;
};

static CUresult send_frame(const struct way *w, const struct part *p, bool last)
{
	const struct sl_copy_in *c = w->c;
	CUresult err = CUDA_SUCCESS;
	sl_buf b;

	sl_buf_init(&b);
	if (p->state == TAKEN) {
		sl_put(&b, struct wire_copy_in_bulk, .dst = c->dst + p->at, .part = p->number, .stream = c->stream, .last = last, .size = p->size);
		err = sl_oneway_copy(c, CTL_COPY_IN_BULK, &b, NULL, 0);
	} else if (p->state == LOST) {
		sl_put(&b, struct wire_bulk_drop, .part = p->number);
		err = sl_oneway_copy(c, CTL_BULK_DROP, &b, NULL, 0);
	}
	sl_buf_free(&b);
	if (err || p->state == TAKEN)
		return err;
	return w->plain(w->arg, c, p->at, p->size, last);
}

bool sl_bulk_reserve(struct sl_peer *t)
{
	struct sl_bulk *b = t->bulk;
	bool had;

	if (!b)
		return true;
	pthread_mutex_lock(&b->lock);
	had = !b->job;
	b->reserved = had;
	pthread_mutex_unlock(&b->lock);
	return had;
}

void sl_bulk_release(struct sl_peer *t)
{
	struct sl_bulk *b = t->bulk;

	if (!b)
		return;
	pthread_mutex_lock(&b->lock);
	b->reserved = false;
	pthread_mutex_unlock(&b->lock);
}

/* Sends the frames of a job. Called with the lock held. */
static CUresult send_all(struct sl_bulk *b, struct sl_bulk_job *j, const struct way *w)
{
	CUresult err = CUDA_SUCCESS;
	struct part part[ROOM];
	bool all;

	for (;;) {
		unsigned had = j->out + j->ndone, n = collect(b, j, part, &all);

		if (!n && all)
			return err;
		if (!n) {
			sl_cond_wait(&b->change, &b->lock, -1);
			continue;
		}
		if (had >= ROOM)
			sl_cond_broadcast(&b->work);
		pthread_mutex_unlock(&b->lock);
		for (unsigned i = 0; i < n && !err; i++)
			err = send_frame(w, &part[i], all && i + 1 == n && w->c->blocking);
		pthread_mutex_lock(&b->lock);
		if (err)
			j->next = j->n;
	}
}

bool sl_bulk_upload(const struct sl_copy_in *c, sl_bulk_plain *plain, void *arg, CUresult *err)
{
	struct sl_bulk_job j = { .src = c->src, .n = c->n };
	struct sl_bulk *b = c->t->bulk;
	bool mine;

	pthread_mutex_lock(&b->lock);
	mine = b->up[SL_BULK_TO_WORKER] && !b->job && (!b->reserved || sl_tls()->unkept);
	if (mine) {
		b->job = &j;
		sl_cond_broadcast(&b->work);
		*err = send_all(b, &j, &(struct way){ c, plain, arg });
		b->job = NULL;
	}
	pthread_mutex_unlock(&b->lock);
	return mine;
}
