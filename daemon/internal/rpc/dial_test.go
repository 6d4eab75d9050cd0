package rpc

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long a test looks for one try that is soon enough: this machine may be busy.
const patience = 20 * time.Second

// dialSoon connects soon after the other side has become reachable, although its first attempts got no
// answer. A listener whose queue is full answers none.
func TestDialSoon(t *testing.T) {
	best := time.Hour
	for end := time.Now().Add(patience); best > dialInterval+300*time.Millisecond && time.Now().Before(end); {
		best = min(best, reachedLate(t))
	}
	if best > dialInterval+300*time.Millisecond {
		t.Errorf("connected %v after the queue had room", best)
	}
}

// reachedLate is how long after the other side has become reachable dialSoon connects.
func reachedLate(t *testing.T) time.Duration {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: name.(*unix.SockaddrInet4).Port}).String()
	first, err := net.Dial("tcp", addr) // fills the queue
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()

	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if c, err := dialSoon(ctx, addr); err == nil {
		_ = c.Close()
		t.Fatal("connected to a full queue")
	}
	// The queue gets room 1.3 s after the first SYN. The kernel alone would send the next one after 3 s.
	freed := make(chan time.Time, 1)
	time.AfterFunc(1300*time.Millisecond, func() {
		if n, _, err := unix.Accept(fd); err == nil {
			unix.Close(n)
		}
		freed <- time.Now()
	})
	c, err := dialSoon(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	connected := time.Now()
	defer c.Close()
	return connected.Sub(<-freed)
}

// dialSoon returns an error without waiting for further attempts.
func TestDialSoonRefused(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	best := time.Hour
	for end := time.Now().Add(patience); best > dialInterval && time.Now().Before(end); {
		began := time.Now()
		if _, err := dialSoon(t.Context(), addr); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("want connection refused, got %v", err)
		}
		best = min(best, time.Since(began))
	}
	if best > dialInterval {
		t.Errorf("it took %v", best)
	}
}
