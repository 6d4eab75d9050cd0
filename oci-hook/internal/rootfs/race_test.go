package rootfs

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// rounds is 1500 for each place, unless SLUICE_RACE_ROUNDS says otherwise.
func rounds(t *testing.T) int {
	n := 1500
	if v := os.Getenv("SLUICE_RACE_ROUNDS"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// ownMounts gives the test's thread a mount namespace, and returns the path of a root in
// it that is a mount. The thread ends with the test.
func ownMounts(t *testing.T) (root, host string) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	root, host = dir+"/root", dir+"/host"
	for _, d := range []string{root + "/usr/lib/sluice", root + "/etc/ld.so.conf.d", host + "/sluice", host + "/lib", host + "/ld.so.conf.d"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{root + "/usr/lib/libcuda.so.1", host + "/libcuda.so.1", host + "/00-sluice.conf"} {
		if err := os.WriteFile(f, []byte("theirs"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	return root, host
}

// T1, T2, T6: while names in the root are exchanged with links to the host, again and again,
// nothing is made, written or mounted outside of the root.
func TestRace(t *testing.T) {
	for place, other := range map[string]string{
		"usr/lib": "../host", "usr/lib/sluice": "HOST/sluice", "etc/ld.so.conf.d": "../../host/ld.so.conf.d", "usr/lib/libcuda.so.1": "HOST/libcuda.so.1", "usr": "HOST",
	} {
		done := make(chan struct{})
		t.Run(filepath.Base(place), func(t *testing.T) {
			go func() { // a thread of its own, which is not reused
				defer close(done)
				race(t, place, other)
			}()
			<-done
		})
	}
}

func race(t *testing.T, place, other string) {
	root, host := ownMounts(t)
	if len(other) >= 4 && other[:4] == "HOST" {
		other = host + other[4:]
	}
	if err := os.Symlink(other, root+"/link"); err != nil {
		t.Error(err)
		return
	}
	before := list(t, host)
	dirfd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Error(err)
		return
	}
	defer unix.Close(dirfd)
	r, err := Open(root)
	if err != nil {
		t.Error(err)
		return
	}
	defer r.Close()
	src, err := os.Open(host + "/libcuda.so.1")
	if err != nil {
		t.Error(err)
		return
	}
	defer src.Close()
	var stop atomic.Bool
	var swaps atomic.Uint64
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			if unix.Renameat2(dirfd, place, dirfd, "link", unix.RENAME_EXCHANGE) == nil {
				swaps.Add(1)
			}
			// Without a rest the kernel's lookups hardly come through, and meet few states.
			_ = unix.Nanosleep(&unix.Timespec{Nsec: 1000}, nil)
		}
	})
	ok, refused := 0, 0
	start := time.Now()
	n := rounds(t)
	for i := range n {
		for _, err := range []error{
			try(r.Dir("/usr/lib/sluice")), try(r.File("/usr/lib/libnew.so.1")), r.Write("/etc/ld.so.conf.d", "00-sluice.conf", "x\n"),
		} {
			if err == nil {
				ok++
			} else {
				refused++
			}
		}
		if i%64 == 0 {
			if err := coverOnce(r, src); err != nil {
				t.Log(err)
			}
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%s: %d rounds and %d exchanges in %v; %d done, %d refused", place, n, swaps.Load(), time.Since(start).Round(time.Millisecond), ok, refused)
	if swaps.Load() == 0 {
		t.Error("nothing was exchanged")
	}
	after := list(t, host)
	if len(before) != len(after) {
		t.Errorf("host changed: %v, was %v", after, before)
	}
	for p, v := range before {
		if after[p] != v {
			t.Errorf("host changed: %s is %q, was %q", p, after[p], v)
		}
	}
}

func try(f *os.File, err error) error {
	if err == nil {
		f.Close()
	}
	return err
}

// coverOnce mounts src on the library, and takes it away again.
func coverOnce(r *Root, src *os.File) error {
	h, err := r.File("/usr/lib/libcuda.so.1")
	if err != nil {
		return nil // exchanged
	}
	defer h.Close()
	c, err := Clone(src, true)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Attach(h); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil // exchanged
		}
		return err
	}
	return unix.Unmount("/proc/thread-self/fd/"+strconv.Itoa(int(c.f.Fd())), unix.MNT_DETACH)
}

// list is what is below dir, each name with its content.
func list(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			out[path] = "directory"
			return err
		}
		b, err := os.ReadFile(path)
		out[path] = string(b)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return out
}
