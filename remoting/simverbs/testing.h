/*
 * A test is a function that runs in a process of its own, with its own environment. An end is a QP with what belongs to it: one CQ for
 * sends, one for receives, and a buffer that is registered.
 */
#ifndef SLUICE_SIMVERBS_TESTING_H
#define SLUICE_SIMVERBS_TESTING_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../verbs/verbs.h"

enum { OP_WRITE = 0, OP_SEND = 2, OP_SEND_WITH_IMM = 3, OP_READ = 4, REMOTE_READ = 4 };
enum { LOCAL_LENGTH = 1, LOCAL_PROTECTION = 4, REMOTE_INVALID = 9, REMOTE_ACCESS = 10, RETRY_EXCEEDED = 12, RNR_EXCEEDED = 13 };
enum { ALL = VB_ACCESS_LOCAL_WRITE | VB_ACCESS_REMOTE_WRITE | REMOTE_READ };
enum {
	TO_INIT = VB_SET_STATE | VB_SET_PKEY | VB_SET_PORT | VB_SET_ACCESS,
	TO_RTR = VB_SET_STATE | VB_SET_AH | VB_SET_MTU | VB_SET_DEST_QP | VB_SET_RQ_PSN | VB_SET_DEST_RD_ATOMIC | VB_SET_RNR_TIMER,
	TO_RTS = VB_SET_STATE | VB_SET_SQ_PSN | VB_SET_TIMEOUT | VB_SET_RETRIES | VB_SET_RNR_RETRIES | VB_SET_RD_ATOMIC,
};

struct test {
	const char *name;
	void (*fn)(void);
	const char *env;	/* NAME=VALUE */
	int signal;		/* that it dies by */
};

struct end {
	struct vb_context *c;
	struct vb_pd *pd;
	struct vb_channel *channel;
	struct vb_cq *scq, *rcq;
	struct vb_qp *qp;
	struct vb_mr *mr;
	uint8_t *buf;
	size_t size;
	uint8_t timeout, retries, rnr_retries;
};

/* What the other end must know. */
struct address {
	uint32_t qp_num, rkey;
	uint64_t buf;
	struct vb_gid gid;
};

static const struct vb_library *ib;
static int bad;

#define CHECK(e) do { \
	if (!(e)) { \
		fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #e); \
		bad++; \
	} } while (0)
#define IS(e, want) do { \
	long long r_ = (long long)(e), want_ = (long long)(want); \
	if (r_ != want_) { \
		fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #e, r_, want_); \
		bad++; \
	} } while (0)
/* What must work for the rest to make sense. */
#define MUST(e) do { \
	if (!(e)) { \
		fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #e, strerror(errno)); \
		_exit(3); \
	} } while (0)

static double now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static struct vb_context *open_sim(void)
{
	struct vb_context *c;
	struct vb_device **list;
	int n;

	ib = vb_library();
	MUST(ib != NULL);
	list = ib->get_device_list(&n);
	MUST(list && n == 1 && list[0] && !list[1]);
	CHECK(!strcmp(ib->get_device_name(list[0]), "sim0"));
	c = ib->open_device(list[0]);
	MUST(c != NULL);
	ib->free_device_list(list);
	return c;
}

/* An end that is INIT, with queues of `depth`. */
static struct end begin_end(struct vb_context *c, size_t size, int depth)
{
	struct end e = { .c = c, .size = size, .timeout = 14, .retries = 7, .rnr_retries = 7 };
	struct vb_qp_init in = { .cap = { (uint32_t)depth, (uint32_t)depth, 4, 4, 200 }, .type = VB_QPT_RC };
	struct vb_qp_attr a = { .state = VB_QPS_INIT, .port = 1, .access = VB_ACCESS_REMOTE_WRITE | REMOTE_READ };

	MUST(e.pd = ib->alloc_pd(c));
	MUST(e.channel = ib->create_comp_channel(c));
	MUST(e.scq = ib->create_cq(c, depth, &e, NULL, 0));
	MUST(e.rcq = ib->create_cq(c, depth, (void *)0x77, e.channel, 0));
	MUST(e.buf = calloc(1, size));
	MUST(e.mr = ib->reg_mr(e.pd, e.buf, size, ALL));
	in.send_cq = e.scq;
	in.recv_cq = e.rcq;
	MUST(e.qp = ib->create_qp(e.pd, &in));
	IS(in.cap.max_inline, 256);
	MUST(!ib->modify_qp(e.qp, &a, TO_INIT));
	return e;
}

static void end_end(struct end *e)
{
	if (e->qp)
		IS(ib->destroy_qp(e->qp), 0);
	IS(ib->destroy_cq(e->scq), 0);
	IS(ib->destroy_cq(e->rcq), 0);
	IS(ib->destroy_comp_channel(e->channel), 0);
	if (e->mr)
		IS(ib->dereg_mr(e->mr), 0);
	IS(ib->dealloc_pd(e->pd), 0);
	free(e->buf);
}

static struct address address(const struct end *e)
{
	struct address a = { .qp_num = e->qp->qp_num, .rkey = e->mr->rkey, .buf = (uintptr_t)e->buf };

	MUST(!ib->query_gid(e->c, 1, 1, &a.gid));
	return a;
}

static struct vb_qp_attr rtr(const struct address *to)
{
	return (struct vb_qp_attr){ .state = VB_QPS_RTR, .path_mtu = 5, .dest_qp_num = to->qp_num, .rq_psn = to->qp_num, .max_dest_rd_atomic = 1,
				    .min_rnr_timer = 12, .ah = { .is_global = 1, .port = 1, .grh = { .dgid = to->gid, .sgid_index = 1, .hop_limit = 64 } } };
}

static void to_rtr(struct end *e, struct address to)
{
	struct vb_qp_attr a = rtr(&to);

	MUST(!ib->modify_qp(e->qp, &a, TO_RTR));
}

static void to_rts(struct end *e)
{
	struct vb_qp_attr a = { .state = VB_QPS_RTS, .sq_psn = e->qp->qp_num, .timeout = e->timeout, .retries = e->retries,
				.rnr_retries = e->rnr_retries, .max_rd_atomic = 1 };

	MUST(!ib->modify_qp(e->qp, &a, TO_RTS));
}

static void join_ends(struct end *a, struct end *b)
{
	to_rtr(a, address(b));
	to_rtr(b, address(a));
	to_rts(a);
	to_rts(b);
}

/* Two ends in one process. */
static void pair(struct end *a, struct end *b, size_t size, int depth)
{
	struct vb_context *c = open_sim();

	*a = begin_end(c, size, depth);
	*b = begin_end(c, size, depth);
	join_ends(a, b);
}

static void end_pair(struct end *a, struct end *b)
{
	end_end(a);
	end_end(b);
	IS(ib->close_device(a->c), 0);
}

/* Bytes of a's buffer to those of b's, both at `at`. */
static int post(struct end *a, struct address to, int opcode, uint64_t id, size_t at, uint32_t n, unsigned flags)
{
	struct vb_sge s = { (uintptr_t)a->buf + at, n, a->mr ? a->mr->lkey : 0 };
	struct vb_send wr = { .id = id, .list = &s, .sges = 1, .opcode = opcode, .flags = flags, .imm = (uint32_t)id,
			      .rdma = { to.buf + at, to.rkey } }, *b = NULL;
	int rc = a->c->ops.post_send(a->qp, &wr, &b);

	CHECK(rc ? b == &wr : !b);
	return rc;
}

static int post_recv(struct end *e, uint64_t id)
{
	struct vb_recv wr = { .id = id }, *b = NULL;
	int rc = e->c->ops.post_recv(e->qp, &wr, &b);

	CHECK(rc ? b == &wr : !b);
	return rc;
}

/* The next completion within 20 s; else the test is over. */
static struct vb_wc next(struct end *e, struct vb_cq *cq)
{
	double end = now_ms() + 20000;
	struct vb_wc wc = { 0 };

	while (!e->c->ops.poll_cq(cq, 1, &wc)) {
		MUST(now_ms() < end);
		sched_yield();
	}
	return wc;
}

__attribute__((unused)) static bool none(struct end *e, struct vb_cq *cq, double ms)
{
	double end = now_ms() + ms;
	struct vb_wc wc;

	do {
		if (e->c->ops.poll_cq(cq, 1, &wc))
			return false;
		sched_yield();
	} while (now_ms() < end);
	return true;
}

#define EXPECT(e, cq, want_id, want_status) do { \
	struct vb_wc wc_ = next(e, (e)->cq); \
	IS(wc_.id, want_id); \
	IS(wc_.status, want_status); \
	} while (0)

/* A message from a to b that both have completed; b's completion, which waits to be polled, has come before a's. */
__attribute__((unused)) static void message(struct end *a, struct end *b, uint64_t id)
{
	IS(post_recv(b, id), 0);
	IS(post(a, address(b), VB_WRITE_WITH_IMM, id, 0, 8, VB_SIGNALED), 0);
	EXPECT(a, scq, id, 0);
}

static void in_child(const struct test *t)
{
	struct rlimit no = { 0, 0 };

	if (t->env)
		putenv((char *)(uintptr_t)t->env);
	if (t->signal) {
		/* What it says before it dies is as expected. */
		setrlimit(RLIMIT_CORE, &no);
		MUST(freopen("/dev/null", "w", stderr));
	}
	alarm(120);
	t->fn();
	exit(bad ? 1 : 0);
}

static int run_tests(const struct test *t, int argc, char **argv)
{
	int failed = 0;

	for (; t->name; t++) {
		double start = now_ms();
		int st = 0;
		pid_t pid;

		if (argc > 1 && strcmp(argv[1], t->name))
			continue;
		fflush(NULL);
		pid = fork();
		if (!pid)
			in_child(t);
		while (waitpid(pid, &st, 0) < 0 && errno == EINTR)
			;
		if (t->signal)
			st = !(WIFSIGNALED(st) && WTERMSIG(st) == t->signal);
		failed += st != 0;
		printf("%-4s simverbs: %s (%.0f ms)\n", st ? "FAIL" : "ok", t->name, now_ms() - start);
	}
	return failed != 0;
}

#endif
