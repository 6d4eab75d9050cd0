package host

// The process that holds a lease: named by pid and start time, watched until it ends.

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/process"
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
		err := raw.Read(func(fd uintptr) bool { return process.Exited(int(fd)) })
		if err == nil && ctx.Err() == nil {
			h.release(h.base, hd, "its holder has ended", true)
		}
	})
}
