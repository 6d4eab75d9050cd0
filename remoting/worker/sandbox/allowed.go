package sandbox

import (
	"fmt"
	"os"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Allowed are the system calls that a session in a sandbox may make, whatever their arguments: those by which the driver, the C
// library and the Go runtime compute, use files that Landlock lets them open, and use descriptors that they have.
var Allowed = []string{
	// Frequent ones first: an old kernel goes through the list.
	"futex", "read", "write", "clock_gettime", "nanosleep", "epoll_pwait", "epoll_wait", "sendto", "recvfrom", "sendmsg", "recvmsg", "poll", "madvise",
	"mmap", "munmap", "mprotect", "mremap", "brk", "mincore", "msync", "mlock", "mlock2", "munlock", "mlockall", "munlockall", "membarrier",
	"mbind", "set_mempolicy", "get_mempolicy", "pkey_alloc", "pkey_free", "pkey_mprotect", "memfd_create",

	// Descriptors. The client's socket is there already, and so is that at which daemons connect (package exchange), the only
	// one that accepts. None of them is of datagrams, which could be sent to any address.
	"readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2", "lseek", "close", "close_range", "dup", "dup2", "dup3",
	"pipe", "pipe2", "eventfd", "eventfd2", "ppoll", "select", "pselect6", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_pwait2", "sendfile", "splice", "copy_file_range",
	"accept4", "shutdown", "getsockname", "getpeername", "getsockopt", "setsockopt", "recvmmsg", "sendmmsg",

	// Files by name, which are Landlock's to judge, and open ones.
	"open", "openat", "openat2", "creat", "access", "faccessat", "faccessat2", "stat", "lstat", "fstat", "newfstatat", "statx", "statfs", "fstatfs", "readlink", "readlinkat",
	"getdents", "getdents64", "getcwd", "chdir", "fchdir", "umask", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2", "linkat",
	"ftruncate", "fallocate", "fsync", "fdatasync", "sync_file_range", "fadvise64", "readahead", "flock", "fchmod",

	// Threads, and the process itself.
	"exit", "exit_group", "set_robust_list", "set_tid_address", "rseq", "arch_prctl", "futex_waitv", "sched_yield", "getcpu",
	"sched_getaffinity", "sched_getscheduler", "sched_getparam", "sched_getattr", "sched_get_priority_max", "sched_get_priority_min", "sched_rr_get_interval",
	"rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "rt_sigtimedwait", "rt_sigsuspend", "sigaltstack", "signalfd", "signalfd4", "restart_syscall", "pause",
	"wait4", "waitid", "getpid", "gettid", "getppid", "getpgrp", "getpgid", "getsid", "getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid", "getgroups", "capget",
	"getrlimit", "setrlimit", "getrusage", "getpriority", "ioprio_get",

	// Time, and the machine.
	"clock_getres", "clock_nanosleep", "gettimeofday", "time", "times", "timer_create", "timer_settime", "timer_gettime", "timer_getoverrun", "timer_delete",
	"timerfd_create", "timerfd_settime", "timerfd_gettime", "setitimer", "getitimer", "alarm", "uname", "sysinfo", "getrandom",
}

// An argument describes what an argument of a system call may be. Of a number the kernel reads the lower 32 bits only.
type argument struct {
	n       uint32
	mask    uint32 // 0 for all bits
	is      []uint32
	pointer bool // the kernel reads all 64 bits, of which the upper ones must be 0
}

// judged are the system calls that a session in a sandbox may make with certain arguments only: those with one that is listed,
// or, if not, those with any other.
type judged struct {
	name string
	arg  argument
	not  bool
}

// Numbers of ioctl(2). The driver's device files have numbers of type 'F', and those of nvidia-uvm are small numbers without a type,
// besides the two that open and close it (the driver's open kernel modules: nv-ioctl-numbers.h, uvm_ioctl.h, uvm_linux_ioctl.h).
const (
	ioctlType   = 0xff00
	ioctlDriver = 'F' << 8
	ioctlNoType = 0
	ioctlNotify = '!' << 8 // of seccomp's descriptor in mode Log

	uvmInitialize, uvmDeinitialize = 0x30000001, 0x30000002

	fionread, fionbio, fionclex, fioclex = 0x541b, 0x5421, 0x5450, 0x5451 // asm-generic/ioctls.h
)

// ioctls are allowed for files of any kind: what a terminal or a pipe is asked.
var ioctls = []uint32{unix.TCGETS, unix.TIOCGWINSZ, fionread, fionbio, fionclex, fioclex, uvmInitialize, uvmDeinitialize}

// prctls are the allowed operations of prctl(2).
var prctls = []uint32{
	unix.PR_SET_NAME, unix.PR_GET_NAME, unix.PR_SET_VMA, unix.PR_GET_DUMPABLE, unix.PR_SET_PDEATHSIG, unix.PR_GET_PDEATHSIG, unix.PR_SET_NO_NEW_PRIVS, unix.PR_GET_NO_NEW_PRIVS,
	unix.PR_GET_SECCOMP, unix.PR_CAPBSET_READ, unix.PR_SET_TIMERSLACK, unix.PR_GET_TIMERSLACK, unix.PR_SET_THP_DISABLE, unix.PR_GET_THP_DISABLE, unix.PR_GET_TSC,
}

// byArgument lists the calls that depend on an argument. Signals, limits and scheduling are a process's own; a file's signals (F_SETOWN)
// could be sent to others too.
func byArgument(mode Mode, pid uint32) []judged {
	devices := []uint32{ioctlDriver, ioctlNoType}
	if mode == Log {
		devices = append(devices, ioctlNotify)
	}
	return []judged{
		{name: "ioctl", arg: argument{n: 1, mask: ioctlType, is: devices}},
		{name: "ioctl", arg: argument{n: 1, is: ioctls}},
		{name: "fcntl", arg: argument{n: 1, is: []uint32{unix.F_SETOWN, unix.F_SETOWN_EX, unix.F_SETSIG, unix.F_NOTIFY}}, not: true},
		{name: "prctl", arg: argument{n: 0, is: prctls}},
		{name: "kill", arg: argument{n: 0, is: []uint32{pid}}},
		{name: "kill", arg: argument{n: 1, is: []uint32{0}}}, // the question whether a process exists
		{name: "tgkill", arg: argument{n: 0, is: []uint32{pid}}},
		{name: "prlimit64", arg: argument{n: 0, is: []uint32{0, pid}}},
		{name: "sched_setaffinity", arg: argument{n: 0, is: []uint32{0}}},
		{name: "move_pages", arg: argument{n: 0, is: []uint32{0, pid}}},
		{name: "utimensat", arg: argument{n: 1, is: []uint32{0}, pointer: true}}, // no name: an open file's
	}
}

// last is the last number that the lists tell apart. Later calls are said not to exist, as on an older kernel.
const last = unix.SYS_SET_MEMPOLICY_HOME_NODE

// confine makes the part of a sandbox's program that comes after the check of the architecture.
func confine(mode Mode, native *arch.Info) ([]bpf.Instruction, error) {
	numbers := make(map[string]uint32)
	for nr, name := range native.SyscallNumbers {
		numbers[name] = uint32(nr)
	}
	const allow = unix.SECCOMP_RET_ALLOW
	other := errnoAction(unix.EPERM)
	if mode == Log {
		other = unix.SECCOMP_RET_USER_NOTIF
	}
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 0, Size: 4}, // seccomp_data.nr
		bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: last, SkipFalse: 1},
		ret(errnoAction(unix.ENOSYS)),
	}
	var err error
	number := func(name string) uint32 {
		nr, ok := numbers[name]
		if !ok && err == nil {
			err = fmt.Errorf("sandbox: no system call %q", name)
		}
		return nr
	}
	one := func(name string, action uint32) {
		prog = append(prog, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: number(name), SkipTrue: 1}, ret(action))
	}
	one("clone3", errnoAction(unix.ENOSYS))
	thread := judge(number("clone"), argument{n: 0, mask: unix.CLONE_THREAD, is: []uint32{unix.CLONE_THREAD}}, allow, false)
	prog = append(prog, thread...)
	one("clone", errnoAction(unix.EPERM))
	for _, name := range Allowed {
		one(name, allow)
	}
	for _, j := range byArgument(mode, uint32(os.Getpid())) {
		prog = append(prog, judge(number(j.name), j.arg, allow, j.not)...)
	}
	if mode == Log { // what no session may do is not held up but refused
		for _, name := range Refused {
			one(name, errnoAction(unix.EPERM))
		}
	}
	return append(prog, ret(other)), err
}

// judge returns action for a call with a listed argument, or, with not, for one with any other; a pointer is never judged with not. The number is loaded before it and
// after it.
func judge(nr uint32, a argument, action uint32, not bool) []bpf.Instruction {
	body := []bpf.Instruction{bpf.LoadAbsolute{Off: 16 + 8*a.n, Size: 4}} // the lower half of seccomp_data.args
	if a.mask != 0 {
		body = append(body, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: a.mask})
	}
	reload := bpf.LoadAbsolute{Off: 0, Size: 4}
	n := len(a.is)
	for i, v := range a.is {
		skip := uint8(n - 1 - i) // to the action
		if not {
			skip++ // to the reload behind it
		}
		body = append(body, bpf.JumpIf{Cond: bpf.JumpEqual, Val: v, SkipTrue: skip})
	}
	if !not {
		last := body[len(body)-1].(bpf.JumpIf)
		last.SkipFalse = 1
		body[len(body)-1] = last
	}
	if a.pointer {
		high := bpf.LoadAbsolute{Off: 20 + 8*a.n, Size: 4}
		body = append([]bpf.Instruction{high, bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipFalse: uint8(len(body) + 1)}}, body...)
	}
	body = append(body, ret(action), reload)
	return append([]bpf.Instruction{bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: nr, SkipTrue: uint8(len(body))}}, body...)
}

func ret(action uint32) bpf.Instruction { return bpf.RetConstant{Val: action} }

func errnoAction(e unix.Errno) uint32 { return unix.SECCOMP_RET_ERRNO | uint32(e) }
