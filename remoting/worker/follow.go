package worker

// Events whose every record the client wants to be told of: it waits for old ones again and
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
)

const (
	// It looks again after an eighth of the time since an event last completed, within
	// these bounds: that much later at most does the client learn of one.
	leastLook = 10 * time.Microsecond
	mostLook  = 100 * time.Microsecond
)

// A record is one that the client is to be told of.
type record struct {
	u               *userEvent
	ctx             uint64
	id, gen, stream uint32
	over            bool // told, or recorded anew
}

type follower struct {
	s    *session
	mu   sync.Mutex
	cond *sync.Cond
	list []*record // in the order of the calls
	runs bool
	ends bool
}

func (f *follower) init(s *session) {
	f.s = s
	f.cond = sync.NewCond(&f.mu)
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
	// its stream must not wait for that.
	if old := r.u.followed; old != nil && !old.over {
		old.over = true
	}
	r.u.followed = r
	f.list = append(f.list, r)
	if !f.runs {
		f.runs = true
		go f.run()
	}
	f.cond.Signal()
}

// wait gives what is to be looked for, once there is anything; nil: the session is over.
func (f *follower) wait(old []*record) (list []*record, waited bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = slices.DeleteFunc(f.list, func(r *record) bool {
		if r.over {
			r.u.unref()
		}
		return r.over
	})
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
	sharpSleep()
	var list []*record
	var cur uint64
	busy := make(map[uint32]bool) // streams whose oldest record has not completed
	last := time.Now()
	for {
		var waited bool
		if list, waited = f.wait(list); len(list) == 0 {
			return
		}
		if waited {
			last = time.Now()
		}
		clear(busy)
		some := false
		for _, r := range list {
			if busy[r.stream] {
				continue
			}
			if r.ctx != cur {
				C.sl_ctx_set(C.uint64_t(r.ctx))
				cur = r.ctx
			}
			rc := int32(C.sl_event_query(C.uint64_t(r.u.real)))
			if rc == C.CUDA_ERROR_NOT_READY {
				busy[r.stream] = true
				continue
			}
			some = true
			f.s.settle() // what was complete before it has been sent before it
			f.done(r, rc)
		}
		now := time.Now()
		if some {
			last = now
			continue
		}
		nap(min(max(now.Sub(last)/8, leastLook), mostLook))
	}
}

// done tells the client of a record, unless there is a newer one to be told of.
func (f *follower) done(r *record, rc int32) {
	f.mu.Lock()
	over := r.over
	r.over = true
	f.mu.Unlock()
	if !over {
		f.s.happened(r.id, r.gen, rc)
	}
}

// happened tells the client that an event has completed.
func (s *session) happened(id, gen uint32, rc int32) {
	if err := s.wr.Send(&wire.Reply{Kind: wire.KindEvent, Call: gen, Arg: id, Result: rc}, nil, nil); err != nil {
		s.leave("event", err)
	}
}

// follow is for a record that the client wants to be told of: EVENT_WATCH without an answer.
func (s *session) follow(id, gen, stream uint32) int32 {
	u, ctx, rc := s.userEvent(id)
	if rc != 0 { // the record has failed, and somebody may be waiting for it
		s.happened(id, gen, rc)
		return 0
	}
	if rc = int32(C.sl_event_query(C.uint64_t(u.real))); rc != C.CUDA_ERROR_NOT_READY {
		s.settle()
		s.happened(id, gen, rc)
		return 0
	}
	u.mu.Lock()
	u.refs++
	u.mu.Unlock()
	s.followed.add(&record{u: u, ctx: ctx, id: id, gen: gen, stream: stream})
	return 0
}
