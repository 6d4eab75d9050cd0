package settings

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func write(t *testing.T, content string) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; strings.HasPrefix(d, os.TempDir()+"/"); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "oci-hook.json")
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoad(t *testing.T) {
	s, err := Load("/nowhere/oci-hook.json")
	if err != nil || s.Socket() != "/usr/lib/sluice/lease/sock" {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err = Load(write(t, `{"target":"/opt/sluice","runtimes":["/usr/bin/crun"]}`)); err != nil || s.Target != "/opt/sluice" || s.Leases != "/run/sluice/leases" || len(s.Runtimes) != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{`{"tarjet":"/x"}`, `{"target":"x"}`, `{"target":"/a/../b"}`, `{"lib":"/"}`, `{"target":"/a b"}`, `{"runtimes":["runc"]}`, `{`, strings.Repeat(" ", maxSize+1)} {
		if _, err := Load(write(t, bad)); err == nil {
			t.Errorf("%.40s was taken", bad)
		}
	}
}

// What others could have written is refused, wherever on the way to it they could have.
func TestUnsafe(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"file's mode":      func(p string) error { return os.Chmod(p, 0o664) },
		"file's owner":     func(p string) error { return os.Chown(p, 1000, 0) },
		"directory's mode": func(p string) error { return os.Chmod(filepath.Dir(p), 0o777) },
		"directory above":  func(p string) error { return os.Chown(filepath.Dir(filepath.Dir(p)), 1000, 0) },
	} {
		path := write(t, "{}")
		if err := spoil(path); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(path); !errors.Is(err, ErrUnsafe) {
			t.Errorf("%s: %v", name, err)
		}
	}
	path := write(t, "{}")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err == nil {
		t.Error("a FIFO was taken")
	}
}
