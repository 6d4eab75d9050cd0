package worker

// Functions that a stream or a graph calls in the client's process.
//
// LAUNCH_HOST puts a callback of ours into the stream, cuGraphAddHostNode one into
// a graph. When the stream gets there the callback tells through a pipe (hostfns.c)
// and blocks the stream; a goroutine sends a HOSTFN frame, the client calls its
// function and answers HOSTFN_DONE, and the callback returns.
//
// That answer comes in the same order of frames as everything else. If the
// executor sits in a driver call that waits for that very stream (freeing
// memory does, and loading a kernel), it would never read it. So while
// functions are out and the executor is busy with one frame, ahead reads on
// and picks the answers out.
//
// A function in a graph is kept until the driver has let go of the graph and of
// all that was made of it: a user object of the driver's tells, and a
// HOSTFN_GONE frame tells the client.

/*
#include "driver.h"
*/
import "C"

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

type hostfns struct {
	s     *session
	r     *os.File
	mu    sync.Mutex
	out   map[uint32]int     // called and not answered, by id
	known map[uint32]*hostfn // in a stream or a graph, by id
	wake  chan struct{}
	calls atomic.Int32 // in out
	// pending is the calls put into streams and not answered; one more for
	// each function in a graph.
	pending atomic.Int32
	// objects has the client's user objects by the ids of their functions,
	// ended those that are gone, which the executor forgets.
	objects map[uint32]uint32
	ended   []uint32
}

// hostfn is a function of the client's that streams call.
type hostfn struct {
	c     *C.struct_sl_hostfn
	n     int  // calls put into streams and not answered
	graph bool // in a graph, which may call it at any time
}

func (h *hostfns) init(s *session) {
	h.s = s
	h.out = make(map[uint32]int)
	h.known = make(map[uint32]*hostfn)
	h.objects = make(map[uint32]uint32)
	h.wake = make(chan struct{}, 1)
}

func (s *session) launchHost(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.LaunchHost
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	id := m.HostFn
	s.give(m.Stream)
	stream, ok := s.handle(wire.KindStream, m.Stream)
	if !ok {
		return s.notCalled(id, s.badHandle(wire.KindStream, m.Stream))
	}
	// As after an error of the context, the function is not called.
	if rc := s.inherited(m.Stream); rc != 0 {
		s.notCalled(id, rc)
		return 0
	}
	h := &s.hostfns
	if rc := h.open(); rc != 0 {
		return s.notCalled(id, rc)
	}
	if s.capturing(stream) {
		return s.captureHost(id, stream)
	}
	h.mu.Lock()
	f := h.known[id]
	if f == nil {
		if f = newHostFn(id); f == nil {
			h.mu.Unlock()
			return s.notCalled(id, C.CUDA_ERROR_OUT_OF_MEMORY)
		}
		h.known[id] = f
	}
	C.sl_hostfn_ref(f.c)
	f.n++
	h.pending.Add(1)
	h.mu.Unlock()
	rc := C.sl_hostfn_launch(C.uint64_t(stream), f.c)
	if rc != 0 {
		h.mu.Lock()
		h.drop(id, f)
		h.mu.Unlock()
		C.sl_hostfn_unref(f.c)
		s.notCalled(id, int32(rc))
	}
	return int32(rc)
}

func newHostFn(id uint32) *hostfn {
	c := C.sl_hostfn_new(C.uint32_t(id))
	if c == nil {
		return nil
	}
	return &hostfn{c: c}
}

// open makes the pipe that tells of functions, and listens to it.
func (h *hostfns) open() int32 {
	if h.r != nil {
		return 0
	}
	fd := C.sl_hostfn_open()
	if fd < 0 {
		return C.CUDA_ERROR_OPERATING_SYSTEM
	}
	h.r = os.NewFile(uintptr(fd), "host functions")
	go h.listen()
	go h.ahead()
	return 0
}

// inGraph makes a function that graphs call. The client is told when it is not called any
// more: at once, if the result is an error.
func (s *session) inGraph(id uint32) (*hostfn, int32) {
	h := &s.hostfns
	if rc := h.open(); rc != 0 {
		return nil, s.notCalled(id, rc)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.known[id] != nil {
		return nil, C.CUDA_ERROR_INVALID_VALUE
	}
	f := newHostFn(id)
	if f == nil {
		return nil, s.notCalled(id, C.CUDA_ERROR_OUT_OF_MEMORY)
	}
	f.graph = true
	C.sl_hostfn_ref(f.c)
	h.known[id] = f
	h.pending.Add(1)
	return f, 0
}

// notInGraph undoes inGraph, where nothing of the driver's has the function.
func (s *session) notInGraph(id uint32, f *hostfn) {
	h := &s.hostfns
	h.mu.Lock()
	delete(h.known, id)
	h.mu.Unlock()
	h.pending.Add(-1)
	C.sl_hostfn_unref(f.c)
}

// keep has a graph hold a function: it ends with the graph and with what is made of that. A
// driver without user objects keeps it for as long as the session lasts.
func (f *hostfn) keep(graph uint64) { C.sl_hostfn_keep(C.uint64_t(graph), f.c) }

// captureHost puts a function into the graph that a stream captures.
func (s *session) captureHost(id uint32, stream uint64) int32 {
	f, rc := s.inGraph(id)
	if rc != 0 {
		return rc
	}
	g := captured(stream)
	if rc := C.sl_hostfn_launch(C.uint64_t(stream), f.c); rc != 0 {
		s.notInGraph(id, f)
		return s.notCalled(id, int32(rc))
	}
	if g != 0 {
		f.keep(g)
	}
	return 0
}

// notCalled tells the client that a function will not be called because of an error, which it returns.
func (s *session) notCalled(id uint32, rc int32) int32 {
	if err := s.wr.Send(&wire.Reply{Kind: wire.FrameHostFn, Arg: id, Result: rc}, nil, nil); err != nil {
		s.leave("host function", err)
	}
	return rc
}

// drop notes that one call of f is over.
func (h *hostfns) drop(id uint32, f *hostfn) {
	if f.graph {
		// Its reference count never falls to zero: a graph's calls are not
		// counted, so each of them takes a reference here that the callback
		// gives back.
		C.sl_hostfn_ref(f.c)
		return
	}
	h.pending.Add(-1)
	if f.n--; f.n == 0 {
		delete(h.known, id)
	}
}

// listen sends a HOSTFN frame for every callback that a stream has reached, and a HOSTFN_GONE
// frame for every function that no graph has any more.
func (h *hostfns) listen() {
	var told C.struct_sl_hostfn_told
	for {
		if _, err := io.ReadFull(h.r, unsafe.Slice((*byte)(unsafe.Pointer(&told)), unsafe.Sizeof(told))); err != nil {
			return
		}
		id := uint32(told.id)
		if told.what == C.SL_HOSTFN_GONE {
			h.gone(id)
			continue
		}
		h.mu.Lock()
		h.out[id]++
		h.mu.Unlock()
		h.calls.Add(1)
		select {
		case h.wake <- struct{}{}:
		default:
		}
		// The function may look at bytes that were copied before it.
		h.s.settle()
		if r := h.s.tracing.now.Load(); r != nil {
			r.HostFnBegins(id)
		}
		if err := h.s.wr.Send(&wire.Reply{Kind: wire.FrameHostFn, Arg: id}, nil, nil); err != nil {
			h.s.leave("host function", err)
		}
	}
}

// gone forgets a function of graphs, or of a user object.
func (h *hostfns) gone(id uint32) {
	h.mu.Lock()
	f := h.known[id]
	delete(h.known, id)
	if object, ok := h.objects[id]; ok {
		delete(h.objects, id)
		h.ended = append(h.ended, object)
	}
	h.mu.Unlock()
	if f == nil {
		return
	}
	h.pending.Add(-1)
	C.sl_hostfn_unref(f.c)
	if err := h.s.wr.Send(&wire.Reply{Kind: wire.FrameHostFnGone, Arg: id}, nil, nil); err != nil {
		h.s.leave("host function", err)
	}
}

// done lets the stream go on; false when no such function is out.
func (h *hostfns) done(id uint32) bool {
	h.mu.Lock()
	f := h.known[id]
	if h.out[id] == 0 || f == nil {
		h.mu.Unlock()
		return false
	}
	if h.out[id]--; h.out[id] == 0 {
		delete(h.out, id)
	}
	h.drop(id, f)
	h.mu.Unlock()
	h.calls.Add(-1)
	if r := h.s.tracing.now.Load(); r != nil {
		r.HostFnEnds(id)
	}
	C.sl_hostfn_done(f.c)
	return true
}

func (s *session) hostFnDone(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.HostFnDone
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	if !s.hostfns.done(m.HostFn) {
		s.violation("host function was not called")
	}
	return 0
}

// ahead reads answers past an executor that is stuck in one frame.
func (h *hostfns) ahead() {
	s := h.s
	for {
		<-h.wake
		for h.calls.Load() > 0 {
			n := s.begun.Load()
			time.Sleep(2 * time.Millisecond)
			if !s.inOp.Load() || s.begun.Load() != n {
				continue
			}
			err := s.rd.ReadAhead(0, func(r *wire.Request, p []byte) bool {
				if s.hostAhead(r, p) {
					return true
				}
				var m wire.HostFnDone
				d := wire.NewDecoder(p)
				m.Decode(d)
				if r.Op != wire.OpHostFnDone || d.Done() != nil {
					return false
				}
				return h.done(m.HostFn)
			})
			if errors.Is(err, wire.ErrAheadFull) {
				time.Sleep(10 * time.Millisecond)
			} else if err != nil {
				return // the executor will meet it too
			}
		}
	}
}
