/* The simulated libibverbs, through what a program finds by dlopen. */
#include "testing.h"

/* --- data --- */

static void t_sizes(void)
{
	static const uint32_t sizes[] = { 0, 1, 7, 255, 256, 257, 4096, 65535, 65536, 65537, 1 << 20 };
	struct end a, b;

	pair(&a, &b, 1 << 20, 4);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct vb_wc wc;

		for (size_t k = 0; k < sizes[i]; k++)
			a.buf[k] = (uint8_t)(k * 31 + i);
		IS(post_recv(&b, 100 + i), 0);
		IS(post(&a, address(&b), VB_WRITE_WITH_IMM, i, 0, sizes[i], VB_SIGNALED), 0);
		wc = next(&b, b.rcq);
		IS(wc.id, 100 + i);
		IS(wc.status, 0);
		IS(wc.opcode, VB_WC_RECV_WITH_IMM);
		IS(wc.length, sizes[i]);
		IS(wc.imm, i);
		IS(wc.flags, 2);
		IS(wc.qp_num, b.qp->qp_num);
		CHECK(!memcmp(a.buf, b.buf, sizes[i]));
		wc = next(&a, a.scq);
		IS(wc.id, i);
		IS(wc.status, 0);
		IS(wc.opcode, 1);
		IS(wc.qp_num, a.qp->qp_num);
	}
	end_pair(&a, &b);
}

/* Pieces from several places, one of them empty, and a chain of two requests. */
static void t_gather(void)
{
	struct end a, b;
	struct vb_send wr[2], *wrong = NULL;
	struct vb_sge s[4];

	pair(&a, &b, 300000, 4);
	for (size_t k = 0; k < a.size; k++)
		a.buf[k] = (uint8_t)(k % 251);
	s[0] = (struct vb_sge){ (uintptr_t)a.buf + 1000, 70000, a.mr->lkey };
	s[1] = (struct vb_sge){ 0, 0, 0 };
	s[2] = (struct vb_sge){ (uintptr_t)a.buf, 1, a.mr->lkey };
	s[3] = (struct vb_sge){ (uintptr_t)a.buf + 200000, 100000, a.mr->lkey };
	wr[0] = (struct vb_send){ .id = 1, .next = &wr[1], .list = s, .sges = 4, .opcode = OP_WRITE, .rdma = { (uintptr_t)b.buf + 5, b.mr->rkey } };
	wr[1] = (struct vb_send){ .id = 2, .opcode = VB_WRITE_WITH_IMM, .flags = VB_SIGNALED, .imm = 9 };
	IS(post_recv(&b, 3), 0);
	IS(a.c->ops.post_send(a.qp, wr, &wrong), 0);
	EXPECT(&b, rcq, 3, 0);
	CHECK(!memcmp(b.buf + 5, a.buf + 1000, 70000) && b.buf[70005] == a.buf[0] && !memcmp(b.buf + 70006, a.buf + 200000, 100000));
	EXPECT(&a, scq, 2, 0);
	CHECK(none(&a, a.scq, 0));
	wr[0].sges = 5;
	IS(a.c->ops.post_send(a.qp, wr, &wrong), EINVAL);
	CHECK(wrong == &wr[0]);
	end_pair(&a, &b);
}

/* 10,000 messages, at most 64 of them in flight. Every sixteenth is signaled. */
static void t_order(void)
{
	enum { N = 10000, DEPTH = 64 };
	struct end a, b;
	uint32_t sent = 0, got = 0, seen = 0;

	pair(&a, &b, 8 * DEPTH, DEPTH);
	for (uint32_t i = 0; i < DEPTH; i++)
		IS(post_recv(&b, i), 0);
	while (got < N) {
		struct vb_wc wc;
		uint64_t v = sent;

		memcpy(a.buf + 8 * (sent % DEPTH), &v, 8);
		if (sent < N && sent - got < DEPTH && !post(&a, address(&b), VB_WRITE_WITH_IMM, sent, 8 * (sent % DEPTH), 8,
							    VB_INLINE | (sent % 16 == 15 ? VB_SIGNALED : 0)))
			sent++;
		if (a.c->ops.poll_cq(a.scq, 1, &wc)) {
			MUST(!wc.status && wc.id == seen + 15);
			seen += 16;
		}
		if (!b.c->ops.poll_cq(b.rcq, 1, &wc)) {
			sched_yield();
			continue;
		}
		memcpy(&v, b.buf + 8 * (got % DEPTH), 8);
		MUST(!wc.status && wc.id == got && wc.imm == got && v == got);
		MUST(!post_recv(&b, DEPTH + got++));
	}
	end_pair(&a, &b);
}

static void t_inline(void)
{
	struct end a, b;

	pair(&a, &b, 8 << 20, 8);
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 9, 0, 257, VB_INLINE), EINVAL);
	/* The first waits for a receive; what is behind it in the sockets is less than the second, so that the third is not sent yet. */
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 1, 0, 1, VB_SIGNALED), 0);
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 2, 4096, 7 << 20, VB_SIGNALED), 0);
	memset(a.buf + 100, 42, 256);
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 3, 100, 256, VB_SIGNALED | VB_INLINE), 0);
	memset(a.buf + 100, 43, 256);
	for (uint64_t i = 1; i <= 3; i++)
		IS(post_recv(&b, i), 0);
	for (uint64_t i = 1; i <= 3; i++) {
		EXPECT(&b, rcq, i, 0);
		EXPECT(&a, scq, i, 0);
	}
	CHECK(b.buf[100] == 42 && b.buf[355] == 42 && !b.buf[356]);
	end_pair(&a, &b);
}

static void t_read_and_send(void)
{
	struct vb_recv r = { .id = 5, .sges = 1 }, *wrong;
	struct end a, b;
	struct vb_sge s;
	struct vb_wc wc;

	pair(&a, &b, 300000, 4);
	for (size_t k = 0; k < b.size; k++)
		b.buf[k] = (uint8_t)(k % 241);
	IS(post(&a, address(&b), OP_READ, 1, 10, 250000, VB_SIGNALED), 0);
	wc = next(&a, a.scq);
	IS(wc.status, 0);
	IS(wc.opcode, 2);
	IS(wc.length, 250000);
	CHECK(!a.buf[9] && !memcmp(a.buf + 10, b.buf + 10, 250000) && !a.buf[250010]);

	s = (struct vb_sge){ (uintptr_t)b.buf + 7, 100, b.mr->lkey };
	r.list = &s;
	IS(b.c->ops.post_recv(b.qp, &r, &wrong), 0);
	IS(post(&a, address(&b), OP_SEND_WITH_IMM, 2, 10, 100, VB_SIGNALED), 0);
	wc = next(&b, b.rcq);
	IS(wc.opcode, VB_WC_RECV);
	IS(wc.length, 100);
	IS(wc.imm, 2);
	CHECK(!memcmp(b.buf + 7, a.buf + 10, 100));
	EXPECT(&a, scq, 2, 0);
	/* longer than the receive */
	IS(b.c->ops.post_recv(b.qp, &r, &wrong), 0);
	IS(post(&a, address(&b), OP_SEND, 3, 10, 101, 0), 0);
	EXPECT(&b, rcq, 5, LOCAL_LENGTH);
	EXPECT(&a, scq, 3, REMOTE_INVALID);
	end_pair(&a, &b);
}

static void t_latency(void)
{
	double start;
	struct end a, b;

	pair(&a, &b, 64, 4);
	IS(post_recv(&b, 1), 0);
	start = now_ms();
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 1, 0, 1, VB_SIGNALED), 0);
	EXPECT(&b, rcq, 1, 0);
	CHECK(now_ms() - start >= 50);
	end_pair(&a, &b);
}

/* --- receives that are not posted --- */

static void t_rnr(void)
{
	struct end a, b;

	pair(&a, &b, 64, 4);
	IS(post(&a, address(&b), OP_WRITE, 1, 0, 8, VB_SIGNALED), 0);
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 2, 8, 8, VB_SIGNALED), 0);
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 3, 16, 8, VB_SIGNALED), 0);
	EXPECT(&a, scq, 1, 0);
	CHECK(none(&a, a.scq, 50) && none(&b, b.rcq, 0));
	/* Answers are read while this end waits for a receive: the other direction goes on. */
	IS(post_recv(&a, 7), 0);
	IS(post(&b, address(&a), VB_WRITE_WITH_IMM, 8, 0, 8, VB_SIGNALED), 0);
	EXPECT(&b, scq, 8, 0);
	EXPECT(&a, rcq, 7, 0);
	IS(post_recv(&b, 12), 0);
	EXPECT(&b, rcq, 12, 0);
	EXPECT(&a, scq, 2, 0);
	CHECK(none(&a, a.scq, 20));
	IS(post_recv(&b, 13), 0);
	EXPECT(&b, rcq, 13, 0);
	EXPECT(&a, scq, 3, 0);
	end_pair(&a, &b);
}

static void t_rnr_limit(void)
{
	struct vb_context *c = open_sim();
	struct end a = begin_end(c, 64, 4), b = begin_end(c, 64, 4);

	a.rnr_retries = 1;
	join_ends(&a, &b);
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 1, 0, 8, 0), 0);
	EXPECT(&a, scq, 1, RNR_EXCEEDED);
	IS(post_recv(&b, 2), 0);
	CHECK(none(&b, b.rcq, 20));	/* neither received nor flushed */
	end_pair(&a, &b);
}

/* --- errors --- */

/* A request that the peer refuses: both ends are in error. */
static void refused(struct end *a, struct end *b, struct address to, size_t at, uint32_t n, int opcode)
{
	IS(post_recv(b, 50), 0);
	IS(post_recv(b, 51), 0);
	IS(post_recv(a, 60), 0);
	IS(post(a, to, OP_WRITE, 1, 0, 0, 0), 0);		/* no completion, since it succeeds */
	IS(post(a, to, opcode, 2, at, n, 0), 0);	/* one, since it does not */
	EXPECT(a, scq, 2, REMOTE_ACCESS);
	IS(post(a, to, VB_WRITE_WITH_IMM, 3, 0, 1, 0), 0);
	EXPECT(a, scq, 3, VB_WC_FLUSHED);
	EXPECT(a, rcq, 60, VB_WC_FLUSHED);
	EXPECT(b, rcq, 50, VB_WC_FLUSHED);
	EXPECT(b, rcq, 51, VB_WC_FLUSHED);
	IS(post(b, address(a), VB_WRITE_WITH_IMM, 4, 0, 1, 0), 0);
	EXPECT(b, scq, 4, VB_WC_FLUSHED);
	IS(post_recv(b, 52), 0);
	EXPECT(b, rcq, 52, VB_WC_FLUSHED);
	CHECK(none(a, a->scq, 0) && none(b, b->scq, 0));
}

static void t_bad_key(void)
{
	for (int i = 0; i < 7; i++) {
		struct vb_qp_attr attr = { .access = REMOTE_READ };
		struct end a, b;
		struct address to;
		int opcode = i == 6 ? OP_READ : i & 1 ? OP_WRITE : VB_WRITE_WITH_IMM;

		pair(&a, &b, 4096, 4);
		to = address(&b);
		if (i == 0)
			to.rkey ^= 4;
		else if (i == 1)
			to.buf += 1;
		else if (i == 2)
			to.buf -= 1;
		else if (i == 4)
			IS(ib->modify_qp(b.qp, &attr, VB_SET_ACCESS), 0);
		if (i >= 3 && i != 4) {
			IS(ib->dereg_mr(b.mr), 0);
			MUST(b.mr = ib->reg_mr(b.pd, b.buf, b.size, VB_ACCESS_LOCAL_WRITE));
		}
		if (i == 5)
			to.rkey = b.mr->rkey;	/* a region that may not be written from afar */
		refused(&a, &b, to, 0, 4096, opcode);
		for (size_t k = 0; k < b.size; k++)
			CHECK(!b.buf[k]);
		end_pair(&a, &b);
	}
}

static void t_local_key(void)
{
	struct end a, b;

	pair(&a, &b, 64, 4);
	IS(ib->dereg_mr(a.mr), 0);
	a.mr = NULL;
	IS(post(&a, address(&b), OP_WRITE, 1, 0, 0, VB_SIGNALED), 0);
	IS(post(&a, address(&b), OP_WRITE, 2, 0, 8, VB_SIGNALED), 0);
	IS(post(&a, address(&b), OP_WRITE, 3, 0, 8, VB_SIGNALED), 0);
	EXPECT(&a, scq, 1, 0);
	EXPECT(&a, scq, 2, LOCAL_PROTECTION);
	EXPECT(&a, scq, 3, VB_WC_FLUSHED);
	end_pair(&a, &b);

	/* The region ends while a send from it is under way: what is behind the first in the sockets is less than the second. */
	pair(&a, &b, 8 << 20, 4);
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 1, 0, 8, VB_SIGNALED | VB_INLINE), 0);
	IS(post(&a, address(&b), OP_WRITE, 2, 0, 8 << 20, 0), 0);
	CHECK(none(&b, b.rcq, 20));
	IS(ib->dereg_mr(a.mr), 0);
	a.mr = NULL;
	IS(post_recv(&b, 3), 0);
	EXPECT(&b, rcq, 3, 0);
	EXPECT(&a, scq, 1, 0);
	EXPECT(&a, scq, 2, LOCAL_PROTECTION);
	end_pair(&a, &b);
}

static void t_flush(void)
{
	struct vb_qp_attr err = { .state = VB_QPS_ERR };
	struct end a, b;

	pair(&a, &b, 64, 4);
	for (uint64_t i = 0; i < 4; i++) {
		IS(post(&a, address(&b), VB_WRITE_WITH_IMM, i, 0, 8, 0), 0);
		IS(post_recv(&a, 10 + i), 0);
	}
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 9, 0, 8, 0), ENOMEM);
	IS(post_recv(&a, 9), ENOMEM);
	IS(ib->modify_qp(a.qp, &err, VB_SET_STATE), 0);
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 9, 0, 8, 0), ENOMEM);
	for (uint64_t i = 0; i < 4; i++) {
		EXPECT(&a, scq, i, VB_WC_FLUSHED);
		EXPECT(&a, rcq, 10 + i, VB_WC_FLUSHED);
	}
	/* Now that they are polled each slot is free again. */
	for (uint64_t i = 4; i < 8; i++) {
		IS(post(&a, address(&b), VB_WRITE_WITH_IMM, i, 0, 8, 0), 0);
		IS(post_recv(&a, 10 + i), 0);
	}
	IS(post(&a, address(&b), VB_WRITE_WITH_IMM, 9, 0, 8, 0), ENOMEM);
	IS(post_recv(&a, 9), ENOMEM);
	for (uint64_t i = 4; i < 8; i++) {
		EXPECT(&a, scq, i, VB_WC_FLUSHED);
		EXPECT(&a, rcq, 10 + i, VB_WC_FLUSHED);
	}
	/* The peer knows nothing of it until it sends. */
	IS(post_recv(&b, 20), 0);
	IS(post(&b, address(&a), VB_WRITE_WITH_IMM, 21, 0, 8, 0), 0);
	EXPECT(&b, scq, 21, RETRY_EXCEEDED);
	end_pair(&a, &b);
}

/* "cut=3" */
static void t_cut(void)
{
	struct end a, b;
	double start;

	pair(&a, &b, 64, 8);
	for (uint64_t i = 0; i < 8; i++)
		IS(post_recv(&b, i), 0);
	for (uint64_t i = 0; i < 3; i++) {
		IS(post(&a, address(&b), VB_WRITE_WITH_IMM, i, 0, 8, VB_SIGNALED), 0);
		EXPECT(&b, rcq, i, 0);
		EXPECT(&a, scq, i, 0);
	}
	CHECK(none(&b, b.rcq, 20));
	start = now_ms();
	for (uint64_t i = 3; i < 6; i++)
		IS(post(&a, address(&b), VB_WRITE_WITH_IMM, i, 0, 8, i & 1 ? 0 : VB_SIGNALED), 0);
	EXPECT(&a, scq, 3, RETRY_EXCEEDED);
	CHECK(now_ms() - start >= 100);
	EXPECT(&a, scq, 4, VB_WC_FLUSHED);
	EXPECT(&a, scq, 5, VB_WC_FLUSHED);
	CHECK(none(&b, b.rcq, 0));	/* the peer is idle, and sees nothing */
	IS(post(&b, address(&a), VB_WRITE_WITH_IMM, 9, 0, 8, 0), 0);
	EXPECT(&b, scq, 9, RETRY_EXCEEDED);
	EXPECT(&b, rcq, 3, VB_WC_FLUSHED);
	end_pair(&a, &b);
}

static void t_gone(void)
{
	struct end a, b;
	struct address to;
	double start;

	pair(&a, &b, 64, 4);
	to = address(&b);
	IS(post_recv(&a, 5), 0);
	IS(post_recv(&b, 6), 0);
	IS(post(&a, to, VB_WRITE_WITH_IMM, 1, 0, 8, VB_SIGNALED), 0);
	EXPECT(&a, scq, 1, 0);
	IS(ib->destroy_qp(b.qp), 0);
	b.qp = NULL;
	CHECK(none(&b, b.rcq, 0));	/* its completions went with it */
	CHECK(none(&a, a.rcq, 300));
	start = now_ms();
	IS(post(&a, to, OP_WRITE, 2, 0, 8, 0), 0);
	IS(post(&a, to, OP_WRITE, 3, 0, 8, 0), 0);
	EXPECT(&a, scq, 2, RETRY_EXCEEDED);
	CHECK(now_ms() - start >= 200);
	EXPECT(&a, scq, 3, VB_WC_FLUSHED);
	EXPECT(&a, rcq, 5, VB_WC_FLUSHED);
	end_pair(&a, &b);
}

/* A send before the peer is RTR is retried; one to a peer that does not expect it is not answered. */
static void t_not_ready(void)
{
	struct vb_context *c = open_sim();
	struct end a = begin_end(c, 64, 4), b = begin_end(c, 64, 4), other = begin_end(c, 64, 4);

	to_rtr(&a, address(&b));
	to_rts(&a);
	IS(post(&a, address(&b), OP_WRITE, 1, 0, 8, VB_SIGNALED), 0);
	CHECK(none(&a, a.scq, 50));
	to_rtr(&b, address(&a));
	EXPECT(&a, scq, 1, 0);
	to_rtr(&other, address(&b));
	to_rts(&other);
	IS(post(&other, address(&b), OP_WRITE, 2, 0, 8, 0), 0);
	CHECK(none(&other, other.scq, 50));
	end_end(&other);
	other = begin_end(c, 64, 4);
	other.timeout = 1;
	to_rtr(&other, address(&b));
	to_rts(&other);
	IS(post(&other, address(&b), OP_WRITE, 2, 0, 8, 0), 0);
	EXPECT(&other, scq, 2, RETRY_EXCEEDED);
	end_end(&other);
	end_pair(&a, &b);
}

/* QPs that are destroyed, or fail, while both directions are busy. */
static void t_turmoil(void)
{
	struct vb_qp_attr err = { .state = VB_QPS_ERR };

	for (int i = 0; i < 30; i++) {
		struct end a, b;

		pair(&a, &b, 1 << 20, 16);
		for (uint64_t k = 0; k < 16; k++) {
			if (k < 12) {
				post_recv(&a, k);
				post_recv(&b, k);
			}
			post(&a, address(&b), k & 1 ? VB_WRITE_WITH_IMM : OP_READ, k, 0, 100000, VB_SIGNALED);
			post(&b, address(&a), VB_WRITE_WITH_IMM, k, 500000, 400000, VB_SIGNALED);
		}
		for (int k = 0; k < i % 5; k++)
			next(&a, a.rcq);
		if (i % 3 == 1)
			IS(ib->modify_qp(a.qp, &err, VB_SET_STATE), 0);
		if (i % 3 == 2) {
			IS(ib->dereg_mr(b.mr), 0);
			b.mr = NULL;
		}
		end_pair(&a, &b);
	}
}

/* --- events --- */

static bool readable(struct end *e, int ms)
{
	struct pollfd p = { .fd = e->channel->fd, .events = POLLIN };

	return poll(&p, 1, ms) == 1;
}

static void t_events(void)
{
	struct vb_cq *cq;
	struct end a, b;
	void *user;

	pair(&a, &b, 64, 8);
	MUST(!fcntl(b.channel->fd, F_SETFL, O_NONBLOCK));
	CHECK(fcntl(b.channel->fd, F_GETFD) & FD_CLOEXEC);
	message(&a, &b, 1);
	CHECK(!readable(&b, 0));	/* not armed */
	errno = 0;
	IS(ib->get_cq_event(b.channel, &cq, &user), -1);
	IS(errno, EAGAIN);
	IS(b.c->ops.req_notify_cq(b.rcq, 0), 0);
	CHECK(!readable(&b, 0));	/* for the next one, not for one that is there */
	message(&a, &b, 2);
	message(&a, &b, 3);
	CHECK(readable(&b, 0));
	IS(ib->get_cq_event(b.channel, &cq, &user), 0);
	CHECK(cq == b.rcq && user == (void *)0x77);
	IS(ib->get_cq_event(b.channel, &cq, &user), -1);	/* one event for two */
	CHECK(!readable(&b, 0));
	for (uint64_t i = 1; i <= 3; i++)
		EXPECT(&b, rcq, i, 0);
	/* Events add up if they are not taken. */
	for (uint64_t i = 4; i <= 5; i++) {
		IS(b.c->ops.req_notify_cq(b.rcq, 1), 0);
		IS(b.c->ops.req_notify_cq(b.rcq, 0), 0);
		message(&a, &b, i);
	}
	IS(ib->get_cq_event(b.channel, &cq, &user), 0);
	IS(ib->get_cq_event(b.channel, &cq, &user), 0);
	IS(ib->get_cq_event(b.channel, &cq, &user), -1);
	ib->ack_cq_events(b.rcq, 3);
	/* One that nobody took goes with the CQ. */
	IS(b.c->ops.req_notify_cq(b.rcq, 0), 0);
	message(&a, &b, 6);
	end_pair(&a, &b);
}

/* Arm, poll, wait, as a program does: no message is missed, though each comes at another moment of it. */
static void t_no_lost_event(void)
{
	enum { N = 3000 };
	struct end a, b;
	uint64_t got = 0, events = 0;

	pair(&a, &b, 64, 64);
	for (uint64_t i = 0; i < 64; i++)
		IS(post_recv(&b, i), 0);
	for (uint64_t i = 0; got < N; ) {
		struct vb_wc wc;
		struct vb_cq *cq;
		void *user;

		if (i < N && i - got < 32) {
			/* ENOMEM: receives are ahead of the answers to the sends */
			int rc = post(&a, address(&b), VB_WRITE_WITH_IMM, i, 0, 8, VB_SIGNALED);

			MUST(!rc || rc == ENOMEM);
			i += !rc;
		}
		while (a.c->ops.poll_cq(a.scq, 1, &wc))
			MUST(!wc.status);
		while (b.c->ops.poll_cq(b.rcq, 1, &wc)) {
			MUST(!wc.status && wc.id == got);
			MUST(!post_recv(&b, 64 + got++));
		}
		if (got < i) {
			IS(b.c->ops.req_notify_cq(b.rcq, 0), 0);
			if (b.c->ops.poll_cq(b.rcq, 1, &wc)) {
				MUST(!wc.status && wc.id == got);
				MUST(!post_recv(&b, 64 + got++));
				continue;
			}
			MUST(!ib->get_cq_event(b.channel, &cq, &user));
			ib->ack_cq_events(cq, 1);
			events++;
		}
	}
	CHECK(events > 0);
	end_pair(&a, &b);
}

static const struct test tests[] = {
	{ "sizes", t_sizes, NULL, 0 },
	{ "gather", t_gather, NULL, 0 },
	{ "order", t_order, NULL, 0 },
	{ "inline", t_inline, NULL, 0 },
	{ "read and send", t_read_and_send, NULL, 0 },
	{ "latency", t_latency, "SLUICE_SIMVERBS_LATENCY_US=50000", 0 },
	{ "rnr", t_rnr, NULL, 0 },
	{ "rnr limit", t_rnr_limit, NULL, 0 },
	{ "bad key", t_bad_key, NULL, 0 },
	{ "local key", t_local_key, NULL, 0 },
	{ "flush", t_flush, NULL, 0 },
	{ "cut", t_cut, "SLUICE_SIMVERBS_FAULT=cut=3", 0 },
	{ "gone", t_gone, NULL, 0 },
	{ "not ready", t_not_ready, NULL, 0 },
	{ "turmoil", t_turmoil, NULL, 0 },
	{ "events", t_events, NULL, 0 },
	{ "no lost event", t_no_lost_event, NULL, 0 },
	{ NULL, NULL, NULL, 0 },
};

int main(int argc, char **argv)
{
	return run_tests(tests, argc, argv);
}
