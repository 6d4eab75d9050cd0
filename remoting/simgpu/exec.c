/*
 * Executable graphs. Instantiating flattens a graph, child graphs included, into a
 * plan: works in an order that respects every edge. A launch is one op that runs
 * the plan. A plan that a launch still uses is never changed; an update makes a new
 * one.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

struct exec {
	struct obj obj;
	struct plan *plan;
	uint64_t flags;
	struct history history;		/* of the graph that it was made from */
};

void plan_unref(struct plan *p)
{
	if (--p->refs)
		return;
	for (size_t i = 0; i < p->n; i++)
		work_drop(&p->step[i].work);
	free(p->step);
	users_free(&p->users);
	free(p);
}

static struct plan *plan_copy(const struct plan *src)
{
	struct plan *p = xcalloc(1, sizeof(*p));

	p->refs = 1;
	p->n = p->cap = src->n;
	p->step = xcalloc(src->n, sizeof(*p->step));
	for (size_t i = 0; i < src->n; i++) {
		p->step[i] = src->step[i];
		work_clone(&p->step[i].work, &src->step[i].work);
	}
	users_copy(&p->users, &src->users, 0);
	return p;
}

enum { NEW, OPEN, DONE };

static CUresult fault(struct plan *p, unsigned int why, const struct gnode *n)
{
	p->why = why;
	p->bad = n->obj.handle;
	return CUDA_ERROR_INVALID_VALUE;
}

static CUresult visit(struct plan *p, struct gnode *n, uint64_t top);

static CUresult visit_graph(struct plan *p, struct graph *g, uint64_t top)
{
	CUresult r = CUDA_SUCCESS;

	users_copy(&p->users, &g->users, top);
	for (size_t i = 0; i < g->n; i++)
		g->nodes[i]->mark = NEW;
	for (size_t i = 0; i < g->n && !r; i++)
		r = visit(p, g->nodes[i], top);
	return r;
}

static CUresult visit(struct plan *p, struct gnode *n, uint64_t top)
{
	struct plan_step *s;
	CUresult r = CUDA_SUCCESS;

	if (n->mark == DONE)
		return CUDA_SUCCESS;
	if (n->mark == OPEN)
		return fault(p, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE, n);	/* a cycle */
	n->mark = OPEN;
	for (size_t i = 0; i < n->ndeps && !r; i++)
		r = visit(p, n->deps[i], top);
	n->mark = DONE;
	if (r)
		return r;
	if (n->work.kind == W_HOST && p->body)
		return fault(p, CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED, n);
	if (n->work.kind == W_SET && set_check(&n->work.set.p))
		return CUDA_ERROR_INVALID_VALUE; /* captured, of memory that is nobody's */
	if (n->child)
		return visit_graph(p, n->child, top ? top : n->obj.handle);
	p->step = xgrow(p->step, p->n + 1, &p->cap, sizeof(*p->step));
	s = &p->step[p->n++];
	work_clone(&s->work, &n->work);
	s->node = n->obj.handle;
	s->top = top;
	s->disabled = false;
	if (n->nbody) {
		free(s->work.cond.body);
		s->work.cond.body = xcalloc(n->nbody, sizeof(*s->work.cond.body));
	}
	for (size_t i = 0; i < n->nbody && !r; i++) {
		struct plan *b = xcalloc(1, sizeof(*b));

		b->refs = 1;
		b->body = true;
		/* Not by s: the steps may have moved. */
		p->step[p->n - 1].work.cond.body[i] = b;
		p->step[p->n - 1].work.cond.n = i + 1;
		r = visit_graph(b, n->body[i], top);
		p->why = b->why;
		p->bad = b->bad;
	}
	return r;
}

static void record_now(uint64_t handle, int dev)
{
	struct event *e;

	pthread_mutex_lock(&sim.lock);
	e = obj_get_id(handle, K_EVENT);
	if (e) {
		struct op *op = xcalloc(1, sizeof(*op));

		op->refs = 1;
		op->done = true;
		op->t = sim_time(dev);
		event_uncapture(e);
		op_unref(e->op);
		e->op = op;
	}
	pthread_mutex_unlock(&sim.lock);
}

static void wait_now(uint64_t handle)
{
	struct event *e;

	pthread_mutex_lock(&sim.lock);
	e = obj_get_id(handle, K_EVENT);
	if (e)
		op_wait(e->op);
	pthread_mutex_unlock(&sim.lock);
}

/* Without the lock. */
CUresult plan_run(struct plan *p, struct ctx *c)
{
	CUresult r = CUDA_SUCCESS;

	for (size_t i = 0; i < p->n && !r; i++) {
		struct plan_step *s = &p->step[i];

		if (s->disabled)
			continue;
		if (s->work.kind == W_RECORD)
			record_now(s->work.event.handle, c->dev);
		else if (s->work.kind == W_WAITEV)
			wait_now(s->work.event.handle);
		else
			r = work_run(&s->work, c);
	}
	return r;
}

/* Tells in *told why it fails. */
static CUresult instantiate(CUgraphExec *out, CUgraph h, uint64_t flags, CUDA_GRAPH_INSTANTIATE_PARAMS *told)
{
	struct graph *g;
	struct exec *e;
	struct plan *p;
	CUresult r = sim_enter();

	if (told) {
		told->hErrNode_out = NULL;
		told->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
	}
	if (r)
		return r;
	g = obj_get(h, K_GRAPH);
	if (!g || !out || flags & ~15ULL || g->capturing)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
		return sim_leave(CUDA_ERROR_NOT_SUPPORTED);
	p = xcalloc(1, sizeof(*p));
	p->refs = 1;
	r = visit_graph(p, g, 0);
	if (!r)
		r = gmem_exec(p, 1);
	e = r ? NULL : obj_new(K_EXEC, NULL, sizeof(*e));
	if (told && (e || p->why)) {
		told->hErrNode_out = (CUgraphNode)(uintptr_t)p->bad;
		told->result_out = p->why;
	}
	if (!e) {
		plan_unref(p);
		return sim_leave(r ? r : CUDA_ERROR_OUT_OF_MEMORY);
	}
	e->plan = p;
	e->flags = flags;
	e->history = g->history;
	*out = HANDLE(CUgraphExec, e);
	return sim_leave(CUDA_SUCCESS);
}

static CUresult instantiate_log(CUgraphExec *out, CUgraph g, CUgraphNode *bad, char *log, size_t n)
{
	if (bad)
		*bad = NULL;
	if (log && n)
		log[0] = 0;
	return instantiate(out, g, 0, NULL);
}

API CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph g, CUgraphNode *bad, char *log, size_t n)
{
	return instantiate_log(out, g, bad, log, n);
}

API CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph g, CUgraphNode *bad, char *log, size_t n)
{
	return instantiate_log(out, g, bad, log, n);
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph g, unsigned long long flags)
{
	return instantiate(out, g, flags, NULL);
}

API CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
	return p ? instantiate(out, g, p->flags, p) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
	return cuGraphInstantiateWithParams(out, g, p);
}

static CUresult launch(CUgraphExec h, CUstream st, CUstream dflt, bool run)
{
	struct work w = { .kind = W_GRAPH };
	struct stream *s;
	struct exec *e;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	e = obj_get(h, K_EXEC);
	if (!e)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = stream_get(st, dflt, c, &s);
	if (r || !run)
		return sim_leave(r);
	r = gmem_launch(e->plan, e->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
	if (r)
		return sim_leave(r);
	e->plan->refs++;
	w.graph.plan = e->plan;
	return sim_leave(stream_put(s, &w));
}

API CUresult cuGraphLaunch(CUgraphExec h, CUstream s) { return launch(h, s, NULL, true); }
API CUresult cuGraphLaunch_ptsz(CUgraphExec h, CUstream s) { return launch(h, s, CU_STREAM_PER_THREAD, true); }
API CUresult cuGraphUpload(CUgraphExec h, CUstream s) { return launch(h, s, NULL, false); }
API CUresult cuGraphUpload_ptsz(CUgraphExec h, CUstream s) { return launch(h, s, CU_STREAM_PER_THREAD, false); }

static CUresult enter_exec(CUgraphExec h, struct exec **e)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*e = obj_get(h, K_EXEC);
	return *e ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuGraphExecDestroy(CUgraphExec h)
{
	struct exec *e;
	CUresult r = enter_exec(h, &e);

	if (r)
		return r;
	gmem_exec(e->plan, -1);
	plan_unref(e->plan);
	obj_del(e);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphExecGetFlags(CUgraphExec h, cuuint64_t *flags)
{
	struct exec *e;
	CUresult r = enter_exec(h, &e);

	if (r)
		return r;
	if (!flags)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*flags = e->flags;
	return sim_leave(CUDA_SUCCESS);
}

/* The step of e that was made from node h, in a plan that may be changed. */
static struct plan_step *step_get(struct exec *e, CUgraphNode h)
{
	if (e->plan->refs > 1) {
		struct plan *p = plan_copy(e->plan);

		plan_unref(e->plan);
		e->plan = p;
	}
	for (size_t i = 0; i < e->plan->n; i++)
		if (e->plan->step[i].node == (uintptr_t)h)
			return &e->plan->step[i];
	return NULL;
}

static CUresult step_set(CUgraphExec h, CUgraphNode n, struct work *w)
{
	struct exec *e = obj_get(h, K_EXEC);
	struct plan_step *s = e ? step_get(e, n) : NULL;

	if (!s || s->work.kind != w->kind) {
		work_drop(w);
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	}
	work_drop(&s->work);
	s->work = *w;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult set_kernel(CUgraphExec h, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS_v2 *p, bool v2)
{
	struct work w;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = kernel_work(c, p, v2, &w);
	return r ? sim_leave(r) : step_set(h, n, &w);
}

API CUresult cuGraphExecKernelNodeSetParams(CUgraphExec h, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	return set_kernel(h, n, (const CUDA_KERNEL_NODE_PARAMS_v2 *)(const void *)p, false);
}

API CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec h, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS_v2 *p)
{
	return set_kernel(h, n, p, true);
}

API CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec h, CUgraphNode n, const CUDA_MEMCPY3D *p, CUcontext ctx)
{
	struct work w;
	CUresult r = sim_enter();

	if (r)
		return r;
	r = obj_get(ctx, K_CTX) ? memcpy_work(p, &w) : CUDA_ERROR_INVALID_CONTEXT;
	return r ? sim_leave(r) : step_set(h, n, &w);
}

API CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec h, CUgraphNode n, const CUDA_MEMSET_NODE_PARAMS *p,
					    CUcontext ctx)
{
	struct work w;
	CUresult r = sim_enter();

	if (r)
		return r;
	r = obj_get(ctx, K_CTX) ? memset_work(p, &w) : CUDA_ERROR_INVALID_CONTEXT;
	return r ? sim_leave(r) : step_set(h, n, &w);
}

API CUresult cuGraphExecHostNodeSetParams(CUgraphExec h, CUgraphNode n, const CUDA_HOST_NODE_PARAMS *p)
{
	struct work w = { .kind = W_HOST };
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!p || !p->fn)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	w.host.fn = p->fn;
	w.host.arg = p->userData;
	return step_set(h, n, &w);
}

/* The steps of a child node get the works of another graph of the same form, and its user objects. */
API CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec h, CUgraphNode n, CUgraph gh)
{
	struct plan *p;
	struct exec *e;
	struct graph *g;
	size_t first = 0;
	CUresult r = enter_exec(h, &e);

	if (r)
		return r;
	g = obj_get(gh, K_GRAPH);
	if (!g)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	step_get(e, n);
	while (first < e->plan->n && e->plan->step[first].top != (uintptr_t)n)
		first++;
	p = xcalloc(1, sizeof(*p));
	p->refs = 1;
	r = visit_graph(p, g, (uintptr_t)n);
	if (!r && (!p->n || first + p->n > e->plan->n ||
		   (first + p->n < e->plan->n && e->plan->step[first + p->n].top == (uintptr_t)n)))
		r = CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; !r && i < p->n; i++)
		if (e->plan->step[first + i].top != (uintptr_t)n || e->plan->step[first + i].work.kind != p->step[i].work.kind)
			r = CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; !r && i < p->n; i++) {
		work_drop(&e->plan->step[first + i].work);
		work_clone(&e->plan->step[first + i].work, &p->step[i].work);
	}
	if (!r) {
		users_drop(&e->plan->users, (uintptr_t)n);
		users_copy(&e->plan->users, &p->users, 0);
	}
	plan_unref(p);
	return sim_leave(r);
}

static CUresult set_event(CUgraphExec h, CUgraphNode n, CUevent e, enum wkind kind)
{
	struct work w = { .kind = kind, .event = { (uintptr_t)e } };
	CUresult r = sim_enter();

	if (r)
		return r;
	return obj_get(e, K_EVENT) ? step_set(h, n, &w) : sim_leave(CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec h, CUgraphNode n, CUevent e)
{
	return set_event(h, n, e, W_RECORD);
}

API CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec h, CUgraphNode n, CUevent e)
{
	return set_event(h, n, e, W_WAITEV);
}

static CUresult enabled(CUgraphExec h, CUgraphNode n, const unsigned int *set, unsigned int *get)
{
	struct plan_step *s;
	struct exec *e;
	CUresult r = enter_exec(h, &e);

	if (r)
		return r;
	s = step_get(e, n);
	if (!s || (s->work.kind != W_KERNEL && s->work.kind != W_COPY && s->work.kind != W_SET))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (set)
		s->disabled = !*set;
	if (get)
		*get = !s->disabled;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphNodeSetEnabled(CUgraphExec h, CUgraphNode n, unsigned int on) { return enabled(h, n, &on, NULL); }

API CUresult cuGraphNodeGetEnabled(CUgraphExec h, CUgraphNode n, unsigned int *on)
{
	return on ? enabled(h, n, NULL, on) : CUDA_ERROR_INVALID_VALUE;
}

/*
 * If the shape is the same (kinds of work in the same order, same kernels), the exec takes over the
 * new parameters.
 */
API CUresult cuGraphExecUpdate_v2(CUgraphExec h, CUgraph gh, CUgraphExecUpdateResultInfo *info)
{
	struct graph *g;
	struct plan *p;
	struct exec *e;
	bool same;
	CUresult r = enter_exec(h, &e);

	if (r)
		return r;
	g = obj_get(gh, K_GRAPH);
	if (!g || !info)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	memset(info, 0, sizeof(*info));
	p = xcalloc(1, sizeof(*p));
	p->refs = 1;
	r = visit_graph(p, g, 0);
	same = !r && p->n == e->plan->n;
	for (size_t i = 0; same && i < p->n; i++) {
		same = p->step[i].work.kind == e->plan->step[i].work.kind;
		if (!same)
			break;
		/* The handles stay those of the first graph. */
		for (size_t k = 0; k < p->users.n; k++)
			if (p->step[i].top && p->users.v[k].of == p->step[i].top)
				p->users.v[k].of = e->plan->step[i].top;
		p->step[i].node = e->plan->step[i].node;
		p->step[i].top = e->plan->step[i].top;
	}
	if (!same) {
		info->result = 2;		/* topology changed */
		plan_unref(p);
		return sim_leave(r ? r : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
	}
	plan_unref(e->plan);
	e->plan = p;
	return sim_leave(CUDA_SUCCESS);
}

/* CUDA 11's pairs nodes by the order in which they were added, destroyed ones included. */
API CUresult cuGraphExecUpdate(CUgraphExec h, CUgraph gh, CUgraphNode *bad, CUgraphExecUpdateResult *result)
{
	CUgraphExecUpdateResultInfo info = { 0 };
	struct graph *g;
	struct exec *e;
	bool pairs;
	CUresult r = enter_exec(h, &e);

	if (r)
		return r;
	g = obj_get(gh, K_GRAPH);
	if (!g)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	pairs = g->history.added == e->history.added && g->history.destroyed == e->history.destroyed;
	sim_leave(CUDA_SUCCESS);
	if (pairs) {
		r = cuGraphExecUpdate_v2(h, gh, &info);
	} else {
		r = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
		info.result = 2;	/* topology changed */
	}
	if (bad)
		*bad = NULL;
	if (result)
		*result = info.result;
	return r;
}
