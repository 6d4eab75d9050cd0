package worker

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const invalidHandle = 400 // CUDA_ERROR_INVALID_HANDLE

// ok runs a call that has to succeed and gives its reply's payload.
func (k *conn) ok(op uint16, parts ...[]byte) []byte {
	k.t.Helper()
	r := k.wait(op, 1, parts...)
	if r.result != 0 {
		k.t.Fatalf("%s: %d", opName(op), r.result)
	}
	return r.payload
}

// gone checks that a call's handle is none any more.
func (k *conn) gone(what string, op uint16, parts ...[]byte) {
	k.t.Helper()
	if r := k.wait(op, 1, parts...); r.result != invalidHandle {
		k.t.Errorf("%s: %s: %d", what, opName(op), r.result)
	}
}

// What is part of something ends with it: its ids are unknown from then on, and the driver is
// not asked about it.
func TestParts(t *testing.T) {
	_, addr := startWorker(t, nil)
	id := func(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
	nodeType := func(n uint32) []byte { return cat(u32(n), []byte{1}) }
	empty := func(node, graph uint32) []byte { return cat(u32(node), u32(graph), []byte{0}, u64(0)) }

	t.Run("levels of a mipmapped array", func(t *testing.T) {
		k := dial(t, addr, [16]byte{})
		k.ok(opCuMipmappedArrayCreate, array3DPayload(10, 32, 1), u32(3))
		k.ok(opCuMipmappedArrayGetLevel, u32(20), u32(10), u32(1))
		k.ok(opCuMipmappedArrayGetLevel, u32(21), u32(10), u32(1)) // the same once more
		k.ok(opCuArrayGetDescriptor_v2, []byte{1}, u32(20))
		k.ok(opCuMipmappedArrayDestroy, u32(10))
		for level := uint32(20); level < 22; level++ {
			k.gone("level of a destroyed array", opCuArrayGetDescriptor_v2, []byte{1}, u32(level))
			box := cat(u32(3), u32(0), u64(uint64(level)), u64(0), u64(0), u64(0), u64(0), u64(0), u32(0), u32(0), u64(4), u64(1), u64(1))
			k.gone("level of a destroyed array", wire.OpCopyOut3D, box, u32(7))
		}
	})
	t.Run("nodes of a graph", func(t *testing.T) {
		k := dial(t, addr, [16]byte{})
		k.ok(opCuGraphCreate, u32(10), u32(0))
		k.ok(opCuGraphAddEmptyNode, empty(20, 10))
		k.ok(opCuGraphAddEmptyNode, empty(21, 10))
		k.ok(opCuGraphCreate, u32(11), u32(0))
		k.ok(opCuGraphAddEmptyNode, empty(30, 11))
		k.ok(opCuGraphAddChildGraphNode, u32(22), u32(10), []byte{0}, u64(0), u32(11), u32(0))
		child := id(k.ok(opCuGraphChildGraphNodeGetGraph, u32(22), []byte{1}))
		inner := id(k.ok(opCuGraphGetNodes, u32(child), []byte{1}, u64(8))[12:])
		k.ok(opCuGraphClone, u32(12), u32(10))
		cloned := id(k.ok(opCuGraphNodeFindInClone, []byte{1}, u32(20), u32(12)))
		for _, n := range []uint32{20, 21, 22, 30, inner, cloned} {
			k.ok(opCuGraphNodeGetType, nodeType(n))
		}
		if r := k.wait(opCuGraphDestroy, 1, u32(child)); r.result != 1 {
			t.Errorf("a graph that belongs to a node is destroyed: %d", r.result)
		}
		k.ok(opCuGraphDestroyNode, u32(21))
		k.gone("destroyed node", opCuGraphNodeGetType, nodeType(21))
		k.ok(opCuGraphNodeGetType, nodeType(20))
		k.ok(opCuGraphDestroy, u32(10))
		for _, n := range []uint32{20, 22, inner} {
			k.gone("node of a destroyed graph", opCuGraphNodeGetType, nodeType(n))
		}
		k.gone("child of a destroyed graph", opCuGraphAddEmptyNode, empty(40, child))
		for _, n := range []uint32{30, cloned} { // of graphs that are still there
			k.ok(opCuGraphNodeGetType, nodeType(n))
		}
		k.ok(opCuGraphDestroy, u32(12))
		k.gone("node of a destroyed clone", opCuGraphNodeGetType, nodeType(cloned))
	})
	t.Run("the graph of a capture", func(t *testing.T) {
		k := dial(t, addr, [16]byte{})
		k.streamCreate(1)
		info := func() uint32 { return id(k.ok(opCuStreamGetCaptureInfo_v2, u32(1), []byte{0, 0, 1, 0}, u64(0))[8:]) }
		k.ok(opCuStreamBeginCapture_v2, u32(1), u32(2))
		early := info()
		k.ok(opCuGraphAddEmptyNode, empty(20, early))
		if late := id(k.ok(opCuStreamEndCapture, u32(1), []byte{1})); late != early {
			t.Errorf("handle %#x in the capture and %#x at its end", early, late)
		}
		k.ok(opCuGraphAddEmptyNode, empty(21, early))
		k.ok(opCuGraphDestroy, u32(early))
		k.gone("destroyed", opCuGraphAddEmptyNode, empty(22, early))
		k.gone("node of it", opCuGraphNodeGetType, nodeType(20))
		k.gone("node of it", opCuGraphNodeGetType, nodeType(21))
		// A capture that ends without a graph.
		k.ok(opCuStreamBeginCapture_v2, u32(1), u32(2))
		early = info()
		k.ok(opCuGraphAddEmptyNode, empty(20, early))
		k.ok(opCuStreamDestroy_v2, u32(1))
		k.gone("graph of a stream that was destroyed", opCuGraphAddEmptyNode, empty(23, early))
		k.gone("node of that", opCuGraphNodeGetType, nodeType(20))
		// A capture in which a launch was refused.
		k.streamCreate(1)
		k.ok(opCuStreamBeginCapture_v2, u32(1), u32(2))
		early = info()
		k.ok(opCuGraphAddEmptyNode, empty(20, early))
		k.launch(77, 1, 1, 1, nil)
		if r := k.wait(opCuStreamEndCapture, 1, u32(1), []byte{1}); r.result == 0 {
			t.Error("a capture ended well that lacks a launch")
		}
		k.gone("graph of a capture that lacks a launch", opCuGraphAddEmptyNode, empty(23, early))
		k.gone("node of that", opCuGraphNodeGetType, nodeType(20))
		// One that was to add to a graph of the client's, which stays.
		k.ok(opCuGraphCreate, u32(12), u32(0))
		k.ok(opCuStreamBeginCaptureToGraph, u32(1), u32(12), []byte{0}, []byte{0}, u64(0), u32(2))
		k.launch(77, 1, 1, 1, nil)
		if r := k.wait(opCuStreamEndCapture, 1, u32(1), []byte{1}); r.result == 0 {
			t.Error("a capture to a graph ended well that lacks a launch")
		}
		k.ok(opCuGraphAddEmptyNode, empty(24, 12))
		k.ok(opCuGraphDestroy, u32(12))
	})
	t.Run("modules and kernels of a library", func(t *testing.T) {
		k := dial(t, addr, [16]byte{})
		for _, library := range []bool{true, false} {
			if _, rc := k.loadAs(image0, 1, library); rc != 0 {
				t.Fatal(rc)
			}
			n := uint16(len("vecadd"))
			unload := uint16(opCuLibraryUnload)
			if !library {
				n |= wire.BindModule
				unload = opCuModuleUnload
			}
			k.ok(wire.OpKernelBind, u32(5), u32(1), binary.LittleEndian.AppendUint16(nil, n), []byte("vecadd"))
			k.ok(wire.OpKernelInfo, u32(5), u32(0))
			if library {
				k.ok(opCuLibraryGetModule, u32(7), u32(1))
			}
			k.ok(unload, u32(1))
			k.gone("kernel after unload", wire.OpKernelInfo, u32(5), u32(0))
			k.launch(5, 0, 1, 1, make([]byte, 28))
			if r := k.streamSync(0); r.result != invalidHandle {
				t.Errorf("launch of an unloaded kernel: %d", r.result)
			}
			if library {
				k.gone("module of an unloaded library", opCuModuleGetGlobal_v2, []byte{1, 1}, u32(7), u32(1), []byte("x"))
			}
		}
	})
}

// The list of what is part of a graph does not grow by what came and went.
func TestPartsAreForgotten(t *testing.T) {
	loadFakeDriver(t)
	s, acct := fakeSession(t, nil, nil)
	defer acct.Close()
	defer s.rd.Close()
	s.bind(wire.KindGraph, 1, 1000, 0)
	for i := range uint32(10) {
		s.bind(wire.KindNode, 1+i, uint64(1+i), 0)
		s.own(refOf(wire.KindGraph, 1), wire.KindNode, 1+i)
	}
	for i := range uint32(100_000) {
		node := 100 | i%200<<genShift
		s.bind(wire.KindNode, node, 1<<30, 0)
		s.own(refOf(wire.KindGraph, 1), wire.KindNode, node)
		s.unbind(wire.KindNode, node)
	}
	if l := s.parts[refOf(wire.KindGraph, 1)]; cap(l) > 100 {
		t.Errorf("%d entries for 10 nodes", cap(l))
	}
	s.unbind(wire.KindGraph, 1)
	s.tables[wire.KindNode].each(func(id uint32, _ *slot) { t.Errorf("node %#x is left", id) })
	if len(s.parts) > 0 {
		t.Errorf("left: %v", s.parts)
	}
}

// Levels and planes, where a driver would know a dead array by itself: their ids end all the same.
func TestArrayPartsEnd(t *testing.T) {
	s, _ := activeSession(t)
	// The driver fails now and then.
	until := func(op uint16, parts ...[]byte) {
		t.Helper()
		for range 20 {
			if _, rc := s.call(op, parts...); rc == 0 {
				return
			}
		}
		t.Fatalf("%s fails", opName(op))
	}
	until(opCuMipmappedArrayCreate, array3DPayload(10, 32, 1), u32(3))
	until(opCuMipmappedArrayGetLevel, u32(20), u32(10), u32(1))
	until(opCuArrayGetPlane, u32(21), u32(20), u32(0))
	until(opCuArrayCreate_v2, arrayPayload(11, 32, 1))
	until(opCuArrayGetPlane, u32(22), u32(11), u32(0))
	left := func() (ids []uint32) {
		for _, id := range []uint32{20, 21, 22} {
			if s.slot(refOf(wire.KindArray, id)) != nil {
				ids = append(ids, id)
			}
		}
		return ids
	}
	if l := left(); len(l) != 3 {
		t.Fatalf("made: %v", l)
	}
	until(opCuArrayDestroy, u32(11))
	if l := left(); !slices.Equal(l, []uint32{20, 21}) {
		t.Errorf("after the array is destroyed: %v", l)
	}
	until(opCuMipmappedArrayDestroy, u32(10))
	if l := left(); len(l) != 0 {
		t.Errorf("after the mipmapped array is destroyed: %v", l)
	}
}
