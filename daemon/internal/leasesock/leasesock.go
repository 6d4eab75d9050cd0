// Package leasesock is the socket of each lease on its job's node: it makes them, asks the kernel
// who connects, and passes a connection to the lease's worker to those who may use the lease.
package leasesock

// The socket of a lease is RunDir/leases/ID/sock. The directory RunDir/leases/ID is root's.
// An older daemon left it to the lease's user, so nothing in it is opened, and no mode or
// owner is changed by a path through it: the socket is made in a directory of root's,
// RunDir/leases.new, and then renamed into its place, which follows no link. The directory
// stays when the daemon is restarted, since containers have it mounted.
//
// Everybody may connect: programs in a rootless container are subordinate users, whom no file mode
// can name. who.go asks the kernel who connects; serve.go has the protocol.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/internal/unixsock"
)

// Config is what the sockets need of the daemon. All of it is needed.
type Config struct {
	RunDir string
	Base   context.Context // its end ends the connections that are being answered
	Log    *slog.Logger
	// Lease is a lease as it is now, and whether it is granted. Of a lease that is no
	// longer known, which a caller may still ask for, nothing is needed but the false.
	Lease func(id string) (l lease.Lease, granted bool)
	// Open opens a session at one of a lease's owners. local says that the owner is on
	// this machine.
	Open func(ctx context.Context, owner string, r lease.SessionRequest) (f *os.File, local bool, err error)
	// Opened is called for a session that a process of this machine has on another machine. It closes pidfd, the process's.
	Opened func(owner string, r lease.SessionRequest, pidfd int)
	// Refused is called for each request that got no session.
	Refused func(*lease.Lease, Refusal)
	// Point is a step at which a test may end the daemon.
	Point func(name string)
}

// Refusal is a caller who got no session.
type Refusal struct {
	UID      uint32
	PID      int    // 0: in a PID namespace that cannot be seen from here
	Program  string // by its own word
	Stranger bool   // one who may not use the lease
	Err      error
}

// Set is the sockets of a node.
type Set struct {
	cfg  Config
	gate gate
	wg   sync.WaitGroup
}

// New makes the directories, which everybody may pass and only root write.
func New(cfg Config) (*Set, error) {
	s := &Set{cfg: cfg}
	// In this order: staging comes last, when all above it is root's alone.
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{{cfg.RunDir, 0o755}, {s.dir(), 0o755}, {s.staging(), 0o700}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return nil, fmt.Errorf("lease sockets: %w", err)
		}
	}
	for path, mode := range map[string]fs.FileMode{s.dir(): 0o755, s.staging(): 0o700} {
		if err := safefile.Dir(path); err != nil {
			return nil, fmt.Errorf("lease sockets: %w", err)
		}
		if err := os.Chmod(path, mode); err != nil { // whatever the umask
			return nil, fmt.Errorf("lease sockets: %w", err)
		}
	}
	return s, nil
}

// Wait waits until no connection is answered any more: after the end of Base, and Close of
// every socket.
func (s *Set) Wait() { s.wg.Wait() }

func (s *Set) point(name string) { s.cfg.Point(name) }

func (s *Set) dir() string { return filepath.Join(s.cfg.RunDir, "leases") }

// staging is where sockets are made.
func (s *Set) staging() string { return filepath.Join(s.cfg.RunDir, "leases.new") }

// Path is the path of a lease's socket.
func (s *Set) Path(id string) string { return filepath.Join(s.dir(), id, "sock") }

// Leftovers are the leases that have a directory here. What was being made is removed.
func (s *Set) Leftovers() (ids []string) {
	half, _ := os.ReadDir(s.staging())
	for _, e := range half {
		_ = os.Remove(filepath.Join(s.staging(), e.Name()))
	}
	entries, _ := os.ReadDir(s.dir())
	for _, e := range entries {
		if form.LeaseID(e.Name()).Valid() { // others are not ours
			ids = append(ids, e.Name())
		}
	}
	return ids
}

// Listen makes a lease's socket, and has it answered once Serve is called.
func (s *Set) Listen(l *lease.Lease) (*Socket, error) {
	ul, err := unixsock.Listen(s.Path(l.ID), unixsock.How{
		Mode: 0o666, Chown: true, UID: l.Request.UID, GID: l.Request.GID, Staging: s.staging(),
	})
	if err != nil {
		return nil, fmt.Errorf("lease socket: %w", err)
	}
	return &Socket{set: s, id: l.ID, was: *l, l: ul, gate: &s.gate}, nil
}

// Serve answers callers until Close.
func (s *Socket) Serve() { s.set.wg.Go(s.serve) }

// MakeDir makes a lease's directory, unless it is there. Everybody may pass it, since the
// socket in it is its user's alone, and only root may write: RunDir is in memory, which no
// quota of a user or a job counts.
func (s *Set) MakeDir(id string) error {
	path := filepath.Join(s.dir(), id)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("lease socket: %w", err)
	}
	// The parent is root's, so this is what a daemon has made, of whatever version.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("lease socket: open %s: %w", path, err)
	}
	defer unix.Close(fd)
	if err := unix.Fchown(fd, os.Geteuid(), os.Getegid()); err != nil {
		return fmt.Errorf("lease socket: chown %s: %w", path, err)
	}
	if err := unix.Fchmod(fd, 0o711); err != nil {
		return fmt.Errorf("lease socket: chmod %s: %w", path, err)
	}
	return nil
}

// RemoveDir removes a lease's directory.
func (s *Set) RemoveDir(id string) error {
	path := filepath.Join(s.dir(), id)
	// Root's again first, so that its user adds nothing while it is emptied.
	if fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err == nil {
		_ = unix.Fchown(fd, os.Geteuid(), os.Getegid())
		_ = unix.Close(fd)
	}
	return os.RemoveAll(path)
}
