/*
 * Graphs as a shape of nodes and edges, whatever the nodes do. Nodes are made by
 * hand (graphnode.c) or by capture (capture.c); exec.c runs them. Node arrays keep
 * the order of creation. All under sim.lock.
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
	for (size_t i = 0; i < n->nbody; i++)
		graph_destroy(n->body[i]);
	free(n->body);
	free(n->params);
	free(n->deps);
	obj_del(n);
}

void graph_destroy(struct graph *g)
{
	for (size_t i = 0; i < g->n; i++)
		node_free(g->nodes[i]);
	free(g->nodes);
	users_free(&g->users);
	cond_free(g);
	obj_del(g);
}

/* Takes over what w owns, unless it returns NULL. */
struct gnode *node_new(struct graph *g, struct work *w, struct gnode **deps, size_t ndeps)
{
	struct gnode *n = obj_new(K_NODE, NULL, sizeof(*n));

	if (!n)
		return NULL;
	n->graph = g;
	n->order = g->history.added++;
	n->work = *w;
	n->deps = xcalloc(ndeps, sizeof(*deps));
	n->ndeps = ndeps;
	if (ndeps)
		memcpy(n->deps, deps, ndeps * sizeof(*deps));
	g->nodes = xgrow(g->nodes, g->n + 1, &g->cap_nodes, sizeof(*g->nodes));
	g->nodes[g->n++] = n;
	return n;
}

struct graph *graph_copy(struct graph *src)
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
	users_copy(&g->users, &src->users, 0);
	return g;
}

CUresult graph_enter(CUgraph h, struct graph **g)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*g = obj_get(h, K_GRAPH);
	return *g ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_VALUE);
}

CUresult node_enter(CUgraphNode h, enum wkind kind, struct gnode **n)
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
	CUresult r = graph_enter(h, &g);

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
	CUresult r = graph_enter(h, &g);

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (graph_single(g))
		return sim_leave(CUDA_ERROR_NOT_SUPPORTED);
	copy = graph_copy(g);
	if (!copy)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*out = HANDLE(CUgraph, copy);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode orig, CUgraph h)
{
	struct graph *g;
	CUresult r = graph_enter(h, &g);

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

/* looking at the shape */

API CUresult cuGraphNodeGetType(CUgraphNode h, CUgraphNodeType *type)
{
	struct gnode *n;
	CUresult r = node_enter(h, W_ANY, &n);

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
	case W_ALLOC: *type = CU_GRAPH_NODE_TYPE_MEM_ALLOC; break;
	case W_GFREE: *type = CU_GRAPH_NODE_TYPE_MEM_FREE; break;
	case W_COND: *type = CU_GRAPH_NODE_TYPE_CONDITIONAL; break;
	case W_RECORD: *type = CU_GRAPH_NODE_TYPE_EVENT_RECORD; break;
	case W_WAITEV: *type = CU_GRAPH_NODE_TYPE_WAIT_EVENT; break;
	default: *type = CU_GRAPH_NODE_TYPE_EMPTY; break;
	}
	return sim_leave(CUDA_SUCCESS);
}

/*
 * Returns a list as CUDA does: without an array, the number; with one, up to *n entries, and NULL
 * in the rest of the array.
 */
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
	CUresult r = graph_enter(h, &g);

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
	CUresult r = graph_enter(h, &g);

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
	CUresult r = node_enter(h, W_ANY, &v);

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
	CUresult r = node_enter(h, W_ANY, &v);

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

/* No edge here has data: it is all zeroes. */
static CUresult plain(CUresult r, CUgraphEdgeData *edges, bool list, size_t room, const size_t *n)
{
	if (!r && edges && list)
		memset(edges, 0, (*n < room ? *n : room) * sizeof(*edges));
	return !r && edges && !list ? CUDA_ERROR_INVALID_VALUE : r;
}

API CUresult cuGraphGetEdges_v2(CUgraph h, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edges, size_t *n)
{
	size_t room = n ? *n : 0;

	return plain(cuGraphGetEdges(h, from, to, n), edges, from, room, n);
}

API CUresult cuGraphNodeGetDependencies_v2(CUgraphNode h, CUgraphNode *out, CUgraphEdgeData *edges, size_t *n)
{
	size_t room = n ? *n : 0;

	return plain(cuGraphNodeGetDependencies(h, out, n), edges, out, room, n);
}

API CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode h, CUgraphNode *out, CUgraphEdgeData *edges, size_t *n)
{
	size_t room = n ? *n : 0;

	return plain(cuGraphNodeGetDependentNodes(h, out, n), edges, out, room, n);
}

static void edge_cut(struct gnode *n, size_t k)
{
	memmove(n->deps + k, n->deps + k + 1, (n->ndeps - k - 1) * sizeof(*n->deps));
	n->ndeps--;
}

static CUresult edges(CUgraph h, const CUgraphNode *from, const CUgraphNode *to, size_t count, bool addition)
{
	struct graph *g;
	CUresult r = graph_enter(h, &g);

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

/* Edges have no data here: those of programmatic launches would. */
static bool no_data(const CUgraphEdgeData *data, size_t n)
{
	static const CUgraphEdgeData none;

	for (size_t i = 0; data && i < n; i++)
		if (memcmp(&data[i], &none, sizeof(none)))
			return false;
	return true;
}

API CUresult cuGraphAddDependencies_v2(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t n)
{
	return no_data(data, n) ? edges(g, from, to, n, true) : CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuGraphRemoveDependencies_v2(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t n)
{
	return no_data(data, n) ? edges(g, from, to, n, false) : CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuGraphDestroyNode(CUgraphNode h)
{
	struct gnode *n;
	struct graph *g;
	CUresult r = node_enter(h, W_ANY, &n);

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
	g->history.destroyed += (n->order + 1) * (n->order + 1) * (n->order + 1);
	node_free(n);
	return sim_leave(CUDA_SUCCESS);
}
