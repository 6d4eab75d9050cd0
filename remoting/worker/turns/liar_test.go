package turns

import (
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// store is a DebtStore in this process.
type store struct {
	debt, debited atomic.Uint64
	until, span   atomic.Uint64
	overdue, gone bool
}

func (s *store) Debts(f func(debt, debited *atomic.Uint64)) bool {
	if !s.gone {
		f(&s.debt, &s.debited)
	}
	return !s.gone
}

func (s *store) Excused(f func(until, span *atomic.Uint64)) bool {
	if !s.gone {
		f(&s.until, &s.span)
	}
	return !s.gone
}

func (s *store) SetOverdue(is bool) { s.overdue = is }

// A debt is what a lease's own sessions have made of it: whatever others write into the state file neither adds to it, nor erases it, nor
// ends a session, and the next look of those who know it restores what the others see.
func TestDebtIsKept(t *testing.T) {
	b, clock, thieves, victim := overdueThieves(t, Site{Limit: time.Second, Overrun: OverrunEnds})
	thief := thieves[0].tenant
	its, mine := &store{}, &store{}
	for _, m := range thieves {
		m.Keep(its)
	}
	victim.Keep(mine)
	stranger := join(t, b, tenantFor(t, b, "stranger", Policy{Kind: BestEffort, Weight: 1}), clock)
	seen := func(tenant int) time.Duration {
		var v view
		stranger.p.load(&v, clock.now)
		return time.Duration(v.owes(tenant))
	}
	overrun(clock, thieves, 900*time.Millisecond)
	want := seen(thief)
	if _, _, exceeds := thieves[0].Exceeds(0); want < 700*time.Millisecond || exceeds {
		t.Fatalf("it owes %v, exceeds %v", want, exceeds)
	}
	word := &b.p.tenant(thief).debt
	for name, lie := range map[string]uint64{
		"nothing": 0, "half": uint64(packDebt(clock.now+int64(want)/2, thief, thieves[0].gen)), "a day": uint64(packDebt(clock.now+int64(24*time.Hour), thief, thieves[0].gen)),
	} {
		word.Store(lie)
		if _, _, exceeds := thieves[0].Exceeds(0); exceeds {
			t.Errorf("%s: its session ends", name)
		}
		if got := seen(thief); got != want {
			t.Errorf("%s: others see %v, want %v", name, got, want)
		}
	}
	b.p.tenant(victim.tenant).debt.Store(uint64(packDebt(clock.now+int64(24*time.Hour), victim.tenant, victim.gen)))
	if _, _, exceeds := victim.Exceeds(time.Millisecond); exceeds || seen(victim.tenant) != 0 {
		t.Errorf("the victim ends: %v; others see that it owes %v", exceeds, seen(victim.tenant))
	}
	// The owner restores it as well, also while the lease has no session.
	for _, m := range thieves {
		m.Close()
	}
	word.Store(0)
	b.Keep(thief, its)
	if got := seen(thief); got != want {
		t.Errorf("after the owner's look others see %v, want %v", got, want)
	}
	// Its debt of GPU time stays when its share changes, and the next lease has none.
	if err := b.Set(thief, fixedShare(5)); err != nil {
		t.Fatal(err)
	}
	if got := owes(t, b, "thief"); !about(got, want) {
		t.Errorf("with half the share it owes %v, and owed %v", got, want)
	}
	b.Remove(thief)
	if n := tenantFor(t, b, "next", fixedShare(10)); n != thief || owes(t, b, "next") != 0 {
		t.Errorf("tenant %d, want %d; it owes %v", n, thief, owes(t, b, "next"))
	}
}

// A session leaves a turn that it is given to others while its lease owes time, whoever erased what these see of that.
func TestDebtorRefuses(t *testing.T) {
	b, clock, thieves, victim := overdueThieves(t, Site{})
	for _, m := range thieves {
		m.Keep(&store{})
	}
	overrun(clock, thieves, time.Second)
	b.p.state.token.Store(uint64(packToken(thieves[0].tenant, false, clock.now)))
	b.p.tenant(thieves[0].tenant).debt.Store(0)
	if !thieves[0].refuses(clock.now) {
		t.Error("it takes the turn")
	}
	for thieves[0].refuses(clock.now) {
		b.p.state.token.Store(uint64(packToken(thieves[0].tenant, false, clock.now)))
		tn, err := thieves[0].Wait(&never)
		if owes := owes(t, b, "thief"); err != nil || tn != 0 && owes > time.Millisecond {
			t.Fatalf("it takes turn %#x and owes %v, %v", tn, owes, err)
		}
	}
	overrun(clock, thieves, time.Second)
	victim.Done(victim.Turn())
	victim.Withdraw()
	if thieves[0].refuses(clock.now) {
		t.Error("it refuses a turn that nobody else wants")
	}
}

// A debt whose store cannot be used any more is the schedule's.
func TestDebtStoreGone(t *testing.T) {
	b, clock, thieves, _ := overdueThieves(t, Site{})
	st := &store{}
	for _, m := range thieves {
		m.Keep(st)
	}
	overrun(clock, thieves, time.Second)
	want := owes(t, b, "thief")
	st.gone = true
	overrun(clock, thieves, time.Second)
	if got := owes(t, b, "thief"); got < want+800*time.Millisecond {
		t.Errorf("it owes %v, and owed %v", got, want)
	}
}

// A session tells its lease's account that its work is overdue.
func TestTellsOverdue(t *testing.T) {
	_, clock, thieves, _ := overdueThieves(t, Site{})
	st := &store{}
	m := thieves[0]
	m.Keep(st)
	for _, since := range []int64{clock.now, clock.now, 0, 0, clock.now} {
		if m.SetOverdue(since); st.overdue != (since > 0) {
			t.Errorf("since %d: %v", since, st.overdue)
		}
	}
}

// Overdue work that others only claim to have excuses a thief for an eighth of the limit at most: the rest is charged, and ends it.
func TestClaimsExcuseLittle(t *testing.T) {
	const limit = time.Second
	for _, c := range []struct {
		name  string
		since func(now int64) int64
	}{
		{"for ever", func(int64) int64 { return 1 }},
		{"since just before the limit", func(now int64) int64 { return now - int64(limit) + ms }},
	} {
		b, clock, thieves, _ := overdueThieves(t, Site{Limit: limit, Overrun: OverrunEnds})
		liar := join(t, b, tenantFor(t, b, "liar", fixedShare(5)), clock)
		charged, from := 0, clock.now
		for range 1000 {
			clock.now += ms
			liar.rec().overdue.Store(uint64(c.since(clock.now)))
			liar.rec().seen.Store(uint64(clock.now))
			some := false
			for _, m := range thieves {
				m.SetOverdue(from)
				some = m.Debit(clock.now-ms, clock.now) || some
			}
			if some {
				charged++
			}
		}
		// An eighth of the limit, and an eighth of the time.
		if charged < 745 {
			t.Errorf("%s: charged for %d ms of 1000", c.name, charged)
		}
		t.Logf("%s: charged for %d ms of 1000", c.name, charged)
	}
}

// Several processes of one lease are excused for no more than one: whether they have overdue work at the same time, or one after the other.
func TestClaimsExcuseLeaseOnce(t *testing.T) {
	const limit, processes = time.Second, 8
	b, clock, thieves, _ := overdueThieves(t, Site{Limit: limit, Overrun: OverrunEnds})
	members := thieves[:]
	for len(members) < processes {
		members = append(members, join(t, b, thieves[0].tenant, clock))
	}
	its := &store{}
	for _, m := range members {
		m.Keep(its)
		m.SetOverdue(0)
	}
	liar := join(t, b, tenantFor(t, b, "liar", fixedShare(5)), clock)
	for name, overdue := range map[string]func(k, at int) bool{
		"at the same time":    func(int, int) bool { return true },
		"one after the other": func(k, at int) bool { return at%processes == k },
	} {
		clock.now += int64(time.Hour) // nothing of what was excused before counts
		charged, from := 0, clock.now
		for at := range 1000 {
			clock.now += ms
			liar.rec().overdue.Store(1)
			liar.rec().seen.Store(uint64(clock.now))
			some := false
			for k, m := range members {
				if !overdue(k, at) {
					m.SetOverdue(0)
					continue
				}
				m.SetOverdue(from)
				some = m.Debit(clock.now-ms, clock.now) || some
			}
			if some {
				charged++
			}
		}
		// An eighth of the limit, and an eighth of the time, and no less than that either.
		if charged < 745 || charged > 755 {
			t.Errorf("%s: charged for %d ms of 1000", name, charged)
		}
	}
}

// The time that a lease was excused for counts once, whichever way the looks of its sessions lie to each other.
func TestSpan(t *testing.T) {
	us := func(from, to int64) spanWord { return spanWord(0).with(from*1000, to*1000) }
	for _, c := range []struct{ from, to, at, end, overlap, newFrom, newTo int64 }{
		{10, 20, 20, 30, 0, 10, 30},
		{10, 20, 15, 30, 5, 10, 30},
		{10, 20, 12, 18, 6, 10, 20},
		{10, 20, 5, 25, 10, 5, 25},
		{10, 20, 5, 10, 0, 5, 20},
		{10, 20, 5, 9, 0, 10, 20},
		{10, 20, 30, 40, 0, 30, 40},
		{10, 60_000, 60_000, 90_000, 0, 90_000 - spanMost, 90_000},
	} {
		w := us(c.from, c.to)
		if got := w.overlap(c.at*1000, c.end*1000); got != c.overlap*1000 {
			t.Errorf("%+v: overlap %d ns", c, got)
		}
		if from, to := w.with(c.at*1000, c.end*1000).bounds(); from != c.newFrom*1000 || to != c.newTo*1000 {
			t.Errorf("%+v: %d to %d ns", c, from, to)
		}
	}
}

// TestHonestDebts: real overdue work is charged as long as it lasts, and nobody else for what it delays, by whatever the site does with such work.
func TestHonestDebts(t *testing.T) {
	for _, c := range []struct {
		name string
		site Site
		long time.Duration
	}{
		{"it ends at the limit", Site{Limit: time.Second, Overrun: OverrunEnds}, 990 * time.Millisecond},
		{"it goes on", Site{Limit: time.Second}, 5 * time.Second},
		{"there is no limit", Site{}, 5 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, clock, thieves, _ := overdueThieves(t, c.site)
			for _, m := range thieves {
				m.Keep(&store{}) // one of its own: only one session has overdue work
				break
			}
			thieves[1].Close()
			long := thieves[0]
			other := join(t, b, tenantFor(t, b, "other", Policy{Kind: BestEffort, Weight: 100}), clock)
			other.Keep(&store{})
			began, charged, delayed := clock.now, time.Duration(0), time.Duration(0)
			for clock.now < began+int64(c.long) {
				clock.now += ms
				long.SetOverdue(began)
				if long.Debit(clock.now-ms, clock.now) {
					charged += time.Millisecond
				}
				// Every 250 ms a turn of the other one ends 20 ms too late.
				if at := (clock.now - began) % (250 * ms); at >= 100*ms && at < 120*ms {
					other.SetOverdue(clock.now - at%(100*ms) - ms)
					if other.Debit(clock.now-ms, clock.now) {
						delayed += time.Millisecond
					}
				} else {
					other.SetOverdue(0)
				}
			}
			if charged != c.long || delayed != 0 {
				t.Errorf("of %v it was charged for %v, and the one that it delayed for %v", c.long, charged, delayed)
			}
			// The clock has paid a tenth of it, and it had a second's credit.
			want := c.long*9/10 - 100*time.Millisecond
			if got := owes(t, b, "thief"); !about(got, want) || owes(t, b, "other") != 0 {
				t.Errorf("it owes %v, want %v, and the other one %v", got, want, owes(t, b, "other"))
			}
			// Work that is overdue for long itself is not excused by the first one for long.
			if c.site.Overrun != OverrunEnds {
				return
			}
			charged, began = 0, clock.now
			for clock.now < began+int64(time.Second) {
				clock.now += ms
				long.SetOverdue(began - ms)
				other.SetOverdue(began)
				if other.Debit(clock.now-ms, clock.now) {
					charged += time.Millisecond
				}
			}
			if charged < 750*time.Millisecond {
				t.Errorf("beside it another one was charged for %v of 1s", charged)
			}
		})
	}
}

// A tenant that is stopped keeps no claim because somebody claims overdue work for longer than anybody may be.
func TestClaimToTurns(t *testing.T) {
	for _, c := range []struct {
		name  string
		since time.Duration // before now
		keeps bool
	}{{"overdue", 100 * time.Millisecond, true}, {"overdue for ever", time.Hour, false}} {
		b, clock := newTestSchedule(t, Site{Limit: time.Second, Overrun: OverrunEnds}), &fake{now: 1e13}
		stopped := join(t, b, tenantFor(t, b, "stopped", fixedShare(50)), clock)
		liar := join(t, b, tenantFor(t, b, "liar", fixedShare(50)), clock)
		stopped.Request()
		b.p.pass(b.p.token(), clock.now, nobody)
		tn := b.p.token()
		if tn.tenant() != stopped.tenant {
			t.Fatalf("tenant %d has the turn", tn.tenant())
		}
		clock.now += 2 * takeLimit
		liar.rec().seen.Store(uint64(clock.now))
		liar.rec().overdue.Store(uint64(clock.now - int64(c.since)))
		b.p.police(tn, clock.now)
		if got := b.p.tenant(stopped.tenant).unresponsive.Load() == 0; got != c.keeps {
			t.Errorf("%s: keeps its claim: %v", c.name, got)
		}
	}
}

// Members that are no sessions of the owner's go, and those of which two have one process; the true one comes back.
func TestStrangers(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e12}
	one := join(t, b, tenantFor(t, b, "one", fixedShare(40)), clock)
	two := tenantFor(t, b, "two", fixedShare(40))
	known := func(lease string, pid int) bool { return lease == "one" && pid == os.Getpid() }
	at := time.Now()
	look := func() int { b.FreeStrangers(at, known); return b.Members() }
	forge := func(owner uint64, tenant int) {
		i, err := one.p.claim()
		if err != nil {
			t.Fatal(err)
		}
		m := one.p.member(i)
		m.tenant.Store(packTenant(tenant, one.p.policyOf(tenant).gen()))
		m.want.Store(1)
		m.owner.Store(owner)
	}
	for _, c := range []struct {
		name   string
		owner  uint64
		tenant int
		left   int
	}{
		{"a process that is no session", 1, 0, 1},
		{"of a lease without sessions", 1, two, 1},
		{"a session's process, in another lease", uint64(os.Getpid()), two, 0},
		{"a session's process twice", uint64(os.Getpid()), 0, 0},
	} {
		forge(c.owner, c.tenant)
		for range 3 {
			if n := look(); n != 2 {
				t.Errorf("%s: %d members at first", c.name, n)
			}
			at = at.Add(strangerTime/2 - time.Second)
		}
		at = at.Add(4 * time.Second)
		if n := look(); n != c.left {
			t.Errorf("%s: %d members stay, want %d", c.name, n, c.left)
		}
		one.Done(take(t, one))
		one.Withdraw()
		if n := b.Members(); n != 1 {
			t.Errorf("%s: then there are %d members", c.name, n)
		}
	}
}

// The owner's sweep and the sessions restore what makes the files a schedule, and what hides members.
func TestHeals(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e12}
	one := join(t, b, tenantFor(t, b, "one", fixedShare(40)), clock)
	two := join(t, b, tenantFor(t, b, "two", fixedShare(40)), clock)
	for _, look := range []struct {
		name string
		do   func()
	}{
		{"the owner's", b.Sweep},
		{"a session's", func() { one.Done(take(t, one)); two.Done(take(t, two)) }}, // which knows what clock there is, as the owner does not
	} {
		one.p.state.high.Store(0)
		one.p.state.clock.Store(clockMachine)
		if look.do(); one.p.members() != 2 {
			t.Errorf("after %s look there are %d members", look.name, one.p.members())
		}
	}
	if n := b.p.state.clock.Load(); n != clockSimulated {
		t.Errorf("the clock is %d", n)
	}
	one.p.state.magic.Store(0)
	one.p.state.version.Store(0)
	join(t, b, tenantFor(t, b, "three", fixedShare(10)), clock).Close()
	b.Sweep()
	if !b.p.valid() {
		t.Error("it is no schedule any more")
	}
}

// stopper is a clock on which the first wait sets stop.
type stopper struct {
	fake
	stop atomic.Bool
}

func (s *stopper) Wait(word *uint32, old uint32, until int64, b bool) {
	s.stop.Store(true)
	s.fake.Wait(word, old, until, b)
}

// A session whose record was taken, on a schedule without a free one, waits until there is one.
func TestNoRecordLeft(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &stopper{fake: fake{now: 1e12}}
	one := join(t, b, tenantFor(t, b, "one", fixedShare(40)), clock)
	for i := range MaxMembers {
		b.p.member(i).start.Store(0)
		b.p.member(i).owner.Store(1)
	}
	from := clock.now
	if tn, err := one.Wait(&clock.stop); tn != 0 || err != nil || clock.now == from {
		t.Errorf("turn %#x, %v after %v", tn, err, time.Duration(clock.now-from))
	}
	b.p.member(7).owner.Store(0)
	one.Done(take(t, one))
	if one.at.Load().i != 7 {
		t.Errorf("it has record %d", one.at.Load().i)
	}
}
