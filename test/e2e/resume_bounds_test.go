package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// private is the memory in KiB that a process has for itself alone.
func private(t *testing.T, pid int) (kib uint64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		for _, kind := range []string{"RssAnon:", "RssShmem:", "VmSwap:"} {
			var n uint64
			if v, ok := strings.CutPrefix(line, kind); ok {
				if _, err := fmt.Sscan(v, &n); err != nil {
					t.Fatal(err)
				}
				kib += n
			}
		}
	}
	return kib
}

// TestCutBuffer: while the connection is lost, calls without an answer go on until the window is full, and then wait; neither side takes more memory
// for that. When the connection is back they are carried out in order.
func TestCutBuffer(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--grace", "60s"}})
	c := newCutter(t, w, 0, 0, 1, 0)
	cmd := w.direct(context.Background(), built("test/agent"))
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr())
	a := startAgentAs(t, cmd)
	a.must("mem %d", 1<<20)
	a.must("set 0 %d", 1)
	a.must("get 0")
	sessions := w.sessions()
	if len(sessions) != 1 {
		t.Fatalf("%d sessions", len(sessions))
	}
	client := private(t, a.cmd.Process.Pid)
	session := private(t, sessions[0])
	c.cutAll(true)

	const calls, least = 400000, 10000
	go func() {
		in := bufio.NewWriter(a.in)
		for i := range calls {
			fmt.Fprintf(in, "set 0 %d\n", i+2)
		}
		_ = in.Flush()
	}()
	var done atomic.Int64
	answered := make(chan error, 1)
	go func() {
		for range calls {
			if line, err := a.out.ReadString('\n'); err != nil || !strings.HasPrefix(line, "0 ") {
				answered <- fmt.Errorf("%q, %w", line, err)
				return
			}
			done.Add(1)
		}
		answered <- nil
	}()
	for seen, since := int64(-1), time.Now(); time.Since(since) < time.Second; time.Sleep(10 * time.Millisecond) {
		if n := done.Load(); n != seen {
			seen, since = n, time.Now()
		}
	}
	went := done.Load()
	moreClient, moreSession := private(t, a.cmd.Process.Pid)-client, private(t, sessions[0])-session
	t.Logf("%d calls during the cut; %d KiB more in the program, %d KiB more in its session", went, moreClient, moreSession)
	if went < least || went == calls {
		t.Errorf("%d of %d calls went on during the cut, want some, and not all", went, calls)
	}
	// The window, and what the C library and the Go runtime keep for themselves.
	for who, more := range map[string]uint64{"the program": moreClient, "its session": moreSession} {
		if most := uint64(wire.PieceWindow>>10 + 4<<10); int64(more) > int64(most) {
			t.Errorf("%s has taken %d KiB more in the cut, want at most %d", who, more, most)
		}
	}
	c.cutAll(false)
	if err := <-answered; err != nil {
		t.Fatalf("after the cut: %v: %s", err, a.stderr.String())
	}
	if x, _ := a.must("get 0"); x != calls+1 {
		t.Errorf("the memory holds %d, not what the last of the calls has written, %d", x, calls+1)
	}
}

// liar stands between programs and a worker. It loses the first connection of each after some bytes, and changes what the worker answers to the
// first attempt to make it again.
type liar struct {
	t        *testing.T
	l        net.Listener
	to       string
	lie      func(welcome []byte) []byte // nil: none. An answer without a byte closes the connection
	from     func(attempt int64) net.IP  // where the connections to the worker come from; nil: anywhere
	attempts atomic.Int64
}

// lieAfter is how much a program sends before its connection is lost.
const lieAfter = 100 << 10

func newLiar(t *testing.T, w *worker) *liar {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return &liar{t: t, l: l, to: strings.TrimPrefix(w.addr, "tcp:")}
}

func (r *liar) serve() {
	for {
		c, err := r.l.Accept()
		if err != nil {
			return
		}
		go r.pass(c)
	}
}

func (r *liar) pass(client net.Conn) {
	defer client.Close()
	var hello [wire.HelloSize]byte
	if _, err := io.ReadFull(client, hello[:]); err != nil {
		return
	}
	var h wire.Hello
	if err := h.Decode(&hello); err != nil {
		r.t.Error(err)
		return
	}
	attempt := int64(0)
	if h.Kind == wire.SessionAttach {
		attempt = r.attempts.Add(1)
	}
	d := net.Dialer{}
	if r.from != nil {
		d.LocalAddr = &net.TCPAddr{IP: r.from(attempt)}
	}
	server, err := d.Dial("tcp", r.to)
	if err != nil {
		r.t.Error(err)
		return
	}
	defer server.Close()
	if _, err := server.Write(hello[:]); err != nil {
		return
	}
	up := io.Reader(client)
	if h.Kind == wire.SessionCompute {
		up = io.LimitReader(client, lieAfter)
	}
	go func() {
		_, _ = io.Copy(server, up)
		server.Close()
		client.Close()
	}()
	if attempt == 1 && r.lie != nil {
		var b bytes.Buffer
		if _, err := wire.ReadWelcome(io.TeeReader(server, &b)); err != nil {
			r.t.Errorf("the worker: %v", err)
			return
		}
		said := r.lie(b.Bytes())
		if _, err := client.Write(said); err != nil || len(said) < b.Len() {
			return
		}
	}
	_, _ = io.Copy(client, server)
}

// pieceOf is the head of a piece.
func pieceOf(received uint64, size, flags uint32) []byte {
	b := binary.LittleEndian.AppendUint64(nil, received)
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(b, size), flags)
}

// TestResumeAnswers: whatever answers where a lost connection is made again, the program goes on if that makes no sense or another attempt may
// succeed, and otherwise ends with a reason. It neither dies of a signal nor waits for ever, and computes nothing wrong.
func TestResumeAnswers(t *testing.T) {
	const sent, makesNone = "says to have received what was not sent", "malformed piece of the stream"
	word := func(at int, v uint32) func(b []byte) []byte {
		return func(b []byte) []byte { binary.LittleEndian.PutUint32(b[at:], v); return b }
	}
	received := func(n uint64) func(b []byte) []byte {
		return func(b []byte) []byte { binary.LittleEndian.PutUint64(b[len(b)-8:], n); return b }
	}
	behind := func(p []byte) func(b []byte) []byte {
		return func(b []byte) []byte { return append(b, p...) }
	}
	w := startWorker(t, workerOptions{args: []string{"--grace", "5s"}})
	want := w.run(runOptions{}, program("paused"), "7", "40")
	if want.status != 0 {
		t.Fatalf("uncut: status %d: %s%s", want.status, want.stdout, want.stderr)
	}
	for _, c := range []struct {
		what string
		lie  func(welcome []byte) []byte
		why  string // the program ends with it; "": it goes on
	}{
		{"the truth", func(b []byte) []byte { return b }, ""},
		{"nothing", func([]byte) []byte { return nil }, ""},
		{"half of the head", func(b []byte) []byte { return b[:wire.WelcomeSize/2] }, ""},
		{"half of the payload", func(b []byte) []byte { return b[:wire.WelcomeSize+wire.AttachedSize/2] }, ""},
		{"another magic", word(0, 1), ""},
		{"another version", word(4, wire.Version+1), ""},
		{"an unknown status", word(8, 99), ""},
		{"a payload without end", word(12, 1<<31), ""},
		{"a shorter payload", word(12, wire.AttachedSize-1), ""},
		{"more received than was sent", received(1 << 40), sent},
		{"the largest position", received(1<<64 - 1), sent},
		{"less received than before", received(0), sent},
		{"a piece that acknowledges what was not sent", behind(pieceOf(1<<40, 0, 0)), makesNone},
		{"a piece that takes back", behind(pieceOf(0, 0, 0)), makesNone},
		{"a piece beyond the window", behind(pieceOf(lieAfter/2, wire.PieceWindow+1, 0)), makesNone},
		{"a goodbye of the worker's", behind(pieceOf(lieAfter/2, 0, wire.PieceBye)), makesNone},
	} {
		t.Run(c.what, func(t *testing.T) {
			r := newLiar(t, w)
			r.lie = c.lie
			go r.serve()
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			cmd := w.direct(ctx, program("paused"), "7", "40")
			cmd.Env = append(cmd.Env, "SLUICE_WORKER=tcp:"+r.l.Addr().String())
			got := finish(t, ctx, cmd)
			if r.attempts.Load() == 0 {
				t.Error("the connection was not made again")
			}
			if c.why == "" && (got.status != 0 || got.stdout != want.stdout) || c.why != "" && (got.status == 0 || got.status > 128 || !strings.Contains(got.stderr, c.why)) {
				t.Errorf("status %d: %s%s\nwant %q", got.status, got.stdout, got.stderr, c.why)
			}
		})
	}
	waitFor(t, 30*time.Second, "no session is left", func() bool { return len(w.sessions()) == 0 })
	w.healthy()
}

// TestResumeAddress: a program comes back from another address each time, as behind a router that has forgotten it.
func TestResumeAddress(t *testing.T) {
	w := startWorker(t, workerOptions{host: "127.0.0.1", args: []string{"--grace", "30s"}})
	r := newLiar(t, w)
	r.from = func(attempt int64) net.IP { return net.IPv4(127, 0, 0, byte(2+attempt)) }
	go r.serve()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	want := finish(t, ctx, w.direct(ctx, program("paused"), "7", "40"))
	cmd := w.direct(ctx, program("paused"), "7", "40")
	cmd.Env = append(cmd.Env, "SLUICE_WORKER=tcp:"+r.l.Addr().String())
	got := finish(t, ctx, cmd)
	if n := r.attempts.Load(); want.status != 0 || got.status != 0 || got.stdout != want.stdout || n == 0 {
		t.Errorf("%d attempts, status %d: %s%s\nuncut: %s", n, got.status, got.stdout, got.stderr, want.stdout)
	}
}

// TestResumeNewWorker: another worker has the address when the client comes back, as after a crash of the machine. It does not know the key, so the
// program fails at once and its log says that the session has ended. Sessions of the new worker are not disturbed.
func TestResumeNewWorker(t *testing.T) {
	options := workerOptions{args: []string{"--grace", "60s"}}
	old, other := startWorker(t, options), startWorker(t, options)
	owner := startAgent(t, other) // has session 0 there, as the program has at the old one
	owner.must("mem %d", 1<<20)
	owner.must("set 0 %d", 77)
	c := newCutter(t, old, 0, 0, 1, 0)
	cmd := old.direct(context.Background(), built("test/agent"))
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr())
	a := startAgentAs(t, cmd)
	a.must("mem %d", 1<<20)
	a.must("set 0 %d", 5)
	for _, pid := range old.sessions() {
		_ = syscall.Kill(pid, syscall.SIGSTOP)
	}
	c.mu.Lock()
	c.to = strings.TrimPrefix(other.addr, "tcp:")
	c.mu.Unlock()
	began := time.Now()
	c.cutAll(false)
	if rc, _, _ := a.ask("get 0"); rc == 0 || time.Since(began) > 10*time.Second {
		t.Errorf("a call after another worker took the address: %d after %v", rc, time.Since(began))
	}
	waitFor(t, 5*time.Second, "the program says why", func() bool {
		return strings.Contains(a.stderr.String(), "and the session has ended: no session here has that key")
	})
	if x, _ := owner.must("get 0"); x != 77 {
		t.Errorf("the other's memory holds %d", x)
	}
	for _, pid := range old.sessions() {
		_ = syscall.Kill(pid, syscall.SIGCONT)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}
