package worker

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// kinds counts the records of a trace, and gives the names in it.
func kinds(t *testing.T, b []byte) (map[uint16]int, string) {
	t.Helper()
	if len(b) < wire.TraceHeadSize {
		t.Fatalf("a trace of %d bytes", len(b))
	}
	out, names := map[uint16]int{}, ""
	for b = b[wire.TraceHeadSize:]; len(b) >= wire.TraceRecordSize; {
		var m wire.TraceRecord
		m.Decode(wire.NewDecoder(b[:wire.TraceRecordSize]))
		if m.Size < wire.TraceRecordSize || int(m.Size) > len(b) {
			t.Fatalf("a record of %d bytes, %d are left", m.Size, len(b))
		}
		out[m.Kind]++
		names += string(b[wire.TraceRecordSize:m.Size]) + "|"
		b = b[m.Size:]
	}
	return out, names
}

// A client has its own session traced: what it does meanwhile is in the trace, and nothing before or after.
func TestTraceFrames(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	if _, rc := k.load(image0, 1); rc != 0 {
		t.Fatal(rc)
	}
	k.bind(1, 1, "vecadd")
	p, rc := k.alloc(4096)
	if rc != 0 {
		t.Fatal(rc)
	}
	work := func() {
		for range 3 {
			k.copyIn(p, 0, make([]byte, 1024))
			k.launch(1, 0, 1, 256, cat(u64(p), u64(p), u64(p), u32(256)))
		}
		k.copyOut(p, 1024, 0, 7)
		k.streamSync(0)
	}
	trace := func(what func()) []byte {
		t.Helper()
		k.oneway(wire.OpTrace, u32(1), u32(0))
		what()
		k.oneway(wire.OpTrace, u32(0), u32(0))
		k.until("the trace's last frame", func() bool { return k.traced })
		k.mu.Lock()
		defer k.mu.Unlock()
		b := k.trace
		k.trace, k.traced = nil, false
		return b
	}
	work()
	for range 2 {
		got, names := kinds(t, trace(work))
		work()
		if got[wire.SpanKernel] != 3 || got[wire.SpanCopyIn] != 3 || got[wire.SpanCopyOut] != 1 || got[wire.SpanWait] != 2 || !strings.Contains(names, "vecadd") {
			t.Errorf("%v, names %q", got, names)
		}
	}
	// One that is asked for while another runs is empty, and does not disturb that.
	k.oneway(wire.OpTrace, u32(1), u32(0))
	b := trace(func() {
		k.until("the refusal", func() bool { return k.traced })
		k.mu.Lock()
		k.traced = false
		k.mu.Unlock()
		work()
	})
	if got, _ := kinds(t, b); got[wire.SpanKernel] != 3 {
		t.Errorf("%v", got)
	}
	k.oneway(wire.OpTrace, u32(0), u32(0)) // there is none
	k.until("the last frame of none", func() bool { return k.traced })
	work()
}

// ask asks a session for a trace as a client does whose connection came from the daemon.
func askTrace(t *testing.T, s *session, kind, ms uint32) *os.File {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	c := os.NewFile(uintptr(pair[0]), "asks")
	t.Cleanup(func() { c.Close() })
	s.traceTo(pair[1])
	var b [wire.HelloSize]byte
	(&wire.Hello{Version: wire.Version, Kind: kind}).Encode(&b)
	if _, err := c.Write(append(b[:], cat(u32(ms), u32(0))...)); err != nil {
		t.Fatal(err)
	}
	return c
}

// Somebody else of the lease has a session traced for a while.
func TestTraceTo(t *testing.T) {
	s, _ := activeSession(t)
	s.keepalive = time.Second
	testKernel(s)
	launch := func() {
		for range 5 {
			s.launch(launchFrame(4)[wire.RequestSize:])
		}
	}
	for kind, want := range map[uint32]string{wire.SessionCompute: "where a trace is asked for", wire.SessionTrace: "want 1 to 600000", 99: "does not know"} {
		var r *wire.Refusal
		if _, err := wire.ReadWelcome(askTrace(t, s, kind, 0)); !errors.As(err, &r) || !strings.Contains(err.Error(), want) {
			t.Errorf("kind %d: %v", kind, err)
		}
	}
	c := askTrace(t, s, wire.SessionTrace, 60_000)
	if _, err := wire.ReadWelcome(c); err != nil {
		t.Fatal(err)
	}
	launch()
	var r *wire.Refusal
	if _, err := wire.ReadWelcome(askTrace(t, s, wire.SessionTrace, 1000)); !errors.As(err, &r) || r.Status != wire.StatusBusy {
		t.Errorf("a second trace: %v", err)
	}
	c.Close() // it has enough
	for begun := time.Now(); ; time.Sleep(time.Millisecond) {
		c := askTrace(t, s, wire.SessionTrace, 300)
		if _, err := wire.ReadWelcome(c); err == nil {
			launch()
			b, err := io.ReadAll(c)
			got, _ := kinds(t, b)
			if err != nil || got[wire.SpanKernel] == 0 {
				t.Errorf("%v, %v", got, err)
			}
			break
		}
		if time.Since(begun) > 10*time.Second {
			t.Fatal("a trace whose reader has gone does not end")
		}
	}
	if s.tracing.now.Load() != nil {
		t.Error("a trace whose time is over goes on")
	}
}
