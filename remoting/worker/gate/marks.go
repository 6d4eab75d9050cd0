package gate

// What a session has in flight on a device, and what its work takes.
//
// Work is counted in batches: what goes to one stream until it is estimated to take
// batchTime, or is many items. An event behind a batch is its mark. Marks tell what is
// still in flight; the times between them teach what each kind of work takes. Only work
// of a turn is counted, so what others do on the GPU is in no estimate.

import (
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

const (
	// unknownCost is what work is taken to take that has never been seen: enough for
	// a mark of its own, and for two of them to be all that is in flight.
	unknownCost = int64(1500 * time.Microsecond)
	leastCost   = int64(500)
	// A batch ends when it has so much work or so many items. A mark costs the executor about
	// as much as two launches do: batches grow as long as the one before has always ended when
	// the next one is due, because then the GPU waits for the executor, and not the other way
	// round. Alone on the GPU they may be larger: nobody waits for their end.
	batchTime  = int64(250 * time.Microsecond)
	batchItems = 64
	batchGrows = 3 // times two
	aloneGrows = 4
	// mostFlight bounds what is in flight in a stream, by estimates; once it is reached,
	// nothing more is given until it is down to lessFlight. Within a turn it harms nobody:
	// it must be enough for the GPU never to run dry while the executor sleeps, and little
	// enough for an estimate that is wrong to cost the others little when the turn ends.
	mostFlight = int64(3 * time.Millisecond)
	lessFlight = int64(2 * time.Millisecond)
	sureFlight = int64(1500 * time.Microsecond)
	maxMarks   = 64
	maxKinds   = 24 // kinds of work in a batch that it can teach about
)

// A cost is what one kind of work takes, ns.
type cost struct {
	ns   atomic.Int64
	seen int // how often it was learned; under the gate's mu
}

func newCost(ns int64) *cost {
	c := &cost{}
	c.ns.Store(ns)
	return c
}

// learn moves the cost to what an item took. One hiccup is not believed.
func (c *cost) learn(want int64) {
	old := c.ns.Load()
	switch {
	case c.seen == 0:
	case c.seen < 4:
		want = old + (min(want, 4*old)-old)/2
	case want < old: // what disturbs a measurement makes it longer
		want = old - (old-want)/4
	default:
		want = old + (min(want, 4*old)-old)/16
	}
	c.seen++
	c.ns.Store(min(max(want, leastCost), int64(10*time.Second)))
}

type item struct {
	c  *cost
	n  int32
	ns int64 // what one was expected to take
}

// batch is what has gone to a stream since its last mark.
type batch struct {
	ctx, stream uint64
	at          int64 // when it began
	est         int64 // 0: there is nothing in it
	told        int64 // est, as of when the executor last stepped out: the keeper reads it while that adds
	n           int
	kinds       int
	items       [maxKinds]item
	start       uint64 // event before its first item; 0: there is none
	single      bool   // it is to have one item, measured by itself
	untold      bool   // its work may wait for the client
	joined      bool   // all of it was given while the batch before it in the stream was running
}

func (b *batch) add(c *cost, ns int64) {
	b.n++
	b.est += ns
	if b.kinds > 0 && b.items[b.kinds-1].c == c {
		b.items[b.kinds-1].n++
	} else if b.kinds < maxKinds {
		b.items[b.kinds] = item{c, 1, ns}
		b.kinds++
	}
}

func (b *batch) tell() { atomic.StoreInt64(&b.told, b.est) }

// mark is a batch that an event stands behind.
type mark struct {
	batch
	lane *lane
	ev   uint64
	due  int64 // when it should be reached
	busy int64 // when it was last seen not to be
}

// lane is a stream with marks. What goes to different streams may run at the same time.
type lane struct {
	ctx, stream uint64
	flying      int
	sum         int64  // of its marks' estimates
	last        uint64 // event of the last batch that has ended; 0: none
	done        int64  // when that was seen
	late        uint64 // the round of reap that found it busy
}

// flight is all that a gate has in flight. It belongs to whoever holds the gate's mu; the
// batch to the executor as long as the gate is open.
type flight struct {
	driver   Driver
	clock    turns.Clock
	batch    batch
	marks    []mark
	lanes    []*lane
	lastDone int64 // when a mark was last seen to have ended
	round    uint64
	events   map[uint64][]uint64
	tick     int
	grown    int // how often the bound of a batch's items is doubled
}

func (f *flight) lane(ctx, stream uint64) *lane {
	for _, l := range f.lanes {
		if l.stream == stream && l.ctx == ctx {
			return l
		}
	}
	if len(f.lanes) >= 64 { // forget those that are idle
		kept := f.lanes[:0]
		for _, l := range f.lanes {
			if l.flying > 0 {
				kept = append(kept, l)
			} else {
				f.put(l.ctx, l.last)
			}
		}
		f.lanes = kept
	}
	l := &lane{ctx: ctx, stream: stream}
	f.lanes = append(f.lanes, l)
	return l
}

// event gives an event that takes the time; its context is current.
func (f *flight) event(ctx uint64) uint64 {
	if l := f.events[ctx]; len(l) > 0 {
		f.events[ctx] = l[:len(l)-1]
		return l[len(l)-1]
	}
	return f.driver.NewEvent()
}

func (f *flight) put(ctx, ev uint64) {
	if ev != 0 {
		f.events[ctx] = append(f.events[ctx], ev)
	}
}

// record puts an event into a stream; 0 if that fails.
func (f *flight) record(ctx, stream uint64) uint64 {
	ev := f.event(ctx)
	if ev != 0 && !f.driver.Record(ev, stream) {
		f.put(ctx, ev)
		return 0
	}
	return ev
}

// begin starts a batch in a stream, whose context is current. The first one of a turn is
// not measured by itself: that would have the change of contexts in it. With timed it has
// an event before it in any case; with untold it has one item, which may wait for the client.
func (f *flight) begin(c *cost, ctx, stream uint64, now int64, first, timed, untold bool) {
	l := f.lane(ctx, stream)
	f.tick++
	single := !first && !untold && l.flying == 0 && (c.seen < 4 || f.tick%16 == 0)
	f.batch = batch{ctx: ctx, stream: stream, at: now, untold: untold}
	if single || timed {
		f.batch.start = f.record(ctx, stream)
	}
	f.batch.single = single && f.batch.start != 0
}

// full says whether the batch is due for its mark.
func (f *flight) full(alone bool) bool { return f.room(alone) <= 0 || f.left(alone) <= 0 }

// room is how much may still go into the batch, ns; left how many items.
func (f *flight) room(alone bool) int64 { return batchTime<<f.growth(alone) - f.batch.est }

func (f *flight) left(alone bool) int {
	if f.batch.single || f.batch.untold {
		return 0
	}
	return batchItems<<f.growth(alone) - f.batch.n
}

func (f *flight) growth(alone bool) int {
	if alone {
		return aloneGrows
	}
	return f.grown
}

// close ends the batch with a mark. Without an event nothing is known of it, and nothing
// waits for it.
func (f *flight) close(now int64) {
	b := &f.batch
	if b.est == 0 {
		return
	}
	l := f.lane(b.ctx, b.stream)
	b.joined = l.flying > 0
	if len(f.marks) > 0 {
		f.grown = 0
	} else {
		f.grown = min(f.grown+1, batchGrows)
	}
	if ev := f.record(b.ctx, b.stream); ev != 0 {
		f.add(mark{batch: *b, lane: l, ev: ev, due: now + f.restOf(l, now)})
	} else {
		f.put(b.ctx, b.start)
	}
	*b = batch{}
}

func (f *flight) add(m mark) {
	f.marks = append(f.marks, m)
	m.lane.sum += m.est
	m.lane.flying++
}

// reap takes out the marks that have been reached and learns from them. It gives the
// GPU's time for them, as far as it is known.
func (f *flight) reap(now int64) time.Duration {
	var took time.Duration
	kept := f.marks[:0]
	f.round++
	for i := range f.marks {
		m := &f.marks[i]
		if m.lane.late == f.round || f.driver.Query(m.ev) == Pending {
			m.lane.late, m.busy = f.round, now
			if len(kept) != i {
				kept = append(kept, *m)
			} else {
				kept = f.marks[:i+1]
			}
			continue
		}
		took += f.end(m, now)
	}
	f.marks = kept
	return took
}

// end is for a mark that has been reached.
func (f *flight) end(m *mark, now int64) time.Duration {
	l := m.lane
	from := uint64(0)
	switch {
	case m.untold: // it is not the GPU's time
	case m.start != 0 && (m.single || m.joined):
		from = m.start
	case m.joined:
		from = l.last
	}
	// All of it was given after the batch began, and has ended by this very moment. Work that
	// waits for its launches has no other measure: the GPU is done with each before the next
	// one comes.
	took, known := min(m.est, max(f.clock.Now()-m.at, 1)), false
	if t, ok := f.between(from, m.ev); ok {
		took, known = t, true
	}
	if known || took < m.est && !m.untold {
		for _, it := range m.items[:m.kinds] {
			it.c.learn(int64(float64(it.ns) * float64(took) / float64(m.est)))
		}
	}
	f.put(m.ctx, m.start)
	f.put(l.ctx, l.last)
	l.last = m.ev
	l.flying--
	l.sum -= m.est
	// It may have been reached long before this look.
	l.done = max(l.done, min(now, max(m.due, m.busy)))
	f.lastDone = now
	return time.Duration(took)
}

// between is the time from one event that was reached to another, ns.
func (f *flight) between(from, to uint64) (int64, bool) {
	if from == 0 {
		return 0, false
	}
	ns, ok := f.driver.Elapsed(from, to)
	return ns, ok && ns >= 0
}

// busy says whether anything is in flight, as far as marks tell.
func (f *flight) busy() bool { return len(f.marks) > 0 || f.open() }

// open says whether there is work without a mark.
func (f *flight) open() bool { return atomic.LoadInt64(&f.batch.told) > 0 }

// rest is how long the GPU is going to be busy with what is in flight, ns; the streams
// run side by side.
func (f *flight) rest(now int64) int64 {
	most := int64(0)
	for _, l := range f.lanes {
		if l.flying > 0 || f.in(l) {
			most = max(most, f.restOf(l, now))
		}
	}
	return most
}

// in says whether the batch goes to a stream.
func (f *flight) in(l *lane) bool {
	return f.open() && f.batch.stream == l.stream && f.batch.ctx == l.ctx
}

// given is how much is in flight in a stream, by estimates.
func (f *flight) given(l *lane) int64 {
	if f.in(l) {
		return l.sum + atomic.LoadInt64(&f.batch.told)
	}
	return l.sum
}

// head gives the oldest mark of a stream that has some.
func (f *flight) head(l *lane) *mark {
	for i := range f.marks {
		if f.marks[i].lane == l {
			return &f.marks[i]
		}
	}
	return nil
}

// restOf is rest for one stream.
func (f *flight) restOf(l *lane, now int64) int64 {
	all := f.given(l)
	since, head := f.batch.at, all
	if m := f.head(l); m != nil {
		since, head = m.at, m.est
	}
	// The GPU works on the head since that was given, or since what was before ended.
	return all - min(max(now-max(since, l.done), 0), head)
}

// drop gives up the marks; they are returned.
func (f *flight) drop() []mark {
	gone := f.marks
	for i := range gone {
		l := gone[i].lane
		l.flying--
		l.sum -= gone[i].est
		// The time to the next mark would have others' work in it.
		f.put(l.ctx, l.last)
		l.last = 0
	}
	f.marks = nil
	return gone
}

// fresh forgets where batches ended: others have had the GPU since.
func (f *flight) fresh() {
	for _, l := range f.lanes {
		if l.flying == 0 {
			f.put(l.ctx, l.last)
			l.last = 0
		}
	}
}

// forget lets go of a context that is about to be destroyed, and of its events.
func (f *flight) forget(ctx uint64) {
	kept := f.marks[:0]
	for _, m := range f.marks {
		if m.ctx != ctx {
			kept = append(kept, m)
		}
	}
	f.marks = kept
	lanes := f.lanes[:0]
	for _, l := range f.lanes {
		if l.ctx != ctx {
			lanes = append(lanes, l)
		}
	}
	f.lanes = lanes
	if f.batch.ctx == ctx {
		f.batch = batch{}
	}
	delete(f.events, ctx)
}
