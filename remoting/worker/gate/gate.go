// Package gate lets a session start work on a GPU only in a turn of its lease (package
// turns), and ends those turns on time.
//
// The executor, the thread that runs a session's calls in order, goes through Enter before
// each call that starts work. Within a turn that costs two stores and two loads; everything
// else is behind a lock (admit). Between back-to-back launches the executor stays inside
// (Set.StepOut): leaving and re-entering costs two fenced stores, which launch-bound programs
// notice. A keeper, one thread for each gate, ends the turn on time, or earlier when there is
// nothing left to do: it closes the gate, waits until the work in flight has ended and passes
// the token on.
//
// Waiting for work in flight never needs the token: queries, waits, frees and the answers of
// host functions do not come here. Neither do copies between host and device: they run on
// engines of their own, beside the work of the turn.
package gate

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/nap"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

const (
	alertLead = int64(turns.AlertLead)
	// attention is how long the client had better be awake from then on, and roused how
	// often it is told at most.
	attention = turns.AlertLead + 1200*time.Microsecond
	roused    = int64(2 * time.Millisecond)
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

// A Gate is what a session's work passes on its way to one device.
type Gate struct {
	// Set when the gate is made.
	set   *Set
	clock turns.Clock
	chair *turns.Chair
	token *atomic.Uint64
	idle  int64 // how long a turn without work is kept, ns

	// For any thread.
	// seq is odd while the executor is inside: in a call, or between two launches. open is the
	// turn in which it may go in, or go on, without asking.
	seq   atomic.Uint64
	open  atomic.Uint64
	idles atomic.Bool // the keeper looks whether the executor does anything
	stop  atomic.Bool

	exec executor

	mu sync.Mutex
	locked
}

// executor is what only the executor's thread touches. The batch of what is in flight is
// its own too as long as the gate is open.
type executor struct {
	costs    map[gateKey]*cost
	lastKey  gateKey
	last     *cost
	room     int64 // what may still go into the batch, ns, as long as the gate is open,
	left     int   // and in items
	rousedAt int64
}

// locked is what mu guards.
type locked struct {
	// The turn.
	turn    turns.Turn // 0: not in one
	entered int64      // when it was joined
	given   int        // items in it
	tight   bool       // others want the GPU, or what it has is all it gets
	alerted bool
	closing bool
	leaving bool  // it may end when what is in flight has ended
	cut     *cost // the estimate that closed the gate

	// Work.
	flight   flight
	strays   []stray
	lateAt   int64 // when the oldest of them that are late was given up; 0: none is
	lateFrom int64 // since when some have been late
	charged  int64 // until when they have been, ns
	lostAt   int64 // when a turn was lost, and whether it is held against the lease
	lostLate bool

	// The client's pauses.
	rests   int   // how often it has waited
	rest    int64 // how long it leaves the GPU alone after a wait, as far as seen, ns
	restsAt int64 // since when it does; 0: not now

	// The executor.
	waiting int    // 1: it is at the gate
	seen    uint64 // seq, as the keeper last saw it,
	acted   int64  // and when that was seen to change

	// The keeper.
	kept    bool   // it runs
	keepCtx uint64 // current on its thread

	ended error
	stats stats
}

func newGate(set *Set, chair *turns.Chair, clock turns.Clock) *Gate {
	g := &Gate{set: set, clock: clock, chair: chair, token: chair.Token(), idle: int64(IdleTime)}
	g.exec.costs = make(map[gateKey]*cost)
	g.flight.driver, g.flight.clock, g.flight.events = set.Driver, clock, make(map[uint64][]uint64)
	chair.Soon(g.rouse)
	return g
}

// cost finds what a kind of work takes.
func (g *Gate) cost(k gateKey) *cost {
	if k == g.exec.lastKey && g.exec.last != nil {
		return g.exec.last
	}
	c := g.exec.costs[k]
	if c == nil {
		if len(g.exec.costs) > 1<<16 {
			clear(g.exec.costs)
		}
		c = newCost(unknownCost)
		g.exec.costs[k] = c
	}
	g.exec.lastKey, g.exec.last = k, c
	return c
}

// Enter waits until the executor may start work in a stream of the current context; false:
// it never may again. what and size name the kind of work, by which its time is estimated.
// StepOut must follow the call, at once or after more launches.
func (g *Gate) Enter(what, size, stream uint64) bool {
	c := g.cost(gateKey{what, uint8(bits.Len64(size))})
	ctx := g.set.ctx
	stayed := g.set.inside != nil
	if !stayed {
		g.seq.Add(1)
	}
	if t := g.open.Load(); t != 0 && t == g.token.Load() && g.exec.room > 0 && g.exec.left > 0 &&
		g.flight.batch.stream == stream && g.flight.batch.ctx == ctx {
		ns := c.ns.Load()
		g.exec.room -= ns
		g.exec.left--
		g.flight.batch.add(c, ns)
		g.set.inside = g
		return true
	}
	if stayed {
		g.set.StepOut()
	} else {
		g.seq.Add(1) // the batch may be the keeper's by now
	}
	return g.admit(c, ctx, stream)
}

// Crossings counts how often the executor has gone in or out; each costs a fenced store.
func (g *Gate) Crossings() uint64 { return g.seq.Load() }

// Flush marks what has no mark yet. It is for the executor, before a call that may make it
// impossible.
func (g *Gate) Flush() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open.Store(0)
	g.closeBatch()
	g.disown()
}

// admit is enter where it is not plain that there is room.
func (g *Gate) admit(c *cost, ctx, stream uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.wait(c, ctx, stream) {
		return false
	}
	g.open.Store(uint64(g.turn))
	g.set.inside = g
	g.seq.Add(1)
	ns := c.ns.Load()
	g.flight.batch.add(c, ns)
	g.flight.batch.tell()
	g.exec.room, g.exec.left = g.flight.room(!g.tight), g.flight.left(!g.tight)
	return true
}

// wait waits for a turn with room for c. mu is held, but not while it sleeps. The batch is
// one of this stream then.
func (g *Gate) wait(c *cost, ctx, stream uint64) bool {
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
			if g.set.stalls() && !f.headRuns(l) && g.lateAt == 0 {
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
			f.begin(c, ctx, stream, now, g.given == 0, g.set.waits, g.set.untold)
		}
		g.given++
		g.leaving = false
		return true
	}
}

// leaveTurn is the executor's part in the end of a turn, while it is at the gate anyway: it
// waits for what is in flight, which spares the keeper's waking up.
func (g *Gate) leaveTurn() {
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
func (g *Gate) closeBatch() {
	b := &g.flight.batch
	if b.est == 0 {
		return
	}
	if b.ctx == g.set.ctx {
		g.flight.close(g.clock.Now())
		return
	}
	g.set.Driver.SetContext(b.ctx) // if that fails, so does what follows, and there is no mark
	g.flight.close(g.clock.Now())
	if !g.set.Driver.SetContext(g.set.ctx) {
		g.set.ContextLost()
	}
}

// soon sleeps for a part of a time, and not at all when it is short: whoever wakes up late
// leaves the GPU to nobody.
func soon(c turns.Clock, rest int64) {
	switch {
	case !c.Spins():
		nap.For(20 * time.Microsecond)
	case rest > int64(150*time.Microsecond):
		nap.For(time.Duration(rest-int64(100*time.Microsecond)) / 2)
	}
}

// crowded says whether enough is in flight in a stream, or, once there was, whether there
// still is.
func (g *Gate) crowded(l *lane, now int64, already bool) bool {
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
func (g *Gate) pause(rest int64) {
	g.waiting++
	g.mu.Unlock()
	d := min(max(rest/8, int64(5*time.Microsecond)), int64(100*time.Microsecond))
	if !g.clock.Spins() {
		d = int64(20 * time.Microsecond)
	}
	nap.For(time.Duration(d))
	g.mu.Lock()
	g.waiting--
}

// stats tell where a session's time in turns went; for the log.
type stats struct {
	turns, idle, rests, crowds, holds, marks, dry int
	held, busy, crowded                           int64 // ns
	first, last                                   int64 // from a turn's begin to its first work, and from its last work to its end
}
