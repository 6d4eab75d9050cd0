package worker

// What a session gives up, before it reads a byte of its client.
//
//	Confine   before the driver is loaded, in a process that then becomes the
//	          session by exec: first in line when memory is short, its own /dev,
//	          no capability but those that bind needs, no_new_privs
//	bind      when the client is known: the job's user, no dump, no core, and the
//	          system calls below refused
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
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/process"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// NoDevices leaves /dev as it is.
const NoDevices = "none"

// plainDevices are the device files that any program may want.
var plainDevices = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}

// Confine prepares this process, whose only purpose is to become a session, and
// starts it anew with args. devices are device files with commas between.
func Confine(devices string, args []string) error {
	runtime.LockOSThread()
	if err := process.SetOOMScore(process.OOMSession); err != nil {
		return fmt.Errorf("confine: %w", err)
	}
	if devices != NoDevices {
		if err := privateDev(strings.Split(devices, ",")); err != nil {
			return err
		}
	}
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if c == unix.CAP_SETUID || c == unix.CAP_SETGID {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("confine: drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("confine: no_new_privs: %w", err)
	}
	// The control socket stays open across this; everything else Go opens does not.
	if err := syscall.Exec("/proc/self/exe", args, os.Environ()); err != nil {
		return fmt.Errorf("confine: start anew: %w", err)
	}
	return nil
}

// privateDev gives this thread, and what it becomes, a /dev of these files alone.
func privateDev(devices []string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("confine: mount namespace: %w; worker.confine_dev: false does without", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("confine: make mounts private: %w", err)
	}
	// They are opened before the new /dev hides them, and bound by descriptor.
	fds := map[string]int{}
	for _, p := range append(append([]string(nil), plainDevices...), devices...) {
		if filepath.Dir(filepath.Clean(p)) != "/dev" {
			return fmt.Errorf("confine: %q is no file of /dev", p)
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
	if err := os.Mkdir("/dev/shm", 0o755); err != nil {
		return fmt.Errorf("confine: %w", err)
	}
	if err := unix.Mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=1777"); err != nil {
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
	if !b.Seccomp {
		return nil
	}
	if err := loadFilter(); err != nil {
		return fmt.Errorf("bind: seccomp: %w; worker.seccomp: false does without", err)
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

// loadFilter puts policy over all threads.
func loadFilter() error {
	native, err := arch.GetInfo("")
	if err != nil {
		return err
	}
	prog, err := policy.Assemble()
	if err != nil {
		return err
	}
	// Any program can enter the kernel by the table of another architecture (int 0x80),
	// where the numbers below mean nothing. What Assemble makes allows all of that.
	prog = append([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 4}, // seccomp_data.arch
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(native.ID), SkipTrue: 1},
		bpf.RetConstant{Val: uint32(seccomp.ActionErrno) | uint32(unix.ENOSYS)},
	}, prog...)
	raw, err := bpf.Assemble(prog)
	if err != nil {
		return err
	}
	f := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		f[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	p := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	tid, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return errno
	}
	if tid != 0 {
		return fmt.Errorf("thread %d has a filter of its own", tid)
	}
	return nil
}

// policy refuses what neither the driver nor a session has use for. A new thread
// is made by clone with CLONE_THREAD; clone3 hides its flags from the filter, so it
// is said not to exist and the C library falls back.
var policy = seccomp.Policy{
	DefaultAction: seccomp.ActionAllow,
	Syscalls: []seccomp.SyscallGroup{
		{Action: seccomp.ActionErrno, Names: []string{
			"execve", "execveat", "fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd",
			"mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
			"setns", "unshare", "bpf", "perf_event_open", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module",
			"keyctl", "add_key", "request_key", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register",
			"open_by_handle_at", "name_to_handle_at", "fanotify_init", "reboot", "swapon", "swapoff", "syslog", "acct", "quotactl",
			"settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname", "personality", "vhangup",
			"mknod", "mknodat", "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid", "setfsgid",
			"capset", "lookup_dcookie",
		}},
		{Action: seccomp.ActionErrno, NamesWithCondtions: append(sockets(),
			seccomp.NameWithConditions{Name: "clone", Conditions: []seccomp.Condition{{Argument: 0, Operation: seccomp.BitsNotSet, Value: unix.CLONE_THREAD}}},
		)},
		{Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS), Names: []string{"clone3"}},
	},
}

// sockets refuses all families but those that somebody here may speak, and raw
// sockets. The filter compares 64 bits of an argument of which the kernel takes 32, so
// it is the exceptions that are named.
func sockets() []seccomp.NameWithConditions {
	var family seccomp.ArgumentConditions
	for _, f := range []uint64{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6} {
		family = append(family, seccomp.Condition{Argument: 0, Operation: seccomp.NotEqual, Value: f})
	}
	all := []seccomp.NameWithConditions{
		{Name: "socket", Conditions: family},
		{Name: "socket", Conditions: []seccomp.Condition{{Argument: 1, Operation: seccomp.GreaterThan, Value: 1<<32 - 1}}},
	}
	for _, flags := range []uint64{0, unix.SOCK_CLOEXEC, unix.SOCK_NONBLOCK, unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK} {
		all = append(all, seccomp.NameWithConditions{
			Name: "socket", Conditions: []seccomp.Condition{{Argument: 1, Operation: seccomp.Equal, Value: unix.SOCK_RAW | flags}},
		})
	}
	return all
}
