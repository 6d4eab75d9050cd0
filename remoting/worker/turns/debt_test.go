package turns

import (
	"testing"
	"time"
)

// overdueThieves makes two members of a tenant of 10 % whose work stays on the GPU, beside a tenant of 90 % that wants it.
func overdueThieves(t *testing.T, site Site) (b *Schedule, clock *fake, thieves [2]*Member, victim *Member) {
	t.Helper()
	b, clock = newTestSchedule(t, site), &fake{now: 1e12}
	thief := tenantFor(t, b, "thief", fixedShare(10))
	thieves = [2]*Member{join(t, b, thief, clock), join(t, b, thief, clock)}
	victim = join(t, b, tenantFor(t, b, "victim", fixedShare(90)), clock)
	victim.Request()
	if tn, err := victim.Wait(&never); err != nil || tn == 0 || !victim.Enter(tn) {
		t.Fatalf("the victim has no turn: %v", err)
	}
	for _, m := range thieves {
		m.SetOverdue(clock.now)
	}
	return b, clock, thieves, victim
}

// overrun lets the work of both be overdue for d, charging every millisecond.
func overrun(clock *fake, thieves [2]*Member, d time.Duration) {
	for end := clock.now + int64(d); clock.now < end; {
		from := clock.now
		clock.now += ms
		for _, m := range thieves {
			m.Debit(from, clock.now)
		}
	}
}

func owes(t *testing.T, b *Schedule, lease string) time.Duration {
	t.Helper()
	for _, c := range b.Read() {
		if c.Lease == lease {
			return c.Owes
		}
	}
	t.Fatalf("no tenant %s", lease)
	return 0
}

func about(d, want time.Duration) bool { return (d - want).Abs() <= 5*time.Millisecond }

// A lease owes the time of its overdue work once, however many sessions have some, and without a bound; it has no turn
// until its share has paid for it. The tenant that has the turn is not charged for that time.
func TestDebt(t *testing.T) {
	b, clock, thieves, victim := overdueThieves(t, Site{})
	before := int64(victim.p.tenant(victim.tenant).vt.Load())
	overrun(clock, thieves, 100*time.Millisecond)
	if got := before - int64(victim.p.tenant(victim.tenant).vt.Load()); !about(time.Duration(got), 111*time.Millisecond) {
		t.Errorf("the victim was given %v of the clock back", time.Duration(got))
	}
	overrun(clock, thieves, 20*time.Second-100*time.Millisecond)
	// 20 s, less what it paid meanwhile, and what it had not used of the second before.
	if got := owes(t, b, "thief"); !about(got, 17900*time.Millisecond) {
		t.Errorf("it owes %v", got)
	}
	for _, m := range thieves {
		m.SetOverdue(0)
		m.Request()
	}
	victim.Done(victim.Turn())
	victim.Withdraw()
	from := clock.now
	take(t, thieves[0])
	if d := time.Duration(clock.now - from); d < 178*time.Second || d > 180*time.Second {
		t.Errorf("it had a turn after %v", d)
	}
}

// Of several tenants with overdue work the first one owes the time: it slows the others.
func TestDebtors(t *testing.T) {
	b, clock, thieves, _ := overdueThieves(t, Site{})
	other := join(t, b, tenantFor(t, b, "other", Policy{Kind: BestEffort, Weight: 100}), clock)
	other.SetOverdue(clock.now + ms)
	for range 1000 {
		from := clock.now
		clock.now += ms
		if other.Debit(from, clock.now) {
			t.Fatal("the one that was slowed is charged")
		}
		if !thieves[0].Debit(from, clock.now) {
			t.Fatal("the first one is not charged")
		}
	}
	for _, c := range b.Read() {
		if want := map[string]int{"thief": 2}[c.Lease]; len(c.Overdue) != want {
			t.Errorf("%s: %+v is overdue, want %d sessions", c.Lease, c.Overdue, want)
		}
	}
	// It paid 100 ms meanwhile, and had what it had not used of the second before.
	if got := owes(t, b, "thief"); !about(got, 800*time.Millisecond) || owes(t, b, "other") != 0 {
		t.Errorf("it owes %v, the other one %v", got, owes(t, b, "other"))
	}
	for _, m := range thieves {
		m.SetOverdue(0)
	}
	if clock.now += ms; !other.Debit(clock.now-ms, clock.now) {
		t.Error("what stays is charged to nobody")
	}
}

// Nobody owes anything while no other tenant wants the GPU, or for time of its own lease's turn.
func TestNoDebt(t *testing.T) {
	b, clock, thieves, victim := overdueThieves(t, Site{})
	victim.Done(victim.Turn())
	victim.Withdraw()
	overrun(clock, thieves, time.Second)
	if got := owes(t, b, "thief"); got != 0 {
		t.Errorf("alone it owes %v", got)
	}
	tn := take(t, thieves[0])
	victim.Request()
	overrun(clock, thieves, 10*time.Millisecond)
	if got := owes(t, b, "thief"); got != 0 {
		t.Errorf("in its turn it owes %v", got)
	}
	thieves[0].Done(tn)
}

// A debt is the lease's: neither the end of its sessions nor a change of its policy clears it, and the next lease in its
// record has none.
func TestDebtOutlives(t *testing.T) {
	b, clock, thieves, victim := overdueThieves(t, Site{})
	overrun(clock, thieves, time.Second)
	want := owes(t, b, "thief")
	for _, m := range thieves {
		m.Close()
	}
	for _, p := range []Policy{fixedShare(5), {Kind: BestEffort, Weight: 1000}, {Kind: Equal}, fixedShare(10)} {
		if _, err := b.Add("thief", p); err != nil {
			t.Fatal(err)
		}
		if got := owes(t, b, "thief"); !about(got, want) {
			t.Errorf("%+v: it owes %v, and owed %v", p, got, want)
		}
	}
	thief := join(t, b, tenantFor(t, b, "thief", Policy{Kind: BestEffort, Weight: 1000}), clock)
	thief.Request()
	var v view
	b.p.load(&v, clock.now)
	if r := v.rank(thief.tenant); r != rankNone {
		t.Errorf("rank %d while others want the GPU", r)
	}
	victim.Done(victim.Turn())
	victim.Withdraw()
	v = view{}
	b.p.load(&v, clock.now)
	if r := v.rank(thief.tenant); r != rankBorrows {
		t.Errorf("rank %d while nobody else wants it", r)
	}
	b.Remove(thief.tenant)
	if n := tenantFor(t, b, "next", fixedShare(10)); n != thief.tenant {
		t.Fatalf("the next lease is tenant %d", n)
	}
	if got := owes(t, b, "next"); got != 0 {
		t.Errorf("the next lease owes %v", got)
	}
}

// What a lease owes does not change when its share does because of other leases.
func TestDebtKeeps(t *testing.T) {
	b, clock := newTestSchedule(t, Site{Limit: time.Second, Overrun: OverrunEnds}), &fake{now: 1e12}
	debtor := join(t, b, tenantFor(t, b, "debtor", Policy{Kind: BestEffort, Weight: 200}), clock)
	big := tenantFor(t, b, "big", Policy{Kind: BestEffort, Weight: 9000})
	other := join(t, b, tenantFor(t, b, "other", fixedShare(2)), clock)
	take(t, other)
	debtor.SetOverdue(clock.now)
	for range 500 {
		clock.now += ms
		debtor.Debit(clock.now-ms, clock.now)
	}
	want := owes(t, b, "debtor")
	if want < 400*time.Millisecond {
		t.Fatalf("it owes %v", want)
	}
	for _, c := range []struct {
		name   string
		change func()
	}{
		{"another lease ends", func() { b.Remove(big) }},
		{"a lease comes", func() { big = tenantFor(t, b, "big", fixedShare(90)) }},
		{"it changes to less", func() { big = tenantFor(t, b, "big", fixedShare(1)) }},
		{"it changes to best effort", func() { big = tenantFor(t, b, "big", Policy{Kind: BestEffort, Weight: 9000}) }},
		{"it ends", func() { b.Remove(big) }},
	} {
		c.change()
		if got := owes(t, b, "debtor"); !about(got, want) {
			t.Errorf("%s: it owes %v, and owed %v", c.name, got, want)
		}
		if got, _, exceeds := debtor.Exceeds(500 * time.Millisecond); exceeds {
			t.Errorf("%s: it ends for %v", c.name, got)
		}
	}
}

// Which sessions end, and when: for their own work, or for what the lease owes.
func TestExceeds(t *testing.T) {
	for _, c := range []struct {
		name         string
		overrun      Overrun
		thief, other Kind
		overdue      time.Duration // of the lease
		own          time.Duration // of the session
		want         bool
	}{
		{"goes on", OverrunGoesOn, Fixed, Fixed, 5 * time.Second, 5 * time.Second, false},
		{"its own limit", OverrunEnds, Fixed, Fixed, 10 * time.Millisecond, time.Second, true},
		{"below it", OverrunEnds, Fixed, Fixed, 10 * time.Millisecond, 999 * time.Millisecond, false},
		{"the lease's", OverrunEnds, Fixed, Fixed, 1400 * time.Millisecond, 600 * time.Millisecond, true},
		{"fixed", OverrunEndsFixed, Fixed, BestEffort, time.Second, time.Second, true},
		{"a fixed one waits", OverrunEndsFixed, BestEffort, Fixed, time.Second, time.Second, true},
		{"neither is fixed", OverrunEndsFixed, BestEffort, Equal, time.Second, time.Second, false},
	} {
		b, clock, thieves, victim := overdueThieves(t, Site{Limit: time.Second, Overrun: c.overrun})
		for m, k := range map[*Member]Kind{thieves[0]: c.thief, victim: c.other} {
			if err := b.Set(m.tenant, Policy{Kind: k, Weight: 1000}); err != nil {
				t.Fatal(err)
			}
		}
		overrun(clock, thieves, c.overdue)
		if _, limit, got := thieves[0].Exceeds(c.own); got != c.want || limit != time.Second {
			t.Errorf("%s: %v, limit %v", c.name, got, limit)
		}
		for _, r := range b.Read() {
			if r.Lease == "thief" && (r.Ends != (c.want || c.name == "below it") || len(r.Overdue) != 2) {
				t.Errorf("%s: %+v", c.name, r)
			}
		}
	}
}

// A tenant whose sessions are stopped does not wait: what others take then is nobody's.
func TestStoppedDoesNotWait(t *testing.T) {
	b, clock, thieves, victim := overdueThieves(t, Site{})
	charged := func() bool {
		from := clock.now
		clock.now += ms
		return thieves[0].Debit(from, clock.now)
	}
	if !charged() {
		t.Fatal("overdue work beside a tenant that works is not charged")
	}
	stopped := 0
	for range 100 { // the victim's sessions take no turn any more
		clock.now += 50 * ms
		b.p.police(b.p.token(), clock.now)
		if tn := b.p.token(); tn.tenant() == victim.tenant && b.p.tenant(victim.tenant).taken.Load() != uint64(tn) {
			stopped++
			clock.now += 2 * takeLimit
			b.p.police(tn, clock.now)
		}
		if stopped == 1 && b.p.tenant(victim.tenant).skipUntil.Load() > uint64(clock.now) && !charged() {
			t.Error("a tenant that has missed one turn does not wait")
		}
		if stopped > 1 {
			break
		}
	}
	if stopped < 2 {
		t.Fatalf("the victim was given %d turns", stopped)
	}
	if charged() {
		t.Error("what is taken from a tenant that is stopped is charged")
	}
	victim.responds(clock.now)
	if !charged() {
		t.Error("what is taken from a tenant that goes on is not charged")
	}
}

// Overdue work of a session that is stopped shields nobody: it may have ended long ago.
func TestStoppedIsNoCause(t *testing.T) {
	b, clock, thieves, _ := overdueThieves(t, Site{})
	other := join(t, b, tenantFor(t, b, "other", Policy{Kind: BestEffort, Weight: 100}), clock)
	for _, m := range thieves {
		m.SetOverdue(0)
	}
	other.SetOverdue(clock.now)
	began := clock.now
	thieves[0].SetOverdue(clock.now + ms)
	for clock.now < began+2*unwatchedTime {
		from := clock.now
		clock.now += ms
		thieves[0].SetOverdue(began + ms)
		if got, want := thieves[0].Debit(from, clock.now), clock.now > began+unwatchedTime; got != want {
			t.Fatalf("%v after the other was stopped: charged %v", time.Duration(clock.now-began), got)
		}
	}
	other.SetOverdue(began) // it goes on
	if thieves[0].Debit(clock.now-ms, clock.now) {
		t.Error("the one that is slowed is charged")
	}
	if other.rec().seen.Store(uint64(clock.now + 10*future)); !thieves[0].Debit(clock.now-ms, clock.now+ms) {
		t.Error("a look in the future is believed")
	}
}
