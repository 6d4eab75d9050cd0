package worker

// The gate: work starts on a device only in a turn of this session's lease (package
// turns). One gate for each device that has a board.
//
// The executor passes enter before and leave after each call that starts work. While the
// turn lasts that is two stores and two loads; everything else is behind mu (admit). Between
// two launches that are both at hand it stays inside (session.stepOut), which spares the stores:
// each of them is a fence, and launches are what some programs are bound by.
// A keeper, a thread of each gate's own, ends the turn on time, or before when nothing is
// left to do: it closes the gate, waits until what is in flight has ended and passes the
// token on. Whoever waits for work in flight never needs the token: queries, waits,
// frees and the answers of host functions do not come here. Neither do copies between host
// and device: they run on engines of their own, beside whoever has the turn.

/*
#include "driver.h"
*/
import "C"

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

const (
	alertLead = int64(turns.AlertLead)
	// attention is how long the client had better be awake from then on, and roused how
	// often it is told at most.
	attention = turns.AlertLead + 1200*time.Microsecond
	roused    = int64(2 * time.Millisecond)
	// idleTime is how long a turn is kept without work: it is what a hand-over costs
	// anyway. A client that is further away gets longer.
	idleTime = int64(400 * time.Microsecond)
	maxIdle  = int64(time.Millisecond)
	// stallTime is how long work that waits for the client itself is waited for.
	stallTime = int64(time.Millisecond)
	// strayTime is how long work of an earlier turn keeps this session from giving more.
	strayTime = int64(100 * time.Millisecond)
)

// gateKey names a kind of work: a function or an operation, and its size by powers of two.
type gateKey struct {
	what uint64
	size uint8
}

type gate struct {
	s     *session
	clock turns.Clock
	chair *turns.Chair
	token *atomic.Uint64
	idle  int64 // ns

	// seq is odd while the executor is inside: in a call, or between two launches. open is the
	// turn in which it may go in, or go on, without asking.
	seq   atomic.Uint64
	open  atomic.Uint64
	idles atomic.Bool // the keeper looks whether the executor does anything

	// The executor's.
	costs   map[gateKey]*cost
	lastKey gateKey
	last    *cost
	room    int64 // what may still go into the batch, ns, as long as the gate is open,
	left    int   // and in items

	mu       sync.Mutex
	turn     turns.Turn // 0: not in one
	flight   flight
	closing  bool
	tight    bool // others want the GPU, or what it has is all it gets
	given    int  // items in this turn
	waiting  int  // 1: the executor is at the gate
	alerted  bool
	cut      *cost // the estimate that closed the gate
	strays   []stray
	lateAt   int64 // when the oldest of them that are late was given up; 0: none is
	lateFrom int64 // since when some have been late
	charged  int64 // until when they have been, ns
	lostAt   int64 // when a turn was lost, and whether it is held against the lease
	lostLate bool
	kept     bool // the keeper runs
	seen     uint64
	acted    int64 // when seq was last seen to change
	entered  int64 // when the turn was joined
	ended    error
	stop     atomic.Bool
	stats    gateStats
	keepCtx  uint64 // current on the keeper's thread
	rousedAt int64  // the executor's
	leaving  bool   // the turn may end when what is in flight has ended
	rests    int    // how often the client has waited
	rest     int64  // how long it leaves the GPU alone after a wait, as far as seen, ns
	restsAt  int64  // since when it does; 0: not now
}

func newGate(s *session, chair *turns.Chair, clock turns.Clock) *gate {
	g := &gate{s: s, clock: clock, chair: chair, token: chair.Token(), idle: idleTime, costs: make(map[gateKey]*cost)}
	g.flight.clock, g.flight.events = clock, make(map[uint64][]uint64)
	chair.Soon(g.rouse)
	return g
}

// cost finds what a kind of work takes.
func (g *gate) cost(k gateKey) *cost {
	if k == g.lastKey && g.last != nil {
		return g.last
	}
	c := g.costs[k]
	if c == nil {
		if len(g.costs) > 1<<16 {
			clear(g.costs)
		}
		c = newCost(unknownCost)
		g.costs[k] = c
	}
	g.lastKey, g.last = k, c
	return c
}

// gateOf gives the gate that work in a stream has to pass, or nil: none is kept, or the
// stream is being captured, which starts nothing. It makes the stream's context current:
// that is where the work and its mark go.
func (s *session) gateOf(stream href) (*gate, int32) {
	if s.gates == nil {
		return nil, 0
	}
	if stream.id != 0 {
		if _, rc := s.streamCtx(stream.id); rc != 0 {
			return nil, rc
		}
	}
	return s.gateHere(stream.real), 0
}

// gateHere is gateOf for a stream of the current context.
func (s *session) gateHere(stream uint64) *gate {
	g := s.gateNow()
	if g == nil || len(s.captures) > 0 && s.capturing(stream) {
		return nil
	}
	return g
}

// enter waits until the executor may give the current context's device work; false: it
// never may again. leave must follow.
func (g *gate) enter(what, size, stream uint64) bool {
	c := g.cost(gateKey{what, uint8(bits.Len64(size))})
	ctx := g.s.curReal
	stayed := g.s.inside != nil
	if !stayed {
		g.seq.Add(1)
	}
	if t := g.open.Load(); t != 0 && t == g.token.Load() && g.room > 0 && g.left > 0 &&
		g.flight.batch.stream == stream && g.flight.batch.ctx == ctx {
		ns := c.ns.Load()
		g.room -= ns
		g.left--
		g.flight.batch.add(c, ns)
		g.s.inside = g
		return true
	}
	if stayed {
		g.s.stepOut()
	} else {
		g.seq.Add(1) // the batch may be the keeper's by now
	}
	return g.admit(c, ctx, stream)
}

// leave is for after the call; after a launch stay will do, if stepOut comes before anything
// but another launch.
func (g *gate) leave() {
	g.s.stepOut()
	g.stay()
}

func (g *gate) stay() {
	if len(g.s.captures) > 0 {
		g.s.stepOut()
		g.flush() // nothing may stay unmarked that could be drawn into a capture
	}
}

// stepOut ends the executor's stay inside of a gate, if there is one. It comes before
// whatever may take long and is no launch: no turn ends while the executor is inside.
func (s *session) stepOut() {
	if g := s.inside; g != nil {
		s.inside = nil
		g.flight.batch.tell()
		g.seq.Add(1)
	}
}

// flush marks what has no mark yet. It is the executor's.
func (g *gate) flush() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open.Store(0)
	g.closeBatch()
	g.disown()
}

// admit is enter where it is not plain that there is room.
func (g *gate) admit(c *cost, ctx, stream uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.wait(c, ctx, stream) {
		return false
	}
	g.open.Store(uint64(g.turn))
	g.s.inside = g
	g.seq.Add(1)
	ns := c.ns.Load()
	g.flight.batch.add(c, ns)
	g.flight.batch.tell()
	g.room, g.left = g.flight.room(!g.tight), g.flight.left(!g.tight)
	return true
}

// wait waits for a turn with room for c. mu is held, but not while it sleeps. The batch is
// one of this stream then.
func (g *gate) wait(c *cost, ctx, stream uint64) bool {
	full := int64(0) // since when there is no room
	held := false    // what is in flight lasts until the turn ends
	g.restOver(g.clock.Now())
	for {
		switch {
		case g.ended != nil:
			return false
		case g.turn == 0:
			if !g.obtain() {
				return false
			}
			continue
		case !g.current():
			continue
		case g.closing:
			g.leaveTurn()
			continue
		}
		now := g.clock.Now()
		g.reap(now)
		f := &g.flight
		if b := &f.batch; b.est > 0 && (b.ctx != ctx || b.stream != stream || f.full(!g.tight)) {
			g.closeBatch()
		}
		ns := min(c.ns.Load(), g.chair.Quantum()/2)
		ends := g.chair.Ends(g.turn)
		l := f.lane(ctx, stream)
		// Beside work that lasts longer anyway, it may as well run.
		if late := g.tight && g.given > 0 && f.restOf(l, now)+ns/2 > max(ends-now, f.rest(now)); late || now >= ends {
			if !held || now >= ends {
				if t, ok := g.chair.Renew(g.turn); ok {
					g.renewed(t)
					held = false
					continue
				}
			}
			if now < ends && f.busy() {
				// It would end too late. But that is an estimate: what is in flight may end sooner.
				if !held {
					held = true
					g.stats.holds++
				}
				g.closeBatch()
				g.pause(min(f.rest(now), 2*(ends-now)))
				continue
			}
			if g.close(); now < ends {
				g.cut = c
			}
			held = false
			continue
		}
		if len(g.strays) >= maxStrays {
			g.pause(int64(time.Millisecond))
			continue
		}
		if g.crowded(l, now, full != 0) {
			if full == 0 {
				full = now
			}
			limit := strayTime
			if g.s.stalls() && !f.runs(l) && g.lateAt == 0 {
				limit = stallTime
			}
			if now-full < limit {
				g.pause(4 * (f.restOf(l, now) - sureFlight))
				continue
			}
			// It may wait for what comes next.
			g.stray(now, false)
		}
		if full != 0 {
			g.stats.crowded += now - full
			g.stats.crowds++
		}
		if g.given == 0 {
			g.stats.first += now - g.entered
		} else if f.batch.est == 0 && l.flying == 0 {
			g.stats.dry++
		}
		if f.batch.est == 0 {
			f.begin(c, ctx, stream, now, g.given == 0, g.s.waits, g.s.untold)
		}
		g.given++
		g.leaving = false
		return true
	}
}

// leaveTurn is the executor's part in the end of a turn, while it is at the gate anyway: it
// waits for what is in flight, which spares the keeper's waking up.
func (g *gate) leaveTurn() {
	now := g.clock.Now()
	g.closeBatch()
	g.reap(now)
	if !g.flight.busy() {
		g.finish(true)
		return
	}
	rest := g.flight.rest(now)
	g.waiting++
	g.mu.Unlock()
	soon(g.clock, rest)
	g.mu.Lock()
	g.waiting--
}

// closeBatch marks the executor's batch, on its thread.
func (g *gate) closeBatch() {
	b := &g.flight.batch
	if b.est == 0 {
		return
	}
	if b.ctx == g.s.curReal {
		g.flight.close(g.clock.Now())
		return
	}
	C.sl_ctx_set(C.uint64_t(b.ctx)) // if that fails, so does what follows, and there is no mark
	g.flight.close(g.clock.Now())
	if C.sl_ctx_set(C.uint64_t(g.s.curReal)) != 0 {
		g.s.forgetCtx()
	}
}

// soon sleeps for a part of a time, and not at all when it is short: whoever wakes up late
// leaves the GPU to nobody.
func soon(c turns.Clock, rest int64) {
	switch {
	case !c.Spins():
		nap(20 * time.Microsecond)
	case rest > int64(150*time.Microsecond):
		nap(time.Duration(rest-int64(100*time.Microsecond)) / 2)
	}
}

// crowded says whether enough is in flight in a stream, or, once there was, whether there
// still is.
func (g *gate) crowded(l *lane, now int64, already bool) bool {
	f := &g.flight
	if g.lateAt != 0 && now-g.lateAt < strayTime {
		return true
	}
	bound := mostFlight
	if !g.tight {
		bound = max(bound, g.chair.Quantum())
	}
	if already {
		bound -= mostFlight - lessFlight
	}
	// Never for the only one, or nothing would be in flight at its end.
	return l.flying > 1 && f.given(l) >= bound || len(f.marks) >= maxMarks
}

// pause sleeps a part of the time that something in flight is going to take.
func (g *gate) pause(rest int64) {
	g.waiting++
	g.mu.Unlock()
	d := min(max(rest/8, int64(5*time.Microsecond)), int64(100*time.Microsecond))
	if !g.clock.Spins() {
		d = int64(20 * time.Microsecond)
	}
	nap(time.Duration(d))
	g.mu.Lock()
	g.waiting--
}

// gateStats tell where a session's time in turns went; for the log.
type gateStats struct {
	turns, idle, rests, crowds, holds, marks, dry int
	held, busy, crowded                           int64 // ns
	first, last                                   int64 // from a turn's begin to its first work, and from its last work to its end
}

// noTurn ends the session: there are no turns for it any more.
func (s *session) noTurn() int32 {
	if s.ended == "" {
		s.ended = turns.ErrEnded.Error()
	}
	return C.CUDA_ERROR_DEVICE_UNAVAILABLE
}
