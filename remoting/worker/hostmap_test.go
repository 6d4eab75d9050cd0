package worker

import (
	"bytes"
	"strings"
	"testing"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// hostAt is an address that no process of a test has.
const hostAt = 0x6a0000000000

func (k *conn) hostRead(p uint64, n int) ([]byte, int32) {
	k.t.Helper()
	r := k.wait(wire.OpHostRead, 1, u64(p), u64(uint64(n)))
	return r.payload, r.result
}

// What is written to memory that kernels reach is there for copies of the driver's, and
// what they write is read; a merge leaves the bytes alone that it does not name.
func TestHostMaps(t *testing.T) {
	k := slow(t, 1)
	const n = 64 << 10
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(n)); r.result != 0 {
		t.Fatalf("map: %d", r.result)
	}
	p, rc := k.alloc(n)
	if rc != 0 {
		t.Fatal(rc)
	}
	want := bytes.Repeat([]byte("abcdefgh"), n/8)
	k.oneway(wire.OpHostWrite, u64(hostAt), u32(1), u32(0), want)
	if got := k.copyOut(hostAt, n, 1, 7); !bytes.Equal(got, want) {
		t.Error("the driver finds something else than was written")
	}
	k.copyIn(p, 1, bytes.Repeat([]byte{9}, 100))
	k.oneway(opCuMemcpyDtoDAsync_v2, u64(hostAt+1000), u64(p), u64(100), u32(1))
	if r := k.wait(opCuStreamSynchronize, 1, u32(1)); r.result != 0 {
		t.Fatal(r.result)
	}
	copy(want[1000:], bytes.Repeat([]byte{9}, 100))
	k.oneway(wire.OpHostMerge, u64(hostAt+1000), u32(16), u32(0), []byte{0b10000001, 0xff}, bytes.Repeat([]byte{5}, 16))
	copy(want[1000:], []byte{5, 9, 9, 9, 9, 9, 9, 5, 5, 5, 5, 5, 5, 5, 5, 5})
	if got, rc := k.hostRead(hostAt, n); rc != 0 || !bytes.Equal(got, want) {
		t.Errorf("read: %d, as it should be: %v", rc, bytes.Equal(got, want))
	}
	// Of the device's own memory: it is there for what follows, in whatever stream.
	k.oneway(wire.OpHostWrite, u64(p), u32(1), u32(0), want[:500])
	if got := k.copyOut(p, 500, 0, 8); !bytes.Equal(got, want[:500]) {
		t.Error("the device has something else than was written")
	}
	k.oneway(wire.OpHostUnmap, u64(hostAt))
	if _, rc := k.hostRead(hostAt, 8); rc != 1 {
		t.Errorf("read of what is no more: %d", rc)
	}
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(n)); r.result != 0 {
		t.Fatalf("map again: %d", r.result)
	}
	if got, rc := k.hostRead(hostAt, n); rc != 0 || !bytes.Equal(got, make([]byte, n)) {
		t.Errorf("new memory is not zero: %d", rc)
	}
}

// The client says where its memory is, and gets nothing of the worker's by that.
func TestHostMapsRefused(t *testing.T) {
	k := slow(t, 1)
	mine := new([8192]byte)
	page := (uint64(uintptr(unsafe.Pointer(mine))) + 4095) &^ 4095
	const (
		invalid = 1
		noRoom  = 2
		inUse   = 801
	)
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(8192)); r.result != 0 {
		t.Fatalf("map: %d", r.result)
	}
	for _, c := range []struct {
		name       string
		addr, size uint64
		want       int32
	}{
		{"no bytes", hostAt + 1<<30, 0, invalid},
		{"part of a page", hostAt + 1<<30, 100, invalid},
		{"not at a page", hostAt + 1<<30 + 8, 4096, invalid},
		{"address 0", 0, 4096, invalid},
		{"the kernel's", 1 << 47, 4096, invalid},
		{"past the end", 1<<47 - 4096, 8192, invalid},
		{"wraps", 1<<64 - 4096, 8192, invalid},
		{"too much", hostAt + 1<<30, wire.MaxHostMap, noRoom},
		{"mapped already", hostAt, 4096, inUse},
		{"begins before what is mapped", hostAt - 4096, 8192, inUse},
	} {
		if r := k.wait(wire.OpHostMap, 1, u64(c.addr), u64(c.size)); r.result != c.want {
			t.Errorf("%s: %d, want %d", c.name, r.result, c.want)
		}
	}
	for name, p := range map[string]uint64{"this process's": page, "past the end": hostAt + 8192, "partly past the end": hostAt + 8192 - 4} {
		if _, rc := k.hostRead(p, 8); rc != invalid {
			t.Errorf("read of memory that is %s: %d", name, rc)
		}
		k.oneway(wire.OpHostMerge, u64(p), u32(8), u32(0), []byte{255}, make([]byte, 8))
	}
	k.oneway(wire.OpHostWrite, u64(hostAt+8192-4), u32(1), u32(0), make([]byte, 8))
	k.oneway(wire.OpHostUnmap, u64(hostAt+4096))
	if got, rc := k.hostRead(hostAt, 8192); rc != 0 || !bytes.Equal(got, make([]byte, 8192)) {
		t.Errorf("after all that: %d", rc)
	}
}

func TestHostMapsMalformed(t *testing.T) {
	_, addr := startWorker(t, nil)
	for name, send := range map[string]func(k *conn){
		"mask too short":    func(k *conn) { k.oneway(wire.OpHostMerge, u64(hostAt), u32(16), u32(0), []byte{1}, make([]byte, 16)) },
		"half a word":       func(k *conn) { k.oneway(wire.OpHostMerge, u64(hostAt), u32(4), u32(0), make([]byte, 4)) },
		"nothing":           func(k *conn) { k.oneway(wire.OpHostMerge, u64(hostAt), u32(0), u32(0)) },
		"short write":       func(k *conn) { k.oneway(wire.OpHostWrite, u64(hostAt)) },
		"read without call": func(k *conn) { k.oneway(wire.OpHostRead, u64(hostAt), u64(8)) },
		"short map":         func(k *conn) { k.oneway(wire.OpHostMap, u64(hostAt)) },
	} {
		k := dial(t, addr, [16]byte{})
		if r := k.wait(wire.OpCtxActivate, 0, u32(0)); r.result != 0 {
			t.Fatal(r.result)
		}
		send(k)
		k.until(name, func() bool { return k.bye != "" })
		if !strings.Contains(k.bye, "malformed") {
			t.Errorf("%s: bye %q", name, k.bye)
		}
		k.c.Close()
	}
}

// A box of rows is within the memory that kernels reach as a whole, or refused.
func TestHostMapsBox(t *testing.T) {
	k := slow(t, 1)
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(8192)); r.result != 0 {
		t.Fatalf("map: %d", r.result)
	}
	box := func(pitch, y, h, z, d uint64) []byte {
		return cat(u32(2), u32(1), u64(hostAt), u64(pitch), u64(4), u64(0), u64(y), u64(z), u32(0), u32(0), u64(16), u64(h), u64(d), u32(9))
	}
	for _, c := range []struct {
		name              string
		pitch, y, h, z, d uint64
		want              int32
	}{
		{"rows", 4096, 0, 2, 0, 1, 0},
		{"a row too far", 4096, 1, 2, 0, 1, 1},
		{"a slice too far", 1024, 0, 4, 2, 1, 1},
		{"a pitch without end", 1 << 40, 1 << 40, 1, 1 << 40, 1, 1},
	} {
		if r := k.wait(wire.OpCopyOut3D, 1, box(c.pitch, c.y, c.h, c.z, c.d)); r.result != c.want {
			t.Errorf("%s: %d, want %d", c.name, r.result, c.want)
		}
	}
}
