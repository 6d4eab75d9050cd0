package gate

// How a gate joins a turn, goes on into the next and leaves it. mu is held everywhere here;
// joinTurn releases it while it waits.

import "github.com/sluice-hpc/sluice/remoting/worker/turns"

// joinTurn waits for a turn and joins it; false: there are no more.
func (g *Gate) joinTurn() bool {
	g.fenceBatch()
	g.orphan()
	g.member.Request()
	g.waiting++
	g.tell(AwaitsTurn, true)
	g.mu.Unlock()
	t, err := g.member.Wait(&g.stop)
	g.mu.Lock()
	g.waiting--
	g.tell(AwaitsTurn, false)
	if err != nil || g.stop.Load() {
		if err == nil {
			err = turns.ErrEnded
		}
		g.err = err
		return false
	}
	if g.turn != 0 || t == 0 || !g.member.Enter(t) {
		return true
	}
	g.turn = t
	g.tell(InTurn, true)
	g.stats.turns++
	g.flight.forgetEnds()
	g.flight.lastDone = g.clock.Now()
	g.activeAt, g.entered = g.flight.lastDone, g.flight.lastDone
	g.chargeOverdue(g.entered)
	g.beginTurn()
	if !g.keeping {
		g.keeping = true
		go g.keep()
	}
	g.member.WakeKeeper()
	return true
}

// beginTurn is for the begin of a turn, also of one that follows another.
func (g *Gate) beginTurn() {
	g.prewoken, g.closing, g.yielding, g.cutoff, g.started = false, false, false, nil, 0
	g.contended = g.member.Contended() || g.member.Capped()
}

// renewed goes on in a turn that follows one of this tenant's own.
func (g *Gate) renewed(t turns.Turn) {
	old := g.turn
	g.turn = t
	contended := g.contended
	g.beginTurn()
	g.started = 1
	// An executor inside may stay there, unless the bounds of its batch have changed.
	if contended != g.contended || !g.open.CompareAndSwap(uint64(old), uint64(t)) {
		g.open.Store(0)
	}
}

// follow makes sure that the turn is still this tenant's: another of its sessions may have renewed
// it, or it may be lost.
func (g *Gate) follow() bool {
	t := g.member.Turn()
	if t == g.turn {
		return true
	}
	if t != 0 && g.member.Follow(t) {
		g.turn = t
		g.open.Store(0)
		g.beginTurn()
		return true
	}
	g.loseTurn()
	return false
}

// close lets no more work start.
func (g *Gate) close() {
	g.closing = true
	g.open.Store(0)
	g.member.WakeKeeper()
}

// endTurn passes the token on. Nothing is in flight. more: there is work for another turn.
func (g *Gate) endTurn(more bool) {
	t := g.turn
	g.turn, g.closing = 0, false
	g.tell(InTurn, false)
	g.open.Store(0)
	now := g.clock.Now()
	g.chargedUntil = now
	g.stats.held += now - g.entered
	// An estimate that cut a turn short is halved. If it was right, it is learned again.
	if c := g.cutoff; c != nil && now < g.member.Ends(t)-g.member.Quantum()/2 {
		c.ns.Store(max(c.ns.Load()/2, leastCost))
	}
	if g.started > 0 {
		g.stats.last += now - max(g.flight.lastDone, g.entered)
	}
	if !more {
		g.member.Withdraw()
	}
	g.member.Done(t)
}

// loseTurn is for a turn that was taken away, or that is given up with work in flight. Work that
// has no fence yet gets one from the keeper, or from the executor when it comes back.
func (g *Gate) loseTurn() {
	now := g.clock.Now()
	t := g.turn
	if g.member.Turn() != t { // it may have been over for a while
		now = min(now, g.member.Deadline(t))
	}
	g.turn, g.closing = 0, false
	g.tell(InTurn, false)
	g.open.Store(0)
	g.chargedUntil = now
	g.stats.held += now - g.entered
	g.lostAt, g.lostOverdue = now, !g.blocked()
	g.giveUp(now, g.lostOverdue)
	if g.waiting == 0 {
		g.member.Withdraw()
	}
	g.member.Done(t)
	g.member.WakeKeeper()
}

// orphan makes stragglers of work that got its fence after its turn was lost.
func (g *Gate) orphan() {
	if g.turn == 0 {
		g.giveUp(g.lostAt, g.lostOverdue)
	}
}

// reap removes the fences that have been reached.
func (g *Gate) reap(now int64) {
	n := len(g.flight.fences)
	if n == 0 {
		return
	}
	if d := g.flight.reap(now); d > 0 {
		g.stuck = false
		g.stats.fences += n - len(g.flight.fences)
		g.stats.busy += int64(d)
		g.member.Busy(d)
	}
}
