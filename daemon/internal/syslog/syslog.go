// Package syslog sends the lines of the audit log to a syslog collector. The caller never waits: lines wait in a bounded queue, and
// those that have no room there are dropped and counted.
package syslog

// Flow: Send -> queue -> Run's goroutine -> connection -> collector
//
// The queue holds frames in the order of Send: first those that were written to the connection and that the collector's kernel has
// not acknowledged, then those not yet written. When a connection is lost the next one begins with the first of both. So the
// collector may get a frame twice. It lacks what its own kernel had and it did not read, since syslog has no acknowledgement.
//
// A collector that does not read stops Run's goroutine in a write, for as long as it likes: closing the connection would
// lose what its kernel has. Meanwhile the queue fills.
//
// mu guards the queue and is never held across a system call or a line of the log. Only Run's goroutine takes frames out.

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// queueSize is what the queue holds, in bytes: about ten thousand lines of the audit log.
	queueSize = 4 << 20
	// overhead of a frame in the queue, in bytes.
	overhead = 64
	// inFlight is the kernel's buffer for what a TCP collector has not acknowledged, in bytes.
	inFlight = 256 << 10
	// dialTime is how long a connection may take.
	dialTime = 10 * time.Second
	// lastWait is how long Run goes on after its context has ended, for what still waits.
	lastWait = time.Second
)

// Sender sends messages to one collector.
type Sender struct {
	to   Target
	host string
	log  *slog.Logger
	// pause and longest are the shortest and the longest time between two attempts to connect.
	pause, longest time.Duration
	report         time.Duration // between two reports of one kind in the log
	size           int           // of the queue, in bytes

	wake chan struct{} // there is a frame to write; one place

	said     time.Time // when the log was told last that the collector is away; Run's, as is the next
	saidAway bool      // and not since that it is back

	mu        sync.Mutex
	queue     []frame
	written   int // how many of queue, from the first, have been written to the connection
	bytes     int // of queue, with overhead
	forwarded uint64
	dropped   uint64
	away      error // why there is no connection; nil while there is one, and before the first attempt
}

// frame is a message in the queue.
type frame struct {
	b       []byte
	end     int64 // how much had been written to the connection after it
	counted bool  // as forwarded
}

// New returns a Sender that names host as the messages' origin. Run does the work.
func New(to Target, host string, log *slog.Logger) *Sender {
	return &Sender{to: to, host: host, log: log, pause: time.Second, longest: 30 * time.Second, report: time.Minute, size: queueSize,
		wake: make(chan struct{}, 1)}
}

// Send has m sent soon. It does not wait. m.Text may be changed afterwards.
func (s *Sender) Send(m Message) {
	b := s.to.frame(&m, s.host, os.Getpid())
	s.mu.Lock()
	if s.bytes+len(b)+overhead > s.size/100*m.Fill {
		s.dropped++
		s.mu.Unlock()
		return
	}
	s.queue = append(s.queue, frame{b: b})
	s.bytes += len(b) + overhead
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// State is how a Sender fares.
type State struct {
	To        Target
	Forwarded uint64 // messages that were handed to the kernel for the collector
	Dropped   uint64 // messages that had no room in the queue, that were too long for the socket, or that waited when Run ended
	Waiting   int    // messages in the queue
	Away      error  // why the collector cannot be reached, nil if it can
}

// State returns how s fares.
func (s *Sender) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return State{s.to, s.forwarded, s.dropped, len(s.queue) - s.written, s.away}
}

// Run sends until ctx ends, and then what still waits, for a second at most.
func (s *Sender) Run(ctx context.Context) error {
	end, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastWait, cancel) })()
	var reports sync.WaitGroup
	reports.Go(func() { s.reportDropped(end) })
	defer reports.Wait()
	defer cancel()

	pause := s.pause
	for {
		begun := time.Now()
		err := s.connection(ctx, end)
		if ctx.Err() == nil {
			s.lost(err)
		}
		if time.Since(begun) >= s.longest { // a collector that takes connections and drops them is no reason for haste
			pause = s.pause
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			s.mu.Lock()
			defer s.mu.Unlock()
			s.dropped += uint64(len(s.queue) - s.written)
			return nil
		}
		pause = min(2*pause, s.longest)
	}
}

// lost notes that there is no connection, and why.
func (s *Sender) lost(err error) {
	s.mu.Lock()
	s.away = err
	s.mu.Unlock()
	if time.Since(s.said) >= s.report {
		s.said, s.saidAway = time.Now(), true
		s.log.Warn("the collector of the audit log is away; lines wait for it as far as there is room", "collector", s.to, "error", err, "waiting", s.State().Waiting)
	}
}

// reportDropped logs what was dropped, at its end and once per interval, until ctx ends.
func (s *Sender) reportDropped(ctx context.Context) {
	t := time.NewTicker(s.report)
	defer t.Stop()
	var told uint64
	for ctx.Err() == nil {
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		if st := s.State(); st.Dropped > told {
			s.log.Warn("lines of the audit log were not forwarded; its files have them", "collector", s.to, "lines", st.Dropped-told, "waiting", st.Waiting, "error", st.Away)
			told = st.Dropped
		}
	}
}

// connection connects, and writes what comes until the connection is lost, end ends, or ctx has ended and nothing waits.
func (s *Sender) connection(ctx, end context.Context) error {
	d := net.Dialer{Timeout: dialTime}
	c, err := d.DialContext(end, s.to.Network, s.to.Addr)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(end, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	l := &link{Conn: c}
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetWriteBuffer(inFlight)
		if l.raw, err = t.SyscallConn(); err != nil {
			return err
		}
	}
	lost := make(chan error, 1)
	go l.watch(lost)

	s.mu.Lock()
	s.away = nil
	s.mu.Unlock()
	if s.saidAway && s.to.Network != "udp" { // which connects to nobody as well
		s.saidAway = false
		s.log.Info("the collector of the audit log is back", "collector", s.to, "waiting", s.State().Waiting)
	}
	if err = s.write(ctx, l, lost); err == nil {
		return nil
	}
	s.acknowledged(l)
	s.mu.Lock()
	s.written = 0 // the rest is written again
	s.mu.Unlock()
	select {
	case why := <-lost: // and the failed write only followed from it
		err = why
	default:
	}
	return err
}

// write writes frames as they come.
func (s *Sender) write(ctx context.Context, l *link, lost <-chan error) error {
	for {
		b := s.next()
		if b == nil {
			select {
			case err := <-lost:
				return err
			case <-s.wake:
				continue
			case <-ctx.Done():
			}
			if b = s.next(); b == nil {
				return nil
			}
		}
		n, err := l.Write(b)
		l.written += int64(n)
		switch {
		case errors.Is(err, unix.EMSGSIZE): // no second attempt sends it
			s.done(l, true)
		case err != nil:
			return err
		default:
			s.done(l, false)
		}
	}
}

// next is the first frame that has not been written to the connection, nil if there is none.
func (s *Sender) next() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.written == len(s.queue) {
		return nil
	}
	return s.queue[s.written].b
}

// done says that the frame of next was written, or is to be dropped.
func (s *Sender) done(l *link, drop bool) {
	s.mu.Lock()
	f := &s.queue[s.written]
	s.written++
	f.end = l.written
	if drop {
		s.dropped++
	} else if !f.counted {
		f.counted = true
		s.forwarded++
	}
	s.mu.Unlock()
	s.acknowledged(l)
}

// acknowledged takes out of the queue what has arrived.
func (s *Sender) acknowledged(l *link) {
	arrived := l.written - l.outstanding()
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < s.written && s.queue[n].end <= arrived {
		s.bytes -= len(s.queue[n].b) + overhead
		s.queue[n].b = nil
		n++
	}
	s.queue, s.written = s.queue[n:], s.written-n
}

// link is a connection to the collector.
type link struct {
	net.Conn
	raw     syscall.RawConn // nil for datagrams
	written int64           // bytes
}

// outstanding is how many bytes the collector's kernel has not acknowledged, tcp(7). Datagrams have gone, or nobody knows.
func (l *link) outstanding() (n int64) {
	if l.raw == nil {
		return 0
	}
	_ = l.raw.Control(func(fd uintptr) {
		if v, err := unix.IoctlGetInt(int(fd), unix.TIOCOUTQ); err == nil {
			n = int64(v)
		}
	})
	return n
}

// watch notices that the connection is lost while nothing is written: what is written first after that would be lost too.
func (l *link) watch(lost chan<- error) {
	var b [512]byte
	for {
		if _, err := l.Read(b[:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the collector has closed the connection")
			}
			lost <- err
			_ = l.SetWriteDeadline(time.Unix(1, 0))
			return
		}
	}
}
