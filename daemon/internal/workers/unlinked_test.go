package workers

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/process"
)

// held is how large a file without a name is, in bytes.
const held = 13 << 20

// hold is a process that holds a file in dir without a name, until its standard input ends.
func hold(dir, how string) {
	if how == "a thread's own" {
		runtime.LockOSThread()
		ready := make(chan error)
		go func() {
			runtime.LockOSThread()
			err := unix.Unshare(unix.CLONE_FILES)
			if err == nil {
				err = unnamed(dir, how)
			}
			ready <- err
			select {}
		}()
		must(<-ready)
	} else {
		must(unnamed(dir, how))
	}
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// unnamed makes the file, twice open.
func unnamed(dir, how string) error {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err = unix.Fallocate(fd, 0, 0, held); err != nil {
		return err
	}
	if how != "root's" {
		if err = unix.Fchown(fd, testUID, testUID); err != nil {
			return err
		}
	}
	if how != "mapped" {
		_, err = unix.Dup(fd)
		return err
	}
	if _, err = unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return err
	}
	return unix.Close(fd)
}

// Files without a name are found that a process has open, that are mapped, and that one of its threads alone has open; once, on one file system, and not
// those of the daemon.
func TestUnlinked(t *testing.T) {
	needRoot(t)
	dir, other := t.TempDir(), t.TempDir()
	mountMemory(t, dir, "size=64m")
	mountMemory(t, other, "size=64m")
	for _, how := range []string{"open", "mapped", "a thread's own", "root's"} {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "hold", dir, how)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line, _ := bufio.NewReader(out).ReadString('\n')
		if line != "ready\n" {
			t.Fatalf("%s: %q", how, line)
		}
		start, err := process.Start(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		me := lease.Process{PID: cmd.Process.Pid, Start: start}
		count := func(at string, p lease.Process) (r room) {
			d, err := os.Open(at)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			r.addUnlinked(d, []lease.Process{p, p}, room{math.MaxUint64, math.MaxUint64})
			return r
		}
		want := room{held, 1}
		if how == "root's" {
			want = room{}
		}
		if r := count(dir, me); r != want {
			t.Errorf("%s: %+v, want %+v", how, r, want)
		}
		if r := count(other, me); r != (room{}) {
			t.Errorf("%s, another file system: %+v", how, r)
		}
		if r := count(dir, lease.Process{PID: me.PID, Start: start + 1}); r != (room{}) {
			t.Errorf("%s, another process's pid: %+v", how, r)
		}
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
		if r := count(dir, me); r != (room{}) {
			t.Errorf("%s, after its end: %+v", how, r)
		}
	}
}

// takenOverHolds has a session hold a file of its /dev/shm that has no name any more.
func takenOverHolds(pid, how string) {
	n, _ := strconv.Atoi(pid)
	x := takeOver(n)
	call := func(nr int, args ...any) int {
		r, errno := x.call(nr, args...)
		if errno != 0 {
			must(fmt.Errorf("system call %d: %w", nr, errno))
		}
		return r
	}
	fd := call(unix.SYS_OPENAT, unix.AT_FDCWD, "/dev/shm/large", unix.O_CREAT|unix.O_RDWR, 0o600)
	call(unix.SYS_UNLINK, "/dev/shm/large")
	call(unix.SYS_FTRUNCATE, fd, held)
	at := call(unix.SYS_MMAP, 0, held, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE, fd, 0)
	if how == "open" {
		call(unix.SYS_MUNMAP, at, held)
	} else {
		call(unix.SYS_CLOSE, fd)
	}
	x.release()
}

// TestRoomUnlinked: a lease whose session fills the file system with a file that it has removed, and has open or mapped, is ended, and others go on.
func TestRoomUnlinked(t *testing.T) {
	dir := setup(t)
	mountMemory(t, filepath.Join(dir, "shared"), "size=16m")
	p := newPool(t, dir, nil)
	ends := make(chan string, 10)
	p.OnEnd(func(s lease.Session, reason string) { ends <- s.Lease[:1] + ": " + reason })
	victim, _ := begin(t, p, "b")
	for _, how := range []string{"open", "mapped"} {
		_, s := begin(t, p, "a")
		// The session may be ended before it is let go.
		out, err := exec.CommandContext(t.Context(), "/proc/self/exe", "takeover-hold", strconv.Itoa(s.Worker.PID), how).CombinedOutput()
		select {
		case got := <-ends:
			if !strings.HasPrefix(got, "a: its lease has filled /dev/shm: at least ") {
				t.Errorf("%s: %s", how, got)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: the lease goes on; %v: %s", how, err, out)
		}
		waitFor(t, "room again", func() bool {
			all, free, err := roomOf(p.cfg.Shared)
			return err == nil && free.bytes > all.bytes*9/10
		})
		if err := victim.activate(0); err != nil {
			t.Errorf("%s: the lease beside: %v", how, err)
		}
	}
	if len(ends) > 0 {
		t.Errorf("ended as well: %s", <-ends)
	}
}
