package gate

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

import "time"

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

// stalls says whether a stream may be waiting for the client itself.
func (s *Set) stalls() bool {
	if s.HostCalls != nil && s.HostCalls.Load() > 0 {
		return true
	}
	at := s.valued.Load()
	return at != 0 && time.Now().UnixNano()-at < int64(valueTime)
}

// runs says whether the GPU is at work on a batch that has not ended: the event before it was
// reached, or there is none, because it was given before anything could wait.
func (f *flight) runs(start uint64, untold bool) bool {
	return !untold && (start == 0 || f.driver.Query(start) == Reached)
}

// headRuns says so of the oldest batch of a stream that has some.
func (f *flight) headRuns(l *lane) bool {
	m := f.head(l)
	return m != nil && f.runs(m.start, m.untold)
}

// stalled says whether all that is in flight may be waiting for the client.
func (g *Gate) stalled() bool {
	if !g.set.stalls() || g.lateAt != 0 {
		return false
	}
	for _, l := range g.flight.lanes {
		if g.flight.headRuns(l) {
			return false
		}
	}
	return true
}

// stray gives up to wait for what is in flight; with late it is held against the lease, but
// for what may wait for the client.
func (g *Gate) stray(now int64, late bool) {
	stalls := g.set.stalls()
	for _, m := range g.flight.drop() {
		works := g.flight.runs(m.start, m.untold) || m.untold && !stalls
		g.strays = append(g.strays, stray{m.ctx, m.start, m.ev, m.lane, now, late && works, m.untold})
	}
	g.tellLate()
}

// tellLate notes since when the oldest work is late that is, and tells since when there always
// was some: what is longer than the site's limit may be many kernels, one behind the other.
func (g *Gate) tellLate() {
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
func (g *Gate) collect(now int64) {
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
		case f.driver.Query(m.ev) == Pending:
			m.lane.late = f.round
			if !m.late && g.turn == 0 && f.runs(m.start, m.untold) { // the GPU has come to it
				m.late, m.since = true, now
			}
			kept = append(kept, *m)
			continue
		}
		ran, _ := f.between(m.start, m.ev)
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
func (g *Gate) took(m *stray, ran, now int64) int64 {
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
func (g *Gate) dun(now int64) {
	if g.lateAt == 0 {
		return
	}
	took := now - max(g.lateAt, g.charged)
	g.charged = max(g.charged, now)
	g.owe(took)
}

// owe charges time that strays took from others, of which the driver gave those about half.
func (g *Gate) owe(took int64) {
	if took > 0 && g.chair.Contended() {
		g.chair.Owe(time.Duration(took) / 2)
	}
}
