package wire

// A Stream is the byte transport under a session: a socket today, and whatever
// else can carry bytes in order.
//
// One goroutine reads (under Reader's lock) and one at a time writes (under
// Writer's lock); the two directions do not disturb each other. Reads and
// writes block the calling thread in the kernel on purpose: the executor owns
// its thread, and a raw read wakes it a few microseconds sooner than Go's
// poller would.

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrStalled says that the peer took no byte for the whole keep-alive time.
var ErrStalled = errors.New("wire: peer takes no data")

// Stream carries bytes in order in both directions.
type Stream interface {
	// Read2 blocks until at least one byte has been read into a, then b.
	// It returns io.EOF at the end of the stream.
	Read2(a, b []byte) (int, error)
	// Write sends all of the parts, or fails; ErrStalled when the peer has
	// taken nothing for the keep-alive time.
	Write(parts [][]byte) error
	// Readable waits until Read2 would not block, or for the time given.
	Readable(wait time.Duration) bool
	// FD is the descriptor whose hang-up says that the peer is gone.
	FD() int
	Close() error
}

// Carrier carries the bytes of a stream beside its socket, which stays open and whose end ends the stream: package verbs.
type Carrier interface {
	// Read reads at least one byte; 0 without an error is the end. The error is EAGAIN if nothing has come within wait.
	Read(p []byte, wait time.Duration) (int, error)
	// Write writes all of the parts. The error is ETIMEDOUT if the other side has taken nothing for the time wait.
	Write(parts [][]byte, wait time.Duration) error
	// Readable waits until Read would not wait, or for the time given.
	Readable(wait time.Duration) bool
	// Flush waits until everything written has arrived, for a time at most.
	Flush(wait time.Duration) bool
}

// Carry has a stream of NewSocketStream or NewLastingStream go by c from here on. Nobody may be using the stream. A lasting stream
// goes over its socket again when its connection has been lost and made again.
func Carry(s Stream, c Carrier) {
	switch s := s.(type) {
	case *socketStream:
		s.by = c
	case *LastingStream:
		s.sock.by = c
	}
}

// Flush waits until what was written to a stream has arrived, where a Carrier carries it: its memory goes with the process.
func Flush(s Stream, wait time.Duration) {
	var sock *socketStream
	switch s := s.(type) {
	case *socketStream:
		sock = s
	case *LastingStream:
		s.wmu.Lock()
		defer s.wmu.Unlock()
		sock = s.sock
	default:
		return
	}
	if c := sock.carrier(); c != nil {
		c.Flush(wait)
	}
}

type socketStream struct {
	fd        int
	keepalive time.Duration
	by        Carrier     // nil: the socket carries the bytes
	left      atomic.Bool // by is not used any more: another socket has taken the place
	lo        lookout
	rv        [2]unix.Iovec
	wv        [8]unix.Iovec
}

// NewSocketStream takes over a connected stream socket. keepalive bounds how
// long a write may make no progress.
func NewSocketStream(fd int, keepalive time.Duration) (Stream, error) {
	if err := prepare(fd, keepalive); err != nil {
		return nil, err
	}
	return &socketStream{fd: fd, keepalive: keepalive}, nil
}

// prepare makes a socket fit for a socketStream.
func prepare(fd int, keepalive time.Duration) error {
	if err := unix.SetNonblock(fd, false); err != nil {
		return fmt.Errorf("wire: socket: %w", err)
	}
	if keepalive > 0 {
		tv := unix.NsecToTimeval(keepalive.Nanoseconds())
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv); err != nil {
			return fmt.Errorf("wire: socket: send time-out: %w", err)
		}
	}
	return nil
}

func (s *socketStream) FD() int { return s.fd }

func (s *socketStream) Close() error { return unix.Close(s.fd) }

// carrier is what carries the bytes, nil for the socket.
func (s *socketStream) carrier() Carrier {
	if s.left.Load() {
		return nil
	}
	return s.by
}

// readBy reads by a carrier.
func (s *socketStream) readBy(c Carrier, p []byte) (n int, err error) {
	begun, came := s.lo.look(func() bool {
		n, err = c.Read(p, 0)
		return !errors.Is(err, unix.EAGAIN)
	})
	if !came {
		for {
			if n, err = c.Read(p, time.Second); !errors.Is(err, unix.EAGAIN) {
				break
			}
		}
		s.lo.slept(begun)
	}
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

func (s *socketStream) Read2(a, b []byte) (int, error) {
	if c := s.carrier(); c != nil {
		if len(a) == 0 {
			a = b
		}
		if len(a) == 0 {
			return 0, nil
		}
		return s.readBy(c, a)
	}
	n := 0
	if len(a) > 0 {
		s.rv[n].Base = &a[0]
		s.rv[n].SetLen(len(a))
		n++
	}
	if len(b) > 0 {
		s.rv[n].Base = &b[0]
		s.rv[n].SetLen(len(b))
		n++
	}
	if n == 0 {
		return 0, nil
	}
	begun, r, e := s.look(a)
	if e == unix.EAGAIN || e == unix.EINTR {
		for e == unix.EAGAIN || e == unix.EINTR {
			r, _, e = syscall.Syscall(unix.SYS_READV, uintptr(s.fd), uintptr(unsafe.Pointer(&s.rv[0])), uintptr(n))
		}
		s.lo.slept(begun)
	}
	switch {
	case e != 0:
		return 0, os.NewSyscallError("read", e)
	case r == 0:
		return 0, io.EOF
	}
	return int(r), nil
}

// look reads what comes soon, or gives EAGAIN. An error is its to tell: the kernel tells it once.
func (s *socketStream) look(a []byte) (begun time.Time, r uintptr, e syscall.Errno) {
	e = unix.EAGAIN
	if len(a) == 0 || !spare {
		return time.Now(), 0, e
	}
	begun, _ = s.lo.look(func() bool {
		r, _, e = syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(s.fd), uintptr(unsafe.Pointer(&a[0])), uintptr(len(a)), unix.MSG_DONTWAIT, 0, 0)
		return e != unix.EAGAIN
	})
	return begun, r, e
}

func (s *socketStream) Write(parts [][]byte) error {
	if c := s.carrier(); c != nil {
		err := c.Write(parts, s.keepalive)
		if errors.Is(err, unix.ETIMEDOUT) {
			return ErrStalled
		}
		return err
	}
	n := 0
	for _, p := range parts {
		if len(p) == 0 {
			continue
		}
		if n == len(s.wv) {
			return fmt.Errorf("wire: write of more than %d parts", len(s.wv))
		}
		s.wv[n].Base = &p[0]
		s.wv[n].SetLen(len(p))
		n++
	}
	v := s.wv[:n]
	for len(v) > 0 {
		msg := unix.Msghdr{Iov: &v[0], Iovlen: uint64(len(v))}
		r, _, e := syscall.Syscall(unix.SYS_SENDMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&msg)), unix.MSG_NOSIGNAL)
		switch e {
		case 0:
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			// SO_SNDTIMEO ran out before a single byte was taken.
			return ErrStalled
		default:
			return os.NewSyscallError("sendmsg", e)
		}
		for left := uint64(r); left > 0; {
			if left < v[0].Len {
				v[0].Base = (*byte)(unsafe.Add(unsafe.Pointer(v[0].Base), left))
				v[0].Len -= left
				break
			}
			left -= v[0].Len
			v = v[1:]
		}
	}
	return nil
}

func (s *socketStream) Readable(wait time.Duration) bool {
	if c := s.carrier(); c != nil {
		return c.Readable(wait)
	}
	p := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, int(wait.Milliseconds()))
	return err == nil && n > 0
}
