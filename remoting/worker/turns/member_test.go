package turns

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"
)

// A process that ends may call Quit from several threads, and some of them go on for a while. By
// then the record may belong to another session.
func TestQuitTwice(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	tenant := tenantFor(t, b, "lease", fixedShare(50))
	c := join(t, b, tenant, clock)
	tn := take(t, c)
	c.Quit()
	if n := b.Members(); n != 0 {
		t.Fatalf("%d members remain", n)
	}
	next := join(t, b, tenant, clock)
	if next.at.Load().i != c.at.Load().i {
		t.Fatalf("the next session has record %d, not %d", next.at.Load().i, c.at.Load().i)
	}
	next.me = 1 // a process that is alive
	next.rec().owner.Store(next.me)
	now := take(t, next)
	next.SetOverdue(7)
	c.Quit()
	c.Withdraw()
	c.SetOverdue(0)
	if c.Enter(now) || c.Follow(now) {
		t.Error("a session that has quit joins a turn")
	}
	if _, ok := c.Renew(now); ok {
		t.Error("a session that has quit takes another turn")
	}
	c.Done(now)
	c.Done(tn)
	c.Request()
	rec := next.rec()
	for _, w := range []struct {
		name string
		word *atomic.Uint64
		want uint64
	}{{"owner", &rec.owner, next.me}, {"want", &rec.want, 1}, {"open", &rec.open, uint64(now)}, {"overdue", &rec.overdue, 7}} {
		if got := w.word.Load(); got != w.want {
			t.Errorf("%s of the next session is %#x, was %#x", w.name, got, w.want)
		}
	}
	if next.Turn() != now || next.p.tenant(tenant).closing.Load() == uint64(now) {
		t.Error("the next session's turn was ended")
	}
	if _, err := c.Wait(&never); !errors.Is(err, ErrEnded) {
		t.Errorf("wait after the end: %v", err)
	}
}

// A session whose record was freed, or was taken by another one, goes on in another record, and leaves that one's alone. One whose
// request was erased still gets a turn.
func TestMemberFreed(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	c := join(t, b, tenantFor(t, b, "lease", fixedShare(50)), clock)
	c.Request()
	c.rec().want.Store(0)
	if tn, err := c.Wait(&never); err != nil || tn == 0 {
		t.Errorf("without its request: turn %#x, %v", tn, err)
	}
	for _, owner := range []uint64{0, 1} {
		c.Done(c.Turn())
		lost := c.rec()
		for _, w := range []*atomic.Uint64{&lost.tenant, &lost.start, &lost.want} {
			w.Store(0)
		}
		lost.owner.Store(owner)
		c.Withdraw()
		c.Done(take(t, c))
		if owner == 0 && c.rec() != lost || owner != 0 && c.rec() == lost {
			t.Errorf("owner %d: in the same record: %v", owner, c.rec() == lost)
		}
		if rec := c.rec(); rec.owner.Load() != c.me || rec.tenant.Load() != packTenant(c.tenant, c.gen) || rec.start.Load() == 0 {
			t.Errorf("owner %d: its record has owner %d, tenant %#x", owner, rec.owner.Load(), rec.tenant.Load())
		}
		if owner != 0 && (lost.owner.Load() != owner || lost.want.Load() != 0 || lost.open.Load() != 0) {
			t.Errorf("it wrote into another one's record: %d, %d", lost.owner.Load(), lost.want.Load())
		}
	}
	c.Quit()
	if _, err := c.Wait(&never); !errors.Is(err, ErrEnded) {
		t.Errorf("after its end: %v", err)
	}
}

// A napper is a clock on which something happens while somebody sleeps, or before.
type napper struct {
	fake
	during func()
	slept  int
	woken  bool // by a change of the word
}

func (n *napper) Wait(word *uint32, old uint32, until int64, b bool) {
	n.slept++
	if n.during != nil {
		n.during()
	}
	n.woken = *word != old
}

// The keeper of a session whose record is taken while it sleeps, or right before, is woken at once, and by everything that wakes it from
// then on: the session has another record, which the keeper does not sleep on.
func TestKeeperWakesInNewRecord(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &napper{fake: fake{now: 1e9}}
	m := join(t, b, tenantFor(t, b, "lease", fixedShare(50)), clock)
	taken := func() {
		m.rec().owner.Store(1)
		if err := m.hold(); err != nil {
			t.Fatal(err)
		}
	}
	seen := m.Wakeups()
	clock.during = taken
	if m.Sleep(seen, 2e9); clock.slept != 1 || !clock.woken {
		t.Errorf("it slept %d times; woken: %v", clock.slept, clock.woken)
	}
	if m.Wakeups() == seen {
		t.Error("the keeper cannot see that it was woken")
	}
	clock.during = nil
	seen = m.Wakeups()
	taken()
	m.rec().wakeup.Store(seen.n) // woken as often there
	if m.Sleep(seen, 2e9); clock.slept != 1 {
		t.Error("it sleeps although it has another record")
	}
}

// A session that claims a freed record finds nothing of the previous owner in it, even if that one wrote to it after it was freed.
func TestRecordHandsNothingOn(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	tenant := tenantFor(t, b, "lease", fixedShare(50))
	soil := func(rec *memberState) {
		for _, w := range []*atomic.Uint64{&rec.want, &rec.open, &rec.overdue, &rec.seen} {
			w.Store(1)
		}
	}
	clean := func(what string, rec *memberState) {
		t.Helper()
		for _, w := range []*atomic.Uint64{&rec.want, &rec.open, &rec.overdue, &rec.seen} {
			if w.Load() != 0 {
				t.Errorf("%s: its record says what the one before wanted", what)
				return
			}
		}
	}
	one := join(t, b, tenant, clock)
	rec := b.p.member(one.at.Load().i)
	one.Quit()
	soil(rec)
	two := join(t, b, tenant, clock)
	if two.at.Load().i != one.at.Load().i {
		t.Fatalf("record %d", two.at.Load().i)
	}
	clean("a new session", rec)
	soil(rec)
	rec.tenant.Store(0) // somebody else's in between
	rec.owner.Store(0)
	if err := two.hold(); err != nil || rec.owner.Load() != two.me {
		t.Fatalf("owner %d, %v", rec.owner.Load(), err)
	}
	clean("a session whose record was freed", rec)
	for _, c := range b.Read() {
		if c.Wants {
			t.Error("it wants a turn")
		}
	}
}

// A spinner is a clock that every look moves by a microsecond.
type spinner struct {
	fake
	looks int
	naps  []int64 // how long each sleep was to be
	onNap func(until int64)
}

func (s *spinner) Spins() bool { return true }

func (s *spinner) Now() int64 {
	s.looks++
	s.now += int64(time.Microsecond)
	return s.now
}

func (s *spinner) Wait(word *uint32, old uint32, until int64, b bool) {
	s.naps = append(s.naps, until-s.now)
	if s.onNap != nil {
		s.onNap(until)
	}
	s.fake.Wait(word, old, until, b)
}

// A session that waits for its tenant's own time sleeps until shortly before that, and is awake
// when the time comes.
func TestWaitForOwnTime(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &spinner{fake: fake{now: 1e9}}
	c := join(t, b, tenantFor(t, b, "lease", fixedShare(25)), clock)
	tn := take(t, c)
	// It began with a turn's credit and has a quarter of the time; the tolerance is a quarter of a turn.
	due := clock.now - c.Quantum() + 4*(c.Ends(tn)-clock.now) - c.Quantum()/4
	clock.now = c.Ends(tn)
	c.Done(tn)
	var told []int64
	c.OnPrewake(func() { told = append(told, due-clock.now) })
	clock.looks, clock.naps = 0, nil
	tn = take(t, c)
	if late := time.Duration(token(tn).begin() - due); late < -100*time.Microsecond || late > 100*time.Microsecond {
		t.Errorf("the turn begins %v after its time", late)
	}
	if len(clock.naps) != 1 {
		t.Errorf("slept %d times: %v", len(clock.naps), clock.naps)
	}
	if len(told) != 1 || told[0] > int64(PrewakeLead) || told[0] < int64(PrewakeLead)*9/10 {
		t.Errorf("prewoken so long before, ns: %v", told)
	}
	if most := int(2 * PrewakeLead / time.Microsecond); clock.looks > most {
		t.Errorf("looked at the clock %d times", clock.looks)
	}
}

// Of two tenants with equal shares each is woken before each of its turns, and they alternate,
// although one of them always ends a little early and the other a little late.
func TestPrewakeBetweenEquals(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	var cs []*Member
	for i := range 2 {
		cs = append(cs, join(t, b, tenantFor(t, b, string(rune('a'+i)), fixedShare(50)), clock))
		cs[i].Request()
	}
	longer := []int64{-300000, 100000} // how much longer than planned each works
	take(t, cs[0])
	for n, i := 0, 0; n < 100; n++ {
		c, other := cs[i], cs[1-i]
		tn := c.Turn()
		if n > 0 && !c.Enter(tn) {
			t.Fatalf("nobody has turn %d", n)
		}
		clock.now = c.Ends(tn) - int64(PrewakeLead)
		told := c.Prewake(tn)
		clock.now = c.Ends(tn) + longer[i]
		c.Done(tn)
		switch changed := other.Turn() != 0; {
		case !changed && n >= 10: // they began at the same time
			t.Fatalf("turn %d of the same tenant", n+1)
		case changed && !told:
			t.Fatalf("turn %d ends, and the other was not woken", n)
		case changed:
			i = 1 - i
		}
	}
}

// A session that is woken early for a turn that does not end spins for a limited time.
func TestPrewakeInVain(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &spinner{fake: fake{now: 1e9}}
	one := join(t, b, tenantFor(t, b, "one", fixedShare(50)), clock)
	two := join(t, b, tenantFor(t, b, "two", fixedShare(50)), clock)
	tn := take(t, one)
	two.Request()
	clock.now = one.Ends(tn) - int64(PrewakeLead)
	if !one.Prewake(tn) {
		t.Fatal("nobody was woken")
	}
	told := 0
	two.OnPrewake(func() { told++ })
	from := clock.now
	clock.looks = 0
	clock.onNap = func(until int64) {
		if spun := clock.now - from; told == 1 && spun > 2*spinTime {
			t.Errorf("spun for %v", time.Duration(spun))
		}
	}
	take(t, two) // as soon as it is taken from the other
	if gap := time.Duration(clock.now - one.Deadline(tn)); gap > time.Millisecond || told != 1 {
		t.Errorf("had the turn %v after the deadline, was woken %d times", gap, told)
	}
	if most := int(2 * spinTime / int64(time.Microsecond)); clock.looks > most {
		t.Errorf("looked at the clock %d times", clock.looks)
	}
}

// between calls f once, when a session comes to a step.
func between(t *testing.T, point string, f func()) {
	t.Helper()
	done := false
	onStep = func(p string) {
		if p == point && !done {
			done = true
			f()
		}
	}
	t.Cleanup(func() {
		onStep = nil
		if !done {
			t.Errorf("no session came to the step %q", point)
		}
	})
}

// One session of a lease ends a turn while another is about to join it: the turn is passed on.
func TestJoinWhatIsBeingClosed(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	tenant := tenantFor(t, b, "two", fixedShare(50))
	one, two := join(t, b, tenant, clock), join(t, b, tenant, clock)
	other := join(t, b, tenantFor(t, b, "other", fixedShare(50)), clock)
	tn := take(t, one)
	other.Request()
	clock.now += ms
	between(t, "open", func() { one.Done(tn) })
	if two.Enter(tn) {
		t.Fatal("a turn that is being closed was entered")
	}
	if other.Turn() == 0 {
		t.Error("nobody passed the turn on")
	}
}

// Two sessions of a lease renew the turn at the same time: the next one counts as taken.
func TestRenewAtOnce(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	tenant := tenantFor(t, b, "two", Policy{Kind: BestEffort, Weight: 100})
	one, two := join(t, b, tenant, clock), join(t, b, tenant, clock)
	two.Request()
	tn := take(t, one)
	if !two.Enter(tn) {
		t.Fatal("the second session may not enter")
	}
	clock.now += 5 * ms
	var next Turn
	between(t, "renewing", func() {
		clock.now += 5000
		next, _ = two.Renew(tn)
		one.p.tenant(tenant).taken.Store(uint64(tn)) // as the slower one would
	})
	if _, ok := one.Renew(tn); ok || next == 0 {
		t.Fatalf("both renewed it, or neither: %v, %#x", ok, next)
	}
	if one.Turn() != next || one.p.tenant(tenant).taken.Load() != uint64(next) {
		t.Error("the turn does not count as taken")
	}
	if !one.Follow(next) {
		t.Error("the slower one may not follow")
	}
}

// A token with a begin far in the future costs one turn, and not all that follow.
func TestTokenFromTheFuture(t *testing.T) {
	for _, us := range []int64{5e6, 1 << 53, tokenBegin} {
		b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
		one := join(t, b, tenantFor(t, b, "one", fixedShare(50)), clock)
		two := join(t, b, tenantFor(t, b, "two", fixedShare(50)), clock)
		one.Request()
		one.p.state.token.Store(uint64(packToken(one.tenant, false, us)))
		tn := take(t, two)
		if begin := token(tn).begin(); begin > clock.now+future || begin < clock.now-future {
			t.Errorf("%d us: the next turn begins at %d, it is %d", us, begin, clock.now)
		}
		two.Done(tn)
		// Its own tenant does not accept it either.
		one.p.state.token.Store(uint64(packToken(one.tenant, false, us)))
		if tn := take(t, one); token(tn).begin() > clock.now+future {
			t.Errorf("%d us: a turn from the future was kept", us)
		}
	}
}

// Remaining sessions of a lease have no part in the turns of the next lease that gets its record.
func TestNextLeaseInTheRecord(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	tenant := tenantFor(t, b, "old", fixedShare(50))
	old := join(t, b, tenant, clock)
	tn := take(t, old)
	b.Remove(tenant)
	if again := tenantFor(t, b, "new", fixedShare(50)); again != tenant {
		t.Fatalf("tenant %d, was %d", again, tenant)
	}
	c := join(t, b, tenant, clock)
	now := take(t, c)
	if got := old.Turn(); got != 0 || old.Follow(now) || old.Enter(now) {
		t.Errorf("the old session has the new one's turn: %#x", got)
	}
	old.Done(tn)
	old.Busy(time.Second)
	old.Quit()
	if c.Turn() != now || c.p.tenant(tenant).closing.Load() == uint64(now) {
		t.Error("the old session has ended the new one's turn")
	}
	if s := b.Read()[0]; s.Busy != 0 {
		t.Errorf("busy %v", s.Busy)
	}
}

func TestLeaseEndsAtTheGate(t *testing.T) {
	b, clock := newTestSchedule(t, Site{}), &fake{now: 1e9}
	one := join(t, b, tenantFor(t, b, "one", fixedShare(50)), clock)
	tenant := tenantFor(t, b, "two", fixedShare(50))
	two := join(t, b, tenant, clock)
	tn := take(t, one)
	b.Remove(tenant)
	two.Request()
	if _, err := two.Wait(&never); !errors.Is(err, ErrEnded) {
		t.Errorf("wait after the lease's end: %v", err)
	}
	// A later lease in the same record changes nothing for the old one's session.
	if got := tenantFor(t, b, "three", fixedShare(50)); got != tenant {
		t.Fatalf("tenant %d, want %d", got, tenant)
	}
	if _, err := two.Wait(&never); !errors.Is(err, ErrEnded) {
		t.Errorf("wait in another lease's record: %v", err)
	}
	one.Done(tn)
}
