package shares

import (
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// find gives the process of a tenant's session, which the trace names; 0: it is gone.
func (w *world) find(n *tenant) int {
	w.t.Helper()
	w.trace.read()
	for i := len(w.trace.spans) - 1; i >= 0; i-- {
		if s := w.trace.spans[i]; s.tag == n.tag {
			return w.watch.outer(s.pid)
		}
	}
	return 0
}

// session is find for one that is there; the trace may not show it yet.
func (w *world) session(n *tenant) (pid int) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("tenant %d has a session", n.tag), func() error {
		if pid = w.find(n); pid == 0 {
			return fmt.Errorf("it has none")
		}
		return nil
	})
	return pid
}

func (w *world) signal(pid int, sig syscall.Signal) {
	w.t.Helper()
	if err := syscall.Kill(pid, sig); err != nil && err != syscall.ESRCH {
		w.t.Fatal(err)
	}
}

// stop stops a tenant's session. No real GPU stands still because a process was stopped in the middle of an instruction
// of its driver's, but the simulated one does if that holds its lock: then another moment is tried.
func (w *world) stop(n *tenant) int {
	w.t.Helper()
	pid := w.session(n)
	for range 100 {
		w.signal(pid, syscall.SIGSTOP)
		for deadline, from := time.Now().Add(2*time.Second), w.trace.now(); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if w.trace.now() > from+100*time.Millisecond {
				return pid
			}
		}
		w.signal(pid, syscall.SIGCONT)
		w.run(time.Millisecond)
	}
	w.t.Fatal("the GPU stands still whenever that session is stopped")
	return 0
}

// turn is how long a tenant's newest turn lasted as far as the trace tells: until it ended, or is read now.
func (w *world) turn(n *tenant) time.Duration {
	w.trace.read()
	i := len(w.trace.spans) - 1
	for ; i >= 0 && w.trace.spans[i].tag != n.tag; i-- {
	}
	if i < 0 {
		return 0
	}
	end := w.trace.spans[i].end
	begin := end
	for ; i >= 0 && w.trace.spans[i].tag == n.tag; i-- {
		begin = w.trace.spans[i].start
	}
	return end - begin
}

// inTurn waits until a tenant has begun a turn not long ago.
func (w *world) inTurn(n *tenant) {
	w.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		w.trace.read()
		if last := len(w.trace.spans) - 1; w.trace.spans[last].tag == n.tag && w.turn(n) < quantum/4 {
			return
		}
	}
	w.t.Fatalf("tenant %d has no turn within 30 s", n.tag)
}

// counters are a tenant's, as sluice list tells them.
func (w *world) counters(n *tenant) counters {
	w.t.Helper()
	for _, l := range w.leases() {
		if l.ID == n.lease && len(l.Shares) == 1 {
			return l.Shares[0]
		}
	}
	w.t.Fatalf("sluice list shows no counters of lease %s", n.lease)
	return counters{}
}

// empty waits until the GPU's schedule has no tenants and no members.
func (w *world) empty() {
	w.t.Helper()
	dir := w.owner.Node.Path("/run/sluice/turns")
	schedules, err := filepath.Glob(filepath.Join(dir, "*.state"))
	if err != nil || len(schedules) != 1 {
		w.t.Fatalf("%s has the schedules %v (%v)", dir, schedules, err)
	}
	b, err := turns.Create(dir, strings.TrimSuffix(filepath.Base(schedules[0]), ".state"), turns.Site{})
	if err != nil {
		w.t.Fatal(err)
	}
	defer b.Close()
	w.eventually("the schedule is empty", func() error {
		if left, members := b.Read(), b.Members(); len(left) > 0 || members > 0 {
			return fmt.Errorf("%d members and %+v", members, left)
		}
		return nil
	})
}
