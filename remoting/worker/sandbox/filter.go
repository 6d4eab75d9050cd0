package sandbox

import (
	"fmt"
	"runtime"
	"unsafe"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Load refuses system calls to all threads of this process: those that neither the driver nor a session has use for, and,
// unless the mode is Off, those by which a session could do more than compute. In mode Log the latter are held up instead
// until somebody has answered them on the descriptor that listen is called with (seccomp_unotify(2)).
func Load(mode Mode, listen func(fd int)) error {
	prog, err := assemble(mode)
	if err != nil {
		return err
	}
	raw, err := bpf.Assemble(prog)
	if err != nil {
		return err
	}
	f := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		f[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	flags := uintptr(unix.SECCOMP_FILTER_FLAG_TSYNC)
	if mode == Log {
		flags |= unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	p := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	r, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return errno
	}
	if mode == Log {
		listen(int(r))
	} else if r != 0 {
		return fmt.Errorf("thread %d has a filter of its own", r)
	}
	return nil
}

// assemble makes the program of a mode's filter.
func assemble(mode Mode) ([]bpf.Instruction, error) {
	native, err := arch.GetInfo("")
	if err != nil {
		return nil, err
	}
	// Any program can enter the kernel by the table of another architecture (int 0x80),
	// where the numbers below mean nothing. What Assemble makes allows all of that.
	head := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 4}, // seccomp_data.arch
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(native.ID), SkipTrue: 1},
		ret(errnoAction(unix.ENOSYS)),
	}
	if mode != Off {
		prog, err := confine(mode, native)
		return append(head, prog...), err
	}
	p := policy()
	prog, err := p.Assemble()
	return append(head, prog...), err
}

// Refused are the system calls that no session may make.
var Refused = []string{
	"execve", "execveat", "fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd",
	"mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
	"setns", "unshare", "bpf", "perf_event_open", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module",
	"keyctl", "add_key", "request_key", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register",
	"open_by_handle_at", "name_to_handle_at", "fanotify_init", "reboot", "swapon", "swapoff", "syslog", "acct", "quotactl",
	"settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname", "personality", "vhangup",
	"mknod", "mknodat", "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid", "setfsgid",
	"capset", "lookup_dcookie",
}

// policy lists what is refused without a sandbox. A new thread is made by clone with CLONE_THREAD; clone3 hides its
// flags from the filter, so it is said not to exist and the C library falls back.
func policy() *seccomp.Policy {
	return &seccomp.Policy{
		DefaultAction: seccomp.ActionAllow,
		Syscalls: []seccomp.SyscallGroup{
			{Action: seccomp.ActionErrno, Names: Refused},
			{Action: seccomp.ActionErrno, NamesWithCondtions: []seccomp.NameWithConditions{
				{Name: "clone", Conditions: []seccomp.Condition{{Argument: 0, Operation: seccomp.BitsNotSet, Value: unix.CLONE_THREAD}}},
			}},
			{Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS), Names: []string{"clone3"}},
			{Action: seccomp.ActionErrno, NamesWithCondtions: sockets()},
		},
	}
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
