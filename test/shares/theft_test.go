package shares

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
)

// TestObserveTheft: a client that asks for a session of kind observe, which takes no turns, and computes in it gets nothing
// of the GPU, and the tenant beside it keeps its share.
func TestObserveTheft(t *testing.T) {
	w := newWorld(t)
	victim := w.start(share{90, "fixed", "gemm"})
	w.run(settle)

	const tag = 900
	out := filepath.Join(w.host.Node.Dir, "thief.out")
	c := w.host.Run(user+tag, "--fraction", "10", "--policy", "fixed", "--",
		"env", "LD_PRELOAD="+w.s.Opt("kind2.so"), w.s.Opt("tenant"), "gemm", fmt.Sprint(tag))
	c.Stdout, c.Stderr = out, out
	from := w.trace.now()
	thief, err := w.host.Node.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_ = thief.Wait(ctx) // with an error of the program's
	if !thief.Ended() {
		t.Fatal("the thief goes on")
	}
	said := (&tenant{out: out}).said()
	if !strings.Contains(said, "CTX_ACTIVATE: not allowed in a session of kind observe") {
		t.Errorf("the thief was told %q", said)
	}
	_, to := w.run(windows * window)
	to = w.held(wants{victim[0]: 90}, from, to)
	if got := w.trace.part(tag, from, to); got > 0 {
		t.Errorf("the thief had %.2f %% of the GPU", got)
	}
	w.endAll(victim)
}

// crew is the programs of one lease of 10 percent. They begin together. A single one starts again whenever it ends.
type crew struct {
	w     *world
	proc  *node.Process
	first uint64 // their tags
	k     int
}

func (w *world) crew(load string, k int) *crew {
	w.t.Helper()
	c := &crew{w: w, first: w.names.Add(uint64(k)) - uint64(k) + 1, k: k}
	base := filepath.Join(w.host.Node.Dir, fmt.Sprintf("crew%d", c.first))
	if err := syscall.Mkfifo(base+".in", 0o644); err != nil {
		w.t.Fatal(err)
	}
	begin, err := os.OpenFile(base+".in", os.O_RDWR, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	defer begin.Close()
	script := ""
	for i := range k {
		run := fmt.Sprintf("%s %s %d", w.s.Opt("tenant"), load, c.first+uint64(i))
		script += run + " <&3 & "
		if k == 1 { // eight programs that start at once keep two processors busy for long
			script = fmt.Sprintf("(%s <&3; while :; do %s </dev/null; done) & ", run, run)
		}
	}
	cmd := w.host.Run(user+int(c.first), "--fraction", "10", "--policy", "fixed", "--", "sh", "-c", "exec 3<&0; "+script+"exec 3<&-; wait")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = base+".in", base+".out", base+".out"
	if c.proc, err = w.host.Node.Start(cmd); err != nil {
		w.t.Fatal(err)
	}
	w.eventually("all of the crew are ready", func() error {
		said, err := os.ReadFile(base + ".out")
		if n := strings.Count(string(said), "ready\n"); err != nil || n < k {
			return fmt.Errorf("%d are (%v)", n, err)
		}
		return nil
	})
	return c // where nobody holds the other end of their stdin any more
}

func (c *crew) busy(from, to time.Duration) (sum time.Duration) {
	for i := range c.k {
		sum += c.w.trace.busy(c.first+uint64(i), from, to)
	}
	return sum
}

// overran returns when the crew's work first outlasted a turn: it has had more of the GPU than a turn is long.
func (c *crew) overran(from time.Duration) time.Duration {
	c.w.t.Helper()
	at := from
	c.w.eventually("the crew's work outlasts a turn", func() error {
		for to := c.w.trace.now(); at < to; at += time.Millisecond {
			if c.busy(from, at) > quantum*9/8 {
				return nil
			}
		}
		return fmt.Errorf("it had %v", c.busy(from, at))
	})
	return at
}

func (c *crew) end() {
	c.w.t.Helper()
	(&tenant{w: c.w, tag: c.first, proc: c.proc, in: os.NewFile(^uintptr(0), "")}).end(syscall.SIGKILL)
}

// theft has k programs of a lease of 10 % do what load says beside a lease of 90 %, and returns what that one had of the 10 s from their first
// overrun on, in percent.
func (w *world) theft(load string, k int) (left float64) {
	w.t.Helper()
	victim := w.start(share{90, "fixed", "gemm"})[0]
	_, from := w.run(settle)
	thieves := w.crew(load, k)
	from = thieves.overran(from)
	const whole = 10 * time.Second
	to := from + whole
	for at := from; at < to; at += time.Second { // not all at once: nine processes take the simulated GPU long
		w.eventually("a second has passed", func() error {
			if now := w.trace.now(); now < at+time.Second {
				return fmt.Errorf("%v have", now-at)
			}
			return nil
		})
	}
	got := 100 * float64(thieves.busy(from, to)) / float64(whole)
	left = w.trace.part(victim.tag, from, to)
	w.t.Logf("the thieves had %.2f %%, the victim %.2f %%", got, left)
	if got > 11 {
		w.t.Errorf("the thieves of 10 %% had %.2f %%", got)
	}
	thieves.end()
	w.endAll([]*tenant{victim})
	return left
}

// TestTheft: whatever the programs of a lease of 10 % leave on the GPU beyond its turns, in the 10 s from the first such
// overrun on they get 11 % of it at most, and the lease beside it has 0.95 of its share.
func TestTheft(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		load string
		k    int
	}{{"endless", 1}, {"endless", 8}, {"queued", 1}, {"queued", 4}} {
		t.Run(fmt.Sprintf("%s %d", c.load, c.k), func(t *testing.T) {
			w.t = t
			// Every round bounds the thieves. The victim's part also depends on how soon nine processes end on this
			// machine, so a round in which it had too little is followed by another, up to four.
			const enough = 0.95 * 90
			left := 0.0
			for round := 0; round < 4 && left < enough && !t.Failed(); round++ {
				left = w.theft(c.load, c.k)
			}
			if left < enough {
				t.Errorf("the victim of 90 %% had %.2f %%", left)
			}
			if !w.audited(`"overrun"`, "shares.overrun.limit is 1s") {
				t.Error("the audit log has no overrun")
			}
		})
	}
}
