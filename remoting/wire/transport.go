package wire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/unixsock"
)

// socketBuffer is the size asked for each direction of a TCP socket, in bytes:
// enough for 1 Gb/s at 20 ms, and more with the kernel's doubling.
const socketBuffer = 4 << 20

// ErrAddress says that an address is not of the form tcp:HOST:PORT or
// unix:PATH.
var ErrAddress = errors.New("wire: bad address")

// ParseAddress splits tcp:HOST:PORT or unix:PATH into what package net wants.
// HOST:PORT alone is TCP.
func ParseAddress(s string) (network, address string, err error) {
	if p, ok := strings.CutPrefix(s, "unix:"); ok {
		if p == "" {
			return "", "", fmt.Errorf("%w: %q: no path", ErrAddress, s)
		}
		return "unix", p, nil
	}
	p := strings.TrimPrefix(s, "tcp:")
	if _, _, err := net.SplitHostPort(p); err != nil {
		return "", "", fmt.Errorf("%w: %q: give tcp:HOST:PORT or unix:PATH", ErrAddress, s)
	}
	return "tcp", p, nil
}

// Listen listens at an address. A Unix socket is made with mode 0600; one left
// behind by a process that is gone is replaced, one that answers is not.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	network, a, err := ParseAddress(addr)
	if err != nil {
		return nil, err
	}
	if network == "tcp" {
		l, err := (&net.ListenConfig{}).Listen(ctx, network, a)
		if err != nil {
			return nil, fmt.Errorf("wire: listen at %s: %w", addr, err)
		}
		return l, nil
	}
	// The lock decides between two workers that start at the same time; it
	// is released by the kernel when its holder ends, however that happens.
	lock, err := os.OpenFile(a+".lock", os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("wire: listen at %s: %w", addr, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("wire: listen at %s: another worker holds it: %w", addr, err)
	}
	l, err := unixsock.Listen(a, unixsock.How{Mode: 0o600, Alone: true})
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("wire: listen at %s: %w", addr, err)
	}
	return &lockedListener{l, lock, a}, nil
}

type lockedListener struct {
	net.Listener
	lock *os.File
	path string
}

// Addr is the socket's path, which is not what it was bound to.
func (l *lockedListener) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: l.path} }

func (l *lockedListener) Close() error {
	err := l.Listener.Close()
	_ = os.Remove(l.path) // still under the lock, so it is this listener's
	return errors.Join(err, l.lock.Close())
}

// Tune sets the options of a connected socket: no delay, probes and a limit on
// unacknowledged data so that a cut network is noticed within keepalive, and
// large buffers where the process may set them (elsewhere the kernel's own
// tuning does better than a capped size).
func Tune(fd int, keepalive time.Duration) error {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("wire: tune socket: %w", err)
	}
	if _, ok := sa.(*unix.SockaddrUnix); ok {
		// A Unix stream socket's default buffer holds one bulk chunk only in
		// part; more means fewer switches between the two processes.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
		return nil
	}
	secs := max(int(keepalive/time.Second), 1)
	idle := max(secs/2, 1)
	interval := max(secs/6, 1)
	set := func(level, opt, v int) {
		if e := unix.SetsockoptInt(fd, level, opt, v); e != nil {
			err = errors.Join(err, fmt.Errorf("wire: tune socket: option %d: %w", opt, e))
		}
	}
	set(unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	set(unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	set(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, idle)
	set(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, interval)
	set(unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 3)
	set(unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(max(keepalive, time.Second)/time.Millisecond))
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, socketBuffer)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBuffer)
	return err
}
