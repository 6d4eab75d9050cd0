package host

// Sockets of the leases, for package leasesock.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/leasesock"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// newSockets makes the set of the node's sockets.
func (h *Host) newSockets() (err error) {
	h.socks, err = leasesock.New(leasesock.Config{
		RunDir: h.cfg.RunDir, Base: h.base, Log: h.log,
		Lease: h.leaseNow, Open: h.session, Opened: h.opened, Refused: h.refused, Point: h.point,
	})
	return err
}

// leaseNow returns a lease in its present state.
func (h *Host) leaseNow(id string) (l lease.Lease, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if hd := h.leases[id]; hd != nil {
		return hd.rec.Lease, hd.rec.Phase == granted
	}
	return lease.Lease{}, false
}

// cleanDirs removes the directories of leases that no longer exist.
func (h *Host) cleanDirs() {
	live := func(id string) bool {
		hd := h.leases[id]
		return hd != nil && hd.rec.Phase == granted
	}
	h.cfg.Files.Keep(live)
	for _, id := range h.socks.Leftovers() {
		if !live(id) {
			h.removeSocket(id, nil)
		}
	}
}

// openSocket makes a lease's directory unless it exists, the files in it, and its socket, in the place of one whose path is gone.
func (h *Host) openSocket(hd *held) error {
	if h.cfg.noSockets {
		return nil
	}
	hd.opening.Lock()
	defer hd.opening.Unlock()
	h.mu.Lock()
	l, old := hd.rec.Lease, hd.sock
	h.mu.Unlock()
	if old != nil && exists(h.socks.Path(l.ID)) {
		return nil
	}
	if err := h.socks.MakeDir(l.ID); err != nil {
		return err
	}
	if err := h.cfg.Files.Write(l); err != nil {
		h.log.Error("containers of a job may not find its fraction", "lease", l.ID, "job", l.Request.Key.String(), "error", err)
	}
	h.point("socket-a-files")
	s, err := h.socks.Listen(&l)
	if err != nil {
		return err
	}
	h.mu.Lock()
	closed, live := h.closed, hd.rec.Phase == granted
	if live && !closed {
		hd.sock = s
	}
	h.mu.Unlock()
	switch {
	case !live:
		s.Close()
		return errLeaseEnded
	case closed:
		s.Close()
		return errStopping
	}
	s.Serve()
	if old != nil {
		old.Close()
	}
	return nil
}

var (
	errLeaseEnded = errors.New("lease socket: the lease has ended")
	errStopping   = errors.New("lease socket: the daemon is stopping") // the next one makes the socket
)

// exists reports whether there is something at a path, or whether that is not known.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR)
}

// lostSocket looks whether somebody has removed a lease's socket, or it could not be made before. It reports that at the second look in
// a row that finds none, and at later ones: clients that had connected before the removal have been accepted by then. mu is held.
func (h *Host) lostSocket(hd *held) bool {
	if h.cfg.noSockets || hd.sock != nil && exists(h.socks.Path(hd.rec.Lease.ID)) {
		hd.lost = 0
		return false
	}
	hd.lost++
	return hd.lost > 1
}

// lost is a lease without a socket.
type lost struct {
	hd    *held
	id    string
	looks int // that found none
}

// remakeSocket makes a lost socket again.
func (h *Host) remakeSocket(l lost) {
	switch err := h.openSocket(l.hd); {
	case errors.Is(err, errLeaseEnded):
		h.removeSocket(l.id, nil)
	case errors.Is(err, errStopping), err != nil && l.looks > 2: // the later looks' errors are the first one's
	case err != nil:
		h.log.Error("lease without socket", "lease", l.id, "error", err)
	default:
		h.log.Warn("socket of a lease was gone and has been made again", "lease", l.id)
	}
}

// removeSocket ends a lease's socket and removes its directory.
func (h *Host) removeSocket(id string, s *leasesock.Socket) {
	if h.cfg.noSockets {
		return
	}
	if s != nil {
		s.Close()
	}
	h.cfg.Files.Remove(id)
	if err := h.socks.RemoveDir(id); err != nil {
		h.log.Warn("directory of an ended lease stays", "lease", id, "error", err)
	}
}

// Counters count since the start of the daemon.
type Counters struct {
	Attached       uint64 // connections passed on for sessions whose connection was lost
	AttachesFailed uint64 // attempts to, without success
}

// Counters returns what was counted.
func (h *Host) Counters() Counters {
	return Counters{Attached: h.attached.Load(), AttachesFailed: h.attachesFailed.Load()}
}

// session opens a session at an owner, or a new connection of one.
func (h *Host) session(ctx context.Context, owner string, r lease.SessionRequest) (f *os.File, local bool, err error) {
	if _, attaches := wire.Attaches(r.Kind); attaches {
		defer func() {
			if err != nil {
				h.attachesFailed.Add(1)
			} else {
				h.attached.Add(1)
			}
		}()
	}
	if r.Part, err = h.partOf(&r); err != nil {
		return nil, false, err
	}
	p, err := h.peer(owner, "")
	if err != nil {
		return nil, false, err
	}
	if p.local {
		f, err = h.cfg.Local.Open(ctx, r)
		return f, true, err
	}
	if h.cfg.DialData == nil {
		return nil, false, lease.Errorf(lease.Internal, "this daemon cannot call the data ports of other nodes")
	}
	o, done := p.owner, func() {}
	if _, attaches := wire.Attaches(r.Kind); attaches {
		if o, done, err = h.dialAttach(p); err != nil {
			return nil, false, err
		}
	}
	defer done()
	f, err = h.cfg.DialData(ctx, o, p.addr, h.cfg.Node, r)
	if err != nil {
		return nil, false, fmt.Errorf("owner %s: %w", owner, err)
	}
	return f, false, nil
}

// attachShare is for how long sessions that lost their connections share a new one to their owner. It is
// shorter than the time that a client gives one attempt.
const attachShare = 2 * time.Second

// attachConn is a connection to an owner that only sessions use whose own connection was lost.
type attachConn struct {
	owner lease.Owner
	made  time.Time
	users int
}

// dialAttach connects to an owner for a session whose connection was lost. The daemons' usual
// connection is not used: the same cut is likely to have stopped it, and TCP resumes it only after seconds.
// Callers of the same time share a connection. The caller calls done once it has its answer.
func (h *Host) dialAttach(p *peer) (o lease.Owner, done func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.attaching[p.name]
	if c == nil || time.Since(c.made) > attachShare {
		if h.closed {
			return nil, nil, lease.Errorf(lease.Down, "the daemon is stopping")
		}
		o, err := h.cfg.DialOwner(p.name, p.addr)
		if err != nil {
			return nil, nil, fmt.Errorf("owner %s: %w", p.name, err)
		}
		c = &attachConn{owner: o, made: time.Now()}
		h.attaching[p.name] = c
	}
	c.users++
	return c.owner, func() { h.doneAttach(p.name, c) }, nil
}

// doneAttach closes a connection when its last user has left.
func (h *Host) doneAttach(owner string, c *attachConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c.users--; c.users > 0 {
		return
	}
	if h.attaching[owner] == c {
		delete(h.attaching, owner)
	}
	if o, ok := c.owner.(io.Closer); ok {
		_ = o.Close()
	}
}

// refused logs that a process got no session, within the rate of its user or of strangers.
func (h *Host) refused(l *lease.Lease, r leasesock.Refusal) {
	skipped, ok := uint64(0), false
	switch {
	case r.Stranger:
		skipped, ok = h.strangers.Pass()
	case r.UID == 0:
		skipped, ok = h.refusal(0)
	default: // a user's subordinate uids are many, and count as the user
		skipped, ok = h.refusal(l.Request.UID)
	}
	if !ok {
		return
	}
	h.log.Info("session refused", "lease", l.ID, "uid", r.UID, "pid", r.PID, "reason", r.Err, "skipped", skipped)
	e := audit.Of(audit.SessionRefuse, l, r.Err.Error())
	e.GPUs, e.UID, e.PID, e.Program, e.Skipped = nil, audit.UID(r.UID), uint32(max(0, r.PID)), r.Program, skipped
	h.audit(e)
}
