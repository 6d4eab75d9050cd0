package gate

// Stragglers: work that a turn does not wait for.
//
// Work that outlasts its turn and the grace runs on beside the next turn. It is overdue. As long as
// it runs, the time that it takes from others is charged to the lease, and where the site wants
// that, the session ends once it has taken too much (Config.Overran). Work may also wait for the client, for one of its
// functions or for a value in memory. No turn waits for blocked work, and it is not overdue; it is
// charged once it starts running.
//
// A stream does not tell whether it waits or works. So when a session has made a stream wait for
// the client, each batch from then on has an event before it, and a call that may wait ends the
// batch before it: once the event is reached, the GPU works on the batch. Only within a graph
// that does not help: a graph with such waits in it is opaque.

import "time"

// valueTime is how long after a wait for a value a stream may still wait for it.
const valueTime = time.Second

// maxStragglers bounds the work of a session that nobody waits for. CUDA also makes launches
// wait when a stream has too many.
const maxStragglers = 4096

// lookEvery is how often the keeper looks after stragglers, ns.
const lookEvery = int64(time.Millisecond)

// unseenMost is the most time, ns, that is charged for work between two looks at it. A process that was stopped
// has not seen what its work did meanwhile.
const unseenMost = int64(100 * time.Millisecond)

// straggler is a fence that was given up.
type straggler struct {
	ctx, start, ev uint64
	queue          *queue
	since          int64 // when it became one
	seen           int64 // when it was last seen not to have ended
	overdue        bool
	opaque         bool
}

// clientMayBlock says whether a stream may be waiting for the client.
func (s *Set) clientMayBlock() bool {
	if s.HostCalls != nil && s.HostCalls.Load() > 0 {
		return true
	}
	at := s.valueWait.Load()
	return at != 0 && s.now()-at < int64(valueTime)
}

// runs says whether the GPU works on a batch that has not ended: the event before it was reached,
// or there is none, because it began before anything could wait.
func (f *flight) runs(start uint64, opaque bool) bool {
	return !opaque && (start == 0 || f.driver.Query(start) == Reached)
}

// headRuns says so of the oldest batch of a stream; false if there is none.
func (f *flight) headRuns(q *queue) bool {
	m := f.head(q)
	return m != nil && f.runs(m.start, m.opaque)
}

// blocked says whether all work in flight may be waiting for the client.
func (g *Gate) blocked() bool {
	if !g.set.clientMayBlock() || g.overdueAt != 0 {
		return false
	}
	for _, q := range g.flight.queues {
		if g.flight.headRuns(q) {
			return false
		}
	}
	return true
}

// giveUp makes stragglers of the work in flight. With overdue, work that does not wait for the
// client is overdue.
func (g *Gate) giveUp(now int64, overdue bool) {
	mayBlock := g.set.clientMayBlock()
	for _, m := range g.flight.drop() {
		works := g.flight.runs(m.start, m.opaque) || m.opaque && !mayBlock
		g.stragglers = append(g.stragglers, straggler{m.ctx, m.start, m.ev, m.queue, now, now, overdue && works, m.opaque})
	}
	g.reportOverdue()
}

// reportOverdue finds since when the oldest overdue straggler has been one, and reports since when
// there has always been one: the site's limit also holds for many kernels in a row.
func (g *Gate) reportOverdue() {
	g.overdueAt = 0
	for i := range g.stragglers {
		if s := &g.stragglers[i]; s.overdue && (g.overdueAt == 0 || s.since < g.overdueAt) {
			g.overdueAt = s.since
		}
	}
	if g.overdueAt == 0 || g.overdueSince == 0 {
		g.overdueSince, g.overdueTime = g.overdueAt, 0
	}
	g.member.SetOverdue(g.overdueSince)
}

// collect removes the stragglers that have ended. It charges those, and what runs on.
func (g *Gate) collect(now int64) {
	if len(g.stragglers) == 0 {
		return
	}
	charge := int64(0)
	kept := g.stragglers[:0]
	f := &g.flight
	f.round++
	for i := range g.stragglers {
		m := &g.stragglers[i]
		switch {
		case m.queue.pending == f.round: // behind one that has not ended
			kept = append(kept, *m)
			continue
		case f.driver.Query(m.ev) == Pending:
			m.queue.pending, m.seen = f.round, now
			if !m.overdue && g.turn == 0 && f.runs(m.start, m.opaque) { // it runs now
				m.overdue, m.since = true, now
			}
			kept = append(kept, *m)
			continue
		}
		g.stuck = false
		ran, _ := f.elapsed(m.start, m.ev)
		ended := now
		if m.overdue { // whatever kept the keeper from looking, it is not charged for that
			ended = min(now, max(m.seen, g.chargedUntil)+lookEvery)
		}
		charge += g.took(m, ran, ended)
		f.put(m.ctx, m.ev)
		f.put(m.ctx, m.start)
	}
	g.stragglers = kept
	if end := now; charge > 0 {
		if g.turn != 0 {
			end = g.entered
		}
		g.member.Debit(end-charge, end)
	}
	g.reportOverdue()
	if g.turn == 0 {
		g.chargeOverdue(now)
	}
}

// took returns how long a straggler that has ended was on the GPU outside of this session's turns,
// without the time that has been charged already. ran is the time between its events.
func (g *Gate) took(m *straggler, ran, now int64) int64 {
	from := max(m.since, g.chargedUntil)
	took := now - from
	if g.turn != 0 {
		took = g.entered - from
		ran -= now - g.entered // at most that much of it was in this turn
	}
	if !m.overdue {
		if g.overdueAt != 0 { // all of that time is charged with the overdue ones
			return 0
		}
		took = min(took, ran)
	}
	took = max(took, 0)
	g.chargedUntil = max(g.chargedUntil, from+took)
	return took
}

// chargeOverdue charges overdue work up to now.
func (g *Gate) chargeOverdue(now int64) {
	if g.overdueAt == 0 {
		return
	}
	from := max(g.overdueAt, g.chargedUntil, now-unseenMost)
	g.chargedUntil = max(g.chargedUntil, now)
	if g.member.Debit(from, now) {
		g.overdueTime += now - from
	}
	if owes, limit, exceeds := g.member.Exceeds(time.Duration(g.overdueTime)); exceeds && !g.stop.Load() {
		g.set.Overran(time.Duration(now-g.overdueSince), owes, limit)
	}
}
