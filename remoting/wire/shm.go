package wire

// Two byte rings in a memory file, in place of the socket of a client on the
// same node. remoting/client/shmring.c is the other side and says how a ring
// works; docs/protocol.md has the layout.
//
// The client may write anything into the memory at any time. Bytes are
// therefore copied out before they are looked at, and a count out of range is
// the end of the stream.

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

const (
	shmSize = ShmData + 2*ShmRing
	shmSpin = 20 * time.Microsecond // how long a side looks before it sleeps

	futexWait = 0
	futexWake = 1
)

// ErrShm says that the peer broke the rules of the shared memory.
var ErrShm = errors.New("wire: shared memory: count out of range")

// shmDir is one direction, as it lies in the memory: four counts or words, 64
// bytes apart.
type shmDir struct {
	head         *atomic.Uint64
	tail         *atomic.Uint64
	readerSleeps *atomic.Uint32
	writerSleeps *atomic.Uint32
	data         []byte
}

func dirAt(mem []byte, at, data int) shmDir {
	p := func(off int) unsafe.Pointer { return unsafe.Pointer(&mem[at+off]) }
	return shmDir{
		head: (*atomic.Uint64)(p(ShmHead)), tail: (*atomic.Uint64)(p(ShmTail)),
		readerSleeps: (*atomic.Uint32)(p(ShmReader)), writerSleeps: (*atomic.Uint32)(p(ShmWriter)),
		data: mem[data : data+ShmRing],
	}
}

type shmStream struct {
	fd        int // the socket, for its hang-up
	mem       []byte
	in, out   shmDir
	inTail    uint64 // ours; the shared copies are for the peer
	outHead   uint64
	keepalive time.Duration
	closed    atomic.Bool
	lo        lookout
}

// NewShmStream makes the shared memory of a session and returns the stream over
// it and the descriptor to pass to the client; the caller closes that once it
// has been passed. sock is taken over: its hang-up says that the client is gone.
func NewShmStream(sock int, keepalive time.Duration) (s Stream, pass int, err error) {
	fd, err := unix.MemfdCreate("sluice-session", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, -1, fmt.Errorf("wire: shared memory: %w", err)
	}
	fail := func(what string, err error) (Stream, int, error) {
		unix.Close(fd)
		return nil, -1, fmt.Errorf("wire: shared memory: %s: %w", what, err)
	}
	if err := unix.Ftruncate(fd, shmSize); err != nil {
		return fail("size", err)
	}
	// Sealed, so that the client cannot shrink it under our feet (SIGBUS).
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fail("seal", err)
	}
	mem, err := unix.Mmap(fd, 0, shmSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fail("map", err)
	}
	return newShmStream(sock, mem, keepalive), fd, nil
}

func newShmStream(sock int, mem []byte, keepalive time.Duration) *shmStream {
	return &shmStream{
		fd: sock, mem: mem, keepalive: keepalive,
		in: dirAt(mem, ShmToWorker, ShmData), out: dirAt(mem, ShmToClient, ShmData+ShmRing),
	}
}

func (s *shmStream) FD() int { return s.fd }

func (s *shmStream) Close() error {
	s.closed.Store(true)
	futex(s.in.readerSleeps, futexWake, 1<<30, 0)
	futex(s.out.writerSleeps, futexWake, 1<<30, 0)
	return os.NewSyscallError("close", unix.Close(s.fd))
}

func futex(w *atomic.Uint32, op, val int, wait time.Duration) {
	var ts *unix.Timespec
	if wait > 0 {
		t := unix.NsecToTimespec(wait.Nanoseconds())
		ts = &t
	}
	_, _, _ = syscall.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), uintptr(op), uintptr(val), uintptr(unsafe.Pointer(ts)), 0, 0)
}

func wake(w *atomic.Uint32) {
	if w.Load() != 0 {
		w.Store(0)
		futex(w, futexWake, 1<<30, 0)
	}
}

// changed waits until count differs from seen. It returns false when wait has
// passed (0: never) or the stream was closed.
func (s *shmStream) changed(count *atomic.Uint64, seen uint64, sleeps *atomic.Uint32, wait time.Duration) bool {
	for start := time.Now(); time.Since(start) < shmSpin; {
		for range 32 {
			if count.Load() != seen {
				return true
			}
		}
	}
	var end time.Time
	for {
		sleeps.Store(1)
		if count.Load() != seen {
			sleeps.Store(0)
			return true
		}
		if s.closed.Load() {
			return false
		}
		nap := 200 * time.Millisecond
		if wait > 0 {
			now := time.Now()
			if end.IsZero() {
				end = now.Add(wait)
			}
			if nap = min(nap, end.Sub(now)); nap <= 0 {
				sleeps.Store(0)
				return false
			}
		}
		futex(sleeps, futexWait, 1, nap)
	}
}

func (s *shmStream) Readable(wait time.Duration) bool {
	if s.in.head.Load() != s.inTail {
		return true
	}
	return wait > 0 && s.changed(s.in.head, s.inTail, s.in.readerSleeps, wait)
}

func (s *shmStream) Read2(a, b []byte) (int, error) {
	if s.in.head.Load() == s.inTail {
		begun, came := s.lo.look(func() bool {
			for range 32 {
				if s.in.head.Load() != s.inTail {
					return true
				}
			}
			return false
		})
		if !came {
			if !s.changed(s.in.head, s.inTail, s.in.readerSleeps, 0) {
				return 0, io.EOF
			}
			s.lo.slept(begun)
		}
	}
	have := s.in.head.Load() - s.inTail
	if have > ShmRing {
		return 0, ErrShm
	}
	n := 0
	for _, p := range [2][]byte{a, b} {
		for len(p) > 0 && have > 0 {
			at := s.inTail % ShmRing
			k := copy(p, s.in.data[at:min(at+have, ShmRing)])
			p = p[k:]
			n += k
			have -= uint64(k)
			s.inTail += uint64(k)
		}
	}
	s.in.tail.Store(s.inTail)
	wake(s.in.writerSleeps)
	return n, nil
}

func (s *shmStream) Write(parts [][]byte) error {
	for _, p := range parts {
		for len(p) > 0 {
			tail := s.out.tail.Load()
			used := s.outHead - tail
			if used > ShmRing {
				return ErrShm
			}
			if used == ShmRing {
				wake(s.out.readerSleeps)
				if !s.changed(s.out.tail, tail, s.out.writerSleeps, s.keepalive) {
					return ErrStalled
				}
				continue
			}
			at := s.outHead % ShmRing
			k := copy(s.out.data[at:min(at+ShmRing-used, ShmRing)], p)
			p = p[k:]
			s.outHead += uint64(k)
			s.out.head.Store(s.outHead)
		}
	}
	wake(s.out.readerSleeps)
	return nil
}
