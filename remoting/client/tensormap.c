/*
 * A tensor map depends on its arguments only, but the layout is the driver's own:
 * the worker encodes it.
 */
#include "gen.h"

#define MAX_RANK 5
#define MIN_IM2COL 3 /* the least rank of a map for convolutions */

CUresult sl_cuTensorMapEncodeTiled(CUtensorMap *tensorMap, CUtensorMapDataType dataType, cuuint32_t rank, void *globalAddress,
				   const cuuint64_t *globalDim, const cuuint64_t *globalStrides, const cuuint32_t *boxDim,
				   const cuuint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
				   CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill oob)
{
	if (!tensorMap || !rank || rank > MAX_RANK || !globalDim || !globalStrides || !boxDim || !elementStrides)
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuTensorMapEncodeTiled(tensorMap, dataType, rank, (CUdeviceptr)(uintptr_t)globalAddress, globalDim,
					 globalStrides, rank - 1, boxDim, elementStrides, interleave, swizzle, l2, oob);
}

CUresult sl_cuTensorMapEncodeIm2col(CUtensorMap *tensorMap, CUtensorMapDataType dataType, cuuint32_t rank, void *globalAddress,
				    const cuuint64_t *globalDim, const cuuint64_t *globalStrides, const int *lower, const int *upper,
				    cuuint32_t channelsPerPixel, cuuint32_t pixelsPerColumn, const cuuint32_t *elementStrides,
				    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
				    CUtensorMapFloatOOBfill oob)
{
	if (!tensorMap || rank < MIN_IM2COL || rank > MAX_RANK || !globalDim || !globalStrides || !lower || !upper || !elementStrides)
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuTensorMapEncodeIm2col(tensorMap, dataType, rank, (CUdeviceptr)(uintptr_t)globalAddress, globalDim, globalStrides,
					  rank - 1, lower, upper, rank - 2, channelsPerPixel, pixelsPerColumn, elementStrides, interleave,
					  swizzle, l2, oob);
}

CUresult sl_cuTensorMapEncodeIm2colWide(CUtensorMap *tensorMap, CUtensorMapDataType dataType, cuuint32_t rank, void *globalAddress,
					const cuuint64_t *globalDim, const cuuint64_t *globalStrides, int lower, int upper,
					cuuint32_t channelsPerPixel, cuuint32_t pixelsPerColumn, const cuuint32_t *elementStrides,
					CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode, CUtensorMapSwizzle swizzle,
					CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill oob)
{
	if (!tensorMap || rank < MIN_IM2COL || rank > MAX_RANK || !globalDim || !globalStrides || !elementStrides)
		return CUDA_ERROR_INVALID_VALUE;
	return fw_cuTensorMapEncodeIm2colWide(tensorMap, dataType, rank, (CUdeviceptr)(uintptr_t)globalAddress, globalDim, globalStrides,
					      rank - 1, lower, upper, channelsPerPixel, pixelsPerColumn, elementStrides, interleave, mode,
					      swizzle, l2, oob);
}

CUresult sl_cuTensorMapReplaceAddress(CUtensorMap *tensorMap, void *globalAddress)
{
	CUtensorMap in;

	if (!tensorMap)
		return CUDA_ERROR_INVALID_VALUE;
	in = *tensorMap;
	return fw_cuTensorMapReplaceAddress(tensorMap, &in, (CUdeviceptr)(uintptr_t)globalAddress);
}
