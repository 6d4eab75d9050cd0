package worker

import (
	"slices"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// box3D is one side of a CUDA_MEMCPY3D at its origin.
func box3D(memtype uint32, host, dev, pitch uint64) []byte {
	return cat(u64(0), u64(0), u64(0), u64(0), u32(memtype), u32(0), u64(host), u64(dev), u64(0), u64(0), u64(pitch), u64(1))
}

// A copy of the client's memory in a graph uses what the client has mapped and nothing else of the worker's memory, asks the
// client when it gets there, and tells when its graphs are gone.
func TestGraphCopies(t *testing.T) {
	const hostSide, deviceSide = 1, 2
	k := slow(t, 1)
	k.onHost = func(id uint32) { k.oneway(wire.OpHostFnDone, u32(id)) }
	k.ok(wire.OpHostMap, u64(hostAt), u64(8192), u64(0))
	p, rc := k.alloc(8192)
	if rc != 0 {
		t.Fatal(rc)
	}
	k.ok(opCuGraphCreate, u32(10), u32(0))
	copyNode := func(node, fn uint32, host, n uint64) []byte {
		c := cat(box3D(deviceSide, 0, p, n), box3D(hostSide, host, 0, n), u64(n), u64(1), u64(1))
		return cat(u32(node), u32(10), []byte{0}, u64(0), []byte{1}, c, u32(1), u32(fn))
	}
	for i, c := range []struct{ host, n uint64 }{
		{0, 8}, {hostAt - 8, 8}, {hostAt + 8192, 8}, {hostAt + 8190, 8}, {hostAt, 8193}, {hostAt, 1 << 63}, {hostAt, 0}, {uint64(p), 8},
	} {
		fn := uint32(50 + i)
		if r := k.wait(opCuGraphAddMemcpyNode, 1, copyNode(fn, fn, c.host, c.n)); r.result == 0 {
			t.Errorf("%d bytes at %#x are copied to", c.n, c.host)
		}
	}
	k.ok(opCuGraphAddMemcpyNode, copyNode(20, 30, hostAt, 4096))
	if b := k.ok(opCuGraphNodeGetType, u32(20), []byte{1}); b[0] != 1 {
		t.Errorf("a copy is a node of type %d", b[0])
	}
	if r := k.wait(opCuGraphChildGraphNodeGetGraph, 1, u32(20), []byte{1}); r.result == 0 {
		t.Error("what a copy is made of is shown")
	}
	k.copyIn(p, 1, []byte("from the device"))
	k.ok(opCuGraphInstantiateWithFlags, u32(40), u32(10), u64(0))
	for range 2 {
		k.oneway(opCuGraphLaunch, u32(40), u32(1))
	}
	if r := k.streamSync(1); r.result != 0 {
		t.Fatal(r.result)
	}
	if b, rc := k.hostRead(hostAt, 15); rc != 0 || string(b) != "from the device" {
		t.Errorf("the copy left %q, %d", b, rc)
	}
	k.ok(opCuGraphDestroy, u32(10))
	k.mu.Lock()
	calls := 0
	for _, what := range k.order {
		if what == "host 30" {
			calls++
		}
	}
	if calls != 2 || slices.Contains(k.order, "gone 30") {
		t.Errorf("the function was called %d times, not 2, or is gone before its graph: %v", calls, k.order)
	}
	k.mu.Unlock()
	k.ok(opCuGraphExecDestroy, u32(40))
	k.until("the function is gone", func() bool { return slices.Contains(k.order, "gone 30") })
}
