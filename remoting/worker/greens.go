package worker

// Green contexts: parts of a device's multiprocessors. Their streams belong to the device's primary context here,
// as they do for a program that makes no green context current, so that turns, waits and staging are those of any
// stream. The shim makes a green context current by itself; the driver is never asked to.

/*
#include "driver.h"
*/
import "C"

import (
	"encoding/binary"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const (
	// maxResources is the most resources that are reported to a session.
	maxResources = 4096
	// maxGroups bounds how many groups the multiprocessors are split into: more than any device has.
	maxGroups = 1024
	// splitFlags are those of cuDevSmResourceSplitByCount; the driver ignores others.
	splitFlags = 3
	// wholeResult asks for the number of groups alone.
	wholeResult = ^uint32(0)
)

// giveResource replaces the hidden bytes of a driver's resource by a number. What the
// client passes back is looked up by that number, and its bytes never reach the driver.
func (s *session) giveResource(r *C.CUdevResource) C.CUresult {
	n := -1
	for i := range s.devres {
		if s.devres[i] == *r {
			n = i
			break
		}
	}
	if n < 0 {
		if len(s.devres) == maxResources {
			return C.CUDA_ERROR_OUT_OF_MEMORY
		}
		n = len(s.devres)
		s.devres = append(s.devres, *r)
	}
	hidden := unsafe.Slice((*byte)(unsafe.Pointer(&r._internal_padding[0])), len(r._internal_padding))
	clear(hidden)
	binary.LittleEndian.PutUint32(hidden, uint32(n+1))
	return 0
}

// takeResource finds the resource that the client means.
func (s *session) takeResource(r *C.CUdevResource) (*C.CUdevResource, C.CUresult) {
	if r == nil {
		return nil, C.CUDA_ERROR_INVALID_VALUE
	}
	hidden := unsafe.Slice((*byte)(unsafe.Pointer(&r._internal_padding[0])), len(r._internal_padding))
	n := binary.LittleEndian.Uint32(hidden)
	if n == 0 || int64(n) > int64(len(s.devres)) {
		return nil, C.CUDA_ERROR_INVALID_RESOURCE_TYPE
	}
	own := s.devres[n-1]
	if own._type != r._type {
		return nil, C.CUDA_ERROR_INVALID_RESOURCE_TYPE
	}
	return &own, 0
}

func (s *session) cuDeviceGetDevResource(dev uint32, r *C.CUdevResource, kind uint32) C.CUresult {
	if int64(dev) >= int64(len(s.snap.Devices)) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	if kind != C.CU_DEV_RESOURCE_TYPE_SM {
		return C.CUDA_ERROR_INVALID_RESOURCE_TYPE
	}
	rc := C.call_cuDeviceGetDevResource(C.uint32_t(dev), r, C.uint32_t(kind))
	if rc == 0 {
		rc = s.giveResource(r)
	}
	return rc
}

func (s *session) cuGreenCtxGetDevResource(h href, r *C.CUdevResource, kind uint32) C.CUresult {
	if kind != C.CU_DEV_RESOURCE_TYPE_SM {
		return C.CUDA_ERROR_INVALID_RESOURCE_TYPE
	}
	rc := C.call_cuGreenCtxGetDevResource(C.uint64_t(h.real), r, C.uint32_t(kind))
	if rc == 0 {
		rc = s.giveResource(r)
	}
	return rc
}

// cuDevSmResourceSplitByCount gives one of the groups, and what remains.
func (s *session) cuDevSmResourceSplitByCount(made *C.uint, result, remaining, input *C.CUdevResource, groups, index, flags, least uint32) C.CUresult {
	in, rc := s.takeResource(input)
	if rc != 0 {
		return rc
	}
	n := C.uint(min(groups, maxGroups))
	var out []C.CUdevResource
	if index != wholeResult {
		out = make([]C.CUdevResource, max(n, 1))
	}
	rc = C.CUresult(C.sl_split(first(out), &n, in, remaining, C.uint32_t(flags&splitFlags), C.uint32_t(least)))
	*made = n
	if rc != 0 || out == nil {
		return rc
	}
	if rc = s.giveResource(remaining); rc != 0 || n == 0 {
		return rc
	}
	if int64(index) >= int64(min(n, C.uint(len(out)))) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	*result = out[index]
	return s.giveResource(result)
}

func (s *session) cuDevResourceGenerateDesc(_ uint32, o *C.uint64_t, resources []C.CUdevResource, n uint32) C.CUresult {
	if n > maxGroups {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	own := make([]C.CUdevResource, len(resources))
	for i := range resources {
		r, rc := s.takeResource(&resources[i])
		if rc != 0 {
			return rc
		}
		own[i] = *r
	}
	return C.call_cuDevResourceGenerateDesc(o, first(own), C.uint32_t(n))
}

func (s *session) cuGreenCtxCreate(_ uint32, o *C.uint64_t, desc href, dev, flags uint32) C.CUresult {
	if flags != C.CU_GREEN_CTX_DEFAULT_STREAM {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if int64(dev) >= int64(len(s.snap.Devices)) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	if s.hdr.Ctx != 1+dev || s.cur != 1+dev {
		return C.CUDA_ERROR_INVALID_CONTEXT // the primary context's end is the green context's too
	}
	rc := C.call_cuGreenCtxCreate(o, C.uint64_t(desc.real), C.uint32_t(dev), C.uint32_t(flags))
	s.mem.measureSoon()
	return rc
}

// cuGreenCtxStreamCreate makes a stream; it is part of its green context.
func (s *session) cuGreenCtxStreamCreate(_ uint32, o *C.uint64_t, h href, flags, priority uint32) C.CUresult {
	if p := s.tables[wire.KindGreen].live(h.id); p == nil || p.ctx != s.hdr.Ctx || p.ctx != s.cur {
		return C.CUDA_ERROR_INVALID_CONTEXT
	}
	return s.newStream(o, C.call_cuGreenCtxStreamCreate(o, C.uint64_t(h.real), C.uint32_t(flags), C.uint32_t(priority)))
}

// cuGreenCtxDestroy ends a green context with its streams, which the driver would keep.
func (s *session) cuGreenCtxDestroy(h href) C.CUresult {
	whole := refOf(wire.KindGreen, h.id)
	for _, part := range s.parts[whole] {
		if p := s.slot(part); p != nil && part.kind() == wire.KindStream && s.owner(part) == whole {
			s.cuStreamDestroy_v2(href{part.id(), p.real})
		}
	}
	rc := C.call_cuGreenCtxDestroy(C.uint64_t(h.real))
	s.unbind(wire.KindGreen, h.id)
	return rc
}

// endGreens ends the green contexts of a primary context that is about to end.
func (s *session) endGreens(ctx uint32) {
	s.tables[wire.KindGreen].each(func(id uint32, p *slot) {
		if p.ctx == ctx && p.err == 0 {
			s.cuGreenCtxDestroy(href{id, p.real})
		}
	})
}

// primaryOf gives the driver's handle of the context that a green context's streams belong to.
func (s *session) primaryOf(green uint32) uint64 {
	if p := s.tables[wire.KindGreen].live(green); p != nil {
		if c := s.tables[wire.KindCtx].live(p.ctx); c != nil {
			return c.real
		}
	}
	return 0
}

func (s *session) cuGreenCtxRecordEvent(h, ev href) C.CUresult {
	rc := C.call_cuGreenCtxRecordEvent(C.uint64_t(h.real), C.uint64_t(ev.real))
	return s.recordedBehindAll(rc, s.primaryOf(h.id), ev.id)
}

func (s *session) cuGreenCtxWaitEvent(h, ev href) C.CUresult {
	rc := C.call_cuGreenCtxWaitEvent(C.uint64_t(h.real), C.uint64_t(ev.real))
	return s.awaitedByAll(rc, s.primaryOf(h.id), ev.id)
}
