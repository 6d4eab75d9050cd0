package audit

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func lines(t *testing.T, path string) (all []Event) {
	t.Helper()
	must(t, Read(path, func(e *Event) bool { all = append(all, *e); return true }))
	return all
}

func TestWriteRotateReopen(t *testing.T) {
	p := filepath.Join(t.TempDir(), "audit.log")
	const each, lives = 501, 3
	for range lives {
		l, err := Open(p, Options{MaxSize: 16 << 10, Keep: 100})
		must(t, err)
		var wg sync.WaitGroup
		for w := range 5 {
			wg.Go(func() {
				for i := range each / 5 {
					if err := l.Write(Event{Event: Grant, Lease: fmt.Sprintf("%d-%d", w, i), UID: UID(0), Reason: strings.Repeat("x", i)}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		must(t, l.Write(Event{Event: Grant, Lease: "last", Owner: "o", UID: UID(0)}))
		if l.Lines() != each || l.Failed() != 0 {
			t.Fatal(l.Lines(), l.Failed())
		}
		for id, want := range map[string]bool{"last": true, "9-9": false} {
			if has, err := l.Has(Grant, id, "other", 0); err != nil || has {
				t.Error("another owner's:", has, err)
			}
			if has, err := l.Has(Grant, id, "o", 0); err != nil || has != want {
				t.Errorf("has %s: %v %v", id, has, err)
			}
		}
		must(t, l.Close())
	}
	all := lines(t, p)
	if len(all) != each*lives {
		t.Fatalf("%d lines of %d", len(all), each*lives)
	}
	for i, e := range all {
		if e.Seq != uint64(i+1) || e.Time.IsZero() || e.UID == nil {
			t.Fatalf("line %d: %+v", i, e)
		}
	}
	if _, err := os.Stat(p + ".2"); err != nil {
		t.Error("not rotated:", err)
	}
}

func TestKeep(t *testing.T) {
	p := filepath.Join(t.TempDir(), "audit.log")
	l, err := Open(p, Options{MaxSize: 1000, Keep: 2})
	must(t, err)
	defer l.Close()
	for range 100 {
		must(t, l.Write(Event{Event: Grant, Reason: strings.Repeat("x", 100)}))
	}
	fs, err := os.ReadDir(filepath.Dir(p))
	must(t, err)
	if len(fs) != 3+2 { // and the empty files of sessions and refusals
		t.Fatal(fs)
	}
	all := lines(t, p)
	if n := len(all); n == 0 || all[n-1].Seq != 100 {
		t.Fatal(all)
	}
}

// What any user can cause cannot rotate away who had which GPU, and all lines are read
// in their order.
func TestRefusalsStayApart(t *testing.T) {
	p := filepath.Join(t.TempDir(), "audit.log")
	l, err := Open(p, Options{MaxSize: 4 << 10, Keep: 2})
	must(t, err)
	events := []string{Grant, SessionOpen, Set, SessionEnd, Refuse, Release}
	for _, e := range events {
		must(t, l.Write(Event{Event: e, Lease: "a"}))
	}
	for _, e := range []string{Refuse, SessionRefuse, TicketRefuse, PeerRefuse, SessionOpen, SessionEnd, Overrun} {
		for range 200 {
			must(t, l.Write(Event{Event: e, Lease: "b", Reason: strings.Repeat("x", 100)}))
		}
	}
	must(t, l.Write(Event{Event: Reclaim, Lease: "c"}))
	for range 2 {
		must(t, l.Close())
		l, err = Open(p, Options{MaxSize: 4 << 10, Keep: 2})
		must(t, err)
	}
	must(t, l.Write(Event{Event: Attach, Lease: "d"}))
	var have []string
	var seq uint64
	for _, e := range lines(t, p) {
		if e.Seq <= seq {
			t.Fatalf("line %d comes after line %d", e.Seq, seq)
		}
		seq = e.Seq
		if e.Lease != "b" {
			have = append(have, e.Event)
		}
	}
	if want := []string{Grant, Set, Release, Reclaim, Attach}; !slices.Equal(have, want) {
		t.Errorf("left are %v, want %v", have, want)
	}
	if seq != uint64(len(events))+7*200+2 {
		t.Errorf("the last line is number %d", seq)
	}
	for event, want := range map[string]bool{Grant: true, Release: true, SessionOpen: false, Refuse: false} {
		if has, err := l.Has(event, "a", "", 0); err != nil || has != want {
			t.Errorf("%s of the first lease: %v, %v", event, has, err)
		}
	}
	must(t, l.Sync())
	must(t, l.Close())
	if err := l.Sync(); !errors.Is(err, os.ErrClosed) {
		t.Error("closed:", err)
	}
}

// Sync and rotation at the same time.
func TestSyncWhileRotating(t *testing.T) {
	p := filepath.Join(t.TempDir(), "audit.log")
	l, err := Open(p, Options{MaxSize: 2 << 10, Keep: 1})
	must(t, err)
	defer l.Close()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for range 200 {
				if err := l.Write(Event{Event: Grant, Reason: strings.Repeat("x", 100)}); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 50 {
				if err := l.Sync(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// unsynced puts a pipe in the place of a series' file: it takes lines, and no sync.
func unsynced(t *testing.T, l *Log, c class) {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { r.Close() })
	must(t, l.series[c].f.Close())
	l.series[c].f = w
}

// No caller of Sync is told that lines are on the disk while another finds out that they
// are not.
func TestSyncFails(t *testing.T) {
	l, err := Open(filepath.Join(t.TempDir(), "audit.log"), Options{})
	must(t, err)
	unsynced(t, l, leases)
	must(t, l.Write(Event{Event: Grant}))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				if l.Sync() == nil {
					t.Error("synced")
					return
				}
			}
		})
	}
	wg.Wait()
	if l.Close() == nil {
		t.Error("closed without an error")
	}
}

// A file that cannot be synced is not put aside, where no Sync would come back to it.
func TestRotateUnsynced(t *testing.T) {
	p := filepath.Join(t.TempDir(), "audit.log")
	l, err := Open(p, Options{MaxSize: 1000, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	defer l.Close()
	unsynced(t, l, leases)
	for range 20 {
		must(t, l.Write(Event{Event: Grant, Reason: strings.Repeat("x", 100)}))
	}
	if _, err := os.Stat(p + ".1"); err == nil {
		t.Error("rotated")
	}
	if l.Sync() == nil {
		t.Error("synced")
	}
}

func TestTornLine(t *testing.T) {
	p := filepath.Join(t.TempDir(), "audit.log")
	l, err := Open(p, Options{})
	must(t, err)
	must(t, l.Write(Event{Event: Grant, Lease: "a"}))
	must(t, l.Close())
	f, err := os.OpenFile(p, os.O_APPEND|os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteString(`{"event":"grant","lease":"b`)
	must(t, err)
	must(t, f.Close())
	l, err = Open(p, Options{})
	must(t, err)
	defer l.Close()
	must(t, l.Write(Event{Event: Grant, Lease: "c"}))
	all := lines(t, p)
	if len(all) != 2 || all[1].Lease != "c" || all[1].Seq != 2 {
		t.Fatalf("%+v", all)
	}
}

// A full disk: a line is written whole or not at all, and writing goes on once
// there is room.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small tmpfs")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16k,mode=0755"); err != nil {
		t.Skip("no tmpfs can be mounted: ", err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	p := filepath.Join(dir, "audit.log")
	l, err := Open(p, Options{})
	must(t, err)
	defer l.Close()
	n := 0
	for {
		if err = l.Write(Event{Event: Grant, Lease: fmt.Sprint(n), Reason: strings.Repeat("x", 200)}); err != nil {
			break
		}
		n++
	}
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), p) || l.Failed() != 1 {
		t.Fatal(err, l.Failed())
	}
	must(t, unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=64k,mode=0755"))
	must(t, l.Write(Event{Event: Release}))
	all := lines(t, p)
	if len(all) != n+1 || all[n].Event != Release || all[n].Seq != uint64(n+1) {
		t.Fatalf("%d lines of %d: %+v", len(all), n+1, all[len(all)-1])
	}
}

func TestUnsafe(t *testing.T) {
	p := filepath.Join(t.TempDir(), "audit.log")
	must(t, os.WriteFile(p, nil, 0o640))
	l, err := Open(p, Options{})
	must(t, err) // a group may read
	must(t, l.Close())
	must(t, os.Chmod(p, 0o660))
	if _, err := Open(p, Options{}); !errors.Is(err, safefile.ErrUnsafe) {
		t.Error(err)
	}
	must(t, os.Remove(p))
	must(t, os.Symlink("/etc/passwd", p))
	if _, err := Open(p, Options{}); !errors.Is(err, safefile.ErrUnsafe) {
		t.Error(err)
	}
	if err := l.Write(Event{}); !errors.Is(err, os.ErrClosed) {
		t.Error("closed:", err)
	}
}
