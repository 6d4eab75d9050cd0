/*
 * Graphs: what the table cannot say. Everything else about graphs is generated.
 */
#include "core.h"
#include "mapped.h"

CUresult sl_cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)
{
	if (phErrorNode)
		*phErrorNode = NULL;
	if (logBuffer && bufferSize)
		*logBuffer = 0;
	return sl_cuGraphInstantiateWithFlags(phGraphExec, hGraph, 0);
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
	return err;
}

CUresult sl_cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	CUresult err = CUDA_SUCCESS;

	sl_mapped_send(sl_stream_id_only(hStream, &err));
	return err ? err : fw_cuGraphLaunch(hGraphExec, hStream);
}
