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

type socketStream struct {
	fd int
	lo lookout
	rv [2]unix.Iovec
	wv [8]unix.Iovec
}

// NewSocketStream takes over a connected stream socket. keepalive bounds how
// long a write may make no progress.
func NewSocketStream(fd int, keepalive time.Duration) (Stream, error) {
	if err := prepare(fd, keepalive); err != nil {
		return nil, err
	}
	return &socketStream{fd: fd}, nil
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

func (s *socketStream) Read2(a, b []byte) (int, error) {
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
	p := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, int(wait.Milliseconds()))
	return err == nil && n > 0
}
