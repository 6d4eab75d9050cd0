package gate

// What a gate does while the client waits for its own work.
//
// A program that waits for all it has given leaves the GPU alone for as long as it takes
// to think of something else. Either the turn is kept for it, and that time is lost, or it
// is passed on at once, to somebody who has to be woken for it and to whose context the
// driver has to change. So it is passed on when the rests of this session are longer than
// that takes, or when the turn is over in a moment anyway.

import "time"

const (
	// leastRest is what it costs to pass a turn on that nobody expects: 170 us for the
	// driver's change of contexts, the rest for threads that have slept for long (H200).
	leastRest = int64(500 * time.Microsecond)
	mostRest  = int64(20 * time.Millisecond)
	// The first rests are measured, and of those that would not be looked at else one in
	// so many: to know when work ends takes a mark.
	restsFirst = 8
	restSample = 64
)

// Resting is for the executor when the client begins to wait. What is given must have a
// mark then. It answers the gate that wants to know when the wait is over (Rested), or nil.
func (s *Set) Resting() *Gate {
	g := s.Here()
	if g == nil || !g.clock.Spins() {
		return nil // a simulated GPU's time says nothing of how long a client thinks
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.turn == 0 || !g.tight || g.closing {
		return nil
	}
	leaves := g.leaves(g.clock.Now())
	if g.rests++; g.rests > restsFirst && g.rests%restSample != 0 && !leaves {
		return nil
	}
	g.open.Store(0)
	g.closeBatch()
	if leaves && !g.alerted {
		g.leaving = true
		g.chair.Rouse() // the keeper tells the next one
	}
	return g
}

// leaves says whether a rest that begins now is better spent by others, and there are some.
func (g *Gate) leaves(now int64) bool {
	soon := g.alerted && g.chair.Ends(g.turn)-now <= alertLead/4
	return (soon || g.rest >= leastRest) && g.chair.Contended()
}

// Rested is for the end of such a wait, on any thread; g may be nil.
func (g *Gate) Rested() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.turn == 0 || g.closing || g.waiting > 0 || !g.current() {
		return
	}
	now := g.clock.Now()
	g.reap(now)
	seq := g.seq.Load()
	if seq&1 != 0 || g.flight.busy() {
		return
	}
	g.restsAt = now
	if !g.tight || !g.leaves(now) {
		return
	}
	g.open.Store(0)
	if g.seq.Load() != seq || g.flight.open() {
		return
	}
	g.stats.rests++
	g.finish(false)
}

// restOver is for the first work after a rest.
func (g *Gate) restOver(now int64) {
	if g.restsAt != 0 {
		g.rest += (min(now-g.restsAt, mostRest) - g.rest) / 4
		g.restsAt = 0
	}
}

// rouse tells the client that a turn is about to begin. It has waited for the last one to
// end, with the answer to an earlier call still behind the work that is at the gate: until
// its threads are awake the GPU would stand idle.
func (g *Gate) rouse() {
	now := g.clock.Now()
	if now-g.exec.rousedAt < roused {
		return
	}
	g.exec.rousedAt = now
	g.set.Wake(attention)
}
