package gate

import (
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

const gms = int64(time.Millisecond)

// A turn is left when its client rests if others have work, and the turn ends in a moment
// or the client's rests are long.
func TestLeaves(t *testing.T) {
	b, clock := turnstest.Board(t, turns.Site{}), &turnstest.Clock{T: 1e9}
	g := newGate(testSet(&fake{}), turnstest.Chair(t, b, turnstest.Seat(t, b, "one", turns.Policy{}), clock), clock)
	other := turnstest.Chair(t, b, turnstest.Seat(t, b, "two", turns.Policy{}), clock)
	g.chair.Ask()
	tn, err := g.chair.Wait(&g.stop)
	if err != nil || !g.chair.Enter(tn) {
		t.Fatalf("no turn: %v", err)
	}
	g.turn = tn
	for _, c := range []struct {
		name           string
		others, warned bool
		left, rest     int64
		want           bool
	}{
		{"alone", false, true, 0, mostRest, false},
		{"short rests", true, false, 10 * gms, leastRest - 1, false},
		{"long rests", true, false, 10 * gms, leastRest, true},
		{"the end in a moment", true, true, alertLead / 4, 0, true},
		{"the end, and nobody told", true, false, alertLead / 4, 0, false},
		{"the end not yet", true, true, alertLead/4 + 1, 0, false},
	} {
		if c.others {
			other.Ask()
		} else {
			other.Unask()
		}
		g.alerted, g.rest = c.warned, c.rest
		if got := g.leaves(g.chair.Ends(tn) - c.left); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// Whoever finds at the end of such a wait that nothing is left to do passes the turn on,
// unless the executor is inside or at the gate.
func TestRested(t *testing.T) {
	b, clock := turnstest.Board(t, turns.Site{}), &turnstest.Clock{T: 1e9}
	g := newGate(testSet(&fake{}), turnstest.Chair(t, b, turnstest.Seat(t, b, "one", turns.Policy{}), clock), clock)
	other := turnstest.Chair(t, b, turnstest.Seat(t, b, "two", turns.Policy{}), clock)
	g.chair.Ask()
	tn, err := g.chair.Wait(&g.stop)
	if err != nil || !g.chair.Enter(tn) {
		t.Fatalf("no turn: %v", err)
	}
	g.turn, g.rest = tn, leastRest
	other.Ask()
	g.begun()
	for _, c := range []struct {
		name string
		set  func(on bool)
	}{
		{"the executor is inside", func(bool) { g.seq.Add(1) }},
		{"the executor is at the gate", func(on bool) { g.waiting = btoi(on) }},
		{"work has no mark yet", func(on bool) { g.flight.batch.est = int64(btoi(on)); g.flight.batch.tell() }},
		{"the turn is being closed", func(on bool) { g.closing = on }},
	} {
		c.set(true)
		if g.Rested(); g.turn != tn {
			t.Fatalf("%s, and the turn was passed on", c.name)
		}
		c.set(false)
	}
	if g.Rested(); g.turn != 0 || other.Turn() == 0 {
		t.Error("the turn was kept")
	}
	g.Rested() // of another wait
	(*Gate)(nil).Rested()
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// What a client's rests are like is learned from those that were seen.
func TestRests(t *testing.T) {
	g := &Gate{}
	for range 40 {
		g.restsAt = 5 * gms
		g.restOver(6 * gms)
		g.restOver(900 * gms) // which was no rest
	}
	if g.rest < gms*9/10 || g.rest > gms {
		t.Errorf("rests of 1 ms are taken for %v", time.Duration(g.rest))
	}
	g.restsAt = gms
	g.restOver(3600 * 1000 * gms)
	if g.rest > mostRest/2 {
		t.Errorf("an hour counts as %v", time.Duration(g.rest))
	}
}

// Work that takes less than its launches is never measured by itself: what it takes is at
// most the time since it was given, and its batches grow.
func TestLaunchBound(t *testing.T) {
	clock := &turnstest.Clock{}
	f := &flight{driver: &fake{}, clock: clock, events: make(map[uint64][]uint64)}
	reached := func(now int64) (took time.Duration) { // whatever the driver says
		clock.T = now
		for i := range f.marks {
			took += f.end(&f.marks[i], now)
			f.marks[i].lane.last = 0
		}
		f.marks = nil
		return took
	}
	c, now := newCost(unknownCost), gms
	marks, items := 0, 0
	for end := now + 500*gms; now < end; marks++ {
		began := now
		f.begin(c, 0, 0, now, true, false, false)
		for f.batch.n == 0 || !f.full(false) {
			f.batch.add(c, c.ns.Load())
			now += 4000 // a launch
			items++
		}
		f.close(now)
		if took := reached(now); int64(took) > now-began {
			t.Fatalf("%v on the GPU, of %v", took, time.Duration(now-began))
		}
	}
	if ns := c.ns.Load(); ns > 6000 {
		t.Errorf("a launch every 4 us is taken for work of %v", time.Duration(ns))
	}
	if items < 200*marks {
		t.Errorf("%d marks for %d launches", marks, items)
	}
	c = newCost(gms)
	f.begin(c, 0, 0, now, true, false, false)
	f.batch.add(c, c.ns.Load())
	f.close(now)
	if reached(now + 50*gms); c.ns.Load() != gms {
		t.Errorf("what was seen late is taken for %v", time.Duration(c.ns.Load()))
	}
}

// The keeper finds out that the executor does nothing, also when that was inside at its last look.
func TestWatch(t *testing.T) {
	var clock turns.Monotonic
	b := turnstest.Board(t, turns.Site{})
	g := newGate(testSet(&fake{}), turnstest.Chair(t, b, turnstest.Seat(t, b, "one", turns.Policy{}), clock), clock)
	g.idles.Store(true)
	g.seq.Store(1)
	from := clock.Now()
	time.AfterFunc(5*time.Millisecond, func() { g.seq.Add(1) })
	g.watch(g.chair.Bell(), from+5000*gms)
	if took := time.Duration(clock.Now() - from); took < 5*time.Millisecond || took > 2*time.Second {
		t.Errorf("after %v", took)
	}
}

// What strays took is charged once, however many there are, and not while this session has
// the turn itself.
func TestTook(t *testing.T) {
	g := &Gate{}
	for _, c := range []struct {
		name    string
		m       stray
		ran     int64 // ms
		now     int64 // ms
		entered int64 // the turn at that time; 0: none
		want    int64
	}{
		{"late", stray{since: 100 * gms, late: true}, 0, 130, 0, 30},
		{"late beside that", stray{since: 100 * gms, late: true}, 0, 130, 0, 0},
		{"late, for longer", stray{since: 100 * gms, late: true}, 0, 140, 0, 10},
		{"into the next turn", stray{since: 200 * gms, late: true}, 0, 250, 220, 20},
		{"let go and ended within a turn", stray{since: 310 * gms, late: true}, 0, 320, 300, 0},
		{"waited for the client, nobody knows how long", stray{since: 400 * gms}, 0, 500, 0, 0},
		{"waited, and ran in the turn", stray{since: 400 * gms}, 8, 500, 490, 0},
		{"ran, and then in the turn as well", stray{since: 400 * gms}, 18, 500, 490, 8},
		{"ran for a moment", stray{since: 500 * gms}, 1, 530, 0, 1},
		{"late beside that", stray{since: 500 * gms, late: true}, 0, 540, 0, 39},
	} {
		g.turn, g.entered = 0, c.entered*gms
		if c.entered != 0 {
			g.turn = 1
		}
		if got := g.took(&c.m, c.ran*gms, c.now*gms); got != c.want*gms {
			t.Errorf("%s: %v, want %d ms", c.name, time.Duration(got), c.want)
		}
	}
}

// What is late one behind the other is late since the first of it; what waits for the
// client is not.
func TestTellLate(t *testing.T) {
	b, clock := turnstest.Board(t, turns.Site{}), &turnstest.Clock{T: 1e9}
	g := newGate(testSet(&fake{}), turnstest.Chair(t, b, turnstest.Seat(t, b, "one", turns.Policy{}), clock), clock)
	for i, c := range []struct {
		strays   []stray
		at, from int64
	}{
		{[]stray{{since: 1}, {since: 7, late: true}, {since: 5, late: true}}, 5, 5},
		{[]stray{{since: 1}, {since: 7, late: true}}, 7, 5},
		{[]stray{{since: 1}}, 0, 0},
		{[]stray{{since: 9, late: true}}, 9, 9},
	} {
		g.strays = c.strays
		if g.tellLate(); g.lateAt != c.at || g.lateFrom != c.from {
			t.Errorf("%d: late since %d, all in all %d; want %d, %d", i, g.lateAt, g.lateFrom, c.at, c.from)
		}
	}
}

// What work takes is learned from events, and no more of it is given than a few milliseconds.
func TestLearns(t *testing.T) {
	clock := turns.Monotonic{}
	f := &fake{clock: clock}
	g := testGate(t, f, clock)
	const long, short = 2 * gms, gms / 10
	for range 30 {
		for _, c := range []struct {
			what uint64
			ns   int64
		}{{1, long}, {2, short}} {
			if !g.Enter(c.what, 1, c.what) {
				t.Fatal("no turn")
			}
			f.work(c.what, c.ns)
			g.set.StepOut()
		}
	}
	g.Flush()
	for what, want := range map[uint64]int64{1: long, 2: short} {
		if got := g.cost(gateKey{what, 1}).ns.Load(); got < want*9/10 || got > want*11/10 {
			t.Errorf("work of %v is taken for %v", time.Duration(want), time.Duration(got))
		}
	}
	if n := f.inFlight(1); n > int64(turns.DefaultQuantum)+2*long {
		t.Errorf("%v are in flight", time.Duration(n))
	}
}

// Between launches the executor stays inside; StepOut ends that, once.
func TestStays(t *testing.T) {
	g := testGate(t, &fake{}, turns.Monotonic{})
	s := g.set
	for i := range 100 {
		if !g.Enter(1, 1, 0) {
			t.Fatal("no turn")
		}
		if !s.Inside() {
			t.Fatalf("launch %d: outside", i)
		}
	}
	if n := g.Crossings(); n > 20 {
		t.Errorf("100 launches: in or out %d times", n)
	}
	s.StepOut()
	n := g.Crossings()
	if s.StepOut(); s.Inside() || n&1 != 0 || g.Crossings() != n {
		t.Errorf("inside: %v, in or out %d times, then %d", s.Inside(), n, g.Crossings())
	}
}

// The client is told of a turn that is about to begin, but not every time that it looks so.
func TestRouse(t *testing.T) {
	s := testSet(&fake{})
	var told []time.Duration
	s.Wake = func(d time.Duration) { told = append(told, d) }
	clock := &turnstest.Clock{}
	g := &Gate{set: s, clock: clock}
	for _, at := range []int64{0, gms, roused, roused + 1, 2 * roused} {
		clock.T = 1e9 + at
		g.rouse()
	}
	if len(told) != 3 || told[0] != attention {
		t.Errorf("told %v", told)
	}
}

// A session without gates is never held up.
func TestNoGates(t *testing.T) {
	var s Set
	s.Use(0, 1)
	s.StepOut()
	s.WaitsForClient(true)
	s.WaitsForValue(true)
	s.WaitsForStream()
	s.LaunchesGraph()
	s.CallDone()
	s.Flush()
	s.Forget(1)
	s.Quit()
	if s.Kept() || s.Here() != nil || s.Inside() || s.Resting() != nil {
		t.Error("a gate is kept")
	}
}

// Launches that find the gate open.
func BenchmarkEnter(b *testing.B) {
	g := testGate(b, &fake{}, turns.Monotonic{})
	for i := range b.N {
		if !g.Enter(0x77, 64, 0) {
			b.Fatal("no turn")
		}
		if i&1023 == 0 { // a batch never ends
			g.exec.room, g.exec.left = 1<<60, 1<<60
		}
	}
	b.StopTimer()
	g.set.StepOut()
}

// Launches with all that belongs to them: batches end, and their events are looked at.
func BenchmarkEnterBatches(b *testing.B) {
	g := testGate(b, &fake{}, turns.Monotonic{})
	for range b.N {
		if !g.Enter(0x77, 64, 0) {
			b.Fatal("no turn")
		}
	}
	b.StopTimer()
	g.set.StepOut()
}
