package leasesock

// One connection, docs/protocol.md "Lease socket":
//
//	accept -> 64 bytes, within requestTime -> who is it -> the lease's owner of that
//	number -> connected socket -> header with it by SCM_RIGHTS -> closed
//
// Each lease has a goroutine that accepts and at most MaxOpen that answer. A
// crowd on one lease waits in that socket's own backlog.

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Times and numbers of a lease's socket; remoting/wire has its messages.
const (
	requestTime = 5 * time.Second
	openTime    = 15 * time.Second
	strangeTime = 20 * time.Millisecond // that a stranger's request may take to arrive
	MaxOpen     = 64                    // connections of one lease that are being answered
	crowded     = 2048                  // of all leases; above it each lease has crowdOpen
	crowdOpen   = 4
)

// gate counts the connections that are being answered, of all leases.
type gate struct {
	mu   sync.Mutex
	cond *sync.Cond
	all  int
}

// enter waits until s may answer one more; false when s is closed.
func (g *gate) enter(s *Socket) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cond == nil {
		g.cond = sync.NewCond(&g.mu)
	}
	for !s.closed && (s.open >= MaxOpen || g.all >= crowded && s.open >= crowdOpen) {
		g.cond.Wait()
	}
	if s.closed {
		return false
	}
	s.open++
	g.all++
	return true
}

func (g *gate) leave(s *Socket) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s.open--
	g.all--
	g.cond.Broadcast()
}

// Socket is a lease's listener.
type Socket struct {
	set    *Set
	id     string      // of the lease
	was    lease.Lease // at Listen
	l      *net.UnixListener
	gate   *gate
	open   int  // gate.mu
	closed bool // gate.mu
}

// Close ends the socket. Its file stays, for the next daemon.
func (s *Socket) Close() {
	s.gate.mu.Lock()
	s.closed = true
	if s.gate.cond != nil {
		s.gate.cond.Broadcast()
	}
	s.gate.mu.Unlock()
	_ = s.l.Close()
}

// serve accepts.
func (s *Socket) serve() {
	for s.gate.enter(s) {
		c, err := s.l.AcceptUnix()
		if err != nil {
			s.gate.leave(s)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			s.set.cfg.Log.Warn("lease socket: accept", "lease", s.id, "error", err)
			select { // no descriptors left, most likely
			case <-time.After(100 * time.Millisecond):
			case <-s.set.cfg.Base.Done():
				return
			}
			continue
		}
		s.set.wg.Go(func() {
			defer s.gate.leave(s)
			defer c.Close()
			// A daemon that stops waits for nobody.
			stop := context.AfterFunc(s.set.cfg.Base, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
			defer stop()
			s.answer(c)
		})
	}
}

// request is what a client asks on a lease's socket.
type request struct {
	version, kind, index, features uint32
	program                        string
}

var errMagic = errors.New("not a request to a lease's socket")

// parseRequest reads the 64 bytes.
func parseRequest(b []byte) (request, error) {
	var m wire.LeaseRequest
	if len(b) != wire.LeaseRequestSize || m.Decode((*[wire.LeaseRequestSize]byte)(b)) != nil {
		return request{}, errMagic
	}
	r := request{version: m.Version, kind: m.Kind, index: m.Owner, features: m.Features, program: m.Program}
	for len(r.program) > 0 && !utf8.ValidString(r.program) { // a name that was cut within a character
		r.program = r.program[:len(r.program)-1]
	}
	return r, nil
}

// answer serves one connection.
func (s *Socket) answer(c *net.UnixConn) {
	cfg := &s.set.cfg
	who, err := callerOf(c)
	if err != nil {
		return
	}
	defer who.close()
	l, ok := cfg.Lease(s.id)
	if !ok {
		l = s.was // so that its user hears that it has ended, and others no more than that it is not theirs
	}
	_ = c.SetDeadline(time.Now().Add(requestTime))
	var b [wire.LeaseRequestSize]byte
	if denied := who.may(&l); denied != nil {
		s.deny(c, b[:], &l, &who, denied)
		return
	}
	if err := readFull(c, b[:]); err != nil {
		return
	}
	r, err := parseRequest(b[:])
	if err != nil {
		s.refused(&l, &who, &r, err, false)
		return
	}
	owners := lease.Owners(l.Grants)
	status, err := uint32(wire.StatusLease), error(nil)
	switch {
	case !ok:
		err = lease.Errorf(lease.Over, "lease %s has ended", l.ID)
	case r.version != wire.LeaseVersion:
		status, err = wire.StatusVersion, lease.Errorf(lease.Invalid, "lease socket: version %d asked, %d spoken here; the shim and sluiced have to be of one release", r.version, wire.LeaseVersion)
	case !wire.SessionAsked(r.kind):
		err = lease.Errorf(lease.Invalid, "lease socket: session of kind %d: want %d or %d", r.kind, wire.SessionCompute, wire.SessionObserve)
	case r.features != 0:
		err = lease.Errorf(lease.Invalid, "lease socket: features %#x are not known in version %d", r.features, wire.LeaseVersion)
	case uint64(r.index) >= uint64(len(owners)):
		err = lease.Errorf(lease.Invalid, "lease %s has %d owners, number %d asked", l.ID, len(owners), r.index)
	}
	if err != nil {
		s.refused(&l, &who, &r, err, false)
		reply(c, status, len(owners), err.Error(), nil)
		return
	}
	s.set.point("open-a-checked")
	ctx, cancel := context.WithTimeout(cfg.Base, openTime)
	defer cancel()
	q := lease.SessionRequest{Lease: l.ID, Kind: r.kind, PID: uint32(max(0, who.pid)), UID: l.Request.UID, Program: r.program, Step: who.step(l.Request.Key.Job)}
	f, local, err := cfg.Open(ctx, owners[r.index], q)
	_ = c.SetDeadline(time.Now().Add(requestTime))
	if err != nil {
		s.refused(&l, &who, &r, err, false)
		reply(c, statusOf(err), len(owners), err.Error(), nil)
		return
	}
	defer f.Close()
	s.set.point("open-b-connected")
	_, traces := wire.Traces(q.Kind)
	_, bulk := wire.Bulks(q.Kind) // whose session is known already
	if !local && !traces && !bulk && q.PID != 0 && who.fd >= 0 && cfg.Opened != nil {
		if fd, err := unix.FcntlInt(uintptr(who.fd), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			cfg.Opened(owners[r.index], q, fd)
		}
	}
	reply(c, wire.StatusOK, len(owners), flags(local), f)
	s.set.point("open-c-passed")
}

// deny answers a caller who may not use the lease. The request is read first, since the
// caller would not see the answer otherwise, but hardly waited for.
func (s *Socket) deny(c *net.UnixConn, b []byte, l *lease.Lease, who *caller, reason error) {
	_ = c.SetReadDeadline(time.Now().Add(strangeTime))
	if readFull(c, b) == nil {
		reply(c, wire.StatusLease, 0, reason.Error(), nil)
	}
	r, _ := parseRequest(b)
	s.refused(l, who, &r, reason, true)
}

func readFull(c *net.UnixConn, b []byte) error {
	for len(b) > 0 {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// flags is the payload of a good answer.
func flags(local bool) string {
	if local {
		return string(binary.LittleEndian.AppendUint32(nil, wire.LeaseShm))
	}
	return ""
}

// statusOf is the protocol's status for what an owner said.
func statusOf(err error) uint32 {
	switch lease.CodeOf(err) {
	case lease.NotFound, lease.Over, lease.Denied, lease.Invalid:
		return wire.StatusLease
	case lease.NoRoom, lease.Never, lease.Down, lease.Conflict:
		return wire.StatusBusy
	case lease.WrongPeer:
		return wire.StatusVersion
	}
	return wire.StatusInternal
}

// reply sends the answer, and f with its header.
func reply(c *net.UnixConn, status uint32, owners int, reason string, f *os.File) {
	reason = reason[:min(len(reason), wire.MaxLeasePayload)]
	var h [wire.LeaseAnswerSize]byte
	(&wire.LeaseAnswer{Status: status, Owners: uint32(owners), Size: uint32(len(reason))}).Encode(&h)
	b := append(h[:], reason...)
	if f == nil {
		_, _ = c.Write(b) // a client that has gone needs no answer
		return
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { _, _, _ = c.WriteMsgUnix(b, unix.UnixRights(int(fd)), nil) })
}

// refused tells of a caller who got no session; a stranger is one who may not use the lease.
func (s *Socket) refused(l *lease.Lease, who *caller, r *request, err error, stranger bool) {
	s.set.cfg.Refused(l, Refusal{UID: who.uid, PID: who.pid, Program: r.program, Stranger: stranger, Err: err})
}
