package store

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile/disktest"
)

// uploadText is an image of a few pages that does not end with one.
var uploadText = bytes.Repeat([]byte("an image "), 3000)

// Tests commit images of a few bytes as those that are too large for lateMost, unless they say otherwise.
var usualLateMost = lateMost

func init() { lateMost = 0 }

// putLater has small images put in their place later for the rest of a test.
func putLater(t *testing.T) {
	lateMost = usualLateMost
	t.Cleanup(func() { lateMost = 0 })
}

// eachWay runs a test with images whose commit waits for the disk, and with ones that are put in their place later.
func eachWay(t *testing.T, f func(t *testing.T, later bool)) {
	t.Run("at once", func(t *testing.T) { f(t, false) })
	t.Run("later", func(t *testing.T) {
		putLater(t)
		f(t, true)
	})
}

// upload sends an image in three pieces, commits it and has it put in its place.
func upload(s *Store) (u *Upload, m *Image, err error) {
	u, err = s.Begin(Sum(sha256.Sum256(uploadText)), uint64(len(uploadText)))
	for at := 0; err == nil && at < len(uploadText); at += len(uploadText) / 3 {
		err = u.Write(uint64(at), uploadText[at:at+len(uploadText)/3])
	}
	if err == nil {
		if m, err = u.Commit(); err == nil {
			u.Publish()
		}
	}
	return u, m, err
}

// diskStore is a store with an account of all images.
func diskStore(t *testing.T) (*Store, string) {
	t.Helper()
	top := t.TempDir()
	f, err := CreateShared(filepath.Join(top, "shared"))
	if err != nil {
		t.Fatal(err)
	}
	shared, err := OpenShared(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = shared.Close() })
	dir := filepath.Join(top, "i")
	s, err := Open(dir, Bounds{Limit: 1 << 20, Total: 1 << 20, Shared: shared})
	if err != nil {
		t.Fatal(err)
	}
	return s, dir
}

// TestDiskFaults: whichever system call of an upload fails, and however, its session has the image, and is told whether it is stored, and if
// not, why; the store has it whole or not at all; nothing stays reserved; and the next upload is stored.
func TestDiskFaults(t *testing.T) { eachWay(t, diskFaults) }

func diskFaults(t *testing.T, later bool) {
	hit := map[string]int{}
	for _, kind := range disktest.Kinds {
		for n := 0; ; n++ {
			s, dir := diskStore(t)
			disk := &disktest.One{Dir: dir, N: n, Fault: kind.Fault}
			var u *Upload
			var m *Image
			var err error
			disktest.Run(t, disk.Judge, func() { u, m, err = upload(s) })
			if disk.Hit.Name == "" {
				break
			}
			hit[disk.Hit.Name]++
			what := kind.Name + " at " + disk.Hit.Name
			if err != nil || !bytes.Equal(m.Bytes(), uploadText) {
				t.Fatalf("%s: the session has no image, or another: %v", what, err)
			}
			// A file system that cannot reserve space says EOPNOTSUPP, which is none of the faults.
			why := u.Unstored()
			switch {
			case disk.Harmless():
				if why != nil || m.Stored() == later {
					t.Errorf("%s: not stored: %v", what, why)
				}
			case why == nil || m.Stored() || !strings.Contains(why.Error(), dir) || !errors.Is(why, unix.EIO) && !errors.Is(why, unix.ENOSPC):
				t.Errorf("%s: stored is %v; why not: %v", what, m.Stored(), why)
			}
			_ = m.Close()
			if left := entries(t, dir); len(left) > 1 || (len(left) == 1) != (why == nil) {
				t.Errorf("%s: stored are %q", what, left)
			}
			sum := Sum(sha256.Sum256(uploadText))
			again, err := Open(dir, s.Bounds)
			if err != nil {
				t.Fatal(err)
			}
			if m, err := again.Get(sum, uint64(len(uploadText))); err == nil {
				if !bytes.Equal(m.Bytes(), uploadText) {
					t.Errorf("%s: another session gets another image", what)
				}
				_ = m.Close()
			} else if !errors.Is(err, ErrNotFound) || why == nil {
				t.Errorf("%s: another session: %v", what, err)
			}
			if n := ownBytes(s.open.own) + ownBytes(s.Shared.own); n != 0 {
				t.Errorf("%s: %d bytes are still reserved", what, n)
			}
			u, m, err = upload(s)
			if err != nil || u.Unstored() != nil || m.Stored() == later || !bytes.Equal(m.Bytes(), uploadText) {
				t.Fatalf("%s: the next upload: %v, %v", what, err, u.Unstored())
			}
			_ = m.Close()
			if got := s.Shared.stored(); got != int64(len(uploadText)) && why != nil {
				t.Errorf("%s: %d bytes are counted of all users' %d", what, got, len(uploadText))
			}
		}
	}
	t.Logf("faults at %v", hit)
	if hit["pwrite64"] == 0 || hit["fsync"] == 0 || hit["linkat"] == 0 || hit["fallocate"] == 0 {
		t.Error("not all calls were reached")
	}
}

// TestDiskForgets: a disk that fails gives back other bytes than it was given. No session has them for the image that it sent.
func TestDiskForgets(t *testing.T) { eachWay(t, diskForgets) }

func diskForgets(t *testing.T, later bool) {
	for _, at := range []string{"pwrite64", "fsync"} {
		s, dir := diskStore(t)
		n := 0
		var u *Upload
		var m *Image
		var err error
		disktest.Run(t, func(c disktest.Call) disktest.Fault {
			if c.Name != at || !strings.HasPrefix(c.Path, dir) {
				return disktest.Fault{}
			}
			if n++; at == "pwrite64" && n < 3 {
				return disktest.Fault{}
			}
			if _, err := unix.Pwrite(c.FD, make([]byte, 100), 0); err != nil {
				t.Error(err)
			}
			return disktest.Fault{Err: unix.EIO}
		}, func() { u, m, err = upload(s) })
		switch {
		case later: // it has the image in memory
			if why := u.Unstored(); err != nil || !bytes.Equal(m.Bytes(), uploadText) || !errors.Is(why, unix.EIO) || !strings.Contains(why.Error(), dir) {
				t.Fatalf("%s: the session has no image, or another, or is not told: %v, %v", at, err, why)
			}
			_ = m.Close()
		case err == nil:
			t.Errorf("%s: the session has an image; it is right: %v", at, bytes.Equal(m.Bytes(), uploadText))
			_ = m.Close()
		case !errors.Is(err, unix.EIO) || errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), dir):
			t.Errorf("%s: %v", at, err)
		}
		u.Abort()
		if left := entries(t, dir); len(left) != 0 {
			t.Errorf("%s: stored are %q", at, left)
		}
		if u, m, err = upload(s); err != nil || u.Unstored() != nil {
			t.Fatalf("%s: the next upload: %v, %v", at, err, u.Unstored())
		}
		_ = m.Close()
	}
}
