package worker

// Bulk connections: further connections of the session's client, for the bytes of large copies.
//
//	supervisor or daemon   passes the socket over the session's link
//	take, hear             one goroutine for each, 5 s: the HELLO if nobody has read it, BULK_KEY
//	readParts              to the device: reads a part into a free slot, notes its number, answers
//	copyInBulk             the executor's: copies a part from its slot to the device, and records an event
//	bulk_out.go            from the device
//
// Every connection has a goroutine, which blocks in the kernel. A slot is free, or holds a part that is being read, that has been
// read (parts), or that the device copies (busy). A reader that finds no free slot asks for the events of the busy ones:
// it cannot rely on a command to free one. The memory of the slots is never freed, so readers may write to it at any
// time. It is registered with the driver in one context, and in another one when that is destroyed. Copies from memory that
// is not registered are slower, but correct.
//
// Locking: mu guards all fields that are not the executor's own. The bytes of a slot belong to the goroutine that took its number
// out of a list. The executor calls the driver with mu held in leave only, and readers only to ask for events.

/*
#include "driver.h"
*/
import "C"

import (
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const (
	bulkSlots = 32 // parts to the device that a session keeps at a time
	fewAsking = 2  // connections without a key, before the client has asked for one
)

// A bulkConn is a bulk connection.
type bulkConn struct {
	fd        int
	direction uint32
	out       wire.Stream
	gone      bool // to the client: it has hung up; outStaging.mu guards it

	writing sync.Mutex // to the worker: an answer. b.mu may be taken while it is held
	left    error      // to the worker: why none can be given any more; bulk.mu guards it
}

// A bulkSlot has the bytes of a part to the device.
type bulkSlot struct {
	buf     []byte
	size    int    // of the part
	ev, ctx uint64 // while it is busy
}

// A bulkDrop is a part that is to be thrown away when it arrives. It can only arrive over the connections that were open when the client
// said so.
type bulkDrop struct {
	number uint64
	from   []*bulkConn
}

type bulk struct {
	s    *session
	most int           // connections for each direction; 0: none. It does not change once the session runs
	sent atomic.Uint64 // bytes to the client

	// The executor's own.
	mem    []byte
	home   uint64 // context that mem is registered in, 0 for none
	failed uint64 // context in which that failed

	mu       sync.Mutex
	cond     *sync.Cond // a slot is free, or a part was dropped
	key      [16]byte
	opened   bool   // the client has been given the key
	asking   int    // connections that have not said their key
	open     [2]int // by direction
	conns    map[*bulkConn]bool
	slots    []bulkSlot
	free     []int
	busy     []int // the oldest first
	parts    map[uint64]int
	arriving map[uint64]*bulkConn
	drops    []bulkDrop // the oldest first
	looking  bool       // a reader asks for events
}

func (b *bulk) init(s *session) {
	b.s = s
	b.cond = sync.NewCond(&b.mu)
	b.conns, b.parts, b.arriving = make(map[*bulkConn]bool), make(map[uint64]int), make(map[uint64]*bulkConn)
}

// --- commands; the executor's ---

// bulkOp executes a frame about bytes that do not come in frames, but by bulk connections or from the store of content. It does so whatever becomes of
// its context.
func (s *session) bulkOp(p []byte) int32 {
	s.dec.Reset(p)
	switch s.hdr.Op {
	case wire.OpBulkOpen:
		return s.bulkOpen()
	case wire.OpBulkDrop:
		var m wire.BulkDrop
		m.Decode(&s.dec)
		if s.dec.Done() != nil {
			return s.malformed()
		}
		s.bulk.drop(m.Part)
		return 0
	case wire.OpContentFind:
		return s.contentFind()
	case wire.OpContentKeep:
		return s.contentKeep()
	case wire.OpCopyInStored:
		return s.copyInStored()
	default:
		return s.copyInBulk()
	}
}

// bulkOpen gives the client the key.
func (s *session) bulkOpen() int32 {
	if s.dec.Done() != nil {
		return s.malformed()
	}
	b := &s.bulk
	if b.most == 0 {
		return C.CUDA_ERROR_NOT_SUPPORTED
	}
	if err := b.prepare(); err != nil {
		s.log.Warn("no bulk connections", "error", err)
		return C.CUDA_ERROR_NOT_SUPPORTED
	}
	if s.wantCtx(s.hdr.Ctx) == 0 {
		b.register()
	}
	(&wire.BulkOpenReply{Key: b.key, Session: uint32(s.number), Most: uint32(b.most)}).Encode(&s.enc)
	return 0
}

// prepare makes the key and the slots, if there are none.
func (b *bulk) prepare() error {
	if b.mem != nil {
		return nil
	}
	mem, err := unix.Mmap(-1, 0, bulkSlots*wire.MaxBulkPart, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("memory of bulk connections: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, err := rand.Read(b.key[:]); err != nil {
		return errors.Join(err, unix.Munmap(mem))
	}
	b.mem, b.opened = mem, true
	for i := range bulkSlots {
		b.slots = append(b.slots, bulkSlot{buf: mem[i*wire.MaxBulkPart : (i+1)*wire.MaxBulkPart : (i+1)*wire.MaxBulkPart]})
		b.free = append(b.free, i)
	}
	return nil
}

// register makes the slots known to the driver in the current context, unless they are in another.
func (b *bulk) register() {
	ctx := b.s.curReal
	if b.home != 0 || ctx == 0 || b.failed == ctx || b.mem == nil {
		return
	}
	if rc := C.sl_host_register(at(b.mem), C.uint64_t(len(b.mem))); rc != 0 {
		b.s.log.Debug("memory of bulk connections not registered", "result", rc)
		b.failed = ctx
		return
	}
	b.home = ctx
}

// copyInBulk copies a part to the device. Its slot is given back in any case.
func (s *session) copyInBulk() int32 {
	var m wire.CopyInBulk
	m.Decode(&s.dec)
	b := &s.bulk
	if s.dec.Done() != nil || m.Last > 1 {
		return s.malformed()
	}
	q := b.claim(m.Part, m.Size)
	if q < 0 {
		return s.malformed()
	}
	s.given = m.Stream
	s.counts.BytesIn += wire.BulkPartSize + uint64(m.Size)
	ev, ctx, rc := s.copyPart(&m, b.slots[q].buf[:m.Size])
	b.release(q, ev, ctx)
	return rc
}

// copyPart is copyIn of a part's bytes; the event says when they have been copied.
func (s *session) copyPart(m *wire.CopyInBulk, buf []byte) (ev, ctx uint64, rc int32) {
	var stream uint64
	if rc = s.wantCtx(s.hdr.Ctx); rc == 0 {
		stream, ctx, rc = s.copyTarget(m.Stream)
	}
	if rc != 0 {
		return 0, 0, rc
	}
	s.give(m.Stream)
	if m.Last != 0 {
		defer s.noteArrived(m.Stream, stream, ctx, true)
	}
	s.bulk.register()
	w := s.copyBegins(wire.SpanCopyIn, m.Stream, ctx, stream)
	rc = int32(C.sl_htod(C.uint64_t(m.Dst), at(buf), C.uint64_t(len(buf)), C.uint64_t(stream)))
	w.copied(uint64(len(buf)), rc)
	if rc != 0 {
		return 0, 0, rc
	}
	ev, rc = s.recordIn(ctx, stream)
	return ev, ctx, rc
}

// claim takes a part that has been read, -1 if there is none of that size.
func (b *bulk) claim(number uint64, size uint32) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	q, ok := b.parts[number]
	if !ok || b.slots[q].size != int(size) {
		return -1
	}
	delete(b.parts, number)
	return q
}

// release gives a slot back, at once or when an event has completed.
func (b *bulk) release(q int, ev, ctx uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ev != 0 {
		b.slots[q].ev, b.slots[q].ctx = ev, ctx
		b.busy = append(b.busy, q)
	} else {
		b.free = append(b.free, q)
	}
	b.cond.Broadcast()
}

// drop throws a part away, or remembers to.
func (b *bulk) drop(number uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if q, ok := b.parts[number]; ok {
		delete(b.parts, number)
		b.free = append(b.free, q)
		b.cond.Broadcast()
		return
	}
	d := bulkDrop{number: number}
	if c := b.arriving[number]; c != nil {
		d.from = []*bulkConn{c}
	} else {
		for c := range b.conns {
			if c.direction == wire.BulkToWorker {
				d.from = append(d.from, c)
			}
		}
	}
	if len(d.from) == 0 {
		return // it cannot arrive any more
	}
	// The oldest has most likely been lost with its connection. If it arrives after all, it keeps a slot.
	if len(b.drops) == wire.MaxBulkDrops {
		b.drops = slices.Delete(b.drops, 0, 1)
	}
	b.drops = append(b.drops, d)
	b.cond.Broadcast()
}

// leave lets go of a context that is about to be destroyed and is idle.
func (b *bulk) leave(ctx uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	home := b.home == ctx && ctx != 0
	b.busy = slices.DeleteFunc(b.busy, func(q int) bool {
		n := &b.slots[q]
		if n.ctx != ctx && !home {
			return false
		}
		if n.ctx != ctx { // its copy is in another context, and its memory is about to be no longer registered
			C.sl_event_sync(C.uint64_t(n.ev))
			b.s.events.put(n.ctx, n.ev)
		}
		n.ev, n.ctx = 0, 0
		b.free = append(b.free, q)
		return true
	})
	b.cond.Broadcast()
	if home {
		C.sl_host_unregister(at(b.mem))
		b.home = 0
	}
	if b.failed == ctx {
		b.failed = 0
	}
}

// --- connections ---

// take is given a new connection, and must not wait.
func (b *bulk) take(fd int, raw bool) {
	b.mu.Lock()
	most := fewAsking // nobody can have the key
	if b.opened {
		most = 2 * b.most
	}
	crowd := b.asking >= most
	if !crowd {
		b.asking++
	}
	b.mu.Unlock()
	if crowd { // no reason is given: the daemon's own answer may not have been written yet
		unix.Close(fd)
		return
	}
	go b.serve(fd, raw)
}

// serve serves a connection until its end.
func (b *bulk) serve(fd int, raw bool) {
	runtime.LockOSThread()
	defer unix.Close(fd)
	c, err := b.hear(fd, raw)
	if c == nil {
		b.s.log.Info("no bulk connection", "reason", err)
		return
	}
	toClient := err == nil && c.direction == wire.BulkToClient
	if toClient {
		b.s.out.join() // before the client knows: what it asks for next may go by this connection
	}
	if err == nil {
		err = writeAll(fd, wire.AppendWelcome(nil, wire.StatusOK, nil))
	}
	switch {
	case toClient && err != nil:
		b.s.out.lose(nil)
	case toClient:
		err = b.s.out.writeParts(c)
	case err == nil:
		relaxCapture()
		err = b.readParts(c)
	}
	b.ended(c)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		b.s.log.Debug("bulk connection ended", "error", err)
	} else {
		b.s.log.Warn("bulk connection given up", "error", err)
	}
}

// hear reads and judges what a connection begins with. If it returns no connection, the client has its refusal already.
func (b *bulk) hear(fd int, raw bool) (c *bulkConn, err error) {
	counted := false
	defer func() {
		if !counted {
			b.mu.Lock()
			b.asking--
			b.mu.Unlock()
		}
	}()
	if err := unix.SetNonblock(fd, false); err != nil {
		return nil, err
	}
	if raw {
		if err := readFurtherHello(fd, wire.SessionBulk, "where a bulk connection is to be made"); err != nil {
			return nil, err
		}
	}
	var p [wire.BulkKeySize]byte
	if err := readWithin(fd, p[:], helloTime); err != nil {
		return nil, err
	}
	var m wire.BulkKey
	m.Decode(wire.NewDecoder(p[:]))
	c = &bulkConn{fd: fd, direction: m.Direction}
	counted = true
	if status, err := b.admit(c, &m, wire.Plain(&m, p[:])); err != nil {
		refuseSocket(fd, status, err)
		return nil, err
	}
	return c, b.tune(c)
}

// admit counts a connection that has said its key.
func (b *bulk) admit(c *bulkConn, m *wire.BulkKey, plain bool) (uint32, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asking--
	switch right := subtle.ConstantTimeCompare(m.Key[:], b.key[:]) == 1; {
	case !right || !b.opened:
		return wire.StatusLease, errKey
	case m.Direction > wire.BulkToClient:
		return wire.StatusLease, fmt.Errorf("a bulk connection of direction %d is asked for, want %d or %d", m.Direction, wire.BulkToWorker, wire.BulkToClient)
	case !plain:
		return wire.StatusLease, errors.New("a bulk connection is asked for with something where zeroes belong")
	case b.open[m.Direction] >= b.most:
		return wire.StatusBusy, fmt.Errorf("this session has %d bulk connections of direction %d, as many as it may", b.most, m.Direction)
	}
	b.open[m.Direction]++
	b.conns[c] = true
	return 0, nil
}

// tune sets a connection's time limits.
func (b *bulk) tune(c *bulkConn) (err error) {
	_ = wire.Tune(c.fd, b.s.keepalive)
	tv := unix.NsecToTimeval(b.s.keepalive.Nanoseconds())
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return fmt.Errorf("bulk connection: %w", err)
	}
	c.out, err = wire.NewSocketStream(c.fd, b.s.keepalive)
	return err
}

// ended forgets a connection. Parts that were dropped can no longer arrive on it.
func (b *bulk) ended(c *bulkConn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open[c.direction]--
	delete(b.conns, c)
	b.drops = slices.DeleteFunc(b.drops, func(d bulkDrop) bool {
		return !slices.ContainsFunc(d.from, func(c *bulkConn) bool { return b.conns[c] })
	})
}

// Errors of a read that took longer than the keep-alive time: nothing came, or only a part.
var (
	errIdle = errors.New("nothing came")
	errRest = errors.New("the rest did not come")
)

// read fills p, or gives errIdle if nothing of it has come.
func (c *bulkConn) read(p []byte) error {
	for n := 0; n < len(p); {
		r, _, e := syscall.Syscall6(unix.SYS_RECVFROM, uintptr(c.fd), uintptr(unsafe.Pointer(&p[n])), uintptr(len(p)-n), unix.MSG_WAITALL, 0, 0)
		switch {
		case e == unix.EINTR:
		case e == unix.EAGAIN && n == 0:
			return errIdle
		case e == unix.EAGAIN:
			return errRest
		case e != 0:
			return os.NewSyscallError("recv", e)
		case r == 0 && n == 0:
			return io.EOF
		case r == 0:
			return io.ErrUnexpectedEOF
		default:
			n += int(r)
		}
	}
	return nil
}

// readParts reads parts to the device until the connection ends.
func (b *bulk) readParts(c *bulkConn) error {
	var h [wire.BulkPartSize]byte
	for {
		err := c.read(h[:])
		if errors.Is(err, errIdle) {
			continue
		}
		if err != nil {
			return err
		}
		var m wire.BulkPart
		if m, err = parseBulkPart(&h); err != nil {
			return err
		}
		stop := b.reassure(c)
		q, err := b.begin(c, m.Number)
		stop()
		if err != nil {
			return err
		}
		if q < 0 {
			err = c.discard(int(m.Size))
		} else {
			err = c.read(b.slots[q].buf[:m.Size])
		}
		b.arrived(&m, q, err == nil)
		if err != nil {
			return fmt.Errorf("within part %d: %w", m.Number, err)
		}
		c.writing.Lock()
		err = c.answer(m.Number)
		c.writing.Unlock()
		if err != nil {
			return err
		}
	}
}

// answer says that a part has been taken, or, of number 0, that the next one has to wait. c.writing is held.
func (c *bulkConn) answer(number uint64) error {
	var e wire.Encoder
	(&wire.BulkTaken{Number: number}).Encode(&e)
	return c.out.Write([][]byte{e.Buf()})
}

// reassure tells the client now and then, until stop is called, that its part has to wait for a slot, so that the client does not take the
// connection for dead. A connection that is dead is noticed in this way too. Once stop has returned, nothing is written any more: the part's
// answer comes next, or the descriptor is closed.
func (b *bulk) reassure(c *bulkConn) (stop func()) {
	every := max(b.s.keepalive/3, time.Millisecond)
	over := false // under c.writing, as t
	var t *time.Timer
	c.writing.Lock()
	defer c.writing.Unlock()
	t = time.AfterFunc(every, func() {
		c.writing.Lock()
		defer c.writing.Unlock()
		if over {
			return
		}
		if err := c.answer(0); err != nil {
			b.mu.Lock()
			defer b.mu.Unlock()
			c.left = err
			b.cond.Broadcast()
			return
		}
		t.Reset(every)
	})
	return func() {
		c.writing.Lock()
		defer c.writing.Unlock()
		over = true
		t.Stop()
	}
}

// parseBulkPart reads what begins a part to the device.
func parseBulkPart(h *[wire.BulkPartSize]byte) (m wire.BulkPart, err error) {
	m.Decode(wire.NewDecoder(h[:]))
	if m.Number == 0 || m.Size == 0 || m.Size > wire.MaxBulkPart || m.Offset != 0 || m.After != 0 {
		return m, fmt.Errorf("part %d of %d bytes, with %#x and %#x where 0 belongs", m.Number, m.Size, m.Offset, m.After)
	}
	return m, nil
}

// discard reads n bytes and throws them away.
func (c *bulkConn) discard(n int) error {
	p := make([]byte, min(n, 64<<10))
	for n > 0 {
		k := min(n, len(p))
		if err := c.read(p[:k]); err != nil {
			return err
		}
		n -= k
	}
	return nil
}

// begin gives a slot for a part that arrives, -1 if it is to be thrown away. It waits for the device to leave a slot if need be.
func (b *bulk) begin(c *bulkConn, number uint64) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.parts[number]; ok || b.arriving[number] != nil {
		return 0, fmt.Errorf("part %d is here already", number)
	}
	b.arriving[number] = c
	looked := false
	for wait := 20 * time.Microsecond; ; {
		q, ok := -1, b.dropped(number) >= 0
		if !ok {
			q, ok = b.room()
		}
		if ok || c.left != nil {
			if looked {
				b.cond.Broadcast() // another one goes on asking
			}
			if !ok {
				delete(b.arriving, number)
				return 0, c.left
			}
			return q, nil
		}
		if len(b.busy) == 0 || b.looking {
			b.cond.Wait()
			continue
		}
		b.looking, looked = true, true
		b.mu.Unlock()
		time.Sleep(wait)
		wait = min(2*wait, 2*time.Millisecond)
		b.mu.Lock()
		b.looking = false
	}
}

// room takes a free slot, if there is one. mu is held.
func (b *bulk) room() (int, bool) {
	b.look()
	n := len(b.free)
	if n == 0 {
		return -1, false
	}
	q := b.free[n-1]
	b.free = b.free[:n-1]
	return q, true
}

// look frees the slots whose copies are over, if none is free. mu is held.
func (b *bulk) look() {
	if len(b.free) > 0 {
		return
	}
	b.busy = slices.DeleteFunc(b.busy, func(q int) bool {
		n := &b.slots[q]
		if C.sl_event_query(C.uint64_t(n.ev)) == C.CUDA_ERROR_NOT_READY {
			return false
		}
		b.s.events.put(n.ctx, n.ev)
		n.ev, n.ctx = 0, 0
		b.free = append(b.free, q)
		return true
	})
}

// dropped gives where a part is among those to be thrown away, or -1. mu is held.
func (b *bulk) dropped(number uint64) int {
	return slices.IndexFunc(b.drops, func(d bulkDrop) bool { return d.number == number })
}

// arrived ends what begin began; whole: all of the part has been read.
func (b *bulk) arrived(m *wire.BulkPart, q int, whole bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.arriving, m.Number)
	drop := b.dropped(m.Number)
	if drop >= 0 {
		b.drops = slices.Delete(b.drops, drop, drop+1)
	}
	switch {
	case q < 0:
	case whole && drop < 0:
		b.slots[q].size = int(m.Size)
		b.parts[m.Number] = q
	default:
		b.free = append(b.free, q)
		b.cond.Broadcast()
	}
}
