package shares

import (
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

// board opens the GPU's schedule as a session that was taken over has it. The lease that is neither the liar's nor the victim's is the thief's.
func (w *world) board(liar, victim *tenant) *turnstest.Board {
	w.t.Helper()
	l, err := turnstest.OpenLiar(w.owner.Node.Path("/run/sluice/turns"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(l.Close)
	thief := ""
	for _, known := range w.leases() {
		if known.ID != liar.lease && known.ID != victim.lease {
			thief = known.ID
		}
	}
	b, err := turnstest.NewBoard(l, liar.lease, thief, victim.lease)
	if err != nil {
		w.t.Fatal(err)
	}
	return b
}

// TestLiar: whatever a session that was taken over writes into the GPU's schedule, programs of a lease of 10 % that leave work on the GPU get
// 11 % of it at most in the 10 s after their first overrun, the honest lease has 0.95 of its share, and neither its program nor its session
// ends. When the liar has gone that lease has all of its share, and nothing of the lie is left.
func TestLiar(t *testing.T) {
	w := newWorld(t)
	for _, l := range turnstest.Lies {
		t.Run(l.Name, func(t *testing.T) {
			w.t = t
			// A lie that works does so in every round. On a machine with much else to do the simulated clock goes on while a session
			// waits for a processor, and one round in twenty misses the bars without any lie.
			const most, enough = 11, 0.95 * 85
			got, left, after := 100.0, 0.0, 0.0
			for round := 0; round < 4 && (got > most || left < enough || after < 85-offWindow) && !t.Failed(); round++ {
				got, left, after = w.lied(&l)
			}
			if after < 85-offWindow {
				t.Errorf("without the liar the victim of 85 %% had %.2f %%", after)
			}
			if got > most || left < enough {
				t.Errorf("the thieves of 10 %% had %.2f %%, the victim of 85 %% had %.2f %%", got, left)
			}
			if !w.audited(`"overrun"`, "shares.overrun.limit is 1s") {
				t.Error("the audit log has no overrun")
			}
		})
	}
	w.t = t
	w.empty()
}

// lied has a lie told while programs of a lease of 10 % leave work on the GPU, and returns what these and an honest lease of 85 % had in the
// 10 s from the first overrun on, in percent, and what the honest lease had after the liar's end.
func (w *world) lied(l *turnstest.Lie) (got, left, after float64) {
	w.t.Helper()
	both := w.start(share{85, "fixed", "gemm"}, share{5, "fixed", "none"})
	victim, liar := both[0], both[1]
	session := w.session(victim)
	_, from := w.run(settle)
	thieves := w.crew("endless", 1)
	b := w.board(liar, victim)
	stop := sync.OnceFunc(l.Told(b))
	w.t.Cleanup(stop) // before the board is unmapped
	from = thieves.overran(from)
	to := from + 10*time.Second
	w.reach(to)
	got = 100 * float64(thieves.busy(from, to)) / float64(to-from)
	left = w.trace.part(victim.tag, from, to)
	w.t.Logf("the thieves had %.2f %%, the victim %.2f %%", got, left)
	stop()
	thieves.end()
	liar.end(syscall.SIGKILL)
	w.run(settle)
	from, to = w.run(window)
	after = w.trace.part(victim.tag, from, to)
	w.t.Logf("without the liar the victim of 85 %% had %.2f %%", after)
	if now := w.session(victim); now != session || victim.proc.Ended() {
		w.t.Errorf("the victim's session was %d and is %d", session, now)
	}
	if w.audited(`"overrun"`, victim.lease) {
		w.t.Error("an overrun of the victim's is in the audit log")
	}
	w.endAll(both[:1])
	w.eventually("nothing of the lie is left", func() error {
		if n := b.Members(); n > 0 {
			return fmt.Errorf("%d members", n)
		}
		return nil
	})
	return got, left, after
}

// TestHonestDebts: a long kernel of an honest lease, beside another lease that always has work, is charged for all of its time and for no more: the
// lease's next kernel begins when its share has paid for the first. Nobody ends for it.
func TestHonestDebts(t *testing.T) {
	w := newWorld(t)
	for _, percent := range []int{30, 10} {
		both := w.start(share{60, "fixed", "gemm"}, share{percent, "fixed", "none"})
		busy, long := both[0], both[1]
		w.run(settle)
		said := w.trace.now()
		long.tell("once 300000000")
		long.expect("once", 1)
		long.tell("once 1000000")
		long.expect("once", 2)
		w.run(quantum)
		spans := slices.DeleteFunc(slices.Clone(w.trace.within(said, w.trace.now())), func(s span) bool { return s.tag != long.tag })
		begin := spans[0].start
		var end, next time.Duration
		for sum, i := time.Duration(0), 0; i < len(spans) && next == 0; i++ {
			if sum += spans[i].busy; end == 0 && sum >= 299*time.Millisecond {
				end = spans[i].end
			} else if end != 0 {
				next = spans[i].start
			}
		}
		if end == 0 || next == 0 {
			t.Fatalf("%d %%: it ended at %v, and the next began at %v", percent, end, next)
		}
		owed, paid := (end-begin)*100/time.Duration(percent), next-begin
		t.Logf("%d %%: a kernel of 300ms took %v, the next one began %v after it began, and %v are due", percent, end-begin, paid, owed)
		if off := (paid - owed).Abs(); off > owed/10 {
			t.Errorf("%d %%: it paid for %v, want %v", percent, paid, owed)
		}
		if left := w.trace.part(busy.tag, begin, next); left < 0.95*60 {
			t.Errorf("the other lease of 60 %% had %.2f %%", left)
		}
		if w.audited(`"overrun"`) {
			t.Error("an overrun is in the audit log")
		}
		w.endAll(both)
	}
}

// reach waits until the GPU's clock has come to a time.
func (w *world) reach(to time.Duration) {
	w.t.Helper()
	for w.trace.now() < to {
		w.run(min(time.Second, to-w.trace.now()))
	}
}
