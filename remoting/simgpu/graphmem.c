/*
 * Memory of graphs. An allocation node has its memory from the beginning, where a GPU has an address; what the attributes
 * tell is what launches have allocated. All under sim.lock.
 */
#include <stdlib.h>

#include "sim.h"

enum { USED, USED_HIGH, RESERVED, RESERVED_HIGH };

bool graph_single(const struct graph *g)
{
	for (size_t i = 0; i < g->n; i++) {
		const struct gnode *n = g->nodes[i];

		if (n->work.kind == W_COND || n->work.kind == W_ALLOC || n->work.kind == W_GFREE || (n->child && graph_single(n->child)))
			return true;
	}
	return false;
}

static struct alloc *memory(const struct gmem *m)
{
	struct alloc *a = mem_find(m->base);

	return a && a->id == m->id ? a : NULL;	/* else it ended with its context */
}

static void end(struct gmem *m)
{
	struct alloc *a = memory(m);

	if (m->refs || m->live)
		return;
	if (a)
		mem_free(a);
	free(m);
}

static void set_live(struct gmem *m, bool live)
{
	uint64_t *v = sim.dev[m->dev].graph_mem;

	if (m->live == live)
		return;
	m->live = live;
	v[USED] += live ? m->size : -m->size;
	if (v[RESERVED] < v[USED])
		v[RESERVED] = v[USED];
	for (int i = USED; i <= RESERVED; i += 2)
		if (v[i + 1] < v[i])
			v[i + 1] = v[i];
}

void gmem_unref(struct gmem *m)
{
	m->refs--;
	end(m);
}

CUresult gmem_release(struct alloc *a)
{
	struct gmem *m = a->gmem;

	if (!m->live)
		return CUDA_ERROR_INVALID_VALUE;
	set_live(m, false);
	end(m);
	return CUDA_SUCCESS;
}

static CUresult make(struct ctx *c, int dev, size_t n, struct gmem **out)
{
	struct gmem *m;
	struct alloc *a;
	CUresult r = mem_alloc(c, dev, A_DEVICE, NULL, n, &a);

	if (r)
		return r;
	m = xcalloc(1, sizeof(*m));
	m->refs = 1;
	m->base = a->base;
	m->id = a->id;
	m->size = ROUND_UP(n, GRANULE);
	m->dev = dev;
	a->gmem = m;
	*out = m;
	return CUDA_SUCCESS;
}

/* The memory of an allocation node that no node frees yet; NULL if there is none at p. */
static struct gmem *unfreed(CUdeviceptr p)
{
	struct alloc *a = mem_find(p);

	return a && a->base == p && a->gmem && !a->gmem->freed ? a->gmem : NULL;
}

CUresult gmem_capture(struct stream *s, struct ctx *c, int dev, size_t n, CUdeviceptr *out)
{
	struct work w = { .kind = W_ALLOC };
	CUresult r = make(c, dev, n, &w.gmem.m);
	uint64_t base;

	if (r)
		return r;
	base = w.gmem.m->base;
	r = capture_put(s, &w);
	if (!r)
		*out = base;
	return r;
}

CUresult gmem_capture_free(struct stream *s, CUdeviceptr p)
{
	struct work w = { .kind = W_GFREE, .gmem = { unfreed(p) } };

	if (!w.gmem.m)
		return CUDA_ERROR_INVALID_VALUE;
	w.gmem.m->freed = true;
	w.gmem.m->refs++;
	return capture_put(s, &w);
}

CUresult gmem_launch(struct plan *p, bool again)
{
	for (size_t i = 0; i < p->n && !again; i++)
		if (p->step[i].work.kind == W_ALLOC && p->step[i].work.gmem.m->live)
			return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < p->n; i++)
		if (p->step[i].work.kind == W_ALLOC)
			set_live(p->step[i].work.gmem.m, true);
	for (size_t i = 0; i < p->n; i++)
		if (p->step[i].work.kind == W_GFREE)
			set_live(p->step[i].work.gmem.m, false);
	return CUDA_SUCCESS;
}

CUresult gmem_exec(struct plan *p, int n)
{
	for (size_t i = 0; i < p->n; i++)
		if (n > 0 && p->step[i].work.kind == W_ALLOC && p->step[i].work.gmem.m->execs)
			return CUDA_ERROR_NOT_SUPPORTED;
	for (size_t i = 0; i < p->n; i++)
		if (p->step[i].work.kind == W_ALLOC)
			p->step[i].work.gmem.m->execs += n;
	return CUDA_SUCCESS;
}

/* the calls */

#define ADD_ARGS CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t ndeps

API CUresult cuGraphAddMemAllocNode(ADD_ARGS, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
	struct work w = { .kind = W_ALLOC };
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);
	uint64_t base;

	if (r)
		return r;
	if (!p || p->poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || p->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
	    dev_check(p->poolProps.location.id))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	r = make(c, p->poolProps.location.id, p->bytesize, &w.gmem.m);
	if (r)
		return sim_leave(r);
	base = w.gmem.m->base;
	r = node_add(out, g, deps, ndeps, &w, NULL);
	if (!r)
		p->dptr = base;
	return r;
}

API CUresult cuGraphAddMemFreeNode(ADD_ARGS, CUdeviceptr p)
{
	struct work w = { .kind = W_GFREE };
	CUresult r = sim_enter();

	if (r)
		return r;
	w.gmem.m = unfreed(p);
	if (!w.gmem.m)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	w.gmem.m->freed = true;
	w.gmem.m->refs++;
	return node_add(out, g, deps, ndeps, &w, NULL);
}

API CUresult cuGraphMemAllocNodeGetParams(CUgraphNode h, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
	struct gnode *n;
	struct alloc *a;
	CUresult r = node_enter(h, W_ALLOC, &n);

	if (r)
		return r;
	a = memory(n->work.gmem.m);
	if (!p || !a)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*p = (CUDA_MEM_ALLOC_NODE_PARAMS){ .bytesize = a->size, .dptr = a->base };
	p->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	p->poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	p->poolProps.location.id = a->dev;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuGraphMemFreeNodeGetParams(CUgraphNode h, CUdeviceptr *p)
{
	struct gnode *n;
	CUresult r = node_enter(h, W_GFREE, &n);

	if (r)
		return r;
	if (!p)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*p = n->work.gmem.m->base;
	return sim_leave(CUDA_SUCCESS);
}

static CUresult enter_dev(CUdevice dev)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	r = dev_check(dev);
	return r ? sim_leave(r) : CUDA_SUCCESS;
}

API CUresult cuDeviceGraphMemTrim(CUdevice dev)
{
	CUresult r = enter_dev(dev);

	if (r)
		return r;
	sim.dev[dev].graph_mem[RESERVED] = sim.dev[dev].graph_mem[USED];
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute a, void *v)
{
	CUresult r = enter_dev(dev);

	if (r)
		return r;
	if (!v || a > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	*(cuuint64_t *)v = sim.dev[dev].graph_mem[a];
	return sim_leave(CUDA_SUCCESS);
}

/* A high-water mark may be set to 0: it begins anew. */
API CUresult cuDeviceSetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute a, void *v)
{
	CUresult r = enter_dev(dev);

	if (r)
		return r;
	if (!v || *(cuuint64_t *)v || (a != CU_GRAPH_MEM_ATTR_USED_MEM_HIGH && a != CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH))
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	sim.dev[dev].graph_mem[a] = sim.dev[dev].graph_mem[a - 1];
	return sim_leave(CUDA_SUCCESS);
}
