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
	// HostCalls counts the client's functions that a stream has called and that have not
	// returned.
	HostCalls *atomic.Int32
	// Wake tells the client that a turn is likely to begin soon, and for how long it had
	// better stay awake. It is called on the executor's thread.
	Wake func(d time.Duration)
	// ContextLost says that the executor's thread has not its context any more. It is called
	// on that thread.
	ContextLost func()
}

// A Set is a session's gates, one for each device that has a schedule. In its zero value
// no gates are kept, and nothing ever waits.
//
// Its methods are the executor's, but for Quit.
type Set struct {
	Config
	gates []*Gate // by device; nil where none is kept

	// The executor's.
	here   *Gate  // of the current context's device
	ctx    uint64 // the current context
	inside *Gate  // the gate that the executor is inside of
	waits  bool   // a stream has been made to wait for the client
	drawn  bool   // and that was captured into a graph
	untold bool   // the call may launch such a graph

	valued atomic.Int64 // when a stream was last told to wait for a value, ns; for any thread
}

// How long a turn without work is kept. IdleTime is what a hand-over costs anyway; a client
// that is further away gets longer, up to MaxIdle.
const (
	IdleTime = 400 * time.Microsecond
	MaxIdle  = time.Millisecond
)

// Open adds the gate of a device, which takes its turns by chair. idle is how long a turn
// is kept without work. The set's Config must be complete.
func (s *Set) Open(dev int, chair *turns.Chair, clock turns.Clock, idle time.Duration) *Gate {
	for len(s.gates) <= dev {
		s.gates = append(s.gates, nil)
	}
	g := newGate(s, chair, clock)
	g.idle = int64(idle)
	s.gates[dev] = g
	return g
}

// Kept says whether any device has a gate.
func (s *Set) Kept() bool { return s.gates != nil }

// Use notes that ctx, a context of device dev, is current on the executor's thread; dev -1:
// none is.
func (s *Set) Use(dev int, ctx uint64) {
	s.ctx, s.here = ctx, nil
	if dev >= 0 && dev < len(s.gates) {
		s.here = s.gates[dev]
	}
}

// Inside says whether the executor is inside of a gate.
func (s *Set) Inside() bool { return s.inside != nil }

// StepOut ends the executor's stay inside of a gate, if there is one. It comes before
// whatever may take long and is no launch: no turn ends while the executor is inside.
func (s *Set) StepOut() {
	if s.inside != nil {
		s.stepOut()
	}
}

func (s *Set) stepOut() {
	g := s.inside
	s.inside = nil
	g.flight.batch.tell()
	g.seq.Add(1)
}

// Flush marks all work that is not marked yet.
func (s *Set) Flush() {
	for _, g := range s.gates {
		if g != nil {
			g.Flush()
		}
	}
}

// WaitsForClient comes before a call that makes a stream wait for a function of the client's;
// captured: or may put that into a graph.
func (s *Set) WaitsForClient(captured bool) {
	if !s.Kept() {
		return
	}
	s.drawn = s.drawn || captured
	s.waits = true
	s.Flush()
}

// WaitsForValue comes before a call that makes a stream wait for a value in memory, which may
// be the client's to write; captured: or may put that into a graph.
func (s *Set) WaitsForValue(captured bool) {
	if s.Kept() {
		s.valued.Store(time.Now().UnixNano())
		s.WaitsForClient(captured)
	}
}

// WaitsForStream comes before a call that makes a stream wait for another one, which may
// wait for the client.
func (s *Set) WaitsForStream() {
	if s.waits {
		s.Flush()
	}
}

// LaunchesGraph comes before the launch of a graph, in which there may be waits for the client.
// It holds until CallDone.
func (s *Set) LaunchesGraph() {
	if s.drawn {
		s.untold = true // in a batch of its own
		s.Flush()
	}
}

// CallDone comes after a call.
func (s *Set) CallDone() { s.untold = false }

// Forget lets go of a context that is about to be destroyed; it is idle.
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
	if g.keepCtx == ctx {
		g.keepCtx = 0
	}
	g.strays = slices.DeleteFunc(g.strays, func(m stray) bool { return m.ctx == ctx })
	g.tellLate()
}

// Quit gives turns back at once: to end a process takes the driver a while. Nothing is
// waited for, so that it may be called from any thread, and more than once.
func (s *Set) Quit() {
	for _, g := range s.gates {
		if g != nil {
			g.stop.Store(true)
			g.chair.Quit()
			g.chair.Rouse() // both its threads look at stop
			g.chair.Wake()
			g.report()
		}
	}
}

// report logs where a session's turns went, unless somebody is at the gate.
func (g *Gate) report() {
	if !g.mu.TryLock() {
		return
	}
	defer g.mu.Unlock()
	if st := &g.stats; st.turns > 0 {
		d := func(ns int64) time.Duration { return time.Duration(ns).Round(time.Microsecond) }
		g.set.Log.Info("turns", "seat", g.chair.Seat(), "joined", st.turns, "idle", st.idle, "rests", st.rests, "rest", d(g.rest), "held", d(st.held), "busy", d(st.busy),
			"first", d(st.first), "last", d(st.last), "marks", st.marks, "dry", st.dry,
			"crowded", st.crowds, "crowded_for", d(st.crowded), "held_back", st.holds)
	}
}
