package wire

// How frames come in and go out on the worker's side.
//
//  in   Reader.Next blocks for a header and returns with the reader's lock
//       held. The executor then takes the payload as one slice (Payload), or
//       in pieces that go straight from the socket to where they belong
//       (ReadFull), and calls Done before it executes. The lock exists for
//       ReadAhead alone: while the executor sits in a driver call that waits
//       for a host function, somebody must still read that function's answer.
//  out  Writer.Send may be called by any goroutine; frames go out whole, in
//       the order of the lock. Hold keeps a small frame back until the next
//       Send, so that data and the reply that follows it share one packet.

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// readBuffer is the size of the read buffer in bytes; frames larger than this
// are read into memory of their own.
const readBuffer = 256 << 10

// maxAhead bounds what ReadAhead keeps, in bytes. While a host function may be called, a client has less than that of copies
// to the device on their way (AHEAD in client/upload.c), so the function's end is always found.
const maxAhead = 128 << 20

// ErrAheadFull says that ReadAhead holds as much as it may.
var ErrAheadFull = errors.New("wire: read-ahead is full")

// Reader takes frames from a stream.
type Reader struct {
	mu    sync.Mutex
	s     Stream
	buf   []byte // outside Go's heap, so that slices of it may go to C
	r, w  int
	left  int    // payload bytes of the current frame not taken yet
	big   []byte // payload of a frame larger than buf
	ahead [][]byte
	nhead int    // bytes in ahead
	cur   []byte // current frame came from ahead: what is left of it
	mem   bool   // current frame is cur
	spare []byte // ReadAhead's buffer, so that slices into buf stay good
	fresh bool   // buf holds nothing of the current frame
	pause func() // before Next or Peek waits
}

// NewReader returns a reader of s.
func NewReader(s Stream) (*Reader, error) {
	b, err := unix.Mmap(-1, 0, readBuffer, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("wire: read buffer: %w", err)
	}
	return &Reader{s: s, buf: b}, nil
}

// BeforeRead has f called, on the caller's thread, before Next, Peek or Payload reads from the stream
// or waits for ReadAhead, which may take as long as the other side likes.
func (r *Reader) BeforeRead(f func()) { r.pause = f }

// Close frees the buffer; the stream stays open.
func (r *Reader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var err error
	for _, b := range [][]byte{r.buf, r.spare} {
		if b != nil {
			err = errors.Join(err, unix.Munmap(b))
		}
	}
	r.buf, r.spare = nil, nil
	return err
}

// fill makes at least n bytes available at r.r, n <= readBuffer.
func (r *Reader) fill(n int) error {
	if r.w-r.r >= n {
		return nil
	}
	if r.r == r.w {
		r.r, r.w = 0, 0
	} else if r.r+n > len(r.buf) {
		copy(r.buf, r.buf[r.r:r.w])
		r.r, r.w = 0, r.w-r.r
	}
	for r.w-r.r < n {
		m, err := r.s.Read2(r.buf[r.w:], nil)
		if err != nil {
			return err
		}
		r.w += m
	}
	return nil
}

// Buffered says whether the beginning of a frame is here without a read. It says no while ReadAhead
// waits for one. The caller has called Done.
func (r *Reader) Buffered() bool {
	if !r.mu.TryLock() {
		return false
	}
	defer r.mu.Unlock()
	return r.w > r.r || len(r.ahead) > 0
}

// Arrived is Buffered that also asks the stream, which is a system call for a socket.
func (r *Reader) Arrived() bool {
	if !r.mu.TryLock() {
		return false
	}
	defer r.mu.Unlock()
	return r.w > r.r || len(r.ahead) > 0 || r.s.Readable(0)
}

// Next reads the header of the next frame. On success the reader is locked
// until Done; on failure it is not.
func (r *Reader) Next(h *Request) error {
	if !r.mu.TryLock() { // ReadAhead has it, and may be reading
		if r.pause != nil {
			r.pause()
		}
		r.mu.Lock()
	}
	if len(r.ahead) > 0 {
		r.cur, r.ahead = r.ahead[0], r.ahead[1:]
		r.nhead -= len(r.cur)
		r.mem = true
		r.fresh = false
		// Checked when it was read.
		_ = h.Decode((*[RequestSize]byte)(r.cur))
		r.cur = r.cur[RequestSize:]
		r.left = len(r.cur)
		return nil
	}
	r.mem = false
	r.fresh = false
	r.short(RequestSize)
	err := r.header(h)
	if err != nil {
		r.mu.Unlock()
	}
	return err
}

// short calls pause if less than n bytes are buffered, which the caller needs next.
func (r *Reader) short(n int) {
	if r.w-r.r < n && r.pause != nil {
		r.pause()
	}
}

func (r *Reader) header(h *Request) error {
	if err := r.fill(RequestSize); err != nil {
		return err
	}
	if err := h.Decode((*[RequestSize]byte)(r.buf[r.r:])); err != nil {
		return err
	}
	r.r += RequestSize
	r.left = int(h.Size)
	return nil
}

// Left is the number of payload bytes of the current frame not taken yet.
func (r *Reader) Left() int { return r.left }

// Peek returns the next n payload bytes, n small, without leaving them in the
// stream: they count as taken. The slice is valid until the next call.
func (r *Reader) Peek(n int) ([]byte, error) {
	if n > r.left {
		return nil, ErrShort
	}
	r.left -= n
	if r.mem {
		p := r.cur[:n:n]
		r.cur = r.cur[n:]
		return p, nil
	}
	r.short(n)
	if n > len(r.buf) {
		if cap(r.big) < n {
			r.big = make([]byte, n)
		}
		r.big = r.big[:n]
		if err := r.straight(r.big); err != nil {
			return nil, err
		}
		return r.big, nil
	}
	if err := r.fill(n); err != nil {
		return nil, err
	}
	p := r.buf[r.r : r.r+n : r.r+n]
	r.r += n
	return p, nil
}

// Payload returns what is left of the payload as one slice, valid until the
// next frame is read.
func (r *Reader) Payload() ([]byte, error) { return r.Peek(r.left) }

// ReadFull fills dst with payload: what is buffered first, then straight from
// the stream.
func (r *Reader) ReadFull(dst []byte) error {
	if len(dst) > r.left {
		return ErrShort
	}
	r.left -= len(dst)
	if r.mem {
		copy(dst, r.cur)
		r.cur = r.cur[len(dst):]
		return nil
	}
	return r.straight(dst)
}

func (r *Reader) straight(dst []byte) error {
	n := copy(dst, r.buf[r.r:r.w])
	r.r += n
	dst = dst[n:]
	if len(dst) == 0 {
		return nil
	}
	// The buffer is empty now; whatever follows dst in the stream lands there
	// by the same system call.
	r.r, r.w = 0, 0
	for len(dst) > 0 {
		m, err := r.s.Read2(dst, r.buf)
		if err != nil {
			return err
		}
		if m > len(dst) {
			r.w = m - len(dst)
			m = len(dst)
		}
		dst = dst[m:]
	}
	return nil
}

// Skip drops what is left of the payload.
func (r *Reader) Skip() error {
	for r.left > 0 {
		if _, err := r.Peek(min(r.left, 64<<10)); err != nil {
			return err
		}
	}
	return nil
}

// Done ends the current frame's reading and unlocks the reader. Slices from
// Payload stay valid until the next Next.
func (r *Reader) Done() {
	r.mu.Unlock()
}

// ReadAhead moves frames that have arrived to a queue that Next serves first,
// and gives each to take; take returning true removes it from the queue. It
// returns when nothing more is at hand, or after wait without a frame, or with
// ErrAheadFull, or with the stream's error.
func (r *Reader) ReadAhead(wait time.Duration, take func(h *Request, payload []byte) bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.fresh {
		// The frame in execution may still be in use where it lies.
		if r.spare == nil {
			b, err := unix.Mmap(-1, 0, readBuffer, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				return fmt.Errorf("wire: read-ahead buffer: %w", err)
			}
			r.spare = b
		}
		n := copy(r.spare, r.buf[r.r:r.w])
		r.buf, r.spare = r.spare, r.buf
		r.r, r.w = 0, n
		r.fresh = true
	}
	for {
		if r.w == r.r && !r.s.Readable(wait) {
			return nil
		}
		wait = 0
		if r.nhead > maxAhead {
			return ErrAheadFull
		}
		var h Request
		if err := r.header(&h); err != nil {
			return err
		}
		f := make([]byte, RequestSize+int(h.Size))
		h.Encode((*[RequestSize]byte)(f))
		r.left = 0
		if err := r.straight(f[RequestSize:]); err != nil {
			return err
		}
		if take(&h, f[RequestSize:]) {
			continue
		}
		r.ahead = append(r.ahead, f)
		r.nhead += len(f)
	}
}

// holdMax is the most a Writer keeps back, in bytes.
const holdMax = 16 << 10

// Writer sends frames on a stream; safe for concurrent use.
type Writer struct {
	mu    sync.Mutex
	s     Stream
	err   error
	hdr   [ReplySize]byte
	held  []byte
	last  []byte // payload that comes behind held, see HoldLast
	sent  func() // to be called once last has been sent
	parts [5][]byte
	out   uint64
	wrote uint32 // frames that write to the client's memory
}

// NewWriter returns a writer to s.
func NewWriter(s Stream) *Writer {
	return &Writer{s: s, held: make([]byte, 0, holdMax+ReplySize)}
}

// Send sends one frame whose payload is a followed by b, without copying
// them. The first error sticks.
func (w *Writer) Send(h *Reply, a, b []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	n := len(a) + len(b)
	if n > MaxPayload {
		return fmt.Errorf("wire: frame of kind %d with %d bytes: %w", h.Kind, n, ErrRange)
	}
	w.encode(h, n)
	return w.write(w.hdr[:], a, b)
}

// encode makes the header of a frame whose payload has n bytes. mu is held.
func (w *Writer) encode(h *Reply, n int) {
	if h.Kind == FrameData || h.Kind == FrameHost {
		w.wrote++
	}
	h.Size = uint32(n)
	h.Encode(&w.hdr)
}

// write sends what was held and the parts of a frame behind it. mu is held.
func (w *Writer) write(hdr, a, b []byte) error {
	w.parts = [5][]byte{w.held, w.last, hdr, a, b}
	for _, p := range w.parts {
		w.out += uint64(len(p))
	}
	w.err = w.s.Write(w.parts[:])
	w.parts = [5][]byte{}
	w.held = w.held[:0]
	if w.last = nil; w.sent != nil {
		w.sent()
		w.sent = nil
	}
	return w.err
}

// Hold is Send, except that a small frame may wait for the next Send or
// Flush, which must follow soon.
func (w *Writer) Hold(h *Reply, a, b []byte) error {
	n := len(a) + len(b)
	w.mu.Lock()
	if n+ReplySize+len(w.held) > holdMax || w.last != nil {
		w.mu.Unlock()
		return w.Send(h, a, b)
	}
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	w.hold(h, n, a, b)
	return nil
}

// hold keeps back a frame, or its beginning. mu is held.
func (w *Writer) hold(h *Reply, n int, parts ...[]byte) {
	w.encode(h, n)
	w.held = append(w.held, w.hdr[:]...)
	for _, p := range parts {
		w.held = append(w.held, p...)
	}
}

// HoldLast is Hold for a frame of any size. It does not copy b, but sends it together with the next frame: a client that waits for
// both gets one message instead of two. b must not change until sent is called. HoldLast always has it called once, also after an
// error. sent must not use w.
func (w *Writer) HoldLast(h *Reply, a, b []byte, sent func()) error {
	n := len(a) + len(b)
	if n <= holdMax/4 || n > MaxPayload || len(a) > holdMax/4 {
		err := w.Hold(h, a, b)
		sent()
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.held)+ReplySize+len(a) > holdMax || w.last != nil {
		if err := w.flush(); err != nil {
			sent()
			return err
		}
	}
	if w.err != nil {
		sent()
		return w.err
	}
	w.hold(h, n, a)
	w.last, w.sent = b, sent
	return nil
}

// Flush sends what Hold kept back.
func (w *Writer) Flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.flush()
}

// Wrote is Flush, and gives how many frames have been sent that write to the client's memory (DATA and HOST), modulo 2^32.
func (w *Writer) Wrote() (uint32, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.wrote, w.flush()
}

func (w *Writer) flush() error {
	if w.err != nil || len(w.held) == 0 {
		return w.err
	}
	return w.write(nil, nil, nil)
}

// Raw sends bytes that are no frame (the WELCOME).
func (w *Writer) Raw(b []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	w.parts[0] = b
	w.err = w.s.Write(w.parts[:1])
	w.parts[0] = nil
	return w.err
}

// Sent is the number of bytes sent.
func (w *Writer) Sent() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out
}
