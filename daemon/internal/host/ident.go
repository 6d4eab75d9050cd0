package host

// Who somebody is, by the kernel: processes by pid and start time, the peer of a
// socket by its credentials, its user namespace and its cgroup.

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/process"
	"github.com/sluice-hpc/sluice/internal/unixsock"
)

// startOf is when a process started, 0 when it has ended or never was.
func startOf(pid int) uint64 {
	s, err := process.Read(pid)
	if err != nil || s.Ended() {
		return 0
	}
	return s.Start
}

func uidOf(pid int) (uint32, bool) {
	var st unix.Stat_t
	if unix.Stat(fmt.Sprintf("/proc/%d", pid), &st) != nil {
		return 0, false
	}
	return st.Uid, true
}

func alive(p lease.Process) bool { return p.PID > 0 && startOf(p.PID) == p.Start && p.Start != 0 }

// watchHolder releases a lease when its holder ends. Without pidfds sweep looks.
func (h *Host) watchHolder(hd *held) {
	p := hd.rec.Lease.Request.Holder
	if p.PID == 0 {
		return
	}
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	if err == unix.ENOSYS || err == unix.EINVAL || err == unix.EPERM {
		return
	}
	if err != nil || !alive(p) { // the pidfd is of this process, or it is gone
		if err == nil {
			_ = unix.Close(fd)
		}
		h.wg.Go(func() { h.release(h.base, hd, "its holder has ended", true) })
		return
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return
	}
	ctx, stop := context.WithCancel(h.base)
	h.mu.Lock()
	hd.stop = stop
	over := hd.rec.Phase != granted
	h.mu.Unlock()
	if over {
		stop()
	}
	context.AfterFunc(ctx, func() { _ = f.Close() })
	h.wg.Go(func() {
		defer stop()
		err := raw.Read(func(fd uintptr) bool { return exited(int(fd)) })
		if err == nil && ctx.Err() == nil {
			h.release(h.base, hd, "its holder has ended", true)
		}
	})
}

// exited says whether a pidfd's process has ended.
func exited(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0 && p[0].Revents&(unix.POLLIN|unix.POLLHUP) != 0
}

// caller is the peer of a connection.
type caller struct {
	uid, gid uint32
	pid      int // 0: in a PID namespace that cannot be seen from here
	fd       int // its pidfd, -1 for none
}

// callerOf asks the kernel; close the caller.
func callerOf(c *net.UnixConn) (caller, error) {
	p, pidfd, err := unixsock.OpenPeer(c)
	return caller{uid: p.UID, gid: p.GID, pid: p.PID, fd: pidfd}, err
}

func (c *caller) close() {
	if c.fd >= 0 {
		_ = unix.Close(c.fd)
		c.fd = -1
	}
}

// gone says that what was read of /proc/PID may have been another process's.
func (c *caller) gone() bool { return c.fd >= 0 && exited(c.fd) }

// may says whether the caller may use a lease, and why not.
func (c *caller) may(l *lease.Lease) error {
	if c.uid == 0 {
		return nil
	}
	r := &l.Request
	if c.uid != r.UID {
		// A container maps its user ids to some of the user's: then its user
		// namespace is the user's own, and knows the caller.
		if c.pid == 0 || r.UID == 0 || !mapped(c.pid, c.uid) || !nsOwnedBy(c.pid, r.UID) {
			return lease.Errorf(lease.Denied, "lease %s is of uid %d, and uid %d asks", l.ID, r.UID, c.uid)
		}
	}
	if c.pid == 0 {
		return nil
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", c.pid))
	if c.gone() {
		return lease.Errorf(lease.Denied, "process %d has ended", c.pid)
	}
	if err != nil {
		return nil // hidden from us: the user id has to do
	}
	if job := process.SlurmJob(b); job != "" && job != r.Key.Job && !form.IsRunJob(r.Key.Job) {
		return lease.Errorf(lease.Denied, "lease %s is of job %s, and a process of job %s asks", l.ID, r.Key.Job, job)
	}
	return nil
}

// Requests of namespaces' files, see ioctl_nsfs(2).
const (
	nsGetParent   = 0xb702
	nsGetOwnerUID = 0xb704
)

// mapped says whether uid is one of those of a process's user namespace. A process that
// has taken over the number of a caller who is gone cannot speak for him so.
func mapped(pid int, uid uint32) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		var inside, outside, n uint64
		if _, err := fmt.Sscan(line, &inside, &outside, &n); err == nil && uint64(uid) >= outside && uint64(uid)-outside < n {
			return true
		}
	}
	return false
}

// nsOwnedBy says whether a process's user namespace, or one around it but the
// initial one, was made by uid.
func nsOwnedBy(pid int, uid uint32) bool {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/user", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	var own unix.Stat_t
	if unix.Stat("/proc/self/ns/user", &own) != nil {
		_ = unix.Close(fd)
		return false
	}
	for range 32 { // the kernel's own limit of nesting
		var st unix.Stat_t
		if unix.Fstat(fd, &st) != nil || st.Ino == own.Ino && st.Dev == own.Dev {
			break
		}
		var have uint32
		if err := ioctlUint32(fd, nsGetOwnerUID, &have); err == nil && have == uid {
			_ = unix.Close(fd)
			return true
		}
		up, err := unix.IoctlRetInt(fd, nsGetParent)
		if err != nil {
			break
		}
		_ = unix.Close(fd)
		fd = up
	}
	_ = unix.Close(fd)
	return false
}
