/*
 * Nodes of graphs: adding them by hand, and reading and replacing what they do. A
 * node's work is the same as a stream's (work.c), so kernel_work and its like check
 * parameters for exec.c too. All under sim.lock.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

/* adding nodes */

CUresult node_add(CUgraphNode *out, CUgraph h, const CUgraphNode *deps, size_t ndeps, struct work *w,
		    struct graph *child)
{
	struct graph *g = obj_get(h, K_GRAPH);
	struct gnode **v, *n = NULL;
	CUresult r = CUDA_SUCCESS;

	if (!g || !out || (ndeps && !deps) || ndeps > 1 << 20)
		r = CUDA_ERROR_INVALID_VALUE;
	v = xcalloc(r ? 0 : ndeps, sizeof(*v));
	for (size_t i = 0; !r && i < ndeps; i++) {
		v[i] = obj_get(deps[i], K_NODE);
		if (!v[i] || v[i]->graph != g)
			r = CUDA_ERROR_INVALID_VALUE;
		for (size_t k = 0; !r && k < i; k++)
			if (v[k] == v[i])
				r = CUDA_ERROR_INVALID_VALUE;
	}
	if (!r) {
		n = node_new(g, w, v, ndeps);
		if (!n)
			r = CUDA_ERROR_OUT_OF_MEMORY;
	}
	free(v);
	if (r) {
		work_drop(w);
		if (child)
			graph_destroy(child);
		return sim_leave(r);
	}
	n->child = child;
	if (child)
		child->parent = n;
	*out = HANDLE(CUgraphNode, n);
	return sim_leave(CUDA_SUCCESS);
}

#define ADD_ARGS CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t ndeps

CUresult kernel_work(struct ctx *c, const CUDA_KERNEL_NODE_PARAMS_v2 *p, bool v2, struct work *w)
{
	CUfunction f;

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	f = p->func ? p->func : v2 ? (CUfunction)p->kern : NULL;
	memset(w, 0, sizeof(*w));
	w->kind = W_KERNEL;
	return kcall_make(c, f, (const unsigned int[3]){ p->gridDimX, p->gridDimY, p->gridDimZ },
			  (const unsigned int[3]){ p->blockDimX, p->blockDimY, p->blockDimZ }, p->sharedMemBytes,
			  p->kernelParams, p->extra, 0, &w->kernel);
}

static CUresult add_kernel(ADD_ARGS, const CUDA_KERNEL_NODE_PARAMS_v2 *p, bool v2)
{
	struct work w;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = kernel_work(c, p, v2, &w);
	return r ? sim_leave(r) : node_add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphAddKernelNode(ADD_ARGS, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	return add_kernel(out, g, deps, ndeps, (const CUDA_KERNEL_NODE_PARAMS_v2 *)(const void *)p, false);
}

API CUresult cuGraphAddKernelNode_v2(ADD_ARGS, const CUDA_KERNEL_NODE_PARAMS_v2 *p)
{
	return add_kernel(out, g, deps, ndeps, p, true);
}

CUresult memcpy_work(const CUDA_MEMCPY3D *p, struct work *w)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	memset(w, 0, sizeof(*w));
	w->kind = W_COPY;
	w->copy.desc = *p;
	return copy3d_make(p, &w->copy.c);
}

API CUresult cuGraphAddMemcpyNode(ADD_ARGS, const CUDA_MEMCPY3D *p, CUcontext ctx)
{
	struct work w;
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!obj_get(ctx, K_CTX))
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	r = memcpy_work(p, &w);
	return r ? sim_leave(r) : node_add(out, g, deps, ndeps, &w, NULL);
}

CUresult memset_work(const CUDA_MEMSET_NODE_PARAMS *p, struct work *w)
{
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	memset(w, 0, sizeof(*w));
	w->kind = W_SET;
	w->set.p = *p;
	return set_check(p);
}

API CUresult cuGraphAddMemsetNode(ADD_ARGS, const CUDA_MEMSET_NODE_PARAMS *p, CUcontext ctx)
{
	struct work w;
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!obj_get(ctx, K_CTX))
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	r = memset_work(p, &w);
	return r ? sim_leave(r) : node_add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphAddHostNode(ADD_ARGS, const CUDA_HOST_NODE_PARAMS *p)
{
	struct work w = { .kind = W_HOST };
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!p || !p->fn)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	w.host.fn = p->fn;
	w.host.arg = p->userData;
	return node_add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphAddEmptyNode(ADD_ARGS)
{
	struct work w = { .kind = W_EMPTY };
	CUresult r = sim_enter();

	return r ? r : node_add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphAddChildGraphNode(ADD_ARGS, CUgraph child)
{
	struct work w = { .kind = W_CHILD };
	struct graph *c;
	CUresult r = graph_enter(child, &c);

	if (r)
		return r;
	if (graph_single(c))
		return sim_leave(CUDA_ERROR_NOT_SUPPORTED);
	c = graph_copy(c);
	return c ? node_add(out, g, deps, ndeps, &w, c) : sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
}

static CUresult add_moved(ADD_ARGS, CUgraph child)
{
	struct work w = { .kind = W_CHILD };
	struct gnode *n;
	struct graph *c;
	CUresult r = graph_enter(child, &c);

	if (r)
		return r;
	if (c->parent || c->capturing || child == g)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = node_add(out, g, deps, ndeps, &w, NULL);
	if (r)
		return r;
	r = sim_enter();
	if (r)
		return r;
	n = obj_get(*out, K_NODE);
	n->child = c;
	c->parent = n;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult add_event(ADD_ARGS, CUevent ev, enum wkind kind)
{
	struct work w = { .kind = kind, .event = { (uintptr_t)ev } };
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!obj_get(ev, K_EVENT))
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	return node_add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphAddEventRecordNode(ADD_ARGS, CUevent ev) { return add_event(out, g, deps, ndeps, ev, W_RECORD); }
API CUresult cuGraphAddEventWaitNode(ADD_ARGS, CUevent ev) { return add_event(out, g, deps, ndeps, ev, W_WAITEV); }

/* The bodies are told in a list that the node has. */
static CUresult add_conditional(ADD_ARGS, CUDA_CONDITIONAL_NODE_PARAMS *p)
{
	struct work w = { .kind = W_COND };
	struct graph **body;
	struct gnode *n;
	struct cond *c;
	bool fits;
	CUresult r = sim_enter();

	if (r)
		return r;
	c = obj_get_id(p->handle, K_COND);
	fits = p->type == CU_GRAPH_COND_TYPE_SWITCH ? p->size > 0 : p->type == CU_GRAPH_COND_TYPE_IF ? p->size == 1 || p->size == 2 :
	       p->type == CU_GRAPH_COND_TYPE_WHILE && p->size == 1;
	if (!c || c->used || !fits || p->size > 1 << 16)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	c->refs++;
	w.cond.c = c;
	w.cond.type = p->type;
	r = node_add(out, g, deps, ndeps, &w, NULL);
	if (r)
		return r;
	r = node_enter(*out, W_COND, &n);
	if (r)
		return r;
	c->used = true;
	body = xcalloc(p->size, sizeof(*body));
	n->params = xcalloc(p->size, sizeof(*n->params));
	for (unsigned int i = 0; i < p->size; i++) {
		body[i] = graph_new();
		if (!body[i])
			abort();
		body[i]->parent = n;
		n->params[i] = HANDLE(void *, body[i]);
	}
	n->body = body;
	n->nbody = p->size;
	p->phGraph_out = (CUgraph *)(void *)n->params;
	return sim_leave(CUDA_SUCCESS);
}

/* Of the kinds that have no function of their own. */
API CUresult cuGraphAddNode(ADD_ARGS, CUgraphNodeParams *p)
{
	if (!p || (p->type == CU_GRAPH_NODE_TYPE_GRAPH && p->graph.ownership > CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE))
		return CUDA_ERROR_INVALID_VALUE;
	if (p->type == CU_GRAPH_NODE_TYPE_GRAPH)
		return p->graph.ownership ? add_moved(out, g, deps, ndeps, p->graph.graph) : cuGraphAddChildGraphNode(out, g, deps, ndeps, p->graph.graph);
	return p->type == CU_GRAPH_NODE_TYPE_CONDITIONAL ? add_conditional(out, g, deps, ndeps, &p->conditional) : CUDA_ERROR_NOT_SUPPORTED;
}

/* Every edge here is a plain one: data that CUDA has for others is not supported. */
API CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, const CUgraphEdgeData *data, size_t ndeps,
			       CUgraphNodeParams *p)
{
	for (size_t i = 0; data && i < ndeps; i++) {
		if (data[i].to_port || data[i].from_port > 2 || data[i].type > 1 || (data[i].type && (!p || p->type != CU_GRAPH_NODE_TYPE_KERNEL)))
			return CUDA_ERROR_INVALID_VALUE;
		if (data[i].from_port || data[i].type)
			return CUDA_ERROR_NOT_SUPPORTED;
	}
	return cuGraphAddNode(out, g, deps, ndeps, p);
}

/* parameters of nodes */

API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode h, CUDA_KERNEL_NODE_PARAMS_v2 *p)
{
	struct gnode *n;
	struct kcall *k;
	CUresult r = node_enter(h, W_KERNEL, &n);

	if (r)
		return r;
	if (!p)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	k = &n->work.kernel;
	free(n->params);
	n->params = xcalloc(k->twin->k->nparams, sizeof(*n->params));
	for (uint32_t i = 0; i < k->twin->k->nparams; i++)
		n->params[i] = k->params + k->twin->offset[i];
	memset(p, 0, sizeof(*p));
	if (obj_get_id(k->func, K_KERNEL))
		p->kern = (CUkernel)(uintptr_t)k->func;
	else
		p->func = (CUfunction)(uintptr_t)k->func;
	p->gridDimX = k->grid[0];
	p->gridDimY = k->grid[1];
	p->gridDimZ = k->grid[2];
	p->blockDimX = k->block[0];
	p->blockDimY = k->block[1];
	p->blockDimZ = k->block[2];
	p->sharedMemBytes = k->shared;
	p->kernelParams = n->params;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphKernelNodeGetParams(CUgraphNode h, CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	CUDA_KERNEL_NODE_PARAMS_v2 v2;
	CUresult r = p ? cuGraphKernelNodeGetParams_v2(h, &v2) : CUDA_ERROR_INVALID_VALUE;

	if (!r) {
		memcpy(p, &v2, sizeof(*p));
		if (!p->func)
			p->func = (CUfunction)v2.kern;
	}
	return r;
}

static void replace(struct gnode *n, struct work *w)
{
	work_drop(&n->work);
	n->work = *w;
}

static CUresult set_kernel(CUgraphNode h, const CUDA_KERNEL_NODE_PARAMS_v2 *p, bool v2)
{
	struct gnode *n;
	struct work w;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	n = obj_get(h, K_NODE);
	if (!n || n->work.kind != W_KERNEL)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = kernel_work(c, p, v2, &w);
	if (!r)
		replace(n, &w);
	return sim_leave(r);
}

API CUresult cuGraphKernelNodeSetParams(CUgraphNode h, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	return set_kernel(h, (const CUDA_KERNEL_NODE_PARAMS_v2 *)(const void *)p, false);
}

API CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode h, const CUDA_KERNEL_NODE_PARAMS_v2 *p)
{
	return set_kernel(h, p, true);
}

API CUresult cuGraphMemcpyNodeGetParams(CUgraphNode h, CUDA_MEMCPY3D *p)
{
	struct gnode *n;
	CUresult r = node_enter(h, W_COPY, &n);

	if (r)
		return r;
	if (!p)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*p = n->work.copy.desc;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphMemcpyNodeSetParams(CUgraphNode h, const CUDA_MEMCPY3D *p)
{
	struct gnode *n;
	struct work w;
	CUresult r = node_enter(h, W_COPY, &n);

	if (r)
		return r;
	r = memcpy_work(p, &w);
	if (!r)
		replace(n, &w);
	return sim_leave(r);
}

API CUresult cuGraphMemsetNodeGetParams(CUgraphNode h, CUDA_MEMSET_NODE_PARAMS *p)
{
	struct gnode *n;
	CUresult r = node_enter(h, W_SET, &n);

	if (r)
		return r;
	if (!p)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*p = n->work.set.p;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphMemsetNodeSetParams(CUgraphNode h, const CUDA_MEMSET_NODE_PARAMS *p)
{
	struct gnode *n;
	struct work w;
	CUresult r = node_enter(h, W_SET, &n);

	if (r)
		return r;
	r = memset_work(p, &w);
	if (!r)
		replace(n, &w);
	return sim_leave(r);
}

API CUresult cuGraphHostNodeGetParams(CUgraphNode h, CUDA_HOST_NODE_PARAMS *p)
{
	struct gnode *n;
	CUresult r = node_enter(h, W_HOST, &n);

	if (r)
		return r;
	if (!p)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	p->fn = n->work.host.fn;
	p->userData = n->work.host.arg;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphHostNodeSetParams(CUgraphNode h, const CUDA_HOST_NODE_PARAMS *p)
{
	struct gnode *n;
	CUresult r = node_enter(h, W_HOST, &n);

	if (r)
		return r;
	if (!p || !p->fn)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	n->work.host.fn = p->fn;
	n->work.host.arg = p->userData;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult node_event(CUgraphNode h, enum wkind kind, CUevent *get, CUevent set)
{
	struct gnode *n;
	CUresult r = node_enter(h, kind, &n);

	if (r)
		return r;
	if (get)
		*get = (CUevent)(uintptr_t)n->work.event.handle;
	else if (!obj_get(set, K_EVENT))
		r = CUDA_ERROR_INVALID_HANDLE;
	else
		n->work.event.handle = (uintptr_t)set;
	return sim_leave(r);
}

API CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode h, CUevent *e)
{
	return e ? node_event(h, W_RECORD, e, NULL) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode h, CUevent e) { return node_event(h, W_RECORD, NULL, e); }

API CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode h, CUevent *e)
{
	return e ? node_event(h, W_WAITEV, e, NULL) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode h, CUevent e) { return node_event(h, W_WAITEV, NULL, e); }

API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode h, CUgraph *out)
{
	struct gnode *n;
	CUresult r = node_enter(h, W_CHILD, &n);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = HANDLE(CUgraph, n->child);
	return sim_leave(CUDA_SUCCESS);
}
