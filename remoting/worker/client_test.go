package worker

// A client of the wire for tests, and the way to a worker that runs on the
// simulated GPU: the test binary stands in for sluice-worker.

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "bound" {
		bound(os.Args[2], sandbox.Mode(os.Args[3]))
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "crash" {
		crash(os.Args[2])
		return
	}
	if len(os.Args) > 1 && (os.Args[1] == "session" || os.Args[1] == "probe") {
		child(os.Args[1], os.Args[2:])
		return
	}
	rc := m.Run()
	if sim.twin != "" {
		_ = os.Remove(sim.twin)
	}
	os.Exit(rc)
}

// child is a session process or the probe.
func child(what string, args []string) {
	v := map[string]string{}
	for i := 0; i+1 < len(args); i += 2 {
		v[args[i]] = args[i+1]
	}
	limit, _ := strconv.ParseInt(v["--store-limit"], 10, 64)
	keepFree, _ := strconv.ParseInt(v["--store-keep-free"], 10, 64)
	contentLimit, _ := strconv.ParseInt(v["--content-limit"], 10, 64)
	contentKeepFree, _ := strconv.ParseInt(v["--content-keep-free"], 10, 64)
	n, _ := strconv.Atoi(v["--devices"])
	log := testLog()
	if what == "session" {
		log = testLogTo(os.NewFile(control.LogFD, "log"))
	}
	cfg := SessionConfig{
		Driver: Driver{LibCUDA: v["--libcuda"], LibNVML: v["--libnvml"]}, Store: v["--store"], Bounds: store.Bounds{Limit: limit, KeepFree: keepFree},
		Content: v["--content"], ContentBounds: store.Bounds{Limit: contentLimit, KeepFree: contentKeepFree},
		Sandbox: sandbox.Mode(v["--sandbox"]),
	}
	if cfg.Sandbox == "" {
		cfg.Sandbox = sandbox.Off
	}
	var err error
	if what == "probe" {
		err = Probe(log, cfg, n, os.Stdout)
	} else {
		err = RunSession(log, cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, what+":", err)
		os.Exit(1)
	}
}

func testLog() *slog.Logger { return testLogTo(os.Stderr) }

func testLogTo(w io.Writer) *slog.Logger {
	level := slog.LevelError + 1
	if os.Getenv("SLUICE_TEST_LOG") != "" {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level}))
}

var sim struct {
	once      sync.Once
	dir, twin string
	err       error
}

// simulator gives the folder of the simulated GPU's libraries, built if need be.
func simulator(t testing.TB) string {
	t.Helper()
	sim.once.Do(func() {
		root, err := filepath.Abs("../..")
		if err != nil {
			sim.err = err
			return
		}
		sim.dir = os.Getenv("SLUICE_SIMGPU")
		if sim.dir == "" {
			sim.dir = filepath.Join(root, "build", "simgpu")
			cmd := exec.Command("make", "-s", "-f", "remoting/simgpu/build.mk", "simgpu")
			cmd.Dir = root
			if out, err := cmd.CombinedOutput(); err != nil {
				sim.err = fmt.Errorf("simulated GPU: %w: %s", err, out)
				return
			}
		}
		sim.twin = filepath.Join(os.TempDir(), fmt.Sprintf("sluice-twins-%d.so", os.Getpid()))
		cmd := exec.Command("cc", "-shared", "-fPIC", "-I", filepath.Join(root, "remoting", "simgpu"), "-o", sim.twin, "testdata/twins.c")
		if out, err := cmd.CombinedOutput(); err != nil {
			sim.err = fmt.Errorf("twins: %w: %s", err, out)
		}
	})
	if sim.err != nil {
		t.Fatal(sim.err)
	}
	return sim.dir
}

// image is PTX as far as the simulator looks.
var image0 = []byte(".version 8.0\n.target sm_80\n.visible .entry vecadd()\n.visible .entry slow()\n.visible .entry hello()\n.visible .entry crash()\n\x00")

// bigImage has a 64 MiB variable.
var bigImage = []byte(".version 8.0\n.target sm_80\n.global .b8 table[67108864];\n.visible .entry vecadd()\n\x00")

const testMem = 1 << 30

// startWorker runs a supervisor; the address is where it listens.
func startWorker(t testing.TB, change func(*Config)) (*Supervisor, string) {
	t.Helper()
	dir := simulator(t)
	tmp := t.TempDir()
	t.Setenv("SLUICE_SIM_STATE", filepath.Join(tmp, "gpu"))
	t.Setenv("SLUICE_SIM_KERNELS", sim.twin)
	cfg := Config{
		Listen: "unix:" + filepath.Join(tmp, "s"), Devices: []int{0}, Mem: testMem, Keepalive: 2 * time.Second,
		Session: SessionConfig{
			Driver: Driver{LibCUDA: filepath.Join(dir, "libcuda.so.1"), LibNVML: filepath.Join(dir, "libnvidia-ml.so.1")},
			Store:  filepath.Join(tmp, "store"),
			Bounds: store.Bounds{Limit: 1 << 30},
		},
	}
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s, err := New(ctx, testLog(), cfg)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	l, err := wire.Listen(ctx, cfg.Listen)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	addr := cfg.Listen
	if l.Addr().Network() == "tcp" {
		addr = "tcp:" + l.Addr().String()
	}
	return s, addr
}

// conn is a client's connection.
type conn struct {
	t    testing.TB
	c    net.Conn
	snap wire.Snapshot

	wmu  sync.Mutex
	call uint32

	mu      sync.Mutex
	cond    *sync.Cond
	replies map[uint32]reply
	data    map[uint32][]byte
	over    map[uint32]bool
	trace   []byte
	traced  bool // the last of it has come
	printed []byte
	told    [][]byte // payloads of HOST frames
	order   []string // what came, in order
	errs    []int32
	events  map[uint32]uint32
	failed  map[string]int32 // results of EVENT and HOSTFN frames that are errors, as in order
	bye     string
	err     error
	onHost  func(id uint32)
	onData  func(id uint32, off int, b []byte) // in place of data
	lag     func()                             // comes before a DATA frame is written
	wrote   uint32                             // DATA and HOST frames
	inData  int                                // bytes of DATA frames
}

type reply struct {
	result  int32
	payload []byte
}

func testHello(kind uint32) wire.Hello {
	return wire.Hello{Version: wire.Version, Kind: kind, Fingerprint: apiFingerprint, PID: uint32(os.Getpid()), Program: "test"}
}

// connect dials an address as the worker listens at them.
func connect(addr string) (net.Conn, error) {
	network, a, err := wire.ParseAddress(addr)
	if err != nil {
		return nil, err
	}
	return net.DialTimeout(network, a, 10*time.Second)
}

func dialHello(addr string, h wire.Hello) (net.Conn, []byte, error) {
	c, err := connect(addr)
	if err != nil {
		return nil, nil, err
	}
	var b [wire.HelloSize]byte
	h.Encode(&b)
	if _, err := c.Write(b[:]); err != nil {
		c.Close()
		return nil, nil, err
	}
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	p, err := wire.ReadWelcome(c)
	_ = c.SetReadDeadline(time.Time{})
	if err != nil {
		c.Close()
		return nil, nil, err
	}
	return c, p, nil
}

// dial opens a compute session and activates device 0.
func dial(t testing.TB, addr string, token [16]byte) *conn {
	t.Helper()
	k := dialRaw(t, addr, token)
	if r := k.wait(wire.OpCtxActivate, 0, u32(0)); r.result != 0 {
		t.Fatalf("activate: %d", r.result)
	}
	return k
}

func dialRaw(t testing.TB, addr string, token [16]byte) *conn {
	t.Helper()
	return dialKind(t, addr, wire.SessionCompute, token)
}

func dialKind(t testing.TB, addr string, kind uint32, token [16]byte) *conn {
	t.Helper()
	h := testHello(kind)
	h.Token = token
	c, p, err := dialHello(addr, h)
	if err != nil {
		t.Fatal(err)
	}
	k := newConn(t, c)
	if err := k.snap.Decode(p); err != nil {
		t.Fatal(err)
	}
	return k
}

// newConn reads the frames of a connection that was welcomed.
func newConn(t testing.TB, c net.Conn) *conn {
	k := &conn{t: t, c: c, replies: map[uint32]reply{}, data: map[uint32][]byte{}, over: map[uint32]bool{}, events: map[uint32]uint32{}, failed: map[string]int32{}}
	k.cond = sync.NewCond(&k.mu)
	go k.receive()
	t.Cleanup(func() { c.Close() })
	return k
}

func (k *conn) receive() {
	err := k.frames()
	k.mu.Lock()
	k.err = err
	k.cond.Broadcast()
	k.mu.Unlock()
}

func (k *conn) frames() error {
	for {
		var b [wire.ReplySize]byte
		if _, err := io.ReadFull(k.c, b[:]); err != nil {
			return err
		}
		var h wire.Reply
		if err := h.Decode(&b); err != nil {
			return err
		}
		p := make([]byte, h.Size)
		if _, err := io.ReadFull(k.c, p); err != nil {
			return err
		}
		k.mu.Lock()
		if lag := k.lag; lag != nil && h.Kind == wire.FrameData {
			k.mu.Unlock()
			lag()
			k.mu.Lock()
		}
		switch h.Kind {
		case wire.FrameReply:
			k.replies[h.Call] = reply{h.Result, p}
			k.order = append(k.order, fmt.Sprintf("reply %d", h.Call))
		case wire.FrameData:
			k.deliver(h.Call, int(binary.LittleEndian.Uint64(p)), p[8:])
			k.wrote++
			k.inData += len(p) - 8
			if h.Arg&wire.DataLast != 0 {
				k.over[h.Call] = true
				k.order = append(k.order, fmt.Sprintf("data %d", h.Call))
			}
		case wire.FrameEvent:
			k.events[h.Arg] = h.Call
			if h.Result != 0 {
				k.failed[fmt.Sprintf("event %d", h.Arg)] = h.Result
			}
			k.order = append(k.order, fmt.Sprintf("event %d", h.Arg))
		case wire.FrameError:
			k.errs = append(k.errs, h.Result)
		case wire.FrameTrace:
			k.trace = append(k.trace, p...)
			k.traced = k.traced || h.Arg == wire.TraceLast
		case wire.FrameHost:
			k.wrote++
			k.told = append(k.told, p)
		case wire.FramePrint:
			k.printed = append(k.printed, p...)
		case wire.FrameHostFn:
			if h.Result != 0 {
				k.failed[fmt.Sprintf("host %d", h.Arg)] = h.Result
			}
			k.order = append(k.order, fmt.Sprintf("host %d", h.Arg))
			if k.onHost != nil && h.Result == 0 {
				go k.onHost(h.Arg)
			}
		case wire.FrameHostFnGone:
			k.order = append(k.order, fmt.Sprintf("gone %d", h.Arg))
		case wire.FrameBye:
			k.bye = string(p)
		}
		k.cond.Broadcast()
		k.mu.Unlock()
	}
}

// deliver writes bytes from the device where they belong. mu is held.
func (k *conn) deliver(id uint32, off int, b []byte) {
	if k.onData != nil {
		k.onData(id, off, b)
		return
	}
	for len(k.data[id]) < off+len(b) {
		k.data[id] = append(k.data[id], make([]byte, off+len(b)-len(k.data[id]))...)
	}
	copy(k.data[id][off:], b)
}

func (k *conn) write(h wire.Request, parts ...[]byte) {
	var b [wire.RequestSize]byte
	for _, p := range parts {
		h.Size += uint32(len(p))
	}
	h.Encode(&b)
	k.wmu.Lock()
	defer k.wmu.Unlock()
	bufs := net.Buffers(append([][]byte{b[:]}, parts...))
	_, _ = bufs.WriteTo(k.c)
}

// oneway sends a call in the context of device 0.
func (k *conn) oneway(op uint16, parts ...[]byte) {
	k.write(wire.Request{Op: op, Ctx: 1}, parts...)
}

func (k *conn) wait(op uint16, ctx uint32, parts ...[]byte) reply {
	k.t.Helper()
	k.mu.Lock()
	k.call++
	call := k.call
	k.mu.Unlock()
	k.write(wire.Request{Op: op, Flags: wire.FlagWait, Call: call, Ctx: ctx}, parts...)
	return k.await(op, call)
}

func (k *conn) await(op uint16, call uint32) reply {
	k.t.Helper()
	stop := time.AfterFunc(30*time.Second, func() {
		k.mu.Lock()
		k.err = errors.New("no answer in 30 s")
		k.cond.Broadcast()
		k.mu.Unlock()
	})
	defer stop.Stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		if r, ok := k.replies[call]; ok {
			delete(k.replies, call)
			return r
		}
		if k.err != nil {
			k.t.Fatalf("%s: %v (bye: %q)", opName(op), k.err, k.bye)
		}
		k.cond.Wait()
	}
}

// until waits for a condition of the client's state.
func (k *conn) until(what string, f func() bool) {
	k.t.Helper()
	stop := time.AfterFunc(20*time.Second, func() { k.mu.Lock(); k.err = errors.New("time is up"); k.cond.Broadcast(); k.mu.Unlock() })
	defer stop.Stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	for !f() {
		if k.err != nil {
			k.t.Fatalf("%s: %v (bye: %q)", what, k.err, k.bye)
		}
		k.cond.Wait()
	}
}

func u32(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }
func u64(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

func cat(parts ...[]byte) []byte {
	var b []byte
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

// alloc is cuMemAlloc.
func (k *conn) alloc(n uint64) (uint64, int32) {
	k.t.Helper()
	r := k.wait(opCuMemAlloc_v2, 1, []byte{1}, u64(n))
	if r.result != 0 {
		return 0, r.result
	}
	return binary.LittleEndian.Uint64(r.payload), 0
}

func (k *conn) free(p uint64) { k.oneway(opCuMemFree_v2, u64(p)) }

func (k *conn) memInfo() (free, total uint64) {
	k.t.Helper()
	r := k.wait(opCuMemGetInfo_v2, 1, []byte{1, 1})
	if r.result != 0 {
		k.t.Fatalf("cuMemGetInfo: %d", r.result)
	}
	return binary.LittleEndian.Uint64(r.payload), binary.LittleEndian.Uint64(r.payload[8:])
}

// copyIn sends b as COPY_IN frames.
func (k *conn) copyIn(dst uint64, stream uint32, b []byte) {
	for len(b) > 0 {
		n := min(len(b), wire.MaxCopyIn)
		k.oneway(wire.OpCopyIn, u64(dst), u32(stream), u32(0), b[:n])
		dst += uint64(n)
		b = b[n:]
	}
}

// copyOut is a blocking copy to the host.
func (k *conn) copyOut(src uint64, n int, stream, id uint32) []byte {
	k.t.Helper()
	r := k.wait(wire.OpCopyOut, 1, u64(src), u64(uint64(n)), u32(stream), u32(id))
	if r.result != 0 {
		k.t.Fatalf("copy out: %d", r.result)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.over[id] {
		k.t.Fatal("reply came before the data")
	}
	b := k.data[id]
	delete(k.data, id)
	delete(k.over, id)
	return b
}

func loadRequest(img []byte, id uint32, library bool) []byte {
	sum := sha256.Sum256(img)
	as := byte(0)
	if library {
		as = 1
	}
	return cat(sum[:], u64(uint64(len(img))), u32(id), []byte{as, 0, 0, 0}, u32(0))
}

// load loads an image as a library under id, uploading it if asked to.
func (k *conn) load(img []byte, id uint32) (names []string, result int32) {
	k.t.Helper()
	return k.loadAs(img, id, true)
}

func (k *conn) loadAs(img []byte, id uint32, library bool) (names []string, result int32) {
	k.t.Helper()
	r := k.wait(wire.OpImageLoad, 1, loadRequest(img, id, library))
	if r.result == wire.ResultNotInStore {
		sum := sha256.Sum256(img)
		for off := 0; off < len(img); {
			n := min(len(img)-off, 1<<20)
			k.oneway(wire.OpImageChunk, sum[:], u64(uint64(off)), u64(uint64(len(img))), img[off:off+n])
			off += n
		}
		r = k.wait(wire.OpImageLoad, 1, loadRequest(img, id, library))
	}
	if r.result != 0 {
		return nil, r.result
	}
	d := wire.NewDecoder(r.payload)
	d.U32()
	n := d.U32()
	for i := uint32(0); i < n && n != wire.NotListed; i++ {
		names = append(names, string(d.Bytes(int(d.U16()))))
	}
	if err := d.Done(); err != nil {
		k.t.Fatal(err)
	}
	return names, 0
}

func (k *conn) bind(kernel, lib uint32, name string) {
	k.oneway(wire.OpKernelBind, u32(kernel), u32(lib), binary.LittleEndian.AppendUint16(nil, uint16(len(name))), []byte(name))
}

func (k *conn) launch(kernel, stream, grid, block uint32, params []byte) {
	k.oneway(wire.OpLaunch, u32(kernel), u32(stream), u32(grid), u32(1), u32(1), u32(block), u32(1), u32(1), u32(0), u32(0), u32(uint32(len(params))), params)
}

func (k *conn) streamCreate(id uint32) { k.oneway(opCuStreamCreate, u32(id), u32(1)) }

func (k *conn) streamSync(id uint32) reply {
	k.t.Helper()
	return k.wait(opCuStreamSynchronize, 1, u32(id))
}
