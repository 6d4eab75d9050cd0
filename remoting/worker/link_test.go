package worker

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// linkPTX is an input of the linker that has a kernel.
func linkPTX(kernel string) []byte {
	return []byte(".version 8.0\n.target sm_80\n.visible .entry " + kernel + "() { ret; }\n\x00")
}

func options(pairs ...uint64) (b []byte) {
	for i := 0; i < len(pairs); i += 2 {
		b = append(b, cat(u32(uint32(pairs[i])), u64(pairs[i+1]))...)
	}
	return b
}

// logOptions are both logs of so many bytes, and the time.
func logOptions(room uint64) []byte { return options(3, 0, 4, room, 5, 0, 6, room, 2, 0) }

func (k *conn) linkCreate(id uint32, opts []byte) reply {
	k.t.Helper()
	return k.wait(wire.OpLinkCreate, 1, u32(id), u32(uint32(len(opts)/wire.JITOptionSize)), opts)
}

func linkAddRequest(input []byte, id, kind uint32, opts []byte, name string) []byte {
	sum := sha256.Sum256(input)
	return cat(sum[:], u64(uint64(len(input))), u32(id), u32(kind), u32(uint32(len(opts)/wire.JITOptionSize)), u32(uint32(len(name))), opts, []byte(name))
}

// linkAdd adds an input, which it uploads if asked to.
func (k *conn) linkAdd(input []byte, id, kind uint32, opts []byte) reply {
	k.t.Helper()
	ask := linkAddRequest(input, id, kind, opts, "input")
	r := k.wait(wire.OpLinkAdd, 1, ask)
	if r.result == wire.ResultNotInStore {
		sum := sha256.Sum256(input)
		for off := 0; off < len(input); off += 1 << 20 {
			k.oneway(wire.OpImageChunk, sum[:], u64(uint64(off)), u64(uint64(len(input))), input[off:min(off+1<<20, len(input))])
		}
		r = k.wait(wire.OpLinkAdd, 1, ask)
	}
	return r
}

// logs gives what a reply's JIT_LOGS say.
func logs(t *testing.T, b []byte) (m wire.JITLogs, info, errs string) {
	t.Helper()
	d := wire.NewDecoder(b)
	m.Decode(d)
	info, errs = string(d.Bytes(int(m.NInfo))), string(d.Bytes(int(m.NError)))
	if err := d.Done(); err != nil {
		t.Fatal(err)
	}
	return m, info, errs
}

func linker(t *testing.T) *conn {
	t.Helper()
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	if r := k.wait(wire.OpCtxActivate, 0, u32(0)); r.result != 0 {
		t.Fatalf("context: %d", r.result)
	}
	return k
}

// TestLink: what the driver links comes back, and loads; each input's errors are in the reply to it.
func TestLink(t *testing.T) {
	k := linker(t)
	if r := k.linkCreate(1, logOptions(200)); r.result != 0 {
		t.Fatal(r.result)
	}
	for _, kernel := range []string{"vecadd", "hello"} {
		if r := k.linkAdd(linkPTX(kernel), 1, 1, options(0, 32)); r.result != 0 {
			t.Fatal(r.result)
		}
	}
	r := k.linkAdd([]byte(".version 8.0\n.target sm_80\n{\x00"), 1, 1, nil)
	if m, _, errs := logs(t, r.payload); r.result != 218 || !strings.Contains(errs, "line 3") || int(m.ErrorSize) != len(errs) || math.Float32frombits(m.Wall) <= 0 {
		t.Errorf("PTX that is wrong: %d, %q, %+v", r.result, errs, m)
	}
	r = k.wait(wire.OpLinkComplete, 1, u32(1))
	if r.result != 0 {
		t.Fatal(r.result)
	}
	size := binary.LittleEndian.Uint64(r.payload)
	logs(t, r.payload[8:])
	image := k.wait(wire.OpLinkRead, 1, u32(1), u32(0), u64(0), u64(size)).payload
	if uint64(len(image)) != size || !bytes.HasPrefix(image, []byte("\x7fELF")) {
		t.Fatalf("%d bytes of %d: %.40q", len(image), size, image)
	}
	if part := k.wait(wire.OpLinkRead, 1, u32(1), u32(0), u64(2), u64(5)).payload; !bytes.Equal(part, image[2:7]) {
		t.Errorf("a part of it is %q", part)
	}
	k.oneway(opCuLinkDestroy, u32(1))
	if names, rc := k.load(image, 1); rc != 0 || len(names) != 2 {
		t.Errorf("the linked image has the kernels %q, %d", names, rc)
	}
}

// TestLinkIsBounded: what a client asks of a link state that it may not have is refused.
func TestLinkIsBounded(t *testing.T) {
	k := linker(t)
	is := func(what string, r reply, want int32) {
		t.Helper()
		if r.result != want {
			t.Errorf("%s: %d, want %d", what, r.result, want)
		}
	}
	read := func(id uint32, off, n uint64) reply {
		return k.wait(wire.OpLinkRead, 1, u32(id), u32(0), u64(off), u64(n))
	}
	is("a log without its size", k.linkCreate(1, options(3, 0)), 1)
	is("an option twice", k.linkCreate(2, options(0, 1, 0, 2)), 1)
	is("an option that is a pointer", k.linkCreate(3, options(17, 1)), 801)
	is("a state whose creation failed", k.linkAdd(linkPTX("vecadd"), 3, 1, nil), 801)
	is("a log of 4 GiB", k.linkCreate(4, options(3, 0, 4, 1<<32-1)), 0)
	is("logs for an input", k.linkAdd(linkPTX("vecadd"), 4, 1, logOptions(100)), 1)
	is("a type that there is not", k.linkAdd(linkPTX("vecadd"), 4, 99, nil), 1)
	is("reading before it is linked", read(4, 0, 1), 1)
	is("linking", k.wait(wire.OpLinkComplete, 1, u32(4)), 0)
	for _, at := range [][2]uint64{{0, 1 << 20}, {1 << 20, 1}, {math.MaxUint64, 2}} {
		is("reading beyond", read(4, at[0], at[1]), 1)
	}
	is("linking again", k.wait(wire.OpLinkComplete, 1, u32(4)), 400)
	is("reading after that", read(4, 0, 64), 0)
	k.oneway(opCuLinkDestroy, u32(4))
	is("a state that has ended", k.linkAdd(linkPTX("vecadd"), 4, 1, nil), 400)
	is("completing one that has ended", k.wait(wire.OpLinkComplete, 1, u32(4)), 400)
	is("reading one that has ended", read(4, 0, 1), 400)

	// A state ends with its context.
	is("another context", k.wait(opCuCtxCreate_v2, 1, u32(50), u32(0), u32(0)), 0)
	is("a state in it", k.wait(wire.OpLinkCreate, 50, u32(6), u32(0)), 0)
	k.oneway(opCuCtxDestroy_v2, u32(50))
	is("after its context", k.linkAdd(linkPTX("vecadd"), 6, 1, nil), 400)

	// Each state takes what its logs may have.
	const logs = 1 << 20
	var all int32
	n := uint32(100)
	for ; all == 0 && n < 100+maxLinking/(2*logs); n++ {
		all = k.linkCreate(n, logOptions(logs)).result
	}
	if all != 2 {
		t.Errorf("%d link states with logs of %d bytes: %d", n-100, 2*logs, all)
	}
	for i := range n {
		k.oneway(opCuLinkDestroy, u32(i))
	}
	is("once they have ended", k.linkCreate(5000, logOptions(logs)), 0)
}

// TestLinkBomb: an input that would unpack to gigabytes does not reach the driver.
func TestLinkBomb(t *testing.T) {
	k := linker(t)
	if r := k.linkCreate(1, nil); r.result != 0 {
		t.Fatal(r.result)
	}
	entry := make([]byte, 64)
	copy(entry, cat([]byte{2, 0, 1, 1}, u32(64), u64(64)))
	binary.LittleEndian.PutUint32(entry[16:], 64)
	binary.LittleEndian.PutUint32(entry[28:], 80)
	binary.LittleEndian.PutUint64(entry[40:], 0x2000)
	binary.LittleEndian.PutUint64(entry[56:], 1<<40)
	bomb := cat([]byte("!<arch>\n"), u32(0xba55ed50), []byte{1, 0, 16, 0}, u64(128), entry, make([]byte, 64))
	if r := k.linkAdd(bomb, 1, 4, nil); r.result != 200 {
		t.Errorf("an archive that unpacks to a terabyte: %d", r.result)
	}
}
