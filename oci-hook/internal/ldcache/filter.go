package ldcache

import (
	"fmt"
	"unsafe"

	"github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// allowed is what ldconfig does of any C library's release; anything else does not exist
// for it. The names that this architecture lacks are left out.
var allowed = []string{
	"read", "pread64", "write", "writev", "open", "openat", "close", "lseek", "fstat", "stat", "lstat", "newfstatat", "statx", "access",
	"faccessat", "faccessat2", "readlink", "readlinkat", "getdents", "getdents64", "getcwd", "chdir",
	"rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "chmod", "fchmod", "fchmodat", "fsync", "fdatasync",
	"ftruncate", "fcntl", "mmap", "munmap", "mprotect", "mremap", "madvise", "brk", "uname", "getrandom", "arch_prctl",
	"set_tid_address", "set_robust_list", "rseq", "prlimit64", "getrlimit", "futex", "getpid", "gettid", "tgkill", "rt_sigaction",
	"rt_sigprocmask", "rt_sigreturn", "exit", "exit_group", "execveat", "clock_gettime", "umask",
	"getuid", "geteuid", "getgid", "getegid",
}

// filter leaves this thread, and what it becomes, those calls alone.
func filter() error {
	native, err := arch.GetInfo("")
	if err != nil {
		return fmt.Errorf("system call filter: %w", err)
	}
	var names []string
	for _, n := range allowed {
		if _, ok := native.SyscallNames[n]; ok {
			names = append(names, n)
		}
	}
	policy := seccomp.Policy{
		DefaultAction: seccomp.ActionErrno,
		Syscalls:      []seccomp.SyscallGroup{{Action: seccomp.ActionAllow, Names: names}},
	}
	prog, err := policy.Assemble()
	if err != nil {
		return fmt.Errorf("system call filter: %w", err)
	}
	// A call that does not exist is one for which the C library has something else; the
	// package's own answer is that it is not permitted.
	for i, ins := range prog {
		if ret, ok := ins.(bpf.RetConstant); ok && ret.Val == uint32(seccomp.ActionErrno)|uint32(unix.EPERM) {
			prog[i] = bpf.RetConstant{Val: uint32(seccomp.ActionErrno) | uint32(unix.ENOSYS)}
		}
	}
	// By the table of another architecture the numbers mean other calls.
	prog = append([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(native.ID), SkipTrue: 1},
		bpf.RetConstant{Val: uint32(seccomp.ActionErrno) | uint32(unix.ENOSYS)},
	}, prog...)
	raw, err := bpf.Assemble(prog)
	if err != nil {
		return fmt.Errorf("system call filter: %w", err)
	}
	f := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		f[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	p := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	if _, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&p))); e != 0 {
		return fmt.Errorf("system call filter: %w", e)
	}
	return nil
}
