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
	prewakeLead = int64(turns.PrewakeLead)
	// awakeTime is how long the client should stay awake after a prewake, and prewakeEvery the
	// least time between two of them.
	awakeTime    = turns.PrewakeLead + 1200*time.Microsecond
	prewakeEvery = int64(2 * time.Millisecond)
	// blockTime is how long the end of a turn waits for work that may be waiting for the client.
	blockTime = int64(time.Millisecond)
	// stragglerTime is how long work of an earlier turn keeps this session from starting more.
	stragglerTime = int64(100 * time.Millisecond)
	// stuckTime is how long nothing in flight may end before it counts as waiting for work that is
	// still to come, although it cannot wait for the client.
	stuckTime = int64(time.Second)
)

// workKey names a kind of work: a function or an operation, and its size by powers of two.
type workKey struct {
	what uint64
	size uint8
}

// A Gate is what a session's work passes on its way to one device.
type Gate struct {
	// Set when the gate is made.
	set    *Set
	dev    int // its device
	clock  turns.Clock
	member *turns.Member
	token  *atomic.Uint64
	idle   int64 // how long a turn without work is kept, ns

	// Atomics, for any thread.
	// seq is odd while the executor is inside: in a call, or between two launches. open is the
	// turn in which the executor may enter, or stay, without the lock.
	seq       atomic.Uint64
	open      atomic.Uint64
	watchIdle atomic.Bool // the keeper watches for an idle executor
	stop      atomic.Bool

	exec executor

	mu sync.Mutex
	locked
}

// executor is what only the executor's thread touches. While the gate is open, the batch of the
// work in flight is the executor's too.
type executor struct {
	costs      map[workKey]*cost
	lastKey    workKey
	last       *cost
	budget     int64 // what may still go into the batch while the gate is open, ns
	items      int   // the same, in items
	prewokenAt int64 // when the client was last sent a TURN
}

// locked is what mu guards.
type locked struct {
	// The turn.
	turn      turns.Turn // 0: not in one
	entered   int64      // when it was joined
	started   int        // items started in it
	contended bool       // other tenants have work, or this one may not exceed its share
	prewoken  bool       // the next tenant has been woken
	closing   bool       // nothing may start any more
	yielding  bool       // it is passed on when the work in flight has ended
	cutoff    *cost      // the estimate that ended it

	// Work.
	flight       flight
	stragglers   []straggler
	overdueAt    int64 // when the oldest overdue straggler became one; 0: none is overdue
	overdueSince int64 // since when there has always been an overdue one,
	overdueTime  int64 // and for how long of that others waited, ns
	chargedUntil int64 // until when the time of stragglers has been charged, ns
	lostAt       int64 // when the last turn was lost
	lostOverdue  bool  // the work that was in flight then is overdue
	stuck        bool  // work was given up because nothing ended for stuckTime, and nothing has ended since

	// The client's idle gaps.
	gaps     int   // how many waits there have been
	gap      int64 // mean time that the client leaves the GPU alone after a wait, ns
	gapSince int64 // when the present gap began; 0: there is none

	// What is seen of the executor.
	waiting  int    // 1: it is at the gate
	seen     uint64 // seq as the keeper last saw it,
	activeAt int64  // and when that was seen to change

	// The keeper.
	keeping   bool
	keeperCtx uint64 // the context current on its thread

	err   error // why there are no more turns
	stats stats
}

func newGate(set *Set, member *turns.Member, clock turns.Clock) *Gate {
	g := &Gate{set: set, clock: clock, member: member, token: member.Token(), idle: int64(IdleTime)}
	g.exec.costs = make(map[workKey]*cost)
	g.flight.driver, g.flight.clock, g.flight.events = set.Driver, clock, make(map[uint64][]uint64)
	member.OnPrewake(g.prewakeClient)
	return g
}

// cost returns the estimate for a kind of work.
func (g *Gate) cost(k workKey) *cost {
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

// Enter waits until the executor may start work in a stream of the current context. It returns
// false when that will never be. what and size name the kind of work, by which its time is
// estimated. StepOut must follow the call, at once or after more launches.
func (g *Gate) Enter(what, size, stream uint64) bool {
	c := g.cost(workKey{what, uint8(bits.Len64(size))})
	ctx := g.set.ctx
	stayed := g.set.inside != nil
	if !stayed {
		g.seq.Add(1)
	}
	if t := g.open.Load(); t != 0 && t == g.token.Load() && g.exec.budget > 0 && g.exec.items > 0 &&
		g.flight.batch.stream == stream && g.flight.batch.ctx == ctx {
		ns := c.ns.Load()
		g.exec.budget -= ns
		g.exec.items--
		g.flight.batch.add(c, ns)
		g.set.inside = g
		return true
	}
	if stayed {
		g.set.StepOut()
	} else {
		g.seq.Add(1) // the keeper may have taken the batch
	}
	return g.admit(c, ctx, stream)
}

// Crossings counts how often the executor has entered or left, for tests; each costs a fenced store.
func (g *Gate) Crossings() uint64 { return g.seq.Load() }

// Flush puts a fence behind work that has none yet. The executor calls it before a call that may
// make that impossible.
func (g *Gate) Flush() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open.Store(0)
	g.fenceBatch()
	g.orphan()
}

// admit is Enter where the gate is not open, or the batch has no budget left.
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
	g.flight.batch.publish()
	g.exec.budget, g.exec.items = g.flight.budget(!g.contended), g.flight.itemsLeft(!g.contended)
	return true
}

// admission is a call that waits at the gate.
type admission struct {
	c         *cost
	q         *queue
	fullSince int64 // since when too much is in flight; 0: there is not
	throttled bool  // the work in flight lasts until the turn ends
	told      bool  // that it is throttled
}

// wait waits for a turn with time for c. mu is held, but not while wait sleeps. When it returns
// true, the batch is one of this stream.
func (g *Gate) wait(c *cost, ctx, stream uint64) bool {
	a := admission{c: c}
	defer g.unthrottle(&a)
	g.endGap(g.clock.Now())
	for {
		switch {
		case g.err != nil:
			return false
		case g.turn == 0:
			g.unthrottle(&a)
			if !g.joinTurn() {
				return false
			}
			continue
		case !g.follow():
			continue
		case g.closing:
			g.awaitEnd()
			continue
		}
		now := g.clock.Now()
		g.reap(now)
		f := &g.flight
		if b := &f.batch; b.est > 0 && (b.ctx != ctx || b.stream != stream || f.full(!g.contended)) {
			g.fenceBatch()
		}
		a.q = f.queue(ctx, stream)
		if !g.endsInTime(&a, now) || !g.hasRoom(&a, now) {
			continue
		}
		if a.fullSince != 0 {
			g.stats.backlogTime += now - a.fullSince
			g.stats.backlogs++
		}
		if g.started == 0 {
			g.stats.first += now - g.entered
		} else if f.batch.est == 0 && a.q.fences == 0 {
			g.stats.dry++
		}
		if f.batch.est == 0 {
			f.begin(c, ctx, stream, now, g.started == 0, g.set.waits, g.set.opaque)
		}
		g.started++
		g.yielding = false
		return true
	}
}

// endsInTime says whether work may start because it ends no later than the turn, or than other
// work in flight. If not, it renews the turn, sleeps or closes the gate, and the caller looks again.
func (g *Gate) endsInTime(a *admission, now int64) bool {
	f := &g.flight
	ns := min(a.c.ns.Load(), g.member.Quantum()/2)
	ends := g.member.Ends(g.turn)
	tooLong := g.contended && g.started > 0 && f.remainingIn(a.q, now)+ns/2 > max(ends-now, f.remaining(now))
	if !tooLong && now < ends {
		return true
	}
	if !a.throttled || now >= ends {
		if t, ok := g.member.Renew(g.turn); ok {
			g.renewed(t)
			a.throttled = false
			return false
		}
	}
	if now < ends && f.busy() {
		// By the estimates it would end too late. The work in flight may end sooner, though.
		if !a.throttled {
			a.throttled = true
			g.stats.throttles++
			g.throttle(a)
		}
		g.fenceBatch()
		g.pause(min(f.remaining(now), 2*(ends-now)))
		return false
	}
	if g.close(); now < ends {
		g.cutoff = a.c
	}
	a.throttled = false
	return false
}

// hasRoom says whether work may start because little enough is in flight. If not, it sleeps, and
// the caller looks again.
func (g *Gate) hasRoom(a *admission, now int64) bool {
	if len(g.stragglers) >= maxStragglers {
		g.pause(int64(time.Millisecond))
		return false
	}
	if !g.backlogged(a.q, now, a.fullSince != 0) {
		return true
	}
	if a.fullSince == 0 {
		a.fullSince = now
	}
	g.throttle(a)
	since, limit := a.fullSince, stragglerTime
	switch mayBlock := g.set.clientMayBlock(); {
	case mayBlock && !g.flight.headRuns(a.q) && g.overdueAt == 0:
		limit = blockTime
	case !mayBlock && !g.stuck: // it may just take long: more of it would delay the next turn of another tenant
		since, limit = max(since, g.flight.lastDone), stuckTime
	}
	if now-since < limit {
		g.pause(4 * (g.flight.remainingIn(a.q, now) - safeQueued))
		return false
	}
	// The work in flight may be waiting for this call.
	g.stuck = limit == stuckTime || g.stuck
	g.giveUp(now, false)
	return true
}

// throttle tells once that a call waits although there is a turn.
func (g *Gate) throttle(a *admission) {
	if !a.told {
		a.told = true
		g.tell(Throttled, true)
	}
}

// unthrottle tells that it no longer does, because it goes on or waits for a turn.
func (g *Gate) unthrottle(a *admission) {
	if a.told {
		a.told = false
		g.tell(Throttled, false)
	}
}

// tell tells of a phase. mu is held.
func (g *Gate) tell(p Phase, begins bool) {
	if f := g.set.Tell; f != nil {
		f(g.dev, p, begins)
	}
}

// awaitEnd is the executor's part in the end of a turn: since it has to wait anyway, it waits for
// the work in flight, and the keeper need not wake up.
func (g *Gate) awaitEnd() {
	now := g.clock.Now()
	g.fenceBatch()
	g.reap(now)
	if !g.flight.busy() {
		g.endTurn(true)
		return
	}
	remaining := g.flight.remaining(now)
	g.waiting++
	g.mu.Unlock()
	napFor(g.clock, remaining)
	g.mu.Lock()
	g.waiting--
}

// fenceBatch puts a fence behind the batch. It runs on the executor's thread.
func (g *Gate) fenceBatch() {
	b := &g.flight.batch
	if b.est == 0 {
		return
	}
	if b.ctx == g.set.ctx {
		g.flight.close(g.clock.Now())
		return
	}
	g.set.Driver.SetContext(b.ctx) // if that fails, so does what follows, and there is no fence
	g.flight.close(g.clock.Now())
	if !g.set.Driver.SetContext(g.set.ctx) {
		g.set.ContextLost()
	}
}

// napFor sleeps for part of the time that work in flight will take, and not at all when that is
// short: while the thread wakes up late, the GPU is idle.
func napFor(c turns.Clock, remaining int64) {
	switch {
	case !c.Spins():
		nap.For(20 * time.Microsecond)
	case remaining > int64(150*time.Microsecond):
		nap.For(time.Duration(remaining-int64(100*time.Microsecond)) / 2)
	}
}

// backlogged says whether a stream has enough work in flight. already says that it had enough before: then it
// counts as backlogged until there is a good deal less.
func (g *Gate) backlogged(q *queue, now int64, already bool) bool {
	f := &g.flight
	if g.overdueAt != 0 && now-g.overdueAt < stragglerTime {
		return true
	}
	bound := maxQueued
	if !g.contended {
		bound = max(bound, g.member.Quantum())
	}
	if already {
		bound -= maxQueued - resumeQueued
	}
	// A single batch never is too much: nothing would be in flight when it ends.
	return q.fences > 1 && f.queued(q) >= bound || len(f.fences) >= maxFences
}

// pause sleeps for part of the time that something in flight will take.
func (g *Gate) pause(remaining int64) {
	g.waiting++
	g.mu.Unlock()
	d := min(max(remaining/8, int64(5*time.Microsecond)), int64(100*time.Microsecond))
	if !g.clock.Spins() {
		d = int64(20 * time.Microsecond)
	}
	nap.For(time.Duration(d))
	g.mu.Lock()
	g.waiting--
}

// stats says where a session's time in turns went, for the log.
type stats struct {
	turns, idle, yields, backlogs, throttles, fences, dry int
	held, busy, backlogTime                               int64 // ns
	first, last                                           int64 // from a turn's begin to its first work, and from its last work to its end, ns
}
