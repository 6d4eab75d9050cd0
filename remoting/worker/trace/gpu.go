package trace

// Work on the GPU, and when it began and ended.
//
// The times are those of events around the work. CUDA tells only the time between two events, so each context has a base: an
// event in a stream that nothing else uses, which completes at once. Its time on the trace's clock is known as exactly as it took to
// record it and see it complete. Elapsed times are floats in milliseconds, so there is a new base every second. If the GPU was busy
// and a base was seen late, its time is computed from the base before it.

import (
	"maps"
	"runtime"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/gate"
)

const (
	lookEvery = 2 * time.Millisecond
	baseEvery = time.Second
	// baseTime is how long a base may take to be reached, firstTime the first one, and baseExact how long one may take whose time
	// is believed.
	baseTime  = 2 * time.Millisecond
	firstTime = 50 * time.Millisecond
	baseExact = 100 * time.Microsecond
	baseTries = 8
	// baseAgain is how long it takes until another base is asked for after one that was not reached: each costs baseTime or firstTime,
	// and records wait meanwhile.
	baseAgain = 100 * time.Millisecond
	// maxStreams is of how many streams it is kept when the last work ended.
	maxStreams = 1024
)

// Driver is the session's driver as a trace uses it.
type Driver interface {
	gate.Driver
	DestroyEvent(event uint64)
	// NewStream makes a stream of the current context that does not wait for others. It returns 0 on failure.
	NewStream() uint64
	DestroyStream(stream uint64)
}

// base is an event of a context whose time is known.
type base struct {
	stream, event uint64
	at            uint64 // on the trace's clock, ns
	made          time.Time
	tried         time.Time // when one was last asked for
}

// A Span is work that is being given to the GPU.
type Span struct {
	ctx, stream uint64
	start       uint64 // event before the work; 0: its times will be those of the call
	given       uint64
}

// pending is a record whose work the GPU has not ended.
type pending struct {
	ctx, stream uint64
	start, end  uint64 // events
	rec         wire.TraceRecord
}

// Begin comes right before work is given to a stream. The context of the stream is current. With timed false the work is not
// put between events: a capture would have them.
func (r *Recorder) Begin(ctx, stream uint64, timed bool) Span {
	sp := Span{ctx: ctx, stream: stream}
	if timed {
		sp.start = r.record(ctx, stream)
	}
	sp.given = r.now()
	return sp
}

// End comes right after. m has what is known of the work but for the times; name names it, "" for none.
func (r *Recorder) End(sp Span, m wire.TraceRecord, name string) {
	now := r.now()
	var end uint64
	if sp.start != 0 {
		end = r.record(sp.ctx, sp.stream)
	}
	m.Given, m.Begin, m.End = sp.given, sp.given, now
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		r.giveBack(sp.ctx, sp.start, end)
		return
	}
	if name != "" {
		m.Name = r.name(name)
	}
	if end == 0 {
		r.giveBack(sp.ctx, sp.start)
		r.add(&m, "")
		return
	}
	r.pending = append(r.pending, pending{sp.ctx, sp.stream, sp.start, end, m})
}

// Cancel takes the place of End for work that the driver refused.
func (r *Recorder) Cancel(sp Span) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.giveBack(sp.ctx, sp.start)
}

// record puts an event into a stream of the current context, and returns it; 0: there is none.
func (r *Recorder) record(ctx, stream uint64) uint64 {
	r.mu.Lock()
	if r.closed || len(r.pending) >= maxPending || r.room < 2*wire.TraceRecordSize { // nothing more would be kept
		r.mu.Unlock()
		return 0
	}
	var ev uint64
	if l := r.events[ctx]; len(l) > 0 {
		ev, r.events[ctx] = l[len(l)-1], l[:len(l)-1]
	}
	r.mu.Unlock()
	if ev == 0 {
		ev = r.cfg.Driver.NewEvent()
	}
	if ev != 0 && !r.cfg.Driver.Record(ev, stream) {
		r.mu.Lock()
		r.giveBack(ctx, ev)
		r.mu.Unlock()
		return 0
	}
	return ev
}

// giveBack keeps events for reuse, or destroys them once nothing more is pending. mu is held.
func (r *Recorder) giveBack(ctx uint64, evs ...uint64) {
	for _, ev := range evs {
		switch {
		case ev == 0:
		case r.ended:
			r.cfg.Driver.DestroyEvent(ev)
		default:
			r.events[ctx] = append(r.events[ctx], ev)
		}
	}
}

// Forget comes before a context is destroyed. The context is idle; its events end with it.
func (r *Recorder) Forget(ctx uint64) {
	r.gpu.Lock()
	defer r.gpu.Unlock()
	if r.cfg.Driver.SetContext(ctx) {
		r.look(func(p *pending) bool { return p.ctx == ctx })
	}
	if b := r.bases[ctx]; b != nil {
		r.cfg.Driver.DestroyStream(b.stream)
		delete(r.bases, ctx)
	}
	maps.DeleteFunc(r.ends, func(s [2]uint64, _ int64) bool { return s[0] == ctx })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending = slices.DeleteFunc(r.pending, func(p pending) bool {
		if p.ctx == ctx {
			r.add(&p.rec, "")
		}
		return p.ctx == ctx
	})
	delete(r.events, ctx)
}

// collect looks at pending records until the trace has ended.
func (r *Recorder) collect() {
	runtime.LockOSThread() // and leaves with it, as its current context is nobody else's
	r.cfg.Driver.RelaxCapture()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var until time.Time // of the wait for the GPU after the trace's end
	stop := r.stop
	for {
		select {
		case <-tick.C:
		case <-stop:
			stop, until = nil, time.Now().Add(stopTime)
		}
		r.gpu.Lock()
		left := r.look(nil)
		r.gpu.Unlock()
		if stop == nil && (left == 0 || time.Now().After(until)) {
			r.finish()
			return
		}
	}
}

// finish gives up what is still pending, with the times of the calls, and gives back what the trace had of the driver.
func (r *Recorder) finish() {
	r.gpu.Lock()
	defer r.gpu.Unlock()
	r.mu.Lock()
	rest := r.pending
	r.pending = nil
	for i := range rest {
		r.add(&rest[i].rec, "")
	}
	r.ended = true
	events := r.events
	r.events = make(map[uint64][]uint64)
	for i := range rest {
		events[rest[i].ctx] = append(events[rest[i].ctx], rest[i].start, rest[i].end)
	}
	r.mu.Unlock()
	for ctx, b := range r.bases {
		if r.cfg.Driver.SetContext(ctx) {
			r.cfg.Driver.DestroyEvent(b.event)
			r.cfg.Driver.DestroyStream(b.stream)
		}
	}
	clear(r.bases)
	for ctx, l := range events {
		if r.cfg.Driver.SetContext(ctx) {
			for _, ev := range l {
				r.cfg.Driver.DestroyEvent(ev)
			}
		}
	}
	select {
	case r.full <- struct{}{}:
	default:
	}
}

// look turns pending records that are complete into records of the trace, those for which only says so. It returns how many are
// left. gpu is held.
func (r *Recorder) look(only func(*pending) bool) int {
	r.mu.Lock()
	list := r.pending
	r.pending = nil
	r.mu.Unlock()
	kept := list[:0]
	late := make(map[[2]uint64]bool) // streams whose first is not complete: those behind it are not either
	var cur uint64
	for i := range list {
		p := &list[i]
		if only != nil && !only(p) || late[[2]uint64{p.ctx, p.stream}] {
			kept = append(kept, *p)
			continue
		}
		if cur != p.ctx {
			if !r.cfg.Driver.SetContext(p.ctx) {
				r.mu.Lock()
				r.add(&p.rec, "")
				r.mu.Unlock()
				continue
			}
			cur = p.ctx
		}
		if r.cfg.Driver.Query(p.end) == gate.Pending {
			late[[2]uint64{p.ctx, p.stream}] = true
			kept = append(kept, *p)
			continue
		}
		r.complete(p)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending = append(kept, r.pending...)
	return len(r.pending)
}

// complete ends a record whose work has ended. Its context is current; gpu is held.
func (r *Recorder) complete(p *pending) {
	d := r.cfg.Driver
	b := r.base(p.ctx)
	if b != nil {
		took, ok := d.Elapsed(p.start, p.end)
		// The base may be younger than the work: then the time is negative.
		from, ok2 := d.Elapsed(b.event, p.start)
		if ok && ok2 && took >= 0 {
			// Nor has it begun before the end of the work in front of it in its stream, which may have been placed by a base
			// that is less exact.
			stream := [2]uint64{p.ctx, p.stream}
			p.rec.Begin, p.rec.End = place(int64(b.at)+from, took, max(int64(p.rec.Given), r.ends[stream]))
			p.rec.Flags |= wire.TraceGPU
			if len(r.ends) >= maxStreams {
				clear(r.ends)
			}
			r.ends[stream] = int64(p.rec.End)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(&p.rec, "")
	r.giveBack(p.ctx, p.start, p.end)
}

// place returns begin and end of work between events, the first of which was reached at begin, by the trace's clock, and the second
// took ns later. Work that can only have begun later than that has not begun before: the event before it waited for it, or the base is
// not exact.
func place(begin, took, earliest int64) (uint64, uint64) {
	end := begin + took
	if begin < earliest {
		begin = earliest
	}
	if end < begin {
		end = begin + took
	}
	return uint64(begin), uint64(end)
}

// base returns the base of the current context, nil if there is none. gpu is held.
func (r *Recorder) base(ctx uint64) *base {
	b := r.bases[ctx]
	if b == nil {
		b = &base{stream: r.cfg.Driver.NewStream()}
		if b.stream == 0 {
			return nil
		}
		r.bases[ctx] = b
	}
	if b.event != 0 && time.Since(b.made) < baseEvery {
		return b
	}
	if time.Since(b.tried) < baseAgain {
		return b.known()
	}
	d := r.cfg.Driver
	limit := baseTime
	if b.event == 0 {
		limit = firstTime
	}
	ev, at, within := r.mark(b.stream, limit)
	for n := 0; ev != 0 && within > baseExact && b.event == 0 && n < baseTries; n++ { // there is no other to go by
		if ev2, at2, within2 := r.mark(b.stream, limit); ev2 != 0 && within2 < within {
			d.DestroyEvent(ev)
			ev, at, within = ev2, at2, within2
		} else if ev2 != 0 {
			d.DestroyEvent(ev2)
		}
	}
	b.tried = time.Now()
	if ev == 0 {
		return b.known()
	}
	if b.event != 0 {
		if since, ok := d.Elapsed(b.event, ev); ok && within > baseExact {
			at = b.at + uint64(max(since, 0))
		}
		d.DestroyEvent(b.event)
	}
	b.event, b.at, b.made = ev, at, time.Now()
	return b
}

// mark puts an event into an idle stream of the current context. It returns the event, when it was reached and how exact that is;
// the event is 0 if it was not reached soon.
func (r *Recorder) mark(stream uint64, limit time.Duration) (ev, at uint64, within time.Duration) {
	d := r.cfg.Driver
	if ev = d.NewEvent(); ev == 0 {
		return 0, 0, 0
	}
	from := r.now()
	state := gate.Failed
	if d.Record(ev, stream) {
		state = d.Query(ev)
	}
	for state == gate.Pending && r.now()-from < uint64(limit) {
		if r.now()-from > uint64(baseExact) { // late anyway
			time.Sleep(baseExact)
		}
		state = d.Query(ev)
	}
	to := r.now()
	if state != gate.Reached {
		d.DestroyEvent(ev)
		return 0, 0, 0
	}
	return ev, from + (to-from)/2, time.Duration(to - from)
}

// known returns a base that has an event, or nil.
func (b *base) known() *base {
	if b.event == 0 {
		return nil
	}
	return b
}
