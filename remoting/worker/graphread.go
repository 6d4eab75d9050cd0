package worker

// What graphs and captures hold, for the client to read: a kernel node's parameters, and the nodes that a capture's next
// node depends on.

/*
#include "driver.h"
*/
import "C"

import (
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// kernelOf finds the kernel that the driver names by a CUkernel or a CUfunction; nil if none is known by it.
func (s *session) kernelOf(real uint64) (found *kernel) {
	s.tables[wire.KindKernel].each(func(_ uint32, p *slot) {
		k, _ := p.obj.(*kernel)
		if k == nil || k.real == 0 || found != nil {
			return
		}
		if k.real == real || k.fnCtx == s.cur && k.fn == real {
			found = k
		}
	})
	if found != nil {
		return found
	}
	// A function of a library's kernel that was launched as a kernel: those in use have it by now.
	s.tables[wire.KindKernel].each(func(_ uint32, p *slot) {
		k, _ := p.obj.(*kernel)
		if k == nil || k.real == 0 || !k.img.library || found != nil {
			return
		}
		var fn C.uint64_t
		if C.sl_kernel_function(&fn, C.uint64_t(k.real)) == 0 && uint64(fn) == real {
			k.fn, k.fnCtx = real, s.cur
			found = k
		}
	})
	return found
}

// layout calls f with the place and the size of each parameter of a kernel.
func (k *kernel) layout(f func(i int, off, size uint64)) {
	for i := 0; i < maxParams; i++ {
		var off, size C.uint64_t
		var rc C.int
		if k.img.library {
			rc = C.sl_kernel_param(C.uint64_t(k.real), C.uint64_t(i), &off, &size)
		} else {
			rc = C.sl_function_param(C.uint64_t(k.real), C.uint64_t(i), &off, &size)
		}
		if rc != 0 {
			return
		}
		f(i, uint64(off), uint64(size))
	}
}

// cuGraphKernelNodeGetParams_v2 gives the parameters packed, as a launch has them, the kernel by its id, and what the
// driver has that as: bit 0 a CUfunction, bit 1 a CUkernel.
func (s *session) cuGraphKernelNodeGetParams_v2(node href, p *C.CUDA_KERNEL_NODE_PARAMS, id, has *C.uint, ctx *C.uint64_t, params []C.uchar, n *C.size_t) C.CUresult {
	if rc := C.sl_graph_get_kernel(C.uint64_t(node.real), p); rc != 0 {
		return C.CUresult(rc)
	}
	fn, kern := uint64(uintptr(unsafe.Pointer(p._func))), uint64(uintptr(unsafe.Pointer(p.kern)))
	var k *kernel
	if kern != 0 {
		k = s.kernelOf(kern)
	}
	if k == nil && fn != 0 {
		k = s.kernelOf(fn)
	}
	if k == nil {
		return C.CUDA_ERROR_NOT_SUPPORTED
	}
	*id, *has = C.uint(k.id), 0
	if fn != 0 {
		*has |= 1
	}
	if kern != 0 && k.img.library {
		*has |= 2
	}
	*ctx = C.uint64_t(uintptr(unsafe.Pointer(p.ctx)))
	*n = C.size_t(packedParams(k, p, params))
	p._func, p.kern, p.kernelParams, p.extra, p.ctx = nil, nil, nil, nil, nil
	return 0
}

// packedParams copies a node's parameters to where a launch's would be, and tells how many bytes they are.
func packedParams(k *kernel, p *C.CUDA_KERNEL_NODE_PARAMS, to []C.uchar) (n uint64) {
	out := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(to))), len(to))
	if p.kernelParams == nil {
		b := extraParams(p.extra)
		copy(out, b)
		return uint64(len(b))
	}
	k.layout(func(i int, off, size uint64) {
		at := *(*unsafe.Pointer)(unsafe.Add(unsafe.Pointer(p.kernelParams), i*int(unsafe.Sizeof(uintptr(0)))))
		if off+size <= uint64(len(out)) && at != nil {
			copy(out[off:off+size], unsafe.Slice((*byte)(at), size))
		}
		n = max(n, off+size)
	})
	return n
}

// extraParams gives the packed parameters in the driver's list of such.
func extraParams(extra *unsafe.Pointer) []byte {
	var at unsafe.Pointer
	size := 0
	for i := 0; extra != nil && i < 4; i += 2 {
		l := unsafe.Slice(extra, i+2)
		switch uintptr(l[i]) {
		case 0: // CU_LAUNCH_PARAM_END
			extra = nil
		case 1: // CU_LAUNCH_PARAM_BUFFER_POINTER
			at = l[i+1]
		case 2: // CU_LAUNCH_PARAM_BUFFER_SIZE
			size = int(*(*C.size_t)(l[i+1]))
		}
	}
	if at == nil || size <= 0 || size > 1<<16 {
		return nil
	}
	return unsafe.Slice((*byte)(at), size)
}

// cuGraphInstantiateWithParams tells why a graph that cuGraphInstantiateWithFlags has refused cannot be made executable, and which node
// is to blame. It makes none.
func (s *session) cuGraphInstantiateWithParams(g href, flags uint64, result *C.CUgraphInstantiateResult, node *C.uint64_t) C.CUresult {
	C.sl_graph_why(C.uint64_t(g.real), C.uint64_t(flags&^C.CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD), result, node)
	*node = C.uint64_t(s.shown(uint64(*node)))
	return 0
}

// shown gives the node that the client has for one of the two nodes of a copy of its memory, and other nodes as they are.
func (s *session) shown(node uint64) uint64 {
	if _, known := s.tables[wire.KindNode].ids[node]; known || node == 0 {
		return node
	}
	is := node
	s.tables[wire.KindNode].each(func(_ uint32, p *slot) {
		if p.real == 0 || p.err != 0 || is != node {
			return
		}
		if n, ok := s.copyNode(p.real); ok && (uint64(n.copy) == node || uint64(n.host) == node) {
			is = p.real
		}
	})
	return is
}

// captureInfo gives what a capture's next node depends on, as much as there is room for, and how much there is.
func (s *session) captureInfo(h href, status *C.CUstreamCaptureStatus, id *C.cuuint64_t, g *C.uint64_t, deps []C.uint64_t, edges []C.CUgraphEdgeData, data bool, n *C.size_t) C.CUresult {
	var from *C.CUgraphNode
	var with *C.CUgraphEdgeData
	var rc C.int
	if data {
		rc = C.sl_capture_info(C.uint64_t(h.real), status, id, g, &from, &with, n)
	} else {
		rc = C.sl_capture_info(C.uint64_t(h.real), status, id, g, &from, nil, n)
	}
	if rc != 0 {
		return C.CUresult(rc)
	}
	if *status != C.CU_STREAM_CAPTURE_STATUS_ACTIVE {
		*id, *g, *n = 0, 0, 0
		return 0
	}
	graph := refOf(wire.KindGraph, s.outHandle(wire.KindGraph, uint64(*g)))
	for i := range min(len(deps), int(*n)) {
		node := uint64(uintptr(unsafe.Pointer(unsafe.Slice(from, int(*n))[i])))
		s.outPart(graph, wire.KindNode, node)
		deps[i] = C.uint64_t(node)
	}
	for i := range min(len(edges), int(*n)) {
		if with != nil {
			edges[i] = unsafe.Slice(with, int(*n))[i]
		}
	}
	return 0
}

func (s *session) cuStreamGetCaptureInfo_v2(h href, status *C.CUstreamCaptureStatus, id *C.cuuint64_t, g *C.uint64_t, deps []C.uint64_t, n *C.size_t) C.CUresult {
	return s.captureInfo(h, status, id, g, deps, nil, false, n)
}

func (s *session) cuStreamGetCaptureInfo_v3(h href, status *C.CUstreamCaptureStatus, id *C.cuuint64_t, g *C.uint64_t, deps []C.uint64_t, edges []C.CUgraphEdgeData, n *C.size_t) C.CUresult {
	return s.captureInfo(h, status, id, g, deps, edges, true, n)
}
