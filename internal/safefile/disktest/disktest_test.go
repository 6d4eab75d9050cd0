package disktest

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRun: calls are told by name and path, in order; a fault is what the caller gets; other goroutines are not judged.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	var told []string
	var mu sync.Mutex
	fail := map[string]Fault{}
	set := func(name string, f Fault) {
		mu.Lock()
		defer mu.Unlock()
		fail[name] = f
	}
	judge := func(c Call) Fault {
		if !strings.HasPrefix(c.Path, dir) {
			return Fault{}
		}
		mu.Lock()
		defer mu.Unlock()
		told = append(told, c.String())
		return fail[c.String()]
	}
	Run(t, judge, func() {
		f, err := os.OpenFile(path("a"), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		set("write a", Fault{Short: true})
		if n, err := unix.Write(int(f.Fd()), []byte("abcdefg")); n != 3 || err != nil {
			t.Errorf("a short write: %d, %v", n, err)
		}
		set("write a", Fault{Err: unix.ENOSPC})
		if n, err := f.Write([]byte("x")); n != 0 || !errors.Is(err, unix.ENOSPC) {
			t.Errorf("a write without room: %d, %v", n, err)
		}
		set("pwrite64 a", Fault{Short: true})
		if n, err := unix.Pwrite(int(f.Fd()), []byte("XYZ!"), 5); n != 2 || err != nil {
			t.Errorf("a short write at a place: %d, %v", n, err)
		}
		set("write a", Fault{})
		if _, err := f.Write([]byte("de")); err != nil {
			t.Error(err)
		}
		set("fsync a", Fault{Err: unix.EIO})
		if err := f.Sync(); !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), path("a")) {
			t.Errorf("a sync: %v", err)
		}
		set("renameat b", Fault{Err: unix.EIO})
		if err := os.Rename(path("a"), path("b")); !errors.Is(err, unix.EIO) {
			t.Errorf("a rename: %v", err)
		}
		set("open c", Fault{Err: unix.EIO})
		if _, err := os.Create(path("c")); !errors.Is(err, unix.EIO) {
			t.Errorf("a new file: %v", err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			if err := os.WriteFile(path("c"), nil, 0o600); err != nil {
				t.Errorf("another goroutine: %v", err)
			}
		}()
		<-done
		if _, err := os.ReadFile(path("a")); err != nil {
			t.Errorf("what reads is judged: %v", err)
		}
	})
	if b, err := os.ReadFile(path("a")); err != nil || string(b) != "abcdeXY" {
		t.Errorf("the file has %q, %v", b, err)
	}
	want := []string{"open a", "write a", "write a", "pwrite64 a", "write a", "fsync a", "renameat b", "open c"}
	if !slices.Equal(told, want) {
		t.Errorf("told were %v, want %v", told, want)
	}
	if f, err := os.Create(path("c")); err != nil {
		t.Errorf("after it: %v", err)
	} else {
		f.Close()
	}
}
