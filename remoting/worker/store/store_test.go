package store

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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

// The uploads that others left unfinished are removed once they are old, and nothing else is: the
// directory may have files of other owners.
func TestClean(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "i")
	s, err := Open(dir, Bounds{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	sum := put(t, s, []byte("image"))
	others := []string{".bashrc", "thesis.tex", ".thesis.tex.0123456789abcdef.new", strings.ToUpper(sum.String()), sum.String()[:62]}
	for _, name := range append(others, leftover(sum)) {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, 1000), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		at   time.Time
		left int
	}{{time.Now(), 7}, {time.Now().Add(2 * time.Hour), 6}} {
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
	if has, err := s.evict(0); err != nil || has != 0 {
		t.Errorf("%d bytes are the store's, %v", has, err)
	}
	slices.Sort(others)
	if got := entries(t, dir); !slices.Equal(got, others) {
		t.Errorf("left: %v, want %v", got, others)
	}
}

// leftover is the name of an unfinished upload.
func leftover(sum Sum) string { return "." + sum.String() + ".0123456789abcdef.new" }

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

// A file that is not what its name says is removed and not found, whatever happened to it. It is hashed once
// in a boot, and again once it has changed.
func TestDamaged(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "i")
	var told []error
	s, err := Open(dir, Bounds{Limit: 1 << 20, Damaged: func(err error) { told = append(told, err) }})
	if err != nil {
		t.Fatal(err)
	}
	text := bytes.Repeat([]byte("image"), 5000)
	sum := Sum(sha256.Sum256(text))
	get := func(want error) {
		t.Helper()
		m, err := s.Get(sum, uint64(len(text)))
		if !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
		if err == nil {
			if !bytes.Equal(m.Bytes(), text) {
				t.Error("image differs")
			}
			m.Close()
		}
	}
	for i, damage := range []func() error{
		func() error { return os.Truncate(s.path(sum), 100) },
		func() error { return os.Truncate(s.path(sum), 0) },
		func() error {
			f, err := os.OpenFile(s.path(sum), os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte{0}, int64(len(text)-1))
			return errors.Join(err, f.Close())
		},
		// The time of the last write is set back.
		func() error {
			fi, err := os.Stat(s.path(sum))
			if err != nil {
				return err
			}
			for time.Since(fi.ModTime()) < 2*marking {
				time.Sleep(time.Millisecond)
			}
			err = os.WriteFile(s.path(sum), make([]byte, len(text)), 0o600)
			return errors.Join(err, os.Chtimes(s.path(sum), fi.ModTime(), fi.ModTime()))
		},
		// What a disk does changes no time. It is found in the next boot.
		func() error {
			err := os.WriteFile(s.path(sum), make([]byte, len(text)), 0o600)
			return errors.Join(err, s.mark(sum), s.reboot())
		},
	} {
		put(t, s, text)
		get(nil)
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		get(ErrNotFound)
		if len(told) != i+1 || len(entries(t, dir)) > 0 {
			t.Errorf("damage %d: told %v, left %v", i, told, entries(t, dir))
		}
	}
	put(t, s, text)
	get(nil)
	if err := s.reboot(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(s.path(sum), unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	marked := false
	for range 20 { // a busy machine may take too long for one
		get(nil)
		var st unix.Stat_t
		if marked = unix.Fstat(fd, &st) == nil && s.checked(fd, &st); marked {
			break
		}
	}
	if !marked {
		t.Error("a file that was hashed has no mark (a file system without attributes?)")
	}
	// A size that a client has made up harms nobody.
	if _, err := s.Get(sum, 1); !errors.Is(err, ErrMismatch) {
		t.Error(err)
	}
	get(nil)
	// The file is cut short while it is read.
	m, err := s.Get(sum, uint64(len(text)))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := os.Truncate(s.path(sum), 0); err != nil {
		t.Fatal(err)
	}
	if err := m.check(sum); err == nil {
		t.Error("a file that is gone has its hash")
	}
}

// mark has the store think that it has hashed an image.
func (s *Store) mark(sum Sum) error {
	fd, err := unix.Open(s.path(sum), unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	s.used(fd, &st)
	return nil
}

// reboot has the store think that the machine was started again.
func (s *Store) reboot() error {
	old := s.boot()
	s.boot = func() string { return old + "+" }
	return nil
}

// What is in memory is stored once, by several goroutines, within the bounds; and is held whatever becomes of its file.
func TestPut(t *testing.T) {
	for _, relist := range []time.Duration{0, time.Hour} {
		dir := filepath.Join(t.TempDir(), "content")
		s, err := Open(dir, Bounds{Limit: 10 << 10, Relist: relist})
		if err != nil {
			t.Fatal(err)
		}
		piece := func(i int) []byte { return bytes.Repeat([]byte{byte(i)}, 1<<10) }
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				for i := range 20 {
					if err := s.Put(piece(i % 5)); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		if n := files(t, dir); n != 5 {
			t.Errorf("%d files of 5 pieces", n)
		}
		f, err := s.Hold(Sum(sha256.Sum256(piece(3))), 1<<10)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 20 { // make room for each other
			if err := s.Put(piece(100 + i)); err != nil {
				t.Fatal(err)
			}
		}
		if n := files(t, dir); n > 10 || n < 9 {
			t.Errorf("%d files where 10 have room", n)
		}
		if err := s.Put(make([]byte, 11<<10)); !errors.Is(err, ErrNoRoom) {
			t.Errorf("a piece larger than the store: %v", err)
		}
		if _, err := s.Hold(Sum(sha256.Sum256(piece(3))), 1<<10); !errors.Is(err, ErrNotFound) {
			t.Errorf("a piece that gave way: %v", err)
		}
		b := make([]byte, 1<<10)
		if _, err := f.ReadAt(b, 0); err != nil || !bytes.Equal(b, piece(3)) {
			t.Errorf("a piece that is held: %v", err)
		}
		f.Close()
	}
}

// files counts the images in a directory.
func files(t *testing.T, dir string) (n int) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if isImage(e.Name()) {
			n++
		}
	}
	return n
}
