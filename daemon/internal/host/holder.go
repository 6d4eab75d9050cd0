package host

// The process that holds a lease: named by pid and start time, watched until it ends.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

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

// ended says whether a process has ended. With an error that is not known, as while this
// daemon has no descriptor left to look with.
func ended(p lease.Process) (bool, error) {
	s, err := process.Read(p.PID)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return err == nil && (s.Ended() || s.Start != p.Start), err
}

func alive(p lease.Process) bool {
	over, err := ended(p)
	return !over && err == nil
}

// watchHolder releases a lease when its holder ends. Where no pidfd can be waited for, hd.stop
// stays nil, and sweep looks instead.
func (h *Host) watchHolder(hd *held) {
	p := hd.rec.Lease.Request.Holder
	if p.PID == 0 {
		return
	}
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	over := err == unix.ESRCH
	if err == nil {
		if over, err = ended(p); over || err != nil { // the pidfd may be another process's
			_ = unix.Close(fd)
		}
	}
	if over {
		h.wg.Go(func() { h.release(h.base, hd, "its holder has ended", true) })
		return
	}
	if err != nil {
		return
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return
	}
	h.waitHolder(hd, raw, func() { _ = f.Close() })
}

// waitHolder waits for the end of a holder's pidfd in the background. It calls done, which
// closes the pidfd, when the lease ends.
func (h *Host) waitHolder(hd *held, pidfd syscall.RawConn, done func()) {
	ctx, stop := context.WithCancel(h.base)
	h.mu.Lock()
	hd.stop = stop
	over := hd.rec.Phase != granted
	h.mu.Unlock()
	if over {
		stop()
	}
	context.AfterFunc(ctx, done)
	h.wg.Go(func() {
		defer stop()
		err := pidfd.Read(func(fd uintptr) bool { return process.Exited(int(fd)) })
		switch {
		case ctx.Err() != nil: // the lease has ended
		case err != nil:
			h.mu.Lock()
			hd.stop = nil
			id := hd.rec.Lease.ID
			h.mu.Unlock()
			h.log.Warn("holder of a lease cannot be waited for; sluiced looks at it at intervals instead", "lease", id, "error", err)
		default:
			h.release(h.base, hd, "its holder has ended", true)
		}
	})
}
