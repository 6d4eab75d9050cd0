/*
 * Queue pairs: their states, and work that is posted, completed, flushed.
 *
 * A work request is copied into a slot of its queue (post). link.c carries sends out in order and completes the oldest when the peer has
 * acknowledged it (qp_sent); it completes the oldest receive for a message that asks for one (qp_received). A failure (qp_fail) puts the
 * QP into its error state for good, and completes all that is posted; from then on each post is completed at once as flushed.
 */
#include "simverbs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* --- states --- */

static const int always = VB_SET_STATE;

/* The transitions of an RC QP that are not to the error state: the attributes that each must and may set. */
static const struct move {
	int from, to, must, may;
} moves[] = {
	{ QPS_RESET, VB_QPS_INIT, VB_SET_PKEY | VB_SET_PORT | VB_SET_ACCESS, 0 },
	{ VB_QPS_INIT, VB_QPS_INIT, 0, VB_SET_PKEY | VB_SET_PORT | VB_SET_ACCESS },
	{ VB_QPS_INIT, VB_QPS_RTR, VB_SET_AH | VB_SET_MTU | VB_SET_DEST_QP | VB_SET_RQ_PSN | VB_SET_DEST_RD_ATOMIC | VB_SET_RNR_TIMER,
	  VB_SET_ACCESS | VB_SET_PKEY },
	{ VB_QPS_RTR, VB_QPS_RTS, VB_SET_SQ_PSN | VB_SET_TIMEOUT | VB_SET_RETRIES | VB_SET_RNR_RETRIES | VB_SET_RD_ATOMIC,
	  VB_SET_ACCESS | VB_SET_RNR_TIMER },
	{ VB_QPS_RTS, VB_QPS_RTS, 0, VB_SET_ACCESS | VB_SET_RNR_TIMER },
};

static bool may_move(int from, int to, int set)
{
	if (to == VB_QPS_ERR)
		return set == always;
	for (size_t i = 0; i < sizeof(moves) / sizeof(moves[0]); i++) {
		const struct move *m = &moves[i];

		if (m->from == from && m->to == to)
			return (set & m->must) == m->must && !(set & ~(always | m->must | m->may));
	}
	return false;
}

static bool may_be(const struct vb_qp_attr *a, int set)
{
	return !((set & VB_SET_PKEY && a->pkey_index) || (set & VB_SET_PORT && a->port != 1) ||
		 (set & VB_SET_MTU && (a->path_mtu < 1 || a->path_mtu > SIM_MTU)) ||
		 /* Ethernet has no LIDs: an address is a GID. */
		 (set & VB_SET_AH && (!a->ah.is_global || a->ah.port != 1 || a->ah.grh.sgid_index > 1)) ||
		 (set & VB_SET_DEST_QP && a->dest_qp_num >> 24) || (set & VB_SET_RETRIES && a->retries > 7) ||
		 (set & VB_SET_RNR_RETRIES && a->rnr_retries > 7) || (set & VB_SET_TIMEOUT && a->timeout > 31) ||
		 (set & VB_SET_RNR_TIMER && a->min_rnr_timer > 31) || (set & VB_SET_RD_ATOMIC && a->max_rd_atomic > SIM_MAX_RD) ||
		 (set & VB_SET_DEST_RD_ATOMIC && a->max_dest_rd_atomic > SIM_MAX_RD));
}

static void take_over(struct vb_qp_attr *to, const struct vb_qp_attr *a, int set)
{
#define TAKE(bit, member) do { if (set & (bit)) to->member = a->member; } while (0)
	TAKE(VB_SET_ACCESS, access);
	TAKE(VB_SET_AH, ah);
	TAKE(VB_SET_MTU, path_mtu);
	TAKE(VB_SET_DEST_QP, dest_qp_num);
	TAKE(VB_SET_RQ_PSN, rq_psn);
	TAKE(VB_SET_SQ_PSN, sq_psn);
	TAKE(VB_SET_DEST_RD_ATOMIC, max_dest_rd_atomic);
	TAKE(VB_SET_RD_ATOMIC, max_rd_atomic);
	TAKE(VB_SET_RNR_TIMER, min_rnr_timer);
	TAKE(VB_SET_TIMEOUT, timeout);
	TAKE(VB_SET_RETRIES, retries);
	TAKE(VB_SET_RNR_RETRIES, rnr_retries);
#undef TAKE
	to->rq_psn &= 0xffffff;
	to->sq_psn &= 0xffffff;
}

int ibv_modify_qp(struct vb_qp *q, struct vb_qp_attr *a, int set)
{
	struct sim_qp *qp = (struct sim_qp *)q;
	int to, rc = 0;

	if (sim_stale(q->context))
		return ENODEV;
	if (sim_context(q->context)->fail_modify_qp)
		return errno = EIO;
	pthread_mutex_lock(&qp->lock);
	to = set & VB_SET_STATE ? a->state : qp->state;
	if (!may_move(qp->state, to, set | always) || !may_be(a, set)) {
		rc = EINVAL;
	} else if (to == VB_QPS_ERR) {
		qp_fail(qp, 0);
	} else {
		take_over(&qp->attr, a, set);
		qp->state = to;
		pthread_cond_broadcast(&qp->changed);
	}
	pthread_mutex_unlock(&qp->lock);
	return rc;
}

bool qp_alive(const struct sim_qp *qp)
{
	return !qp->closing && qp->state != VB_QPS_ERR;
}

/* Waits for a change of the QP; false: it is later than `until`, UINT64_MAX for ever. */
bool qp_wait(struct sim_qp *qp, uint64_t until)
{
	struct timespec t = { (time_t)(until / (1000 * MS)), (long)(until % (1000 * MS)) };

	if (until == UINT64_MAX)
		return !pthread_cond_wait(&qp->changed, &qp->lock);
	return pthread_cond_timedwait(&qp->changed, &qp->lock, &t) != ETIMEDOUT;
}

/* --- completions --- */

struct sim_send *qp_oldest(struct sim_qp *qp)
{
	return &qp->sends[qp->sq_done % qp->cap.max_send];
}

/* Of a completion with an error a device sets no more than these: the rest is rubbish here, lest a program relies on it. */
static struct vb_wc failed(const struct sim_qp *qp, uint64_t id, int status)
{
	struct vb_wc wc;

	memset(&wc, 0x5a, sizeof(wc));
	wc.id = id;
	wc.status = status;
	wc.qp_num = qp->vb.qp_num;
	wc.vendor_error = 0;
	return wc;
}

/* The oldest send is completed. If it asks for no completion its slot is free when that of a later one is polled. */
void qp_sent(struct sim_qp *qp, int status)
{
	const struct sim_send *s = qp_oldest(qp);
	struct sim_cqe e = { .qp = qp, .slots = &qp->sq_freed, .freed = qp->sq_done + 1 };
	int opcode = s->opcode == OP_READ ? WC_READ : s->opcode == OP_WRITE || s->opcode == VB_WRITE_WITH_IMM ? WC_WRITE : WC_SEND;

	if (status)
		e.wc = failed(qp, s->id, status);
	else
		e.wc = (struct vb_wc){ .id = s->id, .opcode = opcode, .length = s->length, .qp_num = qp->vb.qp_num };
	qp->sq_done++;
	if (status || qp->signal_all || s->flags & VB_SIGNALED)
		cq_add(qp->vb.send_cq, &e);
	pthread_cond_broadcast(&qp->changed);
}

/* The oldest receive is completed. imm: NULL if the message has none. */
void qp_received(struct sim_qp *qp, int status, int opcode, const uint32_t *imm, uint32_t length)
{
	const struct sim_recv *r = &qp->recvs[qp->rq_done % qp->cap.max_recv];
	struct sim_cqe e = { .qp = qp, .slots = &qp->rq_freed, .freed = qp->rq_done + 1 };

	if (status)
		e.wc = failed(qp, r->id, status);
	else
		e.wc = (struct vb_wc){ .id = r->id, .opcode = opcode, .length = length, .imm = imm ? *imm : 0, .qp_num = qp->vb.qp_num,
				       .src_qp = qp->attr.dest_qp_num, .flags = imm ? WC_WITH_IMM : 0 };
	qp->rq_done++;
	cq_add(qp->vb.recv_cq, &e);
}

static void shut(int fd)
{
	if (fd >= 0)
		shutdown(fd, SHUT_RDWR);
}

/* The error state. The oldest send has this status if it is not 0; all else is flushed. */
void qp_fail(struct sim_qp *qp, int status)
{
	qp->state = VB_QPS_ERR;
	qp->sq_sent = qp->sq_posted;
	while (qp->sq_done < qp->sq_posted) {
		qp_sent(qp, status ? status : VB_WC_FLUSHED);
		status = 0;
	}
	while (qp->rq_done < qp->rq_posted)
		qp_received(qp, VB_WC_FLUSHED, 0, NULL, 0);
	shut(qp->listen_fd);
	shut(qp->in_fd);
	shut(qp->out_fd);
	pthread_cond_broadcast(&qp->changed);
}

/* --- posting --- */

/* The length of the list, or UINT64_MAX if it has too many entries. */
static uint64_t list_length(const struct vb_sge *list, int n, uint32_t max)
{
	uint64_t length = 0;

	if (n < 0 || (uint32_t)n > max)
		return UINT64_MAX;
	for (int i = 0; i < n; i++)
		length += list[i].length;
	return length;
}

static int post_one_send(struct sim_qp *qp, const struct vb_send *wr)
{
	uint64_t length = list_length(wr->list, wr->sges, qp->cap.max_send_sge);
	struct sim_send *s;
	uint8_t *data;

	if ((qp->state != VB_QPS_RTS && qp->state != VB_QPS_ERR) || wr->opcode < OP_WRITE || wr->opcode > OP_READ || length > SIM_MAX_MESSAGE)
		return EINVAL;
	if (wr->flags & VB_INLINE && (wr->opcode == OP_READ || length > qp->cap.max_inline))
		return EINVAL;
	if (qp->sq_posted - qp->sq_freed >= qp->cap.max_send)
		return ENOMEM;
	s = &qp->sends[qp->sq_posted % qp->cap.max_send];
	s->id = wr->id;
	s->opcode = wr->opcode;
	s->flags = wr->flags;
	s->imm = wr->imm;
	s->addr = wr->rdma.remote_addr;
	s->rkey = wr->rdma.rkey;
	s->length = (uint32_t)length;
	s->sges = wr->sges;
	if (wr->sges)
		memcpy(s->list, wr->list, (size_t)wr->sges * sizeof(*s->list));
	data = s->data;
	for (int i = 0; wr->flags & VB_INLINE && i < wr->sges; data += wr->list[i++].length)
		memcpy(data, (void *)(uintptr_t)wr->list[i].addr, wr->list[i].length);
	qp->sq_posted++;
	if (qp->state == VB_QPS_ERR) {
		qp->sq_sent = qp->sq_posted;
		qp_sent(qp, VB_WC_FLUSHED);
	}
	return 0;
}

int qp_post_send(struct vb_qp *q, struct vb_send *wr, struct vb_send **bad)
{
	struct sim_qp *qp = (struct sim_qp *)q;
	int rc = 0;

	if (sim_stale(q->context)) {
		*bad = wr;
		return ENODEV;
	}
	pthread_mutex_lock(&qp->lock);
	for (; wr && !rc; wr = rc ? wr : wr->next)
		rc = post_one_send(qp, wr);
	pthread_cond_broadcast(&qp->changed);
	pthread_mutex_unlock(&qp->lock);
	if (rc)
		*bad = wr;
	return rc;
}

static int post_one_recv(struct sim_qp *qp, const struct vb_recv *wr)
{
	struct sim_recv *r;

	if (qp->state == QPS_RESET || list_length(wr->list, wr->sges, qp->cap.max_recv_sge) > SIM_MAX_MESSAGE)
		return EINVAL;
	if (qp->rq_posted - qp->rq_freed >= qp->cap.max_recv)
		return ENOMEM;
	r = &qp->recvs[qp->rq_posted++ % qp->cap.max_recv];
	r->id = wr->id;
	r->sges = wr->sges;
	if (wr->sges)
		memcpy(r->list, wr->list, (size_t)wr->sges * sizeof(*r->list));
	if (qp->state == VB_QPS_ERR)
		qp_received(qp, VB_WC_FLUSHED, 0, NULL, 0);
	return 0;
}

int qp_post_recv(struct vb_qp *q, struct vb_recv *wr, struct vb_recv **bad)
{
	struct sim_qp *qp = (struct sim_qp *)q;
	int rc = 0;

	if (sim_stale(q->context)) {
		*bad = wr;
		return ENODEV;
	}
	pthread_mutex_lock(&qp->lock);
	for (; wr && !rc; wr = rc ? wr : wr->next)
		rc = post_one_recv(qp, wr);
	pthread_cond_broadcast(&qp->changed);
	pthread_mutex_unlock(&qp->lock);
	if (rc)
		*bad = wr;
	return rc;
}

/* --- birth and death --- */

static void free_queues(struct sim_qp *qp)
{
	if (qp->sends) {
		free(qp->sends[0].list);
		free(qp->sends[0].data);
	}
	if (qp->recvs)
		free(qp->recvs[0].list);
	free(qp->sends);
	free(qp->recvs);
}

/* One block for all slots of a kind, owned by the first. At least one of each, though the queue may have none. */
static int make_queues(struct sim_qp *qp)
{
	size_t sends = qp->cap.max_send + 1, sge = qp->cap.max_send_sge, recvs = qp->cap.max_recv + 1, rsge = qp->cap.max_recv_sge;

	qp->sends = calloc(sends, sizeof(*qp->sends));
	qp->recvs = calloc(recvs, sizeof(*qp->recvs));
	if (!qp->sends || !qp->recvs)
		return -1;
	qp->sends[0].list = calloc(sends * sge + 1, sizeof(struct vb_sge));
	qp->sends[0].data = calloc(sends, SIM_INLINE);
	qp->recvs[0].list = calloc(recvs * rsge + 1, sizeof(struct vb_sge));
	if (!qp->sends[0].list || !qp->sends[0].data || !qp->recvs[0].list)
		return -1;
	for (size_t i = 1; i < sends; i++) {
		qp->sends[i].list = qp->sends[0].list + i * sge;
		qp->sends[i].data = qp->sends[0].data + i * SIM_INLINE;
	}
	for (size_t i = 1; i < recvs; i++)
		qp->recvs[i].list = qp->recvs[0].list + i * rsge;
	return 0;
}

static bool sane(struct vb_pd *pd, const struct vb_qp_init *in)
{
	const struct vb_cap *c = &in->cap;

	return in->send_cq && in->recv_cq && in->send_cq->context == pd->context && in->recv_cq->context == pd->context && !in->srq &&
	       in->type == VB_QPT_RC && c->max_send <= SIM_MAX_WR && c->max_recv <= SIM_MAX_WR && c->max_send_sge <= SIM_MAX_SGE &&
	       c->max_recv_sge <= SIM_MAX_SGE && c->max_inline <= SIM_INLINE;
}

static void count(struct sim_qp *qp, int by)
{
	sim_count(qp->vb.context, &qp->vb.pd->qps, by);
	sim_count(qp->vb.context, &qp->vb.send_cq->qps, by);
	sim_count(qp->vb.context, &qp->vb.recv_cq->qps, by);
}

static void free_qp(struct sim_qp *qp)
{
	free_queues(qp);
	pthread_cond_destroy(&qp->changed);
	pthread_mutex_destroy(&qp->lock);
	free(qp);
}

struct vb_qp *ibv_create_qp(struct vb_pd *pd, struct vb_qp_init *in)
{
	pthread_condattr_t clock;
	struct sim_qp *qp;

	if (sim_stale(pd->context) || sim_context(pd->context)->fail_create_qp || !sane(pd, in)) {
		errno = sim_stale(pd->context) ? ENODEV : sim_context(pd->context)->fail_create_qp ? EIO : EINVAL;
		return NULL;
	}
	qp = calloc(1, sizeof(*qp));
	if (!qp)
		return NULL;
	qp->vb = (struct vb_qp){ .context = pd->context, .user = in->user, .pd = pd, .send_cq = in->send_cq, .recv_cq = in->recv_cq };
	qp->type = in->type;
	in->cap.max_inline = SIM_INLINE;
	qp->cap = in->cap;
	qp->signal_all = in->signal_all;
	pthread_mutex_init(&qp->lock, NULL);
	pthread_condattr_init(&clock);
	pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	pthread_cond_init(&qp->changed, &clock);
	pthread_condattr_destroy(&clock);
	if (make_queues(qp) || link_open(qp)) {
		int wrong = errno;

		free_qp(qp);
		errno = wrong;
		return NULL;
	}
	count(qp, 1);
	return &qp->vb;
}

int ibv_destroy_qp(struct vb_qp *q)
{
	struct sim_qp *qp = (struct sim_qp *)q;

	if (sim_stale(q->context))
		return 0;
	pthread_mutex_lock(&qp->lock);
	qp->closing = true;
	shut(qp->listen_fd);
	shut(qp->in_fd);
	shut(qp->out_fd);
	pthread_cond_broadcast(&qp->changed);
	pthread_mutex_unlock(&qp->lock);
	link_close(qp);
	cq_forget(q->send_cq, qp);
	cq_forget(q->recv_cq, qp);
	count(qp, -1);
	free_qp(qp);
	return 0;
}
