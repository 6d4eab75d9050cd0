package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// TestResumeOtherOwnerLost: a program has two owners, and both connections are lost. One owner's session is found to have ended while the
// connection to the other owner is being made again, which succeeds afterwards. The call that waits for the other owner ends.
func TestResumeOtherOwnerLost(t *testing.T) {
	options := workerOptions{args: []string{"--grace", "60s"}}
	w0, w1 := startWorker(t, options), startWorker(t, options)
	c0, c1 := newCutter(t, w0, 0, 0, 1, 0), newCutter(t, w1, 0, 0, 1, 0)
	held, ended := make(chan struct{}), make(chan struct{})
	var once sync.Once
	c0.attach = func() {
		once.Do(func() { close(held) })
		<-ended
	}
	end := sync.OnceFunc(func() { close(ended) })
	defer end()
	cmd := w0.direct(context.Background(), built("test/agent"))
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c0.addr()+","+c1.addr())
	a := startAgentAs(t, cmd)
	a.must("mem %d", 1<<20)
	a.must("set 0 %d", 77)
	c0.cutAll(true)
	c1.cutAll(true)
	for _, pid := range w1.sessions() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	fmt.Fprintln(a.in, "get 0")
	c0.cutAll(false)
	<-held
	c1.cutAll(false)
	waitFor(t, 10*time.Second, "the session has ended", func() bool { return strings.Contains(a.stderr.String(), "session with the worker ended") })
	end()
	answer := make(chan string, 1)
	go func() {
		line, err := a.out.ReadString('\n')
		answer <- fmt.Sprint(line, err)
	}()
	select {
	case got := <-answer:
		if strings.HasPrefix(got, "0 ") {
			t.Errorf("a call after the end: %s", got)
		}
	case <-time.After(10 * time.Second):
		t.Errorf("a call waits for ever: %s", a.stderr.String())
	}
}

// TestResumeGraceOfLease: a program that comes by a lease's socket gives up within a second of the grace's end, whatever its node's daemon does.
func TestResumeGraceOfLease(t *testing.T) {
	for _, mood := range []string{"away", "busy", "silent"} {
		t.Run(mood, func(t *testing.T) {
			t.Parallel()
			w := startWorker(t, workerOptions{args: []string{"--grace", "1s"}})
			c := newCutter(t, w, 0, 0, 1, 0)
			behind := *w
			behind.addr = c.addr()
			dir, err := os.MkdirTemp("", "e2e")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			s := &leaseSocket{t: t, path: filepath.Join(dir, "sock"), workers: []*worker{&behind}}
			s.listen()
			t.Cleanup(s.close)
			when := make(chan time.Time, 1)
			go func() {
				defer close(when)
				waitFor(t, 30*time.Second, "memory of the program's", func() bool { return w.used() > 0 })
				if mood == "away" {
					s.close()
				}
				s.mu.Lock()
				s.mood = mood
				s.mu.Unlock()
				when <- time.Now()
				c.cutAll(true)
			}()
			r := s.run(program("churn"))
			// A second after the grace, and what a busy machine makes of it; the faults that this looks for took five.
			if took := time.Since(<-when); r.status == 0 || took < time.Second || took > 3500*time.Millisecond || !strings.Contains(r.stderr, "could not be made again within 1.0s") {
				t.Errorf("status %d %v after the cut: %s", r.status, took, r.stderr)
			}
		})
	}
}

// TestFirstCut: a connection that is lost before its WELCOME is whole is made anew, also if the worker has begun a session. That session does
// not wait for as long as one whose client may come back.
func TestFirstCut(t *testing.T) {
	for _, most := range []int{0, 200, 1 << 20} { // none of the WELCOME, a part of it, all but the end
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			t.Parallel()
			w := startWorker(t, workerOptions{args: []string{"--grace", "60s"}, keepalive: time.Second})
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go cutFirst(l, strings.TrimPrefix(w.addr, "tcp:"), most)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			cmd := w.direct(ctx, program("vecadd"))
			cmd.Env = append(cmd.Env, "SLUICE_WORKER=tcp:"+l.Addr().String())
			check(t, finish(t, ctx, cmd), "vecadd: n=1048576 sum=1337185854\nPASS\n")
			waitFor(t, 10*time.Second, "no session is left", func() bool { return len(w.sessions()) == 0 })
		})
	}
}

// cutFirst passes connections on, and closes the first once so many bytes, or all but the last of its WELCOME and RESUMABLE, have come back.
func cutFirst(l net.Listener, to string, most int) {
	for first := true; ; first = false {
		c, err := l.Accept()
		if err != nil {
			return
		}
		s, err := net.Dial("tcp", to)
		if err != nil {
			c.Close()
			return
		}
		go func() {
			_, _ = io.Copy(s, c)
			s.Close()
		}()
		go func() {
			defer c.Close()
			defer s.Close()
			if !first {
				_, _ = io.Copy(c, s)
				return
			}
			var b bytes.Buffer
			_, _ = wire.ReadWelcome(io.TeeReader(s, &b))
			_, _ = io.CopyN(&b, s, wire.ResumableSize)
			_, _ = c.Write(b.Bytes()[:max(0, min(most, b.Len()-1))])
		}()
	}
}

// TestFirstOfTwo: a program that cannot reach one of its owners fails, and leaves no session at the other.
func TestFirstOfTwo(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--grace", "60s"}})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.direct(ctx, program("vecadd"))
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+w.addr+",tcp:127.0.0.1:1")
	if r := finish(t, ctx, cmd); r.status == 0 || !strings.Contains(r.stderr, "worker tcp:127.0.0.1:1: Connection refused") {
		t.Errorf("status %d: %s", r.status, r.stderr)
	}
	waitFor(t, 5*time.Second, "no session is left", func() bool { return len(w.sessions()) == 0 })
}
