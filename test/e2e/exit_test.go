package e2e

import (
	"syscall"
	"testing"
	"time"
)

// leave ends an agent by the end of its input, and returns how long that took.
func (a *agent) leave() time.Duration {
	a.t.Helper()
	_ = a.in.Close()
	begun := time.Now()
	if err := a.cmd.Wait(); err != nil {
		a.t.Errorf("an agent's end: %v: %s", err, a.stderr.String())
	}
	return time.Since(begun)
}

// exitWait is how long a program waits for the end of its session.
const exitWait = 500 * time.Millisecond

// TestMemoryIsFreeAtExit: what a program has allocated is free for others of its lease when its parent hears of its end.
func TestMemoryIsFreeAtExit(t *testing.T) {
	for _, c := range []struct {
		name string
		o    workerOptions
		runs int
	}{
		{"tcp", workerOptions{}, 50},
		{"a connection that may be lost", workerOptions{args: []string{"--grace", "30s"}}, 50},
		{"shared memory", workerOptions{network: "unix"}, 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := startWorker(t, c.o)
			watcher := startAgent(t, w)
			before, _ := watcher.info()
			equal := 0
			for range c.runs {
				a := startAgent(t, w)
				a.must("mem %d", 64<<20)
				if free, _ := watcher.info(); free > before-64<<20 {
					t.Fatalf("%d bytes are free, and were %d", free, before)
				}
				took := a.leave()
				if free, _ := watcher.info(); free == before || took >= exitWait { // on a busy machine the session's end may take longer
					equal++
				}
			}
			if equal < c.runs {
				t.Errorf("after %d of %d ends the free memory was what it had been", equal, c.runs)
			}
		})
	}
}

// TestExitOfStopped: a program ends although its worker is stopped and does not end its connection.
func TestExitOfStopped(t *testing.T) {
	for name, o := range map[string]workerOptions{"tcp": {}, "grace": {args: []string{"--grace", "30s"}}, "unix": {network: "unix"}} {
		t.Run(name, func(t *testing.T) {
			w := startWorker(t, o)
			a := startAgent(t, w)
			a.must("mem %d", 64<<20)
			for _, pid := range w.sessions() {
				if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
			}
			if d := a.leave(); d > 5*time.Second {
				t.Errorf("it took %v", d)
			}
		})
	}
}
