package sandbox

import (
	"fmt"
	"os"
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
	p := policy(mode)
	prog, err := p.Assemble()
	if err != nil {
		return nil, err
	}
	// Any program can enter the kernel by the table of another architecture (int 0x80),
	// where the numbers below mean nothing. What Assemble makes allows all of that.
	return append([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 4}, // seccomp_data.arch
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(native.ID), SkipTrue: 1},
		bpf.RetConstant{Val: uint32(seccomp.ActionErrno) | uint32(unix.ENOSYS)},
	}, prog...), nil
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

// Confined are the system calls that a session in a sandbox may not make besides.
var Confined = []string{
	// The network, and sockets of this machine: the client's is there already, and so is that at which daemons connect
	// (package exchange), the only one that can accept.
	"socket", "socketpair", "connect", "bind", "listen", "accept",
	// What all processes of a user or of the machine share.
	"shmget", "shmat", "shmctl", "msgget", "msgsnd", "msgrcv", "msgctl", "semget", "semop", "semctl", "semtimedop",
	"mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr",
	"inotify_init", "inotify_init1", "inotify_add_watch", "fanotify_mark",
	// Other processes.
	"tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal", "process_madvise", "process_mrelease",
	"migrate_pages", "setpriority", "ioprio_set",
	// Files by name, where Landlock has no right for it.
	"chmod", "fchmodat", "chown", "lchown", "fchownat", "setxattr", "lsetxattr", "removexattr", "lremovexattr",
	"utime", "utimes", "futimesat", "truncate", "quotactl_fd",
	// The machine.
	"iopl", "ioperm", "modify_ldt",
}

// policy lists what is refused. A new thread is made by clone with CLONE_THREAD; clone3 hides its
// flags from the filter, so it is said not to exist and the C library falls back.
func policy(mode Mode) *seccomp.Policy {
	p := &seccomp.Policy{
		DefaultAction: seccomp.ActionAllow,
		Syscalls: []seccomp.SyscallGroup{
			{Action: seccomp.ActionErrno, Names: Refused},
			{Action: seccomp.ActionErrno, NamesWithCondtions: []seccomp.NameWithConditions{
				{Name: "clone", Conditions: []seccomp.Condition{{Argument: 0, Operation: seccomp.BitsNotSet, Value: unix.CLONE_THREAD}}},
			}},
			{Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS), Names: []string{"clone3"}},
		},
	}
	if mode == Off {
		p.Syscalls = append(p.Syscalls, seccomp.SyscallGroup{Action: seccomp.ActionErrno, NamesWithCondtions: sockets()})
		return p
	}
	action := seccomp.ActionErrno
	if mode == Log {
		action = seccomp.Action(unix.SECCOMP_RET_USER_NOTIF)
	}
	p.Syscalls = append(p.Syscalls,
		seccomp.SyscallGroup{Action: action, Names: Confined},
		seccomp.SyscallGroup{Action: action, NamesWithCondtions: ownOnly(uint64(os.Getpid()))})
	return p
}

// ownOnly refuses signals to other processes, except the question whether one exists, and the change of a file's times by
// its name.
func ownOnly(pid uint64) []seccomp.NameWithConditions {
	other := seccomp.Condition{Argument: 0, Operation: seccomp.NotEqual, Value: pid}
	return []seccomp.NameWithConditions{
		{Name: "kill", Conditions: []seccomp.Condition{other, {Argument: 1, Operation: seccomp.NotEqual, Value: 0}}},
		{Name: "tgkill", Conditions: []seccomp.Condition{other}},
		{Name: "utimensat", Conditions: []seccomp.Condition{{Argument: 1, Operation: seccomp.NotEqual, Value: 0}}},
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
