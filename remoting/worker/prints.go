package worker

// What kernels print, and the assertions that they fail.
//
// The driver writes the former to C's stdout and the latter to C's stderr, when
// the process synchronises. Both are pipes that this process reads itself: a
// goroutine takes whatever comes, and whoever is about to report a completion
// drains them first, so that the client sees the output before the call returns.
// It does not matter how the code was loaded.

/*
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

type prints struct {
	fds [2]int // the ends to read, by wire.PrintStdout and wire.PrintStderr
	mu  sync.Mutex
	buf []byte
	on  atomic.Bool
}

// open makes standard output a pipe.
func (p *prints) open() error {
	fd := int(C.sl_stdout_pipe())
	if fd < 0 {
		return fmt.Errorf("standard output: %w", unix.Errno(-fd))
	}
	p.fds[wire.PrintStdout] = fd
	return nil
}

// start makes C's stderr a pipe too. What the driver wrote to it before is logged when the process ends.
func (p *prints) start() error {
	fd := int(C.sl_stderr_pipe())
	if fd < 0 {
		return fmt.Errorf("standard error: %w", unix.Errno(-fd))
	}
	p.fds[wire.PrintStderr] = fd
	p.buf = make([]byte, 64<<10)
	p.on.Store(true)
	return nil
}

// drain sends what has been printed so far.
func (p *prints) drain(s *session) {
	if !p.on.Load() {
		return
	}
	C.sl_print_flush()
	p.take(s)
}

// beforeError drains before an error is returned: any call may be the first that
// reports a failed assertion, and the driver has written its text by then.
func (p *prints) beforeError(s *session, rc int32) {
	if rc != 0 && rc != C.CUDA_ERROR_NOT_READY {
		p.drain(s)
	}
}

func (p *prints) take(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, fd := range p.fds {
		p.takeFrom(s, uint32(i), fd)
	}
}

// takeFrom sends what is in one pipe; with the lock.
func (p *prints) takeFrom(s *session, stream uint32, fd int) {
	for {
		n, err := unix.Read(fd, p.buf)
		if n <= 0 {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return
		}
		if err := s.wr.Send(&wire.Reply{Kind: wire.FramePrint, Arg: stream}, p.buf[:n], nil); err != nil {
			s.leave("print", err)
		}
		if n < len(p.buf) {
			return
		}
	}
}

// pump takes output as it comes, so that a full pipe never blocks the driver.
func (p *prints) pump(s *session) {
	var f []unix.PollFd
	for _, fd := range p.fds {
		f = append(f, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	for {
		if _, err := unix.Poll(f, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		p.take(s)
	}
}
