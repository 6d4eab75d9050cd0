package worker

// What kernels print.
//
// The driver writes it to standard output when the process synchronises.
// Standard output is a pipe that this process reads itself: a goroutine takes
// whatever comes, and whoever is about to report a completion drains it first,
// so that the client sees the output before the call returns.

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
	fd  int
	mu  sync.Mutex
	buf []byte
	on  atomic.Bool
}

// open makes standard output the pipe.
func (p *prints) open() error {
	fd := int(C.sl_stdout_pipe())
	if fd < 0 {
		return fmt.Errorf("standard output: %w", unix.Errno(-fd))
	}
	p.fd = fd
	p.buf = make([]byte, 64<<10)
	p.on.Store(true)
	return nil
}

// drain sends what has been printed so far.
func (p *prints) drain(s *session) {
	if !p.on.Load() {
		return
	}
	C.sl_stdout_flush()
	p.take(s)
}

func (p *prints) take(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		n, err := unix.Read(p.fd, p.buf)
		if n <= 0 {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return
		}
		if err := s.wr.Send(&wire.Reply{Kind: wire.KindPrint}, p.buf[:n], nil); err != nil {
			s.leave("print", err)
		}
		if n < len(p.buf) {
			return
		}
	}
}

// pump takes output as it comes, so that a full pipe never blocks the driver.
func (p *prints) pump(s *session) {
	f := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(f, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		p.take(s)
	}
}
