package worker

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

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
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(n), u64(0)); r.result != 0 {
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
	// Checked: what the GPU has changed to something else is an error of the next wait, and the client's bytes stay.
	k.oneway(wire.OpHostMerge, u64(hostAt+1000), u32(8), u32(1), []byte{1}, bytes.Repeat([]byte{5}, 8), bytes.Repeat([]byte{6}, 8)) // as it was
	k.oneway(wire.OpHostMerge, u64(hostAt+1000), u32(8), u32(1), []byte{1}, bytes.Repeat([]byte{4}, 8), bytes.Repeat([]byte{6}, 8)) // changed to the same
	k.oneway(wire.OpHostMerge, u64(hostAt+1000), u32(8), u32(1), []byte{1}, bytes.Repeat([]byte{6}, 8), bytes.Repeat([]byte{7}, 8)) // its neighbours changed
	if r := k.wait(opCuStreamSynchronize, 1, u32(1)); r.result != 0 {
		t.Errorf("bytes that only one side has changed: %d", r.result)
	}
	k.oneway(wire.OpHostMerge, u64(hostAt+1000), u32(8), u32(1), []byte{3}, bytes.Repeat([]byte{7}, 8), bytes.Repeat([]byte{8}, 8))
	if r := k.wait(opCuStreamSynchronize, 1, u32(1)); r.result != 801 {
		t.Errorf("a byte that both sides have changed: %d", r.result)
	}
	want[1000], want[1001] = 8, 8
	if got, rc := k.hostRead(hostAt, n); rc != 0 || !bytes.Equal(got, want) {
		t.Errorf("read after that: %d, %v", rc, got[1000:1008])
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
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(n), u64(0)); r.result != 0 {
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
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(8192), u64(0)); r.result != 0 {
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
		if r := k.wait(wire.OpHostMap, 1, u64(c.addr), u64(c.size), u64(0)); r.result != c.want {
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
		"was too short":     func(k *conn) { k.oneway(wire.OpHostMerge, u64(hostAt), u32(8), u32(1), []byte{1}, make([]byte, 15)) },
		"checked twice":     func(k *conn) { k.oneway(wire.OpHostMerge, u64(hostAt), u32(8), u32(2), []byte{1}, make([]byte, 24)) },
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

// hostFrames are the bytes that HOST frames have told so far, by their addresses.
func (k *conn) hostFrames() map[uint64]byte {
	all := make(map[uint64]byte)
	for _, f := range k.told {
		d := wire.NewDecoder(f)
		var m wire.HostMerge
		m.Decode(d)
		mask, b := d.Bytes(int(m.Size/8)), d.Bytes(int(m.Size))
		if d.Done() != nil {
			k.t.Fatalf("a HOST frame of %d bytes is malformed", len(f))
		}
		for i := range b {
			if mask[i/8]>>(i%8)&1 != 0 {
				all[m.Dst+uint64(i)] = b[i]
			}
		}
	}
	return all
}

// The client is told what the GPU has changed in watched memory before it is told that the GPU is done, and not
// what it has sent itself.
func TestHostWatch(t *testing.T) {
	k := slow(t, 1)
	const n = 8192
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(n), u64(0)); r.result != 0 {
		t.Fatalf("map: %d", r.result)
	}
	p, rc := k.alloc(n)
	if rc != 0 {
		t.Fatal(rc)
	}
	k.copyIn(p, 1, bytes.Repeat([]byte{9}, n))
	k.oneway(wire.OpHostWatch, u64(hostAt+8), u64(4096))
	k.oneway(wire.OpHostMerge, u64(hostAt), u32(24), u32(0), []byte{0xff, 0xff, 0x0f}, bytes.Repeat([]byte{5}, 24))
	k.oneway(opCuMemcpyDtoDAsync_v2, u64(hostAt+20), u64(p), u64(10), u32(1))
	k.oneway(opCuMemcpyDtoDAsync_v2, u64(hostAt+4100), u64(p), u64(10), u32(1))
	if r := k.wait(opCuStreamSynchronize, 1, u32(1)); r.result != 0 {
		t.Fatal(r.result)
	}
	want := make(map[uint64]byte)
	for i := range uint64(10) {
		want[hostAt+20+i] = 9
	}
	for i := uint64(4100); i < 4104; i++ { // where the watch ends
		want[hostAt+i] = 9
	}
	k.mu.Lock()
	got := k.hostFrames()
	k.mu.Unlock()
	if !maps.Equal(got, want) {
		t.Errorf("told of %v, not of %v", got, want)
	}
	// While nothing is waited for, too.
	k.oneway(opCuMemcpyDtoDAsync_v2, u64(hostAt+1000), u64(p), u64(1), u32(1))
	k.until("the change is told", func() bool { return k.hostFrames()[hostAt+1000] == 9 })
	k.oneway(wire.OpHostWatch, u64(hostAt+8), u64(0))
	k.oneway(opCuMemcpyDtoDAsync_v2, u64(hostAt+2000), u64(p), u64(1), u32(1))
	k.oneway(wire.OpHostWatch, u64(hostAt+4096), u64(4096)) // ends with its memory
	k.oneway(wire.OpHostUnmap, u64(hostAt))
	if r := k.wait(opCuStreamSynchronize, 1, u32(1)); r.result != 0 {
		t.Fatal(r.result)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if got := k.hostFrames(); got[hostAt+2000] != 0 {
		t.Error("told of what is not watched any more")
	}
}

// Memory whose address is in use here has another if the client agrees.
func TestHostMapMoves(t *testing.T) {
	k := slow(t, 1)
	for i := range 3 {
		r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(4096), u64(1))
		var at wire.HostMapReply
		d := wire.NewDecoder(r.payload)
		if at.Decode(d); r.result != 0 || d.Done() != nil || (at.Address == hostAt) != (i == 0) || at.Address%4096 != 0 {
			t.Fatalf("map: %d, at %#x", r.result, at.Address)
		}
		want := fmt.Sprintf("8 bytes%d", i)
		k.oneway(wire.OpHostMerge, u64(at.Address), u32(8), u32(0), []byte{255}, []byte(want))
		if b, rc := k.hostRead(at.Address, 8); rc != 0 || string(b) != want {
			t.Errorf("read: %d, %q", rc, b)
		}
	}
	if b, rc := k.hostRead(hostAt, 8); rc != 0 || string(b) != "8 bytes0" {
		t.Errorf("what was there before holds %q: %d", b, rc)
	}
}

// A word's bytes are written together, neighbours stay, and lone words come last.
func TestMergeTurns(t *testing.T) {
	mem := make([]uint64, 40)
	b := unsafe.Slice((*byte)(unsafe.Pointer(&mem[0])), 8*len(mem))
	from, mask, want := bytes.Repeat([]byte{7}, len(b)), make([]byte, len(mem)), make([]byte, len(b))
	for i := range mask {
		mask[i] = byte(i * 37 % 256)
		for k := range 8 {
			if mask[i]>>k&1 != 0 {
				want[8*i+k] = 7
			}
		}
	}
	mergeTurns(b, from, mask, func(int) bool { return false })
	if !bytes.Equal(b, want) {
		t.Errorf("%x, not %x", b, want)
	}
}

// A word that completes the data of the change before is written before a flag. The test maps one page twice, so that the two words
// are one place in memory: it holds what was written last.
func TestMergeRestOfData(t *testing.T) {
	page := os.Getpagesize()
	fd, err := unix.MemfdCreate("twice", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(page)); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(-1, 0, 2*page, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	for at := 0; at < 2*page; at += page {
		if _, err := unix.MmapPtr(fd, 0, unsafe.Pointer(&mem[at]), uintptr(page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
			t.Fatal(err)
		}
	}
	data := page / 8
	w := hostWatches{list: []*hostWatch{{base: hostAt, mem: mem, seen: make([]byte, len(mem)), last: make([]bool, len(mem)/8)}}}
	w.n.Store(1)
	put := func(words map[int]byte) {
		from, mask := make([]byte, len(mem)), make([]byte, len(mem)/8)
		for k, v := range words {
			from[8*k], mask[k] = v, 0xff
		}
		w.merged(hostAt, from, mask, func() bool {
			mergeTurns(mem, from, mask, func(k int) bool { return w.changedLast(hostAt + uint64(8*k)) })
			return true
		})
	}
	const flag, rest = 9, 5
	put(map[int]byte{data + 1: 1, data + 2: 1, data + 3: 1})
	put(map[int]byte{0: flag, data: rest})
	if mem[0] != flag {
		t.Errorf("%d was written last, not the flag", mem[0])
	}
	put(map[int]byte{1: 1, 2: 1, 3: 1})
	put(map[int]byte{0: rest, data: flag}) // the flag lies behind the data
	if mem[0] != flag {
		t.Errorf("%d was written last, not the flag behind the data", mem[0])
	}
}

// A box of rows is within the memory that kernels reach as a whole, or refused.
func TestHostMapsBox(t *testing.T) {
	k := slow(t, 1)
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(8192), u64(0)); r.result != 0 {
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
