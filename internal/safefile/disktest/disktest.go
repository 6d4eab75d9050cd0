// Package disktest has system calls of a test fail as a disk makes them fail: with an error, or after a part of what was to
// be written. The code under test is the real one, down to the kernel, and knows nothing of it.
package disktest

// Flow. The goroutine under test has an operating system thread of its own, on which a seccomp filter has the kernel ask before it makes a
// system call that changes a file. Another goroutine receives each question, has the test's function judge the call, and answers:
//
//	thread under test: pwrite64 -> waits in the kernel              -> goes on with the result
//	answering thread:              receive -> read the names -> judge -> send
//
// Both are threads of one process, so the answering one can read what the call's addresses point to. A filter is never taken
// away: its thread ends with the goroutine. Goroutines that the goroutine under test starts have other threads, and are not judged.

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A Call is a system call that is about to be made.
type Call struct {
	Name string // as in the manual: "pwrite64"; "open" is one that may make a file
	FD   int    // of the file that is open already, -1 for a call about names
	Path string // of the file that is changed, or the name that is made, replaced or removed
	From string // of a rename or a link: the name that was there before
	At   int64  // where a write begins, in bytes; -1 is the file's position
	Len  int    // of a write, in bytes
}

func (c Call) String() string { return c.Name + " " + filepath.Base(c.Path) }

// A Fault is what becomes of a call. The zero Fault is none: the call is made.
type Fault struct {
	Err   unix.Errno // the call is not made, and gives this error
	Short bool       // the first half of a write is made, rounded down, and its length given. No bytes are an error instead, Err or EIO
}

// Kinds are the faults that a call can have. After "half" alone the system goes on, and so must the program.
var Kinds = []struct {
	Name string
	Fault
}{
	{"I/O error", Fault{Err: unix.EIO}},
	{"no room", Fault{Err: unix.ENOSPC}},
	{"half", Fault{Short: true}},
	{"half, then an I/O error", Fault{Short: true, Err: unix.EIO}},
}

// One gives a fault to one of the calls below a directory. A write that is made by half and has an error as well gives that to the next
// write of the file.
type One struct {
	Dir   string
	Only  string // calls of this name; "" for all
	N     int    // which one, from 0
	Fault Fault
	Hit   Call // that call; without a name if there were fewer. To be read when Run has ended

	n     int
	later bool
}

// Judge is for Run.
func (o *One) Judge(c Call) Fault {
	if !strings.HasPrefix(c.Path, o.Dir) {
		return Fault{}
	}
	writes := c.Name == "write" || c.Name == "pwrite64"
	if o.later && writes && c.Path == o.Hit.Path {
		o.later = false
		return Fault{Err: o.Fault.Err}
	}
	if o.Only != "" && c.Name != o.Only {
		return Fault{}
	}
	if o.n++; o.n != o.N+1 {
		return Fault{}
	}
	o.Hit, o.later = c, writes && o.Fault.Short && o.Fault.Err != 0
	if o.later {
		return Fault{Short: true}
	}
	return o.Fault
}

// Harmless says whether the call that was hit succeeded all the same, if by half.
func (o *One) Harmless() bool {
	return o.Hit.Name == "" || o.Fault.Short && o.Fault.Err == 0 && (o.Hit.Name == "write" || o.Hit.Name == "pwrite64") && o.Hit.Len > 1
}

// Run calls f on a goroutine of its own, with each system call of it that changes a file judged, and waits until f has ended. judge runs
// on yet another goroutine, one call at a time. What f changes meanwhile and judge reads needs a lock.
func Run(t testing.TB, judge func(Call) Fault, f func()) {
	t.Helper()
	var mu sync.Mutex // the kernel has the calls in order, which the race detector does not know
	done := make(chan struct{})
	go func() {
		defer close(done)
		Here(t, func(c Call) Fault {
			mu.Lock()
			defer mu.Unlock()
			return judge(c)
		})
		f()
	}()
	<-done
	mu.Lock()
	defer mu.Unlock()
}

// The main thread does not end with a goroutine. Locked from here on, it runs that of package main alone, which runs no test.
func init() { runtime.LockOSThread() }

// Here has the calls of the calling goroutine judged from now on until it ends. Those of the processes that it starts are made.
func Here(t testing.TB, judge func(Call) Fault) {
	runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
	fd, err := install()
	if err != nil {
		t.Errorf("disktest: %v", err)
		return
	}
	go answer(t, fd, judge)
}

// calls are those that are judged, by number. Those that only read are not.
var calls = map[uint32]string{
	unix.SYS_WRITE: "write", unix.SYS_PWRITE64: "pwrite64", unix.SYS_FSYNC: "fsync", unix.SYS_FDATASYNC: "fdatasync", unix.SYS_FTRUNCATE: "ftruncate",
	unix.SYS_FALLOCATE: "fallocate", unix.SYS_FCHMOD: "fchmod", unix.SYS_FCHMODAT: "fchmodat", unix.SYS_LINKAT: "linkat", unix.SYS_SYMLINKAT: "symlinkat",
	unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2", unix.SYS_UNLINKAT: "unlinkat", unix.SYS_MKDIRAT: "mkdirat", unix.SYS_OPENAT: "open",
}

// program is the filter: a call in the list asks, any other is made. An open asks if it may make a file.
func program() ([]bpf.RawInstruction, error) {
	const number, firstArgument, thirdArgument = 0, 16, 16 + 2*8 // offsets in struct seccomp_data, seccomp(2)
	making := uint32(unix.O_CREAT | unix.O_TMPFILE&^unix.O_DIRECTORY)
	// Standard output and error are no files of a test's. A panic is written to them when no goroutine answers any more.
	// The runtime wakes its poller by writing 8 bytes to an eventfd, by a call that keeps its processor: to ask about that one could
	// lock up with a collection that stops the world.
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: number, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_WRITE, SkipTrue: 7},
		bpf.LoadAbsolute{Off: firstArgument, Size: 4}, bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: 2, SkipTrue: 1}, bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW},
		bpf.LoadAbsolute{Off: thirdArgument, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 8, SkipTrue: 1}, bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW},
		bpf.LoadAbsolute{Off: number, Size: 4},
	}
	for nr := range calls {
		if nr != unix.SYS_OPENAT {
			prog = append(prog, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: nr, SkipTrue: 1}, bpf.RetConstant{Val: unix.SECCOMP_RET_USER_NOTIF})
		}
	}
	prog = append(prog, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_OPENAT, SkipTrue: 3}, bpf.LoadAbsolute{Off: thirdArgument, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: making, SkipTrue: 1}, bpf.RetConstant{Val: unix.SECCOMP_RET_USER_NOTIF}, bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW})
	return bpf.Assemble(prog)
}

// install puts the filter on the calling thread, and returns the descriptor at which its questions are received.
func install() (int, error) {
	raw, err := program()
	if err != nil {
		return -1, err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return -1, fmt.Errorf("no_new_privs: %w", err)
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	// The runtime sends its threads signals. A call that one of them interrupts would be asked about twice.
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return -1, fmt.Errorf("seccomp: %w: the kernel must be Linux 5.19 or later", errno)
	}
	return int(fd), nil
}

// question and reply are struct seccomp_notif and struct seccomp_notif_resp, seccomp_unotify(2).
type question struct {
	id         uint64
	pid, flags uint32
	nr         int32
	arch       uint32
	at         uint64
	args       [6]uint64
}

type reply struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

// answer answers the questions of one thread, and of the processes that it has started, until all have ended. Neither it nor what it
// calls uses functions of package os that go test logs (Open, Stat, Getenv, Getwd): the thread may be asking about the write of that log, with
// the log's lock held.
func answer(t testing.TB, fd int, judge func(Call) Fault) {
	defer unix.Close(fd)
	memory, err := unix.Open("/proc/self/mem", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Errorf("disktest: %v", err)
		return // the calls fail with ENOSYS
	}
	mem := os.NewFile(uintptr(memory), "/proc/self/mem")
	defer mem.Close()
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(p, -1); errors.Is(err, unix.EINTR) {
			continue
		}
		if p[0].Revents&unix.POLLIN == 0 {
			return
		}
		var q question
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&q))); errno != 0 {
			continue // interrupted, or the thread is not there any more
		}
		r := reply{id: q.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
		if c, ok := describe(mem, &q); ok && ours(q.pid) {
			r = decide(t, mem, &q, judge(c), r)
		}
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&r)))
	}
}

// ours says whether a thread is one of this process.
func ours(tid uint32) bool {
	return unix.Access(fmt.Sprintf("/proc/self/task/%d", tid), unix.F_OK) == nil
}

// decide makes an answer of a fault; made is that for a call that is made.
func decide(t testing.TB, mem *os.File, q *question, f Fault, made reply) reply {
	writes := q.nr == unix.SYS_WRITE || q.nr == unix.SYS_PWRITE64
	switch half := q.args[2] / 2; {
	case f.Short && writes && half > 0:
		b := make([]byte, half)
		_, err := mem.ReadAt(b, int64(q.args[1]))
		n := 0
		if err == nil {
			at := int64(-1) // the file's position
			if q.nr == unix.SYS_PWRITE64 {
				at = int64(q.args[3])
			}
			n, err = unix.Pwritev2(int(int32(q.args[0])), [][]byte{b}, at, 0)
		}
		if err != nil {
			t.Errorf("disktest: a short write: %v", err)
		}
		return reply{id: q.id, val: int64(n)}
	case f.Short && f.Err == 0:
		f.Err = unix.EIO
		fallthrough
	case f.Err != 0:
		return reply{id: q.id, err: -int32(f.Err)}
	}
	return made
}

// describe reads what a call is about. Pipes and sockets are not: what a process says to another is not on a disk.
func describe(mem *os.File, q *question) (Call, bool) {
	c := Call{Name: calls[uint32(q.nr)], FD: -1, At: -1}
	a := q.args
	switch q.nr {
	case unix.SYS_OPENAT, unix.SYS_MKDIRAT, unix.SYS_UNLINKAT, unix.SYS_FCHMODAT:
		c.Path = below(mem, a[0], a[1])
	case unix.SYS_SYMLINKAT:
		c.Path = below(mem, a[1], a[2])
	case unix.SYS_LINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2:
		c.From, c.Path = below(mem, a[0], a[1]), below(mem, a[2], a[3])
	default:
		c.FD, c.Path = int(int32(a[0])), opened(a[0])
	}
	switch q.nr {
	case unix.SYS_PWRITE64:
		c.At = int64(a[3])
		fallthrough
	case unix.SYS_WRITE:
		c.Len = int(a[2])
	}
	return c, filepath.IsAbs(c.Path)
}

// opened is the path of an open file.
func opened(fd uint64) string {
	path, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", int32(fd)))
	return path
}

// below is the path that a descriptor of a directory and a name make.
func below(mem *os.File, dir, name uint64) string {
	b := make([]byte, unix.PathMax)
	n, _ := mem.ReadAt(b, int64(name)) // fewer are left of the mapping
	path, _, _ := bytes.Cut(b[:n], []byte{0})
	switch {
	case filepath.IsAbs(string(path)):
		return string(path)
	case int32(dir) == unix.AT_FDCWD:
		wd, _ := unix.Getwd()
		return filepath.Join(wd, string(path))
	}
	return filepath.Join(opened(dir), string(path))
}
