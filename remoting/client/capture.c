/*
 * Stream capture. The worker's driver captures; this side counts the captures of the process, during which nothing that
 * waits is answered from what is known here, and keeps what cuStreamGetCaptureInfo tells of until it is asked again.
 */
#include "ctx.h"
#include "errstate.h"
#include "gen.h"
#include "handles.h"
#include "stream.h"

#include <stdlib.h>

CUresult sl_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
	CUresult err;

	if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	sl_capturing_add(1);
	err = SL_UNMARKED(fw_cuStreamBeginCapture_v2(hStream, mode));
	if (err)
		sl_capturing_add(-1);
	return err;
}

CUresult sl_cuStreamBeginCapture(CUstream hStream)
{
	return sl_cuStreamBeginCapture_v2(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult sl_cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					const CUgraphEdgeData *dependencyData, size_t n, CUstreamCaptureMode mode)
{
	CUresult err = CUDA_SUCCESS;
	struct sl_stream *s = sl_stream_of(hStream, &err);

	if (mode > CU_STREAM_CAPTURE_MODE_RELAXED || (n && !dependencies))
		return CUDA_ERROR_INVALID_VALUE;
	sl_capturing_add(1);
	err = fw_cuStreamBeginCaptureToGraph(hStream, hGraph, dependencies, dependencyData, n, mode);
	if (err)
		sl_capturing_add(-1);
	else if (s)
		s->cap_into = true;
	return err;
}

CUresult sl_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
	CUresult err = CUDA_SUCCESS;
	struct sl_stream *s = sl_stream_of(hStream, &err);
	bool into = s && s->cap_into;
	CUgraph g = NULL;

	if (!sl_capturing_any())
		return CUDA_ERROR_ILLEGAL_STATE;
	err = SL_UNMARKED(fw_cuStreamEndCapture(hStream, &g));
	/* These errors leave the capture open; any other has ended it. */
	if (err != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED && err != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD &&
	    err != CUDA_ERROR_ILLEGAL_STATE && err != CUDA_ERROR_INVALID_HANDLE) {
		sl_capturing_add(-1);
		if (s)
			s->cap_into = false;
	}
	if (phGraph) {
		*phGraph = g;
	} else if (!err && !into) { /* a graph that nobody has; one that a capture adds to is the program's */
		sl_cuGraphDestroy(g);
		err = CUDA_ERROR_INVALID_VALUE;
	}
	return err;
}

CUresult sl_cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *status)
{
	CUresult err = CUDA_SUCCESS;

	if (!status)
		return CUDA_ERROR_INVALID_VALUE;
	if (sl_capturing_any())
		return SL_UNMARKED(fw_cuStreamIsCapturing(hStream, status));
	sl_stream_id_only(hStream, &err);
	if (!err)
		*status = CU_STREAM_CAPTURE_STATUS_NONE;
	return err;
}

bool sl_stream_captures(CUstream s)
{
	CUstreamCaptureStatus status;

	return sl_capturing_any() && !sl_cuStreamIsCapturing(s, &status) && status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* Room for n nodes in the stream's lists. The lists before stay: another thread may look at them. */
static bool cap_room(struct sl_stream *s, size_t n)
{
	CUgraphNode *nodes;
	CUgraphEdgeData *edges;

	if (s->cap_room >= n)
		return true;
	nodes = calloc(n, sizeof *nodes);
	edges = calloc(n, sizeof *edges);
	if (!nodes || !edges) {
		free(nodes);
		free(edges);
		return false;
	}
	s->cap_nodes = nodes;
	s->cap_edges = edges;
	s->cap_room = n;
	return true;
}

struct capture_info {
	CUstreamCaptureStatus status;
	cuuint64_t id;
	CUgraph graph;
	size_t n;
};

/* What the stream's next node depends on goes to its own lists, which live until the next question. */
static CUresult ask_capture(CUstream hStream, struct sl_stream *s, struct capture_info *i, bool edges)
{
	CUresult err;

	for (size_t room = 32;; room *= 2) {
		if (!cap_room(s, room))
			return CUDA_ERROR_OUT_OF_MEMORY;
		i->n = s->cap_room;
		err = edges ? SL_UNMARKED(fw_cuStreamGetCaptureInfo_v3(hStream, &i->status, &i->id, &i->graph, s->cap_nodes, s->cap_edges, &i->n)) :
			      SL_UNMARKED(fw_cuStreamGetCaptureInfo_v2(hStream, &i->status, &i->id, &i->graph, s->cap_nodes, &i->n));
		if (err || i->n < s->cap_room)
			return err;
	}
}

static CUresult capture_info(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
			     const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t *n)
{
	struct capture_info i = { 0 };
	struct sl_stream *s = NULL;
	CUresult err = CUDA_SUCCESS;

	if (!status)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sl_capturing_any()) {
		sl_stream_id_only(hStream, &err);
		if (!err)
			*status = CU_STREAM_CAPTURE_STATUS_NONE;
		return err;
	}
	s = sl_stream_of(hStream, &err);
	if (s)
		err = ask_capture(hStream, s, &i, edges != NULL);
	else if (!err) /* the legacy stream, which cannot capture */
		err = SL_UNMARKED(fw_cuStreamGetCaptureInfo_v2(hStream, &i.status, &i.id, &i.graph, NULL, &i.n));
	if (err)
		return err;
	*status = i.status;
	if (i.status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
		return CUDA_SUCCESS;
	if (id)
		*id = i.id;
	if (graph)
		*graph = i.graph;
	if (deps)
		*deps = s && i.n ? s->cap_nodes : NULL;
	if (edges)
		*edges = s && i.n ? s->cap_edges : NULL;
	if (n)
		*n = i.n;
	return CUDA_SUCCESS;
}

CUresult sl_cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
	return capture_info(hStream, status, id, NULL, NULL, NULL, NULL);
}

CUresult sl_cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
				      const CUgraphNode **dependencies, size_t *n)
{
	return capture_info(hStream, status, id, graph, dependencies, NULL, n);
}

CUresult sl_cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
				      const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *n)
{
	return capture_info(hStream, status, id, graph, dependencies, edges, n);
}

/*
 * The mode says what the driver forbids a thread that captures; the worker forbids nothing, so the
 * mode stays here.
 */
CUresult sl_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	struct sl_thread *t = sl_tls();
	CUstreamCaptureMode was = t->capture_mode;

	if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	t->capture_mode = *mode;
	*mode = was;
	return CUDA_SUCCESS;
}
