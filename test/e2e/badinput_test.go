package e2e

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"net"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// slack is what an end may take beyond the time that the protocol promises, on a busy machine.
const slack = 2 * time.Second

// helloTime is how long the worker waits for a HELLO.
const helloTime = 5 * time.Second

// TestBadHello: a client whose HELLO is bad is told why, or disconnected, and other clients do not notice.
func TestBadHello(t *testing.T) {
	w := startWorker(t, workerOptions{keepalive: 2 * time.Second})

	refused := func(name string, h wire.Hello, status uint32, words ...string) {
		t.Run(name, func(t *testing.T) {
			r := connect(t, w, helloBytes(h))
			_ = r.c.SetReadDeadline(time.Now().Add(slack))
			var b [wire.WelcomeSize]byte
			if _, err := io.ReadFull(r.c, b[:]); err != nil {
				t.Fatalf("no answer: %v", err)
			}
			reason := make([]byte, binary.LittleEndian.Uint32(b[12:]))
			if _, err := io.ReadFull(r.c, reason); err != nil {
				t.Fatal(err)
			}
			if got := binary.LittleEndian.Uint32(b[8:]); got != status {
				t.Errorf("status %d, not %d: %s", got, status, reason)
			}
			for _, word := range words {
				if !strings.Contains(string(reason), word) {
					t.Errorf("the reason %q does not name %s", reason, word)
				}
			}
			r.end(slack)
		})
	}
	h := goodHello(wire.SessionCompute)
	h.Version = 99
	refused("version", h, wire.StatusVersion, "99", "1")
	h = goodHello(wire.SessionCompute)
	h.Token = [16]byte{1, 2, 3}
	refused("lease", h, wire.StatusLease)
	h = goodHello(wire.SessionLease)
	h.Mem = 1 << 50
	refused("memory", h, wire.StatusNoMemory)

	cut := func(name string, first []byte, limit time.Duration) {
		t.Run(name, func(t *testing.T) { connect(t, w, first).end(limit) })
	}
	cut("other protocol", []byte("GET / HTTP/1.1\r\nHost: worker\r\n\r\n"+strings.Repeat("x", 200)), slack)
	cut("truncated", helloBytes(goodHello(wire.SessionCompute))[:60], helloTime+slack)
	cut("silent", nil, helloTime+slack)
	bad := goodHello(77)
	cut("unknown kind", helloBytes(bad), slack)

	waitFor(t, time.Second, "no session is left", func() bool { return len(w.sessions()) == 0 })
	w.healthy()
}

// TestBadFrames: what breaks the protocol ends the session with a reason; what only misuses a
// handle gets CUDA's error and the session goes on.
func TestBadFrames(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			w := startWorker(t, workerOptions{network: network, keepalive: 2 * time.Second})
			for _, c := range []struct {
				name  string
				bytes []byte
				words string // in the reason
			}{
				{"oversized length", append(u32s(wire.MaxPayload+1), 7, 0xf0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), "limit"},
				{"unknown operation", frame(0xefff, 0, 0, 0, nil), "operation"},
				{"unknown control", frame(0xf0ff, 0, 0, 0, nil), "operation"},
				{"unknown flags", frame(wire.OpBeat, 0x80, 0, 0, nil), "flags"},
				{"wait without call", frame(wire.OpObserve, wire.FlagWait, 0, 0, u32s(0)), "call"},
				{"short payload", frame(wire.OpCopyOut, wire.FlagWait, 1, 0, []byte{1, 2, 3}), ""},
				{"long payload", frame(wire.OpEventWatch, wire.FlagWait, 1, 0, make([]byte, 4096)), ""},
				{"image beyond its limit", frame(wire.OpImageChunk, 0, 0, 0, append(make([]byte, 32+8), 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 1)), ""},
				{"image chunk outside", frame(wire.OpImageChunk, 0, 0, 0, append(append(make([]byte, 32), 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f), 16, 0, 0, 0, 0, 0, 0, 0, 1)), ""},
			} {
				t.Run(c.name, func(t *testing.T) {
					r := session(t, w)
					r.send(c.bytes)
					reason := r.end(slack)
					if !strings.Contains(reason, c.words) || reason == "" {
						t.Errorf("the reason is %q, without %q", reason, c.words)
					}
				})
			}
			t.Run("truncated frame, then gone", func(t *testing.T) {
				r := session(t, w)
				r.send(frame(wire.OpCopyIn, 0, 0, 1, make([]byte, 1000))[:100])
				_ = r.c.Close()
				waitFor(t, time.Second, "the session has ended", func() bool { return len(w.sessions()) == 0 })
			})
			t.Run("unknown handles", func(t *testing.T) {
				r := session(t, w)
				ctx := r.activate()
				if h, _ := r.ask(wire.OpEventWatch, 5, ctx, u32s(0x01000077, 1, 0)); h.Result != 400 {
					t.Errorf("watching an unknown event: result %d, not 400", h.Result)
				}
				if h, _ := r.ask(wire.OpKernelInfo, 6, ctx, u32s(0x01000077, 0)); h.Result != 400 {
					t.Errorf("asking for an unknown kernel: result %d, not 400", h.Result)
				}
				if h, _ := r.ask(wire.OpEventWatch, 7, 0x05000044, u32s(0x01000077, 1, 0)); h.Result == 0 {
					t.Errorf("an unknown context: result 0")
				}
				if h, _ := r.ask(opOf(t, "cuStreamSynchronize"), 8, ctx, u32s(0x03000123)); h.Result != 400 {
					t.Errorf("synchronising an unknown stream: result %d, not 400", h.Result)
				}
				// another session's handle is as unknown as any
				if r.alloc(ctx, 1<<20) == 0 {
					t.Error("the session is of no use any more")
				}
			})
			waitFor(t, time.Second, "no session is left", func() bool { return len(w.sessions()) == 0 })
			w.healthy()
		})
	}
}

// TestClientStopsReading: a client that asks for data and takes none is cut off after the keep-alive
// time, and holds nobody up meanwhile.
func TestClientStopsReading(t *testing.T) {
	w := startWorker(t, workerOptions{keepalive: 2 * time.Second})
	r := session(t, w)
	ctx := r.activate()
	const n = 64 << 20
	d := r.alloc(ctx, n)
	for call := uint32(10); call < 20; call++ {
		p := binary.LittleEndian.AppendUint64(nil, d)
		p = binary.LittleEndian.AppendUint64(p, n)
		r.send(frame(wire.OpCopyOut, wire.FlagWait, call, ctx, append(p, u32s(0, call)...)))
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() { // it lives, it only does not read
		tick := time.NewTicker(w.keep / 4)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_, _ = r.c.Write(frame(wire.OpBeat, 0, 0, 0, nil))
			}
		}
	}()
	w.healthy()
	took := waitFor(t, w.keep+slack, "the session has ended", func() bool { return len(w.sessions()) == 0 })
	t.Logf("ended after %s", took.Round(10*time.Millisecond))
	w.healthy()
}

// TestStopped: a program that is stopped (^Z, scontrol suspend, a debugger) is not a lost one. It goes
// on with its session where it was, however long that took.
func TestStopped(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			w := startWorker(t, workerOptions{network: network, keepalive: time.Second})
			a := startAgent(t, w)
			before, _ := a.info()
			if err := a.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			time.Sleep(3 * w.keep)
			if n := len(w.sessions()); n != 1 {
				t.Errorf("%d sessions while the program is stopped, not 1", n)
			}
			if err := a.cmd.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			if rc, _, _ := a.ask("mem %d", 8*mib); rc != 0 {
				t.Errorf("cuMemAlloc after the program went on: CUresult %d: %s", rc, a.stderr.String())
			}
			if after, _ := a.info(); after+8*mib != before {
				t.Errorf("%d bytes free before, %d after 8 MiB were taken", before, after)
			}
		})
	}
}

// waiting starts the program "wait" in the given way and returns when it waits.
func waiting(t *testing.T, w *worker, cmd *exec.Cmd) (out *bufio.Reader, stderr *lockedBuffer) {
	t.Helper()
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr = &lockedBuffer{}
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	out = bufio.NewReader(pipe)
	line, err := out.ReadString('\n')
	if line != "wait: waiting\n" {
		t.Fatalf("the program printed %q (%v): %s\nthe worker's log: %s", line, err, stderr, tail(w.log.String(), 20))
	}
	return out, stderr
}

// ends waits for the program's end, which must be an error that it could see.
func ends(t *testing.T, cmd *exec.Cmd, out *bufio.Reader, stderr *lockedBuffer, limit time.Duration) {
	t.Helper()
	start := time.Now()
	timer := time.AfterFunc(limit, func() {
		t.Errorf("the program still waits after %s", limit)
		_ = cmd.Process.Kill()
	})
	rest, _ := io.ReadAll(out)
	_ = cmd.Wait()
	if !timer.Stop() {
		return
	}
	if code := cmd.ProcessState.ExitCode(); code != 3 || !strings.Contains(string(rest), ": cudaError") {
		t.Errorf("the program ended with status %d and %q: %s", code, rest, stderr)
	}
	t.Logf("%s after %s", strings.TrimSpace(string(rest)), time.Since(start).Round(time.Millisecond))
}

var waits = []string{"sync", "stream", "event", "older", "copy", "poll", "launch"}

// TestWorkerKilledInMidCall: whatever a program is waiting for, it gets an error within a second
// when its session's process is killed, and when the worker is.
func TestWorkerKilledInMidCall(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		for _, whom := range []string{"session", "worker"} {
			for _, how := range waits {
				t.Run(network+"-"+whom+"-"+how, func(t *testing.T) {
					w := startWorker(t, workerOptions{network: network})
					cmd := w.direct(context.Background(), program("wait"), how)
					out, stderr := waiting(t, w, cmd)
					victim := w.cmd.Process.Pid
					if whom == "session" {
						s := w.sessions()
						if len(s) != 1 {
							t.Fatalf("%d sessions, not 1", len(s))
						}
						victim = s[0]
					}
					if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
						t.Fatal(err)
					}
					ends(t, cmd, out, stderr, time.Second)
					if whom == "session" {
						w.healthy()
					}
				})
			}
		}
	}
}

// proxy stands between a program and a worker's TCP socket.
type proxy struct {
	t      *testing.T
	l      net.Listener
	target string
	cut    chan struct{} // closed: connections are reset
	hold   atomic.Bool   // true: bytes are swallowed, connections stay open
	limit  atomic.Int64  // bytes to the client after which both directions end; 0: none
}

func startProxy(t *testing.T, w *worker) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, l: l, target: strings.TrimPrefix(w.addr, "tcp:"), cut: make(chan struct{})}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.serve(c.(*net.TCPConn))
		}
	}()
	return p
}

func (p *proxy) serve(c *net.TCPConn) {
	up, err := net.Dial("tcp", p.target)
	if err != nil {
		_ = c.Close()
		return
	}
	u := up.(*net.TCPConn)
	done := make(chan struct{}, 2)
	go func() { p.pump(u, c, nil); done <- struct{}{} }()
	go func() { p.pump(c, u, &p.limit); done <- struct{}{} }()
	select {
	case <-p.cut:
		_ = c.SetLinger(0)
		_ = u.SetLinger(0)
	case <-done:
	}
	_ = c.Close()
	_ = u.Close()
}

func (p *proxy) pump(dst, src *net.TCPConn, limit *atomic.Int64) {
	b := make([]byte, 64<<10)
	total := int64(0)
	for {
		n, err := src.Read(b)
		if limit != nil {
			if most := limit.Load(); most > 0 && total+int64(n) > most {
				n = int(max(0, most-total))
				err = io.EOF
			}
		}
		total += int64(n)
		if n > 0 && !p.hold.Load() {
			if _, werr := dst.Write(b[:n]); werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// TestCutConnection: a connection that is reset ends both sides at once; one that goes silent ends
// both within the keep-alive time.
func TestCutConnection(t *testing.T) {
	const keepalive = 2 * time.Second
	for _, how := range waits {
		for _, mode := range []string{"reset", "silence"} {
			t.Run(mode+"-"+how, func(t *testing.T) {
				t.Parallel()
				w := startWorker(t, workerOptions{keepalive: keepalive})
				p := startProxy(t, w)
				cmd := w.direct(context.Background(), program("wait"), how)
				cmd.Env = append(cmd.Env, "SLUICE_WORKER=tcp:"+p.l.Addr().String())
				out, stderr := waiting(t, w, cmd)
				limit := time.Second
				if mode == "reset" {
					close(p.cut)
				} else {
					p.hold.Store(true)
					limit = keepalive + slack
				}
				ends(t, cmd, out, stderr, limit)
				waitFor(t, limit, "the session has ended", func() bool { return len(w.sessions()) == 0 })
				w.healthy()
			})
		}
	}
}

// TestCutAnywhere cuts every stream from the worker after a number of bytes, from the first byte of
// the welcome into the midst of the program's data: the program must end, soon, and not well. Within
// the welcome it first tries for 5 s.
func TestCutAnywhere(t *testing.T) {
	w := startWorker(t, workerOptions{keepalive: 2 * time.Second})
	var all sync.WaitGroup
	for _, after := range []int64{1, 15, 16, 17, 100, 1000, 2000, 4000, 6000, 10000, 50000, 300000, 1 << 20, 3 << 20} {
		p := startProxy(t, w)
		p.limit.Store(after)
		all.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			cmd := w.direct(ctx, program("vecadd"))
			cmd.Env = append(cmd.Env, "SLUICE_WORKER=tcp:"+p.l.Addr().String())
			r := finish(t, ctx, cmd)
			if r.status == 0 || r.status >= 128 || r.took > 5*time.Second+2*slack || !strings.Contains(r.stderr, "cudaError") {
				t.Errorf("cut after %d bytes: status %d after %s: %s%s", after, r.status, r.took, r.stdout, r.stderr)
			}
		})
	}
	all.Wait()
	waitFor(t, 10*time.Second, "no session is left", func() bool { return len(w.sessions()) == 0 })
	w.healthy()
}

// fakeWorker answers every connection with the given bytes and then keeps it open.
func fakeWorker(t *testing.T, answer []byte) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write(answer)
			t.Cleanup(func() { _ = c.Close() })
		}
	}()
	return "tcp:" + l.Addr().String()
}

// TestBadWorker: the shim trusts a worker no more than the worker trusts the shim. A program gets
// an error, and where it would otherwise not know why, a line on stderr.
func TestBadWorker(t *testing.T) {
	w := startWorker(t, workerOptions{})
	huge := wire.AppendWelcome(nil, wire.StatusOK, nil)
	binary.LittleEndian.PutUint32(huge[12:], 0xffffffff)
	for _, c := range []struct {
		name, addr, words string
	}{
		{"nobody there", "tcp:" + freeAddress(t), "refused"},
		{"no socket there", "unix:" + w.dir + "/nothing.sock", "nothing.sock"},
		{"not an address", "carrier-pigeon", "carrier-pigeon"},
		{"other version", fakeWorker(t, wire.AppendWelcome(nil, wire.StatusVersion, []byte("worker speaks version 9, client 1"))), "version 9"},
		{"garbage", fakeWorker(t, []byte(strings.Repeat("garbage ", 100))), ""},
		{"huge welcome", fakeWorker(t, huge), ""},
		{"short snapshot", fakeWorker(t, wire.AppendWelcome(nil, wire.StatusOK, make([]byte, 20))), ""},
		{"empty snapshot", fakeWorker(t, wire.AppendWelcome(nil, wire.StatusOK, nil)), ""},
		{"silence", fakeWorker(t, nil), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			cmd := w.direct(ctx, program("vecadd"))
			cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr)
			r := finish(t, ctx, cmd)
			if r.status == 0 || r.status >= 128 || r.took > 10*time.Second+slack {
				t.Errorf("status %d after %s: %s", r.status, r.took, r.stderr)
			}
			if !strings.Contains(r.stderr, "cudaError") || !strings.Contains(r.stderr, "sluice: ") || !strings.Contains(r.stderr, c.words) {
				t.Errorf("stderr gives no reason, or not %q: %s", c.words, r.stderr)
			}
		})
	}
}
