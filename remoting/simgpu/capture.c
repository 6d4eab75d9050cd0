/*
 * Stream capture. While a stream captures, stream_put() ends here: the work becomes
 * a node that depends on the stream's last nodes. Events carry those dependencies
 * to other streams, which join by waiting for them. Work that may not be captured
 * breaks the capture: it ends in INVALIDATED, as in CUDA.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static __thread unsigned int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static void deps_set(struct gnode ***to, size_t *nto, struct gnode **from, size_t n)
{
	struct gnode **v = xcalloc(n, sizeof(*v));

	if (n)
		memcpy(v, from, n * sizeof(*v));
	free(*to);
	*to = v;
	*nto = n;
}

static void deps_add(struct gnode ***to, size_t *nto, struct gnode **from, size_t n)
{
	struct gnode **v = xcalloc(*nto + n, sizeof(*v));
	size_t k = *nto;

	if (k)
		memcpy(v, *to, k * sizeof(*v));
	for (size_t i = 0; i < n; i++) {
		size_t j = 0;

		while (j < k && v[j] != from[i])
			j++;
		if (j == k)
			v[k++] = from[i];
	}
	free(*to);
	*to = v;
	*nto = k;
}

static void cap_unref(struct capture *cap)
{
	if (!--cap->refs)
		free(cap);
}

static void leave(struct stream *s)
{
	if (!s->cap)
		return;
	cap_unref(s->cap);
	s->cap = NULL;
	free(s->cap_deps);
	s->cap_deps = NULL;
	s->ncap = 0;
}

static void join(struct stream *s, struct capture *cap)
{
	s->cap = cap;
	cap->refs++;
}

/* Marks the capture of s as one that cannot be completed. */
void capture_break(struct stream *s)
{
	if (s->cap)
		s->cap->invalid = true;
}

/* The stream is destroyed. */
void capture_drop(struct stream *s)
{
	capture_break(s);
	if (s->cap && s->cap->origin == s)
		s->cap->origin = NULL;
	leave(s);
}

void event_uncapture(struct event *e)
{
	if (!e->cap)
		return;
	cap_unref(e->cap);
	e->cap = NULL;
	free(e->cap_deps);
	e->cap_deps = NULL;
	e->ncap = 0;
}

CUresult capture_put(struct stream *s, struct work *w)
{
	struct gnode *n;

	if (s->cap->invalid) {
		work_drop(w);
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	}
	n = node_new(s->cap->graph, w, s->cap_deps, s->ncap);
	if (!n) {
		work_drop(w);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	deps_set(&s->cap_deps, &s->ncap, &n, 1);
	return CUDA_SUCCESS;
}

CUresult capture_record(struct stream *s, struct event *e)
{
	if (s->cap->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	s->cap->refs++;
	event_uncapture(e);
	e->cap = s->cap;
	deps_set(&e->cap_deps, &e->ncap, s->cap_deps, s->ncap);
	return CUDA_SUCCESS;
}

/* Makes stream s wait for event e, where one of the two captures. */
CUresult capture_wait(struct stream *s, struct event *e)
{
	if (!e->cap) {
		if (!e->op)
			return CUDA_SUCCESS;	/* never recorded */
		capture_break(s);
		return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	}
	if (e->cap->ended)
		return CUDA_ERROR_CAPTURED_EVENT;
	if (e->cap->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (s == s->obj.ctx->legacy)
		return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	if (!s->cap)
		join(s, e->cap);
	if (s->cap != e->cap) {
		s->cap->invalid = e->cap->invalid = true;
		return CUDA_ERROR_STREAM_CAPTURE_MERGE;
	}
	deps_add(&s->cap_deps, &s->ncap, e->cap_deps, e->ncap);
	return CUDA_SUCCESS;
}

/* Calls such as cuMemAlloc may not be made while this thread captures, or any thread in global mode. */
CUresult capture_unsafe(void)
{
	CUresult r = CUDA_SUCCESS;

	if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return r;
	for (struct capture *cap = sim.captures; cap; cap = cap->next) {
		bool own = pthread_equal(cap->thread, pthread_self());

		if (cap->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
			continue;
		if (own || (cap->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
			    thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) {
			cap->invalid = true;
			r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
	}
	return r;
}

/* The default stream would synchronise with a blocking stream that captures; using it breaks the capture. */
CUresult capture_legacy(struct ctx *c, bool uses)
{
	CUresult r = CUDA_SUCCESS;

	if (!sim.captures)
		return r;
	for (struct stream *s = c->streams; s; s = s->next) {
		if (s->cap && !(s->flags & CU_STREAM_NON_BLOCKING)) {
			if (uses)
				capture_break(s);
			r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
		}
	}
	return r;
}

/* the calls */

static CUresult enter(CUstream h, CUstream dflt, struct stream **s)
{
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = stream_get(h, dflt, c, s);
	return r ? sim_leave(r) : CUDA_SUCCESS;
}

/* into: a graph to add to, after deps; NULL for a new one. */
static CUresult begin(CUstream h, CUstream dflt, unsigned int mode, CUgraph into, const CUgraphNode *deps, size_t ndeps)
{
	struct gnode **v = NULL;
	struct capture *cap;
	struct graph *g = NULL;
	struct stream *s;
	CUresult r = enter(h, dflt, &s);

	if (r)
		return r;
	if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (s == s->obj.ctx->legacy)
		return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (s->cap)
		return sim_leave(CUDA_ERROR_ILLEGAL_STATE);
	if (into) {
		g = obj_get(into, K_GRAPH);
		if (!g || g->capturing || ndeps > 1 << 20 || (ndeps && !deps))
			return sim_leave(CUDA_ERROR_INVALID_VALUE);
		v = xcalloc(ndeps, sizeof(*v));
		for (size_t i = 0; i < ndeps && !r; i++) {
			v[i] = obj_get(deps[i], K_NODE);
			if (!v[i] || v[i]->graph != g)
				r = CUDA_ERROR_INVALID_VALUE;
		}
	} else {
		g = graph_new();
		if (!g)
			r = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (r) {
		free(v);
		return sim_leave(r);
	}
	cap = xcalloc(1, sizeof(*cap));
	cap->graph = g;
	cap->into = into != NULL;
	g->capturing = true;
	cap->origin = s;
	cap->mode = mode;
	cap->id = ++sim.serial;
	cap->thread = pthread_self();
	cap->next = sim.captures;
	sim.captures = cap;
	cap->refs = 1;		/* the list's */
	join(s, cap);
	s->cap_deps = v;
	s->ncap = v ? ndeps : 0;
	return sim_leave(CUDA_SUCCESS);
}

#define PT CU_STREAM_PER_THREAD
#define GLOBAL CU_STREAM_CAPTURE_MODE_GLOBAL

API CUresult cuStreamBeginCapture(CUstream h) { return begin(h, NULL, GLOBAL, NULL, NULL, 0); }
API CUresult cuStreamBeginCapture_ptsz(CUstream h) { return begin(h, PT, GLOBAL, NULL, NULL, 0); }
API CUresult cuStreamBeginCapture_v2(CUstream h, CUstreamCaptureMode m) { return begin(h, NULL, m, NULL, NULL, 0); }
API CUresult cuStreamBeginCapture_v2_ptsz(CUstream h, CUstreamCaptureMode m) { return begin(h, PT, m, NULL, NULL, 0); }

API CUresult cuStreamBeginCaptureToGraph(CUstream h, CUgraph g, const CUgraphNode *deps, const CUgraphEdgeData *edges,
					 size_t n, CUstreamCaptureMode m)
{
	if (!g || edges)	/* edges with data are programmatic launches */
		return g ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
	return begin(h, NULL, m, g, deps, n);
}

API CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream h, CUgraph g, const CUgraphNode *deps,
					      const CUgraphEdgeData *edges, size_t n, CUstreamCaptureMode m)
{
	if (!g || edges)
		return g ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
	return begin(h, PT, m, g, deps, n);
}

static void mark_ancestors(struct gnode *n)
{
	if (n->mark)
		return;
	n->mark = 1;
	for (size_t i = 0; i < n->ndeps; i++)
		mark_ancestors(n->deps[i]);
}

/* Every other stream of the capture must have joined its origin again. */
static bool joined(struct capture *cap)
{
	struct stream *origin = cap->origin;

	for (size_t i = 0; i < cap->graph->n; i++)
		cap->graph->nodes[i]->mark = 0;
	for (size_t i = 0; i < origin->ncap; i++)
		mark_ancestors(origin->cap_deps[i]);
	for (struct stream *s = origin->obj.ctx->streams; s; s = s->next)
		for (size_t i = 0; s->cap == cap && i < s->ncap; i++)
			if (!s->cap_deps[i]->mark)
				return false;
	return true;
}

static void capture_close(struct capture *cap, struct ctx *c)
{
	for (struct stream *s = c->streams; s; s = s->next)
		if (s->cap == cap)
			leave(s);
	for (struct capture **p = &sim.captures; *p; p = &(*p)->next) {
		if (*p == cap) {
			*p = cap->next;
			break;
		}
	}
	cap->ended = true;
	cap->graph = NULL;
	cap_unref(cap);
}

static CUresult end(CUstream h, CUstream dflt, CUgraph *out)
{
	struct capture *cap;
	struct graph *g;
	struct stream *s;
	bool into;
	CUresult r = enter(h, dflt, &s);

	if (r == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
		r = CUDA_ERROR_ILLEGAL_STATE;
	if (r)
		return r;
	cap = s->cap;
	if (!cap)
		return sim_leave(CUDA_ERROR_ILLEGAL_STATE);
	if (cap->origin != s) {
		capture_break(s);
		return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	}
	if (cap->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(cap->thread, pthread_self()))
		return sim_leave(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
	if (cap->invalid)
		r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	else if (!joined(cap))
		r = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	else if (!out && !cap->into)
		r = CUDA_ERROR_INVALID_VALUE;
	g = cap->graph;
	g->capturing = false;
	into = cap->into;
	capture_close(cap, s->obj.ctx);
	if (r) {
		if (!into)
			graph_destroy(g);
		if (out)
			*out = NULL;
	} else if (out) {
		*out = HANDLE(CUgraph, g);
	}
	return sim_leave(r);
}

API CUresult cuStreamEndCapture(CUstream h, CUgraph *out) { return end(h, NULL, out); }
API CUresult cuStreamEndCapture_ptsz(CUstream h, CUgraph *out) { return end(h, CU_STREAM_PER_THREAD, out); }

static unsigned int status(struct stream *s)
{
	if (!s->cap)
		return CU_STREAM_CAPTURE_STATUS_NONE;
	return s->cap->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

static CUresult info(CUstream h, CUstream dflt, CUstreamCaptureStatus *st, cuuint64_t *id, CUgraph *graph,
		     const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t *ndeps)
{
	static __thread CUgraphNode *list;	/* what *deps points at until the thread's next call */
	static __thread CUgraphEdgeData *plain;	/* no edge has data */
	static __thread size_t cap, cap_plain;
	struct stream *s;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = stream_find(h, dflt, c, &s);
	if (!r && s == c->legacy)
		r = capture_legacy(c, false);
	if (!r && !st)
		r = CUDA_ERROR_INVALID_VALUE;
	if (r)
		return sim_leave(r);
	*st = status(s);
	if (*st != CU_STREAM_CAPTURE_STATUS_ACTIVE)
		return sim_leave(CUDA_SUCCESS);
	if (id)
		*id = s->cap->id;
	if (graph)
		*graph = HANDLE(CUgraph, s->cap->graph);
	if (edges) {
		plain = xgrow(plain, s->ncap + 1, &cap_plain, sizeof(*plain));
		memset(plain, 0, s->ncap * sizeof(*plain));
		*edges = s->ncap ? plain : NULL;
	}
	if (deps) {
		list = xgrow(list, s->ncap + 1, &cap, sizeof(*list));
		for (size_t i = 0; i < s->ncap; i++)
			list[i] = HANDLE(CUgraphNode, s->cap_deps[i]);
		*deps = s->ncap ? list : NULL;
	}
	if (ndeps)
		*ndeps = s->ncap;
	return sim_leave(CUDA_SUCCESS);
}

#define ST CUstreamCaptureStatus *st

API CUresult cuStreamIsCapturing(CUstream h, ST) { return info(h, NULL, st, NULL, NULL, NULL, NULL, NULL); }
API CUresult cuStreamIsCapturing_ptsz(CUstream h, ST) { return info(h, PT, st, NULL, NULL, NULL, NULL, NULL); }

API CUresult cuStreamGetCaptureInfo(CUstream h, ST, cuuint64_t *id)
{
	return info(h, NULL, st, id, NULL, NULL, NULL, NULL);
}

API CUresult cuStreamGetCaptureInfo_ptsz(CUstream h, ST, cuuint64_t *id)
{
	return info(h, PT, st, id, NULL, NULL, NULL, NULL);
}

API CUresult cuStreamGetCaptureInfo_v2(CUstream h, ST, cuuint64_t *id, CUgraph *g, const CUgraphNode **d, size_t *n)
{
	return info(h, NULL, st, id, g, d, NULL, n);
}

API CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream h, ST, cuuint64_t *id, CUgraph *g, const CUgraphNode **d,
					    size_t *n)
{
	return info(h, PT, st, id, g, d, NULL, n);
}

API CUresult cuStreamGetCaptureInfo_v3(CUstream h, ST, cuuint64_t *id, CUgraph *g, const CUgraphNode **d,
				       const CUgraphEdgeData **e, size_t *n)
{
	return info(h, NULL, st, id, g, d, e, n);
}

API CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream h, ST, cuuint64_t *id, CUgraph *g, const CUgraphNode **d,
					    const CUgraphEdgeData **e, size_t *n)
{
	return info(h, PT, st, id, g, d, e, n);
}

static CUresult update(CUstream h, CUstream dflt, CUgraphNode *deps, size_t n, unsigned int flags)
{
	struct gnode **v;
	struct stream *s;
	CUresult r = enter(h, dflt, &s);

	if (r)
		return r;
	if (!s->cap || s->cap->invalid)
		return sim_leave(s->cap ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_ILLEGAL_STATE);
	if (flags > 1 || (n && !deps) || n > 1 << 20)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	v = xcalloc(n, sizeof(*v));
	for (size_t i = 0; i < n && !r; i++) {
		v[i] = obj_get(deps[i], K_NODE);
		if (!v[i] || v[i]->graph != s->cap->graph)
			r = CUDA_ERROR_INVALID_VALUE;
	}
	if (!r && flags)
		deps_set(&s->cap_deps, &s->ncap, v, n);
	else if (!r)
		deps_add(&s->cap_deps, &s->ncap, v, n);
	free(v);
	return sim_leave(r);
}

API CUresult cuStreamUpdateCaptureDependencies(CUstream h, CUgraphNode *d, size_t n, unsigned int flags)
{
	return update(h, NULL, d, n, flags);
}

API CUresult cuStreamUpdateCaptureDependencies_ptsz(CUstream h, CUgraphNode *d, size_t n, unsigned int flags)
{
	return update(h, PT, d, n, flags);
}

/* Edges with data are programmatic launches, which are not simulated. */
static CUresult update_v2(CUstream h, CUstream dflt, CUgraphNode *d, const CUgraphEdgeData *e, size_t n, unsigned int flags)
{
	static const CUgraphEdgeData zero;

	for (size_t i = 0; e && i < n; i++)
		if (memcmp(&e[i], &zero, sizeof(zero)))
			return CUDA_ERROR_NOT_SUPPORTED;
	return update(h, dflt, d, n, flags);
}

API CUresult cuStreamUpdateCaptureDependencies_v2(CUstream h, CUgraphNode *d, const CUgraphEdgeData *e, size_t n,
						  unsigned int flags)
{
	return update_v2(h, NULL, d, e, n, flags);
}

API CUresult cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream h, CUgraphNode *d, const CUgraphEdgeData *e, size_t n,
						       unsigned int flags)
{
	return update_v2(h, PT, d, e, n, flags);
}

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	CUresult r = sim_enter();
	unsigned int old = thread_mode;

	if (r)
		return r;
	if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	thread_mode = *mode;
	*mode = old;
	return sim_leave(CUDA_SUCCESS);
}
