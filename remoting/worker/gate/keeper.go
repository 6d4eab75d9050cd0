package gate

// The keeper of a gate's turns.

import (
	"runtime"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/nap"
)

// keep runs as long as the session does.
func (g *Gate) keep() {
	runtime.LockOSThread()
	g.set.Driver.RelaxCapture()
	nap.Sharpen()
	for !g.stop.Load() {
		bell := g.chair.Bell()
		until, rest := g.tend()
		switch {
		case rest == 0:
			g.watch(bell, until)
		default:
			soon(g.clock, rest)
		}
	}
}

// watch sleeps until something is due, or the keeper is called, or the executor has done
// nothing for a while. It asks the driver for nothing and takes no lock: the executor,
// who may be giving work without a pause, would be held up by both.
func (g *Gate) watch(bell uint32, until int64) {
	for {
		seq, now := g.seq.Load(), g.clock.Now()
		next := until
		if g.idles.Load() { // nobody rings when the executor steps out
			next = min(until, now+g.idle/2)
		}
		g.chair.Nap(bell, next)
		if now = g.clock.Now(); now >= until || g.chair.Bell() != bell || next != until && seq&1 == 0 && g.seq.Load() == seq {
			return
		}
	}
}

// tend does what is due. It says until when nothing is, or, with rest, that something in
// flight is to be waited for that is going to take so long.
func (g *Gate) tend() (until, rest int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.clock.Now()
	if f := &g.flight; g.keepCtx == 0 { // what asks for events may want some context
		if len(f.marks) > 0 {
			g.hold(f.marks[0].ctx)
		} else if len(g.strays) > 0 {
			g.hold(g.strays[0].ctx)
		}
	}
	g.collect(now)
	g.idles.Store(false)
	if g.turn == 0 {
		if g.flight.open() && g.settle() {
			g.disown()
		}
		if len(g.strays) > 0 || g.flight.open() {
			return now + int64(time.Millisecond), 0
		}
		return now + int64(time.Second), 0
	}
	if !g.current() {
		return now, 1
	}
	if tight := g.chair.Contended() || g.chair.Capped(); tight != g.tight {
		g.tight = tight
		g.open.Store(0)
	}
	if g.closing {
		return g.drain(now)
	}
	quiet := true
	if seq := g.seq.Load(); seq != g.seen || seq&1 != 0 {
		g.seen, g.acted, quiet = seq, now, false
	}
	f := &g.flight
	if quiet {
		g.reap(now)
	}
	ends, idle := g.chair.Ends(g.turn), g.idle
	if !g.tight {
		idle = g.chair.Quantum()
	}
	since := now - max(g.acted, f.lastDone)
	left := int64(0)
	if quiet { // else the executor sees to it itself
		left = f.rest(now)
	}
	switch {
	case now+left >= ends:
		if t, ok := g.chair.Renew(g.turn); ok {
			g.renewed(t)
			return now, 1
		}
		g.close()
		return g.drain(now)
	case since >= idle/2 && f.open() && g.settle():
		return now, 1
	case since >= idle && !f.busy() && g.waiting == 0:
		g.open.Store(0)
		if g.seq.Load() == g.seen {
			g.stats.idle++
			g.finish(false)
			return now, 1
		}
	}
	until = ends - left
	if g.tight {
		sooner := ends - now
		if g.leaving {
			sooner = min(sooner, f.rest(now))
		}
		if !g.alerted && sooner <= alertLead {
			g.alerted = true
			g.chair.Alert(g.turn)
		}
		if !g.alerted {
			until = min(until, now+sooner-alertLead)
		}
		g.idles.Store(true)
		if quiet {
			until = min(until, now+idle/2)
		}
	} else if quiet { // and if it has been for long, what is in flight takes long
		until = min(until, max(g.acted+idle, f.lastDone+idle, now+int64(time.Millisecond)))
	}
	return max(until, now+int64(20*time.Microsecond)), 0
}

// settle marks the executor's batch while that is outside; it says whether it is.
func (g *Gate) settle() bool {
	g.open.Store(0)
	if g.seq.Load()&1 != 0 {
		return false
	}
	if b := &g.flight.batch; b.est > 0 {
		g.hold(b.ctx)
		g.flight.close(g.clock.Now())
	}
	return true
}

// hold makes a context current on the keeper's thread.
func (g *Gate) hold(ctx uint64) {
	if g.keepCtx != ctx && g.set.Driver.SetContext(ctx) {
		g.keepCtx = ctx
	}
}

// drain waits for what is in flight, no longer than the grace; then the token goes on.
func (g *Gate) drain(now int64) (until, rest int64) {
	f := &g.flight
	ends := g.chair.Ends(g.turn)
	out := g.waiting > 0 || g.settle()
	if g.waiting == 0 {
		g.reap(now)
	}
	if out && !f.busy() {
		g.finish(g.waiting > 0)
		return now, 1
	}
	if now >= g.chair.Overdue(g.turn) || now >= ends+stallTime && g.stalled() {
		g.lost()
		return now, 1
	}
	left := f.rest(now)
	if !g.alerted && left <= alertLead {
		g.alerted = true
		g.chair.Alert(g.turn)
	}
	if g.waiting > 0 { // the executor is at it
		return now + max(left-alertLead, int64(200*time.Microsecond)), 0
	}
	return 0, max(left, 1)
}
