package cli

// The lease of a worker that was started by hand. sluice run --worker asks for it with a HELLO
// of kind 3 and gets a token, which the program's own connections name. The connection stays
// open and silent as long as the program runs: its end is the end of the lease, whichever side
// closes it. TCP keep-alive finds dead peers, since neither side sends anything.

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const (
	dialTimeout    = 10 * time.Second
	releaseTimeout = 2 * time.Second
)

// address says where a worker listens: "tcp" and HOST:PORT, or "unix" and a path.
type address struct{ network, addr string }

func (a address) String() string { return a.network + ":" + a.addr }

func parseAddress(s string) (address, error) {
	bad := func(why string) (address, error) {
		return address{}, fmt.Errorf("worker address %q %s; give HOST:PORT, tcp:HOST:PORT or unix:PATH", s, why)
	}
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		if path == "" {
			return bad("has no path")
		}
		// The program may change its directory before it connects.
		abs, err := filepath.Abs(path)
		if err != nil {
			return address{}, fmt.Errorf("worker address %q: %w", s, err)
		}
		return address{"unix", abs}, nil
	}
	hostport := strings.TrimPrefix(s, "tcp:")
	host, port, err := net.SplitHostPort(hostport)
	switch {
	case err != nil:
		return bad("has no port")
	case host == "":
		return bad("has no host")
	case port == "" || port == "0":
		return bad("has no port")
	}
	return address{"tcp", hostport}, nil
}

// workerLease is one granted lease and the connection that keeps it.
type workerLease struct {
	conn  net.Conn
	token [16]byte
	// worker is the address that answered. A name may stand for several machines, and only this
	// one knows the lease.
	worker address
	at     address // as the user gave it

	ended     chan struct{} // closed when the connection has ended
	releasing atomic.Bool
}

// openWorkerLease connects to the worker and asks for mem bytes on each of its devices, or for
// everything it offers if mem is 0.
func openWorkerLease(at address, mem uint64, program string) (*workerLease, error) {
	d := net.Dialer{
		Timeout:         dialTimeout,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3},
	}
	conn, err := d.Dial(at.network, at.addr)
	if err != nil {
		return nil, unreachable(at, err)
	}
	l := &workerLease{conn: conn, worker: at, at: at, ended: make(chan struct{})}
	if at.network == "tcp" {
		l.worker.addr = conn.RemoteAddr().String()
	}
	if err := l.handshake(mem, program); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("worker %s: %w", at, err)
	}
	return l, nil
}

func unreachable(at address, err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Err != nil {
		err = op.Err // without "dial tcp 1.2.3.4:5", which the message says already
	}
	if at.network == "unix" {
		return fmt.Errorf("worker at socket %s cannot be reached: %w; start sluice-worker --listen %s, or give its socket with --worker", at.addr, err, at)
	}
	host, port, _ := net.SplitHostPort(at.addr)
	return fmt.Errorf("worker at host %s, port %s cannot be reached: %w; start sluice-worker there, or give its address with --worker", host, port, err)
}

func (l *workerLease) handshake(mem uint64, program string) error {
	if err := l.conn.SetDeadline(time.Now().Add(dialTimeout)); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	hello := wire.Hello{
		Version: wire.Version,
		Kind:    wire.SessionLease,
		PID:     uint32(os.Getpid()),
		UID:     uint32(os.Getuid()),
		Mem:     mem,
		Program: filepath.Base(program),
	}
	var b [wire.HelloSize]byte
	hello.Encode(&b)
	if _, err := l.conn.Write(b[:]); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	payload, err := wire.ReadWelcome(l.conn)
	var refusal *wire.Refusal
	switch {
	case errors.As(err, &refusal):
		return fmt.Errorf("lease refused: %w", err)
	case err != nil:
		return fmt.Errorf("no lease: %w; is a sluice-worker listening there?", err)
	case len(payload) != len(l.token):
		return fmt.Errorf("no lease: token of %d bytes, not %d; is a sluice-worker of this version listening there?", len(payload), len(l.token))
	}
	copy(l.token[:], payload)
	return l.conn.SetDeadline(time.Time{})
}

// env names the worker, and the token as the shim reads it from SLUICE_LEASE.
func (l *workerLease) env() map[string]string {
	return map[string]string{"SLUICE_WORKER": l.worker.String(), "SLUICE_LEASE": hex.EncodeToString(l.token[:])}
}

// watch waits in the background until the worker ends the lease, its connection is lost, or release is called.
func (l *workerLease) watch(lost func(reason string)) {
	go func() {
		defer close(l.ended)
		_, err := io.Copy(io.Discard, l.conn)
		var errno syscall.Errno
		if errors.As(err, &errno) {
			err = errno // without the addresses
		}
		switch {
		case l.releasing.Load():
		case err != nil: // with --grace the worker keeps the lease for the sessions that there are
			lost(fmt.Sprintf("the connection that holds the lease at worker %s was lost (%v); no session begins in it any more, and those that have begun go on if the worker has --grace", l.at, err))
		default:
			lost("worker " + l.at.String() + " ended the lease" + callsFail)
		}
	}()
}

// release ends the lease. It waits a moment until the worker has closed its side too, so that
// the memory is free for the next lease.
func (l *workerLease) release() {
	l.releasing.Store(true)
	if c, ok := l.conn.(interface{ CloseWrite() error }); ok && c.CloseWrite() == nil {
		select {
		case <-l.ended:
		case <-time.After(releaseTimeout):
		}
	}
	_ = l.conn.Close()
}
