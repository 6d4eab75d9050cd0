/*
 * Completion queues and their events.
 *
 * cq_add puts a completion into the ring; if the CQ is armed it puts one event into the channel and disarms the CQ. The channel's fd is an
 * eventfd whose count is not zero exactly while an event waits; both change under the channel's lock alone.
 */
#include "simverbs.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* --- channels --- */

struct vb_channel *ibv_create_comp_channel(struct vb_context *c)
{
	struct sim_channel *ch;

	if (sim_stale(c)) {
		errno = ENODEV;
		return NULL;
	}
	ch = calloc(1, sizeof(*ch));
	if (!ch)
		return NULL;
	ch->vb.context = c;
	ch->vb.fd = eventfd(0, EFD_CLOEXEC);
	if (ch->vb.fd < 0) {
		free(ch);
		return NULL;
	}
	pthread_mutex_init(&ch->lock, NULL);
	sim_count(c, &sim_context(c)->channels, 1);
	return &ch->vb;
}

int ibv_destroy_comp_channel(struct vb_channel *vb)
{
	struct sim_context *c = sim_context(vb->context);
	struct sim_channel *ch = (struct sim_channel *)vb;
	bool busy;

	if (sim_stale(vb->context))
		return 0;
	pthread_mutex_lock(&c->lock);
	busy = vb->references;
	if (!busy)
		c->channels--;
	pthread_mutex_unlock(&c->lock);
	if (busy)
		return EBUSY;
	close(vb->fd);
	pthread_mutex_destroy(&ch->lock);
	free(ch);
	return 0;
}

/* Puts the fd's count right. With the channel's lock held. */
static void empty(struct sim_channel *ch)
{
	uint64_t n;

	if (!ch->first && read(ch->vb.fd, &n, sizeof(n)) != sizeof(n))
		sim_die("channel: %s", strerror(errno));
}

/* An event; each is written, since a program may wait for edges. */
static void event(struct vb_cq *cq)
{
	struct sim_channel *ch = (struct sim_channel *)cq->channel;
	uint64_t one = 1;

	pthread_mutex_lock(&ch->lock);
	if (!cq->waiting++) {
		cq->next = NULL;
		if (ch->first)
			ch->last->next = cq;
		else
			ch->first = cq;
		ch->last = cq;
	}
	if (write(ch->vb.fd, &one, sizeof(one)) != sizeof(one))
		sim_die("channel: %s", strerror(errno));
	pthread_mutex_unlock(&ch->lock);
}

/* The CQ whose event is the oldest, or NULL. With the channel's lock held. */
static struct vb_cq *take(struct sim_channel *ch)
{
	struct vb_cq *cq = ch->first;

	if (!cq)
		return NULL;
	cq->got++;
	if (--cq->waiting)
		return cq;
	ch->first = cq->next;
	empty(ch);
	return cq;
}

/* The fd's own flag says whether to wait, as with a read. */
int ibv_get_cq_event(struct vb_channel *vb, struct vb_cq **cq, void **user)
{
	struct sim_channel *ch = (struct sim_channel *)vb;
	struct pollfd p = { .fd = vb->fd, .events = POLLIN };

	if (sim_stale(vb->context)) {
		errno = ENODEV;
		return -1;
	}
	for (;;) {
		pthread_mutex_lock(&ch->lock);
		*cq = take(ch);
		pthread_mutex_unlock(&ch->lock);
		if (*cq) {
			*user = (*cq)->user;
			return 0;
		}
		if (fcntl(vb->fd, F_GETFL) & O_NONBLOCK) {
			errno = EAGAIN;
			return -1;
		}
		if (poll(&p, 1, -1) < 0)
			return -1;
	}
}

void ibv_ack_cq_events(struct vb_cq *cq, unsigned n)
{
	struct sim_channel *ch = (struct sim_channel *)cq->channel;

	if (sim_stale(cq->context) || !n)
		return;
	if (!ch)
		sim_die("events of a CQ without a channel acknowledged");
	pthread_mutex_lock(&ch->lock);
	cq->acked += n;
	if (cq->acked > cq->got)
		sim_die("%u events of a CQ acknowledged, of %u", cq->acked, cq->got);
	pthread_mutex_unlock(&ch->lock);
}

/* --- completion queues --- */

struct vb_cq *ibv_create_cq(struct vb_context *c, int n, void *user, struct vb_channel *channel, int vector)
{
	struct vb_cq *cq;

	if (sim_stale(c) || n < 1 || n > SIM_MAX_CQE || vector < 0 || vector >= c->vectors || (channel && channel->context != c)) {
		errno = sim_stale(c) ? ENODEV : EINVAL;
		return NULL;
	}
	cq = calloc(1, sizeof(*cq));
	if (!cq)
		return NULL;
	cq->ring = calloc((size_t)n, sizeof(*cq->ring));
	if (!cq->ring) {
		free(cq);
		return NULL;
	}
	cq->context = c;
	cq->channel = channel;
	cq->user = user;
	cq->size = n;
	pthread_mutex_init(&cq->lock, NULL);
	sim_count(c, &sim_context(c)->cqs, 1);
	if (channel)
		sim_count(c, &channel->references, 1);
	return cq;
}

/* Events that wait go with the CQ; for one that was given and not acknowledged libibverbs would wait. */
static void no_events(struct vb_cq *cq)
{
	struct sim_channel *ch = (struct sim_channel *)cq->channel;
	struct vb_cq *before = NULL;

	pthread_mutex_lock(&ch->lock);
	if (cq->got != cq->acked)
		sim_die("destroy_cq would wait for ever: %u events of it were got, %u acknowledged", cq->got, cq->acked);
	if (cq->waiting) {
		for (struct vb_cq *q = ch->first; q != cq; q = q->next)
			before = q;
		if (before)
			before->next = cq->next;
		else
			ch->first = cq->next;
		if (ch->last == cq)
			ch->last = before;
		empty(ch);
	}
	pthread_mutex_unlock(&ch->lock);
}

int ibv_destroy_cq(struct vb_cq *cq)
{
	struct sim_context *c = sim_context(cq->context);
	bool busy;

	if (sim_stale(cq->context))
		return 0;
	pthread_mutex_lock(&c->lock);
	busy = cq->qps;
	pthread_mutex_unlock(&c->lock);
	if (busy)
		return EBUSY;
	if (cq->channel) {
		no_events(cq);
		sim_count(cq->context, &cq->channel->references, -1);
	}
	sim_count(cq->context, &c->cqs, -1);
	pthread_mutex_destroy(&cq->lock);
	free(cq->ring);
	free(cq);
	return 0;
}

void cq_add(struct vb_cq *cq, const struct sim_cqe *e)
{
	pthread_mutex_lock(&cq->lock);
	if (cq->added - cq->polled == (uint64_t)cq->size)
		sim_die("overrun: a CQ of %d has as many completions, and QP %u has one more", cq->size, e->wc.qp_num);
	cq->ring[cq->added++ % (uint64_t)cq->size] = *e;
	if (cq->armed && cq->channel)
		event(cq);
	cq->armed = false;
	pthread_mutex_unlock(&cq->lock);
}

/* A QP's completions go with it. */
void cq_forget(struct vb_cq *cq, struct sim_qp *qp)
{
	uint64_t size = (uint64_t)cq->size, to;

	pthread_mutex_lock(&cq->lock);
	to = cq->polled;
	for (uint64_t i = cq->polled; i < cq->added; i++)
		if (cq->ring[i % size].qp != qp)
			cq->ring[to++ % size] = cq->ring[i % size];
	cq->added = to;
	pthread_mutex_unlock(&cq->lock);
}

int cq_poll(struct vb_cq *cq, int n, struct vb_wc *wc)
{
	int k = 0;

	if (sim_stale(cq->context))
		return -1;
	pthread_mutex_lock(&cq->lock);
	for (; k < n && cq->polled < cq->added; k++) {
		struct sim_cqe *e = &cq->ring[cq->polled++ % (uint64_t)cq->size];

		wc[k] = e->wc;
		*e->slots = e->freed;
	}
	pthread_mutex_unlock(&cq->lock);
	return k;
}

/* For the next completion: one that waits to be polled gives no event. */
int cq_arm(struct vb_cq *cq, int solicited)
{
	(void)solicited;
	if (sim_stale(cq->context))
		return ENODEV;
	pthread_mutex_lock(&cq->lock);
	cq->armed = true;
	pthread_mutex_unlock(&cq->lock);
	return 0;
}
