package safefile

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestDir(t *testing.T) {
	root := t.TempDir()
	good := filepath.Join(root, "good")
	if err := os.Mkdir(good, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Dir(good); err != nil {
		t.Fatal(err)
	}
	below := filepath.Join(good, "below")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []os.FileMode{0o775, 0o757, 0o777} {
		if err := os.Chmod(good, mode); err != nil {
			t.Fatal(err)
		}
		for _, d := range []string{good, below} {
			if err := Dir(d); !errors.Is(err, ErrUnsafe) {
				t.Errorf("mode %o, %s: %v", mode, d, err)
			}
		}
	}
	if err := os.Chmod(good, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	if err := Dir(good); !errors.Is(err, ErrUnsafe) {
		t.Errorf("sticky itself: %v", err)
	}
	if err := Dir(below); err != nil {
		t.Errorf("below sticky: %v", err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(below, 1, 1); err != nil {
			t.Fatal(err)
		}
		if err := Dir(below); !errors.Is(err, ErrUnsafe) {
			t.Errorf("another's: %v", err)
		}
	}
	if err := Dir(filepath.Join(root, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestFile(t *testing.T) {
	root := t.TempDir()
	f := filepath.Join(root, "f")
	if err := File(f, 0o077); err != nil {
		t.Fatal("one that is not there:", err)
	}
	if err := os.WriteFile(f, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := File(f, 0o077); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(f, 0o640); err != nil {
		t.Fatal(err)
	}
	if err := File(f, 0o077); !errors.Is(err, ErrUnsafe) {
		t.Error(err)
	}
	if err := File(f, 0o022); err != nil {
		t.Error(err)
	}
	l := filepath.Join(root, "l")
	if err := os.Symlink(f, l); err != nil {
		t.Fatal(err)
	}
	if err := File(l, 0o022); !errors.Is(err, ErrUnsafe) {
		t.Error(err)
	}
}
