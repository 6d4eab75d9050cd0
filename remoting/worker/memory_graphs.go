package worker

// Memory of graphs: that of their allocation nodes.
//
// The driver takes it when a graph is launched, shares it between graphs as it can, and keeps it in stock. An executable
// graph is charged for all its nodes from its making to its end, and what the driver has beyond that for all graphs of a
// device, as it tells.

/*
#include "driver.h"
*/
import "C"

import (
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

type graphMemory struct {
	at      map[uint64]int          // addresses of nodes, and their devices
	execs   map[uint64][]graphBytes // what executable graphs are charged for, by the driver's name
	charged []uint64                // per device
}

// graphBytes is memory of a device, in bytes.
type graphBytes struct {
	dev   int
	bytes uint64
}

func (g *graphMemory) init() {
	g.at = make(map[uint64]int)
	g.execs = make(map[uint64][]graphBytes)
}

// maxGraphDepth bounds how deep graphs in graphs are looked at.
const maxGraphDepth = 32

// graphTakes adds up what the allocation nodes of a graph and of its children take, by devices.
func (s *session) graphTakes(graph uint64, depth int, takes []uint64) {
	var n C.size_t
	if depth == 0 || C.call_cuGraphGetNodes(C.uint64_t(graph), nil, &n) != 0 || n == 0 {
		return
	}
	nodes := make([]C.uint64_t, n)
	if C.call_cuGraphGetNodes(C.uint64_t(graph), first(nodes), &n) != 0 {
		return
	}
	for _, node := range nodes[:min(int(n), len(nodes))] {
		var t C.CUgraphNodeType
		if C.call_cuGraphNodeGetType(node, &t) != 0 {
			continue
		}
		switch t {
		case C.CU_GRAPH_NODE_TYPE_MEM_ALLOC:
			var p C.CUDA_MEM_ALLOC_NODE_PARAMS
			if C.call_cuGraphMemAllocNodeGetParams(node, &p) == 0 && int(p.poolProps.location.id) < len(takes) {
				takes[p.poolProps.location.id] += account.RoundUp(uint64(p.bytesize))
			}
		case C.CU_GRAPH_NODE_TYPE_GRAPH:
			var child C.uint64_t
			if C.call_cuGraphChildGraphNodeGetGraph(node, &child) == 0 {
				s.graphTakes(uint64(child), depth-1, takes)
			}
		}
	}
}

// takeGraph charges for the memory of a graph that is made executable; false if it does not fit.
func (s *session) takeGraph(graph uint64) ([]graphBytes, bool) {
	m := &s.mem
	if len(m.graphs.at) == 0 {
		return nil, true
	}
	takes := make([]uint64, len(m.graphs.charged))
	s.graphTakes(graph, maxGraphDepth, takes)
	var all []graphBytes
	for dev, n := range takes {
		if n == 0 {
			continue
		}
		if !m.reserve(dev, n) {
			for _, t := range all {
				m.release(t.dev, t.bytes)
				m.graphs.charged[t.dev] -= t.bytes
			}
			return nil, false
		}
		m.graphs.charged[dev] += n
		all = append(all, graphBytes{dev, n})
	}
	return all, true
}

// madeGraph notes what an executable graph is charged for; the driver's name of it is 0 if there is none.
func (s *session) madeGraph(exec C.uint64_t, takes []graphBytes) {
	if len(takes) == 0 {
		return
	}
	if exec != 0 {
		s.mem.graphs.execs[uint64(exec)] = takes
		return
	}
	for _, t := range takes {
		s.mem.settleGraphs(t.dev)
	}
}

// settleGraphs brings the charge for a device's graphs to what is due.
func (m *memory) settleGraphs(dev int) {
	var due uint64
	for _, takes := range m.graphs.execs {
		for _, t := range takes {
			if t.dev == dev {
				due += t.bytes
			}
		}
	}
	var has uint64
	if C.call_cuDeviceGetGraphMemAttribute(C.uint32_t(dev), C.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, unsafe.Pointer(&has)) == 0 {
		due = max(due, account.RoundUp(has))
	}
	switch charged := m.graphs.charged[dev]; {
	case due < charged:
		m.release(dev, charged-due)
		m.graphs.charged[dev] = due
	case due > charged && m.take(dev, due-charged):
		m.graphs.charged[dev] = due
	case due > charged: // the driver has it all the same, so that the overhead shows it
		m.measureSoon()
	}
}

// trimGraphs makes the driver give back what it keeps in stock for a device's graphs.
func (m *memory) trimGraphs(dev int) bool {
	before := m.graphs.charged[dev]
	if before == 0 || C.call_cuDeviceGraphMemTrim(C.uint32_t(dev)) != 0 {
		return false
	}
	m.settleGraphs(dev)
	return m.graphs.charged[dev] < before
}

func (s *session) cuGraphAddMemAllocNode(_ uint32, o *C.uint64_t, g href, deps []C.uint64_t, ndeps uint64, device uint32, n uint64, p *C.CUdeviceptr) C.CUresult {
	if int(device) >= len(s.mem.graphs.charged) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if n > s.ledger.Info(int(device)).Total {
		return C.CUDA_ERROR_OUT_OF_MEMORY // as of more than the device has
	}
	rc := C.sl_graph_add_alloc(o, C.uint64_t(g.real), first(deps), C.uint64_t(ndeps), C.uint32_t(device), C.uint64_t(n), (*C.uint64_t)(unsafe.Pointer(p)))
	if rc == 0 {
		s.mem.graphs.at[uint64(*p)] = int(device)
	}
	return C.CUresult(rc)
}

func (s *session) cuGraphMemAllocNodeGetParams(node href, p *C.CUDA_MEM_ALLOC_NODE_PARAMS) C.CUresult {
	rc := C.call_cuGraphMemAllocNodeGetParams(C.uint64_t(node.real), p)
	p.accessDescs, p.accessDescCount, p.poolProps.win32SecurityAttributes = nil, 0, nil
	return rc
}

func (s *session) cuGraphExecDestroy(exec href) C.CUresult {
	rc := C.call_cuGraphExecDestroy(C.uint64_t(exec.real))
	s.unbind(wire.KindExec, exec.id)
	takes := s.mem.graphs.execs[exec.real]
	delete(s.mem.graphs.execs, exec.real)
	for _, t := range takes {
		s.mem.settleGraphs(t.dev)
	}
	return rc
}

func (s *session) cuDeviceGraphMemTrim(dev uint32) C.CUresult {
	rc := C.call_cuDeviceGraphMemTrim(C.uint32_t(dev))
	if rc == 0 && int(dev) < len(s.mem.graphs.charged) {
		s.mem.settleGraphs(int(dev))
	}
	return rc
}
