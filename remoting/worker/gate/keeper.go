package gate

// The keeper of a gate's turns.

import (
	"runtime"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/nap"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// keep runs as long as the session does.
func (g *Gate) keep() {
	runtime.LockOSThread()
	g.set.Driver.RelaxCapture()
	nap.Sharpen()
	for !g.stop.Load() {
		wakeups := g.member.Wakeups()
		until, remaining := g.runDue()
		if remaining == 0 {
			g.watch(wakeups, until)
		} else {
			napFor(g.clock, remaining)
		}
	}
}

// watch sleeps until something is due, the keeper is woken, or the executor has done nothing for
// a while. It does not call the driver and takes no lock: either would delay an executor that
// starts work without a pause.
func (g *Gate) watch(wakeups turns.Wakeups, until int64) {
	for {
		seq, now := g.seq.Load(), g.clock.Now()
		next := until
		if g.watchIdle.Load() { // the executor wakes nobody when it steps out
			next = min(until, now+g.idle/2)
		}
		g.member.Sleep(wakeups, next)
		if now = g.clock.Now(); now >= until || g.member.Wakeups() != wakeups || next != until && seq&1 == 0 && g.seq.Load() == seq {
			return
		}
	}
}

// runDue does what is due. It returns until when nothing is. Or it returns remaining, how long
// something in flight will take that is to be waited for.
func (g *Gate) runDue() (until, remaining int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.clock.Now()
	if f := &g.flight; g.keeperCtx == 0 { // a query of an event may need some context
		if len(f.fences) > 0 {
			g.setKeeperContext(f.fences[0].ctx)
		} else if len(g.stragglers) > 0 {
			g.setKeeperContext(g.stragglers[0].ctx)
		}
	}
	g.collect(now)
	g.watchIdle.Store(false)
	if g.turn == 0 {
		if g.flight.unfenced() && g.keeperFence() {
			g.orphan()
		}
		if len(g.stragglers) > 0 || g.flight.unfenced() {
			return now + lookEvery, 0
		}
		return now + int64(time.Second), 0
	}
	if !g.follow() {
		return now, 1
	}
	if contended := g.member.Contended() || g.member.Capped(); contended != g.contended {
		g.contended = contended
		g.open.Store(0)
	}
	if g.closing {
		return g.drain(now)
	}
	quiet := true
	if seq := g.seq.Load(); seq != g.seen || seq&1 != 0 {
		g.seen, g.activeAt, quiet = seq, now, false
	}
	f := &g.flight
	if quiet {
		g.reap(now)
	}
	ends, idle := g.member.Ends(g.turn), g.idle
	if !g.contended {
		idle = g.member.Quantum()
	}
	since := now - max(g.activeAt, f.lastDone)
	left := int64(0)
	if quiet { // otherwise the executor takes care of it
		left = f.remaining(now)
	}
	switch {
	case now+left >= ends:
		if t, ok := g.member.Renew(g.turn); ok {
			g.renewed(t)
			return now, 1
		}
		g.close()
		return g.drain(now)
	case since >= idle/2 && f.unfenced() && g.keeperFence():
		return now, 1
	case since >= idle && !f.busy() && g.waiting == 0:
		g.open.Store(0)
		if g.seq.Load() == g.seen {
			g.stats.idle++
			g.endTurn(false)
			return now, 1
		}
	}
	return g.nextLook(now, ends, left, idle, quiet), 0
}

// nextLook returns when the keeper has to look at a turn again that goes on. If the turn is
// contended, it wakes the next tenant when the turn ends soon.
func (g *Gate) nextLook(now, ends, left, idle int64, quiet bool) int64 {
	f, until := &g.flight, ends-left
	if g.contended {
		sooner := ends - now
		if g.yielding {
			sooner = min(sooner, f.remaining(now))
		}
		if !g.prewoken && sooner <= prewakeLead {
			g.prewoken = true
			g.member.Prewake(g.turn)
		}
		if !g.prewoken {
			until = min(until, now+sooner-prewakeLead)
		}
		g.watchIdle.Store(true)
		if quiet {
			until = min(until, now+idle/2)
		}
	} else if quiet { // if it has been quiet for long, the work in flight takes long
		until = min(until, max(g.activeAt+idle, f.lastDone+idle, now+int64(time.Millisecond)))
	}
	return max(until, now+int64(20*time.Microsecond))
}

// keeperFence puts a fence behind the executor's batch while the executor is outside, and says
// whether it is.
func (g *Gate) keeperFence() bool {
	g.open.Store(0)
	if g.seq.Load()&1 != 0 {
		return false
	}
	if b := &g.flight.batch; b.est > 0 {
		g.setKeeperContext(b.ctx)
		g.flight.close(g.clock.Now())
	}
	return true
}

// setKeeperContext makes a context current on the keeper's thread.
func (g *Gate) setKeeperContext(ctx uint64) {
	if g.keeperCtx != ctx && g.set.Driver.SetContext(ctx) {
		g.keeperCtx = ctx
	}
}

// drain waits for the work in flight, until the grace is over at most, and passes the token on.
// It returns what runDue does.
func (g *Gate) drain(now int64) (until, remaining int64) {
	f := &g.flight
	ends := g.member.Ends(g.turn)
	outside := g.waiting > 0 || g.keeperFence()
	if g.waiting == 0 {
		g.reap(now)
	}
	if outside && !f.busy() {
		g.endTurn(g.waiting > 0)
		return now, 1
	}
	if now >= g.member.Deadline(g.turn) || now >= ends+blockTime && g.blocked() {
		g.loseTurn()
		return now, 1
	}
	left := f.remaining(now)
	if !g.prewoken && left <= prewakeLead {
		g.prewoken = true
		g.member.Prewake(g.turn)
	}
	if g.waiting > 0 { // the executor waits for it (awaitEnd)
		return now + max(left-prewakeLead, int64(200*time.Microsecond)), 0
	}
	return 0, max(left, 1)
}
