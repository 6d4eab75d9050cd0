package workers

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// mountMemory mounts a file system in memory on a directory.
func mountMemory(t *testing.T, at, options string) {
	t.Helper()
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "mode=700,"+options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
}

// begin has a lease's first session, which answers.
func begin(t *testing.T, p *Pool, id string) (*client, lease.Session) {
	t.Helper()
	c, w := pair(t)
	s, err := p.Start(t.Context(), testLease(id, 0), request(id), w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	return c, s
}

// TestRoom: a lease whose sessions fill the file system of /dev/shm, which is that of the accounts and records too, ends them, by many bytes, many files or
// directories without end. What it has there goes, others go on, and it may have sessions again.
func TestRoom(t *testing.T) {
	dir := setup(t)
	mountMemory(t, filepath.Join(dir, "shared"), "size=16m,nr_inodes=1800")
	p := newPool(t, dir, nil)
	ends := make(chan string, 10)
	p.OnEnd(func(s lease.Session, reason string) { ends <- s.Lease[:1] + ": " + reason })
	victim, _ := begin(t, p, "b")
	fill := func(at, what string) error {
		switch what {
		case "bytes":
			return os.WriteFile(filepath.Join(at, "large"), make([]byte, 13<<20), 0o600)
		case "files":
			for i := range 1600 {
				if err := unix.Mknod(filepath.Join(at, strconv.Itoa(i)), unix.S_IFREG|0o600, 0); err != nil {
					return err
				}
			}
		case "directories":
			for range 1600 {
				if err := unix.Mkdir(filepath.Join(at, "d"), 0o700); err != nil {
					return err
				}
				if at = filepath.Join(at, "d"); len(at) > 3000 {
					return nil
				}
			}
		}
		return nil
	}
	for _, what := range []string{"bytes", "files", "directories"} {
		_, s := begin(t, p, "a")
		own := filepath.Join(p.cfg.Shared, s.Lease)
		// The directory may go while it is filled.
		if err := fill(own, what); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("%s: %v", what, err)
		}
		if what != "bytes" { // those are found in time by themselves
			p.makeRoom(new(fruitless))
		}
		select {
		case got := <-ends:
			if !strings.HasPrefix(got, "a: its lease has filled /dev/shm") {
				t.Errorf("%s: %s", what, got)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: the lease goes on", what)
		}
		waitFor(t, "room again", func() bool {
			all, free, err := roomOf(p.cfg.Shared)
			return err == nil && free.bytes > all.bytes*9/10 && free.files > all.files*9/10
		})
		if err := victim.activate(0); err != nil {
			t.Errorf("%s: the lease beside: %v", what, err)
		}
	}
	if _, s := begin(t, p, "a"); s.ID == "" {
		t.Error("no session any more")
	}
	select {
	case got := <-ends:
		t.Errorf("ended as well: %s", got)
	default:
	}
}

// TestRoomOfCounts: what a session has the files take that count for all users, and that it can write, is given back, and nobody is ended.
func TestRoomOfCounts(t *testing.T) {
	dir := setup(t)
	run := filepath.Join(dir, "run")
	mountMemory(t, run, "size=16m")
	p := newPool(t, dir, func(c *Config) { c.Dir, c.Shared = filepath.Join(run, "owner"), filepath.Join(run, "shared") })
	ends := make(chan string, 10)
	p.OnEnd(func(s lease.Session, reason string) { ends <- reason })
	c, _ := begin(t, p, "a")
	for _, flags := range []uint32{0, unix.FALLOC_FL_KEEP_SIZE} {
		f, err := os.OpenFile(p.images().count, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Fallocate(int(f.Fd()), flags, 0, 14<<20); err != nil {
			t.Fatal(err)
		}
		f.Close()
		p.makeRoom(new(fruitless))
		if all, free, err := roomOf(p.cfg.Shared); err != nil || short(all, free) {
			t.Errorf("flags %d: %v of %v are free (%v)", flags, free, all, err)
		}
	}
	if err := c.activate(0); err != nil {
		t.Error(err)
	}
	if len(ends) > 0 {
		t.Errorf("the session has ended: %s", <-ends)
	}
}

// TestNoRoomForRecords: wherever the file system of accounts, records and totals is full in the middle of a session's beginning, that session is
// refused with the reason, nothing of it is left, others go on, and it begins once there is room.
func TestNoRoomForRecords(t *testing.T) {
	dir := setup(t)
	run := filepath.Join(dir, "run")
	mountMemory(t, run, "size=4m,nr_inodes=300")
	change := func(c *Config) {
		c.Dir, c.Turns, c.Shared, c.Warm = filepath.Join(run, "owner"), filepath.Join(run, "turns"), filepath.Join(run, "shared"), 0
	}
	p := newPool(t, dir, change)
	steady, first := begin(t, p, "b")
	filler := filepath.Join(run, "filler")
	// leave fills the file system but for some pages, or some files.
	leave := func(pages, files uint64) {
		t.Helper()
		if err := os.MkdirAll(filler, 0o700); err != nil {
			t.Fatal(err)
		}
		_, free, err := roomOf(run)
		if err != nil {
			t.Fatal(err)
		}
		if files > 0 {
			for i := range free.files - files {
				if err := unix.Mknod(filepath.Join(filler, strconv.Itoa(int(i))), unix.S_IFREG|0o600, 0); err != nil {
					t.Fatal(err)
				}
			}
		} else if err := os.WriteFile(filepath.Join(filler, "large"), make([]byte, free.bytes-pages*uint64(os.Getpagesize())), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	try := func(pages, files uint64) (refused bool) {
		t.Helper()
		leave(pages, files)
		c, w := pair(t)
		_, err := p.Start(t.Context(), testLease("a", 0), request("a"), w, gpus(0))
		w.Close()
		if err == nil {
			err = c.hello()
		}
		refused = err != nil
		if refused && !strings.Contains(err.Error(), "no space left") {
			t.Errorf("with %d pages, %d files: %v", pages, files, err)
		}
		if n := len(p.Sessions(strings.Repeat("a", 32))); refused && n != 0 {
			t.Errorf("with %d pages, %d files: %d sessions are left", pages, files, n)
		}
		if err := steady.activate(0); err != nil {
			t.Fatalf("with %d pages, %d files: the lease beside: %v", pages, files, err)
		}
		if err := os.RemoveAll(filler); err != nil {
			t.Fatal(err)
		}
		if refused {
			begin(t, p, "a")
		}
		if err := p.End(t.Context(), strings.Repeat("a", 32)); err != nil {
			t.Fatal(err)
		}
		if err := p.Forget(strings.Repeat("a", 32)); err != nil {
			t.Fatal(err)
		}
		return refused
	}
	pages, files := uint64(0), uint64(1)
	for ; try(pages, 0); pages++ {
		if pages == 3 {
			pages = 60 // in between there is no room for the account
		}
	}
	for ; try(0, files); files++ {
	}
	t.Logf("a lease with a session takes %d pages and %d files", pages, files)
	if pages < 66 || files < 3 {
		t.Error("no session was refused half way")
	}
	p.Close()
	next := newPool(t, dir, change)
	next.OnEnd(func(lease.Session, string) {})
	if all := next.Sessions(first.Lease); len(all) != 1 {
		t.Errorf("the next daemon finds sessions %v", all)
	}
}

// After a look that found nobody to blame the next comes once more of the file system has gone, or after a while.
func TestRoomLooks(t *testing.T) {
	now := time.Now()
	all, was := room{6400, 640}, room{1000, 100}
	for _, c := range []struct {
		name  string
		after time.Duration
		free  room
		holds bool
	}{
		{"nothing has changed", time.Second, was, true},
		{"a little has gone", time.Second, room{900, 90}, true},
		{"more bytes have gone", time.Second, room{899, 100}, false},
		{"more files have gone", time.Second, room{1000, 89}, false},
		{"some was freed", time.Second, room{2000, 200}, true},
		{"long ago", roomRest, was, false},
	} {
		if got := (fruitless{now, was}).holds(now.Add(c.after), all, c.free); got != c.holds {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	if (fruitless{}).holds(now, all, was) {
		t.Error("the first look is left out")
	}
}
