package host

// Processes that end while they have sessions at other nodes. An owner cannot tell a client that was killed from one that is
// cut off; the node that the client ran on can.
//
//	opened    a pidfd for each process, lease and owner, and a goroutine that waits for its end
//	tell      the owner ends the process's sessions; tried again until it answers, or the lease has ended
//
// After a restart the daemon finds the processes by the sessions that its owners list (see rewatch).

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/process"
)

// watched is a process that has sessions of a lease at an owner.
type watched struct {
	owner, lease string
	pid          uint32
}

const (
	goneFirst = 100 * time.Millisecond // between attempts to tell the owner; doubled each time
	goneMost  = 5 * time.Second        // the longest of those pauses
)

// opened watches a process. It takes over the pidfd.
func (h *Host) opened(owner string, r lease.SessionRequest, pidfd int) {
	c := watched{owner, r.Lease, r.PID}
	h.mu.Lock()
	known := h.clients[c]
	// A process whose end has not been told yet had that number; its session lives until its grace is over.
	if h.closed || known != nil && !process.Exited(int(known.Fd())) {
		h.mu.Unlock()
		_ = unix.Close(pidfd)
		return
	}
	_ = unix.SetNonblock(pidfd, true)
	f := os.NewFile(uintptr(pidfd), "pidfd")
	h.clients[c] = f
	h.mu.Unlock()
	go h.await(c, f)
}

// await waits for a process's end, and tells the owner.
func (h *Host) await(c watched, f *os.File) {
	stop := context.AfterFunc(h.base, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool { return process.Exited(int(fd)) })
	}
	mine := func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.clients[c] == f
	}
	for wait := goneFirst; err == nil && mine() && h.base.Err() == nil; wait = min(2*wait, goneMost) {
		if _, live := h.leaseNow(c.lease); !live || h.tellGone(c) {
			break
		}
		select {
		case <-time.After(wait):
		case <-h.base.Done():
		}
	}
	h.mu.Lock()
	if h.clients[c] == f {
		delete(h.clients, c)
	}
	h.mu.Unlock()
	_ = f.Close()
}

// tellGone reports whether the owner knows now, so that it need not be called again.
func (h *Host) tellGone(c watched) bool {
	p, err := h.peer(c.owner, "")
	if err != nil {
		return false
	}
	m, ok := p.owner.(lease.Mourner)
	if !ok {
		return true
	}
	_, err = call(h.base, h, p, releaseTime, false, func(ctx context.Context, _ lease.Owner) (struct{}, error) {
		return struct{}{}, m.Gone(ctx, h.cfg.Node, c.lease, c.pid)
	})
	if err != nil {
		h.log.Debug("owner not told of a process's end", "owner", c.owner, "lease", c.lease, "pid", c.pid, "error", err)
	}
	return err == nil || lease.CodeOf(err) != lease.Down
}

// rewatch watches the processes that had sessions before this daemon was started. A number that is another process's by now is
// taken for the client's: its session then lives until its grace is over.
func (h *Host) rewatch() {
	owners := map[string]bool{}
	h.mu.Lock()
	for _, hd := range h.leases {
		if hd.rec.Phase == granted && hd.rec.Lease.Host == h.cfg.Node {
			for _, o := range lease.Owners(hd.rec.Lease.Grants) {
				owners[o] = o != h.cfg.Node
			}
		}
	}
	h.mu.Unlock()
	for o, other := range owners {
		if other {
			h.wg.Go(func() { h.rewatchAt(o) })
		}
	}
}

// rewatchAt asks one owner, until it answers.
func (h *Host) rewatchAt(owner string) {
	for wait := goneFirst; h.base.Err() == nil && !h.askSessions(owner); wait = min(2*wait, goneMost) {
		select {
		case <-time.After(wait):
		case <-h.base.Done():
		}
	}
}

// askSessions asks an owner for its sessions of this node's processes, and reports whether it has answered.
func (h *Host) askSessions(owner string) bool {
	p, err := h.peer(owner, "")
	var all []lease.Status
	if err == nil {
		all, err = h.listOf(h.base, p, h.cfg.Node)
	}
	for i := range all {
		h.rewatchSessions(owner, all[i].Sessions)
	}
	return err == nil || lease.CodeOf(err) != lease.Down
}

func (h *Host) rewatchSessions(owner string, sessions []lease.Session) {
	for _, s := range sessions {
		if s.Client == 0 {
			continue
		}
		fd, err := unix.PidfdOpen(int(s.Client), unix.PIDFD_NONBLOCK)
		switch {
		case err == nil:
			h.opened(owner, lease.SessionRequest{Lease: s.Lease, PID: s.Client}, fd)
		case errors.Is(err, unix.ESRCH):
			h.tellGone(watched{owner, s.Lease, s.Client})
		}
	}
}
