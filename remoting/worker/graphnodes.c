/* Nodes of graphs whose parameters are packed as a launch's are. */
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

int sl_graph_update(uint64_t exec, uint64_t graph, CUgraphExecUpdateResultInfo *info)
{
	return CU(cuGraphExecUpdate_v2, (CUgraphExec)exec, (CUgraph)graph, info);
}
