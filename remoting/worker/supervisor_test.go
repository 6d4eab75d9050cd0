package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

func refusal(t *testing.T, addr string, h wire.Hello) *wire.Refusal {
	t.Helper()
	c, _, err := dialHello(addr, h)
	var r *wire.Refusal
	if !errors.As(err, &r) {
		if err == nil {
			c.Close()
		}
		t.Fatalf("not refused: %v", err)
	}
	return r
}

// TestOtherRelease: a client of another release hears what the worker knows, and then its WELCOME.
func TestOtherRelease(t *testing.T) {
	_, addr := startWorker(t, nil)
	h := testHello(wire.SessionCompute)
	h.Fingerprint[0] ^= 1
	c, err := connect(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var b [wire.HelloSize]byte
	h.Encode(&b)
	if _, err := c.Write(b[:]); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	var r *wire.Refusal
	if _, err := wire.ReadWelcome(c); !errors.As(err, &r) || r.Status != wire.StatusForms || len(r.Reason) != len(apiForms)*wire.FormSize {
		t.Fatalf("the first welcome: %v", err)
	}
	d := wire.NewDecoder([]byte(r.Reason))
	for i := range apiForms {
		var f wire.Form
		f.Decode(d)
		if f != apiForms[i] || i > 0 && apiForms[i-1].ID >= f.ID {
			t.Fatalf("form %d: %+v, %+v", i, f, apiForms[i])
		}
	}
	p, err := wire.ReadWelcome(c)
	var snap wire.Snapshot
	if err == nil {
		err = snap.Decode(p)
	}
	if err != nil || len(snap.Devices) == 0 {
		t.Fatalf("the second welcome: %d devices, %v", len(snap.Devices), err)
	}
}

func TestRefusals(t *testing.T) {
	_, addr := startWorker(t, func(c *Config) { c.Mem = 0 })
	h := testHello(wire.SessionCompute)
	h.Version = 7
	if r := refusal(t, addr, h); r.Status != wire.StatusVersion || !strings.Contains(r.Reason, "version 7") || !strings.Contains(r.Reason, fmt.Sprint("version ", wire.Version)) {
		t.Errorf("%+v", r)
	}
	h = testHello(9)
	if r := refusal(t, addr, h); r.Status != wire.StatusVersion {
		t.Errorf("%+v", r)
	}
	h = testHello(wire.SessionCompute)
	if r := refusal(t, addr, h); r.Status != wire.StatusLease || !strings.Contains(r.Reason, "sluice run") {
		t.Errorf("no lease: %+v", r)
	}
	h.Token[3] = 1
	if r := refusal(t, addr, h); r.Status != wire.StatusLease {
		t.Errorf("foreign lease: %+v", r)
	}
	h = testHello(wire.SessionLease)
	h.Mem = 1 << 50
	if r := refusal(t, addr, h); r.Status != wire.StatusNoMemory {
		t.Errorf("too much: %+v", r)
	}
	// No HELLO at all: dropped without an answer.
	c, err := connect(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = c.Write([]byte("GET / HTTP/1.1\r\n" + strings.Repeat("x", wire.HelloSize)))
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("a stranger got an answer")
	}
}

// lease opens a lease; end ends it.
func openLease(t *testing.T, addr string, mem uint64) (token [16]byte, end func()) {
	t.Helper()
	h := testHello(wire.SessionLease)
	h.Fingerprint = [32]byte{}
	h.Mem = mem
	c, p, err := dialHello(addr, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if len(p) != 16 {
		t.Fatalf("token of %d bytes", len(p))
	}
	return [16]byte(p), func() { c.Close() }
}

func TestLeases(t *testing.T) {
	s, addr := startWorker(t, nil)
	a, endA := openLease(t, addr, 256<<20)
	b, endB := openLease(t, addr, 512<<20)
	if a == b {
		t.Fatal("tokens repeat")
	}
	ka, kb := dial(t, addr, a), dial(t, addr, b)
	if ka.snap.Devices[0].TotalMem != 256<<20 || kb.snap.Devices[0].TotalMem != 512<<20 {
		t.Fatal("sessions see another lease's memory")
	}
	// The default lease has what is left.
	kd := dial(t, addr, [16]byte{})
	if got := kd.snap.Devices[0].TotalMem; got != testMem-768<<20 {
		t.Fatalf("default lease of %d MiB", got>>20)
	}
	h := testHello(wire.SessionLease)
	h.Mem = 64 << 20
	if r := refusal(t, addr, h); r.Status != wire.StatusNoMemory {
		t.Fatalf("granted more than there is: %+v", r)
	}
	// A second session of a lease shares its account.
	ka2 := dial(t, addr, a)
	free1, _ := ka.memInfo()
	p, rc := ka2.alloc(16 << 20)
	if rc != 0 || p == 0 {
		t.Fatal(rc)
	}
	if free2, _ := ka.memInfo(); free1-free2 != 16<<20 {
		t.Fatalf("the other session took %d", free1-free2)
	}
	ka2.c.Close()
	waitFor(t, "memory of a session that ended", func() bool { f, _ := ka.memInfo(); return f > free1 })
	// The end of a lease ends its sessions.
	endA()
	ka.until("end of the session", func() bool { return ka.err != nil || ka.bye != "" })
	waitFor(t, "memory of a lease that ended", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.leases[a] == nil
	})
	endB()
	kd.c.Close()
	waitFor(t, "all memory", func() bool {
		l, err := s.book.Grant(testMem)
		if err == nil {
			l.End()
		}
		return err == nil
	})
}

func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); {
		if time.Now().After(end) {
			t.Fatal("not in 20 s: " + what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// A client that goes away takes its process and memory with it within a second.
func TestClientGone(t *testing.T) {
	s, addr := startWorker(t, nil)
	gone := func(way string) time.Duration {
		k := dial(t, addr, [16]byte{})
		if _, rc := k.load(image0, 1); rc != 0 {
			t.Fatal(rc)
		}
		p, rc := k.alloc(300 << 20)
		if rc != 0 {
			t.Fatalf("%s: %d", way, rc)
		}
		switch way {
		case "busy kernel":
			k.bind(1, 1, "slow")
			k.launch(1, 0, 1, 1, u64(uint64(10*time.Second)))
			k.write(wire.Request{Op: opCuCtxSynchronize, Flags: wire.FlagWait, Call: 999, Ctx: 1})
		case "mid frame":
			var b [wire.RequestSize]byte
			(&wire.Request{Size: 1 << 20, Op: wire.OpCopyIn, Ctx: 1}).Encode(&b)
			_, _ = k.c.Write(append(b[:], u64(p)...))
		}
		start := time.Now()
		k.c.Close()
		waitFor(t, way, func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.sessions == 0
		})
		return time.Since(start)
	}
	for _, way := range []string{"idle", "busy kernel", "mid frame", "not reading"} {
		best := gone(way)
		for range 4 { // a busy machine takes longer now and then
			if best > time.Second {
				best = min(best, gone(way))
			}
		}
		if best > time.Second {
			t.Errorf("%s: the session ended after %v", way, best)
		}
	}
}

// A client that stops reading is noticed within the keep-alive time.
func TestClientStopsReading(t *testing.T) {
	s, addr := startWorker(t, func(c *Config) { c.Keepalive = 500 * time.Millisecond })
	k := dial(t, addr, [16]byte{})
	p, rc := k.alloc(64 << 20)
	if rc != 0 {
		t.Fatal(rc)
	}
	k.mu.Lock() // the receiver blocks here
	defer k.mu.Unlock()
	for i := range uint32(16) {
		k.oneway(wire.OpCopyOut, u64(p), u64(64<<20), u32(0), u32(100+i))
	}
	waitFor(t, "end of the session", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.sessions == 0
	})
}

// Several sessions of one lease allocate and free what they like; what the
// worker counts, what NVML shows and what a model says must agree, and the cap
// is never passed.
func TestMemoryAgainstModel(t *testing.T) {
	s, addr := startWorker(t, nil)
	const total = 512 << 20
	token, _ := openLease(t, addr, total)
	n := 3000
	if testing.Short() {
		n = 500
	}
	r := rand.New(rand.NewSource(3))
	type client struct {
		*conn
		ptrs []uint64
	}
	var cs []*client
	for range 3 {
		cs = append(cs, &client{conn: dial(t, addr, token)})
	}
	s.mu.Lock()
	lease := s.leases[token]
	s.mu.Unlock()
	probe, err := lease.Open(accountClient)
	if err != nil {
		t.Fatal(err)
	}
	defer probe.Close()
	denied := 0
	for i := range n {
		c := cs[r.Intn(len(cs))]
		switch op := r.Intn(10); {
		case op < 5:
			size := uint64(1) << (5 + r.Intn(21))
			size += uint64(r.Intn(int(size)))
			free, _ := c.memInfo()
			p, rc := c.alloc(size)
			switch {
			case rc == 2:
				denied++
				if size+2<<20 <= free {
					t.Fatalf("op %d: %d bytes refused with %d free", i, size, free)
				}
			case rc != 0:
				t.Fatalf("op %d: alloc: %d", i, rc)
			default:
				if size > free && size > 1<<20 {
					t.Fatalf("op %d: %d bytes given with %d free", i, size, free)
				}
				c.ptrs = append(c.ptrs, p)
			}
		case len(c.ptrs) > 0:
			k := r.Intn(len(c.ptrs))
			c.free(c.ptrs[k])
			c.memInfo() // the free is done when this is answered: other sessions look next
			c.ptrs[k] = c.ptrs[len(c.ptrs)-1]
			c.ptrs = c.ptrs[:len(c.ptrs)-1]
		}
		if info := probe.Info(0); info.Used > info.Total {
			t.Fatalf("op %d: %d bytes over", i, info.Used-info.Total)
		}
	}
	if denied == 0 {
		t.Error("the cap was never met")
	}
	for _, c := range cs {
		for _, p := range c.ptrs {
			c.free(p)
		}
		if r := c.streamSync(0); r.result != 0 {
			t.Fatal(r.result)
		}
	}
	want := uint64(len(cs)) * s.facts.Overhead[0]
	waitFor(t, "0 bytes of drift", func() bool { return probe.Info(0).Used == want })
	// What is free can be allocated, but for a granule; one byte more cannot.
	free, got := cs[0].memInfo()
	if got != total || free != total-want {
		t.Fatalf("%d of %d free", free, got)
	}
	if _, rc := cs[0].alloc(free + 1); rc != 2 {
		t.Fatalf("one byte more: %d", rc)
	}
	if _, rc := cs[0].alloc(free); rc != 0 {
		t.Fatalf("what is free: %d", rc)
	}
	if _, rc := cs[1].alloc(1); rc != 2 {
		t.Fatalf("one byte when nothing is left: %d", rc)
	}
}

// A module whose variables do not fit is refused and leaves nothing.
func TestModuleVariablesCharged(t *testing.T) {
	_, addr := startWorker(t, func(c *Config) { c.Mem = 160 << 20 })
	k := dial(t, addr, [16]byte{})
	free, _ := k.memInfo()
	if _, rc := k.loadAs(bigImage, 1, false); rc != 0 {
		t.Fatalf("the first copy fits: %d", rc)
	}
	after, _ := k.memInfo()
	if free-after < 64<<20 {
		t.Fatalf("64 MiB of variables cost %d", free-after)
	}
	if _, rc := k.loadAs(bigImage, 2, false); rc != 2 {
		t.Fatalf("the second copy does not fit: %d", rc)
	}
	if again, _ := k.memInfo(); again != after {
		t.Fatalf("%d bytes left by the refused load", int64(after)-int64(again))
	}
}

// awaitStored waits until a store holds so many images: they are put in their place while their sessions go on, and also if those end.
func awaitStored(t *testing.T, dir string, want int) []string {
	t.Helper()
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		fs, _ := filepath.Glob(filepath.Join(dir, "[0-9a-f]*"))
		if len(fs) == want {
			return fs
		}
		if len(fs) > want || time.Now().After(until) {
			t.Fatalf("store holds %v", fs)
		}
	}
}

func TestImageStoreSurvivesSessions(t *testing.T) {
	var dir string
	_, addr := startWorker(t, func(c *Config) { dir = c.Session.Store })
	k := dial(t, addr, [16]byte{})
	if r := k.wait(wire.OpImageLoad, 1, loadRequest(image0, 1, true)); r.result != wire.ResultNotInStore {
		t.Fatalf("an image nobody has sent: %d", r.result)
	}
	if _, rc := k.load(image0, 1); rc != 0 {
		t.Fatal(rc)
	}
	k.c.Close()
	fs := awaitStored(t, dir, 1)
	k = dial(t, addr, [16]byte{})
	if r := k.wait(wire.OpImageLoad, 1, loadRequest(image0, 1, true)); r.result != 0 {
		t.Fatalf("the image is asked for again: %d", r.result)
	}
	if err := os.Truncate(fs[0], 5); err != nil {
		t.Fatal(err)
	}
	if r := k.wait(wire.OpImageLoad, 1, loadRequest(image0, 2, true)); r.result != wire.ResultNotInStore {
		t.Fatalf("a damaged image: %d", r.result)
	}
	if _, rc := k.load(image0, 2); rc != 0 {
		t.Fatalf("a damaged image, sent again: %d", rc)
	}
	awaitStored(t, dir, 1)
	if b, err := os.ReadFile(fs[0]); err != nil || !bytes.Equal(b, image0) {
		t.Fatalf("%d bytes are stored, %v", len(b), err)
	}
}

// Where no image may be stored the program runs, and sends it again the next time.
func TestNoRoomForImages(t *testing.T) {
	for _, driver := range []string{"libcuda.so.1", "driver-12020/libcuda.so.1"} {
		t.Run(filepath.Dir(driver), func(t *testing.T) { noRoomForImages(t, driver) })
	}
}

func noRoomForImages(t *testing.T, driver string) {
	var dir string
	_, addr := startWorker(t, func(c *Config) {
		dir = c.Session.Store
		c.Session.Driver.LibCUDA = filepath.Join(filepath.Dir(c.Session.Driver.LibCUDA), driver)
		c.Session.Bounds.KeepFree = 1 << 60
	})
	for session := range 2 {
		k := dial(t, addr, [16]byte{})
		for id := range uint32(2) {
			if r := k.wait(wire.OpImageLoad, 1, loadRequest(image0, 1+id, true)); r.result != wire.ResultNotInStore {
				t.Errorf("session %d: an image that is not stored: %d", session, r.result)
			}
			if _, rc := k.load(image0, 1+id); rc != 0 {
				t.Errorf("session %d: result %d", session, rc)
			}
		}
		// Drivers before 12.4 do not tell the parameters: the image has to be there still.
		k.bind(20, 1, "vecadd")
		if r := k.wait(wire.OpKernelInfo, 1, u32(20), u32(0)); r.result != 0 {
			t.Errorf("session %d: parameters of a kernel: %d", session, r.result)
		}
		k.c.Close()
	}
	if fs, _ := filepath.Glob(filepath.Join(dir, "[0-9a-f]*")); len(fs) > 0 {
		t.Errorf("store holds %v", fs)
	}
}

// Silent connections keep nobody out: the oldest makes room for the newest.
func TestSilentConnections(t *testing.T) {
	_, addr := startWorker(t, nil)
	var silent []net.Conn
	for range 3 * maxHellos / 2 {
		c, err := connect(addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		silent = append(silent, c)
	}
	began := time.Now()
	dial(t, addr, [16]byte{}).c.Close()
	if took := time.Since(began); took > helloTime/2 {
		t.Errorf("a client among silent connections is served after %v", took)
	}
	closed := 0
	for _, c := range silent[:maxHellos/2] {
		_ = c.SetReadDeadline(time.Now().Add(helloTime / 2))
		if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			closed++
		}
	}
	if closed != maxHellos/2 {
		t.Errorf("%d of the %d oldest are closed", closed, maxHellos/2)
	}
}

var accountClient = account.Client{PID: 1, Name: "probe"}

// A client that comes while the last one goes is given the default lease, and not told
// that it has ended.
func TestDefaultLeaseComesAndGoes(t *testing.T) {
	s := &Supervisor{cfg: Config{Mem: account.Granule}, leases: map[[16]byte]*lease{}, book: account.NewBook([]uint64{account.Granule})}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				l, slot, _, err := s.claim(&wire.Hello{Kind: wire.SessionCompute})
				if err != nil {
					t.Error(err)
					return
				}
				s.closeSession(l, slot)
			}
		})
	}
	wg.Wait()
	if len(s.leases) != 0 {
		t.Errorf("%d leases are left", len(s.leases))
	}
}

// One limit of devices, in the wire's table: a worker does not offer what no program can see.
func TestDevicesBeyondTheLimit(t *testing.T) {
	_, err := New(context.Background(), testLog(), Config{Exe: "worker", Devices: make([]int, wire.MaxDevices+1)})
	if err == nil || !strings.Contains(err.Error(), "17 devices: give 1 to 16") {
		t.Errorf("error %v", err)
	}
	if account.MaxDevices != wire.MaxDevices {
		t.Errorf("an account holds %d devices, a lease %d", account.MaxDevices, wire.MaxDevices)
	}
	e := new(wire.Encoder)
	s := wire.Snapshot{Devices: make([]wire.Device, wire.MaxDevices+1)}
	s.Encode(e)
	if s.Decode(e.Buf()) == nil {
		t.Error("a snapshot of 17 devices was taken")
	}
}
