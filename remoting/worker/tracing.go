package worker

// The trace of a session (package trace): who asks for it, and what the session tells it.
//
//	TRACE                 the session's own client: the trace goes out in TRACE frames, between the others
//	link (package exchange)   another user of the lease: the connection comes from the daemon, and the trace goes out over it
//
// At most one trace runs at a time. Code whose work appears in traces looks at tracing.now first: without a trace that is one load, and
// the only cost for a launch.

/*
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/gate"
	"github.com/sluice-hpc/sluice/remoting/worker/trace"
)

// tracing is the session's trace, if there is one.
type tracing struct {
	now     atomic.Pointer[trace.Recorder] // nil: there is none
	asking  atomic.Int32                   // connections whose request has not been read
	devices sync.Map                       // by context
	refused turnedAway

	mu   sync.Mutex
	last *trace.Recorder // the latest, which may not have been written whole
	own  *trace.Recorder // that of the session's own client
}

var errTraced = errors.New("this session is being traced already; try again when that trace has ended")

// traceTail is how long what a trace has at its end may take to be written.
const traceTail = 15 * time.Second

// maxAsking bounds the connections over which a trace has not been asked for yet.
const maxAsking = 4

// traceDriver is the process's driver as a trace uses it.
type traceDriver struct{ gateDriver }

func (traceDriver) DestroyEvent(event uint64) { C.sl_event_destroy(C.uint64_t(event)) }

func (traceDriver) NewStream() uint64 {
	var st C.uint64_t
	if C.sl_stream_create(&st, C.CU_STREAM_NON_BLOCKING) != 0 {
		return 0
	}
	return uint64(st)
}

func (traceDriver) DestroyStream(stream uint64) { C.sl_stream_destroy(C.uint64_t(stream)) }

// startTrace begins a trace; ended is called once all of it has been written.
func (s *session) startTrace(own bool, write func(p []byte, last bool) error) (*trace.Recorder, error) {
	t := &s.tracing
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last != nil {
		select {
		case <-t.last.Done():
		default:
			return nil, errTraced
		}
	}
	head := wire.TraceHead{PID: uint32(s.client.PID), Session: uint32(s.number), Program: s.client.Name}
	r := trace.Start(trace.Config{Driver: traceDriver{}, Head: head, Write: write})
	t.last, t.own = r, nil
	if own {
		t.own = r
	}
	t.now.Store(r)
	return r, nil
}

// stopTrace ends a trace if it is the one that runs. Its records are still written.
func (t *tracing) stopTrace(r *trace.Recorder) {
	t.now.CompareAndSwap(r, nil)
	r.Stop()
}

// leave has the trace let go of a context that is about to be destroyed, also one that has been stopped and still
// looks at the GPU for what was under way then.
func (t *tracing) leave(ctx uint64) {
	t.mu.Lock()
	r := t.last
	t.mu.Unlock()
	if r != nil {
		r.Forget(ctx)
	}
}

// traceFrame begins or ends the trace of the session's own client.
func (s *session) traceFrame(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.Trace
	m.Decode(&s.dec)
	if s.dec.Done() != nil || m.On > 1 {
		return s.malformed()
	}
	send := func(p []byte, last bool) error {
		h := wire.Reply{Kind: wire.FrameTrace, Op: wire.OpTrace}
		if last {
			h.Arg = wire.TraceLast
		}
		return s.wr.Send(&h, p, nil)
	}
	t := &s.tracing
	var err error
	if m.On == 1 {
		_, err = s.startTrace(true, send)
	} else {
		t.mu.Lock()
		own := t.own
		t.own = nil
		t.mu.Unlock()
		if own != nil {
			t.stopTrace(own)
			return 0
		}
		err = errors.New("it does not trace itself")
	}
	if err != nil {
		s.log.Info("no trace", "reason", err)
		if err := send(nil, true); err != nil {
			s.leave("trace", err)
		}
	}
	return 0
}

// traceTo answers a client that asks for a trace over a connection of its own, which traceTo closes. It must not wait.
func (s *session) traceTo(fd int) {
	if s.tracing.asking.Add(1) > maxAsking {
		s.tracing.asking.Add(-1)
		s.tracing.refused.refuse(fd, true, wire.StatusBusy, errCrowded)
		return
	}
	go func() {
		defer unix.Close(fd)
		d, err := readTraceRequest(fd)
		s.tracing.asking.Add(-1)
		if err == nil {
			err = s.traceFor(fd, d)
		}
		if err != nil {
			s.log.Info("no trace", "reason", err)
		}
	}()
}

// readTraceRequest reads for how long a trace is asked. If it returns an error, it has sent the refusal to a client that said HELLO.
func readTraceRequest(fd int) (time.Duration, error) {
	if err := unix.SetNonblock(fd, false); err != nil {
		return 0, fmt.Errorf("trace: %w", err)
	}
	var b [wire.HelloSize]byte
	if err := readWithin(fd, b[:], helloTime); err != nil {
		return 0, err
	}
	var h wire.Hello
	if err := h.Decode(&b); err != nil {
		return 0, err
	}
	status, err := judge(&h)
	if err == nil && h.Kind != wire.SessionTrace {
		status, err = wire.StatusVersion, fmt.Errorf("a client says hello as kind %d where a trace is asked for", h.Kind)
	}
	var q [wire.TraceRequestSize]byte
	var m wire.TraceRequest
	if err == nil {
		if err := readWithin(fd, q[:], helloTime); err != nil {
			return 0, err
		}
		if m.Decode(wire.NewDecoder(q[:])); m.MS == 0 || m.MS > wire.MaxTraceMS {
			status, err = wire.StatusLease, fmt.Errorf("a trace of %d ms is asked for: want 1 to %d", m.MS, wire.MaxTraceMS)
		}
	}
	if err != nil {
		refuseSocket(fd, status, err)
	}
	return time.Duration(m.MS) * time.Millisecond, err
}

// traceFor writes a trace to a socket until the time is over or the reader hangs up.
func (s *session) traceFor(fd int, d time.Duration) error {
	// A reader that takes nothing for as long as a client may is gone.
	tv := unix.NsecToTimeval(s.keepalive.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	welcome := make(chan struct{})
	r, err := s.startTrace(false, func(p []byte, _ bool) error {
		<-welcome
		for len(p) > 0 {
			n, err := unix.SendmsgN(fd, p, nil, nil, unix.MSG_NOSIGNAL)
			if err != nil && !errors.Is(err, unix.EINTR) {
				return err
			}
			p = p[max(n, 0):]
		}
		return nil
	})
	if err != nil {
		refuseSocket(fd, wire.StatusBusy, err)
		return err
	}
	s.log.Info("session traced", "for", d)
	err = writeAll(fd, wire.AppendWelcome(nil, wire.StatusOK, nil))
	close(welcome)
	for end := time.Now().Add(d); err == nil; {
		left := time.Until(end)
		if left <= 0 {
			break
		}
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, perr := unix.Poll(p, int(min(left, 100*time.Millisecond)/time.Millisecond)+1)
		if n > 0 || perr != nil && !errors.Is(perr, unix.EINTR) {
			break // the reader has enough
		}
		select {
		case <-r.Done(): // it cannot be written
			err = errors.New("the trace's reader takes nothing")
		default:
		}
	}
	s.tracing.stopTrace(r)
	select {
	case <-r.Done():
	case <-time.After(traceTail + s.keepalive): // a reader that takes a byte now and then does not keep the session's trace
		_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		<-r.Done()
	}
	return err
}

// traced is where a record of work in a stream goes: nil without a trace. The stream's context becomes current.
func (s *session) traced(stream uint32) *trace.Recorder {
	r := s.tracing.now.Load()
	if r == nil {
		return nil
	}
	if _, rc := s.streamCtx(stream); rc != 0 {
		return nil
	}
	return r
}

// traceLaunch launches a kernel for a trace.
func (s *session) traceLaunch(m *wire.Launch, k *kernel, fn, stream uint64, p []byte) int32 {
	r := s.traced(m.Stream)
	if r == nil {
		return int32(C.sl_launch(C.uint64_t(fn), C.uint64_t(stream), (*C.uint8_t)(at(p))))
	}
	sp := r.Begin(s.curReal, stream, len(s.captures) == 0)
	rc := int32(C.sl_launch(C.uint64_t(fn), C.uint64_t(stream), (*C.uint8_t)(at(p))))
	if rc != 0 {
		r.Cancel(sp)
		return rc
	}
	r.End(sp, wire.TraceRecord{Kind: wire.SpanKernel, Device: s.tracing.deviceOf(s.curReal), Stream: m.Stream, Amount: uint64(m.Shared), Grid: m.Grid, Block: m.Block}, k.name)
	return 0
}

// A work is work in a stream that a trace has a record of; nil without a trace.
type work struct {
	r  *trace.Recorder
	sp trace.Span
	m  wire.TraceRecord
}

// workBegins comes right before an operation of the API table that works on the GPU. size is what its payload says of that.
func (s *session) workBegins(op uint16, stream href, size uint64) *work {
	r := s.traced(stream.id)
	if r == nil {
		return nil
	}
	w := &work{r, r.Begin(s.curReal, stream.real, len(s.captures) == 0), wire.TraceRecord{Kind: wire.SpanCopy, Device: s.tracing.deviceOf(s.curReal), Stream: stream.id, Amount: size}}
	switch op {
	case opCuGraphLaunch:
		w.m.Kind, w.m.Amount = wire.SpanGraph, 0
	case opCuMemsetD8Async, opCuMemsetD2D8Async:
		w.m.Kind = wire.SpanFill
	case opCuMemsetD16Async, opCuMemsetD2D16Async:
		w.m.Kind, w.m.Amount = wire.SpanFill, 2*size
	case opCuMemsetD32Async, opCuMemsetD2D32Async:
		w.m.Kind, w.m.Amount = wire.SpanFill, 4*size
	}
	return w
}

// copyBegins comes right before a copy between host and device; its stream's context is ctx, and current. Any thread may call it.
func (s *session) copyBegins(kind uint16, stream uint32, ctx, real uint64) *work {
	r := s.tracing.now.Load()
	if r == nil {
		return nil
	}
	return &work{r, r.Begin(ctx, real, true), wire.TraceRecord{Kind: kind, Device: s.tracing.deviceOf(ctx), Stream: stream}}
}

// deviceOf is the device of a context.
func (t *tracing) deviceOf(ctx uint64) uint32 {
	dev, _ := t.devices.Load(ctx)
	n, _ := dev.(int)
	return uint32(n)
}

// ends comes right after the work was given to the driver, whose result is rc. bytes is of copies.
func (w *work) ends(rc int32) {
	switch {
	case w == nil:
	case rc != 0:
		w.r.Cancel(w.sp)
	default:
		w.r.End(w.sp, w.m, "")
	}
}

// copied is ends of a copy of so many bytes.
func (w *work) copied(bytes uint64, rc int32) {
	if w != nil {
		w.m.Amount = bytes
		w.ends(rc)
	}
}

// traceTurn is for the session's gates.
func (s *session) traceTurn(device int, p gate.Phase, begins bool) {
	if r := s.tracing.now.Load(); r != nil {
		r.Turn(device, p, begins)
	}
}

// traceCut notes that the connection to the client was lost, or is there again.
func (s *session) traceCut(begins bool) {
	if r := s.tracing.now.Load(); r != nil {
		r.Cut(begins)
	}
}

// waitBegins comes before a call that the client waits for.
func (s *session) waitBegins() {
	if r := s.tracing.now.Load(); r != nil {
		r.CallBegins(s.hdr.Call, opName(s.hdr.Op))
	}
}
