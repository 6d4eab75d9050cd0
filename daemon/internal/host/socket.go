package host

// A lease's socket, docs/protocol.md "Lease socket".
//
//	accept -> 64 bytes, within requestTime -> who is it -> the lease's owner of that
//	number -> connected socket -> header with it by SCM_RIGHTS -> closed
//
// The directory RunDir/leases/ID is root's. An older daemon left it to the lease's
// user, so nothing in it is opened, and no mode or owner is changed by a path through
// it: the socket is made aside, in a directory of root's, and then renamed into its
// place, which follows no link. The directory stays when the daemon is started anew,
// since containers have it mounted.
//
// Everybody may connect, since a rootless container's programs are subordinate users of
// whom no mode of a file knows: who it is, the kernel says.
//
// Each lease has a goroutine that accepts and at most maxOpen that answer. A
// crowd on one lease waits in that socket's own backlog.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/internal/unixsock"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Times and numbers of a lease's socket; remoting/wire has its messages.
const (
	requestTime = 5 * time.Second
	openTime    = 15 * time.Second
	strangeTime = 20 * time.Millisecond // that a stranger's request may take to arrive
	maxOpen     = 64                    // connections of one lease that are being answered
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
func (g *gate) enter(s *socket) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cond == nil {
		g.cond = sync.NewCond(&g.mu)
	}
	for !s.closed && (s.open >= maxOpen || g.all >= crowded && s.open >= crowdOpen) {
		g.cond.Wait()
	}
	if s.closed {
		return false
	}
	s.open++
	g.all++
	return true
}

func (g *gate) leave(s *socket) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s.open--
	g.all--
	g.cond.Broadcast()
}

// socket is a lease's listener.
type socket struct {
	l      *net.UnixListener
	gate   *gate
	open   int  // gate.mu
	closed bool // gate.mu
}

func (s *socket) close() {
	s.gate.mu.Lock()
	s.closed = true
	if s.gate.cond != nil {
		s.gate.cond.Broadcast()
	}
	s.gate.mu.Unlock()
	_ = s.l.Close()
}

func (h *Host) dir() string { return filepath.Join(h.cfg.RunDir, "leases") }

// staging is where sockets are made.
func (h *Host) staging() string { return filepath.Join(h.cfg.RunDir, "leases.new") }

// prepareDir makes the directories, which everybody may pass and only root write.
func (h *Host) prepareDir() error {
	// In this order: who makes staging first makes all above it root's alone.
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{{h.cfg.RunDir, 0o755}, {h.dir(), 0o755}, {h.staging(), 0o700}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return fmt.Errorf("lease sockets: %w", err)
		}
	}
	for _, path := range []string{h.dir(), h.staging()} {
		if err := safefile.Dir(path); err != nil {
			return fmt.Errorf("lease sockets: %w", err)
		}
	}
	for path, mode := range map[string]fs.FileMode{h.dir(): 0o755, h.staging(): 0o700} { // whatever the umask
		if err := os.Chmod(path, mode); err != nil {
			return fmt.Errorf("lease sockets: %w", err)
		}
	}
	return nil
}

// cleanDirs removes the directories of leases that are no more, and what was being made.
func (h *Host) cleanDirs() {
	live := func(id string) bool {
		hd := h.leases[id]
		return hd != nil && hd.rec.Phase == granted
	}
	h.cfg.Files.Keep(live)
	half, _ := os.ReadDir(h.staging())
	for _, e := range half {
		_ = os.Remove(filepath.Join(h.staging(), e.Name()))
	}
	entries, err := os.ReadDir(h.dir())
	if err != nil {
		return
	}
	for _, e := range entries {
		if !form.IsLeaseID(e.Name()) {
			continue // not ours
		}
		if !live(e.Name()) {
			h.removeSocket(e.Name(), nil)
		}
	}
}

// openSocket makes a lease's directory, unless it is there, what is in it, and its socket.
func (h *Host) openSocket(hd *held) error {
	l := hd.rec.Lease
	if err := h.makeDir(l.ID); err != nil {
		return fmt.Errorf("lease socket: %w", err)
	}
	if err := h.cfg.Files.Write(l); err != nil {
		h.log.Error("containers of a job may not find its fraction", "lease", l.ID, "job", l.Request.Key.String(), "error", err)
	}
	h.point("socket-a-files")
	ul, err := unixsock.Listen(h.Socket(l.ID), unixsock.How{
		Mode: 0o666, Chown: true, UID: l.Request.UID, GID: l.Request.GID, Staging: h.staging(),
	})
	if err != nil {
		return fmt.Errorf("lease socket: %w", err)
	}
	s := &socket{l: ul, gate: &h.gate}
	h.mu.Lock()
	keep := !h.closed && hd.rec.Phase == granted
	if keep {
		hd.sock = s
	}
	h.mu.Unlock()
	if !keep {
		s.close()
		return errors.New("lease socket: the lease has ended")
	}
	h.wg.Go(func() { h.serve(s, hd) })
	return nil
}

// makeDir makes what everybody may pass, since the socket in it is its user's alone, and
// only root write: RunDir is in memory, which no quota of a user or a job counts.
func (h *Host) makeDir(id string) error {
	path := filepath.Join(h.dir(), id)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	// The parent is root's, so this is what a daemon has made, of whatever version.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Fchown(fd, os.Geteuid(), os.Getegid()); err != nil {
		return &fs.PathError{Op: "chown", Path: path, Err: err}
	}
	if err := unix.Fchmod(fd, 0o711); err != nil {
		return &fs.PathError{Op: "chmod", Path: path, Err: err}
	}
	return nil
}

// removeSocket ends a lease's socket and removes its directory.
func (h *Host) removeSocket(id string, s *socket) {
	if s != nil {
		s.close()
	}
	h.cfg.Files.Remove(id)
	path := filepath.Join(h.dir(), id)
	// Root's again first, so that its user adds nothing while it is emptied.
	if fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err == nil {
		_ = unix.Fchown(fd, os.Geteuid(), os.Getegid())
		_ = unix.Close(fd)
	}
	if err := os.RemoveAll(path); err != nil {
		h.log.Warn("directory of an ended lease stays", "lease", id, "error", err)
	}
}

// serve accepts.
func (h *Host) serve(s *socket, hd *held) {
	for h.gate.enter(s) {
		c, err := s.l.AcceptUnix()
		if err != nil {
			h.gate.leave(s)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			h.log.Warn("lease socket: accept", "lease", hd.rec.Lease.ID, "error", err)
			select { // no descriptors left, most likely
			case <-time.After(100 * time.Millisecond):
			case <-h.base.Done():
				return
			}
			continue
		}
		h.wg.Go(func() {
			defer h.gate.leave(s)
			defer c.Close()
			// A daemon that stops waits for nobody.
			stop := context.AfterFunc(h.base, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
			defer stop()
			h.answer(c, hd)
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
func (h *Host) answer(c *net.UnixConn, hd *held) {
	who, err := callerOf(c)
	if err != nil {
		return
	}
	defer who.close()
	h.mu.Lock()
	l, ok := hd.rec.Lease, hd.rec.Phase == granted
	h.mu.Unlock()
	_ = c.SetDeadline(time.Now().Add(requestTime))
	var b [wire.LeaseRequestSize]byte
	if denied := who.may(&l); denied != nil {
		h.deny(c, b[:], &l, &who, denied)
		return
	}
	if err := readFull(c, b[:]); err != nil {
		return
	}
	r, err := parseRequest(b[:])
	if err != nil {
		h.refused(&l, &who, &r, err)
		return
	}
	owners := ownersOf(l.Grants)
	status, err := uint32(wire.StatusLease), error(nil)
	switch {
	case !ok:
		err = lease.Errorf(lease.Over, "lease %s has ended", l.ID)
	case r.version != wire.LeaseVersion:
		status, err = wire.StatusVersion, lease.Errorf(lease.Invalid, "lease socket: version %d asked, %d spoken here; the shim and sluiced have to be of one release", r.version, wire.LeaseVersion)
	case !wire.SessionOpens(r.kind):
		err = lease.Errorf(lease.Invalid, "lease socket: session of kind %d: want %d or %d", r.kind, wire.SessionCompute, wire.SessionObserve)
	case r.features != 0:
		err = lease.Errorf(lease.Invalid, "lease socket: features %#x are not known in version %d", r.features, wire.LeaseVersion)
	case uint64(r.index) >= uint64(len(owners)):
		err = lease.Errorf(lease.Invalid, "lease %s has %d owners, number %d asked", l.ID, len(owners), r.index)
	}
	if err != nil {
		h.refused(&l, &who, &r, err)
		reply(c, status, len(owners), err.Error(), nil)
		return
	}
	h.point("open-a-checked")
	ctx, cancel := context.WithTimeout(h.base, openTime)
	defer cancel()
	f, err := h.session(ctx, owners[r.index], lease.SessionRequest{Lease: l.ID, Kind: r.kind, PID: uint32(max(0, who.pid)), UID: l.Request.UID, Program: r.program})
	_ = c.SetDeadline(time.Now().Add(requestTime))
	if err != nil {
		h.refused(&l, &who, &r, err)
		reply(c, statusOf(err), len(owners), err.Error(), nil)
		return
	}
	defer f.Close()
	h.point("open-b-connected")
	reply(c, wire.StatusOK, len(owners), flags(h.isLocal(owners[r.index])), f)
	h.point("open-c-passed")
}

// deny answers somebody who may not use the lease. His request is read first, since he
// would not see the answer otherwise, but hardly waited for; and what anybody can cause to
// be written down is bounded.
func (h *Host) deny(c *net.UnixConn, b []byte, l *lease.Lease, who *caller, reason error) {
	_ = c.SetReadDeadline(time.Now().Add(strangeTime))
	if readFull(c, b) == nil {
		reply(c, wire.StatusLease, 0, reason.Error(), nil)
	}
	if skipped, ok := h.strangers.Pass(); ok {
		r, _ := parseRequest(b)
		h.noSession(l, who, &r, reason, skipped)
	}
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

// session opens one at an owner.
func (h *Host) session(ctx context.Context, owner string, r lease.SessionRequest) (*os.File, error) {
	p, err := h.peer(owner, "")
	if err != nil {
		return nil, err
	}
	if p.local {
		return h.cfg.Local.Open(ctx, r)
	}
	if h.cfg.DialData == nil {
		return nil, lease.Errorf(lease.Internal, "there is no way to the data ports of other nodes")
	}
	f, err := h.cfg.DialData(ctx, p.owner, p.addr, h.cfg.Node, r)
	if err != nil {
		return nil, fmt.Errorf("owner %s: %w", owner, err)
	}
	return f, nil
}

// flags is the payload of a good answer.
func flags(local bool) string {
	if local {
		return string(binary.LittleEndian.AppendUint32(nil, wire.LeaseShm))
	}
	return ""
}

// isLocal says whether an owner is this daemon's own.
func (h *Host) isLocal(owner string) bool {
	p, err := h.peer(owner, "")
	return err == nil && p.local
}

// statusOf is the protocol's status for what an owner said.
func statusOf(err error) uint32 {
	switch codeOf(err) {
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
		_, _ = c.Write(b) // who has gone needs no answer
		return
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { _, _, _ = c.WriteMsgUnix(b, unix.UnixRights(int(fd)), nil) })
}

// refused writes that somebody who may use the lease got no session.
func (h *Host) refused(l *lease.Lease, who *caller, r *request, err error) {
	if skipped, ok := h.refusal(who.uid); ok {
		h.noSession(l, who, r, err, skipped)
	}
}

func (h *Host) noSession(l *lease.Lease, who *caller, r *request, err error, skipped uint64) {
	h.log.Info("session refused", "lease", l.ID, "uid", who.uid, "pid", who.pid, "reason", err, "skipped", skipped)
	e := audit.Of(audit.SessionRefuse, l, err.Error())
	e.GPUs, e.UID, e.PID, e.Program, e.Skipped = nil, audit.UID(who.uid), uint32(max(0, who.pid)), r.program, skipped
	h.audit(e)
}
