/*
 * Conditional nodes: a condition has a value, and the node runs one of its bodies by it, or the one as long as it is not 0.
 * Values are read and written without the lock, by the thread that runs the graph.
 */
#include <stdlib.h>

#include "sim.h"

void cond_unref(struct cond *c)
{
	if (!--c->refs)
		obj_del(c);
}

void cond_free(struct graph *g)
{
	for (size_t i = 0; i < g->ncond; i++)
		cond_unref(g->cond[i]);
	free(g->cond);
}

void plan_begin(struct plan *p)
{
	for (size_t i = 0; i < p->n; i++) {
		struct work *w = &p->step[i].work;

		if (w->kind != W_COND)
			continue;
		if (w->cond.c->assign)
			w->cond.c->value = w->cond.c->dflt;
		for (size_t k = 0; k < w->cond.n; k++)
			plan_begin(w->cond.body[k]);
	}
}

static bool dying(struct ctx *c)
{
	bool d;

	pthread_mutex_lock(&sim.lock);
	d = c->dying;
	pthread_mutex_unlock(&sim.lock);
	return d;
}

CUresult cond_run(const struct work *w, struct ctx *c)
{
	const unsigned int *value = &w->cond.c->value;
	CUresult r = CUDA_SUCCESS;

	switch (w->cond.type) {
	case CU_GRAPH_COND_TYPE_IF:
		if (*value || w->cond.n > 1)
			r = plan_run(w->cond.body[*value ? 0 : 1], c);
		break;
	case CU_GRAPH_COND_TYPE_WHILE:
		while (!r && *value && !dying(c))
			r = plan_run(w->cond.body[0], c);
		break;
	default:
		if (*value < w->cond.n)
			r = plan_run(w->cond.body[*value], c);
		break;
	}
	return r;
}

API CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *out, CUgraph h, CUcontext ctx, unsigned int value,
					    unsigned int flags)
{
	struct graph *g;
	struct cond *c;
	CUresult r = graph_enter(h, &g);

	if (r)
		return r;
	if (!out || flags > 1 || (ctx && !obj_get(ctx, K_CTX)))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (!ctx)
		return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
	c = obj_new(K_COND, NULL, sizeof(*c));
	if (!c)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	c->refs = 1;
	c->value = c->dflt = value;
	c->assign = flags;
	g->cond = xgrow(g->cond, g->ncond + 1, &g->cap_cond, sizeof(*g->cond));
	g->cond[g->ncond++] = c;
	*out = c->obj.handle;
	return sim_leave(CUDA_SUCCESS);
}
