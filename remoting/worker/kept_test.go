package worker

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// resident is the memory of a supervisor's only session, in bytes.
func resident(t *testing.T, s *Supervisor, field string) int64 {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.leases {
		for p := range l.procs {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Cmd.Process.Pid))
			if err != nil {
				t.Fatal(err)
			}
			_, v, _ := strings.Cut(string(b), field+":")
			v, _, _ = strings.Cut(v, "kB")
			n, err := form.ParseBytes(strings.TrimSpace(v) + "K")
			if err != nil {
				t.Fatal(err)
			}
			return int64(n)
		}
	}
	t.Fatal("no session")
	return 0
}

// A client that binds kernels that do not exist has nothing of them kept, and is told at the call.
func TestNamesOfNoKernels(t *testing.T) {
	sup, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	if _, rc := k.load(image0, 1); rc != 0 {
		t.Fatal(rc)
	}
	sync := func() int32 { return k.wait(opCuCtxSynchronize, 1).result }
	if rc := sync(); rc != 0 {
		t.Fatal(rc)
	}
	before := resident(t, sup, "VmRSS")
	name := strings.Repeat("k", 32767)
	for i := range uint32(30_000) {
		k.bind(10+i, 1, name)
	}
	if rc := sync(); rc != 500 {
		t.Errorf("kernels that do not exist: %d", rc)
	}
	if grown := resident(t, sup, "VmRSS") - before; grown > 64<<20 {
		t.Errorf("30,000 names of 32 KiB of no kernels take %d MiB", grown>>20)
	}
	// The session goes on, and the numbers are free.
	k.bind(10, 1, "vecadd")
	if rc := sync(); rc != 0 {
		t.Errorf("a kernel that exists: %d", rc)
	}
}

// What a session keeps is bounded, and what it no longer keeps is not counted.
func TestKept(t *testing.T) {
	s, acct := activeSession(t)
	defer acct.Close()
	img := &image{real: 1, library: true}
	s.bindObj(wire.KindLibrary, 1, 1, img)
	bind := func(id uint32, n int) int32 {
		p := binary.LittleEndian.AppendUint16(cat(u32(id), u32(1)), uint16(n))
		return s.kernelBind(append(p, bytes.Repeat([]byte{'n'}, n)...))
	}
	n := uint32(0)
	for ; s.ended == ""; n++ {
		if rc := bind(1+n, 32767); rc == 2 {
			break
		} else if rc != 0 {
			t.Fatalf("kernel %d: %d", n, rc)
		}
	}
	if want := uint32(maxKept / (32767 + kernelCost)); n != want {
		t.Errorf("%d kernels are kept, %d have room", n, want)
	}
	if _, rc := s.kernel(1 + n); rc != 2 {
		t.Errorf("the kernel without room: %d", rc)
	}
	// One that the driver does not find makes room for another.
	s.forgetKernel(s.tables[wire.KindKernel].live(5), s.tables[wire.KindKernel].live(5).obj.(*kernel), 500)
	if _, rc := s.kernel(5); rc != 500 {
		t.Errorf("a kernel that was not found: %d", rc)
	}
	if rc := bind(2+n, 32767); rc != 0 {
		t.Errorf("there is room again: %d", rc)
	}
	s.unload(wire.KindLibrary, href{id: 1, real: 1})
	if s.kept != 0 {
		t.Errorf("%d bytes are counted once all is unloaded", s.kept)
	}
}

// An image that would unpack into far more than was sent is refused, before it is unpacked.
func TestImageBombs(t *testing.T) {
	sup, addr := startWorker(t, nil)
	w, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	bomb := func(kind uint16, sm uint32, plain []byte) []byte {
		data := w.EncodeAll(plain, nil)
		n := len(data)
		data = append(data, make([]byte, -len(data)&7)...)
		e := make([]byte, 64)
		le := binary.LittleEndian
		le.PutUint16(e, kind)
		le.PutUint16(e[2:], 0x101)
		le.PutUint32(e[4:], 64)
		le.PutUint64(e[8:], uint64(len(data)))
		le.PutUint32(e[16:], uint32(n))
		le.PutUint32(e[28:], sm)
		le.PutUint64(e[40:], 0x8011)
		le.PutUint64(e[56:], uint64(len(plain)))
		h := le.AppendUint32(nil, 0xba55ed50)
		h = le.AppendUint16(le.AppendUint16(h, 1), 16)
		h = le.AppendUint64(h, uint64(len(e)+len(data)))
		return cat(h, e, data)
	}
	k := dial(t, addr, [16]byte{})
	before := resident(t, sup, "VmHWM")
	for i, img := range [][]byte{
		bomb(1, 52, append([]byte(".version 8.0\n.target sm_52\n.global .b8 x"), bytes.Repeat([]byte(" ."), 128<<20)...)),
		bomb(2, 90, make([]byte, 256<<20)),
	} {
		if _, rc := k.load(img, uint32(1+i)); rc != 200 {
			t.Errorf("bomb %d of %d bytes: %d", i, len(img), rc)
		}
	}
	if grown := resident(t, sup, "VmHWM") - before; grown > 64<<20 {
		t.Errorf("images of a few KiB take %d MiB", grown>>20)
	}
	if _, rc := k.load(image0, 9); rc != 0 {
		t.Errorf("an image after the bombs: %d", rc)
	}
}

// What an image's variables take is found out once: other sessions read it with the image.
func TestVariablesOnce(t *testing.T) {
	var dir string
	_, addr := startWorker(t, func(c *Config) { dir = c.Session.Store })
	var k0 wire.Snapshot
	load := func() int32 {
		k := dial(t, addr, [16]byte{})
		defer k.c.Close()
		k0 = k.snap
		_, rc := k.load(image0, 1)
		return rc
	}
	if rc := load(); rc != 0 {
		t.Fatalf("an image: %d", rc)
	}
	awaitStored(t, dir, 1)
	st, err := store.Open(dir, store.Bounds{Limit: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	sum := store.Sum(sha256.Sum256(image0))
	m, err := st.Get(sum, uint64(len(image0)))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	v := &k0.Devices[0]
	name := variablesFact(int(v.CCMajor)*10 + int(v.CCMinor))
	if n, known := m.Fact(name); !known || n != 0 {
		t.Fatalf("%s after a load: %d, %v", name, n, known)
	}
	if rc := load(); rc != 0 {
		t.Errorf("the image again: %d", rc)
	}
	// A session that reads it reserves as much.
	if err := unix.Removexattr(filepath.Join(dir, sum.String()), "user.sluice.facts"); err != nil {
		t.Fatal(err)
	}
	st.SetFact(sum, m, name, 1<<40)
	if rc := load(); rc != 2 {
		t.Errorf("an image of which it is known that it takes a TiB: %d", rc)
	}
}
