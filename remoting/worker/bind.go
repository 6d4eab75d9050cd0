package worker

// What a session gives up, before it reads a byte of its client.
//
//	Confine   before the driver is loaded, in a process that then becomes the
//	          session by exec: first in line when memory is short, its own /dev,
//	          no capability but those that bind needs, no_new_privs, and, in a sandbox,
//	          only files of its own
//	bind      when the client is known: the job's user, no dump, no core, and no
//	          system calls that a session has no use for
//
// Everything holds for all threads: what only works for one is done before exec,
// and the rest by the C library (set*id), a signal to each (capabilities) or the
// kernel (seccomp's TSYNC).

// #include "bind.h"
import "C"

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/process"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// plainDevices are the device files that any program may want.
var plainDevices = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}

// Confinement is what Confine does.
type Confinement struct {
	Devices string       // the device files of /dev with commas between, control.PlainDevices or control.NoDevices
	Sandbox sandbox.Mode // of the session
	Log     *slog.Logger // is told when a sandbox of mode Auto has no files

	Driver Driver
	Store  string // of images
	// Content is the directory of content, "" if there is none.
	Content string
	Dir     string // of accounts, "" if sessions have them as descriptors only
	Shared  string // of the leases' directories for /dev/shm, "" if there are none
}

// Confine prepares this process, whose only purpose is to become a session or the probe, and
// restarts it with args.
func Confine(c Confinement, args []string) error {
	runtime.LockOSThread()
	if err := process.SetOOMScore(process.OOMSession); err != nil {
		return fmt.Errorf("confine: %w", err)
	}
	var devices []string
	if c.Devices == control.PlainDevices {
		devices = []string{}
	} else if c.Devices != control.NoDevices {
		devices = strings.Split(c.Devices, ",")
	}
	if devices != nil {
		if err := privateDev(devices); err != nil {
			return err
		}
	}
	if err := boundCaps(); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("confine: no_new_privs: %w", err)
	}
	if c.Sandbox.Files() {
		if err := c.enforce(devices); err != nil && c.Sandbox == sandbox.On {
			return fmt.Errorf("confine: %w; set worker.sandbox: auto to run without it", err)
		} else if err != nil && !errors.Is(err, sandbox.ErrNoLandlock) { // which the daemon has said
			c.Log.Warn("a session goes without a sandbox of its files", "error", err)
		}
	}
	if devices != nil {
		if err := holdSharedDir(); err != nil {
			return err
		}
	}
	// The control socket stays open across this; everything else Go opens does not.
	if err := syscall.Exec("/proc/self/exe", args, os.Environ()); err != nil {
		return fmt.Errorf("confine: restart: %w", err)
	}
	return nil
}

// boundCaps drops all capabilities but those of bind from what this thread can ever have. A process without
// the right to do so has none that it could lose.
func boundCaps() error {
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if c == unix.CAP_SETUID || c == unix.CAP_SETGID {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if err != nil && !errors.Is(err, unix.EINVAL) && (!errors.Is(err, unix.EPERM) || os.Geteuid() == 0) {
			return fmt.Errorf("confine: drop capability %d: %w", c, err)
		}
	}
	return nil
}

// enforce confines this thread to the files of a session.
func (c *Confinement) enforce(devices []string) error {
	f, err := sandbox.SessionFiles([]string{c.Driver.LibCUDA, c.Driver.LibNVML}, devices)
	if err != nil {
		return err
	}
	f.Fill = append(f.Fill, c.Store)
	if c.Content != "" {
		f.Fill = append(f.Fill, c.Content)
	}
	f.Use = append(f.Use, c.Dir)
	f.Fill = append(f.Fill, c.Shared)
	if c.Dir == "" {
		f.Fill = append(f.Fill, compileCache())
	}
	return f.Enforce()
}

// compileCache is the driver's directory of kernels that it has compiled, which the sessions of a stand-alone worker share. It is
// made here, since sessions cannot. Those of a daemon run as other users than the one whose directory this would be.
func compileCache() string {
	dir := os.Getenv("CUDA_CACHE_PATH")
	if home := os.Getenv("HOME"); dir == "" && home != "" {
		dir = filepath.Join(home, ".nv")
	}
	if dir != "" && os.MkdirAll(dir, 0o755) != nil {
		return ""
	}
	return dir
}

// privateDev gives this thread, and what it becomes, a /dev of these files alone.
func privateDev(devices []string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("confine: mount namespace: %w; set worker.confine_dev: false to run without it", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("confine: make mounts private: %w", err)
	}
	// They are opened before the new /dev hides them, and bound by descriptor.
	fds := map[string]int{}
	for _, p := range append(append([]string(nil), plainDevices...), devices...) {
		if dir := filepath.Dir(filepath.Clean(p)); dir != "/dev" && dir != control.VerbsDir {
			return fmt.Errorf("confine: %q is not a file of /dev", p)
		}
		fd, err := unix.Open(p, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("confine: %s: %w", p, err)
		}
		fds[p] = fd
	}
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=755,size=64k"); err != nil {
		return fmt.Errorf("confine: /dev: %w", err)
	}
	for p, fd := range fds {
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return fmt.Errorf("confine: %w", err)
		}
		f, err := os.OpenFile(p, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("confine: %w", err)
		}
		f.Close()
		if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", fd), p, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("confine: bind %s: %w", p, err)
		}
		unix.Close(fd)
	}
	if err := os.Mkdir(ownShared, 0o700); err != nil {
		return fmt.Errorf("confine: %w", err)
	}
	if err := os.Symlink(fmt.Sprintf("/proc/self/fd/%d", control.SharedDirFD), "/dev/shm"); err != nil {
		return fmt.Errorf("confine: %w", err)
	}
	return nil
}

// ownShared is what /dev/shm is before the session has a lease.
const ownShared = "/dev/shm-of-no-lease"

// holdSharedDir opens the directory behind /dev/shm for a session that has no lease yet. /dev/shm is a link to a descriptor, because
// the session cannot mount when its lease is known: setSharedDir then puts the lease's directory there. Sessions of a lease share that
// directory, since driver 580 keeps a file for each process in /dev/shm (seen by strace) and others open it by its name.
func holdSharedDir() error {
	fd, err := unix.Open(ownShared, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("confine: %s: %w", ownShared, err)
	}
	return setSharedDir(fd, 0)
}

// setSharedDir makes the directory fd the session's /dev/shm, and closes fd.
func setSharedDir(fd, flags int) error {
	defer unix.Close(fd)
	if err := unix.Dup3(fd, control.SharedDirFD, flags); err != nil {
		return fmt.Errorf("confine: /dev/shm: %w", err)
	}
	return nil
}

// bind makes this process the job's user's.
func bind(b *control.Bind) error {
	core := unix.Rlimit{}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &core); err != nil {
		return fmt.Errorf("bind: core limit: %w", err)
	}
	if err := syscall.Setgroups(b.Groups); err != nil {
		return fmt.Errorf("bind: groups %v: %w", b.Groups, err)
	}
	if err := syscall.Setresgid(int(b.GID), int(b.GID), int(b.GID)); err != nil {
		return fmt.Errorf("bind: gid %d: %w", b.GID, err)
	}
	if err := syscall.Setresuid(int(b.UID), int(b.UID), int(b.UID)); err != nil {
		return fmt.Errorf("bind: uid %d: %w", b.UID, err)
	}
	if err := dropCaps(); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("bind: dumpable: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("bind: death signal: %w", err)
	}
	return nil
}

// capTime is how long the threads may take to drop their capabilities.
const capTime = 5 * time.Second

// dropCaps leaves no thread a capability. To become another user drops nearly all of
// them; to stay root drops none, and each thread has to be told.
func dropCaps() error {
	told := map[int]bool{}
	until := time.Now().Add(capTime)
	// A list of threads is cut short where one of them ends; two in a row are not.
	for clean := 0; clean < 2; {
		left, err := capable()
		if err != nil {
			return fmt.Errorf("capabilities: %w", err)
		}
		if len(left) == 0 {
			clean++
			continue
		}
		clean = 0
		if time.Now().After(until) {
			return fmt.Errorf("capabilities: threads %v have not dropped theirs in %v", left, capTime)
		}
		if len(told) == 0 && C.sl_caps_handler() != 0 {
			return errors.New("capabilities: the C library has no signal to reach every thread; run leases as another user than root")
		}
		for _, tid := range left {
			if !told[tid] {
				told[tid] = true
				_ = unix.Tgkill(os.Getpid(), tid, C.SL_CAPS_SIGNAL) // or it is gone
			}
		}
		time.Sleep(20 * time.Microsecond)
	}
	return nil
}

// capable lists the threads of this process that have any capability.
func capable() (tids []int, err error) {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return nil, err
	}
	for _, t := range tasks {
		b, err := os.ReadFile("/proc/self/task/" + t.Name() + "/status")
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended
		} else if err != nil {
			return nil, err
		}
		for _, set := range []string{"\nCapInh:\t", "\nCapPrm:\t", "\nCapEff:\t", "\nCapAmb:\t"} {
			_, v, ok := bytes.Cut(b, []byte(set))
			v, _, _ = bytes.Cut(v, []byte("\n"))
			if !ok || len(bytes.Trim(v, "0")) > 0 {
				tid, err := strconv.Atoi(t.Name())
				if err != nil {
					return nil, err
				}
				tids = append(tids, tid)
				break
			}
		}
	}
	return tids, nil
}
