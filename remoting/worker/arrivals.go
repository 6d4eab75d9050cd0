package worker

// Copies that the program takes as arrived before they are.
//
// A client answers a wait for a stream itself where the stream holds nothing but copies to the device whose bytes have left
// the program's memory. Then only work that is given to other streams afterwards, or a call that takes memory away, could
// tell that they have not arrived. In place of the wait comes an ARRIVED frame, and an event is recorded in the stream:
//
//   - an operation that is given to another stream makes that stream wait for the event first;
//   - an operation whose streams or memory are not known here waits for the event itself before it begins;
//   - if a copy has failed, all that is given to any stream fails, until a wait has told the program.
//
// A blocking copy in the default stream of a program without non-blocking streams is not waited for either, and may stand behind
// other work. Only non-blocking streams and contexts that are made later are not ordered behind it; the first of them waits for its event.
//
// The event is recorded when the first operation comes that is no small copy to the same stream: one is enough for many copies in a row.
//
// All of it is the executor's own.

/*
#include "driver.h"
*/
import "C"

import (
	"slices"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// maxArrivals bounds the streams that arrivals are known of at a time.
const maxArrivals = 16

// An arrival is a point in a stream up to which the program takes copies as arrived.
type arrival struct {
	at       place
	blocking bool    // the stream is ordered with its context's legacy default stream
	ev       uint64  // recorded there
	later    bool    // for what is made later only
	behind   []place // that wait for ev already
}

type arrivals struct {
	list []arrival
	now  int // of list, those that concern the next operation
	// noted is the stream of copies behind which no event is recorded yet.
	noted      bool
	notedID    uint32
	notedHdr   uint32 // the context of the frame
	notedReal  uint64
	notedCtx   uint64
	notedLater bool // for what is made later only
}

// arrivedOps are the operations that need not wait for what has arrived, beside those that say which stream they are
// given to: waits, which the driver answers for their own streams, and what touches no memory of the device.
var arrivedOps = map[uint16]bool{
	wire.OpArrived: true, wire.OpBeat: true, wire.OpHostFnDone: true, wire.OpImageChunk: true, wire.OpKernelBind: true,
	wire.OpKernelInfo: true, wire.OpEventWatch: true, wire.OpObserve: true, wire.OpObserveMore: true, wire.OpObserveLinks: true,
	wire.OpObserveText: true, wire.OpObserveFacts: true,
	wire.OpLaunch: true, wire.OpLaunchHost: true, wire.OpCopyIn: true, wire.OpCopyInCompressed: true, wire.OpCopyIn3D: true, wire.OpCopyOut: true, wire.OpCopyOut3D: true,
	wire.OpCopyInShared: true, wire.OpCopyOutShared: true, wire.OpCopyInBulk: true, wire.OpBulkOpen: true, wire.OpBulkDrop: true,
	wire.OpCopyInStored: true, wire.OpContentFind: true, wire.OpContentKeep: true,
	opCuStreamSynchronize: true, opCuStreamQuery: true, opCuEventSynchronize: true, opCuCtxSynchronize: true,
	opCuEventCreate: true,
}

// give notes the stream that the current operation is given to, and makes it wait for what has arrived in others.
func (s *session) give(id uint32) {
	s.given = id
	if a := &s.arrived; a.noted && !a.notedLater && (id != a.notedID || s.hdr.Ctx != a.notedHdr) {
		s.recordNoted()
	}
	if s.arrived.now > 0 {
		s.orderBehindArrived(id)
	}
}

// beforeOp comes before each operation.
func (s *session) beforeOp(op uint16) {
	if s.arrived.noted || s.arrived.now > 0 {
		s.beforeOpConcerned(op)
	}
}

func (s *session) beforeOpConcerned(op uint16) {
	switch op {
	case wire.OpCopyIn, wire.OpCopyInCompressed, wire.OpCopyInBulk, wire.OpCopyInStored, wire.OpContentKeep, wire.OpArrived:
		// It says where it belongs. The program may go on without waiting for a large copy, and so do other streams.
		if s.arrived.notedLater || op == wire.OpArrived || op == wire.OpCopyIn && s.hdr.Size <= wire.CopyInSize+smallCopy {
			return
		}
		s.recordNoted()
		return
	}
	s.recordNoted()
	if s.arrived.now > 0 && !arrivedOps[op] && !givenOps[op] {
		s.awaitArrived(false)
	}
}

// arrivedFrame is for a wait that the client has answered itself.
func (s *session) arrivedFrame(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.Arrived
	m.Decode(&s.dec)
	if s.dec.Done() != nil || m.Later > 1 {
		return s.malformed()
	}
	s.given = m.Stream
	stream, ctx, rc := s.copyTarget(m.Stream)
	if rc != 0 {
		return rc
	}
	s.noteArrived(m.Stream, stream, ctx, m.Later != 0)
	if len(s.captures) > 0 { // whose streams must not wait for the event
		s.awaitArrived(true)
	}
	return 0
}

// noteArrived notes that what was copied in a stream of the current context so far is to be taken as arrived. later is for a blocking copy, which may
// stand behind other work.
func (s *session) noteArrived(id uint32, stream, ctx uint64, later bool) {
	a := &s.arrived
	if a.noted && (a.notedCtx != ctx || a.notedReal != stream || a.notedLater != later) {
		s.recordNoted()
	}
	a.noted, a.notedID, a.notedHdr, a.notedReal, a.notedCtx, a.notedLater = true, id, s.hdr.Ctx, stream, ctx, later
}

func (s *session) recordNoted() {
	if a := &s.arrived; a.noted {
		a.noted = false
		at, blocking := place{ctx: a.notedCtx, stream: a.notedID}, true
		if a.notedID != legacyStream {
			at, blocking = s.placeOf(a.notedID)
		}
		s.arrive(arrival{at: at, blocking: blocking, later: a.notedLater}, a.notedReal)
	}
}

func (s *session) arrive(n arrival, stream uint64) {
	a := &s.arrived
	if !n.later {
		s.failures.spread(n.at, n.blocking)
	}
	a.drop(s, func(o *arrival) bool {
		return o.at == n.at && o.later == n.later || C.sl_event_query(C.uint64_t(o.ev)) != C.CUDA_ERROR_NOT_READY
	})
	if len(a.list) >= maxArrivals {
		s.awaitArrived(true)
	}
	var rc int32
	if n.ev, rc = s.recordIn(n.at.ctx, stream); rc != 0 {
		return // nothing is pending then
	}
	a.list = append(a.list, n)
	if !n.later {
		a.now++
	}
}

// drop forgets the arrivals for which over says so. It may change the others.
func (a *arrivals) drop(s *session, over func(*arrival) bool) {
	kept := a.list[:0]
	a.now = 0
	for i := range a.list {
		n := &a.list[i]
		if over(n) {
			s.events.put(n.at.ctx, n.ev)
			continue
		}
		if !n.later {
			a.now++
		}
		kept = append(kept, *n)
	}
	clear(a.list[len(kept):])
	a.list = kept
}

// orderBehindArrived makes a stream wait for what has arrived in others.
func (s *session) orderBehindArrived(id uint32) {
	p, _ := s.placeOf(id)
	stream, ok := s.handle(wire.KindStream, id)
	if p.ctx == 0 || !ok {
		return // the operation is refused
	}
	s.arrived.drop(s, func(n *arrival) bool {
		if n.later || n.at == p || slices.Contains(n.behind, p) {
			return false
		}
		if C.sl_event_query(C.uint64_t(n.ev)) != C.CUDA_ERROR_NOT_READY {
			return true
		}
		if C.call_cuStreamWaitEvent(C.uint64_t(stream), C.uint64_t(n.ev), 0) != 0 {
			s.gates.StepOut()
			C.sl_event_sync(C.uint64_t(n.ev))
			return true
		}
		n.behind = append(n.behind, p)
		return false
	})
}

// awaitArrived waits for what has arrived; all: also for what only concerns what is made later, which is about to be made.
func (s *session) awaitArrived(all bool) {
	a := &s.arrived
	if !a.noted && len(a.list) == 0 {
		return
	}
	s.gates.StepOut()
	s.recordNoted()
	a.drop(s, func(n *arrival) bool {
		if n.later && !all {
			return false
		}
		C.sl_event_sync(C.uint64_t(n.ev))
		s.failures.spread(n.at, n.blocking)
		return true
	})
}

// leave forgets the arrivals in a context that is about to go. It is idle.
func (a *arrivals) leave(s *session, ctx uint64) {
	if a.noted && a.notedCtx == ctx {
		a.noted = false
	}
	a.drop(s, func(n *arrival) bool { return n.at.ctx == ctx })
}
