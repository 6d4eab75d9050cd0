package safefile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile/disktest"
)

// writers are the ways to write the file f in a directory. A new one must not be there yet.
var writers = []struct {
	name  string
	fresh bool
	write func(dir, staging string, b []byte) error
}{
	{"Write", false, func(dir, _ string, b []byte) error { return Write(filepath.Join(dir, "f"), b, How{}) }},
	{"Write, unnamed", false, func(dir, _ string, b []byte) error { return Write(filepath.Join(dir, "f"), b, How{Unnamed: true}) }},
	{"Write, volatile", false, func(dir, _ string, b []byte) error { return Write(filepath.Join(dir, "f"), b, How{Volatile: true}) }},
	{"Write, staging", false, func(dir, staging string, b []byte) error {
		return Write(filepath.Join(dir, "f"), b, How{Staging: staging})
	}},
	{"Write of a new name", true, func(dir, _ string, b []byte) error { return Write(filepath.Join(dir, "f"), b, How{}) }},
	{"WriteNew", true, func(dir, _ string, b []byte) error { return WriteNew(filepath.Join(dir, "f"), b, How{}) }},
	{"WriteNew, unnamed", true, func(dir, _ string, b []byte) error {
		return WriteNew(filepath.Join(dir, "f"), b, How{Unnamed: true})
	}},
	{"WriteNew, staging", true, func(dir, staging string, b []byte) error {
		return WriteNew(filepath.Join(dir, "f"), b, How{Staging: staging})
	}},
	{"WriteAt", false, func(dir, _ string, b []byte) error {
		d, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer d.Close()
		return WriteAt(d, "f", b, How{})
	}},
	{"Symlink", false, func(dir, _ string, b []byte) error { return Symlink(string(b), filepath.Join(dir, "f")) }},
}

// TestDiskFaults: whichever system call of a writer fails, and however, the file is what it was or what it was to be, and
// whole; the error names the file and the cause; no other file is left; and the writer succeeds once the disk does.
func TestDiskFaults(t *testing.T) {
	was, will := strings.Repeat("old", 1000), strings.Repeat("newer", 600)
	for _, w := range writers {
		hit := map[string]int{}
		for _, kind := range disktest.Kinds {
			for n := 0; ; n++ {
				dir, staging := t.TempDir(), t.TempDir()
				path := filepath.Join(dir, "f")
				if !w.fresh {
					if err := os.WriteFile(path, []byte(was), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				read := func() string {
					b, err := os.ReadFile(path)
					if to, lerr := os.Readlink(path); lerr == nil {
						return to
					}
					if errors.Is(err, fs.ErrNotExist) && w.fresh {
						return was
					} else if err != nil {
						return err.Error()
					}
					return string(b)
				}
				disk := &disktest.One{Dir: filepath.Dir(dir), N: n, Fault: kind.Fault}
				var err error
				disktest.Run(t, disk.Judge, func() { err = w.write(dir, staging, []byte(will)) })
				if disk.Hit.Name == "" {
					if err != nil {
						t.Fatalf("%s: without a fault: %v", w.name, err)
					}
					break
				}
				hit[disk.Hit.Name]++
				what := w.name + ", " + kind.Name + " at " + disk.Hit.Name
				judge(t, what, disk, err, path, read(), was, will)
				// What could not be removed is for Sweep.
				left := slices.Concat(names(t, dir), names(t, staging))
				if disk.Hit.Name == "unlinkat" {
					left = slices.DeleteFunc(left, func(n string) bool { of, ok := Unfinished(n); return ok && of == "f" })
				}
				if there := read() == will || !w.fresh; len(left) != 1 && there || len(left) != 0 && !there {
					t.Errorf("%s: there are %q", what, left)
				}
				if w.fresh && err == nil {
					continue
				}
				if err := w.write(dir, staging, []byte(will)); err != nil || read() != will {
					t.Errorf("%s: the next try: %v", what, err)
				}
			}
		}
		t.Logf("%s: faults at %v", w.name, hit)
		if len(hit) < 3 {
			t.Errorf("%s: faults at %v only", w.name, hit)
		}
	}
}

// judge judges the error of a writer, and the content that the file at path has got now.
func judge(t *testing.T, what string, disk *disktest.One, err error, path, got, was, will string) {
	t.Helper()
	if got != was && got != will {
		t.Errorf("%s: the file is %.40q of %d bytes, neither the old one nor the new one", what, got, len(got))
	}
	if disk.Harmless() || disk.Hit.Name == "unlinkat" { // the file is written by then
		if err != nil || got != will {
			t.Errorf("%s: %v", what, err)
		}
		return
	}
	cause := disk.Fault.Err
	if cause == 0 {
		cause = unix.EIO
	}
	switch {
	case err == nil:
		t.Errorf("%s: no error", what)
	case !errors.Is(err, cause) || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), ".new"):
		t.Errorf("%s: the error is %q; want the cause, %v, and the name %s alone", what, err, cause, path)
	}
}
