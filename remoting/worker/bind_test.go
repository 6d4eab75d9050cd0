package worker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// A bound process has no capability in any thread, is its user's, is refused each call
// of the policy, and can do what a driver does.
func TestBind(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("to become another user needs root")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for _, uid := range []int{0, 65534} {
		for _, mode := range []sandbox.Mode{sandbox.Off, sandbox.On, sandbox.Log} {
			out, err := exec.CommandContext(ctx, "/proc/self/exe", "bound", strconv.Itoa(uid), string(mode)).CombinedOutput()
			if err != nil || string(out) != "bound\n" {
				t.Errorf("uid %d, sandbox %s: %v\n%s", uid, mode, err, out)
			}
		}
	}
}

// bound is the process of TestBind.
func bound(id string, mode sandbox.Mode) {
	uid, _ := strconv.Atoi(id)
	// Threads of a driver's kind: they block every signal that the C library lets them.
	for range 8 {
		up := make(chan bool)
		go func() {
			runtime.LockOSThread()
			var all unix.Sigset_t
			for i := range all.Val {
				all.Val[i] = ^uint64(0)
			}
			all.Val[0] &^= 3 << 31 // 32 and 33
			_ = unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil)
			up <- true
			var p [2]int
			_ = unix.Pipe(p[:])
			var b [1]byte
			for {
				_, _ = unix.Read(p[0], b[:])
			}
		}()
		<-up
	}
	// Threads come and go meanwhile.
	stop := make(chan bool)
	go func() {
		for {
			select {
			case <-stop:
				return
			default:
				done := make(chan bool)
				go func() { runtime.LockOSThread(); close(done) }()
				<-done
				time.Sleep(100 * time.Microsecond)
			}
		}
	}()
	began := time.Now()
	told := toldOf{names: map[string]bool{}}
	b := &control.Bind{UID: uint32(uid), GID: uint32(uid), Groups: []int{7}, Seccomp: true}
	err := bind(b)
	if err == nil {
		err = (&SessionConfig{Sandbox: mode}).filter(slog.New(&told), b)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	if d := time.Since(began); d > capTime*4/5 { // which it waits for threads that do not answer
		fmt.Println("bind took", d)
	}
	time.Sleep(5 * time.Millisecond)
	close(stop)
	if left, err := capable(); len(left) > 0 || err != nil {
		fmt.Println("threads with capabilities:", left, err)
	}
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, task := range tasks {
		b, err := os.ReadFile("/proc/self/task/" + task.Name() + "/status")
		u := "\t" + id
		if s := string(b); err == nil && (!strings.Contains(s, "Uid:"+strings.Repeat(u, 4)+"\n") || !strings.Contains(s, "Groups:\t7 \n") || !strings.Contains(s, "NoNewPrivs:\t1") || !strings.Contains(s, "Seccomp:\t2")) {
			fmt.Println(s)
		}
	}
	refused(mode)
	allowed(mode)
	if mode == sandbox.Log {
		// What was allowed is told, by its name and once.
		for deadline := time.Now().Add(5 * time.Second); !told.has("socket", "kill", "shmget") && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		if !told.has("socket", "kill", "shmget") {
			fmt.Println("calls that were told of:", told.names)
		}
	}
	fmt.Println("bound")
}

// toldOf takes the calls that a session's log names.
type toldOf struct {
	slog.Handler
	mu    sync.Mutex
	names map[string]bool
}

func (l *toldOf) Enabled(context.Context, slog.Level) bool { return true }

func (l *toldOf) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Attrs(func(a slog.Attr) bool {
		if name := a.Value.String(); l.names[name] {
			fmt.Println("told twice:", name)
		} else {
			l.names[name] = true
		}
		return true
	})
	return nil
}

func (l *toldOf) has(names ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range names {
		if !l.names[n] {
			return false
		}
	}
	return true
}

// refused tries what must be refused, and prints what is not.
func refused(mode sandbox.Mode) {
	info, err := arch.GetInfo("")
	if err != nil {
		fmt.Println(err)
		return
	}
	try := func(what string, want syscall.Errno, nr uintptr, args ...uintptr) {
		var a [6]uintptr
		copy(a[:], args)
		if _, _, errno := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); errno != want {
			fmt.Println(what, "returned", errno)
		}
	}
	for _, name := range sandbox.Refused {
		try(name, unix.EPERM, uintptr(info.SyscallNames[name]))
	}
	switch mode {
	case sandbox.On:
		for _, name := range confined {
			try(name, unix.EPERM, uintptr(info.SyscallNames[name]))
		}
		self, parent := uintptr(os.Getpid()), uintptr(os.Getppid())
		try("signal to another", unix.EPERM, unix.SYS_KILL, parent, uintptr(unix.SIGURG))
		try("signal to all", unix.EPERM, unix.SYS_KILL, ^uintptr(0), uintptr(unix.SIGURG))
		try("signal to another's thread", unix.EPERM, unix.SYS_TGKILL, parent, parent, uintptr(unix.SIGURG))
		try("signal to oneself", 0, unix.SYS_KILL, self, uintptr(unix.SIGURG))
		path := []byte("/\x00")
		try("times by name", unix.EPERM, unix.SYS_UTIMENSAT, ^uintptr(99), uintptr(unsafe.Pointer(&path[0])))
	case sandbox.Log:
		try("kill", unix.ESRCH, unix.SYS_KILL, 1<<30, uintptr(unix.SIGURG))
		try("shmget", unix.EINVAL, unix.SYS_SHMGET)
	}
	try("clone", unix.EPERM, unix.SYS_CLONE, uintptr(unix.SIGCHLD))
	try("clone of a namespace", unix.EPERM, unix.SYS_CLONE, unix.CLONE_NEWUSER)
	try("clone3", unix.ENOSYS, unix.SYS_CLONE3)
	const high = 1 << 32 // which the kernel does not look at
	if mode == sandbox.Log {
		return
	}
	for _, f := range []uintptr{unix.AF_NETLINK, unix.AF_PACKET, unix.AF_VSOCK, unix.AF_ALG, unix.AF_BLUETOOTH, unix.AF_XDP, unix.AF_NETLINK | high, unix.AF_UNIX | high} {
		try(fmt.Sprintf("socket of family %#x", f), unix.EPERM, unix.SYS_SOCKET, f, unix.SOCK_RAW)
		try(fmt.Sprintf("socket of family %#x", f), unix.EPERM, unix.SYS_SOCKET, f, unix.SOCK_DGRAM)
	}
	for _, f := range []uintptr{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6} {
		for _, typ := range []uintptr{unix.SOCK_RAW, unix.SOCK_RAW | unix.SOCK_CLOEXEC, unix.SOCK_RAW | high} {
			try(fmt.Sprintf("socket of family %d, type %#x", f, typ), unix.EPERM, unix.SYS_SOCKET, f, typ)
		}
	}
	if runtime.GOARCH == "amd64" {
		try("x32", unix.ENOSYS, unix.SYS_GETPID|0x40000000)
		// mov $20, %eax; int $0x80; ret: getpid of the 32-bit table.
		code, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			fmt.Println(err)
			return
		}
		copy(code, []byte{0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3})
		at := unsafe.Pointer(&code[0])
		p := unsafe.Pointer(&at)
		if r := (*(*func() int32)(unsafe.Pointer(&p)))(); r != -int32(unix.ENOSYS) {
			fmt.Println("int 0x80 returned", r)
		}
	}
}

// allowed does what a driver does while it runs, and prints what fails.
func allowed(mode sandbox.Mode) {
	check := func(what string, err error) {
		if err != nil {
			fmt.Println(what, err)
		}
	}
	call := func(what string, nr uintptr, args ...uintptr) uintptr {
		var a [6]uintptr
		copy(a[:], args)
		r, _, errno := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
		if errno != 0 {
			fmt.Println(what, errno)
		}
		return r
	}
	for _, path := range []string{"/dev/null", "/dev/zero", "/dev/urandom", "/proc/self/maps", "/proc/self/status", "/proc/self/exe", "/proc/meminfo", "/proc/cpuinfo", "/proc/devices", "/sys/devices/system/cpu/online"} {
		f, err := os.Open(path)
		check(path, err)
		f.Close()
	}
	mem, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	check("mmap", err)
	check("mprotect", unix.Mprotect(mem, unix.PROT_READ))
	check("madvise", unix.Madvise(mem, unix.MADV_DONTFORK))
	check("mlock", unix.Mlock(mem[:4096]))
	check("munmap", unix.Munmap(mem))
	fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC)
	check("memfd_create", err)
	check("ftruncate", unix.Ftruncate(fd, 4096))
	ev, err := unix.Eventfd(1, unix.EFD_CLOEXEC)
	check("eventfd", err)
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(ev), Events: unix.POLLIN}}, 0)
	check("poll", err)
	_, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	check("epoll_create1", err)
	var set unix.CPUSet
	check("sched_getaffinity", unix.SchedGetaffinity(0, &set))
	check("sched_setaffinity", unix.SchedSetaffinity(0, &set))
	call("sched_yield", unix.SYS_SCHED_YIELD)
	call("sched_getscheduler", unix.SYS_SCHED_GETSCHEDULER)
	var policy int32
	call("get_mempolicy", unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&policy)))
	var pipe [2]int
	check("pipe", unix.Pipe(pipe[:]))
	_, err = unix.IoctlGetInt(pipe[0], unix.TIOCINQ)
	check("ioctl", err)
	if err := unix.Kill(os.Getppid(), 0); errors.Is(err, unix.ESRCH) {
		fmt.Println("a process that exists is said not to")
	}
	if mode != sandbox.On {
		for _, f := range []int{unix.AF_UNIX, unix.AF_INET} {
			s, err := unix.Socket(f, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			check("socket", err)
			unix.Close(s)
		}
	}
	var lim unix.Rlimit
	check("prlimit", unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &lim))
	check("prctl", unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&[]byte("driver\x00")[0])), 0, 0, 0))
	// Threads, more than there are already.
	for range 8 {
		done := make(chan error)
		go func() {
			runtime.LockOSThread()
			left, err := capable()
			if len(left) > 0 {
				err = fmt.Errorf("threads with capabilities: %v", left)
			}
			done <- err
		}()
		check("thread", <-done)
	}
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], 1)
	_, err = unix.Write(ev, b[:])
	check("eventfd", err)
}

// confined are system calls that a session in a sandbox may not make, each of them for a reason of its own.
var confined = []string{
	"socket", "socketpair", "connect", "bind", "listen", "accept",
	"shmget", "shmat", "shmctl", "msgget", "msgsnd", "msgrcv", "msgctl", "semget", "semop", "semctl", "semtimedop",
	"mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr",
	"inotify_init", "inotify_init1", "inotify_add_watch", "fanotify_mark",
	"tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal", "process_madvise", "process_mrelease",
	"migrate_pages", "setpriority", "ioprio_set",
	"chmod", "fchmodat", "chown", "lchown", "fchownat", "setxattr", "lsetxattr", "removexattr", "lremovexattr",
	"utime", "utimes", "futimesat", "truncate", "quotactl_fd",
	"iopl", "ioperm", "modify_ldt",
}
