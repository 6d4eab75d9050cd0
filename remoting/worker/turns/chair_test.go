package turns

import (
	"errors"
	"testing"
	"time"
)

// A process that ends says so from more than one thread, and some of them go on for a
// while: by then the chair may be another's.
func TestQuitTwice(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	seat := seatFor(t, b, "lease", fixedShare(50))
	c := sit(t, b, seat, clock)
	tn := take(t, c)
	c.Quit()
	if n := b.Chairs(); n != 0 {
		t.Fatalf("%d chairs are left", n)
	}
	next := sit(t, b, seat, clock)
	if next.i != c.i {
		t.Fatalf("the next session has chair %d, not %d", next.i, c.i)
	}
	next.me = 1 // a process that lives
	next.p.chair(next.i, scOwner).Store(next.me)
	now := take(t, next)
	next.Late(7)
	c.Quit()
	c.Unask()
	c.Late(0)
	if c.Enter(now) || c.Follow(now) {
		t.Error("who has quit joins a turn")
	}
	if _, ok := c.Renew(now); ok {
		t.Error("who has quit takes another turn")
	}
	c.Done(now)
	c.Done(tn)
	c.Ask()
	for what, want := range map[int]uint64{scOwner: next.me, scWant: 1, scOpen: uint64(now), scLate: 7} {
		if got := next.p.chair(next.i, what).Load(); got != want {
			t.Errorf("word %d of the next session's chair is %#x, was %#x", what, got, want)
		}
	}
	if next.Turn() != now || next.p.seat(seat, ssClosing).Load() == uint64(now) {
		t.Error("the next session's turn was ended")
	}
	if _, err := c.Wait(&never); !errors.Is(err, ErrEnded) {
		t.Errorf("wait after the end: %v", err)
	}
}

// A session whose chair was taken ends; one whose wish was does not wait for ever.
func TestChairTaken(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	c := sit(t, b, seatFor(t, b, "lease", fixedShare(50)), clock)
	c.Ask()
	c.p.chair(c.i, scWant).Store(0)
	if tn, err := c.Wait(&never); err != nil || tn == 0 {
		t.Errorf("without its wish: turn %#x, %v", tn, err)
	}
	c.p.chair(c.i, scOwner).Store(c.me + 1)
	if _, err := c.Wait(&never); !errors.Is(err, ErrEnded) {
		t.Errorf("without its chair: %v", err)
	}
}

// A spinner is a clock that goes on a little with every look.
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

// Who waits for time of its own is awake when that comes, and asleep until a moment before.
func TestWaitForOwnTime(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &spinner{fake: fake{now: 1e9}}
	c := sit(t, b, seatFor(t, b, "lease", fixedShare(25)), clock)
	tn := take(t, c)
	// It came with a turn's credit, and has a quarter of the time; a quarter of a turn is not too soon.
	due := clock.now - c.Quantum() + 4*(c.Ends(tn)-clock.now) - c.Quantum()/4
	clock.now = c.Ends(tn)
	c.Done(tn)
	var told []int64
	c.Soon(func() { told = append(told, due-clock.now) })
	clock.looks, clock.naps = 0, nil
	tn = take(t, c)
	if late := time.Duration(token(tn).begin() - due); late < -100*time.Microsecond || late > 100*time.Microsecond {
		t.Errorf("the turn begins %v after its time", late)
	}
	if len(clock.naps) != 1 {
		t.Errorf("slept %d times: %v", len(clock.naps), clock.naps)
	}
	if len(told) != 1 || told[0] > int64(AlertLead) || told[0] < int64(AlertLead)*9/10 {
		t.Errorf("told so long before, ns: %v", told)
	}
	if most := int(2 * AlertLead / time.Microsecond); clock.looks > most {
		t.Errorf("looked at the clock %d times", clock.looks)
	}
}

// Who is told that a turn is about to end looks for it, but no longer than for a while.
// Of two with equal shares each is told of each of its own, and they take turns one by one,
// although one of them always ends a little early and the other one late.
func TestAlertBetweenEquals(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	var cs []*Chair
	for i := range 2 {
		cs = append(cs, sit(t, b, seatFor(t, b, string(rune('a'+i)), fixedShare(50)), clock))
		cs[i].Ask()
	}
	late := []int64{-300000, 100000} // how much longer than planned each works
	take(t, cs[0])
	for n, i := 0, 0; n < 100; n++ {
		c, other := cs[i], cs[1-i]
		tn := c.Turn()
		if n > 0 && !c.Enter(tn) {
			t.Fatalf("turn %d is nobody's", n)
		}
		clock.now = c.Ends(tn) - int64(AlertLead)
		told := c.Alert(tn)
		clock.now = c.Ends(tn) + late[i]
		c.Done(tn)
		switch changed := other.Turn() != 0; {
		case !changed && n >= 10: // they began at the same time
			t.Fatalf("turn %d of the same one", n+1)
		case changed && !told:
			t.Fatalf("turn %d ends without a word to the other", n)
		case changed:
			i = 1 - i
		}
	}
}

func TestAlertInVain(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &spinner{fake: fake{now: 1e9}}
	one := sit(t, b, seatFor(t, b, "one", fixedShare(50)), clock)
	two := sit(t, b, seatFor(t, b, "two", fixedShare(50)), clock)
	tn := take(t, one)
	two.Ask()
	clock.now = one.Ends(tn) - int64(AlertLead)
	if !one.Alert(tn) {
		t.Fatal("nobody to be told")
	}
	told := 0
	two.Soon(func() { told++ })
	from := clock.now
	clock.looks = 0
	clock.onNap = func(until int64) {
		if spun := clock.now - from; told == 1 && spun > 2*alertTime {
			t.Errorf("looked for %v", time.Duration(spun))
		}
	}
	take(t, two) // as soon as it is taken from the other
	if gap := time.Duration(clock.now - one.Overdue(tn)); gap > time.Millisecond || told != 1 {
		t.Errorf("had the turn %v after it was over, told %d times", gap, told)
	}
	if most := int(2 * alertTime / int64(time.Microsecond)); clock.looks > most {
		t.Errorf("looked at the clock %d times", clock.looks)
	}
}

// between lets f happen when a session comes to a point, once.
func between(t *testing.T, point string, f func()) {
	t.Helper()
	done := false
	died = func(p string) {
		if p == point && !done {
			done = true
			f()
		}
	}
	t.Cleanup(func() {
		died = nil
		if !done {
			t.Errorf("nobody came to the point %q", point)
		}
	})
}

// One session of a lease leaves a turn while another is about to join it: it goes on.
func TestJoinWhatIsBeingClosed(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	seat := seatFor(t, b, "two", fixedShare(50))
	one, two := sit(t, b, seat, clock), sit(t, b, seat, clock)
	other := sit(t, b, seatFor(t, b, "other", fixedShare(50)), clock)
	tn := take(t, one)
	other.Ask()
	clock.now += ms
	between(t, "open", func() { one.Done(tn) })
	if two.Enter(tn) {
		t.Fatal("a turn that is being closed was entered")
	}
	if other.Turn() == 0 {
		t.Error("nobody has passed the turn on")
	}
}

// Two sessions of a lease go on into the next turn at once: it counts as taken.
func TestRenewAtOnce(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	seat := seatFor(t, b, "two", Policy{Kind: BestEffort, Weight: 100})
	one, two := sit(t, b, seat, clock), sit(t, b, seat, clock)
	two.Ask()
	tn := take(t, one)
	if !two.Enter(tn) {
		t.Fatal("the second session may not enter")
	}
	clock.now += 5 * ms
	var next Turn
	between(t, "renewing", func() {
		clock.now += 5000
		next, _ = two.Renew(tn)
		one.p.seat(seat, ssTook).Store(uint64(tn)) // as the first one, late, would have it
	})
	if _, ok := one.Renew(tn); ok || next == 0 {
		t.Fatalf("both went on, or neither: %v, %#x", ok, next)
	}
	if one.Turn() != next || one.p.seat(seat, ssTook).Load() != uint64(next) {
		t.Error("the turn does not count as taken")
	}
	if !one.Follow(next) {
		t.Error("the slower one may not follow")
	}
}

// A token from a time that nobody believes costs one turn, not all that come.
func TestTokenFromTheFuture(t *testing.T) {
	for _, us := range []int64{5e6, 1 << 53, tokenBegin} {
		b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
		one := sit(t, b, seatFor(t, b, "one", fixedShare(50)), clock)
		two := sit(t, b, seatFor(t, b, "two", fixedShare(50)), clock)
		one.Ask()
		one.p.token().Store(uint64(packToken(one.seat, false, us)))
		tn := take(t, two)
		if begin := token(tn).begin(); begin > clock.now+future || begin < clock.now-future {
			t.Errorf("%d us: the next turn begins at %d, it is %d", us, begin, clock.now)
		}
		two.Done(tn)
		// The holder itself does not believe it either.
		one.p.token().Store(uint64(packToken(one.seat, false, us)))
		if tn := take(t, one); token(tn).begin() > clock.now+future {
			t.Errorf("%d us: a turn from the future was kept", us)
		}
	}
}

// What is left of a lease's sessions has no part in the turns of whoever has its seat.
func TestNextLeaseOnTheSeat(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	seat := seatFor(t, b, "old", fixedShare(50))
	old := sit(t, b, seat, clock)
	tn := take(t, old)
	b.Leave(seat)
	if again := seatFor(t, b, "new", fixedShare(50)); again != seat {
		t.Fatalf("seat %d, was %d", again, seat)
	}
	c := sit(t, b, seat, clock)
	now := take(t, c)
	if got := old.Turn(); got != 0 || old.Follow(now) || old.Enter(now) {
		t.Errorf("the old session has the new one's turn: %#x", got)
	}
	old.Done(tn)
	old.Busy(time.Second)
	old.Quit()
	if c.Turn() != now || c.p.seat(seat, ssClosing).Load() == uint64(now) {
		t.Error("the old session has ended the new one's turn")
	}
	if s := b.Read()[0]; s.Busy != 0 {
		t.Errorf("busy %v", s.Busy)
	}
}

func TestLeaseEndsAtTheGate(t *testing.T) {
	b, clock := newTestBoard(t, Site{}), &fake{now: 1e9}
	one := sit(t, b, seatFor(t, b, "one", fixedShare(50)), clock)
	seat := seatFor(t, b, "two", fixedShare(50))
	two := sit(t, b, seat, clock)
	tn := take(t, one)
	b.Leave(seat)
	two.Ask()
	if _, err := two.Wait(&never); !errors.Is(err, ErrEnded) {
		t.Errorf("wait after the lease's end: %v", err)
	}
	// Its successor on the seat is nobody's business of the old one.
	if got := seatFor(t, b, "three", fixedShare(50)); got != seat {
		t.Fatalf("seat %d, want %d", got, seat)
	}
	if _, err := two.Wait(&never); !errors.Is(err, ErrEnded) {
		t.Errorf("wait on another lease's seat: %v", err)
	}
	one.Done(tn)
}
