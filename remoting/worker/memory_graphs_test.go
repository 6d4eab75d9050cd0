package worker

import (
	"encoding/binary"
	"testing"
)

// An executable graph is charged for the memory of its nodes, and one that does not fit is not made.
func TestGraphMemory(t *testing.T) {
	const noMemory = 2 // CUDA_ERROR_OUT_OF_MEMORY
	k := slow(t, 1)
	before, total := k.memInfo()
	big := before / 3 * 2
	alloc := func(node, graph uint32, n uint64) reply {
		return k.wait(opCuGraphAddMemAllocNode, 1, u32(node), u32(graph), []byte{0}, u64(0), u32(0), u64(n), []byte{1})
	}
	for g := uint32(10); g < 12; g++ {
		k.ok(opCuGraphCreate, u32(g), u32(0))
	}
	if r := alloc(20, 10, total+1); r.result != noMemory {
		t.Errorf("a node of more than the lease: %d", r.result)
	}
	r := alloc(21, 10, big)
	if r.result != 0 {
		t.Fatalf("a node of %d bytes: %d", big, r.result)
	}
	at := binary.LittleEndian.Uint64(r.payload)
	k.ok(opCuGraphAddMemFreeNode, u32(22), u32(10), []byte{1}, u32(1), u32(21), u64(1), u64(at))
	k.ok(opCuGraphInstantiateWithFlags, u32(30), u32(10), u64(0))
	if free, _ := k.memInfo(); free > before-big {
		t.Errorf("%d bytes are free beside a graph with %d of %d", free, big, before)
	}
	if r := k.wait(opCuMemAlloc_v2, 1, []byte{1}, u64(big)); r.result != noMemory {
		t.Errorf("%d bytes beside a graph with as many: %d", big, r.result)
	}
	k.oneway(opCuGraphLaunch, u32(30), u32(1))
	if r := k.streamSync(1); r.result != 0 {
		t.Fatal(r.result)
	}
	k.ok(opCuGraphExecDestroy, u32(30))
	k.ok(opCuGraphDestroy, u32(10))
	// What the driver keeps in stock gives way.
	p, rc := k.alloc(big)
	if rc != 0 {
		t.Fatalf("%d bytes after the graph: %d", big, rc)
	}
	if r := alloc(23, 11, big); r.result == 0 {
		if r := k.wait(opCuGraphInstantiateWithFlags, 1, u32(31), u32(11), u64(0)); r.result != noMemory {
			t.Errorf("a graph beside an allocation of as much: %d", r.result)
		}
	}
	k.free(p)
	k.ok(opCuGraphDestroy, u32(11))
	k.ok(opCuDeviceGraphMemTrim, u32(0))
	if free, _ := k.memInfo(); free < before {
		t.Errorf("%d of %d bytes are free at last", free, before)
	}
}
