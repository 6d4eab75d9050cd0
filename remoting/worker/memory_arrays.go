package worker

// Arrays and mipmapped arrays, charged by what the driver lays out.

/*
#include "driver.h"
*/
import "C"

import (
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

// texel is the size of an element in bytes, 16 for formats that pack several; 0 for an
// element that does not exist. An element has 1, 2 or 4 channels; formats that pack
// several may have 3.
func texel(format, channels uint32) uint64 {
	if channels == 0 || channels > 4 {
		return 0
	}
	var size uint64
	switch format {
	case C.CU_AD_FORMAT_UNSIGNED_INT8, C.CU_AD_FORMAT_SIGNED_INT8:
		size = 1
	case C.CU_AD_FORMAT_UNSIGNED_INT16, C.CU_AD_FORMAT_SIGNED_INT16, C.CU_AD_FORMAT_HALF:
		size = 2
	case C.CU_AD_FORMAT_UNSIGNED_INT32, C.CU_AD_FORMAT_SIGNED_INT32, C.CU_AD_FORMAT_FLOAT:
		size = 4
	default:
		return 16
	}
	if channels == 3 {
		return 0
	}
	return size * uint64(channels)
}

// arrayBytes estimates an array from its sides; the error is CUDA's where there is no such
// array. The driver keeps arrays in tiles 64 bytes wide and 8 rows high (seen on an H200:
// 1 x 16384 x 1024 bytes take 1 GiB), so that is what the sides are rounded up to.
func arrayBytes(w, h, d uint64, format, channels uint32) (uint64, int32) {
	const tileBytes, tileRows = 64, 8
	size := texel(format, channels)
	if size == 0 {
		return 0, C.CUDA_ERROR_INVALID_VALUE
	}
	if w > maxSide || h > maxSide {
		return 0, C.CUDA_ERROR_OUT_OF_MEMORY
	}
	row := (max(w, 1)*size + tileBytes - 1) &^ (tileBytes - 1)
	if h > 1 {
		h = (h + tileRows - 1) &^ (tileRows - 1)
	}
	n := uint64(1)
	for _, v := range [...]uint64{row, max(h, 1), max(d, 1)} {
		if v > maxSide || n > (1<<50)/v {
			return 0, C.CUDA_ERROR_OUT_OF_MEMORY
		}
		n *= v
	}
	return account.RoundUp(n), 0
}

// newArray makes an array within the charge for est bytes, unless the estimate ended with
// an error, bad; need tells what the array really takes.
func (s *session) newArray(est uint64, bad int32, o *C.uint64_t, create func() C.CUresult, need func() (uint64, bool), destroy func()) C.CUresult {
	dev, rc := s.device()
	if rc != 0 {
		return C.CUresult(rc)
	}
	if bad != 0 {
		return C.CUresult(bad)
	}
	m := &s.mem
	if !m.reserve(dev, est) {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	if rc := create(); rc != 0 {
		m.release(dev, est)
		return rc
	}
	if n, ok := need(); ok {
		n = account.RoundUp(n)
		if n > est && !m.reserve(dev, n-est) {
			destroy()
			m.release(dev, est)
			*o = 0
			return C.CUDA_ERROR_OUT_OF_MEMORY
		}
		if n < est {
			m.release(dev, est-n)
		}
		est = n
	}
	m.arrays[uint64(*o)] = charge{dev: dev, bytes: est, ctx: s.cur}
	return 0
}

func (s *session) arrayNeed(o *C.uint64_t) func() (uint64, bool) {
	return func() (uint64, bool) {
		var r C.CUDA_ARRAY_MEMORY_REQUIREMENTS
		dev, _ := s.device()
		rc := C.call_cuArrayGetMemoryRequirements(&r, *o, C.uint32_t(dev))
		return uint64(r.size), rc == 0 && r.size > 0
	}
}

func (s *session) cuArrayCreate_v2(id uint32, o *C.uint64_t, d *C.CUDA_ARRAY_DESCRIPTOR) C.CUresult {
	if d == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	est, bad := arrayBytes(uint64(d.Width), uint64(d.Height), 1, uint32(d.Format), uint32(d.NumChannels))
	return s.newArray(est, bad, o, func() C.CUresult { return C.call_cuArrayCreate_v2(o, d) },
		s.arrayNeed(o), func() { C.call_cuArrayDestroy(*o) })
}

// Flags of arrays whose memory comes later, by cuMemMapArrayAsync.
const arraySparse = 0x40 | 0x80

func (s *session) cuArray3DCreate_v2(id uint32, o *C.uint64_t, d *C.CUDA_ARRAY3D_DESCRIPTOR) C.CUresult {
	if d == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if d.Flags&arraySparse != 0 {
		return C.CUresult(s.refuse("sparse or deferred-mapping arrays"))
	}
	est, bad := arrayBytes(uint64(d.Width), uint64(d.Height), uint64(d.Depth), uint32(d.Format), uint32(d.NumChannels))
	return s.newArray(est, bad, o, func() C.CUresult { return C.call_cuArray3DCreate_v2(o, d) },
		s.arrayNeed(o), func() { C.call_cuArrayDestroy(*o) })
}

func (s *session) cuMipmappedArrayCreate(id uint32, o *C.uint64_t, d *C.CUDA_ARRAY3D_DESCRIPTOR, levels uint32) C.CUresult {
	if d == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if d.Flags&arraySparse != 0 {
		return C.CUresult(s.refuse("sparse or deferred-mapping arrays"))
	}
	est, bad := arrayBytes(uint64(d.Width), uint64(d.Height), uint64(d.Depth), uint32(d.Format), uint32(d.NumChannels))
	// All levels together are at most twice the first.
	est = account.RoundUp(2 * est)
	need := func() (uint64, bool) {
		var r C.CUDA_ARRAY_MEMORY_REQUIREMENTS
		dev, _ := s.device()
		rc := C.call_cuMipmappedArrayGetMemoryRequirements(&r, *o, C.uint32_t(dev))
		return uint64(r.size), rc == 0 && r.size > 0
	}
	return s.newArray(est, bad, o, func() C.CUresult { return C.call_cuMipmappedArrayCreate(o, d, C.uint32_t(levels)) },
		need, func() { C.call_cuMipmappedArrayDestroy(*o) })
}

func (s *session) freeArray(real uint64) {
	if c, ok := s.mem.arrays[real]; ok {
		delete(s.mem.arrays, real)
		s.mem.release(c.dev, c.bytes)
	}
}

func (s *session) cuArrayDestroy(h href) C.CUresult {
	rc := C.call_cuArrayDestroy(C.uint64_t(h.real))
	if rc == 0 {
		s.freeArray(h.real)
		s.unbind(wire.KindArray, h.id)
	}
	return rc
}

func (s *session) cuMipmappedArrayDestroy(h href) C.CUresult {
	rc := C.call_cuMipmappedArrayDestroy(C.uint64_t(h.real))
	if rc == 0 {
		s.freeArray(h.real)
		s.unbind(wire.KindMipmap, h.id)
	}
	return rc
}
