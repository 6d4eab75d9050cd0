package e2e

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// through runs a program over a cutter.
func (w *worker) through(t *testing.T, c *cutter, limit time.Duration, prog string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := w.direct(ctx, prog, args...)
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr())
	return finish(t, ctx, cmd)
}

// TestCuts cuts the connections of programs at random bytes in either direction, also within the handshakes that make
// them and make them again. Each program checks that everything was done once and in order, and computes what it computes
// without a cut. SLUICE_CUTS sets the number of cuts.
func TestCuts(t *testing.T) {
	cuts := int64(300)
	if n, err := strconv.Atoi(os.Getenv("SLUICE_CUTS")); err == nil {
		cuts = int64(n)
	}
	const lanes = 2
	var made, early, pauses atomic.Int64
	began := time.Now()
	t.Run("lanes", func(t *testing.T) {
		for lane := range lanes {
			t.Run(fmt.Sprint(lane), func(t *testing.T) {
				t.Parallel()
				// The second has a worker under the race detector, and connections that fall silent.
				o := workerOptions{args: []string{"--grace", "30s"}, race: lane == 1}
				if lane == 1 {
					o.keepalive = time.Second
				}
				w := startWorker(t, o)
				rnd := rand.New(rand.NewPCG(uint64(cuts), uint64(lane)))
				for seed := lane; made.Load() < cuts && !t.Failed(); seed += lanes {
					args := []string{fmt.Sprint(seed), fmt.Sprint(20 + rnd.IntN(100))}
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					want := finish(t, ctx, w.direct(ctx, program("paused"), args...))
					cancel()
					// Images are uploaded anew, so that cuts come in the middle of them.
					_ = os.RemoveAll(w.dir + "/store")
					c := newCutter(t, w, uint64(seed), 1000, 1<<(12+rnd.IntN(12)), 3*lane)
					c.early.Store(true)
					got := w.through(t, c, 2*time.Minute, program("paused"), args...)
					n := c.cuts.Load()
					made.Add(n)
					early.Add(c.first.Load() - 1)
					pauses.Add(int64(strings.Count(got.stderr, " is back after ")))
					if want.status != 0 || got.status != 0 || got.stdout != want.stdout {
						t.Errorf("paused %s, %d cuts: status %d: %s%s\nuncut: status %d: %s%s", args, n, got.status, got.stdout, got.stderr, want.status, want.stdout, want.stderr)
					}
					c.close()
				}
			})
		}
	})
	t.Logf("%d cuts, %d of them before the WELCOME, %d pauses of programs, in %v", made.Load(), early.Load(), pauses.Load(), time.Since(began).Round(time.Millisecond))
}

// TestCutPrograms cuts the connections of programs that were not made for it: of a few, or with SLUICE_CUTS of all, again and again until there were
// so many cuts. Some programs kill processes of theirs, whose sessions last until the grace is over, and take memory till then.
func TestCutPrograms(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--grace", "10s"}})
	// They want a lease of a size of its own, and a standard error without lines about cuts.
	not := map[string]bool{"memcheck": true, "assertion": true}
	few := map[string]bool{"threads": true, "pinned": true, "zerocopy": true, "managed": true, "engine": true}
	most, each, cuts := int64(1), 30, int64(0)
	if n, err := strconv.Atoi(os.Getenv("SLUICE_CUTS")); err == nil {
		most, each, few = int64(n), 100, nil
	}
	for seed := uint64(0); cuts < most && !t.Failed(); seed++ {
		for _, p := range programs {
			if few != nil && !few[p.name] || not[p.name] {
				continue
			}
			c := newCutter(t, w, seed, each, 1<<(17-seed%7), 0)
			r := w.through(t, c, time.Minute, program(p.name), p.args...)
			if n := c.cuts.Load(); r.status != 0 || r.stdout != p.want+"PASS\n" {
				t.Errorf("seed %d: %s %v, %d cuts: status %d\nstdout: %s\nwant:   %s\nstderr: %s", seed, p.name, p.args, n, r.status, r.stdout, p.want, tail(r.stderr, 20))
			} else {
				cuts += n
			}
			c.close()
		}
	}
	t.Logf("%d cuts", cuts)
}

// TestCutOwners cuts the connections of programs that have several owners and come to them by a lease's socket, and of
// processes that were forked or share memory. Meanwhile the daemon that serves the socket ends and begins, again and again. There is nobody
// here to tell a worker that a process has ended in a cut: its session ends with the grace. SLUICE_CUTS sets the number of cuts.
func TestCutOwners(t *testing.T) {
	t.Parallel()
	most := int64(20)
	if n, err := strconv.Atoi(os.Getenv("SLUICE_CUTS")); err == nil {
		most = int64(n)
	}
	options := workerOptions{args: []string{"--grace", "5s"}, devices: 2}
	a, b := startWorker(t, options), startWorker(t, options)
	dir, err := os.MkdirTemp("", "e2e")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	var cuts, restarts int64
	for seed := uint64(0); cuts < most && !t.Failed(); seed++ {
		for _, p := range []struct{ name, want string }{
			{"two_devices", "two_devices: ok\nPASS\n"},
			{"fork", "fork: sum 90, a late child gets cudaErrorInitializationError\nPASS\n"},
			{"multi_process", "multi_process: 5 processes, one total\nPASS\n"},
			{"ipc", "ipc: memory, 40 turns by events, a descriptor, a pool\nPASS\n"},
		} {
			var through []*worker
			var cutters []*cutter
			for i, w := range []*worker{a, b} {
				c := newCutter(t, w, 2*seed+uint64(i), 30, 1<<(17-seed%7), 0)
				behind := *w
				behind.addr = c.addr()
				through, cutters = append(through, &behind), append(cutters, c)
			}
			s := &leaseSocket{t: t, path: filepath.Join(dir, "sock"), workers: through}
			s.listen()
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				rnd := rand.New(rand.NewPCG(seed, 20))
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Duration(rnd.IntN(100)) * time.Millisecond):
					}
					s.close()
					time.Sleep(time.Duration(rnd.IntN(50)) * time.Millisecond)
					s.listen()
					restarts++
				}
			}()
			r := s.run(program(p.name))
			close(stop)
			<-stopped
			s.close()
			for _, c := range cutters {
				cuts += c.cuts.Load()
				c.close()
			}
			if r.status != 0 || r.stdout != p.want {
				t.Errorf("seed %d: %s: status %d\nstdout: %s\nwant:   %s\nstderr: %s", seed, p.name, r.status, r.stdout, p.want, tail(r.stderr, 20))
			}
			for _, w := range []*worker{a, b} {
				waitFor(t, 30*time.Second, "no session is left", func() bool { return len(w.sessions()) == 0 })
				if used := w.settled(time.Now().Add(30 * time.Second)); used != 0 {
					t.Errorf("seed %d: %s: %d bytes are in use", seed, p.name, used)
				}
			}
		}
	}
	t.Logf("%d cuts, the daemon began anew %d times", cuts, restarts)
}

// TestPause is one long cut: the program waits and goes on, and says so once at either end; the session holds its memory meanwhile.
func TestPause(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--grace", "30s"}})
	c := newCutter(t, w, 0, 0, 1, 0)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.direct(ctx, program("paused"), "7", "400")
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr())
	go func() {
		time.Sleep(400 * time.Millisecond)
		c.cutAll(true)
		time.Sleep(2 * time.Second)
		if len(w.sessions()) != 1 {
			t.Errorf("%d sessions in the middle of a cut", len(w.sessions()))
		}
		c.cutAll(false)
	}()
	r := finish(t, ctx, cmd)
	lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
	if r.status != 0 || len(lines) != 2 || !strings.Contains(lines[0], "connection to 127.0.0.1:") || !strings.Contains(lines[0], "trying again for up to 30.0s") ||
		!strings.Contains(lines[1], "is back after 2.") {
		t.Errorf("status %d: %s%s", r.status, r.stdout, r.stderr)
	}
	waitFor(t, time.Second, "the session has ended", func() bool { return len(w.sessions()) == 0 })
}

// lateRelay passes connections on. Of the attempts to go on with a session the first is lost to the client, and reaches the worker
// after the second, whose WELCOME the client has by then, but before anything that the client sends over that one.
type lateRelay struct {
	t    *testing.T
	l    net.Listener
	to   string
	cut  chan struct{} // closed when the session's connection is to be lost
	late chan []byte   // what the first attempt has sent

	attempts atomic.Int64
}

func newLateRelay(t *testing.T, w *worker) *lateRelay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	r := &lateRelay{t: t, l: l, to: strings.TrimPrefix(w.addr, "tcp:"), cut: make(chan struct{}), late: make(chan []byte, 1)}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go r.pass(c)
		}
	}()
	return r
}

func (r *lateRelay) pass(client net.Conn) {
	defer client.Close()
	begin := make([]byte, wire.HelloSize+wire.AttachSize)
	if _, err := io.ReadFull(client, begin[:wire.HelloSize]); err != nil {
		return
	}
	var h wire.Hello
	if err := h.Decode((*[wire.HelloSize]byte)(begin)); err != nil {
		r.t.Error(err)
		return
	}
	attempt := int64(0)
	if h.Kind != wire.SessionAttach {
		begin = begin[:wire.HelloSize]
	} else if _, err := io.ReadFull(client, begin[wire.HelloSize:]); err != nil {
		return
	} else if attempt = r.attempts.Add(1); attempt == 1 {
		r.late <- begin
		return
	}
	server, err := r.send(begin)
	if err != nil {
		r.t.Error(err)
		return
	}
	defer server.Close()
	if attempt == 2 {
		if _, err := wire.ReadWelcome(io.TeeReader(server, client)); err != nil {
			r.t.Errorf("the second attempt: %v", err)
		}
		late, err := r.send(<-r.late)
		if err != nil {
			r.t.Error(err)
			return
		}
		defer late.Close()
		if _, err := wire.ReadWelcome(late); err != nil {
			r.t.Errorf("the first attempt, late: %v", err)
		}
	}
	if h.Kind == wire.SessionCompute {
		go func() {
			<-r.cut
			client.Close()
			server.Close()
		}()
	}
	go func() {
		_, _ = io.Copy(server, client)
		server.Close()
	}()
	_, _ = io.Copy(client, server)
}

// send begins a connection to the worker.
func (r *lateRelay) send(begin []byte) (net.Conn, error) {
	c, err := net.Dial("tcp", r.to)
	if err == nil {
		_, err = c.Write(begin)
	}
	return c, err
}

// TestLateAttempt: an attempt to go on that arrives after the one that the client uses does not take the session from the client.
func TestLateAttempt(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--grace", "30s"}})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	want := finish(t, ctx, w.direct(ctx, program("paused"), "7", "200"))
	if used := w.settled(time.Now().Add(30 * time.Second)); used != 0 {
		t.Fatalf("%d bytes are in use before", used)
	}
	r := newLateRelay(t, w)
	cmd := w.direct(ctx, program("paused"), "7", "200")
	cmd.Env = append(cmd.Env, "SLUICE_WORKER=tcp:"+r.l.Addr().String())
	done := make(chan result, 1)
	go func() { done <- finish(t, ctx, cmd) }()
	waitFor(t, 30*time.Second, "memory of the program's", func() bool { return w.used() > 0 })
	close(r.cut)
	got := <-done
	if n := r.attempts.Load(); got.status != 0 || got.stdout != want.stdout || n < 3 {
		t.Errorf("%d attempts, status %d: %s%s\nuncut: %s", n, got.status, got.stdout, got.stderr, want.stdout)
	}
}

// TestGraceOver: after the grace both sides give up, within a second of its end; so does a program whose session ends during the cut.
func TestGraceOver(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--grace", "1s"}})
	for _, killed := range []bool{false, true} {
		c := newCutter(t, w, 0, 0, 1, 0)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := w.direct(ctx, program("churn"))
		cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr())
		when := make(chan time.Time, 1)
		go func() {
			time.Sleep(400 * time.Millisecond)
			when <- time.Now()
			if killed {
				for _, pid := range w.sessions() {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
				return
			}
			c.cutAll(true)
		}()
		r := finish(t, ctx, cmd)
		cancel()
		lost := <-when
		took := time.Since(lost)
		most, says := 2*time.Second, "could not be made again within 1.0s"
		if killed {
			most, says = time.Second, "the session has ended"
		}
		if r.status == 0 || took > most || !killed && took < time.Second || !strings.Contains(r.stderr, says) {
			t.Errorf("session killed %v: status %d after %v: %s", killed, r.status, took, r.stderr)
		}
		if used := w.settled(lost.Add(2 * time.Second)); used != 0 {
			t.Errorf("%d bytes are in use", used)
		}
		if why := "the client did not come back within 1s"; !killed && strings.Count(w.log.String(), why) != 1 {
			t.Errorf("the worker does not say once that %s", why)
		}
		c.close()
	}
}

// TestCutsAndKills kills, among cuts, now the program and now its session, at any moment: also while a connection is being made again. The
// session of a dead program ends with its grace, a program whose session is dead is told so, nothing stays in use, and the worker
// serves others as before. SLUICE_CUTS sets how many are killed, one for every ten cuts.
func TestCutsAndKills(t *testing.T) {
	kills := 4
	if n, err := strconv.Atoi(os.Getenv("SLUICE_CUTS")); err == nil {
		kills = max(1, n/10)
	}
	w := startWorker(t, workerOptions{args: []string{"--grace", "1s"}})
	ended := func() bool { return len(w.sessions()) == 0 }
	var cuts, early int64
	for seed := range kills {
		rnd := rand.New(rand.NewPCG(uint64(seed), 19))
		c := newCutter(t, w, uint64(seed), 1000, 1<<(9+rnd.IntN(12)), 0)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := w.direct(ctx, program("paused"), fmt.Sprint(seed), "100000")
		cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr())
		var stdout, stderr lockedBuffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		var pids []int // known from now on: a session without a connection is not among w.sessions
		waitFor(t, 30*time.Second, "a session", func() bool {
			pids = w.sessions()
			return len(pids) > 0 || len(done) > 0
		})
		time.Sleep(time.Duration(rnd.IntN(500)) * time.Millisecond)
		victim := "session"
		if seed%2 == 0 {
			victim = "program"
			_ = cmd.Process.Kill()
		} else {
			for _, pid := range pids {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		err := <-done
		switch killed := cmd.ProcessState.ExitCode() == -1; {
		case ctx.Err() != nil:
			t.Errorf("seed %d: the %s was killed, and the program has not ended: %s%s", seed, victim, stdout.String(), stderr.String())
		case err == nil:
			t.Errorf("seed %d: the %s was killed, and the program has ended well: %s", seed, victim, stdout.String())
		case victim == "session" && stderr.String() == "":
			t.Errorf("seed %d: the session was killed, and the program says nothing: %v", seed, err)
		case victim == "program" && !killed:
			early++ // a busy machine needed longer than the grace to make a connection again
		}
		cancel()
		waitFor(t, 30*time.Second, "the session has ended", ended)
		if used := w.settled(time.Now().Add(30 * time.Second)); used != 0 {
			t.Errorf("seed %d: the %s was killed, and %d bytes are in use", seed, victim, used)
		}
		cuts += c.cuts.Load()
		c.close()
		if t.Failed() {
			return
		}
	}
	w.healthy()
	t.Logf("%d killed among %d cuts, %d of them after the grace", kills, cuts, early)
}
