package gate

// The work that a session has in flight on a device, and how long each kind of work takes.
//
// Work is counted in batches: what goes to one stream until it is estimated to take batchTime, or
// has many items. Behind each batch stands a fence, an event. Fences tell what is still in flight;
// the times between them teach how long each kind of work takes. Only work of the session's own
// turns is measured, so the work of other tenants is in no estimate.

import (
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

const (
	// unknownCost is the estimate for work that has never been seen. It is enough for a batch of
	// its own, and for two of those to be all that is in flight.
	unknownCost = int64(1500 * time.Microsecond)
	leastCost   = int64(500)
	// A batch ends when it has so much work or so many items. A fence costs the executor about as
	// much as two launches do. So batches grow as long as the one before has always ended when the
	// next one is due: then the GPU waits for the executor, and not the other way round. A tenant
	// alone on the GPU may have larger ones, because nobody waits for their end.
	batchTime  = int64(250 * time.Microsecond)
	batchItems = 64
	batchGrows = 3 // doublings
	aloneGrows = 4
	// maxQueued bounds what is in flight in a stream, by the estimates. Once it is reached, nothing
	// more starts until resumeQueued is left; the executor sleeps only while more than safeQueued is.
	// Within a turn a queue harms nobody. It must be long enough for the GPU never to run dry while
	// the executor sleeps, and short enough for a wrong estimate to delay the end of the turn by
	// little.
	maxQueued    = int64(3 * time.Millisecond)
	resumeQueued = int64(2 * time.Millisecond)
	safeQueued   = int64(1500 * time.Microsecond)
	maxFences    = 64
	maxKinds     = 24 // kinds of work in a batch that are distinguished
)

// A cost is the estimated time of one kind of work, ns.
type cost struct {
	ns   atomic.Int64
	seen int // how often it was measured; under the gate's mu
}

func newCost(ns int64) *cost {
	c := &cost{}
	c.ns.Store(ns)
	return c
}

// learn moves the estimate towards a measurement. A single outlier has little effect.
func (c *cost) learn(want int64) {
	old := c.ns.Load()
	switch {
	case c.seen == 0:
	case c.seen < 4:
		want = old + (min(want, 4*old)-old)/2
	case want < old: // a disturbance only makes a measurement longer
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
	ns int64 // the estimate for one
}

// batch is the work that has gone to a stream since its last fence.
type batch struct {
	ctx, stream uint64
	at          int64 // when it began
	est         int64 // estimated time; 0: the batch is empty
	published   int64 // est when the executor last stepped out, which the keeper may read
	n           int
	kinds       int
	items       [maxKinds]item
	start       uint64 // event before its first item; 0: there is none
	single      bool   // it is to have one item, measured by itself
	opaque      bool   // its work may wait for the client, and nobody can tell
	joined      bool   // it was started while the batch before it in the stream was running
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

func (b *batch) publish() { atomic.StoreInt64(&b.published, b.est) }

// fence is a batch with an event behind it.
type fence struct {
	batch
	queue *queue
	ev    uint64
	due   int64 // when it should be reached
	busy  int64 // when it was last seen not to be
}

// queue is a stream with fences. Work of different streams may run at the same time.
type queue struct {
	ctx, stream uint64
	fences      int
	sum         int64  // of the fences' estimates
	last        uint64 // event of the last batch that has ended; 0: none
	done        int64  // when that was seen
	pending     uint64 // the round in which its oldest fence was found pending
}

// flight is all that a gate has in flight. It belongs to the holder of the gate's mu, but for the
// batch, which is the executor's as long as the gate is open.
type flight struct {
	driver   Driver
	clock    turns.Clock
	batch    batch
	fences   []fence
	queues   []*queue
	lastDone int64 // when a fence was last seen to have been reached
	round    uint64
	events   map[uint64][]uint64 // for reuse, by context
	tick     int
	grown    int // how often the bound of a batch's items is doubled
}

// queue returns the queue of a stream.
func (f *flight) queue(ctx, stream uint64) *queue {
	for _, q := range f.queues {
		if q.stream == stream && q.ctx == ctx {
			return q
		}
	}
	if len(f.queues) >= 64 { // forget those that are idle
		kept := f.queues[:0]
		for _, q := range f.queues {
			if q.fences > 0 {
				kept = append(kept, q)
			} else {
				f.put(q.ctx, q.last)
			}
		}
		f.queues = kept
	}
	q := &queue{ctx: ctx, stream: stream}
	f.queues = append(f.queues, q)
	return q
}

// event returns an event that takes the time. Its context must be current.
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

// record puts an event into a stream, and returns it; 0: that failed.
func (f *flight) record(ctx, stream uint64) uint64 {
	ev := f.event(ctx)
	if ev != 0 && !f.driver.Record(ev, stream) {
		f.put(ctx, ev)
		return 0
	}
	return ev
}

// begin starts a batch in a stream of the current context. The first batch of a turn is not
// measured by itself: the GPU's change of contexts would be in its time. With timed there is an
// event before the batch in any case. An opaque batch has one item.
func (f *flight) begin(c *cost, ctx, stream uint64, now int64, first, timed, opaque bool) {
	q := f.queue(ctx, stream)
	f.tick++
	single := !first && !opaque && q.fences == 0 && (c.seen < 4 || f.tick%16 == 0)
	f.batch = batch{ctx: ctx, stream: stream, at: now, opaque: opaque}
	if single || timed {
		f.batch.start = f.record(ctx, stream)
	}
	f.batch.single = single && f.batch.start != 0
}

// full says whether the batch is due for its fence.
func (f *flight) full(alone bool) bool { return f.budget(alone) <= 0 || f.itemsLeft(alone) <= 0 }

// budget is how much work may still go into the batch, ns.
func (f *flight) budget(alone bool) int64 { return batchTime<<f.growth(alone) - f.batch.est }

// itemsLeft is how many items may still go into the batch.
func (f *flight) itemsLeft(alone bool) int {
	if f.batch.single || f.batch.opaque {
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

// close ends the batch with a fence. If there is no event for it, its work is not waited for and
// nothing is learned from it.
func (f *flight) close(now int64) {
	b := &f.batch
	if b.est == 0 {
		return
	}
	q := f.queue(b.ctx, b.stream)
	b.joined = q.fences > 0
	if len(f.fences) > 0 {
		f.grown = 0
	} else {
		f.grown = min(f.grown+1, batchGrows)
	}
	if ev := f.record(b.ctx, b.stream); ev != 0 {
		f.add(fence{batch: *b, queue: q, ev: ev, due: now + f.remainingIn(q, now)})
	} else {
		f.put(b.ctx, b.start)
	}
	*b = batch{}
}

func (f *flight) add(m fence) {
	f.fences = append(f.fences, m)
	m.queue.sum += m.est
	m.queue.fences++
}

// reap removes the fences that have been reached and learns from them. It returns the GPU's time
// for their work, as far as that is known.
func (f *flight) reap(now int64) time.Duration {
	var took time.Duration
	kept := f.fences[:0]
	f.round++
	for i := range f.fences {
		m := &f.fences[i]
		if m.queue.pending == f.round || f.driver.Query(m.ev) == Pending {
			m.queue.pending, m.busy = f.round, now
			if len(kept) != i {
				kept = append(kept, *m)
			} else {
				kept = f.fences[:i+1]
			}
			continue
		}
		took += f.end(m, now)
	}
	f.fences = kept
	return took
}

// end accounts for a fence that has been reached.
func (f *flight) end(m *fence, now int64) time.Duration {
	q := m.queue
	from := uint64(0)
	switch {
	case m.opaque: // the time between events would not be the GPU's
	case m.start != 0 && (m.single || m.joined):
		from = m.start
	case m.joined:
		from = q.last
	}
	// All of it started after the batch began, and has ended by now. For launch-bound work there
	// is no other measure: the GPU is done with each launch before the next one comes.
	took, known := min(m.est, max(f.clock.Now()-m.at, 1)), false
	if t, ok := f.elapsed(from, m.ev); ok {
		took, known = t, true
	}
	if known || took < m.est && !m.opaque {
		for _, it := range m.items[:m.kinds] {
			it.c.learn(int64(float64(it.ns) * float64(took) / float64(m.est)))
		}
	}
	f.put(m.ctx, m.start)
	f.put(q.ctx, q.last)
	q.last = m.ev
	q.fences--
	q.sum -= m.est
	// It may have been reached long before now.
	q.done = max(q.done, min(now, max(m.due, m.busy)))
	f.lastDone = now
	return time.Duration(took)
}

// elapsed is the time between two events that have been reached, ns.
func (f *flight) elapsed(from, to uint64) (int64, bool) {
	if from == 0 {
		return 0, false
	}
	ns, ok := f.driver.Elapsed(from, to)
	return ns, ok && ns >= 0
}

// busy says whether anything is in flight, as far as fences tell.
func (f *flight) busy() bool { return len(f.fences) > 0 || f.unfenced() }

// unfenced says whether there is work without a fence.
func (f *flight) unfenced() bool { return atomic.LoadInt64(&f.batch.published) > 0 }

// remaining is how long the work in flight will keep the GPU busy, ns, if streams run at the same
// time.
func (f *flight) remaining(now int64) int64 {
	most := int64(0)
	for _, q := range f.queues {
		if q.fences > 0 || f.hasBatch(q) {
			most = max(most, f.remainingIn(q, now))
		}
	}
	return most
}

// hasBatch says whether the batch goes to a stream.
func (f *flight) hasBatch(q *queue) bool {
	return f.unfenced() && f.batch.stream == q.stream && f.batch.ctx == q.ctx
}

// queued is how much work is in flight in a stream, by the estimates, ns.
func (f *flight) queued(q *queue) int64 {
	if f.hasBatch(q) {
		return q.sum + atomic.LoadInt64(&f.batch.published)
	}
	return q.sum
}

// head returns the oldest fence of a stream, or nil.
func (f *flight) head(q *queue) *fence {
	for i := range f.fences {
		if f.fences[i].queue == q {
			return &f.fences[i]
		}
	}
	return nil
}

// remainingIn is remaining for one stream.
func (f *flight) remainingIn(q *queue, now int64) int64 {
	all := f.queued(q)
	since, head := f.batch.at, all
	if m := f.head(q); m != nil {
		since, head = m.at, m.est
	}
	// The GPU has worked on the oldest batch since that was started, or the one before it ended.
	return all - min(max(now-max(since, q.done), 0), head)
}

// drop removes all fences and returns them.
func (f *flight) drop() []fence {
	gone := f.fences
	for i := range gone {
		q := gone[i].queue
		q.fences--
		q.sum -= gone[i].est
		// The time up to the next fence would contain work of others.
		f.put(q.ctx, q.last)
		q.last = 0
	}
	f.fences = nil
	return gone
}

// forgetEnds forgets where batches ended: since then others have had the GPU.
func (f *flight) forgetEnds() {
	for _, q := range f.queues {
		if q.fences == 0 {
			f.put(q.ctx, q.last)
			q.last = 0
		}
	}
}

// forget drops a context that is about to be destroyed, and its events with it.
func (f *flight) forget(ctx uint64) {
	kept := f.fences[:0]
	for _, m := range f.fences {
		if m.ctx != ctx {
			kept = append(kept, m)
		}
	}
	f.fences = kept
	queues := f.queues[:0]
	for _, q := range f.queues {
		if q.ctx != ctx {
			queues = append(queues, q)
		}
	}
	f.queues = queues
	if f.batch.ctx == ctx {
		f.batch = batch{}
	}
	delete(f.events, ctx)
}
