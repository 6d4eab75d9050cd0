package worker

// Graphs that have to do with the client's process: host nodes, copies of its memory, and user objects.
//
// A copy between device and host is a child graph with two nodes: the copy, whose other side is memory of the worker's
// at an address that the client has mapped (HOST_MAP), and a function of the client's, which writes that memory before
// the copy (HOST_WRITE) or reads it behind (HOST_READ). So the program's memory is read and written when the graph gets
// there, as CUDA has it. The client sees one node, a copy.

/*
#include "driver.h"
*/
import "C"

import (
	"math/bits"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Host nodes.

func (s *session) cuGraphAddHostNode(_ uint32, o *C.uint64_t, g href, deps []C.uint64_t, ndeps uint64, fn uint32) C.CUresult {
	f, rc := s.inGraph(fn)
	if rc != 0 {
		return C.CUresult(rc)
	}
	if rc := C.sl_graph_add_host(o, C.uint64_t(g.real), first(deps), C.uint64_t(ndeps), f.c); rc != 0 {
		s.notInGraph(fn, f)
		return C.CUresult(s.notCalled(fn, int32(rc)))
	}
	f.keep(g.real)
	return 0
}

func (s *session) cuGraphHostNodeGetParams(node href, fn *C.uint) C.CUresult {
	return C.CUresult(C.sl_graph_get_host(C.uint64_t(node.real), (*C.uint32_t)(fn)))
}

// graphOf gives the graph that a node was made in, 0 if that is not known.
func (s *session) graphOf(node href) uint64 {
	if r := s.owner(refOf(wire.KindNode, node.id)); r.kind() == wire.KindGraph {
		if p := s.slot(r); p != nil {
			return p.real
		}
	}
	return 0
}

func (s *session) cuGraphHostNodeSetParams(node href, fn uint32) C.CUresult {
	return s.setHost(0, node.real, s.graphOf(node), fn)
}

// A function that an executable graph alone has is kept for as long as the session lasts: nothing of the driver's tells
// when the last launch with it is over.
func (s *session) cuGraphExecHostNodeSetParams(exec, node href, fn uint32) C.CUresult {
	return s.setHost(exec.real, node.real, 0, fn)
}

func (s *session) setHost(exec, node, graph uint64, fn uint32) C.CUresult {
	f, rc := s.inGraph(fn)
	if rc != 0 {
		return C.CUresult(rc)
	}
	if rc := C.sl_graph_set_host(C.uint64_t(exec), C.uint64_t(node), f.c); rc != 0 {
		s.notInGraph(fn, f)
		return C.CUresult(s.notCalled(fn, int32(rc)))
	}
	if graph != 0 {
		f.keep(graph)
	}
	return 0
}

// Copies.

// staged checks a copy whose host side is mapped memory of the client's, packed rows, and says whether that is read.
func (s *session) staged(c *C.CUDA_MEMCPY3D) (in bool, rc int32) {
	if c == nil {
		return false, C.CUDA_ERROR_INVALID_VALUE
	}
	c.reserved0, c.reserved1 = nil, nil
	var at unsafe.Pointer
	if in = c.srcMemoryType == C.CU_MEMORYTYPE_HOST; in {
		at, c.dstHost = unsafe.Pointer(c.srcHost), nil
		c.srcPitch, c.srcHeight = c.WidthInBytes, c.Height
		c.srcXInBytes, c.srcY, c.srcZ, c.srcLOD = 0, 0, 0, 0
		rc = s.side(&c.dstMemoryType, unsafe.Pointer(&c.dstArray))
	} else if c.dstMemoryType == C.CU_MEMORYTYPE_HOST {
		at, c.srcHost = c.dstHost, nil
		c.dstPitch, c.dstHeight = c.WidthInBytes, c.Height
		c.dstXInBytes, c.dstY, c.dstZ, c.dstLOD = 0, 0, 0, 0
		rc = s.side(&c.srcMemoryType, unsafe.Pointer(&c.srcArray))
	} else {
		rc = C.CUDA_ERROR_INVALID_VALUE
	}
	if rc != 0 {
		return in, rc
	}
	over, n := bits.Mul64(uint64(c.WidthInBytes), uint64(c.Height))
	more, n := bits.Mul64(n, uint64(c.Depth))
	if over != 0 || more != 0 || n == 0 || !s.host.at(uint64(uintptr(at)), n, func([]byte) {}) {
		return in, C.CUDA_ERROR_INVALID_VALUE
	}
	return in, 0
}

// hostCopy readies a copy of the client's memory for a graph, and has make, which returns the graph that keeps the copy's function, put it there.
// With both sides in that memory the copy is its function alone: c is NULL then.
func (s *session) hostCopy(c *C.CUDA_MEMCPY3D, fn uint32, make func(f *hostfn, c *C.CUDA_MEMCPY3D, in C.int) (graph uint64, rc C.int)) int32 {
	f, rc := s.inGraph(fn)
	if rc != 0 {
		return rc
	}
	var way C.int
	if c != nil && c.srcMemoryType == C.CU_MEMORYTYPE_HOST && c.dstMemoryType == C.CU_MEMORYTYPE_HOST {
		c = nil
	} else {
		var in bool
		if in, rc = s.staged(c); in {
			way = 1
		}
	}
	var graph uint64
	if rc == 0 {
		var made C.int
		graph, made = make(f, c, way)
		rc = int32(made)
	}
	if rc != 0 {
		s.notInGraph(fn, f)
		return s.notCalled(fn, rc)
	}
	if graph != 0 {
		f.keep(graph)
	}
	return 0
}

// hostCopyGraph makes the child graph of a copy of the client's memory.
func (s *session) hostCopyGraph(c *C.CUDA_MEMCPY3D, ctx uint64, fn uint32) (graph C.uint64_t, rc int32) {
	rc = s.hostCopy(c, fn, func(f *hostfn, c *C.CUDA_MEMCPY3D, in C.int) (uint64, C.int) {
		made := C.sl_graph_copy_make(&graph, f.c, c, in, C.uint64_t(ctx))
		return uint64(graph), made
	})
	return graph, rc
}

func (s *session) cuGraphAddMemcpyNode(_ uint32, o *C.uint64_t, g href, deps []C.uint64_t, ndeps uint64, c *C.CUDA_MEMCPY3D, ctx href, fn uint32) C.CUresult {
	if fn == 0 {
		if rc := s.copy3D(c); rc != 0 {
			return C.CUresult(rc)
		}
		return C.CUresult(C.sl_graph_add_copy(o, C.uint64_t(g.real), first(deps), C.uint64_t(ndeps), c, C.uint64_t(ctx.real)))
	}
	child, rc := s.hostCopyGraph(c, ctx.real, fn)
	if rc != 0 {
		return C.CUresult(rc)
	}
	defer C.call_cuGraphDestroy(child)
	return C.CUresult(C.sl_graph_add_child(o, C.uint64_t(g.real), first(deps), C.uint64_t(ndeps), child))
}

// cuGraphMemcpyNodeSetParams changes a copy of host memory into another one; the client refuses changes between these and other copies.
func (s *session) cuGraphMemcpyNodeSetParams(node href, c *C.CUDA_MEMCPY3D, fn uint32) C.CUresult {
	if fn != 0 {
		if _, ok := s.copyNode(node.real); !ok {
			return C.CUresult(s.notCalled(fn, C.CUDA_ERROR_NOT_SUPPORTED))
		}
		return C.CUresult(s.hostCopy(c, fn, func(f *hostfn, c *C.CUDA_MEMCPY3D, in C.int) (uint64, C.int) {
			return s.graphOf(node), C.sl_graph_copy_change(C.uint64_t(node.real), f.c, c, in, C.uint64_t(s.curReal))
		}))
	}
	if rc := s.copy3D(c); rc != 0 {
		return C.CUresult(rc)
	}
	return C.CUresult(C.sl_graph_set_copy(0, C.uint64_t(node.real), c, 0))
}

func (s *session) cuGraphExecMemcpyNodeSetParams(exec, node href, c *C.CUDA_MEMCPY3D, ctx href, fn uint32) C.CUresult {
	if fn == 0 {
		if rc := s.copy3D(c); rc != 0 {
			return C.CUresult(rc)
		}
		return C.CUresult(C.sl_graph_set_copy(C.uint64_t(exec.real), C.uint64_t(node.real), c, C.uint64_t(ctx.real)))
	}
	child, rc := s.hostCopyGraph(c, ctx.real, fn)
	if rc != 0 {
		return C.CUresult(rc)
	}
	defer C.call_cuGraphDestroy(child)
	return C.call_cuGraphExecChildGraphNodeSetParams(C.uint64_t(exec.real), C.uint64_t(node.real), child)
}

// copyNode finds out whether a node is a copy of the client's memory.
func (s *session) copyNode(node uint64) (C.struct_sl_copy_node, bool) {
	var n C.struct_sl_copy_node
	if s.hostfns.r == nil {
		return n, false // there are no functions
	}
	return n, C.sl_graph_copy_find(C.uint64_t(node), &n) != 0
}

func (s *session) cuGraphNodeGetType(node href, t *C.CUgraphNodeType) C.CUresult {
	rc := C.call_cuGraphNodeGetType(C.uint64_t(node.real), t)
	if rc == 0 && *t == C.CU_GRAPH_NODE_TYPE_GRAPH {
		if _, ok := s.copyNode(node.real); ok {
			*t = C.CU_GRAPH_NODE_TYPE_MEMCPY
		}
	}
	return rc
}

func (s *session) cuGraphChildGraphNodeGetGraph(node href, o *C.uint64_t) C.CUresult {
	if _, ok := s.copyNode(node.real); ok {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	return C.call_cuGraphChildGraphNodeGetGraph(C.uint64_t(node.real), o)
}

// cuGraphMemcpyNodeGetParams tells a copy of the client's memory by its function: the client knows the rest.
func (s *session) cuGraphMemcpyNodeGetParams(node href, c *C.CUDA_MEMCPY3D, src, dst *C.uint64_t, fn *C.uint) C.CUresult {
	if n, ok := s.copyNode(node.real); ok {
		*fn = C.uint(n.id)
		return 0
	}
	if rc := C.sl_graph_get_copy(C.uint64_t(node.real), c); rc != 0 {
		return C.CUresult(rc)
	}
	*src, *dst = C.uint64_t(uintptr(unsafe.Pointer(c.srcArray))), C.uint64_t(uintptr(unsafe.Pointer(c.dstArray)))
	c.srcHost, c.dstHost, c.srcArray, c.dstArray, c.reserved0, c.reserved1 = nil, nil, nil, nil, nil, nil
	return 0
}
