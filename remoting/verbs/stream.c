/*
 * See rdma.h. The lock guards everything that several threads use but the bytes of the rings, which the one reader and the one writer copy
 * without it. Any thread that holds the lock takes completions (harvest). One waiting thread at a time sleeps in poll, for a completion or
 * the socket's end; it wakes the others.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rdma.h"
#include "device.h"
#include "../client/deadline.h"
#include "../client/futex.h"

#define SENDS 128		/* messages that the device has at a time */
#define SPARE_SENDS 8		/* of them for the control alone */
#define SPARE_RECEIVES 32	/* of the other side's */
#define INLINE 64
#define NAP_MS 1000		/* a wait looks again after so long, whatever happens */
#define SPIN 200		/* looks for a completion before a writer sleeps */

/*
 * A message of the control. A device need not write a number at once, so a reader could see half of the old and half of the new one. Therefore no
 * place is written again before the other side has read it: there is one for each message that it may not have looked at yet.
 */
struct control {
	_Atomic uint64_t read, received;
};

_Static_assert(sizeof(struct control) * SL_RDMA_RECEIVES <= SL_RDMA_CONTROL, "places of the control");

struct sl_rdma {
	const struct vb_library *v;
	struct sl_rdma_device dev;
	struct vb_pd *pd;
	struct vb_channel *channel;
	struct vb_cq *cq;
	struct vb_qp *qp;
	struct vb_mr *in_mr, *out_mr;
	int sock;
	uint32_t psn;
	bool inlines;
	char name[80];

	/* One mapping: what the other side writes, control and ring, then what is written from. */
	uint8_t *map;
	struct control *control, *out_control; /* SL_RDMA_RECEIVES of them */
	uint8_t *in, *out;
	uint64_t remote; /* address of the other side's control */
	uint32_t rkey;

	pthread_mutex_t lock;
	struct sl_cond cond;
	bool waiting;		/* a thread sleeps in poll, or is about to */
	bool armed;		/* the next completion makes an event */
	bool hung;		/* the socket has ended */
	int error;		/* errno, once the connection has failed */
	uint64_t came, taken;	/* bytes of in that have come, and that have been read */
	uint64_t put, posted, room_to; /* bytes written to out, how many of them the device was given, and how far the other side has read */
	uint64_t sent, heard;	/* messages sent, and how many of them the other side has received */
	uint64_t received;	/* messages */
	uint64_t told_taken, told_received;
	int sending;		/* messages that have not been completed */
	uint64_t credits, credited; /* credits: messages of the control that were sent; credited: that came */
};

#define MAP_SIZE (2 * ((size_t)SL_RDMA_CONTROL + SL_RDMA_RING))

/* ---- set-up ---- */

static bool make_memory(struct sl_rdma *r)
{
	r->map = mmap(NULL, MAP_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (r->map == MAP_FAILED) {
		r->map = NULL;
		return false;
	}
	/* The device knows the pages: those of a child would be copies, and the parent's next write would move its own. */
	madvise(r->map, MAP_SIZE, MADV_DONTFORK);
	r->control = (struct control *)r->map;
	r->in = r->map + SL_RDMA_CONTROL;
	r->out_control = (struct control *)(r->in + SL_RDMA_RING);
	r->out = r->in + SL_RDMA_RING + SL_RDMA_CONTROL;
	r->in_mr = r->v->reg_mr(r->pd, r->map, MAP_SIZE / 2, VB_ACCESS_LOCAL_WRITE | VB_ACCESS_REMOTE_WRITE);
	/* The device only reads the second half. Pages that it may write are this process's own from the start, on any kernel. */
	r->out_mr = r->in_mr ? r->v->reg_mr(r->pd, r->map + MAP_SIZE / 2, MAP_SIZE / 2, VB_ACCESS_LOCAL_WRITE) : NULL;
	return r->out_mr;
}

static bool make_qp(struct sl_rdma *r)
{
	struct vb_qp_init init = { .send_cq = r->cq, .recv_cq = r->cq, .type = VB_QPT_RC,
				   .cap = { .max_send = SENDS, .max_recv = SL_RDMA_RECEIVES, .max_send_sge = 1, .max_recv_sge = 1, .max_inline = INLINE } };
	struct vb_qp_attr a = { .state = VB_QPS_INIT, .port = (uint8_t)r->dev.port, .access = VB_ACCESS_REMOTE_WRITE };

	r->qp = r->v->create_qp(r->pd, &init);
	r->inlines = r->qp;
	if (!r->qp) {
		init.cap.max_inline = 0;
		r->qp = r->v->create_qp(r->pd, &init);
	}
	return r->qp && !(errno = r->v->modify_qp(r->qp, &a, VB_SET_STATE | VB_SET_PKEY | VB_SET_PORT | VB_SET_ACCESS));
}

/* Receives need no buffer: an incoming write puts its bytes into the ring, and uses up one receive. */
static bool post_receive(struct sl_rdma *r)
{
	struct vb_recv w = { 0 }, *bad;

	return !(errno = r->dev.context->ops.post_recv(r->qp, &w, &bad));
}

static bool refuse(char *why, size_t cap, const char *what)
{
	snprintf(why, cap, "%s: %s%s", what, strerror(errno), errno == ENOMEM ? " (ulimit -l has to allow 5 MiB more)" : "");
	return false;
}

static bool make_all(struct sl_rdma *r, char *why, size_t cap)
{
	if (!(r->pd = r->v->alloc_pd(r->dev.context)))
		return refuse(why, cap, "protection domain");
	if (!(r->channel = r->v->create_comp_channel(r->dev.context)) || fcntl(r->channel->fd, F_SETFL, fcntl(r->channel->fd, F_GETFL) | O_NONBLOCK))
		return refuse(why, cap, "completion channel");
	if (!(r->cq = r->v->create_cq(r->dev.context, SENDS + SL_RDMA_RECEIVES + 16, NULL, r->channel, 0)))
		return refuse(why, cap, "completion queue");
	if (!make_memory(r))
		return refuse(why, cap, "memory for RDMA");
	if (!make_qp(r))
		return refuse(why, cap, "queue pair");
	for (int i = 0; i < SL_RDMA_RECEIVES; i++)
		if (!post_receive(r))
			return refuse(why, cap, "receives");
	return true;
}

struct sl_rdma *sl_rdma_open(int sock, const char *only, char *why, size_t cap)
{
	struct sl_rdma *r = calloc(1, sizeof *r);

	if (!r || !(r->v = vb_library())) {
		snprintf(why, cap, "libibverbs.so.1 is not there");
		free(r);
		return NULL;
	}
	r->sock = sock;
	pthread_mutex_init(&r->lock, NULL);
	/* Which packets are the connection's should not be guessed by others of the network. */
	if (syscall(SYS_getrandom, &r->psn, sizeof r->psn, 0) != sizeof r->psn)
		r->psn = (uint32_t)sl_now_ns();
	r->psn &= 0xffffff;
	if (!sl_rdma_find(r->v, sock, only, &r->dev, why, cap) || !make_all(r, why, cap)) {
		sl_rdma_free(r);
		return NULL;
	}
	snprintf(r->name, sizeof r->name, "%s port %d", r->dev.name, r->dev.port);
	return r;
}

void sl_rdma_free(struct sl_rdma *r)
{
	if (!r)
		return;
	if (r->qp)
		r->v->destroy_qp(r->qp);
	if (r->cq)
		r->v->destroy_cq(r->cq);
	if (r->channel)
		r->v->destroy_comp_channel(r->channel);
	if (r->in_mr)
		r->v->dereg_mr(r->in_mr);
	if (r->out_mr)
		r->v->dereg_mr(r->out_mr);
	if (r->pd)
		r->v->dealloc_pd(r->pd);
	if (r->dev.context)
		r->v->close_device(r->dev.context);
	if (r->map)
		munmap(r->map, MAP_SIZE);
	pthread_mutex_destroy(&r->lock);
	free(r);
}

void sl_rdma_forked(struct sl_rdma *r)
{
	close(r->dev.context->cmd_fd);
	close(r->dev.context->async_fd);
	close(r->channel->fd);
}

const char *sl_rdma_name(const struct sl_rdma *r)
{
	return r->name;
}

void sl_rdma_card(const struct sl_rdma *r, struct wire_verbs_card *card)
{
	*card = (struct wire_verbs_card){
		.addr = (uintptr_t)r->map, .rkey = r->in_mr->rkey, .qpn = r->qp->qp_num, .psn = r->psn, .size = SL_RDMA_RING,
		.lid = r->dev.attr.lid, .mtu = (uint32_t)r->dev.attr.active_mtu, .link = r->dev.attr.link_layer,
	};
	memcpy(card->gid, r->dev.gid.raw, sizeof card->gid);
}

bool sl_rdma_join(struct sl_rdma *r, const struct wire_verbs_card *c, char *why, size_t cap)
{
	struct vb_qp_attr a = {
		.state = VB_QPS_RTR, .path_mtu = (int)c->mtu < r->dev.attr.active_mtu ? (int)c->mtu : r->dev.attr.active_mtu, .dest_qp_num = c->qpn,
		.rq_psn = c->psn, .max_dest_rd_atomic = 1, .min_rnr_timer = 1,
		.ah = { .grh = { .sgid_index = (uint8_t)r->dev.gid_index, .hop_limit = 64 }, .dlid = (uint16_t)c->lid, .is_global = 1, .port = (uint8_t)r->dev.port },
	};

	if (!c->qpn || c->qpn >> 24 || c->psn >> 24 || c->mtu < 1 || c->mtu > 5 || c->lid >> 16) {
		snprintf(why, cap, c->qpn ? "the other side's card makes no sense" : "the other side has no device for this connection");
		return false;
	}
	if (c->size != SL_RDMA_RING || c->link != r->dev.attr.link_layer) {
		snprintf(why, cap, "the other side's device has another kind of link, or rings of another size");
		return false;
	}
	memcpy(a.ah.grh.dgid.raw, c->gid, sizeof c->gid);
	if ((errno = r->v->modify_qp(r->qp, &a, VB_SET_STATE | VB_SET_AH | VB_SET_MTU | VB_SET_DEST_QP | VB_SET_RQ_PSN | VB_SET_DEST_RD_ATOMIC | VB_SET_RNR_TIMER)))
		return refuse(why, cap, "connecting");
	/*
	 * A packet is repeated after 67 ms (4.096 us * 2^14) and up to six times, the device's own way; 7 would be for ever on some. A
	 * side that has no receive posted is waited for without end: it has a socket that tells whether it lives.
	 */
	a = (struct vb_qp_attr){ .state = VB_QPS_RTS, .timeout = 14, .retries = 6, .rnr_retries = 7, .sq_psn = r->psn, .max_rd_atomic = 1 };
	if ((errno = r->v->modify_qp(r->qp, &a, VB_SET_STATE | VB_SET_TIMEOUT | VB_SET_RETRIES | VB_SET_RNR_RETRIES | VB_SET_SQ_PSN | VB_SET_RD_ATOMIC)))
		return refuse(why, cap, "connecting");
	r->remote = c->addr;
	r->rkey = c->rkey;
	return true;
}

/* ---- messages; all with the lock held ---- */

static void fail(struct sl_rdma *r, int error)
{
	if (!r->error)
		r->error = error;
}

/* Has n bytes at p written to the other side, at an offset from its control. */
static void post(struct sl_rdma *r, const void *p, size_t n, uint64_t offset, uint32_t imm)
{
	struct vb_sge sge = { (uintptr_t)p, (uint32_t)n, r->out_mr->lkey };
	struct vb_send w = { .list = &sge, .sges = 1, .opcode = VB_WRITE_WITH_IMM, .flags = VB_SIGNALED | (r->inlines && n <= INLINE ? VB_INLINE : 0),
			     .imm = htonl(imm), .rdma = { r->remote + offset, r->rkey } };
	struct vb_send *bad;
	int err = r->dev.context->ops.post_send(r->qp, &w, &bad);

	if (err) {
		fail(r, err);
		return;
	}
	r->sending++;
	r->sent++;
}

/* Tells the other side how far this one is. */
static void tell(struct sl_rdma *r)
{
	size_t place = (size_t)(r->credits++ % SL_RDMA_RECEIVES);
	struct control *c = &r->out_control[place];

	r->told_taken = r->taken;
	r->told_received = r->received;
	atomic_store(&c->read, r->taken);
	atomic_store(&c->received, r->received);
	post(r, c, sizeof *c, place * sizeof *c, 0);
}

static void tell_if_due(struct sl_rdma *r)
{
	if (!r->error && r->sending < SENDS && r->sent - r->heard < SL_RDMA_RECEIVES &&
	    (r->taken - r->told_taken >= SL_RDMA_RING / 4 || r->received - r->told_received >= SL_RDMA_RECEIVES / 4))
		tell(r);
}

/*
 * Has the device send what was written and was not sent yet, because the other side had no receives for it: it is more than one message's
 * worth of writes then, and goes in fewer messages.
 */
static void push(struct sl_rdma *r)
{
	while (!r->error && r->posted < r->put && r->sending < SENDS - SPARE_SENDS && r->sent - r->heard < SL_RDMA_RECEIVES - SPARE_RECEIVES) {
		size_t at = (size_t)(r->posted % SL_RDMA_RING), n = SL_RDMA_RING - at;

		if (n > r->put - r->posted)
			n = (size_t)(r->put - r->posted);
		if (n > SL_RDMA_MESSAGE)
			n = SL_RDMA_MESSAGE;
		post(r, r->out + at, n, SL_RDMA_CONTROL + at, (uint32_t)n);
		r->posted += n;
	}
}

static void arrived(struct sl_rdma *r, uint32_t imm)
{
	uint64_t read, heard;
	struct control *c;

	r->received++;
	if (r->received - r->told_received > SL_RDMA_RECEIVES)
		fail(r, EPROTO); /* more than it may have sent */
	else if (!post_receive(r))
		fail(r, errno);
	if (imm) {
		if (imm > SL_RDMA_MESSAGE || r->came + imm - r->taken > SL_RDMA_RING)
			fail(r, EPROTO);
		else
			r->came += imm;
		return;
	}
	c = &r->control[r->credited++ % SL_RDMA_RECEIVES];
	read = atomic_load(&c->read);
	heard = atomic_load(&c->received);
	if (read < r->room_to || read > r->posted || heard < r->heard || heard > r->sent) {
		fail(r, EPROTO);
		return;
	}
	r->room_to = read;
	r->heard = heard;
}

/* Takes what has been completed; false if nothing has. */
static bool harvest(struct sl_rdma *r)
{
	struct vb_wc wc[16];
	int n, all = 0;

	do {
		n = r->dev.context->ops.poll_cq(r->cq, 16, wc);
		if (n < 0)
			fail(r, EIO);
		for (int i = 0; i < n; i++) {
			if (wc[i].status)
				fail(r, wc[i].status == VB_WC_FLUSHED ? ECONNRESET : EIO);
			else if (wc[i].opcode == VB_WC_RECV_WITH_IMM)
				arrived(r, ntohl(wc[i].imm));
			else if (wc[i].opcode & VB_WC_RECV || !r->sending)
				fail(r, EPROTO); /* a message of a kind that this side never sends, or more completions than messages */
			else
				r->sending--;
		}
		all += n > 0 ? n : 0;
	} while (n == 16 && all < SENDS + SL_RDMA_RECEIVES); /* the other side may send without end, and the lock is held */
	if (all) {
		tell_if_due(r);
		push(r);
		sl_cond_broadcast(&r->cond);
	}
	return all;
}

/* Takes the events that say that there are completions. */
static void take_events(struct sl_rdma *r)
{
	struct vb_cq *cq;
	unsigned n = 0;
	void *user;

	while (!r->v->get_cq_event(r->channel, &cq, &user))
		n++;
	if (errno != EAGAIN && errno != EINTR)
		fail(r, EIO); /* the device has gone */
	if (n) {
		r->v->ack_cq_events(r->cq, n);
		r->armed = false;
	}
}

/* Waits until something may have happened; false at the deadline. The lock is released meanwhile. */
static bool await(struct sl_rdma *r, int64_t deadline)
{
	int64_t left = deadline - sl_now_ms();
	struct pollfd p[2] = { { .fd = r->channel->fd, .events = POLLIN }, { .fd = r->sock, .events = POLLRDHUP } };

	if (left <= 0)
		return false;
	if (left > NAP_MS)
		left = NAP_MS;
	if (r->waiting) {
		sl_cond_wait(&r->cond, &r->lock, left);
		return true;
	}
	r->waiting = true;
	if (!r->armed) {
		r->armed = true;
		if (r->dev.context->ops.req_notify_cq(r->cq, 0))
			fail(r, EIO);
	}
	if (!harvest(r) && !r->error) { /* what came before it was armed makes no event */
		pthread_mutex_unlock(&r->lock);
		if (syscall(SYS_poll, p, 2, (int)left) < 0) /* no cancellation point: the caller may have locks */
			p[0].revents = p[1].revents = 0;
		pthread_mutex_lock(&r->lock);
		if (p[0].revents & ~POLLIN)
			fail(r, EIO);
		else if (p[0].revents)
			take_events(r);
		if (p[1].revents)
			r->hung = true;
		harvest(r);
	}
	r->waiting = false;
	sl_cond_broadcast(&r->cond);
	return true;
}

/* ---- the stream ---- */

/*
 * Takes the lock. The library's calls may be cancellation points, and a caller that is cancelled in one would keep this lock and its own.
 */
static int enter(struct sl_rdma *r)
{
	int cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	pthread_mutex_lock(&r->lock);
	return cancel;
}

static void leave(struct sl_rdma *r, int cancel)
{
	pthread_mutex_unlock(&r->lock);
	pthread_setcancelstate(cancel, NULL);
}

bool sl_rdma_greet(struct sl_rdma *r)
{
	int cancel = enter(r);
	bool good;

	tell(r);
	good = !r->error;
	leave(r, cancel);
	return good;
}

bool sl_rdma_met(struct sl_rdma *r, int ms)
{
	int64_t deadline = sl_now_ms() + ms;
	int cancel = enter(r);
	bool good;

	harvest(r);
	while (!r->error && !r->hung && (!r->received || r->sending))
		if (!await(r, deadline))
			break;
	good = !r->error && !r->hung && r->received && !r->sending;
	leave(r, cancel);
	return good;
}

/* How many bytes may be written now, at one place. */
static size_t may_write(const struct sl_rdma *r)
{
	size_t room = (size_t)(SL_RDMA_RING - (r->put - r->room_to)), end = SL_RDMA_RING - (size_t)(r->put % SL_RDMA_RING);

	if (room > end)
		room = end;
	return room < SL_RDMA_MESSAGE ? room : SL_RDMA_MESSAGE;
}

/* Waits for room; 0 with errno. The lock is held. */
static size_t wait_for_room(struct sl_rdma *r, int ms)
{
	int64_t deadline = 0;
	size_t room;

	for (int spins = 0;; spins++) {
		if (r->error || r->hung) {
			errno = r->error ? r->error : EPIPE;
			return 0;
		}
		if ((room = may_write(r)))
			return room;
		if (spins < SPIN) {
			harvest(r);
			continue;
		}
		if (!deadline)
			deadline = sl_now_ms() + ms;
		if (!await(r, deadline)) {
			errno = ETIMEDOUT;
			return 0;
		}
	}
}

ssize_t sl_rdma_write(struct sl_rdma *r, const struct iovec *iov, int n, int ms)
{
	int error, cancel = enter(r);
	size_t room, done = 0;
	uint8_t *to;

	harvest(r); /* also so that the other side hears how many messages have come, if nobody reads here */
	room = wait_for_room(r, ms);
	leave(r, cancel);
	if (!room)
		return -1;
	to = r->out + r->put % SL_RDMA_RING;
	for (int i = 0; i < n && done < room; i++) {
		size_t k = iov[i].iov_len < room - done ? iov[i].iov_len : room - done;

		memcpy(to + done, iov[i].iov_base, k);
		done += k;
	}
	if (!done)
		return 0;
	cancel = enter(r);
	r->put += done;
	push(r);
	error = r->error;
	leave(r, cancel);
	if (error) {
		errno = error;
		return -1;
	}
	return (ssize_t)done;
}

/* Waits until there is something to read; 0 and errno 0 at the end. The lock is held. */
static size_t wait_for_bytes(struct sl_rdma *r, int ms)
{
	int64_t deadline = 0;

	if (r->came == r->taken)
		harvest(r);
	while (r->came == r->taken) {
		if (r->error || r->hung) {
			errno = r->error;
			return 0;
		}
		if (!deadline)
			deadline = sl_now_ms() + ms;
		if (!ms || !await(r, deadline)) {
			errno = EAGAIN;
			return 0;
		}
	}
	return (size_t)(r->came - r->taken);
}

ssize_t sl_rdma_read(struct sl_rdma *r, void *buf, size_t n, int ms)
{
	int cancel = enter(r);
	size_t have, at, first;

	have = wait_for_bytes(r, ms);
	leave(r, cancel);
	if (!have)
		return errno ? -1 : 0;
	if (n > have)
		n = have;
	at = (size_t)(r->taken % SL_RDMA_RING);
	first = SL_RDMA_RING - at < n ? SL_RDMA_RING - at : n;
	memcpy(buf, r->in + at, first);
	memcpy((uint8_t *)buf + first, r->in, n - first);
	cancel = enter(r);
	r->taken += n;
	tell_if_due(r);
	leave(r, cancel);
	return (ssize_t)n;
}

bool sl_rdma_readable(struct sl_rdma *r, int ms)
{
	struct pollfd p = { .fd = r->sock, .events = POLLRDHUP };
	int cancel = enter(r);
	bool is;

	is = wait_for_bytes(r, ms) || errno != EAGAIN;
	if (!is && poll(&p, 1, 0) > 0) { /* a look that does not wait sees the end, too */
		r->hung = true;
		harvest(r);
		is = true;
	}
	leave(r, cancel);
	return is;
}

bool sl_rdma_flush(struct sl_rdma *r, int ms)
{
	int64_t deadline = sl_now_ms() + ms;
	int cancel = enter(r);
	bool flushed;

	harvest(r);
	while ((r->sending || r->posted < r->put) && !r->error && !r->hung && await(r, deadline))
		;
	flushed = !r->sending && r->posted == r->put;
	leave(r, cancel);
	return flushed;
}

bool sl_rdma_last(struct sl_rdma *r, const void *p, size_t n, int64_t deadline)
{
	while (n) {
		int64_t left = deadline - sl_now_ms();
		ssize_t k = left > 0 ? sl_rdma_write(r, &(struct iovec){ (void *)(uintptr_t)p, n }, 1, (int)left) : -1;

		if (k < 0)
			return false;
		p = (const uint8_t *)p + k;
		n -= (size_t)k;
	}
	return sl_rdma_flush(r, (int)(deadline - sl_now_ms()));
}
