// Package process names a process for good: by its id and the time at which it started,
// since the kernel gives an id again.
package process

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

// Stat is what /proc/PID/stat says of a process (proc(5)).
type Stat struct {
	Start uint64 // field 22: clock ticks from the boot of the machine to the start
	State byte   // field 3: 'R', 'S', ...; 'Z' is a zombie
}

// Ended says whether the process has ended and only waits for its parent.
func (s Stat) Ended() bool { return s.State == 'Z' || s.State == 'X' }

// Read reads the Stat of a process. If there is no such process, the error wraps
// fs.ErrNotExist.
func Read(pid int) (Stat, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Stat{}, err
	}
	defer f.Close()
	return read(f)
}

func read(f *os.File) (Stat, error) {
	b, err := io.ReadAll(f)
	if errors.Is(err, unix.ESRCH) { // it has ended since the file was opened
		err = fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	if err != nil {
		return Stat{}, err
	}
	return parse(f.Name(), b)
}

func parse(path string, b []byte) (Stat, error) {
	// Field 2 is the name in parentheses, which may hold anything.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 20 {
		return Stat{}, fmt.Errorf("%s has %d fields after the name, 20 expected", path, len(f))
	}
	start, err := strconv.ParseUint(string(f[19]), 10, 64)
	if err != nil {
		return Stat{}, fmt.Errorf("%s: start time: %w", path, err)
	}
	return Stat{Start: start, State: f[0][0]}, nil
}

// inJob matches a path that Slurm's cgroup plug-ins make: /slurm/uid_7/job_42/...
// (v1), /system.slice/slurmstepd.scope/job_42/... (v2).
var inJob = pattern.New(`(?m)^[0-9]+:[^:\n]*:/[^\n]*?slurm[^\n]*?/job_([0-9]+)(?:/step_([0-9a-z]+)[^/\n]*)?(?:/|$)`)

// SlurmJob is the job of Slurm's that a process is in, "" if none is seen. The text is that
// of /proc/PID/cgroup.
func SlurmJob(cgroup []byte) string {
	if m := inJob().FindSubmatch(cgroup); m != nil {
		return string(m[1])
	}
	return ""
}

// SlurmStep is the step of that job: its number, or "batch" and the like; "" if none is seen. With cgroup v1 not every hierarchy
// shows the step.
func SlurmStep(cgroup []byte) string {
	for _, m := range inJob().FindAllSubmatch(cgroup, -1) {
		if len(m[2]) > 0 {
			return string(m[2])
		}
	}
	return ""
}

// Start is the start time of a process, as in Stat.
func Start(pid int) (uint64, error) {
	s, err := Read(pid)
	return s.Start, err
}

// Exited says whether the process of a pidfd has ended.
func Exited(pidfd int) bool {
	f := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(f, 0)
	return err == nil && n > 0 && f[0].Revents&(unix.POLLIN|unix.POLLHUP) != 0
}
