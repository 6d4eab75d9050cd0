package worker

// Bulk data.
//
//  in   The executor reads a COPY_IN's bytes from the socket straight into a
//       pinned slot, starts the copy to the device and goes on; an event tells
//       when the slot may be used again. Small copies share a slot: they are
//       packed one behind the other until it is full or the stream changes.
//  out  A COPY_OUT's chunks are copied to pinned slots, each followed by an
//       event and noted in the order of the calls (list). Whoever finds the
//       event of the first chunk complete sends it as a DATA frame straight
//       from the slot: the deliverer thread, or a waiter that is about to
//       report a completion (flush). sendMu keeps the order on the wire, mu
//       guards the list and the free slots.
//
// The slots are one block of pinned memory of the context that was first
// current; when that is destroyed they are made anew.

/*
#include "driver.h"
*/
import "C"

import (
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const (
	slotSize  = 1 << 20
	slotCount = 32
	// smallCopy is the most bytes that share a slot with others.
	smallCopy = 64 << 10
)

// inSlot is a pinned slot for bytes on their way in.
type inSlot struct {
	buf []byte
	ev  uint64 // 0 when free
	ctx uint64 // of the event
}

// inStaging is the executor's own.
type inStaging struct {
	mem    unsafe.Pointer
	owner  uint64 // context the memory belongs to
	slots  [slotCount]inSlot
	next   int
	open   *inSlot // takes more small copies
	used   int     // bytes of it
	openSt uint64  // its stream
	openCx uint64
}

// open allocates the staging memory of both directions in the current context.
func (in *inStaging) open_(s *session) int32 {
	var p unsafe.Pointer
	if rc := C.sl_pinned_alloc(&p, 2*slotCount*slotSize); rc != 0 {
		return int32(rc)
	}
	all := unsafe.Slice((*byte)(p), 2*slotCount*slotSize)
	in.mem, in.owner = p, s.curReal
	for i := range in.slots {
		in.slots[i] = inSlot{buf: all[i*slotSize : (i+1)*slotSize : (i+1)*slotSize]}
	}
	s.out.setSlots(all[slotCount*slotSize:])
	return 0
}

// ensure makes the staging memory if there is none.
func (in *inStaging) ensure(s *session) int32 {
	if in.mem != nil {
		return 0
	}
	return in.open_(s)
}

// close ends the slot that small copies share. It must happen before its
// stream is destroyed or captured.
func (in *inStaging) close(s *session) {
	if in.open == nil {
		return
	}
	q := in.open
	in.open = nil
	in.mark(s, q, in.openCx, in.openSt)
}

// mark notes that a slot is in use until the stream gets here.
func (in *inStaging) mark(s *session, q *inSlot, ctx, stream uint64) int32 {
	ev, rc := s.events.get(ctx)
	if rc == 0 {
		if rc = int32(C.sl_event_record(C.uint64_t(ev), C.uint64_t(stream))); rc != 0 {
			s.events.put(ctx, ev)
		}
	}
	if rc != 0 {
		// No event to wait for: wait for everything instead, or the slot
		// would be overwritten under the copy.
		C.sl_ctx_sync()
		q.ev = 0
		return rc
	}
	q.ev, q.ctx = ev, ctx
	return 0
}

// acquire gives a free slot, waiting for the GPU to leave one if need be.
func (in *inStaging) acquire(s *session) *inSlot {
	for range in.slots {
		q := &in.slots[in.next]
		in.next = (in.next + 1) % slotCount
		if q == in.open {
			continue
		}
		if q.ev == 0 {
			return q
		}
		if C.sl_event_query(C.uint64_t(q.ev)) != C.CUDA_ERROR_NOT_READY {
			s.events.put(q.ctx, q.ev)
			q.ev = 0
			return q
		}
		if in.next != 0 {
			// Slots are taken round the ring, so the one looked at first is
			// the oldest: wait for it rather than ask the younger ones.
			break
		}
	}
	in.next = (in.next + slotCount - 1) % slotCount
	q := &in.slots[in.next]
	in.next = (in.next + 1) % slotCount
	if q == in.open {
		q = &in.slots[in.next]
		in.next = (in.next + 1) % slotCount
	}
	if q.ev != 0 {
		C.sl_event_sync(C.uint64_t(q.ev))
		s.events.put(q.ctx, q.ev)
		q.ev = 0
	}
	return q
}

// capturing says whether a stream is being captured, where a copy from a slot
// would be replayed with whatever lies there then.
func (s *session) capturing(stream uint64) bool {
	if len(s.captures) == 0 {
		return false
	}
	var st C.uint32_t
	return C.sl_stream_capturing(C.uint64_t(stream), &st) == 0 && st != C.CU_STREAM_CAPTURE_STATUS_NONE
}

// copyTarget finds stream and context of a copy and makes the context current.
func (s *session) copyTarget(id uint32) (stream, ctx uint64, rc int32) {
	if ctx, rc = s.streamCtx(id); rc != 0 {
		return 0, 0, rc
	}
	stream, _ = s.handle(wire.KindStream, id)
	if s.capturing(stream) {
		return 0, 0, C.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
	}
	return stream, ctx, s.in.ensure(s)
}

// A source is where the bytes of a frame come from: the reader, which stays
// locked meanwhile, or what has been read of it already.
type source struct {
	rd *wire.Reader
	b  []byte
}

// source begins with the rest of the current frame. While a stream may wait
// for a host function, getting a slot may too, and whoever reads ahead for that
// function's answer must find the reader free: the bytes are then taken now.
func (s *session) source() (source, error) {
	if s.hostfns.pending.Load() == 0 {
		return source{rd: s.rd}, nil
	}
	b, err := s.rd.Payload()
	s.rd.Done()
	return source{b: b}, err
}

func (f *source) left() int {
	if f.rd != nil {
		return f.rd.Left()
	}
	return len(f.b)
}

// read fills dst.
func (f *source) read(dst []byte) error {
	if f.rd != nil {
		return f.rd.ReadFull(dst)
	}
	f.b = f.b[copy(dst, f.b):]
	return nil
}

// end drops what is left, and unlocks the reader.
func (f *source) end() error {
	if f.rd == nil {
		return nil
	}
	defer f.rd.Done()
	return f.rd.Skip()
}

// copyInFrame copies a frame's bytes to the device. The reader is locked when
// it begins, and unlocked when it returns.
func (s *session) copyInFrame() (int32, error) {
	h, err := s.rd.Peek(wire.CopyInSize)
	if err != nil || s.rd.Left() > wire.MaxCopyIn {
		s.rd.Done()
		return s.malformed(s.hdr.Op), nil
	}
	var m wire.CopyIn
	s.dec.Reset(h)
	m.Decode(&s.dec)
	s.given = m.Stream
	f, err := s.source()
	if err != nil {
		return 0, err
	}
	rc, err := s.copyIn(&f, m.Dst, m.Stream)
	return rc, errors.Join(err, f.end())
}

func (s *session) copyIn(f *source, dst uint64, id uint32) (int32, error) {
	var stream, ctx uint64
	rc := s.wantCtx(s.hdr.Ctx)
	if rc == 0 {
		stream, ctx, rc = s.copyTarget(id)
	}
	if rc != 0 {
		return rc, nil
	}
	in := &s.in
	for n := f.left(); n > 0; n = f.left() {
		if n <= smallCopy {
			if in.open == nil || in.openSt != stream || in.openCx != ctx || in.used+n > slotSize {
				in.close(s)
				in.open, in.used, in.openSt, in.openCx = in.acquire(s), 0, stream, ctx
			}
			buf := in.open.buf[in.used : in.used+n]
			if err := f.read(buf); err != nil {
				return 0, err
			}
			in.used += (n + 255) &^ 255
			return int32(C.sl_htod(C.uint64_t(dst), at(buf), C.uint64_t(n), C.uint64_t(stream))), nil
		}
		n = min(n, slotSize)
		q := in.acquire(s)
		if err := f.read(q.buf[:n]); err != nil {
			return 0, err
		}
		if rc := C.sl_htod(C.uint64_t(dst), at(q.buf), C.uint64_t(n), C.uint64_t(stream)); rc != 0 {
			return int32(rc), nil
		}
		if rc := in.mark(s, q, ctx, stream); rc != 0 {
			return rc, nil
		}
		dst += uint64(n)
	}
	return 0, nil
}

// desc3D is one box of device memory or of an array; the host side is packed.
type desc3D struct{ wire.Box }

// maxSide bounds each length of a box, so that products cannot overflow
// unnoticed.
const maxSide = 1 << 40

// valid checks that the box's bytes can be counted.
func (b *desc3D) valid() bool {
	if b.Memtype != C.CU_MEMORYTYPE_DEVICE && b.Memtype != C.CU_MEMORYTYPE_ARRAY {
		return false
	}
	for _, v := range [...]uint64{b.W, b.H, b.D, b.X, b.Y, b.Z, b.Pitch, b.Height} {
		if v > maxSide {
			return false
		}
	}
	_, ok := b.size()
	return ok && b.W > 0 && b.H > 0 && b.D > 0
}

// size is the number of bytes in the box; false beyond any device's memory.
func (b *desc3D) size() (uint64, bool) {
	n := b.W
	for _, v := range [...]uint64{b.H, b.D} {
		if v > 0 && n > (1<<50)/v {
			return 0, false
		}
		n *= v
	}
	return n, true
}

// part cuts the box: whole slices, or rows of one slice, or bytes of one row,
// at most limit bytes and beginning at packed offset off.
func (b *desc3D) part(off, limit uint64) (c desc3D, n uint64) {
	c = *b
	row := off / b.W
	z, y, x := row/b.H, row%b.H, off%b.W
	c.X, c.Y, c.Z = b.X+x, b.Y+y, b.Z+z
	switch slice := b.W * b.H; {
	case x == 0 && y == 0 && slice <= limit:
		c.D = min(limit/slice, b.D-z)
	case x == 0 && b.W <= limit:
		c.H, c.D = min(limit/b.W, b.H-y), 1
	default:
		c.W, c.H, c.D = min(limit, b.W-x), 1, 1
	}
	return c, c.W * c.H * c.D
}

// real puts the array's handle in.
func (s *session) realBox(b *desc3D) (C.struct_sl_box, int32) {
	v := C.struct_sl_box{
		memtype: C.uint32_t(b.Memtype), lod: C.uint32_t(b.LOD), ptr: C.uint64_t(b.Where),
		pitch: C.uint64_t(b.Pitch), height: C.uint64_t(b.Height),
		x: C.uint64_t(b.X), y: C.uint64_t(b.Y), z: C.uint64_t(b.Z),
		w: C.uint64_t(b.W), h: C.uint64_t(b.H), d: C.uint64_t(b.D),
	}
	if b.Memtype == C.CU_MEMORYTYPE_ARRAY {
		real, ok := s.handle(wire.KindArray, uint32(b.Where))
		if !ok {
			return v, s.badHandle(wire.KindArray, uint32(b.Where))
		}
		v.ptr = C.uint64_t(real)
	}
	return v, 0
}

func boxPart(v C.struct_sl_box, c *desc3D) C.struct_sl_box {
	v.x, v.y, v.z = C.uint64_t(c.X), C.uint64_t(c.Y), C.uint64_t(c.Z)
	v.w, v.h, v.d = C.uint64_t(c.W), C.uint64_t(c.H), C.uint64_t(c.D)
	return v
}

func (s *session) copyIn3DFrame() (int32, error) {
	var m wire.CopyIn3D
	h, err := s.rd.Peek(wire.CopyIn3DSize)
	s.dec.Reset(h)
	m.Decode(&s.dec)
	b := desc3D{m.Box}
	if err != nil || !b.valid() {
		s.rd.Done()
		return s.malformed(s.hdr.Op), nil
	}
	total, _ := b.size()
	if uint64(s.rd.Left()) != total || total > wire.MaxCopyIn {
		s.rd.Done()
		return s.malformed(s.hdr.Op), nil
	}
	s.given = b.Stream
	f, err := s.source()
	if err != nil {
		return 0, err
	}
	rc, err := s.copyIn3D(&f, &b, total)
	return rc, errors.Join(err, f.end())
}

func (s *session) copyIn3D(f *source, b *desc3D, total uint64) (int32, error) {
	rc := s.wantCtx(s.hdr.Ctx)
	var stream, ctx uint64
	if rc == 0 {
		stream, ctx, rc = s.copyTarget(b.Stream)
	}
	var box C.struct_sl_box
	if rc == 0 {
		box, rc = s.realBox(b)
	}
	if rc != 0 {
		return rc, nil
	}
	for off := uint64(0); off < total; {
		c, n := b.part(off, slotSize)
		q := s.in.acquire(s)
		if err := f.read(q.buf[:n]); err != nil {
			return 0, err
		}
		v := boxPart(box, &c)
		if rc := C.sl_copy3d(&v, at(q.buf), 1, C.uint64_t(stream)); rc != 0 {
			return int32(rc), nil
		}
		if rc := s.in.mark(s, q, ctx, stream); rc != 0 {
			return rc, nil
		}
		off += n
	}
	return 0, nil
}

// A chunk is a piece of a delivery on its way out.
type chunk struct {
	id   uint32 // of the delivery
	off  uint64
	buf  []byte // the slot's part
	slot int
	ev   uint64
	ctx  uint64
	last bool
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
	async  bool // the deliverer runs
	closed bool
}

func (o *outStaging) init(s *session) {
	o.s = s
	o.cond = sync.NewCond(&o.mu)
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
		o.flush()
		if err := o.s.wr.Flush(); err != nil {
			o.s.leave("data", err)
		}
	}
}

// add notes a chunk. With async the deliverer is woken for it; otherwise its
// caller sees to it that it is sent.
func (o *outStaging) add(c chunk, async bool) {
	o.mu.Lock()
	o.list = append(o.list, c)
	if async {
		if !o.async {
			o.async = true
			go o.deliver()
		}
		o.cond.Signal()
	}
	o.mu.Unlock()
}

// flush sends every chunk that is complete. When it returns, all chunks that
// were complete when it was called have been sent, by whomever.
func (o *outStaging) flush() {
	o.mu.Lock()
	n := len(o.list)
	o.mu.Unlock()
	if n == 0 {
		// Nothing listed; but the last ones may be on their way.
		o.sendMu.Lock()
		//lint:ignore SA2001 waits for the sender, and has nothing else to do
		o.sendMu.Unlock()
		return
	}
	o.sendMu.Lock()
	defer o.sendMu.Unlock()
	o.mu.Lock()
	list := o.list
	o.mu.Unlock()
	// Only holders of sendMu take from the list, and others only append: the
	// part seen here stays as it is.
	state := complete(list, (*chunk).state)
	kept := make([]chunk, 0, len(list))
	for i := range list {
		if state[i] == C.CUDA_ERROR_NOT_READY {
			kept = append(kept, list[i])
		} else {
			o.send(&list[i], state[i] != 0)
		}
	}
	o.mu.Lock()
	o.list = append(kept, o.list[len(list):]...)
	o.cond.Broadcast()
	o.mu.Unlock()
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
	// Somebody always sends behind this: the reply that waits for these
	// bytes, or flushOut.
	err := o.s.wr.Hold(&h, o.head.Buf(), b)
	if err != nil {
		o.s.leave("data", err)
	}
	o.s.events.put(c.ctx, c.ev)
	if c.slot >= 0 {
		o.mu.Lock()
		o.free = append(o.free, c.slot)
		o.mu.Unlock()
	}
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
		for len(o.list) == 0 {
			if o.closed {
				o.mu.Unlock()
				return
			}
			o.cond.Wait()
		}
		c := o.list[0]
		o.mu.Unlock()
		// Asking now and then instead of waiting in the driver: the event
		// may be sent, reused or destroyed by others meanwhile.
		for wait := 5 * time.Microsecond; ; wait = min(wait*2, 200*time.Microsecond) {
			o.flush()
			if err := o.s.wr.Flush(); err != nil {
				o.s.leave("data", err)
			}
			o.mu.Lock()
			same := len(o.list) > 0 && o.list[0].id == c.id && o.list[0].off == c.off
			o.mu.Unlock()
			if !same {
				break
			}
			time.Sleep(wait)
		}
	}
}

// copier starts the copy of n bytes at off of a delivery to a slot.
type copier func(slot []byte, off uint64) (n int, rc int32)

// start copies chunks from off on to slots. With room it stops when no slot
// is free; it returns where it stopped.
func (s *session) startOut(id uint32, off, total uint64, ctx, stream uint64, async, room bool, f copier) (uint64, int32) {
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
		n, rc := f(buf, off)
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
		o.add(chunk{id: id, off: off, buf: buf[:n], slot: i, ev: ev, ctx: ctx, last: next == total}, async)
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
		return s.malformed(s.hdr.Op)
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
		return s.malformed(s.hdr.Op)
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
	s.given = streamID
	stream, ctx, rc := s.copyTarget(streamID)
	if rc != 0 {
		s.endDelivery(id)
		return rc
	}
	f := on(stream)
	if s.hdr.Call == 0 {
		_, rc := s.startOut(id, 0, total, ctx, stream, true, false, f)
		return rc
	}
	off, rc := s.startOut(id, 0, total, ctx, stream, false, total > slotSize, f)
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
		_, rc := s.startOut(id, off, total, ctx, stream, false, false, f)
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
		var first uint64
		if len(s.out.list) > 0 {
			first = s.out.list[0].ev
		}
		s.out.mu.Unlock()
		if first == 0 {
			return int32(C.sl_event_sync(C.uint64_t(ev)))
		}
		rc := C.sl_event_query(C.uint64_t(ev))
		s.out.flush()
		if rc != C.CUDA_ERROR_NOT_READY {
			// The driver gives out what kernels printed in a wait, not in a query.
			return int32(C.sl_event_sync(C.uint64_t(ev)))
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

// leave forgets slots' events of a context that is about to go, and the
// staging memory if it is that context's. The context is idle.
func (in *inStaging) leave(s *session, ctx uint64) {
	for i := range in.slots {
		if q := &in.slots[i]; q.ctx == ctx {
			q.ev, q.ctx = 0, 0
		}
	}
	if in.mem == nil || in.owner != ctx {
		return
	}
	// Slots of other contexts' copies lie in the same block.
	for i := range in.slots {
		if q := &in.slots[i]; q.ev != 0 {
			C.sl_event_sync(C.uint64_t(q.ev))
			s.events.put(q.ctx, q.ev)
			q.ev = 0
		}
	}
	for s.out.busy() {
		s.out.flush()
	}
	s.out.setSlots(nil)
	C.sl_pinned_free(in.mem)
	in.mem, in.owner, in.next = nil, 0, 0
}

// busy says whether chunks are on their way.
func (o *outStaging) busy() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.list) > 0 || o.mem != nil && len(o.free) < slotCount
}
