package test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inner is the variable by which the tests know that they are watched.
const inner = "SLUICE_OCI_INNER"

// group is the name of what the engines make of control groups, and of the directory of all that is made.
func group() string { return filepath.Base(os.TempDir()) }

func TestMain(m *testing.M) {
	if os.Args[0] == measure {
		os.Exit(measured(os.Args[1], os.Args[2:]))
	}
	if os.Getenv(inner) == "" {
		os.Exit(watched())
	}
	if err := build(os.TempDir()); err != nil {
		fmt.Fprintln(os.Stderr, "test images:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// watched runs the tests in a process of their own, and fails unless the machine is as it was: no process of an
// engine's or of a container's, wherever it has gone, no mount, no control group, no file but the engines' own
// programs'. A network namespace without a process or a mount is not.
func watched() int {
	runtime.LockOSThread() // its end would be the tests'
	dir, err := os.MkdirTemp("", "oci")
	if err == nil {
		err = errors.Join(os.Chmod(dir, 0o777|os.ModeSticky), unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	before := elsewhere()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inner+"=1", "TMPDIR="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	// Whose parent has ended is ours by now: engines wait for such ones to be gone.
	var status unix.WaitStatus
	for {
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == nil && pid == cmd.Process.Pid {
			break
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			fmt.Fprintln(os.Stderr, "wait:", err)
			return 1
		}
	}
	left := slices.Concat(processes(), mountsOf(dir), groupsOf(filepath.Base(dir)))
	if err := os.RemoveAll(dir); err != nil {
		left = append(left, err.Error())
	}
	for _, f := range elsewhere() {
		if !slices.Contains(before, f) {
			left = append(left, f)
		}
	}
	for _, l := range left {
		fmt.Fprintln(os.Stderr, "left behind:", l)
	}
	if len(left) > 0 || !status.Exited() {
		return 1
	}
	return status.ExitStatus()
}

// processes waits for the last of our children to end, ends those that do not, and names them.
func processes() (left []string) {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if errors.Is(err, unix.ECHILD) {
			return left
		}
		if pid != 0 || time.Now().Before(deadline) {
			continue
		}
		tasks, _ := filepath.Glob("/proc/self/task/*/children")
		for _, t := range tasks {
			b, _ := os.ReadFile(t)
			for pid := range strings.FieldsSeq(string(b)) {
				line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
				left = append(left, "process "+pid+" "+strings.ReplaceAll(string(line), "\x00", " "))
				var n int
				if _, err := fmt.Sscan(pid, &n); err == nil {
					_ = unix.Kill(n, unix.SIGKILL)
				}
			}
		}
		deadline = time.Now().Add(time.Minute)
	}
}

// mountsOf takes away what is mounted below dir, and names it.
func mountsOf(dir string) (left []string) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return []string{err.Error()}
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); strings.Contains(line, dir) && len(f) > 1 {
			left = append(left, "mount "+f[1])
			_ = unix.Unmount(f[1], unix.MNT_DETACH)
		}
	}
	return left
}

// groupsOf removes the empty control groups of that name, which engines leave for their next container, and names
// those that something is in.
func groupsOf(name string) (left []string) {
	var found []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, name) {
			found = append(found, path)
		}
		return nil // others come and go meanwhile
	})
	for _, path := range slices.Backward(found) {
		if err := unix.Rmdir(path); err != nil && !errors.Is(err, unix.ENOENT) {
			left = append(left, fmt.Sprintf("control group %s: %v", path, err))
		}
	}
	return left
}

// elsewhere are the places in which engines keep things unless they are told otherwise, with the times of changes.
func elsewhere() (out []string) {
	for _, pattern := range []string{
		"/run/docker", "/run/docker/*", "/run/containerd", "/run/containerd/*", "/run/crun", "/run/runc", "/run/libpod", "/run/netns", "/run/cdi", "/run/user",
		"/dev/shm/libpod*", "/var/lib/docker", "/var/lib/containerd", "/var/lib/containers", "/var/lib/containers/*", "/var/lib/cni", "/etc/cni/net.d", "/opt/containerd",
	} {
		found, _ := filepath.Glob(pattern)
		for _, f := range found {
			if fi, err := os.Lstat(f); err == nil {
				out = append(out, fmt.Sprint(f, " ", fi.ModTime()))
			}
		}
	}
	return out
}
