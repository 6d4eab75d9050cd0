/* Calls on graphs that the runtimes of CUDA 11, 12 and 13 have in different forms. */
#include "check.h"

static cudaGraphExec_t instantiate(cudaGraph_t g)
{
	cudaGraphExec_t e;

#if CUDART_VERSION >= 12000
	CHECK(cudaGraphInstantiate(&e, g, 0));
#else
	CHECK(cudaGraphInstantiate(&e, g, NULL, NULL, 0));
#endif
	return e;
}

static cudaError_t update(cudaGraphExec_t e, cudaGraph_t g)
{
#if CUDART_VERSION >= 12000
	cudaGraphExecUpdateResultInfo info;

	return cudaGraphExecUpdate(e, g, &info);
#else
	cudaGraphExecUpdateResult result;
	cudaGraphNode_t bad;

	return cudaGraphExecUpdate(e, g, &bad, &result);
#endif
}
