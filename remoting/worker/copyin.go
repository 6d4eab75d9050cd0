package worker

// Bulk data to the device. The executor reads a COPY_IN's bytes from the socket straight into
// a pinned slot, starts the copy to the device and goes on; an event tells when the slot may
// be used again. Small copies share a slot: they are packed one behind the other until it is
// full or the stream changes. Everything here belongs to the executor.
//
// The slots of both directions are one block of pinned memory of the context that was first
// current. When that context is destroyed, the next copy allocates a new block.

/*
#include "driver.h"
*/
import "C"

import (
	"errors"
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

// inStaging is the slots of copies to the device.
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

// ensure allocates the staging memory of both directions in the current context, if there is
// none.
func (in *inStaging) ensure(s *session) int32 {
	if in.mem != nil {
		return 0
	}
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

// mark notes that a slot is in use until the stream gets here. The event is of the stream's context, which another call
// may have left by now.
func (in *inStaging) mark(s *session, q *inSlot, ctx, stream uint64) int32 {
	ev, rc := s.recordIn(ctx, stream)
	q.ev, q.ctx = ev, ctx
	return rc
}

// recordIn records an event of the session's own in a stream of any context. If that fails nothing is pending in the context.
func (s *session) recordIn(ctx, stream uint64) (uint64, int32) {
	if ctx != s.curReal {
		if rc := C.sl_ctx_set(C.uint64_t(ctx)); rc != 0 {
			s.forgetCtx()
			return 0, int32(rc)
		}
		defer C.sl_ctx_set(C.uint64_t(s.curReal))
	}
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
		return 0, rc
	}
	return ev, 0
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
	var m wire.CopyIn
	s.dec.Reset(h)
	m.Decode(&s.dec)
	if err != nil || s.rd.Left() > wire.MaxCopyIn || m.Last > 1 {
		s.rd.Done()
		return s.malformed(), nil
	}
	s.given = m.Stream
	f, err := s.source()
	if err != nil {
		return 0, err
	}
	rc, err := s.copyIn(&f, &m)
	return rc, errors.Join(err, f.end())
}

func (s *session) copyIn(f *source, m *wire.CopyIn) (int32, error) {
	dst := m.Dst
	var stream, ctx uint64
	rc := s.wantCtx(s.hdr.Ctx)
	if rc == 0 {
		stream, ctx, rc = s.copyTarget(m.Stream)
	}
	if rc != 0 {
		return rc, nil
	}
	s.give(m.Stream)
	if m.Last != 0 {
		defer s.noteArrived(m.Stream, stream, ctx, true)
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
			s.contents.tee(dst, buf)
			w := s.copyBegins(wire.SpanCopyIn, m.Stream, ctx, stream)
			rc := int32(C.sl_htod(C.uint64_t(dst), at(buf), C.uint64_t(n), C.uint64_t(stream)))
			w.copied(uint64(n), rc)
			return rc, nil
		}
		n = min(n, slotSize)
		q := in.acquire(s)
		if err := f.read(q.buf[:n]); err != nil {
			return 0, err
		}
		s.contents.tee(dst, q.buf[:n])
		w := s.copyBegins(wire.SpanCopyIn, m.Stream, ctx, stream)
		rc := int32(C.sl_htod(C.uint64_t(dst), at(q.buf), C.uint64_t(n), C.uint64_t(stream)))
		w.copied(uint64(n), rc)
		if rc != 0 {
			return rc, nil
		}
		if rc := in.mark(s, q, ctx, stream); rc != 0 {
			return rc, nil
		}
		dst += uint64(n)
	}
	return 0, nil
}

func (s *session) copyIn3DFrame() (int32, error) {
	var m wire.CopyIn3D
	h, err := s.rd.Peek(wire.CopyIn3DSize)
	s.dec.Reset(h)
	m.Decode(&s.dec)
	b := desc3D{m.Box}
	if err != nil || !b.valid() {
		s.rd.Done()
		return s.malformed(), nil
	}
	total, _ := b.size()
	if uint64(s.rd.Left()) != total || total > wire.MaxCopyIn {
		s.rd.Done()
		return s.malformed(), nil
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
	s.give(b.Stream)
	for off := uint64(0); off < total; {
		c, n := b.part(off, slotSize)
		q := s.in.acquire(s)
		if err := f.read(q.buf[:n]); err != nil {
			return 0, err
		}
		v := boxPart(box, &c)
		w := s.copyBegins(wire.SpanCopyIn, b.Stream, ctx, stream)
		rc := int32(C.sl_copy3d(&v, at(q.buf), 1, C.uint64_t(stream)))
		w.copied(n, rc)
		if rc != 0 {
			return rc, nil
		}
		if rc := s.in.mark(s, q, ctx, stream); rc != 0 {
			return rc, nil
		}
		off += n
	}
	return 0, nil
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
		// The writer may hold a frame whose bytes are in a slot.
		if err := s.wr.Flush(); err != nil {
			s.leave("data", err)
		}
	}
	s.out.setSlots(nil)
	C.sl_pinned_free(in.mem)
	in.mem, in.owner, in.next = nil, 0, 0
}
