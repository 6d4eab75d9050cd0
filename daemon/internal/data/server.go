package data

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// The owner's side. Serve accepts connections and gives each a goroutine, as many as
// limit.Table admits. The goroutine ends with the handshake. The only shared state is the
// tickets, which have a lock of their own.

// Time limits of the owner's side.
const (
	handshakeTime = 5 * time.Second
	// admitTime is how long a worker may take: a cold start on several GPUs takes seconds.
	admitTime = 60 * time.Second
)

// Config of a Server.
type Config struct {
	// Addr is the address in offers: HOST:PORT, or :PORT for the address by which the host
	// reaches this node's control port.
	Addr       string
	TicketLife time.Duration // 0: lease.DefaultTicket
	PerLease   int           // tickets that a lease may have out; 0: lease.DefaultMaxSessions
	KeepAlive  time.Duration // as wire.Tune has it; 0: lease.DefaultKeepAlive
	Encrypt    func() bool   // refuse sessions that are not encrypted; nil no
	Relay      Relay
	Bounds     limit.Bounds // zero: the defaults of package limit

	// Admit passes the connection to a worker. From then on it owns conn, and closes it in any
	// case. The host receives its error.
	Admit func(ctx context.Context, r lease.SessionRequest, conn *os.File) error
	// Refused, if set, is called for refused connections, at most a few times a second. The
	// request is zero if no ticket names one. Refused must not block.
	Refused func(remote net.Addr, r lease.SessionRequest, reason string)
	Log     *slog.Logger
}

// Server is an owner's data port and its tickets.
type Server struct {
	cfg     Config
	tickets *tickets
	table   *limit.Table
	reports limit.Reports
}

// NewServer makes a server. Serve runs it.
func NewServer(cfg Config) *Server {
	if cfg.TicketLife <= 0 {
		cfg.TicketLife = lease.DefaultTicket
	}
	if cfg.PerLease <= 0 {
		cfg.PerLease = lease.DefaultMaxSessions
	}
	if cfg.KeepAlive <= 0 {
		cfg.KeepAlive = lease.DefaultKeepAlive
	}
	if cfg.Bounds.TrustedKey <= 0 {
		cfg.Bounds.TrustedKey = 512 // a host that starts many programs at once
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Server{cfg: cfg, tickets: newTickets(cfg.TicketLife, cfg.PerLease), table: limit.New(cfg.Bounds)}
}

// Offer makes the ticket of a session. The caller has decided that the session may be opened.
func (s *Server) Offer(r lease.SessionRequest) (lease.Offer, error) { return s.offer(r, nil) }

func (s *Server) offer(r lease.SessionRequest, probe taker) (lease.Offer, error) {
	o, what := lease.Offer{Addr: s.cfg.Addr}, "session"
	if probe != nil {
		what = "probe"
	}
	if s.cfg.Encrypt != nil && s.cfg.Encrypt() && !r.Encrypt {
		return o, lease.Errorf(lease.Denied, "this owner takes encrypted %ss only: set encrypt: true in the sluice.yaml of the node that asks, too", what)
	}
	var key tls.Certificate
	if r.Encrypt {
		if len(r.CertHash) != 32 {
			return o, lease.Errorf(lease.Invalid, "encrypted %s: certificate hash of %d bytes, not 32", what, len(r.CertHash))
		}
		var err error
		if key, o.CertHash, err = newKey(); err != nil {
			return o, lease.Errorf(lease.Internal, "encrypted %s: %v", what, err)
		}
	}
	var err error
	o.Ticket, o.Secret, err = s.tickets.add(r, key, probe)
	return o, err
}

// Dropped returns how many connections were closed to make room for others.
func (s *Server) Dropped() uint64 { return s.table.Dropped() }

// Serve accepts connections until ctx ends or l fails. It returns when the handshakes in
// progress have ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, net.ErrClosed) {
				return fmt.Errorf("data port: %w", err)
			}
			// This is mostly a lack of descriptors: the present connections end within
			// handshakeTime.
			s.cfg.Log.Warn("data port", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		counted := s.table.Add(c, limit.Address(c))
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer counted.Close()
			// When the daemon ends it does not wait for messages that have yet to come. Results
			// are still written.
			defer context.AfterFunc(ctx, func() { _ = counted.SetReadDeadline(time.Unix(1, 0)) })()
			if r, err := s.handshake(ctx, counted); err != nil {
				s.refused(c.RemoteAddr(), r, err)
			}
		}()
	}
}

func (s *Server) refused(remote net.Addr, r lease.SessionRequest, err error) {
	skipped, ok := s.reports.Pass()
	if !ok {
		return
	}
	s.cfg.Log.Warn("data connection refused", "remote", remote.String(), "lease", r.Lease, "error", err, "unreported", skipped)
	if f := s.cfg.Refused; f != nil {
		f(remote, r, err.Error())
	}
}

// handshake is the owner's side of the protocol. Until the response is right, the other side
// learns only that this is sluiced.
func (s *Server) handshake(ctx context.Context, c *limit.Conn) (r lease.SessionRequest, err error) {
	_ = c.SetDeadline(time.Now().Add(handshakeTime))
	var first [helloSize]byte
	if _, err := io.ReadFull(c, first[:]); err != nil {
		return r, fmt.Errorf("%w: left during the first message: %w", errStranger, err)
	}
	h, err := parseHello(&first)
	if err != nil {
		return r, err
	}
	secret, r, err := s.tickets.peek(h.ticket)
	if err != nil {
		return r, err
	}
	// A ticket's number cannot be guessed: from here on the connection is not dropped for a
	// stranger's. It still has only its few seconds.
	if !c.Trust(limit.Host(c)) {
		return r, fmt.Errorf("%w: too many connections are being admitted from there", ErrRefused)
	}
	if encrypted := h.flags&flagEncrypted != 0; encrypted != r.Encrypt {
		return r, fmt.Errorf("%w: encrypted is %v, the ticket says %v", ErrRefused, encrypted, r.Encrypt)
	}
	var nonce [32]byte
	_, _ = rand.Read(nonce[:]) // never fails
	own := proof(&secret, roleServer, &first, &nonce)
	if _, err := c.Write(append(nonce[:], own[:]...)); err != nil {
		return r, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	var answer [responseSize]byte
	if _, err := io.ReadFull(c, answer[:]); err != nil {
		return r, fmt.Errorf("%w: left before the response: %w", ErrRefused, err)
	}
	want := proof(&secret, roleClient, &first, &nonce)
	k, err := s.tickets.use(h.ticket, want[:], answer[:])
	if err != nil {
		return r, k.named(err)
	}
	ctx, cancel := context.WithTimeout(ctx, admitTime)
	defer cancel()
	reason := ""
	if err = s.admit(ctx, c.Conn, k); err != nil {
		err = k.named(fmt.Errorf("%w: %w", ErrRefused, err))
		if reason = err.Error(); len(reason) > maxReason {
			reason = reason[:maxReason]
		}
	}
	// The worker sends nothing before the client's HELLO, which comes after this result: so the
	// result may be written to a socket that the worker already has.
	_ = c.SetWriteDeadline(time.Now().Add(handshakeTime))
	if _, werr := c.Write(result(reason)); err == nil && werr != nil {
		err = fmt.Errorf("%w: the host left: %w", ErrRefused, werr)
	}
	return r, err
}

func (s *Server) admit(ctx context.Context, c net.Conn, k *ticket) error {
	socket, ok := c.(filer)
	if !ok {
		return errors.New("data port: not a socket")
	}
	f, err := socket.File()
	if err != nil {
		return err
	}
	if err := control(f, func(fd int) error { return wire.Tune(fd, s.cfg.KeepAlive) }); err != nil {
		_ = f.Close()
		return err
	}
	free := func() {} // of a probe: no relay carries it
	pass := func(conn *os.File) error { return s.cfg.Admit(ctx, k.request, conn) }
	if k.probe != nil {
		pass = func(conn *os.File) error {
			f, err := taken(k.probe, conn, socket)
			if err == nil {
				free = f
			}
			return err
		}
	}
	if !k.request.Encrypt {
		defer func() { free() }()
		return pass(f)
	}
	defer f.Close()
	inner, outer, err := socketPair()
	if err != nil {
		return err
	}
	if err := pass(inner); err != nil {
		_ = outer.Close()
		return err
	}
	// The user of a session is the lease's. For a probe there is only what the node claims, so its relay runs as nobody.
	uid := k.request.UID
	if k.probe != nil {
		uid = nobody
	}
	// The relay starts only now: it waits up to relayTime for the host's relay, which starts
	// after the result. So this does not wait either. If the relay fails, the worker sees the
	// end of the connection.
	relay, err := s.cfg.Relay.start(relayConfig{Server: true, Peer: k.request.CertHash}, k.key, uid, f, outer, s.cfg.Log)
	_ = outer.Close()
	if err != nil {
		free()
		return err
	}
	go s.watch(relay, k, free)
	return nil
}

// watch says why a relay never got ready, and when it has ended.
func (s *Server) watch(relay *relayed, k *ticket, free func()) {
	switch err := <-relay.ready; {
	case err == nil:
	case k.probe == nil:
		s.cfg.Log.Warn("encrypted session", "lease", k.request.Lease, "error", err)
	default: // any node may have as many as it likes, one after the other
		if skipped, ok := s.reports.Pass(); ok {
			s.cfg.Log.Warn("encrypted probe", "error", err, "unreported", skipped)
		}
	}
	<-relay.over
	free()
}
