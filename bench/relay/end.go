package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// end is one side of a connection, read and written by blocking system calls:
// a thread that the kernel wakes at once, not when the runtime's poller is next
// asked.
//
// cut may come from anywhere, at any time. The lock keeps it from a descriptor
// that has been closed and is by now somebody else's.
type end struct {
	file *os.File
	fd   int

	mu     sync.Mutex
	closed bool
}

// newEnd takes the socket of c, which stays the caller's to close.
func newEnd(c *net.TCPConn) (*end, error) {
	if err := c.SetNoDelay(true); err != nil {
		return nil, fmt.Errorf("no delay: %w", err)
	}
	file, err := c.File()
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	return &end{file: file, fd: int(file.Fd())}, nil // Fd makes it blocking
}

// readIdle reads what is there, else waits and reads what comes.
func (e *end) readIdle(b []byte) (n int, idle bool, err error) {
	flags := unix.MSG_DONTWAIT
	for {
		n, _, err := unix.Recvfrom(e.fd, b, flags)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			idle, flags = true, 0
		case err != nil:
			return 0, idle, fmt.Errorf("read: %w", err)
		case n == 0:
			return 0, idle, io.EOF
		default:
			return n, idle, nil
		}
	}
}

func (e *end) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := unix.SendmsgN(e.fd, b[done:], nil, nil, unix.MSG_NOSIGNAL)
		if err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return done, fmt.Errorf("write: %w", err)
		}
		done += n
	}
	return done, nil
}

// shut tells the peer that nothing more will come.
func (e *end) shut() { _ = unix.Shutdown(e.fd, unix.SHUT_WR) }

// cut ends both directions at once, and wakes whoever reads or writes.
func (e *end) cut() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		_ = unix.Shutdown(e.fd, unix.SHUT_RDWR)
	}
}

// close comes last, when nobody reads or writes any more.
func (e *end) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	_ = e.file.Close()
}
