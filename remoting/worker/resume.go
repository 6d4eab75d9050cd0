package worker

// How a session goes on over a new connection of its client's.
//
//	supervisor or daemon   passes the socket of an ATTACH over the session's link
//	take, handle           one goroutine for each, 5 s: the HELLO if nobody has read it, ATTACH
//	join                   under mu: the key is compared, the stream takes the socket over, and the
//	                       client is told its next key by the WELCOME
//	turnedAway             refuses clients before they were heard to the end
//	outlive                ends the process when the client has said goodbye or did not come back

import (
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/boottime"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// Bounds of attempts to take a session over.
const (
	maxAttaching = 8                     // at once; one more ends the oldest
	attachBurst  = 64                    // without a pause
	attachPace   = 50 * time.Millisecond // of one attempt, beyond a burst
	maxKeys      = 64                    // that are good at once
)

// resumption lets the client of one session come back.
type resumption struct {
	log    *slog.Logger
	stream *wire.LastingStream
	slot   int
	grace  time.Duration
	cuts   *account.Cuts             // those that are over
	cut    func(since time.Duration) // notes in the account since when there is no connection, by boottime.Now; 0: there is one

	mu sync.Mutex
	// keys are those that the client may have, in the order in which they were given out; the last is the newest. The client last
	// came with the first. The WELCOMEs with the others may have been lost, or have gone to connections that the client had
	// given up and that may arrive after the one that it uses. All are good until something has come over the newest connection.
	keys      [][16]byte
	paid      time.Time
	attaching []*attaching // the oldest first
	refused   turnedAway
}

// attaching is a connection whose ATTACH has not been judged.
type attaching struct {
	fd      int
	crowded bool // it made room for a newer one
}

// Refusals of clients that may try again, and of those of a session that ends with its connection.
var (
	errCrowded = errors.New("too many connections are made for this session at once; try again")
	errOnce    = errors.New("this session ends with its connection: there is none that could be made again")
)

// newResumption makes a session outlive its connection, if its starter and its client want that. It returns nil if not.
func newResumption(log *slog.Logger, st *control.Start, fd int, keepalive time.Duration) (*resumption, error) {
	if st.GraceMS == 0 || st.Hello.Features&wire.FeatureResume == 0 || !st.Exchange || !wire.SessionComputes(st.Hello.Kind) {
		return nil, nil
	}
	s, err := wire.NewLastingStream(fd, keepalive)
	if err != nil {
		return nil, err
	}
	r := &resumption{log: log, stream: s, slot: st.Slot, grace: time.Duration(st.GraceMS) * time.Millisecond, cuts: new(account.Cuts), cut: func(time.Duration) {}, keys: make([][16]byte, 1)}
	_, err = rand.Read(r.keys[0][:])
	return r, err
}

// resumable returns the RESUMABLE, which tells the client how to resume the session.
func (r *resumption) resumable() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e wire.Encoder
	(&wire.Resumable{Key: r.keys[len(r.keys)-1], Session: uint32(r.slot), GraceMS: uint32(r.grace / time.Millisecond)}).Encode(&e)
	return e.Buf()
}

// take is given a new connection, and must not wait.
func (r *resumption) take(fd int, raw bool) {
	a := &attaching{fd: fd}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if early := now.Add(-attachBurst * attachPace); r.paid.Before(early) {
		r.paid = early
	}
	if r.paid.After(now) {
		r.refused.refuse(fd, raw, wire.StatusBusy, errCrowded)
		return
	}
	r.paid = r.paid.Add(attachPace)
	if len(r.attaching) == maxAttaching {
		r.attaching[0].crowded = true
		_ = unix.Shutdown(r.attaching[0].fd, unix.SHUT_RD) // its goroutine refuses and closes it
		r.attaching = r.attaching[1:]
	}
	r.attaching = append(r.attaching, a)
	go r.handle(a, raw)
}

// done takes a connection off the list; its descriptor may be closed then. It reports whether the connection had to make room.
func (r *resumption) done(a *attaching) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.attaching, a); i >= 0 {
		r.attaching = slices.Delete(r.attaching, i, i+1)
	}
	return a.crowded
}

// handle judges an ATTACH.
func (r *resumption) handle(a *attaching, raw bool) {
	var b [wire.AttachSize]byte
	heard := !raw
	err := unix.SetNonblock(a.fd, false)
	if err == nil && raw {
		err = readFurtherHello(a.fd, wire.SessionAttach, "where a lost connection is to be made again")
		heard = err == nil
	}
	if err == nil {
		err = readWithin(a.fd, b[:], helloTime)
	}
	// A connection that made room before its HELLO came is closed without a reason, as turnedAway says: the client tries again.
	if r.done(a) && err != nil && heard {
		r.refused.refuse(a.fd, false, wire.StatusBusy, errCrowded)
		return
	}
	if err != nil {
		r.log.Info("a connection for this session said nothing that makes sense", "error", err)
		unix.Close(a.fd)
		return
	}
	if abandoned(a.fd) {
		unix.Close(a.fd)
		return
	}
	_ = wire.Tune(a.fd, r.stream.Keepalive())
	var m wire.Attach
	m.Decode(wire.NewDecoder(b[:]))
	if err := r.join(a.fd, &m); err != nil {
		r.log.Warn("a connection was not taken", "error", err)
	}
}

// abandoned reports whether the client has closed its end, as it does with an attempt that took too long.
func abandoned(fd int) bool {
	var b [1]byte
	n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return n == 0 && err == nil || errors.Is(err, unix.ECONNRESET)
}

// readFurtherHello reads the HELLO of a further connection, which must be of the kind that is made here. If it returns an error about the
// HELLO, the client has been sent the refusal.
func readFurtherHello(fd int, kind uint32, where string) error {
	var b [wire.HelloSize]byte
	if err := readWithin(fd, b[:], helloTime); err != nil {
		return err
	}
	var h wire.Hello
	if err := h.Decode(&b); err != nil {
		return err
	}
	status, err := judge(&h)
	if err == nil && h.Kind != kind {
		status, err = wire.StatusVersion, fmt.Errorf("a client says hello as kind %d %s", h.Kind, where)
	}
	if err != nil {
		refuseSocket(fd, status, err)
	}
	return err
}

var errKey = errors.New("no session here has that key")

// find returns where a key is among those that are good, or -1. All are compared, whichever it is.
func (r *resumption) find(key [16]byte) int {
	at := -1
	for i, k := range r.keys {
		if subtle.ConstantTimeCompare(key[:], k[:]) == 1 {
			at = i
		}
	}
	return at
}

// join has the stream go on over the socket, which it takes over in any case.
func (r *resumption) join(fd int, m *wire.Attach) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream.Heard() {
		r.keys = r.keys[len(r.keys)-1:]
	}
	at := r.find(m.Key)
	newest := at == len(r.keys)-1
	if at < 0 {
		refuseSocket(fd, wire.StatusLease, errKey)
		unix.Close(fd)
		return errKey
	}
	var next [16]byte
	if _, err := rand.Read(next[:]); err != nil {
		refuseSocket(fd, wire.StatusInternal, err)
		unix.Close(fd)
		return err
	}
	gap, err := r.stream.Attach(fd, m.Received, newest, func(received uint64, err error) error {
		switch {
		case errors.Is(err, wire.ErrLate):
			refuseSocket(fd, wire.StatusLease, errKey)
			return err
		case err != nil:
			refuseSocket(fd, wire.StatusLease, fmt.Errorf("the session ends: %w", err))
			return err
		}
		var e wire.Encoder
		(&wire.Attached{Key: next, Received: received}).Encode(&e)
		return writeAll(fd, wire.AppendWelcome(nil, wire.StatusOK, e.Buf()))
	})
	if err == nil {
		r.keys = append(r.keys[at:], next) // the client does not come with older ones than this time
		if len(r.keys) > maxKeys {
			r.keys = slices.Delete(r.keys, 1, 2)
		}
		if newest {
			r.cuts.Add(gap)
		} else { // the client has not heard of the last connection: for it the cut went on
			r.cuts.Extend(gap)
		}
	}
	return err
}

// writeAll writes to a socket that has room.
func writeAll(fd int, b []byte) error {
	n, err := unix.SendmsgN(fd, b, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return err
}

// refuseSocket tells a client why not.
func refuseSocket(fd int, status uint32, reason error) {
	_ = writeAll(fd, wire.AppendWelcome(nil, status, []byte(reason.Error())))
	_ = unix.Shutdown(fd, unix.SHUT_WR)
}

// turnedAway refuses connections that were not heard to the end.
type turnedAway struct{ n atomic.Int32 }

// refuse tells the client why not and closes the socket. It does not wait.
//
// raw says that the HELLO has not been read. The daemon's data port then has an answer of its own to write into the
// same socket (RESULT), and may not have done so yet. The client says HELLO once it has read that answer, so the
// reason is written after the HELLO.
//
// A socket that is closed with unread bytes takes the reason back, so they are read for a second. All this is done for a
// few clients at once; others may lose the reason.
func (t *turnedAway) refuse(fd int, raw bool, status uint32, reason error) {
	few := t.n.Add(1) <= maxAttaching
	if !raw {
		refuseSocket(fd, status, reason)
	}
	if !few {
		t.n.Add(-1)
		unix.Close(fd)
		return
	}
	go func() {
		defer t.n.Add(-1)
		defer unix.Close(fd)
		if unix.SetNonblock(fd, false) != nil {
			return
		}
		if raw {
			var hello [wire.HelloSize]byte
			if readWithin(fd, hello[:], helloTime) != nil {
				return
			}
			refuseSocket(fd, status, reason)
		}
		var b [wire.HelloSize + wire.AttachSize + 1]byte // more than a client sends before it has the answer
		_ = readWithin(fd, b[:], time.Second)
	}()
}

// attachable says who gets the new connections of the session's client.
func (c *client) attachable() func(fd int, raw bool) {
	if c.again != nil {
		return c.again.take
	}
	t := new(turnedAway)
	return func(fd int, raw bool) { t.refuse(fd, raw, wire.StatusLease, errOnce) }
}

// outlive ends the process when the client has gone for good.
func (s *session) outlive(r *resumption) {
	err := r.stream.Watch(r.grace, func(grace time.Duration) {
		s.traceCut(true)
		r.cut(boottime.Now())
		s.log.Warn("connection to the client lost", "grace", grace)
	}, func(after time.Duration) {
		s.traceCut(false)
		r.cut(0)
		s.log.Info("the client is back", "after", after.Round(time.Millisecond))
	}, func(grace time.Duration) {
		r.cuts.Add(grace)
		why := fmt.Sprintf("its connection was lost, and the client did not come back within %v", grace)
		s.log.Error("session ended", "reason", why)
		s.leave(why, nil)
	})
	if errors.Is(err, io.EOF) {
		s.leave("client closed", nil)
		return
	}
	s.leave("connection", err)
}
