package workers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// taken is a thread of another process that makes the system calls that the test wants, as code would
// that has taken the process over: as its user, behind its filter, with its files. It is made in a process of its own, because
// the parent of a traced process waits for its end by a call that takes the tracer's events.
type taken struct {
	pid   int
	saved unix.PtraceRegs
	site  uint64 // of a system call instruction
	room  uint64 // where there is room for arguments
}

// takeOver stops the first thread of a process in a system call. A thread that computes just then is asked again.
func takeOver(pid int) *taken {
	runtime.LockOSThread() // a tracer is a thread
	x := &taken{pid: pid}
	must(unix.PtraceSeize(pid))
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		must(unix.PtraceInterrupt(pid))
		x.wait()
		must(unix.PtraceGetRegs(pid, &x.saved))
		x.site = x.saved.Rip - 2
		var code [2]byte
		_, err := unix.PtracePeekText(pid, uintptr(x.site), code[:])
		if err == nil && code == [2]byte{0x0f, 0x05} {
			return x
		}
		if time.Now().After(end) {
			must(fmt.Errorf("the thread is in no system call: % x, %w", code, err))
		}
		must(unix.PtraceCont(pid, 0))
	}
}

func must(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func (x *taken) wait() {
	var st unix.WaitStatus
	if _, err := unix.Wait4(x.pid, &st, unix.WALL, nil); err != nil || !st.Stopped() {
		must(fmt.Errorf("the process has ended: %#x, %w", st, err))
	}
}

// call makes a system call. Its arguments are numbers, texts and bytes.
func (x *taken) call(nr int, args ...any) (int, unix.Errno) {
	x.room = x.saved.Rsp - 1<<16
	var a [6]uint64
	for i, v := range args {
		switch v := v.(type) {
		case int:
			a[i] = uint64(v)
		case string:
			a[i] = x.put(append([]byte(v), 0))
		case []byte:
			a[i] = x.put(v)
		}
	}
	r := x.saved
	r.Orig_rax, r.Rip, r.Rax = ^uint64(0), x.site, uint64(nr)
	r.Rdi, r.Rsi, r.Rdx, r.R10, r.R8, r.R9 = a[0], a[1], a[2], a[3], a[4], a[5]
	must(unix.PtraceSetRegs(x.pid, &r))
	for r.Rip != x.site+2 { // a signal may come first
		must(unix.PtraceSingleStep(x.pid))
		x.wait()
		must(unix.PtraceGetRegs(x.pid, &r))
	}
	if n := int64(r.Rax); n < 0 && n > -4096 {
		return -1, unix.Errno(-n)
	}
	return int(r.Rax), 0
}

func (x *taken) put(b []byte) uint64 {
	at := x.room
	_, err := unix.PtracePokeData(x.pid, uintptr(at), b)
	must(err)
	x.room += uint64(len(b)+15) &^ 15
	return at
}

// release lets the process go on where it was.
func (x *taken) release() {
	must(unix.PtraceSetRegs(x.pid, &x.saved))
	must(unix.PtraceDetach(x.pid))
}

// A session that has been taken over can compute, and nothing else.
func TestTakenOver(t *testing.T) {
	dir := setup(t)
	file := filepath.Join(dir, "home", "thesis")
	// What the user and others own on this machine, in reach of everybody.
	for path, uid := range map[string]int{filepath.Dir(file): testUID, filepath.Join(dir, "store", "4242"): 4242} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(file, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(file, testUID, testUID); err != nil {
		t.Fatal(err)
	}
	l := testLease("e", 0)
	ofRoot := testLease("d", 0) // it runs as the user that owns the file
	ofRoot.Request.UID, ofRoot.Request.GID = 0, 0
	for _, l := range []lease.Lease{l, ofRoot} {
		if out := takeOverSession(t, dir, file, l, sandbox.On); out != "" {
			t.Errorf("a session of user %d in a sandbox could\n%s", l.Request.UID, out)
		}
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "text" {
		t.Errorf("the user's file: %q, %v", b, err)
	}
	// Without, it can do what its user can. That shows that the tries above are ones.
	out := takeOverSession(t, dir, file, l, sandbox.Off)
	for _, what := range []string{"list /home", "read the user's file", "change the times of the user's file, its name at a multiple of 4 GiB", "make an internet socket", "make a Unix socket", "semaphores", "watch files"} {
		if !strings.Contains(out, what+": ") {
			t.Errorf("a session without a sandbox could not %s:\n%s", what, out)
		}
	}
}

// takeOverSession returns what a session could do beyond computing.
func takeOverSession(t *testing.T, dir, file string, l lease.Lease, mode sandbox.Mode) string {
	t.Helper()
	p := newPool(t, dir, func(c *Config) { c.Sandbox = mode })
	c, w := pair(t)
	s, err := p.Start(t.Context(), l, request(l.ID[:1]), w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "takeover", strconv.Itoa(s.Worker.PID), file, p.cfg.Dir, p.cfg.Turns, p.cfg.Store)
	var tries strings.Builder
	cmd.Stderr = &tries
	out, err := cmd.Output()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	t.Logf("sandbox %s: %d of %s succeeded", mode, strings.Count(string(out), "\n"), strings.TrimSpace(tries.String()))
	// It computes as before.
	if err := c.activate(0); err != nil {
		t.Error(err)
	}
	if err := p.End(t.Context(), s.Lease); err != nil {
		t.Error(err)
	}
	if err := p.Forget(s.Lease); err != nil {
		t.Error(err)
	}
	return string(out)
}

// takenOver is the process of TestTakenOver. It prints what a session could do beyond computing.
func takenOver(args []string) {
	pid, _ := strconv.Atoi(args[0])
	file, accounts, schedules, images := args[1], args[2], args[3], args[4]
	x := takeOver(pid)
	defer x.release()
	self := os.Getppid()
	const cwd = unix.AT_FDCWD
	inet := make([]byte, 16)
	binary.NativeEndian.PutUint16(inet, unix.AF_INET)
	// A filter compares the halves of an address one by one.
	const far = 7 << 32
	if _, errno := x.call(unix.SYS_MMAP, far, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE, -1, 0); errno != 0 {
		must(fmt.Errorf("memory at %#x: %w", int64(far), errno))
	}
	_, err := unix.PtracePokeData(pid, far, append([]byte(file), 0))
	must(err)
	tried := 0
	for _, try := range []struct {
		what string
		nr   int
		args []any
	}{
		{"start a program", unix.SYS_EXECVE, []any{"/bin/sh", 0, 0}},
		{"fork", unix.SYS_FORK, nil},
		{"fork in its parent's memory", unix.SYS_VFORK, nil},
		{"make a process", unix.SYS_CLONE, []any{int(unix.SIGCHLD), 0}},
		{"make a process by clone3", unix.SYS_CLONE3, []any{0, 0}},
		{"trace", unix.SYS_PTRACE, []any{unix.PTRACE_ATTACH, self}},
		{"read another's memory", unix.SYS_PROCESS_VM_READV, []any{self, 0, 0, 0, 0, 0}},
		{"signal the daemon", unix.SYS_KILL, []any{self, int(unix.SIGURG)}},
		{"signal everything", unix.SYS_KILL, []any{-1, int(unix.SIGURG)}},
		{"have a file's signals sent to the daemon", unix.SYS_FCNTL, []any{0, unix.F_SETOWN, self}},
		{"choose a file's signal", unix.SYS_FCNTL, []any{0, unix.F_SETSIG, int(unix.SIGKILL)}},
		{"have a terminal's signals sent to the daemon", unix.SYS_IOCTL, []any{0, 0x8902, make([]byte, 8)}},
		{"take a descriptor of another process", unix.SYS_PIDFD_GETFD, []any{0, 0, 0}},
		{"take a handle of a process", unix.SYS_PIDFD_OPEN, []any{self, 0}},
		{"read passwd", unix.SYS_OPENAT, []any{cwd, "/etc/passwd", unix.O_RDONLY}},
		{"read shadow", unix.SYS_OPENAT, []any{cwd, "/etc/shadow", unix.O_RDONLY}},
		{"list the root", unix.SYS_OPENAT, []any{cwd, "/", unix.O_RDONLY | unix.O_DIRECTORY}},
		{"list /home", unix.SYS_OPENAT, []any{cwd, "/home", unix.O_RDONLY | unix.O_DIRECTORY}},
		{"read the user's file", unix.SYS_OPENAT, []any{cwd, file, unix.O_RDONLY}},
		{"write the user's file", unix.SYS_OPENAT, []any{cwd, file, unix.O_RDWR}},
		{"empty the user's file", unix.SYS_TRUNCATE, []any{file, 0}},
		{"show the user's file to all", unix.SYS_CHMOD, []any{file, 0o777}},
		{"give the user's file away", unix.SYS_CHOWN, []any{file, 0, 0}},
		{"mark the user's file", unix.SYS_SETXATTR, []any{file, "user.x", "x", 1, 0}},
		{"change the times of the user's file", unix.SYS_UTIMENSAT, []any{cwd, file, 0, 0}},
		{"change the times of the user's file, its name at a multiple of 4 GiB", unix.SYS_UTIMENSAT, []any{cwd, far, 0, 0}},
		{"remove the user's file", unix.SYS_UNLINK, []any{file}},
		{"rename the user's file", unix.SYS_RENAME, []any{file, file + "2"}},
		{"link the user's file", unix.SYS_LINK, []any{file, file + "2"}},
		{"make a link", unix.SYS_SYMLINK, []any{"/", file + "2"}},
		{"make a directory", unix.SYS_MKDIR, []any{file + "2", 0o700}},
		{"make a file in /tmp", unix.SYS_OPENAT, []any{cwd, "/tmp/sluice-was-here", unix.O_CREAT | unix.O_RDWR, 0o600}},
		{"list the directories of other leases", unix.SYS_OPENAT, []any{cwd, "/dev/shm/..", unix.O_RDONLY | unix.O_DIRECTORY}},
		{"make a file in /dev", unix.SYS_OPENAT, []any{cwd, "/dev/sluice-was-here", unix.O_CREAT | unix.O_RDWR, 0o600}},
		{"make another /dev/shm", unix.SYS_RENAME, []any{"/dev/shm-of-no-lease", "/dev/shm"}},
		{"make a device in /dev/shm", unix.SYS_MKNOD, []any{"/dev/shm/null", unix.S_IFCHR | 0o666, 0x103}},
		{"list the accounts", unix.SYS_OPENAT, []any{cwd, accounts, unix.O_RDONLY | unix.O_DIRECTORY}},
		{"list the schedules", unix.SYS_OPENAT, []any{cwd, schedules, unix.O_RDONLY | unix.O_DIRECTORY}},
		{"list another user's images", unix.SYS_OPENAT, []any{cwd, filepath.Join(images, "4242"), unix.O_RDONLY | unix.O_DIRECTORY}},
		{"open the daemon's memory", unix.SYS_OPENAT, []any{cwd, fmt.Sprintf("/proc/%d/mem", self), unix.O_RDONLY}},
		{"list the daemon's descriptors", unix.SYS_OPENAT, []any{cwd, fmt.Sprintf("/proc/%d/fd", self), unix.O_RDONLY | unix.O_DIRECTORY}},
		{"have another process killed first", unix.SYS_OPENAT, []any{cwd, fmt.Sprintf("/proc/%d/oom_score_adj", self), unix.O_WRONLY}},
		{"write a setting of the kernel's", unix.SYS_OPENAT, []any{cwd, "/proc/sys/kernel/core_pattern", unix.O_WRONLY}},
		{"make an internet socket", unix.SYS_SOCKET, []any{unix.AF_INET, unix.SOCK_STREAM, 0}},
		{"make a Unix socket", unix.SYS_SOCKET, []any{unix.AF_UNIX, unix.SOCK_STREAM, 0}},
		{"make a raw socket", unix.SYS_SOCKET, []any{unix.AF_INET, unix.SOCK_RAW, 1}},
		{"make a packet socket", unix.SYS_SOCKET, []any{unix.AF_PACKET, unix.SOCK_RAW, 3}},
		{"make a socket to the hypervisor", unix.SYS_SOCKET, []any{unix.AF_VSOCK, unix.SOCK_STREAM, 0}},
		{"make a socket of the kernel's cryptography", unix.SYS_SOCKET, []any{unix.AF_ALG, unix.SOCK_SEQPACKET, 0}},
		{"make a netlink socket", unix.SYS_SOCKET, []any{unix.AF_NETLINK, unix.SOCK_RAW, 0}},
		{"make a pair of datagram sockets", unix.SYS_SOCKETPAIR, []any{unix.AF_UNIX, unix.SOCK_DGRAM, 0, make([]byte, 8)}},
		{"connect", unix.SYS_CONNECT, []any{0, inet, 16}},
		{"bind", unix.SYS_BIND, []any{0, inet, 16}},
		{"listen", unix.SYS_LISTEN, []any{0, 5}},
		{"io_uring", unix.SYS_IO_URING_SETUP, []any{8, make([]byte, 128)}},
		{"userfaultfd", unix.SYS_USERFAULTFD, []any{0}},
		{"bpf", unix.SYS_BPF, []any{0, 0, 0}},
		{"perf events", unix.SYS_PERF_EVENT_OPEN, []any{make([]byte, 128), 0, -1, -1, 0}},
		{"a user namespace", unix.SYS_UNSHARE, []any{unix.CLONE_NEWUSER}},
		{"mount", unix.SYS_MOUNT, []any{"x", "/tmp", "tmpfs", 0, 0}},
		{"keys", unix.SYS_KEYCTL, []any{0, 0, 0}},
		{"shared memory of System V", unix.SYS_SHMGET, []any{0x5ec, 4096, 0o1666}},
		{"a message queue", unix.SYS_MSGGET, []any{0x5ec, 0o1666}},
		{"semaphores", unix.SYS_SEMGET, []any{0x5ec, 1, 0o1666}},
		{"a POSIX message queue", unix.SYS_MQ_OPEN, []any{"sluice", unix.O_CREAT | unix.O_RDWR, 0o600, 0}},
		{"watch files", unix.SYS_INOTIFY_INIT1, []any{0}},
		{"be root", unix.SYS_SETUID, []any{0}},
		{"be traced", unix.SYS_PRCTL, []any{unix.PR_SET_DUMPABLE, 1}},
		{"run before all others", unix.SYS_SCHED_SETSCHEDULER, []any{0, 1, []byte{1, 0, 0, 0}}},
		{"change another's processors", unix.SYS_SCHED_SETAFFINITY, []any{self, 8, make([]byte, 8)}},
		{"change another's limits", unix.SYS_PRLIMIT64, []any{self, unix.RLIMIT_NOFILE, make([]byte, 16), 0}},
		{"a key", unix.SYS_ADD_KEY, []any{0, 0, 0, 0, 0}},
		{"a filter of its own", unix.SYS_SECCOMP, []any{1, 0, 0}},
		{"a quota", unix.SYS_QUOTACTL_FD, []any{0, 0, 0, 0}},
		{"an older personality", unix.SYS_PERSONALITY, []any{0x40000}},
		{"a segment", unix.SYS_MODIFY_LDT, []any{0, make([]byte, 16), 16}},
		{"a priority of others", unix.SYS_SETPRIORITY, []any{unix.PRIO_USER, 0, 10}},
		{"ports of the machine", unix.SYS_IOPERM, []any{0, 1, 1}},
		{"a file by its handle", unix.SYS_OPEN_BY_HANDLE_AT, []any{cwd, make([]byte, 16), 0}},
		{"a tree of mounts", unix.SYS_OPEN_TREE, []any{cwd, "/", 0}},
	} {
		tried++
		n, errno := x.call(try.nr, try.args...)
		if !errors.Is(errno, syscall.EPERM) && !errors.Is(errno, syscall.EACCES) && !errors.Is(errno, syscall.ENOSYS) {
			fmt.Printf("%s: returned %d, %v\n", try.what, n, errno)
		}
	}
	fmt.Fprintln(os.Stderr, tried, "tries")
	if fd, errno := x.call(unix.SYS_OPENAT, cwd, "/proc/self/oom_score_adj", unix.O_WRONLY); errno == 0 {
		if n, errno := x.call(unix.SYS_WRITE, fd, "0", 1); errno == 0 {
			fmt.Printf("be killed last: returned %d\n", n)
		}
	}
	// And what it needs.
	for _, try := range []struct {
		what string
		nr   int
		args []any
	}{
		{"read a library", unix.SYS_OPENAT, []any{cwd, "/etc/ld.so.cache", unix.O_RDONLY}},
		{"memory to run", unix.SYS_MMAP, []any{0, 4096, unix.PROT_READ | unix.PROT_WRITE | unix.PROT_EXEC, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS, -1, 0}},
		{"a file in memory", unix.SYS_MEMFD_CREATE, []any{"x", 0}},
	} {
		if n, errno := x.call(try.nr, try.args...); errno != 0 {
			fmt.Printf("%s: returned %d, %v\n", try.what, n, errno)
		}
	}
}
