package worker

// Calls that wait for the GPU.
//
// The executor records an event where the call stands in its stream. If the GPU
// gets there while the client sends nothing else, the executor answers itself,
// which spares two thread switches; otherwise a waiter, a goroutine on a thread
// of its own, waits for the event and answers. Before an answer goes out,
// everything that the GPU had finished before it does too: device output, then
// bytes copied to the host (settle).

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

// maxWaiters bounds the threads that wait; more calls than that queue.
const maxWaiters = 64

// maxQueued bounds the calls that one client may have waiting.
const maxQueued = 1 << 16

// spinTime is how long the executor waits itself. The driver's own wait polls as well, so a longer time takes no more of
// the processors; handing the wait to another thread costs 20 to 40 us at its end (measured on an H200).
var spinTime = func() time.Duration {
	if runtime.NumCPU() < 4 {
		return 100 * time.Microsecond
	}
	return 2 * time.Millisecond
}()

// A job is what a waiter does: with ctx current, run.
type job struct {
	ctx uint64
	run func()
}

type waiters struct {
	s       *session
	mu      sync.Mutex
	cond    *sync.Cond
	queue   []job
	ended   *sync.Cond     // a job has
	jobs    map[uint64]int // that have not ended, by context
	idle    int
	threads int
	closed  bool
}

func (w *waiters) init(s *session) {
	w.s = s
	w.cond, w.ended = sync.NewCond(&w.mu), sync.NewCond(&w.mu)
	w.jobs = make(map[uint64]int)
}

// leave waits until the jobs of a context have ended: once the driver has destroyed it, their events are gone too. The GPU being
// done with the context's work does not mean that the waiters have been told.
func (w *waiters) leave(ctx uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.jobs[ctx] > 0 {
		w.ended.Wait()
	}
}

// do hands a job to a waiter.
func (w *waiters) do(j job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) >= maxQueued {
		w.s.violation("too many calls waiting")
		return
	}
	w.queue = append(w.queue, j)
	w.jobs[j.ctx]++
	if w.idle >= len(w.queue) {
		w.cond.Signal()
	} else if w.threads < maxWaiters {
		w.threads++
		go w.thread()
	}
}

// stop lets the threads end once nothing waits. A session process just exits;
// this is for those who run several sessions in one process.
func (w *waiters) stop() {
	w.mu.Lock()
	w.closed = true
	w.cond.Broadcast()
	w.mu.Unlock()
}

func (w *waiters) thread() {
	runtime.LockOSThread()
	relaxCapture()
	var cur uint64
	w.mu.Lock()
	for {
		for len(w.queue) == 0 {
			if w.closed {
				w.threads--
				w.mu.Unlock()
				return
			}
			w.idle++
			w.cond.Wait()
			w.idle--
		}
		j := w.queue[0]
		w.queue = w.queue[1:]
		w.mu.Unlock()
		if j.ctx != cur {
			C.sl_ctx_set(C.uint64_t(j.ctx))
			cur = j.ctx
		}
		j.run()
		w.mu.Lock()
		if w.jobs[j.ctx]--; w.jobs[j.ctx] == 0 {
			delete(w.jobs, j.ctx)
			w.ended.Broadcast()
		}
	}
}

// relaxCapture lets the calling thread query events while some stream of the
// process is being captured: the worker's own events are never part of that.
func relaxCapture() {
	mode := C.CUstreamCaptureMode(C.CU_STREAM_CAPTURE_MODE_RELAXED)
	C.sl_capture_mode(&mode)
}

// eventPools keeps events for reuse, by context.
type eventPools struct {
	mu   sync.Mutex
	free map[uint64][]uint64
}

func (e *eventPools) init() { e.free = make(map[uint64][]uint64) }

// get gives an event of a context, which must be current when there is none
// to reuse.
func (e *eventPools) get(ctx uint64) (uint64, int32) {
	e.mu.Lock()
	if l := e.free[ctx]; len(l) > 0 {
		ev := l[len(l)-1]
		e.free[ctx] = l[:len(l)-1]
		e.mu.Unlock()
		return ev, 0
	}
	e.mu.Unlock()
	var ev C.uint64_t
	rc := C.sl_event_create(&ev, C.CU_EVENT_DISABLE_TIMING)
	return uint64(ev), int32(rc)
}

func (e *eventPools) put(ctx, ev uint64) {
	if ev == 0 {
		return
	}
	e.mu.Lock()
	e.free[ctx] = append(e.free[ctx], ev)
	e.mu.Unlock()
}

// drop forgets the events of a context that is gone, and with them its events.
func (e *eventPools) drop(ctx uint64) {
	e.mu.Lock()
	delete(e.free, ctx)
	e.mu.Unlock()
}

// streamCtx is the context of a stream: its own, or for the default stream the
// current one. It is made current if it is not.
func (s *session) streamCtx(id uint32) (uint64, int32) {
	if id == 0 {
		if s.cur == 0 || s.cur == noCtx {
			return 0, C.CUDA_ERROR_INVALID_CONTEXT
		}
		return s.curReal, 0
	}
	p := s.tables[wire.KindStream].live(id)
	if p == nil || p.err != 0 {
		return 0, s.badHandle(wire.KindStream, id)
	}
	if rc := s.wantCtx(p.ctx); rc != 0 {
		return 0, rc
	}
	return s.curReal, 0
}

// answerWhen answers the current call with the event's result once it has
// completed. The event goes back to its pool.
//
// told is the error of an earlier one-way operation that the answer returns, 0 if there is none.
func (s *session) answerWhen(ctx, ev uint64, told int32) int32 {
	op, call, g := s.hdr.Op, s.hdr.Call, s.gates.WaitBegins()
	finish := func() int32 {
		rc := int32(C.sl_event_sync(C.uint64_t(ev)))
		g.WaitEnds()
		s.events.put(ctx, ev)
		s.settle()
		return orTold(rc, told)
	}
	if s.spin(ev) {
		return finish()
	}
	s.pending = true
	s.waiters.do(job{ctx, func() {
		rc := finish()
		if call != 0 {
			if err := s.reply(op, call, rc, nil); err != nil {
				s.leave("reply", err)
			}
		} else if rc != 0 {
			s.failures.add(failure{place: place{stream: noStream}, result: rc})
			s.fail(op, rc)
		}
	}})
	return 0
}

// orTold is the result of a wait that went well but has an earlier error to tell of.
func orTold(rc, told int32) int32 {
	if rc == 0 {
		return told
	}
	return rc
}

// spin waits for an event a short while, as long as the client sends nothing
// that could be done meanwhile.
func (s *session) spin(ev uint64) bool {
	if s.rd.Buffered() {
		return C.sl_event_query(C.uint64_t(ev)) != C.CUDA_ERROR_NOT_READY
	}
	start := time.Now()
	for i := 1; ; i++ {
		if C.sl_event_query(C.uint64_t(ev)) != C.CUDA_ERROR_NOT_READY {
			return true
		}
		if i%8 == 0 && (time.Since(start) > spinTime || s.rd.Arrived()) {
			return false
		}
	}
}

// settle sends what the GPU has finished: output of kernels, what they wrote to watched memory, then bytes.
func (s *session) settle() {
	s.prints.drain(s)
	s.out.tellWatched()
	s.out.flush()
}

func (s *session) cuStreamSynchronize(h href) C.CUresult {
	ctx, rc := s.streamCtx(h.id)
	if rc != 0 {
		return C.CUresult(rc)
	}
	if s.capturing(uint64(h.real)) {
		return C.call_cuStreamSynchronize(C.uint64_t(h.real)) // fails, and spoils the capture
	}
	ev, rc := s.events.get(ctx)
	if rc != 0 {
		return C.CUresult(rc)
	}
	if rc := C.sl_event_record(C.uint64_t(ev), C.uint64_t(h.real)); rc != 0 {
		s.events.put(ctx, ev)
		return rc
	}
	return C.CUresult(s.answerWhen(ctx, ev, s.tellStream(h.id)))
}

// cuCtxSynchronize waits for everything in the context. It cannot be an event,
// because streams that do not block each other have no common place.
func (s *session) cuCtxSynchronize() C.CUresult {
	if s.cur == 0 || s.cur == noCtx {
		return C.CUDA_ERROR_INVALID_CONTEXT
	}
	op, call, g := s.hdr.Op, s.hdr.Call, s.gates.WaitBegins()
	told := s.tellContext()
	s.pending = true
	s.waiters.do(job{s.curReal, func() {
		rc := orTold(int32(C.sl_ctx_sync()), told)
		g.WaitEnds()
		s.settle()
		s.mem.poolsMayShrink()
		if call != 0 {
			if err := s.reply(op, call, rc, nil); err != nil {
				s.leave("reply", err)
			}
		}
	}})
	return 0
}

// userEvent guards a client's event against being destroyed while a waiter
// waits for it.
type userEvent struct {
	mu   sync.Mutex
	refs int
	dead bool
	real uint64
	asks []uint32 // generations that a waiter tells of

	followed *record // the newest record to be reported to the client; guarded by the follower's mu
}

func (u *userEvent) unref() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.refs--; u.refs == 0 && u.dead {
		C.sl_event_destroy(C.uint64_t(u.real))
	}
}

func (s *session) userEvent(id uint32) (*userEvent, uint64, int32) {
	p := s.tables[wire.KindEvent].live(id)
	if p == nil || p.err != 0 {
		return nil, 0, s.badHandle(wire.KindEvent, id)
	}
	u, _ := p.obj.(*userEvent)
	if u == nil {
		u = &userEvent{real: p.real}
		p.obj = u
	}
	ctx := uint64(0)
	if c := s.tables[wire.KindCtx].live(p.ctx); c != nil {
		ctx = c.real
	}
	return u, ctx, 0
}

func (s *session) cuEventSynchronize(h href) C.CUresult {
	u, ctx, rc := s.userEvent(h.id)
	if rc != 0 {
		return C.CUresult(rc)
	}
	if rc := s.tellEvent(h.id); rc != 0 {
		return C.CUresult(rc)
	}
	g := s.gates.WaitBegins()
	finish := func() int32 {
		rc := int32(C.sl_event_sync(C.uint64_t(u.real)))
		g.WaitEnds()
		s.settle()
		return rc
	}
	if s.spin(u.real) {
		return C.CUresult(finish())
	}
	op, call := s.hdr.Op, s.hdr.Call
	u.mu.Lock()
	u.refs++
	u.mu.Unlock()
	s.pending = true
	s.waiters.do(job{ctx, func() {
		rc := finish()
		u.unref()
		if call != 0 {
			if err := s.reply(op, call, rc, nil); err != nil {
				s.leave("reply", err)
			}
		}
	}})
	return 0
}

func (s *session) cuEventDestroy_v2(h href) C.CUresult {
	s.failures.record(h.id, 0)
	s.ipc.forgetEvent(h.id)
	if p := s.tables[wire.KindEvent].live(h.id); p != nil {
		if u, _ := p.obj.(*userEvent); u != nil {
			u.mu.Lock()
			busy := u.refs > 0
			u.dead = busy
			u.mu.Unlock()
			if busy {
				s.unbind(wire.KindEvent, h.id)
				return 0
			}
		}
	}
	rc := C.sl_event_destroy(C.uint64_t(h.real))
	s.unbind(wire.KindEvent, h.id)
	return rc
}

// eventWatch tells whether an event has completed, and if not, promises an
// EVENT frame for when it has. Where no answer is wanted, that frame comes anyway.
func (s *session) eventWatch(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.EventWatch
	m.Decode(d)
	id, gen := m.Event, m.Recording
	if d.Done() != nil {
		return s.malformed()
	}
	if s.hdr.Call == 0 {
		return s.follow(id, gen, m.Stream)
	}
	u, ctx, rc := s.userEvent(id)
	if rc != 0 {
		return rc
	}
	if rc := s.tellEvent(id); rc != 0 {
		return rc
	}
	rc = int32(C.sl_event_query(C.uint64_t(u.real)))
	if rc != C.CUDA_ERROR_NOT_READY {
		s.settle()
		return rc
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if slices.Contains(u.asks, gen) {
		return rc // that is promised already
	}
	u.asks = append(u.asks, gen)
	u.refs++
	s.waiters.do(job{ctx, func() {
		rc := int32(C.sl_event_sync(C.uint64_t(u.real)))
		u.mu.Lock()
		u.asks = slices.DeleteFunc(u.asks, func(g uint32) bool { return g == gen })
		u.mu.Unlock()
		u.unref()
		s.settle()
		s.happened(id, gen, rc)
	}})
	return rc
}

func (s *session) cuStreamQuery(h href) C.CUresult {
	rc := C.sl_stream_query(C.uint64_t(h.real))
	if rc != C.CUDA_ERROR_NOT_READY {
		s.settle()
	}
	if rc == 0 {
		rc = C.CUresult(s.tellStream(h.id))
	}
	return rc
}

// cuStreamDestroy_v2: the driver lets a stream's work finish by itself, and no
// waiter uses a stream, only events in it.
func (s *session) cuStreamDestroy_v2(h href) C.CUresult {
	s.in.close(s)
	s.gates.Flush()
	if !s.failures.none() {
		p, _ := s.placeOf(h.id)
		s.failures.orphan(p)
	}
	rc := C.sl_stream_destroy(C.uint64_t(h.real))
	s.dropCapture(h.real)
	s.unbind(wire.KindStream, h.id)
	return rc
}
