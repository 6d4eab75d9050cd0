package worker

// What follows a failed one-way operation.
//
// The client sends most operations without waiting for an answer. Natively each of them would have
// returned its error from the call; here the program goes on before the worker has refused it. So that
// nothing which depends on the refused operation looks as if all were well, a failure stays with the
// stream that the operation was given to until a wait has told the program of it:
//
//   - a wait for that stream, or for a stream that is ordered behind it, returns the error;
//   - an event recorded behind it never completes: a query or wait for it returns the error, until the
//     event is recorded again; a stream that waits for such an event inherits the failure;
//   - a host function behind it is not called: the client gets the error instead;
//   - a capture that holds it ends with the error.
//
// A failure of an operation that was given to no stream is returned by the next wait of any kind. Until then,
// a launch of an executable graph fails that the operation was to change: the graph is not what the
// program means. What an
// operation's failure means is what follows `oneway=` in the API table.
//
// Locking: mu guards everything. Only the executor adds failures and asks for them, but for operations
// that a waiter finishes. On the way of a program that makes no mistakes there is one atomic load.

/*
#include "driver.h"
*/
import "C"

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// noStream stands for the stream of an operation that is given to none.
const noStream = ^uint32(0)

// legacyStream is the id of a context's default stream.
const legacyStream = 0

// A failure is the error of a one-way operation that no wait has returned yet.
type failure struct {
	place      place // its stream; noStream: any wait returns it
	blocking   bool  // the stream is ordered with the context's legacy default stream
	result     int32
	everywhere bool // all that is given to any stream is behind it, and any wait returns it
}

type failures struct {
	some   atomic.Bool // list or events hold any
	mu     sync.Mutex
	list   []failure
	events map[uint32]int32 // events recorded behind a failure, by id
}

// none reports whether there is no failure that a wait has still to return.
func (f *failures) none() bool { return !f.some.Load() }

// add notes a failure. A stream keeps its first one, which is returned.
func (f *failures) add(n failure) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.ContainsFunc(f.list, func(o failure) bool { return o.place == n.place }) {
		f.list = append(f.list, n)
		f.some.Store(true)
	}
}

// covers reports whether work given now to the stream at p waits for the failed operation.
func (n *failure) covers(p place, blocking bool) bool {
	switch {
	case n.everywhere:
		return true
	case n.place.stream == noStream:
		return false
	case n.place == p:
		return true
	case n.place.ctx != p.ctx:
		return false
	case n.place.stream == legacyStream:
		return blocking
	}
	return p.stream == legacyStream && n.blocking
}

// behind gives the error that work behind everything in a stream inherits, 0 if there is none.
func (f *failures) behind(p place, blocking bool) int32 {
	if f.none() {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.list {
		if f.list[i].covers(p, blocking) {
			return f.list[i].result
		}
	}
	return 0
}

// inContext gives the error of any stream of a context.
func (f *failures) inContext(ctx uint64) int32 {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.list {
		if f.list[i].place.ctx == ctx || f.list[i].everywhere {
			return f.list[i].result
		}
	}
	return 0
}

// edit gives the error of a change that was to be made to an executable graph.
func (f *failures) edit(exec uint64) int32 {
	if f.none() {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.list {
		if f.list[i].place.exec == exec {
			return f.list[i].result
		}
	}
	return 0
}

// tell gives the error that a wait returns. It forgets the failures that this answers: those for which
// told returns true, and those of no stream.
func (f *failures) tell(told func(*failure) bool) (result int32) {
	if f.none() {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = slices.DeleteFunc(f.list, func(n failure) bool {
		if n.place.stream != noStream && !n.everywhere && !told(&n) {
			return false
		}
		if result == 0 {
			result = n.result
		}
		return true
	})
	f.settle()
	return result
}

// spread makes the failures that a stream's work is behind those of all streams: the program takes the stream's work as done.
func (f *failures) spread(p place, blocking bool) {
	if f.none() {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.list {
		if f.list[i].covers(p, blocking) {
			f.list[i].everywhere = true
		}
	}
}

// settle notes whether anything is left. mu is held.
func (f *failures) settle() { f.some.Store(len(f.list) > 0 || len(f.events) > 0) }

// record notes that an event was recorded behind a failure, or, with result 0, that it was not.
func (f *failures) record(id uint32, result int32) {
	if result == 0 && f.none() {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if result == 0 {
		delete(f.events, id)
	} else {
		if f.events == nil {
			f.events = make(map[uint32]int32)
		}
		f.events[id] = result
	}
	f.settle()
}

// event gives the error of the event's last record, 0 if it was not behind a failure.
func (f *failures) event(id uint32) int32 {
	if f.none() {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[id]
}

// orphan keeps the failures of a stream that is about to be destroyed: any wait tells of them.
func (f *failures) orphan(p place) {
	if f.none() {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	of := func(p place) int { return slices.IndexFunc(f.list, func(n failure) bool { return n.place == p }) }
	i, rest := of(p), place{stream: noStream}
	switch {
	case i < 0:
	case of(rest) >= 0: // which is returned first
		f.list[of(rest)].everywhere = f.list[of(rest)].everywhere || f.list[i].everywhere
		f.list = slices.Delete(f.list, i, i+1)
	default:
		f.list[i].place = rest
	}
}

// forget drops the failures of a context that is about to be destroyed, and of its events.
func (f *failures) forget(ctx uint64, isEvent func(id uint32) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = slices.DeleteFunc(f.list, func(n failure) bool { return n.place.ctx == ctx })
	for id := range f.events {
		if isEvent(id) {
			delete(f.events, id)
		}
	}
	f.settle()
}

// --- the session's side; the executor's own ---

// placeOf gives a stream as failures know it, and whether it is ordered with its context's legacy stream.
func (s *session) placeOf(id uint32) (p place, blocking bool) {
	if id == legacyStream {
		return place{ctx: s.curReal, stream: legacyStream}, true
	}
	p = place{stream: id}
	q := s.tables[wire.KindStream].live(id)
	if q == nil {
		return p, true
	}
	if c := s.tables[wire.KindCtx].live(q.ctx); c != nil {
		p.ctx = c.real
	}
	return p, C.sl_stream_blocking(C.uint64_t(q.real)) != 0
}

// failed notes that the current one-way operation has failed, and tells the client so.
func (s *session) failed(op uint16, result int32) {
	if lateNothings[op] {
		s.log.Debug("one-way call failed", "op", opName(op), "result", result)
		return
	}
	n := failure{place: place{stream: noStream, exec: s.edited}, result: result}
	if s.given != noStream {
		// No wait can name a stream that is not live.
		if p, blocking := s.placeOf(s.given); p.ctx != 0 {
			n.place, n.blocking = p, blocking
		}
	}
	s.failures.add(n)
	s.fail(op, result)
}

// inherited gives the error of what came before in a stream.
func (s *session) inherited(stream uint32) int32 {
	if s.failures.none() {
		return 0
	}
	return s.failures.behind(s.placeOf(stream))
}

// tellStream gives the error that a wait for a stream tells of.
func (s *session) tellStream(stream uint32) int32 {
	if s.failures.none() {
		return 0
	}
	p, blocking := s.placeOf(stream)
	return s.failures.tell(func(n *failure) bool { return n.covers(p, blocking) })
}

// tellContext gives the error that a wait for everything in the current context tells of.
func (s *session) tellContext() int32 {
	ctx := s.curReal
	return s.failures.tell(func(n *failure) bool { return n.place.ctx == ctx })
}

// tellEvent gives the error that a wait for an event tells of.
func (s *session) tellEvent(id uint32) int32 {
	if rc := s.failures.event(id); rc != 0 {
		return rc
	}
	return s.tellAny()
}

// tellAny gives the error of an operation that was given to no stream.
func (s *session) tellAny() int32 {
	return s.failures.tell(func(*failure) bool { return false })
}

// recorded notes what an event that was recorded in a stream inherits, or with what result it was not recorded.
func (s *session) recorded(event, stream uint32, result int32) {
	if result != 0 {
		s.failures.record(event, result)
	} else if !s.failures.none() {
		s.failures.record(event, s.failures.behind(s.placeOf(stream)))
	}
}

// awaited makes a stream that waits for an event inherit the event's error.
func (s *session) awaited(event, stream uint32) {
	if rc := s.failures.event(event); rc != 0 {
		p, blocking := s.placeOf(stream)
		s.failures.add(failure{place: p, blocking: blocking, result: rc})
	}
}
