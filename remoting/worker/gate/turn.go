package gate

// How a gate comes into a turn, goes on into the next and leaves it. mu is held
// everywhere here; obtain gives it up while it waits.

import "github.com/sluice-hpc/sluice/remoting/worker/turns"

// obtain waits for a turn and joins it.
func (g *Gate) obtain() bool {
	g.closeBatch()
	g.disown()
	g.chair.Ask()
	g.waiting++
	g.mu.Unlock()
	t, err := g.chair.Wait(&g.stop)
	g.mu.Lock()
	g.waiting--
	if err != nil || g.stop.Load() {
		g.end(err)
		return false
	}
	if g.turn != 0 || t == 0 || !g.chair.Enter(t) {
		return true
	}
	g.turn = t
	g.stats.turns++
	g.flight.fresh()
	g.flight.lastDone = g.clock.Now()
	g.acted, g.entered = g.flight.lastDone, g.flight.lastDone
	g.dun(g.entered)
	g.begun()
	if !g.kept {
		g.kept = true
		go g.keep()
	}
	g.chair.Rouse()
	return true
}

// begun is for the begin of a turn, also of one that follows another.
func (g *Gate) begun() {
	g.alerted, g.closing, g.leaving, g.cut, g.given = false, false, false, nil, 0
	g.tight = g.chair.Contended() || g.chair.Capped()
}

// renewed goes on in a turn that follows one's own.
func (g *Gate) renewed(t turns.Turn) {
	old := g.turn
	g.turn = t
	tight := g.tight
	g.begun()
	g.given = 1
	// Whoever is inside stays there; the batch's bounds hold on.
	if tight != g.tight || !g.open.CompareAndSwap(uint64(old), uint64(t)) {
		g.open.Store(0)
	}
}

// current makes sure that the turn is still this session's.
func (g *Gate) current() bool {
	t := g.chair.Turn()
	if t == g.turn {
		return true
	}
	if t != 0 && g.chair.Follow(t) {
		g.turn = t
		g.open.Store(0)
		g.begun()
		return true
	}
	g.lost()
	return false
}

// close lets nobody in any more.
func (g *Gate) close() {
	g.closing = true
	g.open.Store(0)
	g.chair.Rouse()
}

// finish passes the token on; nothing is in flight. more: somebody has work.
func (g *Gate) finish(more bool) {
	t := g.turn
	g.turn, g.closing = 0, false
	g.open.Store(0)
	now := g.clock.Now()
	g.charged = now
	g.stats.held += now - g.entered
	// An estimate that cut a turn short is halved: if it is right it is learned again.
	if c := g.cut; c != nil && now < g.chair.Ends(t)-g.chair.Quantum()/2 {
		c.ns.Store(max(c.ns.Load()/2, leastCost))
	}
	if g.given > 0 {
		g.stats.last += now - max(g.flight.lastDone, g.entered)
	}
	if !more {
		g.chair.Unask()
	}
	g.chair.Done(t)
}

// lost is for a turn that was taken away, or is given up with work in flight. What has no
// mark yet gets one from the keeper, or from the executor when it comes back.
func (g *Gate) lost() {
	now := g.clock.Now()
	t := g.turn
	if g.chair.Turn() != t { // it has been over for a while
		now = min(now, g.chair.Overdue(t))
	}
	g.turn, g.closing = 0, false
	g.open.Store(0)
	g.charged = now
	g.stats.held += now - g.entered
	g.lostAt, g.lostLate = now, !g.stalled()
	g.stray(now, g.lostLate)
	if g.waiting == 0 {
		g.chair.Unask()
	}
	g.chair.Done(t)
	g.chair.Rouse()
}

// disown is for marks that were set when the turn of their work was lost already.
func (g *Gate) disown() {
	if g.turn == 0 {
		g.stray(g.lostAt, g.lostLate)
	}
}

// reap takes out what has ended.
func (g *Gate) reap(now int64) {
	n := len(g.flight.marks)
	if n == 0 {
		return
	}
	if d := g.flight.reap(now); d > 0 {
		g.stats.marks += n - len(g.flight.marks)
		g.stats.busy += int64(d)
		g.chair.Busy(d)
	}
}

// end is for a lease that has ended.
func (g *Gate) end(err error) {
	if err == nil {
		err = turns.ErrEnded
	}
	g.ended = err
}
