/* Nodes of graphs whose parameters are packed as a launch's are. */
#include <string.h>

#include "driver.h"

static CUDA_KERNEL_NODE_PARAMS_v2 kernel_node(const struct sl_kernel_node *k, const void *params, size_t *size, void *extra[5])
{
	return (CUDA_KERNEL_NODE_PARAMS_v2){
		.func = (CUfunction)k->fn, .gridDimX = k->grid[0], .gridDimY = k->grid[1], .gridDimZ = k->grid[2], .blockDimX = k->block[0],
		.blockDimY = k->block[1], .blockDimZ = k->block[2], .sharedMemBytes = k->shared, .extra = sl_extra(extra, params, size),
	};
}

int sl_graph_add_kernel(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, const struct sl_kernel_node *k,
			const void *params, uint64_t size)
{
	void *extra[5];
	CUDA_KERNEL_NODE_PARAMS_v2 p = kernel_node(k, params, &size, extra);

	return CU(cuGraphAddKernelNode_v2, (CUgraphNode *)node, (CUgraph)graph, (const CUgraphNode *)deps, ndeps, &p);
}

int sl_graph_set_kernel(uint64_t exec, uint64_t node, const struct sl_kernel_node *k, const void *params, uint64_t size)
{
	void *extra[5];
	CUDA_KERNEL_NODE_PARAMS_v2 p = kernel_node(k, params, &size, extra);

	return exec ? CU(cuGraphExecKernelNodeSetParams_v2, (CUgraphExec)exec, (CUgraphNode)node, &p) :
		      CU(cuGraphKernelNodeSetParams_v2, (CUgraphNode)node, &p);
}

int sl_graph_update_first(uint64_t exec, uint64_t graph, CUgraphNode *node, CUgraphExecUpdateResult *result)
{
	return CU(cuGraphExecUpdate, (CUgraphExec)exec, (CUgraph)graph, node, result);
}

int sl_graph_update(uint64_t exec, uint64_t graph, CUgraphExecUpdateResultInfo *info)
{
	return CU(cuGraphExecUpdate_v2, (CUgraphExec)exec, (CUgraph)graph, info);
}

void sl_graph_why(uint64_t graph, uint64_t flags, CUgraphInstantiateResult *result, uint64_t *node)
{
	CUDA_GRAPH_INSTANTIATE_PARAMS p = { .flags = flags };
	CUgraphExec made = NULL;

	*result = CUDA_GRAPH_INSTANTIATE_ERROR;
	*node = 0;
	if (!sl_has(FN_cuGraphInstantiateWithParams))
		return;
	if (!CU(cuGraphInstantiateWithParams, &made, (CUgraph)graph, &p)) {
		CU(cuGraphExecDestroy, made);
		return;
	}
	*result = p.result_out;
	*node = (uint64_t)p.hErrNode_out;
}

int sl_graph_get_kernel(uint64_t node, CUDA_KERNEL_NODE_PARAMS *p)
{
	return CU(cuGraphKernelNodeGetParams_v2, (CUgraphNode)node, p);
}

int sl_graph_add_copy(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, const CUDA_MEMCPY3D *p, uint64_t ctx)
{
	return CU(cuGraphAddMemcpyNode, (CUgraphNode *)node, (CUgraph)graph, (const CUgraphNode *)deps, ndeps, p, (CUcontext)ctx);
}

int sl_graph_set_copy(uint64_t exec, uint64_t node, const CUDA_MEMCPY3D *p, uint64_t ctx)
{
	return exec ? CU(cuGraphExecMemcpyNodeSetParams, (CUgraphExec)exec, (CUgraphNode)node, p, (CUcontext)ctx) :
		      CU(cuGraphMemcpyNodeSetParams, (CUgraphNode)node, p);
}

int sl_graph_get_copy(uint64_t node, CUDA_MEMCPY3D *p)
{
	return CU(cuGraphMemcpyNodeGetParams, (CUgraphNode)node, p);
}

int sl_capture_info(uint64_t stream, CUstreamCaptureStatus *status, cuuint64_t *id, uint64_t *graph, const CUgraphNode **deps,
		    const CUgraphEdgeData **edges, size_t *n)
{
	if (sl_has(FN_cuStreamGetCaptureInfo_v2) && (!edges || !sl_has(FN_cuStreamGetCaptureInfo_v3)))
		return CU(cuStreamGetCaptureInfo_v2, (CUstream)stream, status, id, (CUgraph *)graph, deps, n);
	return CU(cuStreamGetCaptureInfo_v3, (CUstream)stream, status, id, (CUgraph *)graph, deps, edges, n);
}

/* The driver's function for nodes of all kinds, under the name that it has. */
static int add_node(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, CUgraphNodeParams *p)
{
	return sl_has(FN_cuGraphAddNode) ? CU(cuGraphAddNode, (CUgraphNode *)node, (CUgraph)graph, (const CUgraphNode *)deps, ndeps, p) :
					   CU(cuGraphAddNode_v2, (CUgraphNode *)node, (CUgraph)graph, (const CUgraphNode *)deps, NULL, ndeps, p);
}

int sl_graph_add_child(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, uint64_t child)
{
	return CU(cuGraphAddChildGraphNode, (CUgraphNode *)node, (CUgraph)graph, (const CUgraphNode *)deps, ndeps, (CUgraph)child);
}

int sl_graph_add_moved(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, uint64_t child, uint32_t ownership)
{
	CUgraphNodeParams p;

	memset(&p, 0, sizeof p);
	p.type = CU_GRAPH_NODE_TYPE_GRAPH;
	p.graph.graph = (CUgraph)child;
	p.graph.ownership = ownership;
	return add_node(node, graph, deps, ndeps, &p);
}

int sl_graph_add_conditional(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, uint64_t handle, uint32_t type,
			     uint32_t size, uint64_t ctx, uint64_t *bodies)
{
	CUgraphNodeParams p;
	int rc;

	memset(&p, 0, sizeof p);
	p.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
	p.conditional.handle = handle;
	p.conditional.type = type;
	p.conditional.size = size;
	p.conditional.ctx = (CUcontext)ctx;
	rc = add_node(node, graph, deps, ndeps, &p);
	for (uint32_t i = 0; !rc && i < size; i++)
		bodies[i] = p.conditional.phGraph_out ? (uint64_t)p.conditional.phGraph_out[i] : 0;
	return rc;
}

int sl_graph_add_alloc(uint64_t *node, uint64_t graph, const uint64_t *deps, uint64_t ndeps, uint32_t dev, uint64_t n, uint64_t *p)
{
	CUDA_MEM_ALLOC_NODE_PARAMS a;
	int rc;

	memset(&a, 0, sizeof a);
	a.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	a.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	a.poolProps.location.id = (int)dev;
	a.bytesize = n;
	rc = CU(cuGraphAddMemAllocNode, (CUgraphNode *)node, (CUgraph)graph, (const CUgraphNode *)deps, ndeps, &a);
	*p = a.dptr;
	return rc;
}
