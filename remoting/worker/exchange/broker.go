package exchange

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// A session sends the broker of its lease EXPORTER_WANTEDs; the broker sends it BROKEREDs, whose kind, number and status are:
//
//	answer    broker to session   packetAnswer, number of the request, status; with statusOpen a connection to the exporter
//	call      broker to session   packetCall, 0, 0, with a connection to a session that wants one of its exports
//	attach    broker to session   packetAttach, 0, 0 or packetRaw, with a connection to a client that wants to go on
//	trace     broker to session   packetTrace, 0, 0, with a connection to a client that wants a trace, whose HELLO nobody has read
//	bulk      broker to session   packetBulk, 0, 0 or packetRaw, with a bulk connection to the session's client
const (
	packetAnswer = 1
	packetCall   = 2
	packetAttach = 3
	packetTrace  = 4
	packetBulk   = 5

	packetRaw = 1 // in place of a status: nobody has read the client's HELLO

	statusOpen = 0
	statusNone = 1 // there is no such session, or it has no exchange
	statusFull = 2 // its queue or the broker's is full
)

// Bounds of what one session can have the broker do.
const (
	burst = 4096
	pace  = time.Millisecond // of one request, beyond a burst
)

// Broker connects the sessions of one lease with each other. It runs in the process that starts sessions, outside of
// their sandbox. It keeps nothing of a request and passes on no byte of a session's, only the ends of new pairs
// of sockets. Safe for concurrent use.
type Broker struct {
	log *slog.Logger

	mu    sync.Mutex
	lines map[int]*net.UnixConn // by slot
}

// NewBroker makes the broker of a lease that has no sessions yet.
func NewBroker(log *slog.Logger) *Broker {
	return &Broker{log: log, lines: make(map[int]*net.UnixConn)}
}

// Join serves the session in a slot of the lease over c until its end, Leave or Close.
func (b *Broker) Join(slot int, c *net.UnixConn) {
	b.mu.Lock()
	old := b.lines[slot]
	b.lines[slot] = c
	b.mu.Unlock()
	if old != nil {
		old.Close()
	}
	go b.serve(slot, c)
}

// Leave ends the service of a slot.
func (b *Broker) Leave(slot int) {
	b.mu.Lock()
	c := b.lines[slot]
	delete(b.lines, slot)
	b.mu.Unlock()
	if c != nil {
		c.Close()
	}
}

// Close ends the service of all slots.
func (b *Broker) Close() {
	b.mu.Lock()
	all := b.lines
	b.lines = make(map[int]*net.UnixConn)
	b.mu.Unlock()
	for _, c := range all {
		c.Close()
	}
}

// ErrAbsent says that a slot has no session that could take a connection.
var ErrAbsent = errors.New("exchange: no such session")

// Attach passes a client's new connection to the session in a slot. raw says that the HELLO has not been read. The
// descriptor stays the caller's.
func (b *Broker) Attach(slot, fd int, raw bool) error {
	return b.pass(slot, packetAttach, fd, raw)
}

// Bulk passes a bulk connection of its client's to the session in a slot, as Attach does. A session of a release before this one
// closes the connection.
func (b *Broker) Bulk(slot, fd int, raw bool) error {
	return b.pass(slot, packetBulk, fd, raw)
}

// pass sends a client's connection to the session in a slot.
func (b *Broker) pass(slot int, kind uint32, fd int, raw bool) error {
	b.mu.Lock()
	c := b.lines[slot]
	b.mu.Unlock()
	if c == nil {
		return ErrAbsent
	}
	status := uint32(0)
	if raw {
		status = packetRaw
	}
	return send(c, kind, 0, status, fd)
}

// Trace passes the session in a slot a connection to a client that wants a trace of it. A session of a release before this one
// closes the connection. The descriptor stays the caller's.
func (b *Broker) Trace(slot, fd int) error {
	return b.pass(slot, packetTrace, fd, false)
}

// serve answers the requests of one session, one after another. Descriptors that come with them are dropped by the
// kernel, because Read has no room for any.
func (b *Broker) serve(slot int, c *net.UnixConn) {
	defer func() {
		c.Close()
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.lines[slot] == c {
			delete(b.lines, slot)
		}
	}()
	paid := time.Now()
	var req [wire.ExporterWantedSize + 1]byte
	for {
		n, err := c.Read(req[:])
		if err != nil || n == 0 {
			return
		}
		if n != wire.ExporterWantedSize {
			b.log.Warn("exchange: a session's request makes no sense; it has no exchange with others any more", "slot", slot, "bytes", n)
			return
		}
		// paid is until when the session has paid for its requests.
		if early := time.Now().Add(-burst * pace); paid.Before(early) {
			paid = early
		}
		paid = paid.Add(pace)
		time.Sleep(time.Until(paid))
		var m wire.ExporterWanted
		m.Decode(wire.NewDecoder(req[:n]))
		b.connect(slot, c, m.Number, m.Slot)
	}
}

// connect gives each of two sessions an end of a new connection. A session that does not read gets no answer.
func (b *Broker) connect(slot int, c *net.UnixConn, number, exporter uint32) {
	b.mu.Lock()
	to := b.lines[int(exporter)]
	b.mu.Unlock()
	if to == nil || int(exporter) == slot {
		_ = send(c, packetAnswer, number, statusNone, -1)
		return
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		b.log.Warn("exchange", "error", err)
		_ = send(c, packetAnswer, number, statusFull, -1)
		return
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := send(to, packetCall, 0, 0, pair[0]); err != nil {
		_ = send(c, packetAnswer, number, statusFull, -1)
		return
	}
	_ = send(c, packetAnswer, number, statusOpen, pair[1])
}

// send sends a packet, with a descriptor unless it is negative, or fails at once where the receiver's queue is full.
func send(c *net.UnixConn, kind, number, status uint32, fd int) error {
	var p wire.Encoder
	(&wire.Brokered{Kind: kind, Number: number, Status: status}).Encode(&p)
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = raw.Control(func(s uintptr) {
		serr = unix.Sendmsg(int(s), p.Buf(), oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	if err != nil {
		return err
	}
	return serr
}

// Connect gives a new connection of packets: the broker's end, and the one that the session is started with.
func Connect() (*net.UnixConn, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	c, err := packetConn(pair[0])
	if err != nil {
		unix.Close(pair[1])
		return nil, nil, err
	}
	return c, os.NewFile(uintptr(pair[1]), "exchange"), nil
}
