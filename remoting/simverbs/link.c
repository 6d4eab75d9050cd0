/*
 * What carries the messages of a QP: three threads of it and two connections of Unix stream sockets, one for each direction.
 *
 *	tx_main		connects to the socket that is named after the peer's QP number, once the QP is RTS; says HELLO; takes each send
 *			from the queue and writes a request and its data
 *	rx_main		accepts, once the QP is RTR; reads requests; copies data to memory; takes receives; answers each request in order
 *	acks_main	reads these answers; completes the oldest send at each; copies what a READ has brought
 *
 * Each thread blocks where it likes, since no other waits for it: requests and answers do not share a connection in either direction.
 * Memory of the program's and slots of the queues are touched only with the QP's lock held and the QP alive: behind a flush, or a
 * destroy_qp, the program may do with its memory what it likes. Calls that may block are made without the lock, on a buffer of the thread's.
 *
 * A connection that ends says that the peer has gone: that is nothing to a QP that has nothing to send.
 */
#include "simverbs.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { CHUNK = 64 << 10 };	/* of what is copied with the lock held */

#define GONE_NS (200 * MS)	/* from a send to its failure: the peer has gone */
#define CUT_NS (100 * MS)	/* and: the link is down */
#define SETTLE_NS (2000 * MS)	/* for what was sent before the link went down, and is not answered */
#define RNR_NS (10 * MS)	/* a try to find a receive, where their number is bounded */

struct hello {
	char magic[8];
	uint32_t from, to, psn, mtu, rnr_retries, unused;
	struct vb_gid gid;
};

struct request {
	uint32_t opcode, length, imm, rkey;
	uint64_t addr;
	uint64_t at, due;	/* when it was sent, and when it may arrive */
};

struct answer {
	uint32_t status, length;	/* of the data behind it */
};

static const char magic[8] = "SIMRC 1";

static bool put(int fd, const void *buf, size_t n)
{
	const char *p = buf;

	while (n) {
		ssize_t k = send(fd, p, n, MSG_NOSIGNAL);

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return false;
		p += k;
		n -= (size_t)k;
	}
	return true;
}

static bool get(int fd, void *buf, size_t n)
{
	char *p = buf;

	while (n) {
		ssize_t k = recv(fd, p, n, 0);

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return false;
		p += k;
		n -= (size_t)k;
	}
	return true;
}

/* In the abstract namespace: nothing of it is left behind, whatever becomes of the process. */
static socklen_t name(struct sockaddr_un *a, uint32_t qp_num)
{
	memset(a, 0, sizeof(*a));
	a->sun_family = AF_UNIX;
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
			   (size_t)snprintf(a->sun_path + 1, sizeof(a->sun_path) - 1, "sluice-simverbs-%06x", qp_num));
}

/* A copy between the memory that a request names and a buffer. False: the QP has ended, or, with *status set, the keys are not valid. */
static bool move(struct sim_qp *qp, const struct sim_area *a, uint64_t offset, void *buf, size_t n, bool into, int wrong, int *status)
{
	bool ok;

	pthread_mutex_lock(&qp->lock);
	ok = qp_alive(qp);
	if (ok && !area_copy(qp->vb.pd, a, offset, buf, n, into)) {
		*status = wrong;
		ok = false;
	}
	pthread_mutex_unlock(&qp->lock);
	return ok;
}

/* --- sending --- */

/* Sleeps while the QP lives. With the lock held, as all that follow unless they say otherwise. */
static void rest(struct sim_qp *qp, uint64_t ns)
{
	uint64_t until = sim_now() + ns;

	while (qp_alive(qp) && qp_wait(qp, until))
		;
}

/* Fails the oldest send if the QP still lives. */
static void give_up(struct sim_qp *qp, int status)
{
	if (qp_alive(qp))
		qp_fail(qp, status);
}

/* Until all that was sent before send i is completed. */
static void settle(struct sim_qp *qp, uint64_t i, uint64_t ns)
{
	uint64_t until = ns == UINT64_MAX ? ns : sim_now() + ns;

	while (qp_alive(qp) && !qp->lost && qp->sq_done < i && qp_wait(qp, until))
		;
}

/* Fails send i, whose memory is not registered; if the peer has gone meanwhile it fails for that. */
static void refuse(struct sim_qp *qp, uint64_t i)
{
	settle(qp, i, UINT64_MAX);
	if (!qp->lost)
		give_up(qp, WC_LOCAL_PROTECTION);
}

/* The time that the QP's attributes give a peer to answer: 4.096 us * 2^timeout for each try; 0 is for ever. */
static uint64_t patience(const struct sim_qp *qp)
{
	uint64_t ns = (4096ULL << qp->attr.timeout) * (qp->attr.retries + 1ULL);

	return !qp->attr.timeout ? UINT64_MAX : sim_now() + (ns < GONE_NS ? GONE_NS : ns);
}

static void connect_out(struct sim_qp *qp)
{
	struct hello h = { .from = qp->vb.qp_num, .to = qp->attr.dest_qp_num, .psn = qp->attr.sq_psn, .mtu = (uint32_t)qp->attr.path_mtu,
			   .rnr_retries = qp->attr.rnr_retries, .gid = qp->attr.ah.grh.dgid };
	struct sockaddr_un a;
	socklen_t n = name(&a, h.to);

	memcpy(h.magic, magic, sizeof(magic));
	qp->connected = true;
	if (connect(qp->out_fd, (struct sockaddr *)&a, n) || !put(qp->out_fd, &h, sizeof(h)))
		qp->lost = true;
	pthread_cond_broadcast(&qp->changed);
}

/* Whether the peer has answered HELLO; what it does not answer is a wrong number, or a QP that is not yet RTR. */
static bool answered(struct sim_qp *qp)
{
	uint64_t until = patience(qp);

	while (qp_alive(qp) && !qp->linked && !qp->lost && qp_wait(qp, until))
		;
	if (!qp->linked && !qp->lost)
		give_up(qp, WC_RETRY_EXCEEDED);
	return qp->linked && qp_alive(qp);
}

static struct sim_area local_area(const struct sim_send *s)
{
	return (struct sim_area){ .list = s->list, .sges = s->sges, .access = s->opcode == OP_READ ? VB_ACCESS_LOCAL_WRITE : 0 };
}

/* Whether the next send may go out; else the QP fails with it as soon as those before it are done. */
static bool sendable(struct sim_qp *qp, const struct sim_send *s, uint64_t *at)
{
	struct sim_area a = local_area(s);

	if (!(s->flags & VB_INLINE) && !area_valid(qp->vb.pd, &a)) {
		refuse(qp, qp->sq_sent);
		return false;
	}
	if (!sim_may_send(sim_context(qp->vb.context), at)) {
		rest(qp, CUT_NS);
		settle(qp, qp->sq_sent, SETTLE_NS);
		give_up(qp, WC_RETRY_EXCEEDED);
		return false;
	}
	return true;
}

/* Writes the data behind the request that is in the buffer, and that itself. Without the lock. */
static bool send_data(struct sim_qp *qp, const struct sim_send *s, int *status)
{
	uint32_t length = s->opcode == OP_READ ? 0 : s->length;
	struct sim_area a = local_area(s);
	size_t head = sizeof(struct request);
	uint64_t done = 0;

	do {
		size_t n = length - done < CHUNK ? length - done : CHUNK;

		if (s->flags & VB_INLINE) {
			pthread_mutex_lock(&qp->lock);
			memcpy(qp->tx_buf + head, s->data, n);
			pthread_mutex_unlock(&qp->lock);
		} else if (!move(qp, &a, done, qp->tx_buf + head, n, false, WC_LOCAL_PROTECTION, status)) {
			return false;
		}
		if (!put(qp->out_fd, qp->tx_buf, head + n))
			return false;
		done += n;
		head = 0;
	} while (done < length);
	return true;
}

static void send_next(struct sim_qp *qp)
{
	struct sim_send *slot = &qp->sends[qp->sq_sent % qp->cap.max_send], s = *slot;
	struct request *r = (struct request *)qp->tx_buf;
	int status = 0;
	uint64_t at;
	bool ok;

	if (!answered(qp) || !sendable(qp, slot, &at))
		return;
	*r = (struct request){ .opcode = (uint32_t)s.opcode, .length = s.length, .imm = s.imm, .rkey = s.rkey, .addr = s.addr,
			       .at = at, .due = at + sim_context(qp->vb.context)->latency };
	qp->sq_sent++;
	pthread_mutex_unlock(&qp->lock);
	ok = send_data(qp, &s, &status);
	pthread_mutex_lock(&qp->lock);
	if (status)
		refuse(qp, qp->sq_sent - 1);
	/* What the peer has said before it went is read first. */
	while (!ok && qp_alive(qp) && !qp->lost)
		qp_wait(qp, UINT64_MAX);
}

static bool to_send(const struct sim_qp *qp)
{
	return qp->lost ? qp->sq_done < qp->sq_posted : qp->sq_sent < qp->sq_posted;
}

static void *tx_main(void *arg)
{
	struct sim_qp *qp = arg;

	pthread_mutex_lock(&qp->lock);
	while (qp_alive(qp) && qp->state != VB_QPS_RTS)
		qp_wait(qp, UINT64_MAX);
	if (qp_alive(qp))
		connect_out(qp);
	while (qp_alive(qp)) {
		if (!to_send(qp)) {
			qp_wait(qp, UINT64_MAX);
		} else if (qp->lost) {
			rest(qp, GONE_NS);
			give_up(qp, WC_RETRY_EXCEEDED);
		} else {
			send_next(qp);
		}
	}
	pthread_mutex_unlock(&qp->lock);
	return NULL;
}

/* --- answers --- */

/* The data that a READ has brought. Without the lock. */
static bool take_data(struct sim_qp *qp, const struct sim_send *s, uint32_t length, int *status)
{
	struct sim_area a = local_area(s);

	for (uint64_t done = 0; done < length; ) {
		size_t n = length - done < CHUNK ? length - done : CHUNK;

		if (!get(qp->out_fd, qp->acks_buf, n) || !move(qp, &a, done, qp->acks_buf, n, true, WC_LOCAL_PROTECTION, status))
			return false;
		done += n;
	}
	return true;
}

/* One answer; false: there is no other. Without the lock. */
static bool take_answer(struct sim_qp *qp)
{
	struct sim_send s = { 0 };
	struct answer a;
	int status;
	bool ok;

	if (!get(qp->out_fd, &a, sizeof(a)))
		return false;
	pthread_mutex_lock(&qp->lock);
	ok = qp_alive(qp) && qp->sq_done < qp->sq_sent;
	if (ok)
		s = *qp_oldest(qp);
	pthread_mutex_unlock(&qp->lock);
	if (!ok)
		return false;
	status = (int)a.status;
	if (!status && a.length && !take_data(qp, &s, a.length, &status) && !status)
		return false;
	pthread_mutex_lock(&qp->lock);
	if (status)
		give_up(qp, status);
	else if (qp_alive(qp))
		qp_sent(qp, 0);
	ok = qp_alive(qp);
	pthread_mutex_unlock(&qp->lock);
	return ok;
}

static void *acks_main(void *arg)
{
	struct sim_qp *qp = arg;
	struct answer hello;
	bool ok;

	pthread_mutex_lock(&qp->lock);
	while (qp_alive(qp) && !qp->connected)
		qp_wait(qp, UINT64_MAX);
	ok = qp->connected && !qp->lost;
	pthread_mutex_unlock(&qp->lock);
	if (ok && get(qp->out_fd, &hello, sizeof(hello))) {
		pthread_mutex_lock(&qp->lock);
		qp->linked = true;
		pthread_cond_broadcast(&qp->changed);
		pthread_mutex_unlock(&qp->lock);
		while (take_answer(qp))
			;
	}
	pthread_mutex_lock(&qp->lock);
	qp->lost = true;
	pthread_cond_broadcast(&qp->changed);
	pthread_mutex_unlock(&qp->lock);
	return NULL;
}

/* --- receiving; what serves requests is without the lock --- */

struct serving {
	struct sim_qp *qp;
	int fd;
	uint32_t rnr_retries;
	struct request r;
};

static bool is_peer(struct sim_qp *qp, const struct hello *h)
{
	const struct vb_gid *gid = sim_context(qp->vb.context)->gids;
	bool ok;

	pthread_mutex_lock(&qp->lock);
	ok = !memcmp(h->magic, magic, sizeof(magic)) && h->to == qp->vb.qp_num && h->from == qp->attr.dest_qp_num &&
	     h->psn == qp->attr.rq_psn && h->mtu <= (uint32_t)qp->attr.path_mtu &&
	     (!memcmp(&h->gid, &gid[0], sizeof(*gid)) || !memcmp(&h->gid, &gid[1], sizeof(*gid)));
	pthread_mutex_unlock(&qp->lock);
	return ok;
}

/* The data of a WRITE or SEND into the area. Returns the status for the sender, or -1: the connection or the QP has ended. */
static int store(struct serving *v, const struct sim_area *a, int wrong)
{
	int status = 0;

	for (uint64_t done = 0; done < v->r.length; ) {
		size_t n = v->r.length - done < CHUNK ? v->r.length - done : CHUNK;

		if (!get(v->fd, v->qp->rx_buf, n))
			return -1;
		if (!move(v->qp, a, done, v->qp->rx_buf, n, true, wrong, &status))
			return status ? status : -1;
		done += n;
	}
	return 0;
}

/* Waits for a receive as the sender's retries do. 0, a status, or -1. With the lock held. */
static int want_recv(struct serving *v)
{
	struct sim_qp *qp = v->qp;
	uint64_t until = v->rnr_retries == 7 ? UINT64_MAX : sim_now() + (v->rnr_retries + 1) * RNR_NS;

	while (qp_alive(qp) && qp->rq_done == qp->rq_posted)
		if (!qp_wait(qp, until))
			return WC_RNR_EXCEEDED;
	return qp_alive(qp) ? 0 : -1;
}

static bool permitted(struct sim_qp *qp, const struct sim_area *a, unsigned access)
{
	bool ok;

	pthread_mutex_lock(&qp->lock);
	ok = (qp->attr.access & access) && area_valid(qp->vb.pd, a);
	pthread_mutex_unlock(&qp->lock);
	return ok;
}

static int serve_write(struct serving *v)
{
	struct vb_sge range = { v->r.addr, v->r.length, v->r.rkey };
	struct sim_area a = { &range, 1, VB_ACCESS_REMOTE_WRITE, true };
	int status;

	if (v->r.length && !permitted(v->qp, &a, VB_ACCESS_REMOTE_WRITE))
		return WC_REMOTE_ACCESS;
	status = store(v, &a, WC_REMOTE_ACCESS);
	if (status || v->r.opcode == OP_WRITE)
		return status;
	pthread_mutex_lock(&v->qp->lock);
	status = want_recv(v);
	if (!status)
		qp_received(v->qp, 0, VB_WC_RECV_WITH_IMM, &v->r.imm, v->r.length);
	pthread_mutex_unlock(&v->qp->lock);
	return status;
}

/* The memory is that of the oldest receive, which stays the oldest meanwhile: no other thread takes one, but for a flush. */
static int serve_send(struct serving *v)
{
	struct sim_qp *qp = v->qp;
	struct sim_recv r = { 0 };
	struct sim_area a;
	uint64_t room = 0;
	int status, own = 0;

	pthread_mutex_lock(&qp->lock);
	status = want_recv(v);
	if (!status)
		r = qp->recvs[qp->rq_done % qp->cap.max_recv];
	for (int i = 0; i < r.sges; i++)
		room += r.list[i].length;
	pthread_mutex_unlock(&qp->lock);
	if (status)
		return status;
	a = (struct sim_area){ r.list, r.sges, VB_ACCESS_LOCAL_WRITE, false };
	if (v->r.length > room) {
		status = WC_REMOTE_INVALID;
		own = WC_LOCAL_LENGTH;
	} else {
		status = store(v, &a, WC_REMOTE_OPERATION);
		own = status ? WC_LOCAL_PROTECTION : 0;
	}
	pthread_mutex_lock(&qp->lock);
	if (status >= 0 && qp_alive(qp))
		qp_received(qp, own, VB_WC_RECV, v->r.opcode == OP_SEND_WITH_IMM ? &v->r.imm : NULL, v->r.length);
	pthread_mutex_unlock(&qp->lock);
	return status;
}

/* Answers by itself unless it fails. */
static int serve_read(struct serving *v)
{
	struct vb_sge range = { v->r.addr, v->r.length, v->r.rkey };
	struct sim_area a = { &range, 1, ACCESS_REMOTE_READ, true };
	struct answer ok = { 0, v->r.length };
	int status = 0;

	pthread_mutex_lock(&v->qp->lock);
	if (!v->qp->attr.max_dest_rd_atomic)
		status = WC_REMOTE_INVALID;
	pthread_mutex_unlock(&v->qp->lock);
	if (status)
		return status;
	if (v->r.length && !permitted(v->qp, &a, ACCESS_REMOTE_READ))
		return WC_REMOTE_ACCESS;
	if (!put(v->fd, &ok, sizeof(ok)))
		return -1;
	for (uint64_t done = 0; done < v->r.length; ) {
		size_t n = v->r.length - done < CHUNK ? v->r.length - done : CHUNK;

		if (!move(v->qp, &a, done, v->qp->rx_buf, n, false, WC_REMOTE_ACCESS, &status) || !put(v->fd, v->qp->rx_buf, n))
			return -1;
		done += n;
	}
	return 0;
}

/* Until the time at which the message may arrive. False: the QP has ended, or the link was down when the message was sent. */
static bool arrived(struct serving *v)
{
	struct sim_qp *qp = v->qp;
	bool ok;

	pthread_mutex_lock(&qp->lock);
	while (qp_alive(qp) && sim_now() < v->r.due)
		qp_wait(qp, v->r.due);
	ok = qp_alive(qp) && v->r.at <= sim_context(qp->vb.context)->down_at;
	pthread_mutex_unlock(&qp->lock);
	return ok;
}

/* A failure of the request's ends both QPs: the peer's at the answer, this one here. Not so a receive that was not posted. */
static bool serve_one(struct serving *v)
{
	struct answer a = { 0 };
	int status;

	if (!get(v->fd, &v->r, sizeof(v->r)) || !arrived(v))
		return false;
	if (v->r.opcode == OP_READ)
		status = serve_read(v);
	else
		status = v->r.opcode == OP_SEND || v->r.opcode == OP_SEND_WITH_IMM ? serve_send(v) : serve_write(v);
	if (status < 0)
		return false;
	a.status = (uint32_t)status;
	/* A sender that has gone does not stop those of its messages that are on their way. */
	if (status || v->r.opcode != OP_READ)
		put(v->fd, &a, sizeof(a));
	if (status && status != WC_RNR_EXCEEDED) {
		pthread_mutex_lock(&v->qp->lock);
		give_up(v->qp, 0);
		pthread_mutex_unlock(&v->qp->lock);
	}
	return !status;
}

/* The next connection, as in_fd; false: the QP has ended. */
static bool accept_in(struct sim_qp *qp)
{
	for (;;) {
		struct pollfd p = { .fd = qp->listen_fd, .events = POLLIN };
		bool ok;
		int fd;

		poll(&p, 1, -1);
		fd = sim_accept(qp->listen_fd);
		pthread_mutex_lock(&qp->lock);
		ok = qp_alive(qp);
		if (ok)
			qp->in_fd = fd;
		pthread_mutex_unlock(&qp->lock);
		if (!ok)
			sim_close(fd);
		if (!ok || fd >= 0)
			return ok;
	}
}

static void *rx_main(void *arg)
{
	struct sim_qp *qp = arg;

	pthread_mutex_lock(&qp->lock);
	while (qp_alive(qp) && qp->state != VB_QPS_RTR && qp->state != VB_QPS_RTS)
		qp_wait(qp, UINT64_MAX);
	pthread_mutex_unlock(&qp->lock);
	while (accept_in(qp)) {
		struct serving v = { .qp = qp, .fd = qp->in_fd };
		struct answer welcome = { 0 };
		struct hello h;

		if (get(v.fd, &h, sizeof(h)) && is_peer(qp, &h) && put(v.fd, &welcome, sizeof(welcome))) {
			v.rnr_retries = h.rnr_retries;
			while (serve_one(&v))
				;
		}
		pthread_mutex_lock(&qp->lock);
		qp->in_fd = -1;
		pthread_mutex_unlock(&qp->lock);
		sim_close(v.fd);
	}
	return NULL;
}

/* --- birth and death --- */

/* A QP number that nobody has. 0 and 1 are of the management's. */
static int listen_in(struct sim_qp *qp)
{
	int fd = sim_socket(), wrong;

	for (int tries = 0; fd >= 0 && tries < 1000; tries++) {
		struct sockaddr_un a;
		socklen_t n;

		qp->vb.qp_num = sim_random() & 0xffffff;
		n = name(&a, qp->vb.qp_num);
		if (qp->vb.qp_num < 2 || bind(fd, (struct sockaddr *)&a, n))
			continue;
		if (listen(fd, 64) || fcntl(fd, F_SETFL, O_NONBLOCK))
			break;
		qp->listen_fd = fd;
		return 0;
	}
	wrong = errno;
	sim_close(fd);
	errno = wrong;
	return -1;
}

/* The program's signals are not for these threads. */
static void start(pthread_t *t, void *(*fn)(void *), struct sim_qp *qp)
{
	sigset_t all, old;
	int rc;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	rc = pthread_create(t, NULL, fn, qp);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (rc)
		sim_die("no thread: %s", strerror(rc));
}

int link_open(struct sim_qp *qp)
{
	int wrong;

	qp->listen_fd = qp->in_fd = -1;
	qp->out_fd = sim_socket();
	qp->tx_buf = malloc(sizeof(struct request) + CHUNK);
	qp->acks_buf = malloc(CHUNK);
	qp->rx_buf = malloc(CHUNK);
	if (qp->out_fd < 0 || !qp->tx_buf || !qp->acks_buf || !qp->rx_buf || listen_in(qp)) {
		wrong = errno;
		sim_close(qp->out_fd);
		errno = wrong;
		free(qp->tx_buf);
		free(qp->acks_buf);
		free(qp->rx_buf);
		return -1;
	}
	start(&qp->tx, tx_main, qp);
	start(&qp->acks, acks_main, qp);
	start(&qp->rx, rx_main, qp);
	return 0;
}

/* The QP is closing, and its connections are shut down. */
void link_close(struct sim_qp *qp)
{
	pthread_join(qp->tx, NULL);
	pthread_join(qp->acks, NULL);
	pthread_join(qp->rx, NULL);
	sim_close(qp->listen_fd);
	sim_close(qp->out_fd);
	free(qp->tx_buf);
	free(qp->acks_buf);
	free(qp->rx_buf);
}
