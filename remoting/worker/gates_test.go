package worker

// Sessions with gates, on a driver that has no GPU and sometimes fails.

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/gate"
	"github.com/sluice-hpc/sluice/remoting/worker/nap"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

// player is a session with a gate that makes calls at random.
type player struct {
	s    *session
	ops  int
	over bool
}

func (c *player) call(t *testing.T, op uint16, parts ...[]byte) int32 {
	_, rc := c.s.call(op, parts...)
	if c.s.ended != "" && c.s.ended != turns.ErrEnded.Error() {
		t.Errorf("%s: %s", opName(op), c.s.ended)
	}
	return rc
}

// run starts work in several streams, waits for it, pauses, captures, and makes and destroys streams
// and contexts.
func (c *player) run(t *testing.T, seed uint64) {
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
			nap.For(time.Duration(r.IntN(4)/3*r.IntN(3000)) * time.Microsecond)
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
			c.call(t, opCuStreamEndCapture, u32(stream), []byte{1})
		case op < 93:
			id++
			if c.call(t, opCuCtxCreate_v2, u32(id), u32(0), u32(0)) == 0 && s.setCtx(id) == 0 {
				s.dec.Reset(cat(u64(1<<40), []byte{1}, u64(64), u32(0)))
				s.dispatch(opCuMemsetD8Async, &s.dec, &s.enc)
				c.call(t, opCuCtxDestroy_v2, u32(id))
			}
		case op < 96:
			s.gates.StepOut()
			nap.For(time.Duration(r.IntN(1500)) * time.Microsecond)
		default:
			s.gates.StepOut()
			s.gates.Flush()
		}
	}
	c.over = s.ended != ""
}

// Sessions of several leases share a GPU while policies change, a lease ends and the owner sweeps. At
// the end no session has a turn or wants one.
func TestGatesTogether(t *testing.T) {
	loadFakeDriver(t)
	book := account.NewBook([]uint64{testMem})
	l, err := book.Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	b := turnstest.Schedule(t, turns.Site{Quantum: 2 * time.Millisecond, Grace: 2 * time.Millisecond})
	kinds := []turns.Policy{{Kind: turns.Fixed, Weight: 3000}, {Kind: turns.BestEffort, Weight: 2000}, {Kind: turns.Equal, Lend: true, Weight: 1}}
	var tenants []int
	for i, p := range kinds {
		tenants = append(tenants, turnstest.Tenant(t, b, fmt.Sprint("lease", i), p))
	}
	ended := turnstest.Tenant(t, b, "ends", turns.Policy{Kind: turns.Fixed, Weight: 1000})
	var cs []*player
	var wg sync.WaitGroup
	for i, tenant := range append(tenants, tenants[0], ended) {
		s, _ := fakeSessionOf(t, l, nil, nil)
		s.gates.Open(0, turnstest.Member(t, b, tenant, turns.Monotonic{}), turns.Monotonic{}, gate.IdleTime)
		c := &player{s: s, ops: 3000}
		if tenant == ended {
			c.ops = 1 << 30
		}
		cs = append(cs, c)
		wg.Go(func() {
			c.run(t, uint64(i))
			s.gates.Quit()
			s.gates.Quit()
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
				b.Remove(ended)
			}
			for i, tenant := range tenants {
				if err := b.Set(tenant, kinds[(i+n/3)%len(kinds)]); err != nil {
					t.Error(err)
				}
			}
			b.Sweep()
			b.Read()
			continue
		case <-time.After(time.Minute):
			t.Fatalf("the sessions hang: %+v", b.Read())
		}
		break
	}
	for i, c := range cs {
		c.s.waiters.stop()
		c.s.followed.stop()
		c.s.ipc.stop()
		c.s.rd.Close()
		if last := i == len(cs)-1; c.over != last {
			t.Errorf("session %d ended: %q", i, c.s.ended)
		}
	}
	if n := b.Members(); n != 0 {
		t.Errorf("%d members remain", n)
	}
	for _, s := range b.Read() {
		// A busy machine has the work of some turns end after them, and who works no more pays no more.
		if s.Wants || s.Turns == 0 || len(s.Overdue) != 0 || s.Owes > time.Duration(s.Overruns)*s.Longest {
			t.Errorf("%+v", s)
		}
	}
}

// Between back-to-back launches the executor stays inside. It is outside before it reads from the
// client or does anything else.
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
	s.rd.BeforeRead(s.gates.StepOut)
	testKernel(s)
	policy := turns.Policy{Kind: turns.BestEffort, Weight: 10000}
	b := turnstest.Schedule(t, turns.Site{})
	g := s.gates.Open(0, turnstest.Member(t, b, turnstest.Tenant(t, b, "one", policy), turns.Monotonic{}), turns.Monotonic{}, gate.IdleTime)
	var went []uint64 // crossings, for each piece
	last := uint64(0)
	in.before = func() {
		if g.Crossings()&1 != 0 {
			t.Error("the executor reads inside of the gate")
		}
		went = append(went, g.Crossings()-last)
		last = g.Crossings()
	}
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	s.gates.Quit()
	s.waiters.stop()
	s.followed.stop()
	s.ipc.stop()
	s.out.stop()
	if s.counts.Launches != 1+400+2+50 {
		t.Errorf("%d launches", s.counts.Launches)
	}
	// Batches end, and this driver fails one call in eleven, which is reported from outside the gate.
	went = went[1:]
	if went[1] == 0 || went[1] > 200 {
		t.Errorf("400 launches: went in and out %d times", went[1]/2)
	}
	if went[5] < 2*50 {
		t.Errorf("event records inside the gate: went in and out %d times", went[5]/2)
	}
	if went[3] != 0 {
		t.Errorf("half a launch: went in and out %d times", went[3]/2)
	}
}

// gatedSession is a session of the fake driver with a context, a kernel, and a gate for its device; must repeats a call until
// it succeeds. The test's goroutine keeps its thread.
func gatedSession(t *testing.T) (s *session, g *gate.Gate, must func(what string, f func() int32)) {
	t.Helper()
	loadFakeDriver(t)
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	s, acct := fakeSession(t, nil, nil)
	t.Cleanup(func() { acct.Close() })
	t.Cleanup(func() { s.rd.Close() })
	b := turnstest.Schedule(t, turns.Site{})
	tenant := turnstest.Tenant(t, b, "one", turns.Policy{Kind: turns.BestEffort, Weight: 10000})
	g = s.gates.Open(0, turnstest.Member(t, b, tenant, turns.Monotonic{}), turns.Monotonic{}, gate.IdleTime)
	must = func(what string, f func() int32) {
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
	return s, g, must
}

// Work passes the gate of its stream's context, whatever context the client names, and no frame runs
// in a context that does not belong to the client.
func TestGateOfStream(t *testing.T) {
	s, g, must := gatedSession(t)
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
		given := g.Crossings()
		must("launch", func() int32 { return s.launch(launch) })
		if s.gates.StepOut(); s.cur != 1 || g.Crossings() == given {
			t.Errorf("with context %d current: it ran in %d, the gate was passed: %v", ctx, s.cur, g.Crossings() != given)
		}
	}
	s.forgetCtx()
	if rc := s.wantCtx(noCtx); rc == 0 {
		t.Error("a frame runs in whatever context is current")
	}
	s.gates.Quit()
}

// testKernel gives a session the kernel that launchFrame launches.
func testKernel(s *session) {
	s.bind(wire.KindKernel, 1, 0x77, 0)
	s.tables[wire.KindKernel].live(1).obj = &kernel{img: &image{used: true}, real: 0x77}
}

// pieces is a client whose bytes arrive in pieces.
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

// A client is told that its turn is about to begin, and for how long to stay awake.
func TestAnnounceTurn(t *testing.T) {
	s, _ := fakeSession(t, nil, nil)
	defer s.rd.Close()
	out := &frames{}
	s.wr = wire.NewWriter(out)
	s.announceTurn(2 * time.Millisecond)
	if want := (wire.Reply{Kind: wire.FrameTurn, Arg: 2000}); len(out.list) != 1 || out.list[0] != want {
		t.Errorf("%+v", out.list)
	}
}

// frames is a stream that keeps the frames written to it.
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
