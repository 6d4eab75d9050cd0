package gate

// A session's gates.

import (
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// Config is what gates need to know of their session.
type Config struct {
	Driver Driver
	Log    *slog.Logger
	// HostCalls counts the client's functions that streams have called and that have not returned.
	HostCalls *atomic.Int32
	// Prewake tells the client that a turn is likely to begin soon, and for how long it should
	// stay awake. It is called on the executor's thread.
	Prewake func(d time.Duration)
	// ContextLost says that the executor's thread has lost its current context. It is called on
	// that thread.
	ContextLost func()
	// Overran ends the session, because its work has been on the GPU after a turn for longer than
	// the site's limit, or because it and the lease's other sessions have taken too much. It may be
	// called on any thread, while a lock of the gate is held.
	Overran func(overdue, owes, limit time.Duration)
	// Tell, if set, is called at the beginning and at the end of each phase, on any thread, while a lock of the gate is held.
	Tell func(device int, p Phase, begins bool)
}

// Phase is what a session's work on a device goes through.
type Phase int

// The phases that a gate tells.
const (
	InTurn     Phase = iota
	AwaitsTurn       // work waits for a turn
	Throttled        // work waits within one: too much is in flight, or the turn is too short for it
)

// A Set is a session's gates, one for each device that has a schedule. The zero value has
// none, and nothing ever waits.
//
// Only the executor may call its methods, except Quit.
type Set struct {
	Config
	gates []*Gate // by device; nil where none is kept

	// The executor's.
	here     *Gate  // of the current context's device
	ctx      uint64 // the current context
	inside   *Gate  // the gate that the executor is inside of
	waits    bool   // a stream has been made to wait for the client
	captured bool   // such a wait has been captured into a graph
	opaque   bool   // the call may launch such a graph

	valueWait atomic.Int64 // when a stream was last made to wait for a value, ns; for any thread
}

// How long a turn without work is kept. IdleTime is what a hand-over costs; a client that is
// further away gets more, up to MaxIdle.
const (
	IdleTime = 400 * time.Microsecond
	MaxIdle  = time.Millisecond
)

// Open adds the gate of a device; member is the session's place on that device's schedule. idle is
// how long a turn is kept without work. The set's Config must be complete.
func (s *Set) Open(dev int, member *turns.Member, clock turns.Clock, idle time.Duration) *Gate {
	for len(s.gates) <= dev {
		s.gates = append(s.gates, nil)
	}
	g := newGate(s, member, clock)
	g.dev, g.idle = dev, int64(idle)
	s.gates[dev] = g
	return g
}

// Kept says whether any device has a gate.
func (s *Set) Kept() bool { return s.gates != nil }

// Has reports whether a device has a gate.
func (s *Set) Has(dev int) bool { return dev >= 0 && dev < len(s.gates) && s.gates[dev] != nil }

// Use notes that ctx, a context of device dev, is current on the executor's thread. A dev of -1 says
// that none is.
func (s *Set) Use(dev int, ctx uint64) {
	s.ctx, s.here = ctx, nil
	if dev >= 0 && dev < len(s.gates) {
		s.here = s.gates[dev]
	}
}

// A session that waits for its lease's debt to be paid looks every debtNap whether others still want the GPU. They do
// not if that is so quietLooks times in a row: programs pause between their launches.
const (
	debtNap    = int64(20 * time.Millisecond)
	quietLooks = 5
)

// AwaitPaid waits while the lease owes time of a device's GPU and others want that GPU. It comes before a context is made there, for which the
// driver stops everybody's work for tens of milliseconds that nobody is charged for. The programs of a lease in debt, whose sessions are
// ended and begin again, would take that time again and again.
func (s *Set) AwaitPaid(dev int) {
	if !s.Has(dev) {
		return
	}
	g, said := s.gates[dev], false
	for quiet := 0; quiet < quietLooks && !g.stop.Load(); quiet++ {
		until, now := g.member.Indebted(), g.clock.Now()
		if until <= now {
			return
		}
		if !said {
			said = true
			s.Log.Info("a context waits until its lease has paid for time on the GPU after its turns, or nobody else wants the GPU", "device", dev, "paid", time.Duration(until-now).Round(time.Millisecond))
		}
		if g.member.Contended() {
			quiet = -1
		}
		g.clock.Wait(nil, 0, min(until, now+debtNap), false)
	}
}

// StepOut ends the executor's stay inside of a gate, if it is in one. The executor calls it before
// anything but a launch that may take long: no turn ends while the executor is inside.
func (s *Set) StepOut() {
	if s.inside != nil {
		s.stepOut()
	}
}

func (s *Set) stepOut() {
	g := s.inside
	s.inside = nil
	g.flight.batch.publish()
	g.seq.Add(1)
}

// Flush puts a fence behind all work that has none yet.
func (s *Set) Flush() {
	for _, g := range s.gates {
		if g != nil {
			g.Flush()
		}
	}
}

// WaitsForClient comes before a call that makes a stream wait for a function of the client's.
// captured says that the call may put the wait into a graph instead.
func (s *Set) WaitsForClient(captured bool) {
	if !s.Kept() {
		return
	}
	s.captured = s.captured || captured
	s.waits = true
	s.Flush()
}

// WaitsForValue comes before a call that makes a stream wait for a value in memory, which the
// client may have to write. captured is as in WaitsForClient.
func (s *Set) WaitsForValue(captured bool) {
	if s.Kept() {
		s.valueWait.Store(s.now())
		s.WaitsForClient(captured)
	}
}

// now is the time of the first device that has a gate.
func (s *Set) now() int64 {
	for _, g := range s.gates {
		if g != nil {
			return g.clock.Now()
		}
	}
	return 0
}

// WaitsForStream comes before a call that makes a stream wait for another one, which may itself
// wait for the client.
func (s *Set) WaitsForStream() {
	if s.waits {
		s.Flush()
	}
}

// LaunchesGraph comes before the launch of a graph, which may contain waits for the client, and
// CallDone after it.
func (s *Set) LaunchesGraph() {
	if s.captured {
		s.opaque = true // in a batch of its own
		s.Flush()
	}
}

// CallDone comes after a call.
func (s *Set) CallDone() { s.opaque = false }

// Forget drops a context that is about to be destroyed. The context is idle.
func (s *Set) Forget(ctx uint64) {
	for _, g := range s.gates {
		if g != nil {
			g.forget(ctx)
		}
	}
}

func (g *Gate) forget(ctx uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open.Store(0)
	g.collect(g.clock.Now())
	g.flight.forget(ctx)
	if g.keeperCtx == ctx {
		g.keeperCtx = 0
	}
	g.stragglers = slices.DeleteFunc(g.stragglers, func(m straggler) bool { return m.ctx == ctx })
	g.reportOverdue()
}

// Quit gives the turns back at once, because the end of a process takes the driver a while. It
// waits for nothing, and may be called from any thread and more than once.
func (s *Set) Quit() {
	for _, g := range s.gates {
		if g != nil {
			g.stop.Store(true)
			g.member.Quit()
			g.member.WakeKeeper() // the keeper and the executor look at stop
			g.member.WakeWaiters()
			g.report()
		}
	}
}

// report logs where the time of a session's turns went, unless another thread holds the lock.
func (g *Gate) report() {
	if !g.mu.TryLock() {
		return
	}
	defer g.mu.Unlock()
	if st := &g.stats; st.turns > 0 {
		d := func(ns int64) time.Duration { return time.Duration(ns).Round(time.Microsecond) }
		g.set.Log.Info("turns", "tenant", g.member.Tenant(), "joined", st.turns, "idle", st.idle, "yields", st.yields, "gap", d(g.gap), "held", d(st.held), "busy", d(st.busy),
			"first", d(st.first), "last", d(st.last), "fences", st.fences, "dry", st.dry,
			"backlogs", st.backlogs, "backlogged", d(st.backlogTime), "throttles", st.throttles)
	}
}
