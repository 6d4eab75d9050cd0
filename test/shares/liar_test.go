package shares

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

// board is a GPU's schedule as a session that was taken over has it, and who is on it.
type board struct {
	*turnstest.Liar
	liar, thief, victim int // tenants
}

// board opens the schedule. The lease that is neither the liar's nor the victim's is the thief's.
func (w *world) board(liar, victim *tenant) *board {
	w.t.Helper()
	dir := w.owner.Node.Path("/run/sluice/turns")
	files, err := filepath.Glob(filepath.Join(dir, "*.state"))
	if err != nil || len(files) != 1 {
		w.t.Fatalf("%s has the schedules %v (%v)", dir, files, err)
	}
	state, err := os.OpenFile(files[0], os.O_RDWR, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	defer state.Close()
	policy, err := os.Open(files[0][:len(files[0])-len("state")] + "policy")
	if err != nil {
		w.t.Fatal(err)
	}
	defer policy.Close()
	b := &board{Liar: turnstest.MapLiar(w.t, policy, state), liar: -1, thief: -1, victim: -1}
	for _, l := range w.leases() {
		switch n := b.TenantOf(l.ID); l.ID {
		case liar.lease:
			b.liar = n
		case victim.lease:
			b.victim = n
		default:
			b.thief = n
		}
	}
	if b.liar < 0 || b.thief < 0 || b.victim < 0 {
		w.t.Fatalf("tenants %d, %d and %d, of leases %s, %s and %+v", b.liar, b.victim, b.thief, liar.lease, victim.lease, w.leases())
	}
	return b
}

func (b *board) now() int64 { return int64(b.Head(turnstest.StateNow).Load()) }

// late says that work of a tenant's members is late since a time.
func (b *board) late(tenant int, since int64) {
	for _, i := range b.MembersOf(tenant) {
		b.Member(i, turnstest.MemberOverdue).Store(uint64(since))
		b.Member(i, turnstest.MemberSeen).Store(uint64(b.now()))
	}
}

// A lie is what a session that was taken over writes into the schedule.
type lie struct {
	name  string
	again bool // every 200 us; otherwise once a second of the GPU's clock
	tell  func(b *board)
}

var lies = []lie{
	{"nothing", false, func(*board) {}},
	{"its own work is late, for ever", true, func(b *board) { b.late(b.liar, 1) }},
	{"its own work is late, for a while", true, func(b *board) { b.late(b.liar, b.now()-int64(1500*time.Millisecond)) }},
	{"the victim's work is late, for ever", true, func(b *board) { b.late(b.victim, 1) }},
	{"the victim's work is late, for a while", true, func(b *board) { b.late(b.victim, b.now()-int64(1500*time.Millisecond)) }},
	{"the thief's work is not late", true, func(b *board) { b.late(b.thief, 0) }},
	{"the thief owes nothing", true, func(b *board) {
		b.Tenant(b.thief, turnstest.TenantDebt).Store(0)
		b.Tenant(b.thief, turnstest.TenantDebited).Store(uint64(b.now()))
	}},
	{"the victim owes a day", false, func(b *board) {
		b.Tenant(b.victim, turnstest.TenantDebt).Store(b.Debt(b.victim, b.now()+int64(24*time.Hour)))
	}},
	{"it owes a day itself", true, func(b *board) {
		b.Tenant(b.liar, turnstest.TenantDebt).Store(b.Debt(b.liar, b.now()+int64(24*time.Hour)))
	}},
	{"the victim's session is nobody's", false, func(b *board) {
		for _, i := range b.MembersOf(b.victim) {
			b.Member(i, turnstest.MemberOwner).Store(0)
		}
	}},
	{"the victim's session is another process", false, func(b *board) {
		for _, i := range b.MembersOf(b.victim) {
			b.Member(i, turnstest.MemberOwner).Store(1)
		}
	}},
	{"the victim's session is another lease's", false, func(b *board) {
		for _, i := range b.MembersOf(b.victim) {
			b.Member(i, turnstest.MemberTenant).Store(b.Belongs(b.liar))
		}
	}},
	{"there are no sessions", false, func(b *board) { b.Head(turnstest.StateHigh).Store(0) }},
	{"this is no schedule", false, func(b *board) {
		b.Head(turnstest.StateMagic).Store(0)
		b.Head(turnstest.StateVersion).Store(0)
	}},
	{"the victim has a session that does not exist", false, func(b *board) {
		i := b.Free()
		b.Member(i, turnstest.MemberTenant).Store(b.Belongs(b.victim))
		b.Member(i, turnstest.MemberWant).Store(1)
		b.Member(i, turnstest.MemberOwner).Store(1)
		b.Head(turnstest.StateHigh).Store(uint64(max(i+1, int(b.Head(turnstest.StateHigh).Load()))))
	}},
}

// told tells a lie until the function that it returns is called.
func (l *lie) told(b *board) (stop func()) {
	over, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for last := int64(0); ; {
			if now := b.now(); l.again || now-last >= int64(time.Second) {
				l.tell(b)
				last = now
			}
			select {
			case <-over:
				return
			case <-time.After(200 * time.Microsecond):
			}
		}
	}()
	return func() { close(over); <-done }
}

// TestLiar: whatever a session that was taken over writes into the GPU's schedule, programs of a lease of 10 % that leave work on the GPU get
// 11 % of it at most in the 10 s after their first overrun, the honest lease has 0.95 of its share, and neither its program nor its session
// ends. When the liar has gone that lease has all of its share, and nothing of the lie is left.
func TestLiar(t *testing.T) {
	w := newWorld(t)
	for _, l := range lies {
		t.Run(l.name, func(t *testing.T) {
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
func (w *world) lied(l *lie) (got, left, after float64) {
	w.t.Helper()
	both := w.start(share{85, "fixed", "gemm"}, share{5, "fixed", "none"})
	victim, liar := both[0], both[1]
	session := w.session(victim)
	_, from := w.run(settle)
	thieves := w.crew("endless", 1)
	b := w.board(liar, victim)
	stop := sync.OnceFunc(l.told(b))
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
