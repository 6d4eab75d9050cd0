package wire

// A stream that outlives its connection, on the worker's side. docs/protocol.md,
// "Lost connections", has the bytes.
//
//	out  Write copies into ring, and push sends from there, a PIECE in front of
//	     each part. What the client has not said to have received stays in ring.
//	     A small write with nothing before it is sent first and copied afterwards,
//	     since the client may be waiting for it.
//	in   read takes pieces apart. A thread that waits for room in ring reads ahead
//	     into side meanwhile, since the client's word may be behind frames that the
//	     executor cannot take while it waits for the writer. So does Watch.
//	cut  The first read or write that fails shuts the socket down, which ends all
//	     others on it. Read2 and a Write without room then wait. Attach replaces
//	     the old socket by the new one, under the same number, and sends again
//	     what is missing. Watch ends the stream when the grace is over.
//
// Locks, in the order they are taken: rmu (who reads the socket and has what was
// read), wmu (who writes the socket), mu (the state, held for a few instructions).

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/boottime"
)

// Errors that end a lasting stream.
var (
	// ErrGrace says that the client has not come back in time.
	ErrGrace = errors.New("wire: the connection was lost, and the client did not come back in time")
	// ErrPosition says that the client claims to have received what was not sent, or less than before.
	ErrPosition = errors.New("wire: the client says to have received what was not sent to it, or less than it said before")
	// ErrLate says that an attempt to go on was overtaken by a later one of the client's.
	ErrLate  = errors.New("wire: the client has gone on over another connection since")
	errPiece = errors.New("wire: malformed piece")
	errAhead = errors.New("wire: the client has sent more than the window allows")
	errCut   = errors.New("wire: connection lost")
)

const (
	rawBuffer  = 64 << 10  // of pieces that have been read and not taken apart
	straightTo = 32 << 10  // reads of this size and more go past that buffer
	ringPart   = 256 << 10 // copied into the ring at once, so that it is sent from the processor's cache
	pieceMost  = 1 << 20   // bytes in one piece
	firstMost  = 768 << 10 // a write of more is copied and sent at the same time instead of one after the other
	aheadWait  = 50 * time.Millisecond
)

// LastingStream is a stream over connections that are made again when they are lost.
type LastingStream struct {
	sock      *socketStream // its number stays; the socket under it changes
	keepalive time.Duration

	rmu      sync.Mutex
	raw      []byte
	rawAt    int
	rawN     int
	left     int         // bytes of the current piece that have not been taken
	side     []byte      // bytes that were read ahead
	heard    atomic.Bool // a piece came over this connection
	met      atomic.Bool // the client was heard over an earlier one, or has come back: it has the WELCOME
	leftRead atomic.Uint64

	wmu  sync.Mutex
	sent uint64        // bytes written to this connection or an earlier one that arrived there
	told atomic.Uint64 // position that the client was last told
	hdr  [PieceSize]byte
	out  [8][]byte // the parts of a piece, its head in front

	ring  []byte
	base  uint64        // position of the stream at the ring's beginning; written under wmu by Write, which may read it without
	put   atomic.Uint64 // bytes that Write has been given
	taken atomic.Uint64 // bytes that Read2 has given

	waits  atomic.Int32  // writers that wait for room
	more   chan struct{} // pusher has something to send
	wakeup int           // eventfd: there is another connection under the socket's number, see hangUp

	mu    sync.Mutex
	cond  sync.Cond
	acked uint64 // bytes that the client has received
	cut   bool   // the connection is lost
	rdone bool   // and everything that came over it has been read
	bye   bool
	since time.Time     // of the cut, for the grace, which does not run while the machine is suspended
	lost  time.Duration // of the cut as well, by a clock that counts suspended time (boottime.Now), for messages and counters
	cuts  int
	ended error
}

// NewLastingStream makes a stream over a socket; keepalive is as with NewSocketStream.
func NewLastingStream(fd int, keepalive time.Duration) (*LastingStream, error) {
	sock, err := NewSocketStream(fd, keepalive)
	if err != nil {
		return nil, err
	}
	ring, err := unix.Mmap(-1, 0, PieceWindow, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("wire: memory of what was sent: %w", err)
	}
	wakeup, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("wire: eventfd: %w", err), unix.Munmap(ring))
	}
	s := &LastingStream{sock: sock.(*socketStream), keepalive: keepalive, ring: ring, raw: make([]byte, rawBuffer), wakeup: wakeup}
	s.cond.L = &s.mu
	s.more = make(chan struct{}, 1)
	go s.pusher()
	return s, nil
}

// FD is the number of the socket, whatever connection it is.
func (s *LastingStream) FD() int { return s.sock.fd }

// Keepalive is what NewLastingStream was given.
func (s *LastingStream) Keepalive() time.Duration { return s.keepalive }

// Close ends the stream.
func (s *LastingStream) Close() error {
	s.end(io.ErrClosedPipe)
	s.rmu.Lock()
	defer s.rmu.Unlock()
	s.wmu.Lock()
	defer s.wmu.Unlock()
	return errors.Join(unix.Munmap(s.ring), s.sock.Close(), unix.Close(s.wakeup))
}

// end ends the stream for good; the first reason counts.
func (s *LastingStream) end(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended == nil {
		s.ended = err
		s.shut()
		s.wakePusher()
	}
	s.cond.Broadcast()
	return s.ended
}

// shut ends all reads and writes of the socket. A client that has said goodbye waits for the end of its connection, which is to be that
// of the process: then it ends reads alone. mu is held.
func (s *LastingStream) shut() {
	how := unix.SHUT_RDWR
	if s.bye {
		how = unix.SHUT_RD
	}
	_ = unix.Shutdown(s.sock.fd, how)
}

// lose notes that the connection is lost. It is called with rmu or wmu held, so that the connection is the one that failed.
// all says that nothing more can be read from it.
func (s *LastingStream) lose(all bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rdone = s.rdone || all
	if !s.cut {
		s.cut, s.since, s.lost = true, time.Now(), boottime.Now()
		s.cuts++
		s.shut()
	}
	s.cond.Broadcast()
}

// wake has all look again who wait.
func (s *LastingStream) wake() {
	s.mu.Lock()
	s.cond.Broadcast()
	s.mu.Unlock()
}

func (s *LastingStream) isCut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cut || s.ended != nil
}

// Cuts says how often the connection was lost.
func (s *LastingStream) Cuts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cuts
}

// ---- in ----

// Read2 reads into a alone, unless that is empty.
func (s *LastingStream) Read2(a, b []byte) (int, error) {
	if len(a) == 0 {
		a = b
	}
	if len(a) == 0 {
		return 0, nil
	}
	for {
		s.rmu.Lock()
		n, err := s.read(a)
		s.rmu.Unlock()
		s.readerLeft()
		switch {
		case err == nil:
			s.tell()
			return n, nil
		case !errors.Is(err, errCut):
			return 0, s.end(err)
		}
		if err := s.awaitConnection(); err != nil {
			return 0, err
		}
	}
}

// readerLeft lets writers that wait for room read for themselves.
func (s *LastingStream) readerLeft() {
	s.leftRead.Add(1)
	if s.waits.Load() > 0 {
		s.wake()
	}
}

func (s *LastingStream) awaitConnection() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.cut && s.rdone && s.ended == nil && !s.bye {
		s.cond.Wait()
	}
	if s.bye {
		return io.EOF
	}
	return s.ended
}

// read takes at least one byte of the stream. rmu is held.
func (s *LastingStream) read(p []byte) (int, error) {
	if len(s.side) > 0 {
		n := copy(p, s.side)
		if s.side = s.side[n:]; len(s.side) == 0 {
			s.side = nil
		}
		s.taken.Add(uint64(n))
		return n, nil
	}
	for {
		if s.left > 0 && s.rawAt < s.rawN {
			n := copy(p, s.raw[s.rawAt:min(s.rawN, s.rawAt+s.left)])
			s.rawAt += n
			s.left -= n
			s.taken.Add(uint64(n))
			return n, nil
		}
		if s.left > 0 && min(s.left, len(p)) >= straightTo {
			n, err := s.sock.Read2(p[:min(s.left, len(p))], nil)
			if err != nil {
				s.lose(true)
				return 0, errCut
			}
			s.left -= n
			s.taken.Add(uint64(n))
			return n, nil
		}
		if err := s.next(); err != nil {
			return 0, err
		}
	}
}

// next takes the head of a piece from raw, or fills raw.
func (s *LastingStream) next() error {
	if s.left == 0 && s.rawN-s.rawAt >= PieceSize {
		return s.head()
	}
	s.rawN = copy(s.raw, s.raw[s.rawAt:s.rawN])
	s.rawAt = 0
	n, err := s.sock.Read2(s.raw[s.rawN:], nil)
	if err != nil {
		s.lose(true)
		return errCut
	}
	s.rawN += n
	return nil
}

// head begins a piece.
func (s *LastingStream) head() error {
	var h Piece
	h.get(s.raw[s.rawAt : s.rawAt+PieceSize])
	s.rawAt += PieceSize
	if h.Flags&^PieceBye != 0 || h.Size > PieceWindow || h.Flags&PieceBye != 0 && h.Size != 0 {
		return errPiece
	}
	s.left = int(h.Size)
	s.heard.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.Received < s.acked || h.Received > s.put.Load() {
		return ErrPosition
	}
	if h.Received > s.acked {
		s.acked = h.Received
		if s.waits.Load() > 0 {
			s.cond.Broadcast()
		}
	}
	if h.Flags&PieceBye != 0 {
		s.bye = true
		s.cond.Broadcast()
		return io.EOF
	}
	return nil
}

// ahead reads what comes within a time into side. rmu is held.
func (s *LastingStream) ahead(wait time.Duration) error {
	for first := true; ; {
		if s.left > 0 && s.rawAt < s.rawN {
			n := min(s.left, s.rawN-s.rawAt)
			if len(s.side)+n > PieceWindow {
				return errAhead
			}
			s.side = append(s.side, s.raw[s.rawAt:s.rawAt+n]...)
			s.rawAt += n
			s.left -= n
			continue
		}
		if s.left > 0 || s.rawN-s.rawAt < PieceSize {
			if !first || !s.sock.Readable(wait) {
				return nil
			}
			first = false
		}
		if err := s.next(); err != nil {
			return err
		}
	}
}

// Readable waits until Read2 would not block, or for the time given.
func (s *LastingStream) Readable(wait time.Duration) bool {
	if s.rmu.TryLock() {
		have := len(s.side) > 0 || s.left > 0 && s.rawAt < s.rawN
		s.rmu.Unlock()
		s.readerLeft()
		if have {
			return true
		}
	}
	if s.isCut() { // the old socket is at its end, which is no news
		time.Sleep(wait)
		return false
	}
	return s.sock.Readable(wait)
}

// ---- out ----

// Write keeps all of the parts, and sends them if there is a connection.
func (s *LastingStream) Write(parts [][]byte) error {
	if s.sendFirst(parts) {
		s.tell()
		return s.whyEnded()
	}
	for _, p := range parts {
		for len(p) > 0 {
			room, err := s.room()
			if err != nil {
				return err
			}
			n := min(len(p), room, ringPart)
			put := s.put.Load()
			s.keep(put, p[:n])
			s.put.Store(put + uint64(n))
			if p = p[n:]; n == ringPart {
				s.wakePusher()
			}
		}
	}
	s.push()
	return s.whyEnded()
}

// whyEnded is the error that has ended the stream for good; nil while it goes on.
func (s *LastingStream) whyEnded() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

// keep copies into ring what comes at that position of the stream. Write alone calls it.
func (s *LastingStream) keep(pos uint64, p []byte) {
	k := copy(s.ring[(pos-s.base)%PieceWindow:], p)
	copy(s.ring, p[k:])
}

// sendFirst sends all of the parts as one piece and then copies them into ring. It does nothing and says false unless there is a
// connection, everything before has been sent, nobody else writes, and the parts are few and fit.
func (s *LastingStream) sendFirst(parts [][]byte) bool {
	var n int
	for _, p := range parts {
		n += len(p)
	}
	if n > firstMost || len(parts) >= len(s.out) || !s.wmu.TryLock() {
		return false
	}
	defer s.wmu.Unlock()
	put, taken := s.put.Load(), s.taken.Load()
	room, err := s.free()
	if put != s.sent || n > room || err != nil || s.isCut() {
		return false
	}
	// The client has everything: begin where the ring was used last time, which is still in the processor's cache.
	if room == PieceWindow {
		s.base = put
	}
	// Before the bytes, which the client may acknowledge at once. Nobody reads them in ring without wmu.
	s.put.Store(put + uint64(n))
	s.piece(taken, n)
	copy(s.out[1:], parts)
	if err := s.sock.Write(s.out[:1+len(parts)]); err != nil {
		s.lose(false)
	} else {
		s.sent = put + uint64(n)
		s.told.Store(taken)
	}
	for _, p := range parts {
		s.keep(put, p)
		put += uint64(len(p))
	}
	clear(s.out[:])
	return true
}

// piece makes the head of a piece of n bytes the first of the parts to send. wmu is held.
func (s *LastingStream) piece(taken uint64, n int) {
	h := Piece{Received: taken, Size: uint32(n)}
	h.put(s.hdr[:])
	s.out[0] = s.hdr[:]
}

// pusher sends one part of a large write while the next is copied.
func (s *LastingStream) pusher() {
	for range s.more {
		if s.push(); s.over() {
			return
		}
	}
}

func (s *LastingStream) wakePusher() {
	select {
	case s.more <- struct{}{}:
	default:
	}
}

// over says whether the stream has ended for good.
func (s *LastingStream) over() bool {
	return s.whyEnded() != nil
}

// push sends what has not been sent.
func (s *LastingStream) push() {
	s.wmu.Lock()
	s.send()
	s.wmu.Unlock()
	s.tell()
}

// tell sends the client the position that it may be waiting for. A thread that writes at that time does so too.
func (s *LastingStream) tell() {
	for {
		if s.taken.Load()-s.told.Load() < PieceWindow/4 || s.isCut() || !s.wmu.TryLock() {
			return
		}
		s.send()
		s.wmu.Unlock()
	}
}

// send writes to the connection until it has everything. wmu is held.
func (s *LastingStream) send() {
	for {
		n, taken := s.put.Load()-s.sent, s.taken.Load()
		if n == 0 && taken-s.told.Load() < PieceWindow/4 || s.isCut() {
			return
		}
		n = min(n, pieceMost)
		at := (s.sent - s.base) % PieceWindow
		first := min(n, PieceWindow-at)
		s.piece(taken, int(n))
		s.out[1], s.out[2] = s.ring[at:at+first], s.ring[:n-first]
		if err := s.sock.Write(s.out[:3]); err != nil {
			s.lose(false)
			return
		}
		s.sent += n
		s.told.Store(taken)
	}
}

// free is the room in ring.
func (s *LastingStream) free() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return PieceWindow - int(s.put.Load()-s.acked), s.ended
}

// room waits for room in ring.
func (s *LastingStream) room() (int, error) {
	if n, err := s.free(); n > 0 || err != nil {
		return n, err
	}
	s.push()
	s.waits.Add(1)
	defer s.waits.Add(-1)
	for {
		left := s.leftRead.Load()
		if n, err := s.free(); n > 0 || err != nil {
			return n, err
		}
		reads := s.rmu.TryLock()
		if reads {
			err := s.ahead(aheadWait)
			s.rmu.Unlock()
			if err != nil && !errors.Is(err, errCut) && !errors.Is(err, io.EOF) {
				return 0, s.end(err)
			}
			if err == nil {
				s.tell()
				continue
			}
		}
		// Somebody else reads, or there is no connection.
		s.mu.Lock()
		for s.ended == nil && PieceWindow == s.put.Load()-s.acked && (s.cut && s.rdone || s.bye || !reads && s.leftRead.Load() == left) {
			s.cond.Wait()
		}
		s.mu.Unlock()
	}
}

// ---- connections ----

// Heard says whether a piece has come over the present connection.
func (s *LastingStream) Heard() bool { return s.heard.Load() }

// Attach takes over a socket to the client, which has received so many bytes. answer is told how many have been
// received here, or why the stream cannot go on, and tells the client over the new socket; the stream goes on if neither it nor
// anything before it fails. gap is the time since the connection was found to be lost, in which the machine may have been suspended.
//
// A position that is not kept ends the stream, unless newest is false: then the client may have sent it before it made the
// connection that there is now, and the answer is ErrLate, as it is once something has come over that one.
func (s *LastingStream) Attach(fd int, received uint64, newest bool, answer func(received uint64, err error) error) (gap time.Duration, _ error) {
	s.mu.Lock()
	_ = unix.Shutdown(s.sock.fd, unix.SHUT_RDWR) // nobody is in a system call of the old socket for long
	s.mu.Unlock()
	defer s.readerLeft()
	s.rmu.Lock()
	defer s.rmu.Unlock()
	s.wmu.Lock()
	defer s.wmu.Unlock()
	s.lose(true)
	s.mu.Lock()
	err := s.ended
	good := received >= s.acked && received <= s.put.Load()
	s.mu.Unlock()
	if err == nil && !newest && (!good || s.heard.Load()) {
		_ = answer(0, ErrLate)
		unix.Close(fd)
		return 0, ErrLate
	}
	if err == nil && !good {
		err = ErrPosition
	}
	if err != nil {
		_ = answer(0, err) // before the end, with which the process may end
		unix.Close(fd)
		return 0, s.end(err)
	}
	if err = prepare(fd, s.keepalive); err == nil {
		// What was read ahead comes again: only what was taken frees room at the client.
		s.side = nil
		err = answer(s.taken.Load(), nil)
	}
	if err == nil {
		err = unix.Dup3(fd, s.sock.fd, unix.O_CLOEXEC)
	}
	unix.Close(fd)
	if err != nil {
		return 0, err
	}
	s.sock.left.Store(true)
	s.rawAt, s.rawN, s.left = 0, 0, 0
	s.met.Store(true)
	s.heard.Store(false)
	s.sent = received
	s.mu.Lock()
	s.acked = received
	s.cut, s.rdone = false, false
	gap = boottime.Now() - s.lost
	s.cond.Broadcast()
	s.mu.Unlock()
	_, _ = unix.Write(s.wakeup, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	go s.push()
	return gap, nil
}

// Watch returns when the client has said goodbye (io.EOF) or has not come back for the grace, or what else has ended the stream.
// The grace is counted while this machine is awake, since nobody can come back to one that is suspended.
// It calls lost and back for lost connections, and over when the grace has ended, before any reader or writer has an error. lost and over
// get the grace, which is no longer than the keep-alive time for a client that has said nothing yet: the client may have lost the
// connection before it knew how to come back, and have begun another session.
func (s *LastingStream) Watch(most time.Duration, lost func(grace time.Duration), back func(after time.Duration), over func(grace time.Duration)) error {
	for {
		if err := s.hangUp(); err != nil {
			return err
		}
		grace := most
		if !s.heard.Load() && !s.met.Load() {
			grace = min(grace, s.keepalive)
		}
		lost(grace)
		s.mu.Lock()
		began := s.lost
		for s.cut && s.ended == nil && !s.bye {
			left := time.Until(s.since.Add(grace))
			if left <= 0 {
				break
			}
			t := time.AfterFunc(left, s.wake)
			s.cond.Wait()
			t.Stop()
		}
		cut, bye, err := s.cut, s.bye, s.ended
		s.mu.Unlock()
		switch {
		case bye:
			return s.end(io.EOF)
		case err != nil:
			return err
		case cut:
			over(grace)
			return s.end(ErrGrace)
		}
		back(boottime.Now() - began)
	}
}

// hangUp returns when the connection is lost and everything that came over it has been read. A poll of the socket that its end has woken
// looks up the number again: if Attach has been faster, it finds the new socket there, and goes on to wait for the old one.
// So Attach writes to wakeup.
func (s *LastingStream) hangUp() error {
	for {
		s.mu.Lock()
		bye, err, done := s.bye, s.ended, s.cut && s.rdone
		s.mu.Unlock()
		switch {
		case bye:
			return s.end(io.EOF)
		case err != nil:
			return err
		case done:
			return nil
		}
		p := []unix.PollFd{{Fd: int32(s.sock.fd), Events: unix.POLLRDHUP}, {Fd: int32(s.wakeup), Events: unix.POLLIN}}
		if n, _ := unix.Poll(p, -1); n <= 0 {
			continue
		}
		if p[1].Revents != 0 {
			_, _ = unix.Read(s.wakeup, make([]byte, 8))
			continue
		}
		// The executor may be busy, and the goodbye be behind frames that it has not read.
		if !s.rmu.TryLock() {
			time.Sleep(time.Millisecond)
			continue
		}
		err = s.ahead(0)
		s.rmu.Unlock()
		s.readerLeft()
		if err != nil && !errors.Is(err, errCut) && !errors.Is(err, io.EOF) {
			return s.end(err)
		}
	}
}
