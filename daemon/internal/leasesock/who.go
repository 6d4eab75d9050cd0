package leasesock

// Who is at the other end of a lease's socket, by the kernel: the peer's credentials, its
// user namespace and its cgroup.

import (
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

// caller is the peer of a connection.
type caller struct {
	uid, gid uint32
	pid      int // 0: in a PID namespace that cannot be seen from here
	fd       int // its pidfd, -1 for none
}

// step is the step of a job that the caller belongs to, "" if the kernel does not show it.
func (c *caller) step(job string) string {
	if c.pid == 0 {
		return ""
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", c.pid))
	if err != nil || c.gone() || process.SlurmJob(b) != job {
		return ""
	}
	return process.SlurmStep(b)
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
func (c *caller) gone() bool { return c.fd >= 0 && process.Exited(c.fd) }

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
	return mayInJob(b, l)
}

// mayInJob refuses a process whose cgroup shows that it belongs to another Slurm job than the lease.
// Leases of sluice run belong to no job of Slurm.
func mayInJob(cgroup []byte, l *lease.Lease) error {
	own := l.Request.Key.Job
	if job := process.SlurmJob(cgroup); job != "" && job != own && !form.IsRunJob(own) {
		return lease.Errorf(lease.Denied, "lease %s is of job %s, and a process of job %s asks", l.ID, own, job)
	}
	return nil
}

// Requests of namespaces' files, see ioctl_nsfs(2).
const (
	nsGetParent   = 0xb702
	nsGetOwnerUID = 0xb704
)

// mapped says whether uid is mapped into a process's user namespace. So another process that has got the
// pid of a caller who has ended cannot pass for that caller.
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
