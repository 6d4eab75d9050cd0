package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// bulked is what a program has written to SLUICE_STATS of its bulk connections.
type bulked struct {
	Out int64 `json:"bulk_out"`
	In  int64 `json:"bulk_in"`
}

// bulk runs test/cuda/bulk.c, which compares all bytes, with so many bulk connections.
func bulk(t *testing.T, w *worker, env []string, args ...string) (s bulked) {
	t.Helper()
	stats := filepath.Join(t.TempDir(), "stats")
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := w.direct(ctx, built("test/bulk"), args...)
	cmd.Env = append(append(cmd.Env, "SLUICE_STATS="+stats), env...)
	if r := finish(t, ctx, cmd); r.status != 0 || r.stdout != "PASS\n" {
		t.Fatalf("bulk %v, %v: status %d\nstdout: %s\nstderr: %s", args, env, r.status, r.stdout, tail(r.stderr, 20))
	}
	readStats(t, stats, &s)
	return s
}

// Large copies go by bulk connections where both sides allow them, and arrive byte by byte either way.
func TestBulk(t *testing.T) {
	for _, c := range []struct {
		name    string
		network string
		race    bool
		args    []string
		env     []string
		some    bool
	}{
		{name: "three", env: []string{"SLUICE_BULK=3"}, some: true},
		{name: "one, under the race detector", race: true, env: []string{"SLUICE_BULK=1"}, some: true},
		{name: "as many as may be, and as can be resumed", args: []string{"--grace", "30s"}, env: []string{"SLUICE_BULK=16"}, some: true},
		{name: "more than the worker allows", args: []string{"--bulk", "2"}, env: []string{"SLUICE_BULK=5"}, some: true},
		{name: "none of the worker", args: []string{"--bulk", "0"}, env: []string{"SLUICE_BULK=3"}},
		{name: "none of the program", env: []string{"SLUICE_BULK=0"}},
		{name: "shared memory", network: "unix", env: []string{"SLUICE_BULK=3"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := startWorker(t, workerOptions{network: c.network, race: c.race, args: c.args})
			s := bulk(t, w, c.env, "3")
			t.Logf("%+v", s)
			if c.some && (s.Out < 100<<20 || s.In < 100<<20) || !c.some && (s.Out != 0 || s.In != 0) {
				t.Errorf("%+v went by bulk connections", s)
			}
			w.healthy()
		})
	}
}

// The connections are asked for over the lease's socket where there is one.
func TestBulkLeaseSocket(t *testing.T) {
	w := startWorker(t, workerOptions{})
	dir, err := os.MkdirTemp("", "e2e")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l := &leaseSocket{t: t, path: filepath.Join(dir, "sock"), workers: []*worker{w}}
	l.listen()
	t.Cleanup(l.close)
	s := bulk(t, w, []string{"SLUICE_BULK=2", "SLUICE_WORKER=", "SLUICE_SOCKET=" + l.path}, "2")
	if s.Out == 0 || s.In == 0 {
		t.Errorf("%+v went by bulk connections", s)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	of := map[uint32]int{}
	for _, r := range l.asked {
		of[r.kind&0xff]++
	}
	if of[wire.SessionCompute] != 1 || of[wire.SessionBulk] < 4 {
		t.Errorf("asked for %v", of)
	}
}

// TestBulkCuts cuts bulk connections at random bytes in either direction, some of them silently, and in the second half of the runs the
// sessions' own as well. Every copy is right all the same.
func TestBulkCuts(t *testing.T) {
	var cuts, bulks int64
	w := startWorker(t, workerOptions{args: []string{"--grace", "30s"}, race: true, keepalive: time.Second})
	for seed := range uint64(10) {
		c := newCutter(t, w, seed, 1000, 16<<20, 4)
		only := seed < 5
		c.cutBulk(only)
		r := func() result {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			cmd := w.direct(ctx, built("test/bulk"), "2", fmt.Sprint(12+seed))
			cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr(), "SLUICE_BULK=3")
			return finish(t, ctx, cmd)
		}()
		cuts += c.cuts.Load()
		bulks += c.bulks.Load()
		c.close()
		if r.status != 0 || r.stdout != "PASS\n" || only && r.stderr != "" {
			t.Fatalf("seed %d: status %d: %s\n%s", seed, r.status, r.stdout, tail(r.stderr, 20))
		}
		waitFor(t, 40*time.Second, "the session has ended", func() bool { return len(w.sessions()) == 0 })
	}
	t.Logf("%d cuts, %d bulk connections", cuts, bulks)
	if cuts < 32 {
		t.Errorf("%d cuts of %d bulk connections", cuts, bulks)
	}
	w.healthy()
}

// endsWithin runs a program that makes the file that BEGUN names, and kills the worker's sessions so long after it has.
func (w *worker) endsWithin(ctx context.Context, cmd *exec.Cmd, after time.Duration) result {
	w.t.Helper()
	begun := filepath.Join(w.t.TempDir(), "begun")
	cmd.Env = append(cmd.Env, "BEGUN="+begun)
	ended, killed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(killed)
		for {
			if _, err := os.Stat(begun); err == nil {
				break
			}
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
		time.Sleep(after)
		for _, pid := range w.sessions() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}()
	r := finish(w.t, ctx, cmd)
	close(ended)
	<-killed
	return r
}

// The worker ends in the middle of copies: the program hears of it, and ends.
func TestBulkWorkerEnds(t *testing.T) {
	for i := range 8 {
		w := newWorker(t, workerOptions{keepalive: 2 * time.Second})
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := w.direct(ctx, built("test/bulk"), "1000")
		cmd.Env = append(cmd.Env, "SLUICE_BULK=3")
		r := w.endsWithin(ctx, cmd, time.Duration(i)*17*time.Millisecond)
		cancel()
		if r.status != 1 || !strings.Contains(r.stderr, "session with the worker ended") {
			t.Errorf("status %d: %s%s", r.status, r.stdout, r.stderr)
		}
		w.stop()
	}
}
