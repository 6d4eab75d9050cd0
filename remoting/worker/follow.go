package worker

// Events for which the client subscribes to every record: it waits for old ones again and
// again while it gives newer work, and a wait in the order of calls would queue behind that.
// One thread of the session looks for all of them.

/*
#include "driver.h"
*/
import "C"

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/nap"
)

const (
	// It looks again after an eighth of the time since an event last completed, within
	// these bounds: that much later at most does the client learn of one.
	leastLook = 10 * time.Microsecond
	mostLook  = time.Millisecond
	// Only the oldest record of each stream is queried. Each lookAtAll-th look queries all of them: an event that
	// was recorded again has moved to a later place, maybe in another stream.
	lookAtAll = 16
)

// A record is one recording of an event that is to be reported to the client.
type record struct {
	u       *userEvent
	id, gen uint32
	place   place
	over    bool // reported, or recorded again; under the follower's mu
}

// A place is a stream: of the default one each context has its own.
type place struct {
	ctx    uint64
	stream uint32
	exec   uint64 // the executable graph that a failed change was to be made to; stream is noStream
}

type follower struct {
	s    *session
	mu   sync.Mutex
	cond *sync.Cond
	list []*record // in the order of the calls
	runs bool
	ends bool

	pass sync.Mutex // held while the driver is asked; before mu
	cur  uint64     // the context that is current then
	busy map[place]bool
}

func (f *follower) init(s *session) {
	f.s = s
	f.cond = sync.NewCond(&f.mu)
	f.busy = make(map[place]bool)
}

// stop is for those who run several sessions in one process.
func (f *follower) stop() {
	f.mu.Lock()
	f.ends = true
	f.cond.Broadcast()
	f.mu.Unlock()
}

// add takes a record of the executor's; u has a reference for it.
func (f *follower) add(r *record) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.list) >= maxQueued {
		f.s.violation("too many events to be told of")
		r.u.unref()
		return
	}
	// The event stands for its newest record from now on: what is behind the older one in
	// its stream must not wait for that. Two threads may have asked in another order than
	// they recorded.
	if old := r.u.followed; old != nil && !old.over {
		old.over = true
		if int32(old.gen-r.gen) > 0 {
			r.gen = old.gen
		}
	}
	r.u.followed = r
	f.list = append(f.list, r)
	if !f.runs {
		f.runs = true
		go f.run()
	}
	f.cond.Signal()
}

// forget gives up those records for which gone says so, and when it returns the driver is
// not asked for them any more.
func (f *follower) forget(gone func(*record) bool) {
	f.mu.Lock()
	for _, r := range f.list {
		r.over = r.over || gone(r)
	}
	f.mu.Unlock()
	f.pass.Lock()
	defer f.pass.Unlock()
	f.cur = 0 // a context that is made later may have the address of one that is gone
	f.sweep()
}

// sweep lets go of the records that are over.
func (f *follower) sweep() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = slices.DeleteFunc(f.list, func(r *record) bool {
		if r.over {
			r.u.unref()
		}
		return r.over
	})
}

// wait gives what is to be looked for, once there is anything; nothing: the session is over.
func (f *follower) wait(old []*record) (list []*record, waited bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.list) == 0 {
		if f.ends {
			return nil, false
		}
		waited = true
		f.cond.Wait()
	}
	return append(old[:0], f.list...), waited
}

func (f *follower) run() {
	runtime.LockOSThread()
	relaxCapture()
	nap.Sharpen()
	var list []*record
	last := time.Now()
	for n := 0; ; n++ {
		var waited bool
		if list, waited = f.wait(list); len(list) == 0 {
			return
		}
		if waited {
			last = time.Now()
		}
		some := f.look(list, n%lookAtAll == 0)
		f.sweep()
		if now := time.Now(); some {
			last = now
		} else {
			nap.For(min(max(now.Sub(last)/8, leastLook), mostLook))
		}
	}
}

// look asks the driver for records and tells the client of those that have completed; it
// says whether there were any.
func (f *follower) look(list []*record, all bool) (some bool) {
	f.pass.Lock()
	defer f.pass.Unlock()
	if len(f.busy) < 64 {
		clear(f.busy)
	} else {
		f.busy = make(map[place]bool)
	}
	for _, r := range list {
		if f.busy[r.place] && !all || f.over(r) {
			continue
		}
		if r.place.ctx != f.cur {
			C.sl_ctx_set(C.uint64_t(r.place.ctx))
			f.cur = r.place.ctx
		}
		rc := int32(C.sl_event_query(C.uint64_t(r.u.real)))
		if rc == C.CUDA_ERROR_NOT_READY {
			f.busy[r.place] = true
			continue
		}
		some = true
		f.done(r, rc)
	}
	return some
}

func (f *follower) over(r *record) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return r.over
}

// done reports a record to the client, unless there is a newer one to report.
func (f *follower) done(r *record, rc int32) {
	// A client that waits for an event expects what kernels printed before it. The driver returns it in a wait.
	if ev, rc := f.s.events.get(r.place.ctx); rc == 0 {
		C.sl_event_sync(C.uint64_t(ev))
		f.s.events.put(r.place.ctx, ev)
	}
	f.s.settle() // what was complete before it has been sent before it
	f.mu.Lock()
	over := r.over
	r.over = true
	f.mu.Unlock()
	if !over {
		f.s.happened(r.id, r.gen, rc)
	} else if err := f.s.wr.Flush(); err != nil {
		f.s.leave("data", err)
	}
}

// happened tells the client that an event has completed.
func (s *session) happened(id, gen uint32, rc int32) {
	if err := s.wr.Send(&wire.Reply{Kind: wire.FrameEvent, Call: gen, Arg: id, Result: rc}, nil, nil); err != nil {
		s.leave("event", err)
	}
}

// follow subscribes the client to a record: EVENT_WATCH without an answer.
func (s *session) follow(id, gen, stream uint32) int32 {
	u, ctx, rc := s.userEvent(id)
	if rc != 0 { // the record has failed, and somebody may be waiting for it
		s.happened(id, gen, rc)
		return 0
	}
	if rc := s.failures.event(id); rc != 0 {
		s.happened(id, gen, rc)
		return 0
	}
	if rc = int32(C.sl_event_query(C.uint64_t(u.real))); rc != C.CUDA_ERROR_NOT_READY {
		C.sl_event_sync(C.uint64_t(u.real)) // see done
		s.settle()
		s.happened(id, gen, rc)
		return 0
	}
	u.mu.Lock()
	u.refs++
	u.mu.Unlock()
	s.followed.add(&record{u: u, id: id, gen: gen, place: place{ctx: ctx, stream: stream}})
	return 0
}

// unfollow is for an event that is about to be recorded. If that is in a capture, the event must not be
// asked for. The client, which knows, waits for it no longer.
func (s *session) unfollow(id uint32) {
	if len(s.captures) == 0 {
		return
	}
	s.followed.forget(func(r *record) bool { return r.id == id })
}
