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
// before: once that event is reached the GPU is at work on the batch. Within a graph that has
// such waits nothing is known.

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

// stray is a mark that was given up.
type stray struct {
	mark
	since int64
	late  bool // held against the lease
}

// mayWait comes before an operation that may make a stream wait for the client, or for
// another stream that does.
func (s *session) mayWait(op uint16) {
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
	default:
		return
	}
	if len(s.captures) > 0 {
		s.drawn.Store(true)
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

// told says whether events tell waiting from working.
func (s *session) told(m *mark) bool { return m.start != 0 && !s.drawn.Load() }

// runs says whether the GPU is known to be at work on a batch that has not ended.
func (s *session) runs(m *mark) bool {
	return m != nil && s.told(m) && C.sl_event_query(C.uint64_t(m.start)) == 0
}

// stalled says whether all that is in flight may be waiting for the client.
func (g *gate) stalled() bool {
	if !g.s.stalls() || g.lateSince() != 0 {
		return false
	}
	for _, l := range g.flight.lanes {
		if g.s.runs(g.flight.head(l)) {
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
		works := !stalls
		if g.s.told(&m) {
			works = g.s.runs(&m)
		}
		g.strays = append(g.strays, stray{m, now, late && works})
	}
	g.chair.Late(g.lateSince())
}

// lateSince is when the oldest work that is late was given up; 0: there is none.
func (g *gate) lateSince() int64 {
	since := int64(0)
	for i := range g.strays {
		if s := &g.strays[i]; s.late && (since == 0 || s.since < since) {
			since = s.since
		}
	}
	return since
}

// collect looks for work that was given up and has ended, and charges it.
func (g *gate) collect(now int64) {
	if len(g.strays) == 0 {
		return
	}
	owed := int64(0)
	kept := g.strays[:0]
	for _, m := range g.strays {
		if C.sl_event_query(C.uint64_t(m.ev)) == C.CUDA_ERROR_NOT_READY {
			if !m.late && g.turn == 0 && g.s.runs(&m.mark) { // the GPU has come to it
				m.late, m.since = true, now
			}
			kept = append(kept, m)
			continue
		}
		owed += g.took(&m, now)
		g.flight.put(m.ctx, m.ev)
		g.flight.put(m.ctx, m.start)
	}
	g.strays = kept
	g.chair.Late(g.lateSince())
	if owed > 0 && g.chair.Contended() {
		// The driver gave others about half of that time.
		g.chair.Owe(time.Duration(owed) / 2)
	}
}

// took is how long a stray that has ended was on the GPU outside of this session's turns,
// as far as that was not charged with another one.
func (g *gate) took(m *stray, now int64) int64 {
	until := now
	if g.turn != 0 {
		until = min(now, g.entered)
	}
	took := until - max(m.since, g.charged)
	if !m.late {
		ran, known := between(m.start, m.ev)
		if g.turn != 0 || !known {
			return 0
		}
		took = min(took, ran)
	}
	if took <= 0 {
		return 0
	}
	g.charged = until
	return took
}
