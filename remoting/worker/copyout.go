package worker

// Bulk data from the device. A COPY_OUT's chunks are copied to pinned slots, each followed by
// an event and noted in the order of the calls (list). The thread that finds the event of the first
// chunk complete sends it as a DATA frame straight from the slot, or hands it to the bulk connections (bulk_out.go). That is
// the deliverer thread, or a waiter that is about to report a completion (flush).
//
// Locking: sendMu keeps the order on the wire, mu guards the list, the free slots and what is out on bulk connections. mu is never
// held while something is sent, and no bulk connection needs sendMu: a thread that sends may have to wait for as long as the client's
// connection is lost. The memory of the slots belongs to inStaging.

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

// A chunk is a piece of a delivery on its way out.
type chunk struct {
	id   uint32 // of the delivery
	off  uint64
	buf  []byte // the slot's part
	slot int
	ev   uint64
	ctx  uint64
	last bool
	seq  uint64 // number of the chunk; those of a list ascend

	big   bool   // it may go over a bulk connection
	after uint32 // see BULK_PART
}

type outStaging struct {
	s *session

	sendMu sync.Mutex   // held while sending, taken before mu
	head   wire.Encoder // of the frame that is being sent; sendMu's

	mu     sync.Mutex
	cond   *sync.Cond // something was added to list, or slots were freed
	list   []chunk
	mem    []byte
	free   []int
	seq    uint64 // of the last chunk that was added
	async  bool   // the deliverer runs
	closed bool

	bulkOut
}

func (o *outStaging) init(s *session) {
	o.s = s
	o.cond, o.work = sync.NewCond(&o.mu), sync.NewCond(&o.mu)
}

func (o *outStaging) setSlots(mem []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mem = mem
	o.free = o.free[:0]
	for i := range len(mem) / slotSize {
		o.free = append(o.free, i)
	}
}

// acquire gives a free slot; it sends finished chunks, and waits for the
// oldest, to get one.
func (o *outStaging) acquire() int {
	for {
		o.mu.Lock()
		if n := len(o.free); n > 0 {
			i := o.free[n-1]
			o.free = o.free[:n-1]
			o.mu.Unlock()
			return i
		}
		var ev uint64
		if len(o.list) > 0 {
			ev = o.list[0].ev
		}
		o.mu.Unlock()
		if ev != 0 {
			C.sl_event_sync(C.uint64_t(ev))
		} else {
			runtime.Gosched() // another thread is sending the last ones
		}
		held := o.push()
		if err := o.s.wr.Flush(); err != nil {
			o.s.leave("data", err)
		}
		o.mu.Lock()
		for len(o.free) == 0 && o.waiting() && (held != 0 || len(o.list) == 0) {
			o.cond.Wait()
		}
		o.mu.Unlock()
	}
}

// add notes a chunk. With async the deliverer is woken for it; otherwise its
// caller sees to it that it is sent.
func (o *outStaging) add(c chunk, async bool) {
	o.mu.Lock()
	o.seq++
	c.seq = o.seq
	o.list = append(o.list, c)
	if async {
		o.wake()
	}
	o.mu.Unlock()
}

// wake has the deliverer send what there is. mu is held.
func (o *outStaging) wake() {
	if !o.async {
		o.async = true
		go o.deliver()
	}
	o.cond.Broadcast()
}

// flush sends every chunk that is complete. When it returns, all chunks that
// were complete when it was called have been given to the writer, by any thread, or taken by the client. The
// writer may hold the last one until its next Send or Flush, which the caller makes.
func (o *outStaging) flush() {
	o.mu.Lock()
	until := o.seq
	o.mu.Unlock()
	for {
		held := o.push()
		if held > until {
			held = 0
		}
		o.mu.Lock()
		for o.waiting() && (held != 0 || o.awaits(until)) {
			o.cond.Wait()
		}
		over := held == 0 && !o.awaits(until)
		o.mu.Unlock()
		if over {
			return
		}
	}
}

// push sends the chunks that are complete, up to the first one that has to wait for answers to parts, whose number it returns; 0 if
// there is none. It does not wait for answers.
func (o *outStaging) push() (held uint64) {
	o.sendMu.Lock()
	defer o.sendMu.Unlock()
	o.resend()
	list := o.chunks()
	if len(list) == 0 {
		return 0
	}
	state := complete(list, (*chunk).state)
	if first := firstEnd(list, state); first != 0 && o.s.host.watch.n.Load() != 0 {
		// The program may look at watched memory when it knows the end of a delivery.
		some, ok := o.report(wire.MaxHostWatch)
		if !ok {
			return first
		}
		if some { // what was complete before is sent now; more may have become so since
			now := o.chunks()
			list, state = now, known(now, list, state)
		}
	}
	kept := make([]chunk, 0, len(list))
	for i := range list {
		c := list[i]
		switch {
		case held != 0 || state[i] == C.CUDA_ERROR_NOT_READY:
			kept = append(kept, c)
		case !o.pass(&c, state[i] != 0):
			held = c.seq
			kept = append(kept, c)
		}
	}
	o.put(kept, len(list))
	return held
}

// chunks are those that wait now. Only holders of sendMu take from the list, and others only append: what is seen stays as it is.
func (o *outStaging) chunks() []chunk {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.list
}

// put has the list begin with kept in place of its first n chunks. sendMu is held.
func (o *outStaging) put(kept []chunk, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.list = append(kept, o.list[n:]...)
	o.cond.Broadcast()
}

// firstEnd is the number of the first chunk that is complete and its delivery's last; 0 if there is none.
func firstEnd(list []chunk, state []int32) uint64 {
	for i := range list {
		if list[i].last && state[i] != C.CUDA_ERROR_NOT_READY {
			return list[i].seq
		}
	}
	return 0
}

// known is the state of the chunks of list as it was when the list was before.
func known(list, before []chunk, state []int32) []int32 {
	then := make(map[uint64]int32, len(before))
	for i := range before {
		then[before[i].seq] = state[i]
	}
	now := make([]int32, len(list))
	for i := range list {
		var ok bool
		if now[i], ok = then[list[i].seq]; !ok {
			now[i] = C.CUDA_ERROR_NOT_READY
		}
	}
	return now
}

// report sends what the GPU has written to watched memory, of watches of at most that many bytes, and says whether that is anything. First it sends the bytes of
// every copy that was complete when the memory was read: a program that sees a word which the GPU has written behind a copy has the copy too. It returns
// false if parts have to be answered before; what was found is found again then. sendMu is held.
func (o *outStaging) report(most int) (some, ok bool) {
	w := &o.s.host.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	found := w.read(most)
	if len(found) == 0 {
		return false, true
	}
	if held := o.passBytes(); held || o.partsOut() {
		return true, false
	}
	w.send(o.s, found)
	return true, true
}

// passBytes sends the bytes of the chunks that are complete, and leaves the ends of their deliveries. held says that some have to wait for answers to
// parts. sendMu is held.
func (o *outStaging) passBytes() (held bool) {
	list := o.chunks()
	state := complete(list, (*chunk).state)
	kept := make([]chunk, 0, len(list))
	for i := range list {
		c := list[i]
		if held || state[i] != 0 || len(c.buf) == 0 { // one that has failed has no bytes
			kept = append(kept, c)
			continue
		}
		b := c
		b.last = false
		if held = !o.pass(&b, false); held {
			kept = append(kept, c)
		} else if c.last {
			kept = append(kept, chunk{id: c.id, off: c.off + uint64(len(c.buf)), slot: -1, last: true, seq: c.seq})
		}
	}
	o.put(kept, len(list))
	return held
}

// complete asks which chunks may be sent, in their order: those of a delivery one after the other,
// and none that may have come after one that is kept. They may have the same destination.
func complete(list []chunk, ask func(*chunk) int32) []int32 {
	state := make([]int32, len(list))
	for i := range state {
		state[i] = C.CUDA_ERROR_NOT_READY
	}
	for again := true; again; {
		var late []int // the first of each delivery that is not complete
		again = false
		for i := range list {
			c := &list[i]
			if state[i] != C.CUDA_ERROR_NOT_READY || slices.ContainsFunc(late, func(k int) bool { return list[k].id == c.id }) {
				continue
			}
			if state[i] = ask(c); state[i] == C.CUDA_ERROR_NOT_READY {
				late = append(late, i)
			} else {
				again = again || len(late) > 0
			}
		}
		// A chunk that overtakes others was complete before those are asked again: if they still
		// are not, it did not have to wait for them.
		again = again && slices.ContainsFunc(late, func(k int) bool { return ask(&list[k]) != C.CUDA_ERROR_NOT_READY })
	}
	return state
}

// state is what the driver says of a chunk's copy.
func (c *chunk) state() int32 {
	if c.ev == 0 {
		return 0
	}
	return int32(C.sl_event_query(C.uint64_t(c.ev)))
}

// send sends one chunk and frees its slot; failed ends its delivery without
// bytes.
func (o *outStaging) send(c *chunk, failed bool) {
	o.head.Reset()
	(&wire.Data{Offset: c.off}).Encode(&o.head)
	h := wire.Reply{Kind: wire.FrameData, Call: c.id}
	if c.last {
		h.Arg = wire.DataLast
	}
	b := c.buf
	if failed {
		b = nil
	}
	o.s.events.put(c.ctx, c.ev)
	slot := c.slot
	// A caller of flush always sends something afterwards, or calls the writer's Flush.
	err := o.s.wr.HoldLast(&h, o.head.Buf(), b, func() { o.freed(slot) })
	if err != nil {
		o.s.leave("data", err)
	}
}

// freed takes back a slot whose bytes have been sent; -1 is none.
func (o *outStaging) freed(slot int) {
	if slot < 0 {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.free = append(o.free, slot)
	o.cond.Broadcast()
}

// stop lets the deliverer end; see waiters.stop.
func (o *outStaging) stop() {
	o.mu.Lock()
	o.closed = true
	o.cond.Broadcast()
	o.mu.Unlock()
}

// deliver sends the bytes of copies that nobody waits for.
func (o *outStaging) deliver() {
	runtime.LockOSThread()
	relaxCapture()
	for {
		o.mu.Lock()
		for len(o.list) == 0 && len(o.lost) == 0 {
			if o.closed {
				o.mu.Unlock()
				return
			}
			o.cond.Wait()
		}
		var first uint64
		if len(o.list) > 0 {
			first = o.list[0].seq
		}
		o.mu.Unlock()
		// Asking now and then instead of waiting in the driver: the event
		// may be sent, reused or destroyed by others meanwhile.
		for wait := 5 * time.Microsecond; ; wait = min(wait*2, 200*time.Microsecond) {
			held := o.push()
			if err := o.s.wr.Flush(); err != nil {
				o.s.leave("data", err)
			}
			o.mu.Lock()
			for held != 0 && o.waiting() {
				o.cond.Wait()
			}
			same := len(o.list) > 0 && o.list[0].seq == first
			o.mu.Unlock()
			if !same {
				break
			}
			if held == 0 {
				time.Sleep(wait)
			}
		}
	}
}

// copier starts the copy of n bytes at off of a delivery to a slot.
type copier func(slot []byte, off uint64) (n int, rc int32)

// start copies chunks from off on to slots. With room it stops when no slot
// is free; it returns where it stopped.
func (s *session) startOut(id, streamID uint32, off, total uint64, ctx, stream uint64, async, room bool, f copier) (uint64, int32) {
	o := &s.out
	for off < total || total == 0 {
		if room {
			o.mu.Lock()
			n := len(o.free)
			o.mu.Unlock()
			if n == 0 {
				return off, 0
			}
		}
		i := o.acquire()
		buf := o.mem[i*slotSize : (i+1)*slotSize]
		w := s.copyBegins(wire.SpanCopyOut, streamID, ctx, stream)
		n, rc := f(buf, off)
		w.copied(uint64(n), rc)
		var ev uint64
		if rc == 0 {
			if ev, rc = s.events.get(ctx); rc == 0 {
				if rc = int32(C.sl_event_record(C.uint64_t(ev), C.uint64_t(stream))); rc != 0 {
					C.sl_ctx_sync() // the slot must not be given away under the copy
				}
			}
		}
		if rc != 0 {
			// End the delivery: the client must not wait for more.
			s.events.put(ctx, ev)
			o.add(chunk{id: id, off: off, slot: i, last: true, ctx: ctx}, true)
			return total, rc
		}
		next := off + uint64(n)
		o.add(chunk{id: id, off: off, buf: buf[:n], slot: i, ev: ev, ctx: ctx, last: next == total, big: total >= wire.BulkDownLeast}, async)
		off = next
		if total == 0 {
			break
		}
	}
	return off, 0
}

func (s *session) copyOut(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.CopyOut
	m.Decode(d)
	total := m.Size
	if d.Done() != nil || total > 1<<50 {
		return s.malformed()
	}
	return s.copyOutAll(m.Stream, m.Delivery, total, func(st uint64) copier {
		return func(slot []byte, off uint64) (int, int32) {
			n := int(min(total-off, slotSize))
			if n == 0 {
				return 0, 0
			}
			return n, int32(C.sl_dtoh(at(slot), C.uint64_t(m.Src+off), C.uint64_t(n), C.uint64_t(st)))
		}
	})
}

func (s *session) copyOut3D(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.CopyOut3D
	m.Decode(d)
	b := desc3D{m.Box}
	if d.Done() != nil || !b.valid() {
		return s.malformed()
	}
	total, _ := b.size()
	box, rc := s.realBox(&b)
	if rc != 0 {
		s.endDelivery(m.Delivery)
		return rc
	}
	return s.copyOutAll(b.Stream, m.Delivery, total, func(st uint64) copier {
		return func(slot []byte, off uint64) (int, int32) {
			c, n := b.part(off, slotSize)
			v := boxPart(box, &c)
			return int(n), int32(C.sl_copy3d(&v, at(slot), 0, C.uint64_t(st)))
		}
	})
}

// endDelivery tells the client that nothing more comes.
func (s *session) endDelivery(id uint32) {
	s.out.add(chunk{id: id, slot: -1, last: true}, true)
}

// copyOutAll runs a copy to the host. An asynchronous one is started whole,
// in order. One that the client waits for is started as far as slots are free
// and finished by a waiter, so that a copy of any size does not hold up the
// calls of other threads.
func (s *session) copyOutAll(streamID, id uint32, total uint64, on func(stream uint64) copier) int32 {
	s.give(streamID)
	stream, ctx, rc := s.copyTarget(streamID)
	if rc != 0 {
		s.endDelivery(id)
		return rc
	}
	f := on(stream)
	if s.hdr.Call == 0 {
		_, rc := s.startOut(id, streamID, 0, total, ctx, stream, true, false, f)
		return rc
	}
	off, rc := s.startOut(id, streamID, 0, total, ctx, stream, false, total > slotSize, f)
	if rc != 0 {
		s.settle()
		return rc
	}
	told := s.tellStream(streamID)
	if off == total {
		return s.answerAt(ctx, stream, told)
	}
	op, call := s.hdr.Op, s.hdr.Call
	s.pending = true
	s.waiters.do(job{ctx, func() {
		_, rc := s.startOut(id, streamID, off, total, ctx, stream, false, false, f)
		ev, rc2 := s.events.get(ctx)
		if rc2 == 0 {
			if rc2 = int32(C.sl_event_record(C.uint64_t(ev), C.uint64_t(stream))); rc2 == 0 {
				rc2 = s.drainTo(ev)
			}
			s.events.put(ctx, ev)
		}
		if rc == 0 {
			rc = rc2
		}
		s.settle()
		if err := s.reply(op, call, orTold(rc, told), nil); err != nil {
			s.leave("reply", err)
		}
	}})
	return 0
}

// drainTo waits for an event and sends chunks as they complete meanwhile, so
// that the wire is busy while the GPU copies.
func (s *session) drainTo(ev uint64) int32 {
	for {
		s.out.mu.Lock()
		none := len(s.out.list) == 0
		s.out.mu.Unlock()
		if none {
			return int32(C.sl_event_sync(C.uint64_t(ev)))
		}
		rc := C.sl_event_query(C.uint64_t(ev))
		s.out.push()
		if rc != C.CUDA_ERROR_NOT_READY {
			// The driver gives out what kernels printed in a wait, not in a query.
			return int32(C.sl_event_sync(C.uint64_t(ev)))
		}
		if err := s.wr.Flush(); err != nil {
			s.leave("data", err)
		}
	}
}

// answerAt answers the current call when the stream gets here; told is as for answerWhen.
func (s *session) answerAt(ctx, stream uint64, told int32) int32 {
	ev, rc := s.events.get(ctx)
	if rc != 0 {
		return rc
	}
	if rc := C.sl_event_record(C.uint64_t(ev), C.uint64_t(stream)); rc != 0 {
		s.events.put(ctx, ev)
		return int32(rc)
	}
	return s.answerWhen(ctx, ev, told)
}

// busy says whether chunks are on their way.
func (o *outStaging) busy() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.list) > 0 || o.mem != nil && len(o.free) < slotCount
}
