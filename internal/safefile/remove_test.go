package safefile

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// nest makes directories in each other below dir, so many that no path names the last one.
func nest(t *testing.T, dir string, depth int) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for i := 0; i < depth && err == nil; i++ {
		if err = unix.Mkdirat(at, "d", 0o700); err != nil {
			break
		}
		var file, next int
		if file, err = unix.Openat(at, "file", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600); err != nil {
			break
		}
		unix.Close(file)
		if next, err = unix.Openat(at, "d", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			break
		}
		unix.Close(at)
		at = next
	}
	unix.Close(at)
	if err != nil {
		t.Fatal(err)
	}
}

// fewFiles leaves the process few descriptors while f runs.
func fewFiles(t *testing.T, f func()) {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	var old unix.Rlimit
	if err == nil {
		err = unix.Getrlimit(unix.RLIMIT_NOFILE, &old)
	}
	if err == nil {
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(len(open) + 20), Max: old.Max})
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	}()
	f()
}

// TestDiscard: a directory goes whatever a stranger has put into it, with few descriptors, and nothing outside of it does.
func TestDiscard(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "theirs")
	keep := filepath.Join(root, "keep")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(path, 0o700))
	must(os.MkdirAll(filepath.Join(keep, "below"), 0o700))
	must(os.WriteFile(filepath.Join(keep, "file"), []byte("x"), 0o600))
	for _, to := range []string{keep, "..", ".", "/", "nothing"} {
		must(os.Symlink(to, filepath.Join(path, fmt.Sprintf("link%x", to))))
	}
	must(os.Link(filepath.Join(keep, "file"), filepath.Join(path, "hard")))
	must(unix.Mkfifo(filepath.Join(path, "fifo"), 0o600))
	for i := range 1500 { // more than are read at once
		must(os.WriteFile(filepath.Join(path, fmt.Sprint(i)), nil, 0))
	}
	for i := range 3 { // side by side
		must(os.MkdirAll(filepath.Join(path, fmt.Sprintf("d%d", i), "d", "d", "d"), 0o700))
		must(os.Symlink(keep, filepath.Join(path, fmt.Sprintf("d%d", i), "d", "d", "link")))
	}
	nest(t, path, 3000)
	if os.Geteuid() == 0 {
		must(os.Chown(filepath.Join(path, "d"), 4242, 4242))
		must(os.Chown(path, 4242, 4242))
		must(os.Chmod(filepath.Join(path, "d0", "d"), 0o300)) // which only root can list
	}
	fewFiles(t, func() {
		rest, err := Discard(path)
		must(err)
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("its name: %v", err)
		}
		left, err := os.ReadDir(root)
		must(err)
		for _, e := range left {
			if e.Name() != "keep" && !Discarded(e.Name()) {
				t.Errorf("%s is left", e.Name())
			}
		}
		must(rest())
	})
	left, err := os.ReadDir(root)
	if err != nil || len(left) != 1 || left[0].Name() != "keep" {
		t.Errorf("left are %v, %v", left, err)
	}
	if b, err := os.ReadFile(filepath.Join(keep, "file")); err != nil || string(b) != "x" {
		t.Errorf("a file outside: %q, %v", b, err)
	}
	if _, err := os.Stat(filepath.Join(keep, "below")); err != nil {
		t.Error(err)
	}
	rest, err := Discard(path)
	must(err)
	must(rest()) // there is none
	// One whose removal a death interrupted.
	half := filepath.Join(root, ".0123456789abcdef.gone")
	must(os.MkdirAll(filepath.Join(half, "d", "d"), 0o700))
	rest, err = Discard(half)
	must(err)
	must(rest())
	if _, err := os.Lstat(half); !os.IsNotExist(err) {
		t.Errorf("half removed: %v", err)
	}
}
