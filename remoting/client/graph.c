/*
 * Graphs: the functions that the table cannot describe. All others are generated.
 */
#include "event.h"
#include "gen.h"
#include "graphdeps.h"
#include "handles.h"
#include "hostfn.h"
#include "launch.h"
#include "mapped.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>

#define DEPENDENCIES_MAX (1 << 20)	/* of one node */

CUresult sl_cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)
{
	if (phErrorNode)
		*phErrorNode = NULL;
	if (logBuffer && bufferSize)
		*logBuffer = 0;
	return sl_cuGraphInstantiateWithFlags(phGraphExec, hGraph, 0);
}

/* Why the worker's driver does not make the graph executable, and by which node. */
static void tell_why(CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
	CUgraphInstantiateResult result;
	CUgraphNode node;

	if (fw_cuGraphInstantiateWithParams(graph, p->flags & ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, &result, &node))
		return;
	p->result_out = result;
	p->hErrNode_out = node;
}

CUresult sl_cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
	CUresult err;

	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	p->hErrNode_out = NULL;
	err = sl_cuGraphInstantiateWithFlags(phGraphExec, hGraph, p->flags & ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
	if (!err && p->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
		err = sl_cuGraphUpload(*phGraphExec, p->hUploadStream);
	p->result_out = err ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
	if (err == CUDA_ERROR_INVALID_VALUE && phGraphExec)
		tell_why(hGraph, p);
	return err;
}

static void nothing(void *arg, CUresult failed)
{
	(void)arg;
	(void)failed;
}

/*
 * The graph may have host nodes or copies of this process's memory. A function behind it keeps what comes after it from
 * reading memory that they are still to write (sl_copy_source_ready).
 */
CUresult sl_cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult err;

	sl_mapped_send();
	err = fw_cuGraphLaunch(hGraphExec, hStream);
	if (!err && __builtin_expect(sl_hostfns_in_graphs(), 0) &&
	    !(sl_capturing_any() && (sl_cuStreamIsCapturing(hStream, &status) || status != CU_STREAM_CAPTURE_STATUS_NONE)))
		err = sl_hostfn_inside(hStream, nothing, NULL);
	return err ? err : sl_launch_end(hStream);
}

/* Events that a graph records: only the worker knows how often they have been recorded. */
CUresult sl_cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUevent event)
{
	uint32_t id;
	CUresult err;
	void *h;

	if (!phGraphNode)
		return CUDA_ERROR_INVALID_VALUE;
	id = sl_handle_new(SL_NODE, NULL, &h);
	if (!id)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sl_event_external(event);
	err = fw_cuGraphAddEventRecordNode(id, hGraph, dependencies, numDependencies, event);
	if (err)
		sl_handle_free(SL_NODE, id);
	else
		*phGraphNode = h;
	return err;
}

CUresult sl_cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event)
{
	sl_event_external(event);
	return fw_cuGraphEventRecordNodeSetEvent(hNode, event);
}

CUresult sl_cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
	sl_event_external(event);
	return fw_cuGraphExecEventRecordNodeSetEvent(hGraphExec, hNode, event);
}

/* No node depends on itself. Other edges that make a circle are found when the graph is instantiated, as the driver does. */
static bool any_self(const CUgraphNode *from, const CUgraphNode *to, size_t n)
{
	for (size_t i = 0; from && to && i < n; i++)
		if (from[i] == to[i])
			return true;
	return false;
}

CUresult sl_cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies)
{
	if (any_self(from, to, numDependencies))
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuGraphAddDependencies(hGraph, from, to, numDependencies);
}

CUresult sl_cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData,
				      size_t numDependencies)
{
	if (any_self(from, to, numDependencies))
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuGraphAddDependencies_v2(hGraph, from, to, edgeData, numDependencies);
}

/* --- the graphs of nodes --- */

void sl_graph_has(CUgraph graph, CUgraphNode node)
{
	sl_handle_set_whole(SL_NODE, node, sl_handle_bare(graph));
}

void sl_graph_beside(CUgraphNode known, CUgraphNode node)
{
	uint32_t graph = sl_handle_whole(SL_NODE, known);

	if (graph)
		sl_handle_set_whole(SL_NODE, node, graph);
}

/* Has every node of a graph known to be its own: those that it has from a capture, a clone or a moved graph may not be yet. */
static CUresult learn(CUgraph graph)
{
	CUgraphNode *nodes;
	size_t n = 0;
	CUresult err = fw_cuGraphGetNodes(graph, NULL, &n);

	if (err || !n)
		return err;
	nodes = calloc(n, sizeof *nodes);
	err = nodes ? fw_cuGraphGetNodes(graph, nodes, &n) : CUDA_ERROR_OUT_OF_MEMORY;
	free(nodes);
	return err;
}

static int by_value(const void *a, const void *b)
{
	const CUgraphNode *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

static CUresult any_twice(const CUgraphNode *deps, size_t n)
{
	CUresult err = CUDA_SUCCESS;
	CUgraphNode *sorted;

	if (n < 2)
		return CUDA_SUCCESS;
	sorted = calloc(n, sizeof *sorted);
	if (!sorted)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(sorted, deps, n * sizeof *sorted);
	qsort(sorted, n, sizeof *sorted, by_value);
	for (size_t i = 1; i < n; i++)
		if (sorted[i] == sorted[i - 1])
			err = CUDA_ERROR_INVALID_VALUE;
	free(sorted);
	return err;
}

CUresult sl_graph_dependencies(CUgraph graph, const CUgraphNode *deps, size_t n)
{
	CUresult err = CUDA_SUCCESS;
	bool asked = false;

	if (!sl_handle_id(SL_GRAPH, graph, &err) || (n && !deps) || n > DEPENDENCIES_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < n; i++) {
		if (!sl_handle_id(SL_NODE, deps[i], &err))
			return CUDA_ERROR_INVALID_VALUE;
		if (!sl_handle_whole(SL_NODE, deps[i]) && !asked) {
			err = learn(graph);
			if (err)
				return err;
			asked = true;
		}
		if (sl_handle_whole(SL_NODE, deps[i]) != sl_handle_bare(graph))
			return CUDA_ERROR_INVALID_VALUE;
	}
	return any_twice(deps, n);
}
