package worker

// Fuzzing from the client's side of the wire, on a driver that is not one: it
// has every function, hands out numbers, and fails or is not ready now and
// then.

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// fakeDriver writes the driver's source: functions whose result matters by
// hand, all others from one mould.
func fakeDriver() string {
	special := map[string]string{
		"cuMemHostAlloc":               "(void **p, unsigned long n) { *p = calloc(1, n); return *p ? 0 : 2; }",
		"cuMemHostGetDevicePointer_v2": "(unsigned long *d, void *p, unsigned f) { (void)f; *d = (unsigned long)p; return odd(); }",
		"cuMemFreeHost":                "(void *p) { free(p); return 0; }",
		"cuMemAlloc_v2":                "(unsigned long *p, unsigned long n) { static unsigned long at = 1ul << 40; (void)n; *p = at; at += n + (2ul << 20); return odd(); }",
		"cuDevicePrimaryCtxRetain":     "(unsigned long *p, int d) { *p = 0x1000 + d; return 0; }",
		"cuLibraryGetKernelCount":      "(unsigned *n) { *n = 3; return odd(); }",
		"cuLibraryEnumerateKernels":    "(unsigned long *k, unsigned n) { for (unsigned i = 0; i < n; i++) k[i] = i + 1; return 0; }",
		"cuKernelGetName":              "(const char **n) { *n = \"kernel\"; return odd(); }",
		"cuKernelGetParamInfo":         "(void *k, unsigned long i, unsigned long *o, unsigned long *n) { (void)k; *o = 8 * i; *n = 8; return i < 4 ? 0 : 1; }",
		"cuMemPoolGetAttribute":        "(void *p, int a, unsigned long *v) { (void)p; *v = a == 5 ? 32ul << 20 : 1ul << 20; return 0; }",
		"cuStreamIsCapturing":          "(void *s, unsigned *v) { (void)s; *v = count % 5 == 0; count++; return 0; }",
		"cuInit":                       "(void) { return 0; }",
		"cuLaunchHostFunc":             "(void) { return 801; }",
		"cuLinkCreate_v2":              "(unsigned n, void *o, void *v, unsigned long *p) { static unsigned long at = 16; (void)n, (void)o, (void)v; *p = at += 16; return odd(); }",
		"cuLinkComplete":               "(void *l, void **p, unsigned long *n) { static char image[5000]; (void)l; *p = image; *n = sizeof image; return odd(); }",
	}
	// What a driver cannot free it still holds, and rightly charged: not here.
	for _, n := range []string{"cuEventSynchronize", "cuCtxSynchronize", "cuCtxSetCurrent", "cuMemFree_v2", "cuMemRelease", "cuMemUnmap", "cuArrayDestroy"} {
		special[n] = "(void) { return 0; }"
	}
	for _, n := range []string{"cuEventQuery", "cuStreamQuery"} {
		special[n] = "(void) { return count++ % 3 ? 600 : 0; }"
	}
	for _, n := range []string{"cuArrayCreate_v2", "cuArray3DCreate_v2", "cuMipmappedArrayCreate", "cuMemCreate", "cuMemPoolCreate"} {
		special[n] = "(unsigned long *p) { static unsigned long at = 1ul << 20; *p = at += 16; return odd(); }"
	}
	special["cuMemAllocFromPoolAsync"] = special["cuMemAlloc_v2"]
	for _, n := range []string{"cuEventCreate", "cuStreamCreate", "cuCtxCreate_v2", "cuLibraryLoadData", "cuModuleLoadDataEx", "cuLibraryGetKernel", "cuModuleGetFunction", "cuKernelGetFunction"} {
		special[n] = "(unsigned long *p) { static unsigned long at = 16; *p = at += 16; return odd(); }"
	}
	var b strings.Builder
	b.WriteString("#include <stdlib.h>\nstatic _Thread_local unsigned count;\nstatic int odd(void) { return count++ % 11 == 10 ? 999 : 0; }\n")
	for _, n := range opNames {
		body := special[n]
		if body == "" {
			body = "(void) { return odd(); }"
		}
		fmt.Fprintf(&b, "int %s%s\n", n, body)
	}
	return b.String()
}

var fake sync.Once

func loadFakeDriver(t testing.TB) {
	t.Helper()
	fake.Do(func() {
		dir, err := os.MkdirTemp("", "sluice-fake")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		src, so := filepath.Join(dir, "fake.c"), filepath.Join(dir, "libfake.so")
		if err := os.WriteFile(src, []byte(fakeDriver()), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("cc", "-w", "-O1", "-shared", "-fPIC", "-o", so, src).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := openDriver(so); err != nil {
			t.Fatal(err)
		}
	})
}

// bytesStream is a client that has sent b and hung up.
type bytesStream struct {
	mu  sync.Mutex
	b   []byte
	out int
}

func (m *bytesStream) Read2(a, b []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.b) == 0 {
		return 0, io.EOF
	}
	n := copy(a, m.b)
	m.b = m.b[n:]
	k := copy(b, m.b)
	m.b = m.b[k:]
	return n + k, nil
}

func (m *bytesStream) Write(p [][]byte) error {
	for _, b := range p {
		m.out += len(b)
	}
	return nil
}

func (m *bytesStream) Readable(time.Duration) bool { return true }
func (m *bytesStream) FD() int                     { return -1 }
func (m *bytesStream) Close() error                { return nil }

// fakeSession is a session on the fake driver with one device.
func fakeSession(t testing.TB, images *store.Store, in []byte) (*session, *account.Session) {
	t.Helper()
	l, err := account.NewBook([]uint64{testMem}).Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	s, acct := fakeSessionOf(t, l, images, in)
	l.End() // with its session
	return s, acct
}

// activeSession is fakeSession on this thread, with its context made current; the test's end ends it.
func activeSession(t *testing.T) (*session, *account.Session) {
	t.Helper()
	loadFakeDriver(t)
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	s, acct := fakeSession(t, nil, nil)
	t.Cleanup(func() { s.rd.Close(); acct.Close() })
	if rc := s.ctxActivate(u32(0)); rc != 0 {
		t.Fatal(rc)
	}
	return s, acct
}

func fakeSessionOf(t testing.TB, l *account.Lease, images *store.Store, in []byte) (*session, *account.Session) {
	t.Helper()
	acct, err := l.Open(account.Client{PID: 1, Name: "fuzz"})
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSession(testLog(), &bytesStream{b: in}, acct, images)
	if err != nil {
		t.Fatal(err)
	}
	st := &control.Start{Facts: control.Facts{Snapshot: wire.Snapshot{Devices: []wire.Device{{DeviceHead: wire.DeviceHead{CCMajor: 9, TotalMem: testMem}}}}, Overhead: []uint64{64 << 20}, Idle: []uint64{0}},
		Hello: wire.Hello{Kind: wire.SessionCompute}, Turns: control.NoTurns(1)}
	s.configure(st, time.Second)
	s.exit = func(int) {}
	s.hostfns.r = os.Stdin // opened already, as far as launchHost can tell
	return s, acct
}

// frame is one as a client sends it, of its context 1; call 0: it waits for no answer.
func frame(op uint16, call uint32, parts ...[]byte) []byte {
	p := cat(parts...)
	var b [wire.RequestSize]byte
	h := wire.Request{Size: uint32(len(p)), Op: op, Call: call, Ctx: 1}
	if call != 0 {
		h.Flags = wire.FlagWait
	}
	h.Encode(&b)
	return append(b[:], p...)
}

// launchFrame launches the kernel that the client calls 1, with one attribute.
func launchFrame(attr uint32) []byte {
	return frame(wire.OpLaunch, 0, u32(1), u32(0), u32(1), u32(1), u32(1), u32(1), u32(1), u32(1), u32(0), []byte{1, 0, 1, 0}, u32(8), u64(5), u32(attr), u32(0), make([]byte, 64))
}

// arrayPayload is of cuArrayCreate, for 16 x 4 elements.
func arrayPayload(id, format, channels uint32) []byte {
	return cat(u32(id), []byte{1}, u64(16), u64(4), u32(format), u32(channels))
}

// array3DPayload is of cuArray3DCreate, and of cuMipmappedArrayCreate but for the levels.
func array3DPayload(id, format, channels uint32) []byte {
	return cat(u32(id), []byte{1}, u64(16), u64(4), u64(2), u32(format), u32(channels), u32(0), u32(0))
}

// fuzzPiece is the name of a piece of content that FuzzFrame's sessions find.
var fuzzPiece = sha256.Sum256([]byte("piece"))

func seedFrames() [][]byte {
	activate := frame(wire.OpCtxActivate, 1, u32(0))
	box := func(total []byte) []byte {
		return cat(u32(2), u32(0), u64(1<<40), u64(512), u64(4), u64(0), u64(0), u64(0), u32(0), u32(0), u64(16), u64(2), u64(1), total)
	}
	img := loadRequest(image0, 1, true)
	chunk := cat(img[:32], u64(0), u64(uint64(len(image0))), image0)
	all := [][]byte{
		cat(activate, frame(opCuMemAlloc_v2, 2, []byte{1}, u64(100)), frame(opCuMemAlloc_v2, 3, []byte{1}, u64(5<<20)), frame(opCuMemFree_v2, 0, u64(1<<40)),
			frame(opCuMemGetInfo_v2, 4, []byte{1, 1})),
		cat(activate, frame(wire.OpImageLoad, 2, img), frame(wire.OpImageChunk, 0, chunk), frame(wire.OpImageLoad, 3, img),
			frame(wire.OpKernelBind, 0, u32(1), u32(1), []byte{6, 0}, []byte("kernel")), frame(wire.OpKernelInfo, 4, u32(1), u32(0)),
			launchFrame(7),
			frame(opCuLibraryUnload, 0, u32(1))),
		cat(activate, frame(wire.OpBulkOpen, 2), frame(wire.OpBulkDrop, 0, u64(1)), frame(wire.OpCopyInBulk, 0, u64(1<<40), u64(1), u32(0), u32(1), u32(100), u32(0))),
		cat(activate, frame(wire.OpContentKeep, 0, u64(1<<40), u32(5), u32(0)), frame(wire.OpCopyIn, 0, u64(1<<40), u32(0), u32(0), []byte("piece")),
			frame(wire.OpContentFind, 2, u32(1), u32(1), fuzzPiece[:], u32(5), u32(0)), frame(wire.OpCopyInStored, 0, u64(1<<40), fuzzPiece[:], u32(0), u32(1), u32(5), u32(0))),
		cat(activate, frame(opCuStreamCreate, 0, u32(1), u32(1)), frame(wire.OpCopyIn, 0, u64(1<<40), u32(1), u32(0), make([]byte, 100000)),
			frame(wire.OpCopyOut, 0, u64(1<<40), u64(3<<20), u32(1), u32(1)), frame(wire.OpCopyOut, 5, u64(1<<40), u64(40<<20), u32(0), u32(2)),
			frame(opCuStreamSynchronize, 6, u32(1)), frame(opCuStreamDestroy_v2, 0, u32(1))),
		cat(activate, frame(opCuEventCreate, 0, u32(1), u32(0)), frame(opCuEventRecord, 0, u32(1), u32(0)), frame(wire.OpEventWatch, 3, u32(1), u32(1), u32(0)), frame(wire.OpEventWatch, 0, u32(1), u32(2), u32(0)),
			frame(opCuEventSynchronize, 4, u32(1)), frame(opCuEventDestroy_v2, 0, u32(1)), frame(opCuCtxSynchronize, 5)),
		cat(activate, frame(wire.OpCopyIn3D, 0, box(make([]byte, 32))), frame(wire.OpCopyOut3D, 2, box(u32(9))), frame(wire.OpObserve, 3, u32(0)), frame(wire.OpObserveMore, 4, u32(0), u32(1)),
			frame(wire.OpThreadStream, 0, u32(3)), frame(wire.OpLaunchHost, 0, u32(3), u32(1)), frame(wire.OpHostFnDone, 0, u32(1))),
		cat(activate, frame(opCuCtxCreate_v2, 2, u32(20), u32(0), u32(0)), frame(opCuDevicePrimaryCtxReset_v2, 3, u32(0)), activate, frame(opCuCtxDestroy_v2, 0, u32(20))),
		cat(activate, frame(opCuArrayCreate_v2, 2, arrayPayload(1, 32, 0)), frame(opCuArrayCreate_v2, 3, arrayPayload(2, 1, 4)), frame(opCuArrayDestroy, 0, u32(2))),
		cat(activate, frame(opCuArray3DCreate_v2, 2, array3DPayload(1, 32, 0)), frame(opCuMipmappedArrayCreate, 3, array3DPayload(1, 2, 0), u32(3)),
			frame(opCuMipmappedArrayCreate, 4, array3DPayload(2, 2, 2), u32(3)), frame(opCuMipmappedArrayGetLevel, 5, u32(9), u32(2), u32(1))),
	}
	all = append(all, cat(activate, frame(wire.OpLinkCreate, 2, u32(1), u32(2), options(4, 100, 3, 0)), frame(wire.OpImageChunk, 0, chunk),
		frame(wire.OpLinkAdd, 3, linkAddRequest(image0, 1, 1, options(0, 32), "name")), frame(wire.OpLinkComplete, 4, u32(1)),
		frame(wire.OpLinkRead, 5, u32(1), u32(0), u64(100), u64(4900)), frame(opCuLinkDestroy, 0, u32(1))))
	const at = 0x6a0000000000
	all = append(all, cat(activate, frame(wire.OpHostMap, 2, u64(at), u64(8192), u64(0)), frame(wire.OpHostWatch, 0, u64(at), u64(512)), frame(wire.OpHostWrite, 0, u64(at+8), u32(0), u32(0), make([]byte, 100)),
		frame(wire.OpHostMerge, 0, u64(at), u32(16), u32(0), []byte{1, 255}, make([]byte, 16)), frame(wire.OpHostMerge, 0, u64(at), u32(8), u32(1), []byte{1}, make([]byte, 16)), frame(wire.OpHostRead, 3, u64(at), u64(8192)),
		frame(wire.OpHostWrite, 0, u64(1<<40), u32(0), u32(0), make([]byte, 100)), frame(wire.OpHostUnmap, 0, u64(at))))
	// Every operation of the table once, with a payload of zeroes.
	for op := range opNames {
		all = append(all, cat(activate, frame(uint16(op), 2, make([]byte, 64))))
	}
	return all
}

func FuzzFrame(f *testing.F) {
	loadFakeDriver(f)
	for _, b := range seedFrames() {
		f.Add(b)
	}
	images, err := store.Open(filepath.Join(f.TempDir(), "images"), store.Bounds{Limit: 1 << 20})
	if err != nil {
		f.Fatal(err)
	}
	content, err := store.Open(filepath.Join(f.TempDir(), "content"), store.Bounds{Limit: 64 << 20})
	if err == nil {
		err = content.Put([]byte("piece"))
	}
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, acct := fakeSession(t, images, b)
		defer acct.Close()
		s.contents.init(content)
		defer s.contents.stop()
		done := make(chan error, 1)
		go func() { done <- s.run() }()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			panic("the executor hangs")
		}
		s.waiters.stop()
		s.followed.stop()
		s.ipc.stop()
		s.out.stop()
		if i := acct.Info(0); i.Used > i.Total {
			t.Fatalf("%d bytes over the cap", i.Used-i.Total)
		}
	})
}

func FuzzDesc3D(f *testing.F) {
	f.Add(cat(u32(2), u32(0), u64(1<<40), u64(512), u64(4), u64(3), u64(1), u64(0), u32(0), u32(0), u64(16), u64(2), u64(5)), uint32(20))
	f.Add(cat(u32(3), u32(1), u64(7), u64(0), u64(0), u64(0), u64(0), u64(0), u32(1), u32(0), u64(1<<40), u64(1<<40), u64(1<<40)), uint32(1<<20))
	f.Fuzz(func(t *testing.T, b []byte, limit uint32) {
		var v desc3D
		d := wire.NewDecoder(b)
		v.Decode(d)
		if d.Err() != nil || !v.valid() || limit == 0 {
			return
		}
		total, ok := v.size()
		if !ok || total == 0 {
			t.Fatal("a box without a size was accepted")
		}
		// Its parts tile it: in order, none empty, none too large, none outside.
		off := uint64(0)
		for range 2000 {
			if off == total {
				break
			}
			c, n := v.part(off, uint64(limit))
			if n == 0 || n > uint64(limit) || n > total-off {
				t.Fatalf("part of %d bytes at %d of %d, limit %d", n, off, total, limit)
			}
			if c.X < v.X || c.Y < v.Y || c.Z < v.Z || c.X+c.W > v.X+v.W || c.Y+c.H > v.Y+v.H || c.Z+c.D > v.Z+v.D {
				t.Fatalf("part %+v leaves %+v", c, v)
			}
			x, y, z := c.X-v.X, c.Y-v.Y, c.Z-v.Z
			if z*v.W*v.H+y*v.W+x != off {
				t.Fatalf("part %+v is not at %d", c, off)
			}
			off += n
		}
	})
}

func FuzzImageChunk(f *testing.F) {
	loadFakeDriver(f)
	img := loadRequest(image0, 1, true)
	f.Add(cat(img[:32], u64(0), u64(uint64(len(image0))), image0), img)
	f.Add(cat(img[:32], u64(1), u64(2), []byte{1}), img)
	images, err := store.Open(filepath.Join(f.TempDir(), "images"), store.Bounds{Limit: 1 << 20})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, chunk, load []byte) {
		s, acct := fakeSession(t, images, nil)
		defer acct.Close()
		defer s.rd.Close()
		s.ctxActivate(u32(0))
		s.imageChunk(bytes.Clone(chunk))
		s.imageLoad(bytes.Clone(load))
		if s.images.up != nil {
			s.images.up.Abort()
		}
		s.images.dropSent()
	})
}
