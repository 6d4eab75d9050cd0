package exchange

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// account is a lease's account with two sessions, both of this process.
type account struct {
	mu    sync.Mutex
	names map[int][2]uint64
	pid   int
}

type member struct {
	*account
	slot int
}

func (m member) Slot() int { return m.slot }

func (m member) Publish(name [2]uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.names[m.slot] = name
}

func (m member) Find(slot int) (name [2]uint64, pid int, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name, ok = m.names[slot]
	return name, m.pid, ok
}

func (m member) Member(pid int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return pid == m.pid
}

func (a *account) setPID(pid int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pid = pid
}

func newExports(t *testing.T) (*Exports, *account) {
	a := &account{names: map[int][2]uint64{}, pid: os.Getpid()}
	e := New(slog.New(slog.NewTextHandler(io.Discard, nil)), member{a, 0})
	t.Cleanup(e.Close)
	return e, a
}

func wantToken(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, ErrToken) {
		t.Errorf("%s: %v", what, err)
	}
}

func TestExchange(t *testing.T) {
	e, a := newExports(t)
	me := member{a, 1}
	var used atomic.Int32
	it := &Item{Kind: Memory, Device: 3, Offset: 512, Size: 1000, Charged: 2 << 20, Used: func(n int) { used.Add(int32(n)) }}
	copy(it.Handle[:], "the driver's")
	tok, err := e.Add(it)
	if err != nil {
		t.Fatal(err)
	}
	use, got, err := Open(me, tok)
	if err != nil {
		t.Fatal(err)
	}
	if got.Kind != Memory || got.Device != 3 || got.Offset != 512 || got.Size != 1000 || got.Charged != 2<<20 || got.Handle != it.Handle || got.FD != -1 {
		t.Errorf("%+v", got)
	}
	if used.Load() != 1 {
		t.Errorf("%d sessions use it", used.Load())
	}
	for i := range tok {
		forged := tok
		forged[i] ^= 0x10
		_, _, err := Open(me, forged)
		wantToken(t, "a forged token", err)
		if e.Own(forged) != nil {
			t.Errorf("a token with byte %d changed is the session's own", i)
		}
	}
	if _, _, err := Open(member{a, 0}, tok); !errors.Is(err, ErrOwn) {
		t.Errorf("its own: %v", err)
	}
	e.Remove(tok)
	_, _, err = Open(me, tok)
	wantToken(t, "a token that was withdrawn", err)
	use.Close()
	for until := time.Now().Add(5 * time.Second); used.Load() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("the exporter does not see that nobody uses it")
		}
	}
}

// A descriptor is passed, and is the same file.
func TestExchangeFile(t *testing.T) {
	e, a := newExports(t)
	fd, err := unix.MemfdCreate("file", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(fd, []byte("here")); err != nil {
		t.Fatal(err)
	}
	tok, err := e.Add(&Item{Kind: File, FD: fd, Used: func(int) {}})
	if err != nil {
		t.Fatal(err)
	}
	use, got, err := Open(member{a, 1}, tok)
	if err != nil {
		t.Fatal(err)
	}
	defer use.Close()
	e.Remove(tok)
	b := make([]byte, 4)
	if _, err := unix.Pread(got.FD, b, 0); err != nil || string(b) != "here" {
		t.Errorf("%q, %v", b, err)
	}
	unix.Close(got.FD)
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
		t.Error("the exporter keeps the descriptor of an export that it has withdrawn")
	}
}

// A process that has no session of the lease gets nothing, even with a token; nor is one believed
// that listens where a session of the lease should.
func TestExchangeStranger(t *testing.T) {
	e, a := newExports(t)
	tok, err := e.Add(&Item{Kind: Memory, Used: func(int) { t.Error("a stranger uses it") }})
	if err != nil {
		t.Fatal(err)
	}
	other := &account{names: a.names, pid: os.Getpid()} // finds the address
	a.setPID(1)                                         // but is no member here
	_, _, err = Open(member{other, 1}, tok)
	wantToken(t, "a stranger", err)

	a.setPID(os.Getpid())
	other.setPID(1) // where process 1 should listen, this one does
	_, _, err = Open(member{other, 1}, tok)
	wantToken(t, "an impostor", err)
}

// What an exporter that has ended had exported is no export any more.
func TestExporterEnds(t *testing.T) {
	e, a := newExports(t)
	tok, err := e.Add(&Item{Kind: Memory, Used: func(int) {}})
	if err != nil {
		t.Fatal(err)
	}
	e.Close()
	_, _, err = Open(member{a, 1}, tok)
	wantToken(t, "an exporter that has ended", err)
}
