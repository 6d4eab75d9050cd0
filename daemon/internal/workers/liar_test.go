package workers

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

// TestLiarEndsNobody: what a session that was taken over writes into a GPU's schedule about another lease's session has that one neither
// told of nor ended, and adds nothing to what its lease owes; for the next daemon neither.
func TestLiarEndsNobody(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	sharing := Sharing{Limit: time.Second, Overrun: turns.OverrunEnds}
	p.OnEnd(func(lease.Session, string) {})
	p.SetSharing(sharing)
	victim, other := testLease("a", 0), testLease("b", 0)
	for _, l := range []lease.Lease{victim, other} {
		if err := p.Share(l); err != nil {
			t.Fatal(err)
		}
	}
	c, s := open(t, p, 1)
	defer c.Close()
	waitFor(t, "a member", func() bool { at, _ := p.tenantOf(0, victim.ID); return at.Members == 1 })
	p.join(t, 0, other.ID).Request() // so that work which is overdue harms somebody

	liar := turnstest.NewLiar(t, p.schedules[simUUID(0)])
	n := liar.TenantOf(victim.ID)
	lie := func() {
		now := turns.Monotonic{}.Now()
		for _, i := range liar.MembersOf(n) {
			liar.Member(i, turnstest.MemberOverdue).Store(uint64(now - int64(time.Minute)))
			liar.Member(i, turnstest.MemberSeen).Store(uint64(now))
		}
		liar.Tenant(n, turnstest.TenantDebt).Store(liar.Debt(n, now+int64(24*time.Hour)))
	}
	look := func(p *Pool) {
		t.Helper()
		for i := range 8 {
			lie()
			if o := p.overruns(time.Now().Add(time.Duration(i) * time.Second)); len(o) != 0 {
				t.Errorf("told %+v", o)
			}
			if at, _ := p.tenantOf(0, victim.ID); at.Owes != 0 {
				t.Errorf("it owes %v", at.Owes)
			}
		}
		if p.gone(s) {
			t.Error("its session has ended")
		}
	}
	look(p)
	p.Close()
	q := newPool(t, dir, func(c *Config) { c.Sharing = sharing })
	q.OnEnd(func(lease.Session, string) {})
	look(q)

	// What the session says itself is believed: the daemon ends it.
	q.mu.Lock()
	var slot int
	for at := range q.leases[victim.ID].sessions {
		slot = at.slot
	}
	q.mu.Unlock()
	if q.leases[victim.ID].file.DeniesOverdue(slot, 0) != true {
		t.Error("an idle session says that its work is overdue")
	}
	// The account of a release that keeps no debts there denies nothing.
	f, err := os.OpenFile(filepath.Join(q.cfg.Dir, victim.ID, accountName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(make([]byte, 8), 416); err != nil {
		t.Fatal(err)
	}
	ended := false
	for i := range 8 {
		lie()
		for _, o := range q.overruns(time.Now().Add(time.Duration(i) * time.Second)) {
			ended = ended || o.Ended && o.PID == s.Worker.PID
		}
	}
	if !ended {
		t.Error("a session of another release is not ended for its overdue work")
	}
	waitFor(t, "its end", func() bool { return q.gone(s) })
}

// TestDelayedIsNotOverdue: time in which other work delayed overdue work does not count towards the limit that ends its session, and a session
// does not escape that limit by saying now and then that its work is delayed.
func TestDelayedIsNotOverdue(t *testing.T) {
	const limit = time.Second
	now := time.Unix(1000, 0)
	p := &Pool{overdue: map[overrunKey]overdueWork{}}
	p.sharing.Limit = limit
	begun := now
	see := func(after time.Duration, delayed bool) []Overrun {
		now = now.Add(after)
		still := map[overrunKey]overdueWork{}
		c := turns.TenantCounters{Lease: "lease", Ends: !delayed}
		found := p.judge(still, now, "gpu", &c, turns.Overdue{PID: 7, Time: now.Sub(begun)}, delayed)
		p.overdue = still
		return found
	}
	for range 14 {
		if found := see(limit/10, true); len(found) != 0 {
			t.Fatalf("delayed for %v: %+v", now.Sub(begun), found)
		}
	}
	for range 10 {
		if found := see(limit/10, false); len(found) != 0 {
			t.Fatalf("delayed for 1.4 limits, and then overdue until %v: %+v", now.Sub(begun), found)
		}
	}
	see(limit/10, true)
	see(limit/10, false)
	if found := see(limit/10, false); len(found) != 1 || found[0].Time < limit {
		t.Fatalf("overdue for more than a limit: %+v", found)
	}
	if found := see(limit/10, false); len(found) != 0 {
		t.Errorf("found again: %+v", found)
	}
	// Delayed for more than three limits in all.
	for range 30 {
		if found := see(limit/10, true); len(found) != 0 {
			t.Errorf("it was found before: %+v", found)
		}
	}
	p.overdue, begun = map[overrunKey]overdueWork{}, now
	n := 0
	for range 40 {
		n += len(see(limit/10, true))
	}
	if n != 1 {
		t.Errorf("work that is delayed for 4 limits is found %d times", n)
	}
}
