package worker

// What a session gives up, before it reads a byte of its client.
//
//	Confine   before the driver is loaded, in a process that then becomes the
//	          session by exec: its own /dev, no capability but those that bind
//	          needs, no_new_privs
//	bind      when the client is known: the job's user, no dump, no core, first in
//	          line when memory is short, and the system calls below refused
//
// Everything holds for all threads: what only works for one is done before exec,
// and the rest by the C library (set*id) or the kernel (seccomp's TSYNC).

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"golang.org/x/sys/unix"

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
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0); err != nil {
		return fmt.Errorf("bind: %w", err)
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
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("bind: dumpable: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("bind: death signal: %w", err)
	}
	if !b.Seccomp {
		return nil
	}
	if err := seccomp.LoadFilter(seccomp.Filter{NoNewPrivs: true, Flag: seccomp.FilterFlagTSync, Policy: policy}); err != nil {
		return fmt.Errorf("bind: seccomp: %w; worker.seccomp: false does without", err)
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

// sockets refuses raw sockets and the families that nothing here speaks.
func sockets() []seccomp.NameWithConditions {
	cond := func(arg uint32, v uint64) seccomp.NameWithConditions {
		return seccomp.NameWithConditions{Name: "socket", Conditions: []seccomp.Condition{{Argument: arg, Operation: seccomp.Equal, Value: v}}}
	}
	all := []seccomp.NameWithConditions{cond(0, unix.AF_PACKET), cond(0, unix.AF_NETLINK), cond(0, unix.AF_VSOCK), cond(0, unix.AF_ALG)}
	for _, flags := range []uint64{0, unix.SOCK_CLOEXEC, unix.SOCK_NONBLOCK, unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK} {
		all = append(all, cond(1, unix.SOCK_RAW|flags))
	}
	return all
}
