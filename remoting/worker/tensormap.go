package worker

// Tensor maps. What the driver makes of them depends on their arguments alone, and it reads as many of each
// array as the rank says.

/*
#include "driver.h"
*/
import "C"

import "unsafe"

// maxTensorRank is the most dimensions that a tensor map has.
const maxTensorRank = 5

func (s *session) cuTensorMapEncodeTiled(o *C.CUtensorMap, dataType, rank uint32, addr uint64, dim, strides []C.cuuint64_t, _ uint32,
	box, elem []C.cuuint32_t, interleave, swizzle, l2, fill uint32,
) C.CUresult {
	if rank == 0 || rank > maxTensorRank || len(dim) < int(rank) || len(strides) < int(rank)-1 || len(box) < int(rank) || len(elem) < int(rank) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if len(strides) == 0 { // of one dimension: the driver wants a pointer all the same
		strides = make([]C.cuuint64_t, 1)
	}
	return C.sl_tensor_map(unsafe.Pointer(o), C.uint32_t(dataType), C.uint32_t(rank), C.uint64_t(addr),
		(*C.uint64_t)(first(dim)), (*C.uint64_t)(first(strides)), (*C.uint32_t)(first(box)), (*C.uint32_t)(first(elem)),
		C.uint32_t(interleave), C.uint32_t(swizzle), C.uint32_t(l2), C.uint32_t(fill))
}

func (s *session) cuTensorMapEncodeIm2col(o *C.CUtensorMap, dataType, rank uint32, addr uint64, dim, strides []C.cuuint64_t, _ uint32,
	lower, upper []C.int, _ uint32, channels, pixels uint32, elem []C.cuuint32_t, interleave, swizzle, l2, fill uint32,
) C.CUresult {
	corners := int(rank) - 2
	if corners < 1 || rank > maxTensorRank || len(dim) < int(rank) || len(strides) < int(rank)-1 || len(elem) < int(rank) ||
		len(lower) < corners || len(upper) < corners {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	return C.sl_tensor_map_im2col(unsafe.Pointer(o), C.uint32_t(dataType), C.uint32_t(rank), C.uint64_t(addr),
		(*C.uint64_t)(first(dim)), (*C.uint64_t)(first(strides)), first(lower), first(upper), C.uint32_t(channels), C.uint32_t(pixels),
		(*C.uint32_t)(first(elem)), C.uint32_t(interleave), C.uint32_t(swizzle), C.uint32_t(l2), C.uint32_t(fill))
}

func (s *session) cuTensorMapEncodeIm2colWide(o *C.CUtensorMap, dataType, rank uint32, addr uint64, dim, strides []C.cuuint64_t, _ uint32,
	lower, upper, channels, pixels uint32, elem []C.cuuint32_t, interleave, mode, swizzle, l2, fill uint32,
) C.CUresult {
	if rank < 3 || rank > maxTensorRank || len(dim) < int(rank) || len(strides) < int(rank)-1 || len(elem) < int(rank) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	return C.sl_tensor_map_wide(unsafe.Pointer(o), C.uint32_t(dataType), C.uint32_t(rank), C.uint64_t(addr),
		(*C.uint64_t)(first(dim)), (*C.uint64_t)(first(strides)), C.int(int32(lower)), C.int(int32(upper)), C.uint32_t(channels), C.uint32_t(pixels),
		(*C.uint32_t)(first(elem)), C.uint32_t(interleave), C.uint32_t(mode), C.uint32_t(swizzle), C.uint32_t(l2), C.uint32_t(fill))
}

func (s *session) cuTensorMapReplaceAddress(o, old *C.CUtensorMap, addr uint64) C.CUresult {
	if old == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	return C.sl_tensor_map_replace(unsafe.Pointer(o), unsafe.Pointer(old), C.uint64_t(addr))
}
