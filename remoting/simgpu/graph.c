/*
 * Graphs: nodes with their edges, made by hand or by capture (capture.c).
 * Node arrays keep the order of creation; running is exec.c's business.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

struct graph *graph_new(void)
{
	struct graph *g = obj_new(K_GRAPH, NULL, sizeof(*g));

	if (g)
		g->id = ++sim.serial;
	return g;
}

static void node_free(struct gnode *n)
{
	work_drop(&n->work);
	if (n->child)
		graph_destroy(n->child);
	free(n->params);
	free(n->deps);
	obj_del(n);
}

void graph_destroy(struct graph *g)
{
	for (size_t i = 0; i < g->n; i++)
		node_free(g->nodes[i]);
	free(g->nodes);
	obj_del(g);
}

/* Takes over what w owns, unless it returns NULL. */
struct gnode *node_new(struct graph *g, struct work *w, struct gnode **deps, size_t ndeps)
{
	struct gnode *n = obj_new(K_NODE, NULL, sizeof(*n));

	if (!n)
		return NULL;
	n->graph = g;
	n->work = *w;
	n->deps = xcalloc(ndeps, sizeof(*deps));
	n->ndeps = ndeps;
	if (ndeps)
		memcpy(n->deps, deps, ndeps * sizeof(*deps));
	g->nodes = xgrow(g->nodes, g->n + 1, &g->cap_nodes, sizeof(*g->nodes));
	g->nodes[g->n++] = n;
	return n;
}

/* A copy of src with nodes in the same places. */
static struct graph *graph_copy(struct graph *src)
{
	struct graph *g = graph_new();

	if (!g)
		return NULL;
	for (size_t i = 0; i < src->n; i++)
		src->nodes[i]->mark = i;
	for (size_t i = 0; i < src->n; i++) {
		struct gnode *from = src->nodes[i], *n;
		struct work w;

		work_clone(&w, &from->work);
		n = node_new(g, &w, NULL, 0);
		if (!n) {
			work_drop(&w);
			graph_destroy(g);
			return NULL;
		}
		n->origin = from->obj.handle;
		if (from->child) {
			n->child = graph_copy(from->child);
			if (!n->child) {
				graph_destroy(g);
				return NULL;
			}
		}
	}
	for (size_t i = 0; i < src->n; i++) {
		struct gnode *from = src->nodes[i], *n = g->nodes[i];

		free(n->deps);
		n->deps = xcalloc(from->ndeps, sizeof(*n->deps));
		n->ndeps = from->ndeps;
		for (size_t k = 0; k < from->ndeps; k++)
			n->deps[k] = g->nodes[from->deps[k]->mark];
	}
	return g;
}

static CUresult enter(CUgraph h, struct graph **g)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*g = obj_get(h, K_GRAPH);
	return *g ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_VALUE);
}

static CUresult enter_node(CUgraphNode h, enum wkind kind, struct gnode **n)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*n = obj_get(h, K_NODE);
	if (!*n || (kind != W_ANY && (*n)->work.kind != kind))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	return CUDA_SUCCESS;
}

API CUresult cuGraphCreate(CUgraph *out, unsigned int flags)
{
	CUresult r = sim_enter();
	struct graph *g;

	if (r)
		return r;
	if (!out || flags)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	g = graph_new();
	if (!g)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*out = HANDLE(CUgraph, g);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphDestroy(CUgraph h)
{
	struct graph *g;
	CUresult r = enter(h, &g);

	if (r)
		return r;
	if (g->capturing || g->parent)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	graph_destroy(g);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphClone(CUgraph *out, CUgraph h)
{
	struct graph *g, *copy;
	CUresult r = enter(h, &g);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	copy = graph_copy(g);
	if (!copy)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*out = HANDLE(CUgraph, copy);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode orig, CUgraph h)
{
	struct graph *g;
	CUresult r = enter(h, &g);

	if (r)
		return r;
	for (size_t i = 0; out && i < g->n; i++) {
		if (g->nodes[i]->origin == (uintptr_t)orig) {
			*out = HANDLE(CUgraphNode, g->nodes[i]);
			return sim_leave(CUDA_SUCCESS);
		}
	}
	return sim_leave(CUDA_ERROR_INVALID_VALUE);
}

/* adding nodes */

/* Adds a node with work w (taken over) to graph h. The lock is held, and released. */
static CUresult add(CUgraphNode *out, CUgraph h, const CUgraphNode *deps, size_t ndeps, struct work *w,
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
	return r ? sim_leave(r) : add(out, g, deps, ndeps, &w, NULL);
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
	return r ? sim_leave(r) : add(out, g, deps, ndeps, &w, NULL);
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
	return r ? sim_leave(r) : add(out, g, deps, ndeps, &w, NULL);
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
	return add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphAddEmptyNode(ADD_ARGS)
{
	struct work w = { .kind = W_EMPTY };
	CUresult r = sim_enter();

	return r ? r : add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphAddChildGraphNode(ADD_ARGS, CUgraph child)
{
	struct work w = { .kind = W_CHILD };
	struct graph *c;
	CUresult r = enter(child, &c);

	if (r)
		return r;
	c = graph_copy(c);
	return c ? add(out, g, deps, ndeps, &w, c) : sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
}

static CUresult add_event(ADD_ARGS, CUevent ev, enum wkind kind)
{
	struct work w = { .kind = kind, .event = { (uintptr_t)ev } };
	CUresult r = sim_enter();

	if (r)
		return r;
	if (!obj_get(ev, K_EVENT))
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	return add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphAddEventRecordNode(ADD_ARGS, CUevent ev) { return add_event(out, g, deps, ndeps, ev, W_RECORD); }
API CUresult cuGraphAddEventWaitNode(ADD_ARGS, CUevent ev) { return add_event(out, g, deps, ndeps, ev, W_WAITEV); }

/* parameters of nodes */

API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode h, CUDA_KERNEL_NODE_PARAMS_v2 *p)
{
	struct gnode *n;
	struct kcall *k;
	CUresult r = enter_node(h, W_KERNEL, &n);

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
	CUresult r = enter_node(h, W_COPY, &n);

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
	CUresult r = enter_node(h, W_COPY, &n);

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
	CUresult r = enter_node(h, W_SET, &n);

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
	CUresult r = enter_node(h, W_SET, &n);

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
	CUresult r = enter_node(h, W_HOST, &n);

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
	CUresult r = enter_node(h, W_HOST, &n);

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
	CUresult r = enter_node(h, kind, &n);

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
	CUresult r = enter_node(h, W_CHILD, &n);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*out = HANDLE(CUgraph, n->child);
	return sim_leave(CUDA_SUCCESS);
}

/* looking at the shape */

API CUresult cuGraphNodeGetType(CUgraphNode h, CUgraphNodeType *type)
{
	struct gnode *n;
	CUresult r = enter_node(h, W_ANY, &n);

	if (r)
		return r;
	if (!type)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	switch (n->work.kind) {
	case W_KERNEL: *type = CU_GRAPH_NODE_TYPE_KERNEL; break;
	case W_COPY: *type = CU_GRAPH_NODE_TYPE_MEMCPY; break;
	case W_SET: *type = CU_GRAPH_NODE_TYPE_MEMSET; break;
	case W_HOST: *type = CU_GRAPH_NODE_TYPE_HOST; break;
	case W_CHILD: case W_GRAPH: *type = CU_GRAPH_NODE_TYPE_GRAPH; break;
	case W_RECORD: *type = CU_GRAPH_NODE_TYPE_EVENT_RECORD; break;
	case W_WAITEV: *type = CU_GRAPH_NODE_TYPE_WAIT_EVENT; break;
	default: *type = CU_GRAPH_NODE_TYPE_EMPTY; break;
	}
	return sim_leave(CUDA_SUCCESS);
}

/* CUDA's way to return a list: with no array, how many; else up to *n, the rest of the array NULL. */
static void list_put(CUgraphNode *out, size_t *n, size_t *at, struct gnode *v)
{
	if (out && *at < *n)
		out[*at] = HANDLE(CUgraphNode, v);
	++*at;
}

static CUresult list_end(CUgraphNode *out, size_t *n, size_t at)
{
	for (size_t i = at; out && i < *n; i++)
		out[i] = NULL;
	if (!out || at < *n)
		*n = at;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult nodes(CUgraph h, CUgraphNode *out, size_t *n, bool roots)
{
	struct graph *g;
	size_t at = 0;
	CUresult r = enter(h, &g);

	if (r)
		return r;
	if (!n)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < g->n; i++)
		if (!roots || !g->nodes[i]->ndeps)
			list_put(out, n, &at, g->nodes[i]);
	return list_end(out, n, at);
}

API CUresult cuGraphGetNodes(CUgraph h, CUgraphNode *out, size_t *n) { return nodes(h, out, n, false); }
API CUresult cuGraphGetRootNodes(CUgraph h, CUgraphNode *out, size_t *n) { return nodes(h, out, n, true); }

API CUresult cuGraphGetEdges(CUgraph h, CUgraphNode *from, CUgraphNode *to, size_t *n)
{
	struct graph *g;
	size_t at = 0;
	CUresult r = enter(h, &g);

	if (r)
		return r;
	if (!n || !from != !to)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < g->n; i++) {
		for (size_t k = 0; k < g->nodes[i]->ndeps; k++, at++) {
			if (from && at < *n) {
				from[at] = HANDLE(CUgraphNode, g->nodes[i]->deps[k]);
				to[at] = HANDLE(CUgraphNode, g->nodes[i]);
			}
		}
	}
	for (size_t i = at; from && i < *n; i++)
		from[i] = to[i] = NULL;
	if (!from || at < *n)
		*n = at;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphNodeGetDependencies(CUgraphNode h, CUgraphNode *out, size_t *n)
{
	struct gnode *v;
	size_t at = 0;
	CUresult r = enter_node(h, W_ANY, &v);

	if (r)
		return r;
	if (!n)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < v->ndeps; i++)
		list_put(out, n, &at, v->deps[i]);
	return list_end(out, n, at);
}

API CUresult cuGraphNodeGetDependentNodes(CUgraphNode h, CUgraphNode *out, size_t *n)
{
	struct gnode *v;
	size_t at = 0;
	CUresult r = enter_node(h, W_ANY, &v);

	if (r)
		return r;
	if (!n)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < v->graph->n; i++)
		for (size_t k = 0; k < v->graph->nodes[i]->ndeps; k++)
			if (v->graph->nodes[i]->deps[k] == v)
				list_put(out, n, &at, v->graph->nodes[i]);
	return list_end(out, n, at);
}

static void edge_cut(struct gnode *n, size_t k)
{
	memmove(n->deps + k, n->deps + k + 1, (n->ndeps - k - 1) * sizeof(*n->deps));
	n->ndeps--;
}

static CUresult edges(CUgraph h, const CUgraphNode *from, const CUgraphNode *to, size_t count, bool addition)
{
	struct graph *g;
	CUresult r = enter(h, &g);

	if (r)
		return r;
	if (count && (!from || !to))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < count; i++) {
		struct gnode *a = obj_get(from[i], K_NODE), *b = obj_get(to[i], K_NODE);
		size_t k = 0;

		if (!a || !b || a->graph != g || b->graph != g || a == b)
			return sim_leave(CUDA_ERROR_INVALID_VALUE);
		while (k < b->ndeps && b->deps[k] != a)
			k++;
		if (addition == (k < b->ndeps))		/* there already, or not there */
			return sim_leave(CUDA_ERROR_INVALID_VALUE);
		if (addition) {
			b->deps = realloc(b->deps, (b->ndeps + 1) * sizeof(*b->deps));
			if (!b->deps)
				abort();
			b->deps[b->ndeps++] = a;
		} else {
			edge_cut(b, k);
		}
	}
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphAddDependencies(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n)
{
	return edges(g, from, to, n, true);
}

API CUresult cuGraphRemoveDependencies(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n)
{
	return edges(g, from, to, n, false);
}

API CUresult cuGraphDestroyNode(CUgraphNode h)
{
	struct gnode *n;
	struct graph *g;
	CUresult r = enter_node(h, W_ANY, &n);

	if (r)
		return r;
	g = n->graph;
	if (g->capturing)
		return sim_leave(CUDA_ERROR_NOT_PERMITTED);
	for (size_t i = 0; i < g->n; i++)
		for (size_t k = g->nodes[i]->ndeps; k-- > 0;)
			if (g->nodes[i]->deps[k] == n)
				edge_cut(g->nodes[i], k);
	for (size_t i = 0; i < g->n; i++) {
		if (g->nodes[i] == n) {
			memmove(g->nodes + i, g->nodes + i + 1, (g->n - i - 1) * sizeof(*g->nodes));
			g->n--;
			break;
		}
	}
	node_free(n);
	return sim_leave(CUDA_SUCCESS);
}
