package worker

// Nodes of graphs that the client makes or changes by hand: those whose parameters carry handles or packed bytes.

/*
#include "driver.h"
*/
import "C"

import (
	"unsafe"
)

// kernelNode puts a kernel node together, but for the kernel's own parameters.
func (s *session) kernelNode(h href, grid, block [3]uint32, shared uint32) (C.struct_sl_kernel_node, int32) {
	n := C.struct_sl_kernel_node{fn: C.uint64_t(h.real), shared: C.uint32_t(shared)}
	for i := range 3 {
		n.grid[i], n.block[i] = C.uint32_t(grid[i]), C.uint32_t(block[i])
	}
	k, rc := s.kernel(h.id)
	if rc == 0 && k.local > defaultStack {
		rc = s.takeLocal(k.local)
	}
	return n, rc
}

func (s *session) cuGraphAddKernelNode_v2(_ uint32, o *C.uint64_t, g href, deps []C.uint64_t, ndeps uint64, f href,
	gx, gy, gz, bx, by, bz, shared uint32, params []C.uchar, _ uint32,
) C.CUresult {
	n, rc := s.kernelNode(f, [3]uint32{gx, gy, gz}, [3]uint32{bx, by, bz}, shared)
	if rc != 0 {
		return C.CUresult(rc)
	}
	return C.CUresult(C.sl_graph_add_kernel(o, C.uint64_t(g.real), first(deps), C.uint64_t(ndeps), &n, unsafe.Pointer(first(params)), C.uint64_t(len(params))))
}

func (s *session) cuGraphKernelNodeSetParams_v2(node, f href, gx, gy, gz, bx, by, bz, shared uint32, params []C.uchar, _ uint32) C.CUresult {
	n, rc := s.kernelNode(f, [3]uint32{gx, gy, gz}, [3]uint32{bx, by, bz}, shared)
	if rc != 0 {
		return C.CUresult(rc)
	}
	return C.CUresult(C.sl_graph_set_kernel(0, C.uint64_t(node.real), &n, unsafe.Pointer(first(params)), C.uint64_t(len(params))))
}

func (s *session) cuGraphExecKernelNodeSetParams_v2(exec, node, f href, gx, gy, gz, bx, by, bz, shared uint32, params []C.uchar, _ uint32) C.CUresult {
	n, rc := s.kernelNode(f, [3]uint32{gx, gy, gz}, [3]uint32{bx, by, bz}, shared)
	if rc != 0 {
		return C.CUresult(rc)
	}
	return C.CUresult(C.sl_graph_set_kernel(C.uint64_t(exec.real), C.uint64_t(node.real), &n, unsafe.Pointer(first(params)), C.uint64_t(len(params))))
}

// cuGraphAddNode adds a conditional node; the client adds nodes of other kinds by the functions for them. Its graphs are part
// of the node.
func (s *session) cuGraphAddNode(_ uint32, o *C.uint64_t, g href, deps []C.uint64_t, ndeps, handle uint64, kind uint32, ctx href, bodies []C.uint64_t, n *C.size_t) C.CUresult {
	if len(bodies) == 0 || len(bodies) > maxBodies {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.sl_graph_add_conditional(o, C.uint64_t(g.real), first(deps), C.uint64_t(ndeps), C.uint64_t(handle), C.uint32_t(kind),
		C.uint32_t(len(bodies)), C.uint64_t(ctx.real), first(bodies))
	*n = C.size_t(len(bodies))
	return C.CUresult(rc)
}

// cuGraphAddChildGraphNode copies a graph into the node, or moves it there: then its nodes keep their handles, and can be named
// in changes of the executable graph.
func (s *session) cuGraphAddChildGraphNode(_ uint32, o *C.uint64_t, g href, deps []C.uint64_t, ndeps uint64, child href, ownership uint32) C.CUresult {
	if ownership == C.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE {
		return C.CUresult(C.sl_graph_add_child(o, C.uint64_t(g.real), first(deps), C.uint64_t(ndeps), C.uint64_t(child.real)))
	}
	if ownership != C.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	return C.CUresult(C.sl_graph_add_moved(o, C.uint64_t(g.real), first(deps), C.uint64_t(ndeps), C.uint64_t(child.real), C.uint32_t(ownership)))
}

// maxBodies is how many graphs a conditional node may have.
const maxBodies = 1 << 16

// cuGraphExecUpdate_v2 tells the driver's result as a value, since the reply of a call that failed carries none, and the nodes
// that do not fit. Nodes that the client does not know are those of a graph it captured; they get an id as others do.
func (s *session) cuGraphExecUpdate_v2(exec, g href, status *C.CUresult, result *C.CUgraphExecUpdateResult, node, from *C.uint64_t) C.CUresult {
	if rc := s.tellAny(); rc != 0 {
		return C.CUresult(rc) // the graph may lack a node
	}
	var info C.CUgraphExecUpdateResultInfo
	*status = C.CUresult(C.sl_graph_update(C.uint64_t(exec.real), C.uint64_t(g.real), &info))
	*result = info.result
	*node = C.uint64_t(uintptr(unsafe.Pointer(info.errorNode)))
	*from = C.uint64_t(uintptr(unsafe.Pointer(info.errorFromNode)))
	return 0
}

// cuGraphExecUpdate is the same of CUDA 11's function, which pairs nodes in another way.
func (s *session) cuGraphExecUpdate(exec, g href, status *C.CUresult, result *C.CUgraphExecUpdateResult, node *C.uint64_t) C.CUresult {
	if rc := s.tellAny(); rc != 0 {
		return C.CUresult(rc)
	}
	var bad C.CUgraphNode
	*status = C.CUresult(C.sl_graph_update_first(C.uint64_t(exec.real), C.uint64_t(g.real), &bad, result))
	*node = C.uint64_t(uintptr(unsafe.Pointer(bad)))
	return 0
}

func (s *session) cuGraphKernelNodeSetAttribute(node href, attr uint32, v *C.CUkernelNodeAttrValue) C.CUresult {
	if !in(nodePlain, attr) {
		return C.CUresult(s.refuseAttr("kernel node", attr))
	}
	if v == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	return C.call_cuGraphKernelNodeSetAttribute(C.uint64_t(node.real), C.uint32_t(attr), v)
}

func (s *session) cuGraphKernelNodeGetAttribute(node href, attr uint32, v *C.CUkernelNodeAttrValue) C.CUresult {
	if !in(nodePlain, attr) {
		return C.CUresult(s.refuseAttr("kernel node", attr))
	}
	return C.call_cuGraphKernelNodeGetAttribute(C.uint64_t(node.real), C.uint32_t(attr), v)
}
