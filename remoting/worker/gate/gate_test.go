package gate

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

const gms = int64(time.Millisecond)

// A turn is passed on when its client waits, if others have work and either the client's idle gaps
// are long or the turn is almost over.
func TestYields(t *testing.T) {
	b, clock := turnstest.Schedule(t, turns.Site{}), &turnstest.Clock{T: 1e9}
	g := newGate(testSet(&fake{}), turnstest.Member(t, b, turnstest.Tenant(t, b, "one", turns.Policy{}), clock), clock)
	other := turnstest.Member(t, b, turnstest.Tenant(t, b, "two", turns.Policy{}), clock)
	g.member.Request()
	tn, err := g.member.Wait(&g.stop)
	if err != nil || !g.member.Enter(tn) {
		t.Fatalf("no turn: %v", err)
	}
	g.turn = tn
	for _, c := range []struct {
		name             string
		others, prewoken bool
		left, gap        int64
		want             bool
	}{
		{"alone", false, true, 0, maxGap, false},
		{"short gaps", true, false, 10 * gms, minGap - 1, false},
		{"long gaps", true, false, 10 * gms, minGap, true},
		{"almost over", true, true, prewakeLead / 4, 0, true},
		{"almost over, and the next one not woken", true, false, prewakeLead / 4, 0, false},
		{"not yet almost over", true, true, prewakeLead/4 + 1, 0, false},
	} {
		if c.others {
			other.Request()
		} else {
			other.Withdraw()
		}
		g.prewoken, g.gap = c.prewoken, c.gap
		if got := g.yields(g.member.Ends(tn) - c.left); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// A thread that finds at the end of such a wait that nothing is left to do passes the turn on, unless
// the executor is inside or at the gate.
func TestWaitEnds(t *testing.T) {
	b, clock := turnstest.Schedule(t, turns.Site{}), &turnstest.Clock{T: 1e9}
	g := newGate(testSet(&fake{}), turnstest.Member(t, b, turnstest.Tenant(t, b, "one", turns.Policy{}), clock), clock)
	other := turnstest.Member(t, b, turnstest.Tenant(t, b, "two", turns.Policy{}), clock)
	g.member.Request()
	tn, err := g.member.Wait(&g.stop)
	if err != nil || !g.member.Enter(tn) {
		t.Fatalf("no turn: %v", err)
	}
	g.turn, g.gap = tn, minGap
	other.Request()
	g.beginTurn()
	for _, c := range []struct {
		name string
		set  func(on bool)
	}{
		{"the executor is inside", func(bool) { g.seq.Add(1) }},
		{"the executor is at the gate", func(on bool) { g.waiting = btoi(on) }},
		{"work has no fence yet", func(on bool) { g.flight.batch.est = int64(btoi(on)); g.flight.batch.publish() }},
		{"the turn is being closed", func(on bool) { g.closing = on }},
	} {
		c.set(true)
		if g.WaitEnds(); g.turn != tn {
			t.Fatalf("%s, and the turn was passed on", c.name)
		}
		c.set(false)
	}
	if g.WaitEnds(); g.turn != 0 || other.Turn() == 0 {
		t.Error("the turn was kept")
	}
	g.WaitEnds() // in no turn
	(*Gate)(nil).WaitEnds()
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// The mean idle gap follows the gaps that were measured.
func TestGaps(t *testing.T) {
	g := &Gate{}
	for range 40 {
		g.gapSince = 5 * gms
		g.endGap(6 * gms)
		g.endGap(900 * gms) // which ends no gap
	}
	if g.gap < gms*9/10 || g.gap > gms {
		t.Errorf("the mean of gaps of 1 ms is %v", time.Duration(g.gap))
	}
	g.gapSince = gms
	g.endGap(3600 * 1000 * gms)
	if g.gap > maxGap/2 {
		t.Errorf("a gap of an hour makes the mean %v", time.Duration(g.gap))
	}
}

// Work that takes less time than its launches is never measured by itself: its estimate is at most
// the time since it was launched, and its batches grow.
func TestLaunchBound(t *testing.T) {
	clock := &turnstest.Clock{}
	f := &flight{driver: &fake{}, clock: clock, events: make(map[uint64][]uint64)}
	reached := func(now int64) (took time.Duration) { // whatever the driver says
		clock.T = now
		for i := range f.fences {
			took += f.end(&f.fences[i], now)
			f.fences[i].queue.last = 0
		}
		f.fences = nil
		return took
	}
	c, now := newCost(unknownCost), gms
	fences, items := 0, 0
	for end := now + 500*gms; now < end; fences++ {
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
		t.Errorf("work launched every 4 us is estimated to take %v", time.Duration(ns))
	}
	if items < 200*fences {
		t.Errorf("%d fences for %d launches", fences, items)
	}
	c = newCost(gms)
	f.begin(c, 0, 0, now, true, false, false)
	f.batch.add(c, c.ns.Load())
	f.close(now)
	if reached(now + 50*gms); c.ns.Load() != gms {
		t.Errorf("work of 1 ms whose end was seen late is estimated to take %v", time.Duration(c.ns.Load()))
	}
}

// The keeper finds out that the executor does nothing, even if the executor was inside at the last
// look.
func TestWatch(t *testing.T) {
	var clock turns.Monotonic
	b := turnstest.Schedule(t, turns.Site{})
	g := newGate(testSet(&fake{}), turnstest.Member(t, b, turnstest.Tenant(t, b, "one", turns.Policy{}), clock), clock)
	g.watchIdle.Store(true)
	g.seq.Store(1)
	from := clock.Now()
	time.AfterFunc(5*time.Millisecond, func() { g.seq.Add(1) })
	g.watch(g.member.Wakeups(), from+5000*gms)
	if took := time.Duration(clock.Now() - from); took < 5*time.Millisecond || took > 2*time.Second {
		t.Errorf("after %v", took)
	}
}

// The time of stragglers is charged once, however many there are, and not while this session has the
// turn itself.
func TestTook(t *testing.T) {
	g := &Gate{}
	for _, c := range []struct {
		name    string
		m       straggler
		ran     int64 // ms
		now     int64 // ms
		entered int64 // the turn at that time; 0: none
		want    int64
	}{
		{"overdue", straggler{since: 100 * gms, overdue: true}, 0, 130, 0, 30},
		{"overdue at the same time", straggler{since: 100 * gms, overdue: true}, 0, 130, 0, 0},
		{"overdue, for longer", straggler{since: 100 * gms, overdue: true}, 0, 140, 0, 10},
		{"into the next turn", straggler{since: 200 * gms, overdue: true}, 0, 250, 220, 20},
		{"given up and ended within a turn", straggler{since: 310 * gms, overdue: true}, 0, 320, 300, 0},
		{"blocked for an unknown time", straggler{since: 400 * gms}, 0, 500, 0, 0},
		{"blocked, and ran in the turn", straggler{since: 400 * gms}, 8, 500, 490, 0},
		{"ran before and in the turn", straggler{since: 400 * gms}, 18, 500, 490, 8},
		{"ran for a moment", straggler{since: 500 * gms}, 1, 530, 0, 1},
		{"overdue at the same time", straggler{since: 500 * gms, overdue: true}, 0, 540, 0, 39},
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

// When one straggler after the other is overdue, all of them are reported since the first. Blocked
// ones are not overdue.
func TestReportOverdue(t *testing.T) {
	b, clock := turnstest.Schedule(t, turns.Site{}), &turnstest.Clock{T: 1e9}
	g := newGate(testSet(&fake{}), turnstest.Member(t, b, turnstest.Tenant(t, b, "one", turns.Policy{}), clock), clock)
	for i, c := range []struct {
		stragglers []straggler
		at, from   int64
	}{
		{[]straggler{{since: 1}, {since: 7, overdue: true}, {since: 5, overdue: true}}, 5, 5},
		{[]straggler{{since: 1}, {since: 7, overdue: true}}, 7, 5},
		{[]straggler{{since: 1}}, 0, 0},
		{[]straggler{{since: 9, overdue: true}}, 9, 9},
	} {
		g.stragglers = c.stragglers
		if g.reportOverdue(); g.overdueAt != c.at || g.overdueSince != c.from {
			t.Errorf("%d: overdue at %d, since %d; want %d, %d", i, g.overdueAt, g.overdueSince, c.at, c.from)
		}
	}
}

// Work that stays on the GPU is charged as long as it stays, and ends the session at the site's limit; while nobody else
// wants the GPU neither.
func TestOverran(t *testing.T) {
	site := turns.Site{Limit: time.Second, Overrun: turns.OverrunEnds}
	b, clock := turnstest.Schedule(t, site), &turnstest.Clock{T: 1e9}
	set := testSet(&fake{})
	var over time.Duration
	set.Overran = func(overdue, _, _ time.Duration) { over = overdue }
	g := newGate(set, turnstest.Member(t, b, turnstest.Tenant(t, b, "one", turns.Policy{Kind: turns.Fixed, Weight: 1000}), clock), clock)
	other := turnstest.Member(t, b, turnstest.Tenant(t, b, "two", turns.Policy{Kind: turns.Fixed, Weight: 9000}), clock)
	ev := g.flight.driver.NewEvent()
	g.stragglers = []straggler{{ev: ev, queue: &queue{}, since: clock.T, overdue: true}}
	g.flight.driver.(*fake).clock, g.flight.driver.(*fake).events[ev-1] = clock, 1<<62
	for range 3000 {
		clock.T += gms
		g.collect(clock.T)
	}
	if over != 0 || g.overdueTime != 0 {
		t.Fatalf("alone it was overdue for %v and ended after %v", time.Duration(g.overdueTime), over)
	}
	other.Request()
	for i := 1; over == 0 && i < 2000; i++ {
		clock.T += gms
		g.collect(clock.T)
		if want := int64(i) * gms; g.overdueTime != want {
			t.Fatalf("overdue for %v, want %v", time.Duration(g.overdueTime), time.Duration(want))
		}
	}
	if over != 4*time.Second {
		t.Errorf("it ended when it had been overdue for %v", over)
	}
	for _, c := range b.Read() {
		if c.Lease == "one" && (c.Owes < 700*time.Millisecond || c.Longest != 4*time.Second) {
			t.Errorf("%+v", c)
		}
	}
}

// sleeper is a clock on which sleeping takes its time.
type sleeper struct{ turnstest.Clock }

func (c *sleeper) Wait(_ *uint32, _ uint32, until int64, _ bool) { c.T = max(c.T, until) }

// A lease that owes time makes no context while others want the GPU: not before its share has paid for that, or they want nothing
// for a while.
func TestAwaitPaid(t *testing.T) {
	b, clock := turnstest.Schedule(t, turns.Site{}), &sleeper{turnstest.Clock{T: 1e12}}
	set := testSet(&fake{})
	thief := turnstest.Tenant(t, b, "one", turns.Policy{Kind: turns.Fixed, Weight: 1000})
	late := turnstest.Member(t, b, thief, clock)
	set.Open(0, turnstest.Member(t, b, thief, clock), clock, IdleTime)
	t.Cleanup(set.Quit)
	other := turnstest.Member(t, b, turnstest.Tenant(t, b, "two", turns.Policy{Kind: turns.Fixed, Weight: 9000}), clock)
	waits := func(dev int) time.Duration {
		from := clock.T
		set.AwaitPaid(dev)
		return time.Duration(clock.T - from)
	}
	if d := waits(0) + waits(1); d != 0 {
		t.Errorf("nothing is owed: %v", d)
	}
	other.Request()
	if turn, err := other.Wait(new(atomic.Bool)); err != nil || !other.Enter(turn) {
		t.Fatalf("no turn: %v", err)
	}
	late.SetOverdue(clock.T)
	for range 3000 {
		clock.T += gms
		late.Debit(clock.T-gms, clock.T)
	}
	late.SetOverdue(0)
	// A tenth of the GPU pays 3 s in 30 s. 3 of them are over, and it had not used its share in the second before.
	if d := waits(0); d < 25*time.Second || d > 28*time.Second {
		t.Errorf("3 s of the GPU were paid by 10 %% of it in %v", d)
	}
	if d := waits(0); d != 0 {
		t.Errorf("paid: %v", d)
	}
	late.SetOverdue(clock.T)
	for range 3000 {
		clock.T += gms
		late.Debit(clock.T-gms, clock.T)
	}
	late.SetOverdue(0)
	other.Done(other.Turn())
	other.Withdraw()
	if d := waits(0); d != quietLooks*time.Duration(debtNap) {
		t.Errorf("nobody else wants the GPU: %v", d)
	}
}

// Work that has ended when the keeper looks again, long after it should have, is not charged for that time.
func TestLateLook(t *testing.T) {
	b, clock := turnstest.Schedule(t, turns.Site{}), &turnstest.Clock{T: 1e9}
	g := newGate(testSet(&fake{}), turnstest.Member(t, b, turnstest.Tenant(t, b, "one", turns.Policy{Kind: turns.Fixed, Weight: 200}), clock), clock)
	turnstest.Member(t, b, turnstest.Tenant(t, b, "two", turns.Policy{Kind: turns.Fixed, Weight: 9800}), clock).Request()
	f := g.flight.driver.(*fake)
	for _, behind := range []bool{false, true} { // another one, in the same stream
		first, second := f.NewEvent(), f.NewEvent()
		q := &queue{}
		g.stragglers = []straggler{{ev: first, queue: q, since: clock.T, seen: clock.T, overdue: true}}
		if behind {
			g.stragglers = append(g.stragglers, straggler{ev: second, queue: q, since: clock.T, seen: clock.T, overdue: true})
		}
		from := g.chargedUntil
		if from == 0 {
			from = clock.T
		}
		f.clock, f.events[first-1], f.events[second-1] = clock, clock.T+10*gms, clock.T+11*gms
		for range 10 {
			g.collect(clock.T)
			clock.T += gms
		}
		clock.T += 200 * gms
		g.collect(clock.T)
		if d := g.chargedUntil - from; len(g.stragglers) != 0 || d < 9*gms || d > 13*gms {
			t.Errorf("behind %v: charged for %v, %d are left", behind, time.Duration(d), len(g.stragglers))
		}
		g.chargedUntil = clock.T
	}
}

// The time of each kind of work is learned from events, and little work is in flight at a time.
func TestLearns(t *testing.T) {
	clock := turns.Monotonic{}
	f := &fake{clock: clock}
	g := testGate(t, f, clock)
	const long, short = 6 * gms, gms / 10
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
		if got := g.cost(workKey{what, 1}).ns.Load(); got < want/2 || got > want*2 {
			t.Errorf("work of %v is estimated to take %v", time.Duration(want), time.Duration(got))
		}
	}
	if n := f.inFlight(1); n > int64(turns.DefaultQuantum)+2*long {
		t.Errorf("%v are in flight", time.Duration(n))
	}
}

// While long kernels end one after the other, no more than two of a stream are in flight, although each takes longer
// than stragglerTime: the next turn of another tenant would have to wait for all of them.
func TestLongKernels(t *testing.T) {
	clock := turns.Monotonic{}
	f := &fake{clock: clock}
	g := testGate(t, f, clock)
	const long = stragglerTime * 5 / 4
	g.cost(workKey{1, 1}).learn(long)
	for i := range 10 {
		if !g.Enter(1, 1, 1) {
			t.Fatal("no turn")
		}
		if n := f.inFlight(1); n > 2*long {
			t.Fatalf("launch %d: %v are in flight", i, time.Duration(n))
		}
		f.work(1, long)
		g.set.StepOut()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(g.stragglers); n != 0 {
		t.Errorf("%d were given up", n)
	}
}

// The set's Tell is called once when a phase begins and once when it ends.
func TestTell(t *testing.T) {
	clock := turns.Monotonic{}
	f := &fake{clock: clock}
	g := testGate(t, f, clock)
	var mu sync.Mutex
	open, seen := map[Phase]bool{}, map[Phase]int{}
	g.set.Tell = func(device int, p Phase, begins bool) {
		mu.Lock()
		defer mu.Unlock()
		if device != 0 || open[p] == begins {
			t.Errorf("device %d, phase %d begins: %v, twice", device, p, begins)
		}
		open[p] = begins
		seen[p]++
	}
	g.cost(workKey{1, 1}).learn(40 * gms)
	for range 8 {
		if !g.Enter(1, 1, 1) {
			t.Fatal("no turn")
		}
		f.work(1, 40*gms)
		g.set.StepOut()
	}
	waitFor := clock.Now() + 10*int64(time.Second)
	for over := false; !over; time.Sleep(time.Millisecond) {
		mu.Lock()
		over = !open[InTurn] && !open[AwaitsTurn] && !open[Throttled]
		mu.Unlock()
		if clock.Now() > waitFor {
			t.Fatalf("they do not end: %v", open)
		}
	}
	if seen[InTurn] < 2 || seen[AwaitsTurn] < 2 || seen[Throttled] < 2 {
		t.Errorf("%v", seen)
	}
}

// A kernel that does not end may wait for work that comes after other launches: those go on.
func TestStuck(t *testing.T) {
	clock := turns.Monotonic{}
	f := &fake{clock: clock}
	g := testGate(t, f, clock)
	g.cost(workKey{1, 1}).learn(stragglerTime)
	from := clock.Now()
	for range 8 {
		if !g.Enter(1, 1, 1) {
			t.Fatal("no turn")
		}
		f.work(1, 3600*1000*gms)
		g.set.StepOut()
	}
	if d := clock.Now() - from; d < stuckTime || d > 10*stuckTime {
		t.Errorf("after %v", time.Duration(d))
	}
}

// Between launches the executor stays inside. StepOut ends that, and a second call does nothing.
func TestStays(t *testing.T) {
	g := testGate(t, &fake{}, turns.Monotonic{})
	s := g.set
	for i := range 100 {
		if !g.Enter(1, 1, 0) {
			t.Fatal("no turn")
		}
		if s.inside == nil {
			t.Fatalf("launch %d: outside", i)
		}
	}
	if n := g.Crossings(); n > 40 {
		t.Errorf("100 launches: entered or left %d times", n)
	}
	s.StepOut()
	n := g.Crossings()
	if s.StepOut(); s.inside != nil || n&1 != 0 || g.Crossings() != n {
		t.Errorf("inside: %v, entered or left %d times, then %d", s.inside != nil, n, g.Crossings())
	}
}

// The client is told of a turn that is about to begin, but not more often than prewakeEvery.
func TestPrewakeClient(t *testing.T) {
	s := testSet(&fake{})
	var told []time.Duration
	s.Prewake = func(d time.Duration) { told = append(told, d) }
	clock := &turnstest.Clock{}
	g := &Gate{set: s, clock: clock}
	for _, at := range []int64{0, gms, prewakeEvery, prewakeEvery + 1, 2 * prewakeEvery} {
		clock.T = 1e9 + at
		g.prewakeClient()
	}
	if len(told) != 3 || told[0] != awakeTime {
		t.Errorf("told %v", told)
	}
}

// A session without gates never waits.
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
	if s.Kept() || s.Here() != nil || s.inside != nil || s.WaitBegins() != nil {
		t.Error("a gate is kept")
	}
}

// BenchmarkEnter measures launches that find the gate open.
func BenchmarkEnter(b *testing.B) {
	g := testGate(b, &fake{}, turns.Monotonic{})
	for i := range b.N {
		if !g.Enter(0x77, 64, 0) {
			b.Fatal("no turn")
		}
		if i&1023 == 0 { // so that no batch ends
			g.exec.budget, g.exec.items = 1<<60, 1<<60
		}
	}
	b.StopTimer()
	g.set.StepOut()
}

// BenchmarkEnterBatches measures launches with everything that belongs to them: fences behind
// batches, and queries of their events.
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
