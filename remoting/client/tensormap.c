/*
 * A tensor map depends on its arguments only, but the layout is the driver's own:
 * the worker encodes it.
 */
#include "gen.h"

#define MAX_RANK 5

CUresult sl_cuTensorMapEncodeTiled(CUtensorMap *tensorMap, CUtensorMapDataType dataType, cuuint32_t rank, void *globalAddress,
				   const cuuint64_t *globalDim, const cuuint64_t *globalStrides, const cuuint32_t *boxDim,
				   const cuuint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
				   CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill oob)
{
	if (!tensorMap || !rank || rank > MAX_RANK || !globalDim || (rank > 1 && !globalStrides) || !boxDim || !elementStrides)
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuTensorMapEncodeTiled(tensorMap, dataType, rank, (CUdeviceptr)(uintptr_t)globalAddress, globalDim,
					 globalStrides, rank - 1, boxDim, elementStrides, interleave, swizzle, l2, oob);
}
