package worker

// How a client's calls run.
//
// The executor (run) is one goroutine on its own thread. It reads frames in
// order and executes each before it reads the next; it alone touches the handle
// tables and the memory maps. Calls that have to wait for the GPU record what
// they wait for, in order, and are finished by a waiter (wait.go). Bytes from
// the device are sent by whoever finds them ready (copyout.go). Everybody sends
// through wr, which keeps frames whole.
//
// The session ends by leaving the process: the driver and the kernel then free
// what it held, whatever state it was in.

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -Wno-unused-function -Wno-unused-parameter
#cgo LDFLAGS: -ldl -lpthread
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/gate"
	"github.com/sluice-hpc/sluice/remoting/worker/nap"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// ledger is the lease's memory account as a session sees it; sizes in bytes.
type ledger interface {
	Reserve(dev int, bytes uint64) bool
	Release(dev int, bytes uint64)
	Overhead(dev int, bytes uint64, force bool) bool
	Info(dev int) account.Info
	Processes(dev int) []account.Process
	Lend(dev int, more int64)
	Borrow(more int)
	Life(slot int) uint64
	Inherit(dev, from int, life, bytes uint64) bool
}

type session struct {
	log       *slog.Logger
	keepalive time.Duration
	kind      uint32         // of the session
	number    int            // in the lease
	turns     []control.Turn // by device
	snap      wire.Snapshot
	overhead  []uint64 // what the driver takes for a context, per device
	ledger    ledger
	store     *store.Store
	nvml      *nvml
	client    account.Client
	counts    *account.Counts
	network   *account.Link
	reason    func(string) // notes why the session ends

	stream wire.Stream
	shm    bool // the frames go through memory that the client shares
	rd     *wire.Reader
	wr     *wire.Writer

	tracing tracing // shared; here, because each launch looks at it

	// The executor's own.
	hdr        wire.Request
	cur        uint32 // id of the context current on the executor's thread
	curReal    uint64
	curSlot    *slot                   // nil when none is current
	ctxs       map[uint64]*cudaContext // by driver handle
	tables     [wire.NumKinds]table
	npages     int
	pending    bool   // a waiter will answer this call
	given      uint32 // id of the stream that the current one-way operation is given to, or noStream
	edited     uint64 // the executable graph that it changes, or 0
	dec        wire.Decoder
	enc        wire.Encoder
	ended      string // why the session must end
	begun      atomic.Uint64
	inOp       atomic.Bool
	mem        memory
	images     images
	in         inStaging
	compressed compressed
	contents   contents
	arrived    arrivals
	host       hostMaps
	ipc        ipc
	refused    map[string]bool
	kept       int                    // bytes, see keep
	linking    int                    // bytes, see takeLinking
	parts      map[ref][]ref          // by what they are part of
	devres     []C.CUdevResource      // by the number that the client knows them by, less 1; greens.go
	captures   map[uint64]capture     // by the stream that the client captures
	objects    map[uint64]*userObject // by driver handle
	gates      gate.Set               // it says which of its methods are the executor's

	// Shared; each part says how.
	failures failures
	out      outStaging
	bulk     bulk
	waiters  waiters
	followed follower
	events   eventPools
	prints   prints
	hostfns  hostfns

	leaving sync.Once
	exit    func(code int)
}

func newSession(log *slog.Logger, stream wire.Stream, l ledger, st *store.Store) (*session, error) {
	rd, err := wire.NewReader(stream)
	if err != nil {
		return nil, err
	}
	s := &session{
		log: log, ledger: l, store: st, stream: stream, rd: rd, wr: wire.NewWriter(stream),
		cur: noCtx, ctxs: make(map[uint64]*cudaContext), parts: make(map[ref][]ref), captures: make(map[uint64]capture), objects: make(map[uint64]*userObject), refused: make(map[string]bool), exit: unix.Exit,
		counts: new(account.Counts), network: new(account.Link), compressed: compressed{counts: new(account.Compress)}, reason: func(string) {},
	}
	s.gates.Config = s.gateConfig()
	rd.BeforeRead(s.gates.StepOut)
	s.mem.init(s)
	s.images.init()
	s.ipc.init(s)
	s.out.init(s)
	s.bulk.init(s)
	s.waiters.init(s)
	s.followed.init(s)
	s.events.init()
	s.hostfns.init(s)
	return s, nil
}

// run executes the client's frames until the session ends; the error says why.
func (s *session) run() error {
	runtime.LockOSThread()
	// All of the client's threads run on this one, so what CUDA forbids a
	// thread while it captures would be forbidden to the others too.
	relaxCapture()
	if s.gates.Kept() {
		nap.Sharpen()
	}
	for {
		s.inOp.Store(false)
		if err := s.rd.Next(&s.hdr); err != nil {
			s.gates.StepOut()
			return s.farewell(err)
		}
		s.begun.Add(1)
		// In place, where whoever has mapped the account reads them.
		s.counts.Calls++
		s.counts.BytesIn += wire.RequestSize + uint64(s.hdr.Size)
		if s.hdr.Op == wire.OpLaunch {
			s.counts.Launches++
		} else {
			s.gates.StepOut()
			if s.hdr.Call != 0 {
				s.waitBegins()
			}
		}
		s.inOp.Store(true)
		s.pending = false
		s.given, s.edited = noStream, 0
		s.enc.Reset()
		rc, err := s.frame()
		if err != nil || s.ended != "" || rc != 0 || s.hdr.Call != 0 {
			s.gates.StepOut() // the client may not be reading
		}
		if err != nil {
			return s.farewell(err)
		}
		if s.ended != "" {
			return s.farewell(errors.New(s.ended))
		}
		// The client sends the image then, or all content.
		if rc != 0 && rc != wire.ResultNotInStore && s.hdr.Op != wire.OpContentFind {
			s.counts.AddError()
		}
		if s.hdr.Call != 0 {
			s.counts.Waits++
			atomic.StoreUint64(&s.counts.BytesOut, s.wr.Sent()+s.bulk.sent.Load())
			if !s.pending {
				if err := s.reply(s.hdr.Op, s.hdr.Call, rc, s.enc.Buf()); err != nil {
					return err
				}
			}
		} else if rc != 0 {
			s.recordNoted() // a copy that fails is not among those that are taken as arrived
			s.failed(s.hdr.Op, rc)
		}
	}
}

// frame executes one frame. The reader is locked when it is called and
// unlocked before anything that may take long.
func (s *session) frame() (int32, error) {
	h := &s.hdr
	if !wire.SessionMay(s.kind, h.Op) {
		s.rd.Done()
		s.violation(fmt.Sprintf("not allowed in a session of kind %s", wire.SessionName(s.kind)))
		return 0, nil
	}
	switch h.Op {
	case wire.OpCopyIn, wire.OpCopyInCompressed, wire.OpCopyIn3D, wire.OpHostWrite, wire.OpHostMerge:
		s.beforeOp(h.Op)
		return s.bulkFrame()
	}
	p, err := s.rd.Payload()
	s.rd.Done()
	if err != nil {
		return 0, err
	}
	s.beforeOp(h.Op)
	switch h.Op {
	case wire.OpBeat:
		return 0, nil
	case wire.OpImageChunk:
		return s.imageChunk(p), nil
	case wire.OpHostFnDone:
		return s.hostFnDone(p), nil
	case wire.OpTrace:
		return s.traceFrame(p), nil
	case wire.OpBulkOpen, wire.OpCopyInBulk, wire.OpBulkDrop, wire.OpContentFind, wire.OpContentKeep, wire.OpCopyInStored:
		return s.bulkOp(p), nil
	case wire.OpKernelBind:
		return s.kernelBind(p), nil
	case wire.OpObserve, wire.OpObserveMore, wire.OpObserveLinks, wire.OpObserveText, wire.OpObserveFacts:
		return s.observeFrame(p), nil
	case wire.OpCtxActivate:
		return s.ctxActivate(p), nil
	case wire.OpHostShare: // its descriptor is to be taken, whatever becomes of the context
		return s.hostShare(p), nil
	case wire.OpEventWatch:
		if h.Call == 0 { // whatever becomes of the context, somebody may be waiting for it
			return s.eventWatch(p), nil
		}
	}
	if rc := s.wantCtx(h.Ctx); rc != 0 {
		return rc, nil
	}
	switch h.Op {
	case wire.OpLaunch:
		return s.launch(p), nil
	case wire.OpHostRead, wire.OpHostMap, wire.OpHostUnmap, wire.OpHostWatch, wire.OpCopyInShared, wire.OpCopyOutShared:
		return s.hostFrame(p), nil
	case wire.OpThreadStream:
		return s.threadStream(p), nil
	case wire.OpImageLoad:
		return s.imageLoad(p), nil
	case wire.OpLinkCreate, wire.OpLinkAdd, wire.OpLinkComplete, wire.OpLinkRead:
		return s.linkFrame(p), nil
	case wire.OpKernelInfo:
		return s.kernelInfo(p), nil
	case wire.OpCopyOut, wire.OpCopyOut3D, wire.OpArrived:
		return s.copyFrame(p), nil
	case wire.OpEventWatch:
		return s.eventWatch(p), nil
	case wire.OpLaunchHost:
		s.mayWait(h.Op)
		return s.launchHost(p), nil
	}
	s.dec.Reset(p)
	s.mayWait(h.Op)
	rc, known := s.dispatch(h.Op, &s.dec, &s.enc)
	s.gates.CallDone()
	if !known {
		s.violation("unknown operation")
		return 0, nil
	}
	return rc, nil
}

// observeFrame executes a frame that asks NVML.
func (s *session) observeFrame(p []byte) int32 {
	switch s.hdr.Op {
	case wire.OpObserve:
		return s.observe(p)
	case wire.OpObserveMore:
		return s.readings(p)
	case wire.OpObserveLinks:
		return s.links(p)
	case wire.OpObserveText:
		return s.text(p)
	default:
		return s.facts(p)
	}
}

// hostFrame executes a frame about host memory of the client's that is known here.
func (s *session) hostFrame(p []byte) int32 {
	switch s.hdr.Op {
	case wire.OpHostRead:
		return s.hostReadFrame(p)
	case wire.OpHostMap:
		return s.hostMap(p)
	case wire.OpHostUnmap:
		return s.hostUnmap(p)
	case wire.OpHostWatch:
		return s.hostWatch(p)
	case wire.OpCopyInShared:
		return s.copyInShared(p)
	default:
		return s.copyOutShared(p)
	}
}

// copyFrame executes a frame about copies that has no bytes of them.
func (s *session) copyFrame(p []byte) int32 {
	switch s.hdr.Op {
	case wire.OpCopyOut:
		return s.copyOut(p)
	case wire.OpCopyOut3D:
		return s.copyOut3D(p)
	default:
		return s.arrivedFrame(p)
	}
}

// bulkFrame executes a frame whose bytes are read to where they belong.
func (s *session) bulkFrame() (int32, error) {
	switch s.hdr.Op {
	case wire.OpCopyIn:
		return s.copyInFrame()
	case wire.OpCopyInCompressed:
		return s.copyInCompressedFrame()
	case wire.OpCopyIn3D:
		return s.copyIn3DFrame()
	case wire.OpHostWrite:
		return s.hostWriteFrame()
	default:
		return s.hostMergeFrame()
	}
}

// wantCtx makes sure that the client's context is current on the executor's thread.
func (s *session) wantCtx(id uint32) int32 {
	if id == s.cur && id != noCtx {
		return 0
	}
	return s.setCtx(id)
}

// setCtx makes a context of the client's current on the executor's thread, 0: none.
func (s *session) setCtx(id uint32) int32 {
	s.gates.StepOut()
	var real uint64
	var p *slot
	if id != 0 {
		p = s.tables[wire.KindCtx].live(id)
		if p == nil || p.err != 0 {
			return s.badHandle(wire.KindCtx, id)
		}
		real = p.real
	}
	if rc := C.sl_ctx_set(C.uint64_t(real)); rc != 0 {
		s.forgetCtx()
		return int32(rc)
	}
	s.cur, s.curReal, s.curSlot = id, real, p
	s.useGate()
	return 0
}

// forgetCtx makes the next call set its context again, because the driver has
// changed the thread's.
func (s *session) forgetCtx() {
	s.cur, s.curReal, s.curSlot = noCtx, 0, nil
	s.gates.Use(-1, 0)
}

// reply answers a waiting call.
func (s *session) reply(op uint16, call uint32, rc int32, payload []byte) error {
	if r := s.tracing.now.Load(); r != nil {
		r.CallEnds(call)
	}
	s.out.tellWatched()
	s.prints.beforeError(s, rc)
	return s.wr.Send(&wire.Reply{
		Kind: wire.FrameReply, Op: op, Call: call, Result: rc,
	}, payload, nil)
}

// fail tells the client of a one-way call that failed, so that it answers no wait by itself.
func (s *session) fail(op uint16, rc int32) {
	s.log.Debug("one-way call failed", "op", opName(op), "result", rc)
	s.prints.beforeError(s, rc)
	if err := s.wr.Send(&wire.Reply{Kind: wire.FrameError, Op: op, Result: rc}, nil, nil); err != nil {
		s.leave("error", err)
	}
}

// violation ends the session after this frame: the client does not keep to the
// protocol.
func (s *session) violation(why string) {
	if s.ended == "" {
		s.ended = fmt.Sprintf("%s: %s", opName(s.hdr.Op), why)
	}
}

// malformed is a violation: the payload does not have the operation's form.
func (s *session) malformed() int32 {
	s.violation(fmt.Sprintf("malformed payload of %d bytes", s.hdr.Size))
	return C.CUDA_ERROR_INVALID_VALUE
}

// farewell tells the client, if it can still hear, why its session ends.
func (s *session) farewell(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		s.reason("client closed")
		return nil
	}
	s.reason(err.Error())
	s.log.Error("session ended", "reason", err)
	_ = s.wr.Send(&wire.Reply{Kind: wire.FrameBye}, []byte(err.Error()), nil)
	return err
}

func opName(op uint16) string {
	if int(op) < len(opNames) {
		return opNames[op]
	}
	return wire.ControlName(op)
}

// beat sends a keep-alive frame four times per keep-alive time, so that a
// client can tell a busy worker from a dead one.
func (s *session) beat() {
	s.noteLink()
	t := time.NewTicker(max(s.keepalive/4, 10*time.Millisecond))
	defer t.Stop()
	for range t.C {
		s.noteLink()
		atomic.StoreUint64(&s.counts.BytesOut, s.wr.Sent()+s.bulk.sent.Load())
		if err := s.wr.Send(&wire.Reply{Kind: wire.FrameBeat}, nil, nil); err != nil {
			s.leave("client does not answer", err)
		}
	}
}

// noteLink puts the connection's shortest round trip of the last minutes into the account, as the kernel measures it. A Unix socket has none.
func (s *session) noteLink() {
	if l, err := wire.LinkOf(s.stream.FD()); err == nil && l.MinRoundTrip > 0 {
		s.network.Note(l.MinRoundTrip, l.Resent)
	}
}

// watch leaves the process when one of the descriptors hangs up: the client's
// socket, or the supervisor's.
func (s *session) watch(fds ...int) {
	var p []unix.PollFd
	for _, fd := range fds {
		p = append(p, unix.PollFd{Fd: int32(fd), Events: unix.POLLRDHUP})
	}
	for {
		n, err := unix.Poll(p, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			s.leave("poll", err)
		}
		if n > 0 {
			s.leave("peer is gone", nil)
		}
	}
}

// leave ends the process at once, from any goroutine.
func (s *session) leave(why string, err error) {
	s.leaving.Do(func() {
		if err != nil {
			s.reason(why + ": " + err.Error())
		} else {
			s.reason(why)
		}
		s.log.Debug("session leaves", "why", why, "error", err)
		s.ipc.withdrawAll()
		s.gates.Quit()
		s.settleStores()
		s.exit(0)
	})
}

// ctxActivate retains a device's primary context.
func (s *session) ctxActivate(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.CtxActivate
	m.Decode(&s.dec)
	dev := int(m.Device)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	if dev < 0 || dev >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	id := uint32(1 + dev)
	if s.tables[wire.KindCtx].live(id) != nil {
		return 0
	}
	c, rc := s.newContext(dev, nil)
	if rc != 0 {
		return rc
	}
	s.bind(wire.KindCtx, id, c.real, 0)
	s.forgetCtx()
	if rc := s.setCtx(id); rc != 0 {
		return rc
	}
	if rc := s.in.ensure(s); rc != 0 {
		return rc
	}
	s.mem.measureSoon()
	return 0
}

// context gives the current context's facts, or nil.
func (s *session) context() *cudaContext {
	if s.curSlot == nil {
		return nil
	}
	return s.ctxs[s.curReal]
}

// threadStream makes the stream that a client thread uses as its default
// stream; like CUDA's it synchronises with the legacy default stream.
func (s *session) threadStream(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.ThreadStream
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	var real C.uint64_t
	rc := C.sl_stream_create(&real, C.CU_STREAM_DEFAULT)
	s.bind(wire.KindStream, m.Stream, uint64(real), rc)
	return int32(rc)
}

// at is the address of a byte for C.
func at(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }
