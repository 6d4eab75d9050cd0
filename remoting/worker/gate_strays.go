package worker

// Work that a turn does not wait for, and what becomes of it.
//
// Work that lasts beyond its turn and the grace after it runs on beside the next turn: it is
// late, and what it takes from others is owed. Work may also wait for the client itself, for
// a function of its own or for a value in memory. Nobody waits for that, and it is not late;
// but when the GPU has come to it after all, that is charged too.
//
// A stream does not tell waiting from working. So in a session that has made a stream wait
// for the client, each batch has an event before it, and whatever may wait ends the batch
// before: once that event is reached the GPU is at work on the batch. Only of a graph, which may
// have such waits in it, that is not known (untold).

/*
#include "driver.h"
*/
import "C"

import (
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// valueTime is how long after a wait for a value a stream may still wait for it.
const valueTime = time.Second

// maxStrays bounds what a session may have that is waited for by nobody. CUDA makes launches
// wait as well, where a stream has too many.
const maxStrays = 4096

// stray is a mark that was given up.
type stray struct {
	ctx, start, ev uint64
	lane           *lane
	since          int64
	late           bool // held against the lease
	untold         bool
}

// mayWait comes before an operation that may make a stream wait for the client, or for
// another stream that does.
func (s *session) mayWait(op uint16) {
	if s.gates == nil {
		return
	}
	switch op {
	case opCuStreamWaitValue32, opCuStreamWaitValue32_v2, opCuStreamWaitValue64, opCuStreamWaitValue64_v2,
		opCuStreamBatchMemOp, opCuStreamBatchMemOp_v2:
		s.valued.Store(time.Now().UnixNano())
	case wire.OpLaunchHost:
	case opCuStreamWaitEvent, opCuCtxWaitEvent:
		if s.waits {
			s.flushGates()
		}
		return
	case opCuGraphLaunch:
		if s.drawn {
			s.untold = true // in a batch of its own
			s.flushGates()
		}
		return
	default:
		return
	}
	if len(s.captures) > 0 {
		s.drawn = true
	}
	s.waits = true
	s.flushGates()
}

// stalls says whether a stream may be waiting for the client itself.
func (s *session) stalls() bool {
	if s.hostfns.calls.Load() > 0 {
		return true
	}
	at := s.valued.Load()
	return at != 0 && time.Now().UnixNano()-at < int64(valueTime)
}

// runs says whether the GPU is at work on a batch that has not ended: the event before it was
// reached, or there is none, because it was given before anything could wait.
func runs(start uint64, untold bool) bool {
	return !untold && (start == 0 || C.sl_event_query(C.uint64_t(start)) == 0)
}

// runs says so of the oldest batch of a stream that has some.
func (f *flight) runs(l *lane) bool {
	m := f.head(l)
	return m != nil && runs(m.start, m.untold)
}

// stalled says whether all that is in flight may be waiting for the client.
func (g *gate) stalled() bool {
	if !g.s.stalls() || g.lateAt != 0 {
		return false
	}
	for _, l := range g.flight.lanes {
		if g.flight.runs(l) {
			return false
		}
	}
	return true
}

// stray gives up to wait for what is in flight; with late it is held against the lease, but
// for what may wait for the client.
func (g *gate) stray(now int64, late bool) {
	stalls := g.s.stalls()
	for _, m := range g.flight.drop() {
		works := runs(m.start, m.untold) || m.untold && !stalls
		g.strays = append(g.strays, stray{m.ctx, m.start, m.ev, m.lane, now, late && works, m.untold})
	}
	g.tellLate()
}

// tellLate notes since when the oldest work is late that is, and tells since when there always
// was some: what is longer than the site's limit may be many kernels, one behind the other.
func (g *gate) tellLate() {
	g.lateAt = 0
	for i := range g.strays {
		if s := &g.strays[i]; s.late && (g.lateAt == 0 || s.since < g.lateAt) {
			g.lateAt = s.since
		}
	}
	if g.lateAt == 0 || g.lateFrom == 0 {
		g.lateFrom = g.lateAt
	}
	g.chair.Late(g.lateFrom)
}

// collect looks for work that was given up and has ended, and charges it.
func (g *gate) collect(now int64) {
	if len(g.strays) == 0 {
		return
	}
	owed := int64(0)
	kept := g.strays[:0]
	f := &g.flight
	f.round++
	for i := range g.strays {
		m := &g.strays[i]
		switch {
		case m.lane.late == f.round: // behind one that has not ended
			kept = append(kept, *m)
			continue
		case C.sl_event_query(C.uint64_t(m.ev)) == C.CUDA_ERROR_NOT_READY:
			m.lane.late = f.round
			if !m.late && g.turn == 0 && runs(m.start, m.untold) { // the GPU has come to it
				m.late, m.since = true, now
			}
			kept = append(kept, *m)
			continue
		}
		ran, _ := between(m.start, m.ev)
		owed += g.took(m, ran, now)
		f.put(m.ctx, m.ev)
		f.put(m.ctx, m.start)
	}
	g.strays = kept
	g.tellLate()
	g.owe(owed)
}

// took is how long a stray that has ended was on the GPU outside of this session's turns, as
// far as that was not charged before. ran is the time between its events.
func (g *gate) took(m *stray, ran, now int64) int64 {
	from := max(m.since, g.charged)
	took := now - from
	if g.turn != 0 {
		took = g.entered - from
		ran -= now - g.entered // at most that was in this turn
	}
	if !m.late {
		if g.lateAt != 0 { // all of that time is charged with what is late
			return 0
		}
		took = min(took, ran)
	}
	took = max(took, 0)
	g.charged = max(g.charged, from+took)
	return took
}

// dun charges what is late up to now: a turn begins.
func (g *gate) dun(now int64) {
	if g.lateAt == 0 {
		return
	}
	took := now - max(g.lateAt, g.charged)
	g.charged = max(g.charged, now)
	g.owe(took)
}

// owe charges time that strays took from others, of which the driver gave those about half.
func (g *gate) owe(took int64) {
	if took > 0 && g.chair.Contended() {
		g.chair.Owe(time.Duration(took) / 2)
	}
}
