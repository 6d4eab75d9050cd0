package data

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// tries is how many connections are tried for one ticket.
const tries = 4

// Dialer is the host's side.
type Dialer struct {
	Encrypt   bool
	KeepAlive time.Duration // as wire.Tune has it; 0: lease.DefaultKeepAlive
	Relay     Relay         // needed with Encrypt
	Log       *slog.Logger
}

// Open asks owner to offer the session and connects to it. addr is the owner's control port
// (HOST:PORT): its host is used if the offer names none. host is this node. The file is the
// client's end: a blocking socket, which the caller closes. Errors are *lease.Error of the
// owner, or wrap ErrRefused, or say that the owner cannot be reached.
func (d *Dialer) Open(ctx context.Context, owner lease.Owner, addr, host string, r lease.SessionRequest) (*os.File, error) {
	var key tls.Certificate
	r.Encrypt, r.CertHash = d.Encrypt, nil
	if d.Encrypt {
		var err error
		if key, r.CertHash, err = newKey(); err != nil {
			return nil, err
		}
	}
	o, err := owner.Offer(ctx, host, r)
	if err != nil {
		return nil, err
	}
	c, err := d.dial(ctx, addr, o, key, r.UID)
	if err != nil {
		return nil, err
	}
	_ = c.TCP.Close()
	return blocking(c.Conn)
}

// address is where an offer leads to.
func address(o lease.Offer, addr string) (string, error) {
	h, port, err := net.SplitHostPort(o.Addr)
	if err != nil {
		return "", fmt.Errorf("data connection: the owner offers address %q: %w", o.Addr, err)
	}
	if h == "" {
		if h, _, err = net.SplitHostPort(addr); err != nil {
			return "", fmt.Errorf("data connection: address %q of the owner: %w", addr, err)
		}
	}
	return net.JoinHostPort(h, port), nil
}

// Connection is one whose ticket was good. The caller closes both files.
type Connection struct {
	Conn *os.File // what is written there arrives at the other side
	TCP  *os.File // the connection of TCP that carries it: the same one, unless it is encrypted
}

// dial uses the ticket of an offer.
func (d *Dialer) dial(ctx context.Context, addr string, o lease.Offer, key tls.Certificate, uid uint32) (Connection, error) {
	addr, err := address(o, addr)
	if err != nil {
		return Connection{}, err
	}
	c, err := d.connect(ctx, addr, o)
	for n := 1; n < tries && errors.Is(err, errNoChallenge) && ctx.Err() == nil; n++ {
		// An owner that is flooded drops the oldest connections that have sent nothing. The
		// ticket is still good.
		time.Sleep(time.Duration(n) * 10 * time.Millisecond)
		c, err = d.connect(ctx, addr, o)
	}
	if err != nil {
		return Connection{}, err
	}
	defer c.Close()
	f, err := c.File()
	if err != nil {
		return Connection{}, fmt.Errorf("data connection: %w", err)
	}
	keep := d.KeepAlive
	if keep <= 0 {
		keep = lease.DefaultKeepAlive
	}
	if err := control(f, func(fd int) error { return wire.Tune(fd, keep) }); err != nil {
		_ = f.Close()
		return Connection{}, err
	}
	var conn *os.File
	if d.Encrypt {
		conn, err = d.encrypt(ctx, addr, f, o, key, uid)
	} else if conn, err = c.File(); err != nil {
		err = fmt.Errorf("data connection: %w", err)
	}
	if err != nil {
		_ = f.Close()
		return Connection{}, err
	}
	return Connection{conn, f}, nil
}

// encrypt starts the relay of a connection, and returns this node's end of the relay.
func (d *Dialer) encrypt(ctx context.Context, addr string, tcp *os.File, o lease.Offer, key tls.Certificate, uid uint32) (*os.File, error) {
	inner, outer, err := socketPair()
	if err != nil {
		return nil, err
	}
	log := d.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	relay, err := d.Relay.start(relayConfig{Peer: o.CertHash}, key, uid, tcp, outer, log)
	_ = outer.Close()
	if err == nil {
		select {
		case err = <-relay.ready:
		case <-ctx.Done():
			err = fmt.Errorf("encrypted connection to %s: %w", addr, ctx.Err())
		}
	}
	if err != nil {
		_ = inner.Close() // the relay, if there is one, sees that and ends
		return nil, err
	}
	return inner, nil
}

// connect returns a connection that has used its ticket.
func (d *Dialer) connect(ctx context.Context, addr string, o lease.Offer) (*net.TCPConn, error) {
	c, err := (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("data connection: %w; is the data port open between the nodes?", err)
	}
	_ = c.SetDeadline(time.Now().Add(admitTime + handshakeTime))
	if t, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(t)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := respond(c, o.Ticket, o.Secret, d.Encrypt); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("%s: %w", addr, err)
	}
	return c.(*net.TCPConn), nil
}

// control runs f on the descriptor without making it blocking.
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("data connection: %w", err)
	}
	var ferr error
	if err := raw.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
		return fmt.Errorf("data connection: %w", err)
	}
	return ferr
}

// blocking makes the socket blocking, as a C program expects it. The flag belongs to the open
// socket, and goes with it to another process.
func blocking(f *os.File) (*os.File, error) {
	if err := control(f, func(fd int) error { return unix.SetNonblock(fd, false) }); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// socketPair returns the session's end and the relay's.
func socketPair() (inner, outer *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("data connection: socket pair: %w", err)
	}
	for _, fd := range fds {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20) // a smaller buffer is only slower
	}
	return os.NewFile(uintptr(fds[0]), "session"), os.NewFile(uintptr(fds[1]), "relay"), nil
}
