package worker

// Gates on a driver that has no GPU and fails now and then.

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

const gms = int64(time.Millisecond)

// still is a clock that a test sets.
type still struct{ now int64 }

func (s *still) Now() int64                        { return s.now }
func (s *still) Spins() bool                       { return true }
func (s *still) Wait(*uint32, uint32, int64, bool) {}

func testBoard(t *testing.T, site turns.Site) *turns.Board {
	t.Helper()
	b, err := turns.CreateAnonymous(site)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

func testSeat(t *testing.T, b *turns.Board, lease string, p turns.Policy) int {
	t.Helper()
	seat, err := b.Seat(lease, p)
	if err != nil {
		t.Fatal(err)
	}
	return seat
}

func testChair(t *testing.T, b *turns.Board, seat int, c turns.Clock) *turns.Chair {
	t.Helper()
	var fds [2]int
	policy, state := b.Files()
	for i, f := range []*os.File{policy, state} {
		var err error
		if fds[i], err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			t.Fatal(err)
		}
	}
	chair, err := turns.OpenFDs(fds[0], fds[1], seat, c)
	if err != nil {
		t.Fatal(err)
	}
	return chair
}

// A turn is left when its client rests if others have work, and the turn ends in a moment
// or the client's rests are long.
func TestLeaves(t *testing.T) {
	b, clock := testBoard(t, turns.Site{}), &still{now: 1e9}
	g := newGate(nil, testChair(t, b, testSeat(t, b, "one", turns.Policy{}), clock), clock)
	other := testChair(t, b, testSeat(t, b, "two", turns.Policy{}), clock)
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
	b, clock := testBoard(t, turns.Site{}), &still{now: 1e9}
	g := newGate(nil, testChair(t, b, testSeat(t, b, "one", turns.Policy{}), clock), clock)
	other := testChair(t, b, testSeat(t, b, "two", turns.Policy{}), clock)
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
		if g.rested(); g.turn != tn {
			t.Fatalf("%s, and the turn was passed on", c.name)
		}
		c.set(false)
	}
	if g.rested(); g.turn != 0 || other.Turn() == 0 {
		t.Error("the turn was kept")
	}
	g.rested() // of another wait
	(*gate)(nil).rested()
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// What a client's rests are like is learned from those that were seen.
func TestRests(t *testing.T) {
	g := &gate{}
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
	loadFakeDriver(t)
	clock := &still{}
	f := &flight{clock: clock, events: make(map[uint64][]uint64)}
	reached := func(now int64) (took time.Duration) { // whatever the driver says
		clock.now = now
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

// tenant is a session of a lease with a gate, which does whatever it likes.
type tenant struct {
	s    *session
	ops  int
	over bool
}

func (c *tenant) call(t *testing.T, op uint16, parts ...[]byte) int32 {
	_, rc := c.s.call(op, parts...)
	if c.s.ended != "" && c.s.ended != turns.ErrEnded.Error() {
		t.Errorf("%s: %s", opName(op), c.s.ended)
	}
	return rc
}

// run gives work to several streams, waits for it, rests, captures, and makes and destroys
// streams and contexts.
func (c *tenant) run(t *testing.T, seed uint64) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r := rand.New(rand.NewPCG(seed, 1))
	s := c.s
	s.ctxActivate(u32(0))
	testKernel(s)
	launch := launchFrame(4)[wire.RequestSize:]
	stream, id := uint32(0), uint32(20)
	for ; c.ops > 0 && s.ended == ""; c.ops-- {
		switch op := r.IntN(100); {
		case op < 35:
			s.hdr.Op = wire.OpLaunch
			for range r.IntN(4) {
				s.launch(launch)
			}
		case op < 70:
			c.call(t, opCuMemsetD8Async, u64(1<<40), []byte{1}, u64(uint64(r.IntN(1<<20))), u32(uint32(r.IntN(2))*stream))
		case op < 80:
			c.call(t, opCuStreamSynchronize, u32(uint32(r.IntN(2))*stream))
			nap(time.Duration(r.IntN(4)/3*r.IntN(3000)) * time.Microsecond)
		case op < 84:
			c.call(t, opCuCtxSynchronize)
		case op < 88:
			if stream != 0 {
				c.call(t, opCuStreamDestroy_v2, u32(stream))
			}
			stream++
			c.call(t, opCuStreamCreate, u32(stream), u32(1))
		case op < 91:
			c.call(t, opCuStreamBeginCapture_v2, u32(stream), u32(2))
			for range r.IntN(4) {
				c.call(t, opCuMemsetD8Async, u64(1<<40), []byte{1}, u64(64), u32(uint32(r.IntN(2))*stream))
			}
			c.call(t, opCuStreamEndCapture, u32(stream), u32(id))
			id++
		case op < 93:
			id++
			if c.call(t, opCuCtxCreate_v2, u32(id), u32(0), u32(0)) == 0 && s.setCtx(id) == 0 {
				s.dec.Reset(cat(u64(1<<40), []byte{1}, u64(64), u32(0)))
				s.dispatch(opCuMemsetD8Async, &s.dec, &s.enc)
				c.call(t, opCuCtxDestroy_v2, u32(id))
			}
		case op < 96:
			s.stepOut()
			nap(time.Duration(r.IntN(1500)) * time.Microsecond)
		default:
			s.stepOut()
			s.flushGates()
		}
	}
	c.over = s.ended != ""
}

// Sessions of several leases share a GPU while policies change, a lease ends and the
// owner clears up. At the end nobody has a turn or wants one.
func TestGatesTogether(t *testing.T) {
	loadFakeDriver(t)
	book := account.NewBook([]uint64{testMem})
	l, err := book.Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	b := testBoard(t, turns.Site{Quantum: 2 * time.Millisecond, Grace: 2 * time.Millisecond})
	kinds := []turns.Policy{{Kind: turns.Fixed, Weight: 3000}, {Kind: turns.BestEffort, Weight: 2000}, {Kind: turns.Equal, Lend: true, Weight: 1}}
	var seats []int
	for i, p := range kinds {
		seats = append(seats, testSeat(t, b, fmt.Sprint("lease", i), p))
	}
	ended := testSeat(t, b, "ends", turns.Policy{Kind: turns.Fixed, Weight: 1000})
	var cs []*tenant
	var wg sync.WaitGroup
	for i, seat := range append(seats, seats[0], ended) {
		s, _ := fakeSessionOf(t, l, nil, nil)
		s.gates = []*gate{newGate(s, testChair(t, b, seat, turns.Monotonic{}), turns.Monotonic{})}
		c := &tenant{s: s, ops: 3000}
		if seat == ended {
			c.ops = 1 << 30
		}
		cs = append(cs, c)
		wg.Go(func() {
			c.run(t, uint64(i))
			s.quitGates()
			s.quitGates()
		})
	}
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-done:
		case <-tick.C:
			if n == 20 {
				b.Leave(ended)
			}
			for i, seat := range seats {
				if err := b.Set(seat, kinds[(i+n/3)%len(kinds)]); err != nil {
					t.Error(err)
				}
			}
			b.Sweep()
			b.Read()
			continue
		case <-time.After(time.Minute):
			t.Fatalf("they hang: %+v", b.Read())
		}
		break
	}
	for i, c := range cs {
		c.s.waiters.stop()
		c.s.followed.stop()
		c.s.rd.Close()
		if last := i == len(cs)-1; c.over != last {
			t.Errorf("session %d ended: %q", i, c.s.ended)
		}
	}
	if n := b.Chairs(); n != 0 {
		t.Errorf("%d chairs are left", n)
	}
	for _, s := range b.Read() {
		if s.Wants || s.Turns == 0 || s.Overrun != 0 {
			t.Errorf("%+v", s)
		}
	}
}

// Between launches that are at hand the executor stays inside, and it is outside before it reads
// from the client or does anything else.
func TestStepsOut(t *testing.T) {
	loadFakeDriver(t)
	launch, record := launchFrame(4), frame(opCuEventRecord, 0, u32(1), u32(0))
	in := &pieces{list: [][]byte{
		cat(frame(wire.OpCtxActivate, 1, u32(0)), frame(opCuEventCreate, 0, u32(1), u32(0)), launch),
		bytes.Repeat(launch, 400),
		cat(launch, launch[:7]), launch[7:40], launch[40:],
		bytes.Repeat(cat(launch, record), 50),
	}}
	s, acct := fakeSession(t, nil, nil)
	defer acct.Close()
	var err error
	if s.rd, err = wire.NewReader(in); err != nil {
		t.Fatal(err)
	}
	defer s.rd.Close()
	s.rd.BeforeRead(s.stepOut)
	testKernel(s)
	seat := turns.Policy{Kind: turns.BestEffort, Weight: 10000}
	b := testBoard(t, turns.Site{})
	g := newGate(s, testChair(t, b, testSeat(t, b, "one", seat), turns.Monotonic{}), turns.Monotonic{})
	s.gates = []*gate{g}
	var went []uint64 // in and out, for each piece
	last := uint64(0)
	in.before = func() {
		if s.inside != nil || g.seq.Load()&1 != 0 {
			t.Error("the executor reads inside of the gate")
		}
		went = append(went, g.seq.Load()-last)
		last = g.seq.Load()
	}
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	s.quitGates()
	s.waiters.stop()
	s.followed.stop()
	s.out.stop()
	if s.counts.Launches != 1+400+2+50 {
		t.Errorf("%d launches", s.counts.Launches)
	}
	// This driver fails one call in eleven, which is told from outside; and batches end.
	went = went[1:]
	if went[1] == 0 || went[1] > 200 {
		t.Errorf("for 400 launches in and out %d times", went[1]/2)
	}
	if went[5] < 2*50 {
		t.Errorf("events are recorded inside: in and out %d times", went[5]/2)
	}
	if went[3] != 0 {
		t.Errorf("for half a launch in and out %d times", went[3]/2)
	}
}

// The keeper finds out that the executor does nothing, also when that was inside at its last look.
func TestWatch(t *testing.T) {
	var clock turns.Monotonic
	b := testBoard(t, turns.Site{})
	g := newGate(nil, testChair(t, b, testSeat(t, b, "one", turns.Policy{}), clock), clock)
	g.idles.Store(true)
	g.seq.Store(1)
	from := clock.Now()
	time.AfterFunc(5*time.Millisecond, func() { g.seq.Add(1) })
	g.watch(g.chair.Bell(), from+5000*gms)
	if took := time.Duration(clock.Now() - from); took < 5*time.Millisecond || took > 2*time.Second {
		t.Errorf("after %v", took)
	}
}

// Work passes the gate of the context that its stream is in, whatever context the client names,
// and no frame runs in a context that is none of the client's.
func TestGateOfStream(t *testing.T) {
	loadFakeDriver(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, acct := fakeSession(t, nil, nil)
	defer acct.Close()
	defer s.rd.Close()
	b := testBoard(t, turns.Site{})
	seat := testSeat(t, b, "one", turns.Policy{Kind: turns.BestEffort, Weight: 10000})
	g := newGate(s, testChair(t, b, seat, turns.Monotonic{}), turns.Monotonic{})
	s.gates = []*gate{g}
	must := func(what string, f func() int32) {
		t.Helper()
		for range 20 { // this driver fails one call in eleven
			if f() == 0 {
				return
			}
		}
		t.Fatalf("%s: no", what)
	}
	must("context", func() int32 { return s.ctxActivate(u32(0)) })
	testKernel(s)
	id := uint32(40)
	must("stream", func() int32 {
		id++
		_, rc := s.call(opCuStreamCreate, u32(id), u32(1))
		return rc
	})
	launch := launchFrame(4)[wire.RequestSize:]
	copy(launch[4:], u32(id))
	s.hdr.Op = wire.OpLaunch
	for _, ctx := range []uint32{1, 0} {
		must("context", func() int32 { return s.wantCtx(ctx) })
		given := g.seq.Load()
		must("launch", func() int32 { return s.launch(launch) })
		if s.stepOut(); s.cur != 1 || g.seq.Load() == given {
			t.Errorf("with context %d current: it ran in %d, the gate was passed: %v", ctx, s.cur, g.seq.Load() != given)
		}
	}
	s.forgetCtx()
	if rc := s.wantCtx(noCtx); rc == 0 {
		t.Error("a frame runs in whatever context is current")
	}
	s.quitGates()
}

// testKernel gives a session the kernel that launchFrame wants.
func testKernel(s *session) {
	s.bind(wire.KindKernel, 1, 0x77, 0)
	s.tables[wire.KindKernel].live(1).obj = &kernel{img: &image{used: true}, real: 0x77}
}

// pieces is a client whose bytes come in pieces.
type pieces struct {
	bytesStream
	list   [][]byte
	before func()
}

func (p *pieces) Read2(a, b []byte) (int, error) {
	p.before()
	if len(p.list) == 0 {
		return 0, io.EOF
	}
	p.b, p.list = p.list[0], p.list[1:]
	return p.bytesStream.Read2(a, b)
}

// A client that waits for the GPU when its turn begins is told.
func TestRouse(t *testing.T) {
	s, _ := fakeSession(t, nil, nil)
	defer s.rd.Close()
	out := &frames{}
	s.wr = wire.NewWriter(out)
	clock := &still{now: 1e9}
	g := &gate{s: s, clock: clock}
	for _, at := range []int64{0, gms, roused, roused + 1, 2 * roused} {
		clock.now = 1e9 + at
		g.rouse()
	}
	want := wire.Reply{Kind: wire.KindTurn, Arg: 2000}
	if len(out.list) != 3 || out.list[0] != want {
		t.Errorf("%+v", out.list)
	}
}

// frames is a stream that keeps what is written to it.
type frames struct {
	bytesStream
	list []wire.Reply
}

func (f *frames) Write(p [][]byte) error {
	var all [wire.ReplySize]byte
	copy(all[:], cat(p...))
	var h wire.Reply
	if err := h.Decode(&all); err != nil {
		return err
	}
	f.list = append(f.list, h)
	return nil
}

// What strays took is charged once, however many there are, and not while this session has
// the turn itself.
func TestTook(t *testing.T) {
	g := &gate{}
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
	b, clock := testBoard(t, turns.Site{}), &still{now: 1e9}
	g := newGate(nil, testChair(t, b, testSeat(t, b, "one", turns.Policy{}), clock), clock)
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
