/* What the simulated libibverbs refuses, and faults that the environment asks for. */
#include "testing.h"

static void t_states(void)
{
	struct vb_context *c = open_sim();
	struct end a = begin_end(c, 64, 4), b = begin_end(c, 64, 4);
	struct vb_qp_init in = { .send_cq = a.scq, .recv_cq = a.rcq, .cap = { 4, 4, 1, 1, 0 }, .type = VB_QPT_RC };
	struct vb_qp_attr attr = { .state = VB_QPS_RTR }, ready;
	struct address to = address(&b);
	struct vb_qp *init = a.qp;

	MUST(a.qp = ib->create_qp(a.pd, &in));
	IS(post_recv(&a, 1), EINVAL);
	IS(post(&a, to, OP_WRITE, 1, 0, 0, 0), EINVAL);
	ready = rtr(&to);
	IS(ib->modify_qp(a.qp, &ready, TO_RTR), EINVAL);		/* from RESET */
	attr = (struct vb_qp_attr){ .state = VB_QPS_INIT, .port = 1 };
	IS(ib->modify_qp(a.qp, &attr, TO_INIT & ~VB_SET_ACCESS), EINVAL);
	attr.port = 2;
	IS(ib->modify_qp(a.qp, &attr, TO_INIT), EINVAL);
	IS(ib->destroy_qp(a.qp), 0);

	a.qp = init;
	IS(post_recv(&a, 1), 0);
	IS(post(&a, to, OP_WRITE, 1, 0, 0, 0), EINVAL);
	for (int bit = 1; bit < 1 << 21; bit <<= 1)
		if (TO_RTR & bit)
			IS(ib->modify_qp(a.qp, &ready, TO_RTR & ~bit), EINVAL);
	IS(ib->modify_qp(a.qp, &ready, TO_RTR | VB_SET_SQ_PSN), EINVAL);
	ready.ah.is_global = 0;
	IS(ib->modify_qp(a.qp, &ready, TO_RTR), EINVAL);
	attr.state = VB_QPS_RTS;
	IS(ib->modify_qp(a.qp, &attr, TO_RTS), EINVAL);		/* not yet RTR */
	to_rtr(&a, to);
	IS(post(&a, to, OP_WRITE, 1, 0, 0, 0), EINVAL);
	for (int bit = 1; bit < 1 << 21; bit <<= 1)
		if (TO_RTS & bit)
			IS(ib->modify_qp(a.qp, &attr, TO_RTS & ~bit), EINVAL);
	to_rts(&a);
	IS(ib->modify_qp(a.qp, &ready, TO_RTR), EINVAL);
	IS(post(&a, to, 5, 1, 0, 0, 0), EINVAL);
	end_pair(&a, &b);
}

static void t_order_of_destruction(void)
{
	struct vb_context *c = open_sim();
	struct end a = begin_end(c, 64, 4);
	struct vb_qp_init in = { .send_cq = a.scq, .recv_cq = a.rcq, .cap = { 4, 4, 1, 1, 257 }, .type = VB_QPT_RC };

	CHECK(!ib->create_qp(a.pd, &in));
	IS(errno, EINVAL);
	IS(ib->close_device(c), EBUSY);
	IS(ib->dealloc_pd(a.pd), EBUSY);
	IS(ib->destroy_cq(a.scq), EBUSY);
	IS(ib->destroy_cq(a.rcq), EBUSY);
	IS(ib->destroy_comp_channel(a.channel), EBUSY);
	IS(ib->destroy_qp(a.qp), 0);
	a.qp = NULL;
	IS(ib->dealloc_pd(a.pd), EBUSY);
	end_end(&a);
	IS(ib->close_device(c), 0);
}

static void t_port(void)
{
	struct vb_context *c = open_sim();
	struct vb_port p;
	struct vb_gid g;

	memset(&p, 0x77, sizeof(p));
	IS(ib->query_port(c, 1, &p), 0);
	IS(p.state, VB_PORT_ACTIVE);
	IS(p.active_mtu, 5);
	IS(p.gids, 2);
	IS(p.link_layer, VB_LINK_ETHERNET);
	CHECK(ib->query_port(c, 2, &p));
	IS(ib->query_gid(c, 1, 0, &g), 0);
	CHECK(!memcmp(g.raw, "\xfe\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\1", 16));
	IS(ib->query_gid(c, 1, 1, &g), 0);
	CHECK(!memcmp(g.raw, "\0\0\0\0\0\0\0\0\0\0\xff\xff\12\1\2\3", 16));
	CHECK(ib->query_gid(c, 1, 2, &g));
	IS(ib->close_device(c), 0);
}

static void t_memlock(void)
{
	struct vb_context *c = open_sim();
	struct vb_pd *pd = ib->alloc_pd(c);
	long page = sysconf(_SC_PAGESIZE);
	uint8_t *p = aligned_alloc((size_t)page, 17 * 4096);
	struct vb_mr *a, *b;

	MUST(pd && p);
	MUST(a = ib->reg_mr(pd, p, 8 * 4096 - 10, ALL));
	MUST(b = ib->reg_mr(pd, p + 8 * 4096, 8 * 4096, ALL));
	CHECK(a->rkey != b->rkey && a->lkey != b->lkey);
	CHECK(!ib->reg_mr(pd, p, 1, ALL));
	IS(errno, ENOMEM);
	IS(ib->dereg_mr(a), 0);
	MUST(a = ib->reg_mr(pd, p, 1, ALL));
	CHECK(!ib->reg_mr(pd, p, 1, VB_ACCESS_REMOTE_WRITE));
	IS(errno, EINVAL);
	CHECK(!ib->reg_mr(pd, (void *)(uintptr_t)page, 1, ALL));
	IS(errno, EFAULT);
	IS(ib->dereg_mr(a), 0);
	IS(ib->dereg_mr(b), 0);
	IS(ib->dealloc_pd(pd), 0);
	IS(ib->close_device(c), 0);
	free(p);
}

static void t_none(void)
{
	int n = 7;
	struct vb_device **list = vb_library()->get_device_list(&n);

	CHECK(list && !list[0]);
	IS(n, 0);
	vb_library()->free_device_list(list);
}

static void t_faults(void)
{
	struct vb_context *c = open_sim();
	struct vb_pd *pd = ib->alloc_pd(c);
	struct vb_cq *cq = ib->create_cq(c, 4, NULL, NULL, 0);
	struct vb_qp_init in = { .send_cq = cq, .recv_cq = cq, .cap = { 4, 4, 1, 1, 0 }, .type = VB_QPT_RC };
	struct vb_qp_attr attr = { .state = VB_QPS_INIT, .port = 1 };
	const char *fault = getenv("SLUICE_SIMVERBS_FAULT");
	struct vb_qp *qp;

	MUST(pd && cq);
	if (strstr(fault, "reg_mr")) {
		CHECK(!ib->reg_mr(pd, &in, sizeof(in), ALL));
		IS(errno, EIO);
	}
	qp = ib->create_qp(pd, &in);
	if (strstr(fault, "create_qp")) {
		CHECK(!qp);
		IS(errno, EIO);
	} else {
		MUST(qp);
		IS(ib->modify_qp(qp, &attr, TO_INIT), EIO);
		IS(ib->destroy_qp(qp), 0);
	}
	IS(ib->destroy_cq(cq), 0);
	IS(ib->dealloc_pd(pd), 0);
	IS(ib->close_device(c), 0);
}

static void t_overrun(void)
{
	struct vb_context *c = open_sim();
	struct end a = begin_end(c, 64, 4);
	struct vb_qp_init in = { .recv_cq = a.rcq, .cap = { 4, 4, 1, 1, 0 }, .type = VB_QPT_RC };
	struct vb_qp_attr err = { .state = VB_QPS_INIT, .port = 1 };

	MUST(in.send_cq = ib->create_cq(c, 1, NULL, NULL, 0));
	in.recv_cq = in.send_cq;
	MUST(a.qp = ib->create_qp(a.pd, &in));
	MUST(!ib->modify_qp(a.qp, &err, TO_INIT));
	post_recv(&a, 1);
	post_recv(&a, 2);
	err.state = VB_QPS_ERR;
	ib->modify_qp(a.qp, &err, VB_SET_STATE);
}

static void t_not_acknowledged(void)
{
	struct vb_cq *cq;
	struct end a, b;
	void *user;

	pair(&a, &b, 64, 4);
	MUST(!b.c->ops.req_notify_cq(b.rcq, 0));
	message(&a, &b, 1);
	MUST(!ib->get_cq_event(b.channel, &cq, &user));
	end_pair(&a, &b);
}

static const struct test tests[] = {
	{ "states", t_states, NULL, 0 },
	{ "order of destruction", t_order_of_destruction, NULL, 0 },
	{ "overrun", t_overrun, NULL, SIGABRT },
	{ "not acknowledged", t_not_acknowledged, NULL, SIGABRT },
	{ "port", t_port, "SLUICE_SIMVERBS_ADDR=10.1.2.3", 0 },
	{ "memlock", t_memlock, "SLUICE_SIMVERBS_MEMLOCK=65536", 0 },
	{ "none", t_none, "SLUICE_SIMVERBS_FAULT=none", 0 },
	{ "fault reg_mr, create_qp", t_faults, "SLUICE_SIMVERBS_FAULT=reg_mr,create_qp", 0 },
	{ "fault modify_qp", t_faults, "SLUICE_SIMVERBS_FAULT=modify_qp", 0 },
	{ NULL, NULL, NULL, 0 },
};

int main(int argc, char **argv)
{
	return run_tests(tests, argc, argv);
}
