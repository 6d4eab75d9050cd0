package store

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func put(t *testing.T, s *Store, b []byte) Sum {
	t.Helper()
	sum := Sum(sha256.Sum256(b))
	u, err := s.Begin(sum, uint64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	half := len(b) / 2
	for _, w := range []struct {
		off int
		b   []byte
	}{{0, b[:half]}, {half, b[half:]}} {
		if err := u.Write(uint64(w.off), w.b); err != nil {
			t.Fatal(err)
		}
	}
	if err := u.Unstored(); err != nil {
		t.Fatal(err)
	}
	m, err := u.Commit()
	if err != nil {
		t.Fatal(err)
	}
	if !m.Stored() || !bytes.Equal(m.Bytes(), b) {
		t.Fatal("what was uploaded is not what the commit gives")
	}
	m.Close()
	return sum
}

func TestImageSurvives(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "images")
	s, err := Open(dir, Bounds{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 100, os.Getpagesize(), 3*os.Getpagesize() + 1} {
		b := bytes.Repeat([]byte{0xab}, n)
		sum := put(t, s, b)
		again, err := Open(dir, Bounds{Limit: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		m, err := again.Get(sum, uint64(n))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(m.Bytes(), b) {
			t.Fatal("image differs")
		}
		if m.mem[n] != 0 {
			t.Fatal("no NUL behind the image")
		}
		if _, err := again.Get(sum, uint64(n+1)); !errors.Is(err, ErrMismatch) {
			t.Fatalf("wrong size: %v", err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Get(Sum{}, 1); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	if fi, _ := os.Stat(dir); fi.Mode().Perm() != 0o700 {
		t.Fatalf("mode %v", fi.Mode())
	}
}

func TestWrongUploads(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir, Bounds{Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	u, err := s.Begin(Sum{1}, 4)
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Write(1, []byte("x")); !errors.Is(err, ErrMismatch) {
		t.Fatal(err)
	}
	if err := u.Write(0, []byte("abcde")); !errors.Is(err, ErrMismatch) {
		t.Fatal(err)
	}
	if err := u.Write(0, []byte("abcd")); err != nil {
		t.Fatal(err)
	}
	if _, err := u.Commit(); !errors.Is(err, ErrMismatch) {
		t.Fatal("a wrong hash was accepted")
	}
	for _, n := range []uint64{0, 1 << 41, 1 << 63} {
		if _, err := s.Begin(Sum{2}, n); !errors.Is(err, ErrTooLarge) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	if got := entries(t, dir); len(got) != 0 {
		t.Fatalf("left behind: %v", got)
	}
}

// entries are the names in a directory of images, but for that of the tally.
func entries(t *testing.T, dir string) (all []string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		if e.Name() != tallyName {
			all = append(all, e.Name())
		}
	}
	return all
}

// What older versions left of uploads is removed once it is old, and nothing else is.
func TestClean(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "i")
	s, err := Open(dir, Bounds{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	sum := put(t, s, []byte("image"))
	for _, name := range []string{".new-12345", "." + sum.String() + ".0123456789abcdef.new"} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, 1000), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		at   time.Time
		left int
	}{{time.Now(), 3}, {time.Now().Add(2 * time.Hour), 1}} {
		if err := s.Clean(c.at); err != nil {
			t.Fatal(err)
		}
		if got := entries(t, dir); len(got) != c.left {
			t.Errorf("at %v: %v", c.at, got)
		}
	}
	m, err := s.Get(sum, 5)
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
}

func TestEviction(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "i")
	s, err := Open(dir, Bounds{Limit: 2500})
	if err != nil {
		t.Fatal(err)
	}
	a := put(t, s, bytes.Repeat([]byte{1}, 1000))
	b := put(t, s, bytes.Repeat([]byte{2}, 1000))
	old := time.Now().Add(-time.Hour)
	_ = os.Chtimes(s.path(a), old, old)
	_ = os.Chtimes(s.path(b), old.Add(time.Minute), old.Add(time.Minute))
	m, err := s.Get(a, 1000) // now b is the one used longest ago
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := put(t, s, bytes.Repeat([]byte{3}, 1000))
	if _, err := s.Get(b, 1000); !errors.Is(err, ErrNotFound) {
		t.Fatalf("b should be gone: %v", err)
	}
	for _, sum := range []Sum{a, c} {
		m, err := s.Get(sum, 1000)
		if err != nil {
			t.Fatal(err)
		}
		m.Close()
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Bounds{Limit: 1}); err == nil {
		t.Error("a directory open to others was accepted")
	}
	f := filepath.Join(dir, "f")
	if err := os.WriteFile(f, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(f, Bounds{Limit: 1}); err == nil {
		t.Error("a file was accepted")
	}
}
