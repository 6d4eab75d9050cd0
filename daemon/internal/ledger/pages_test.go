package ledger

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

// filled makes a ledger of many pages at path, and copies of its file from before.
func filled(t testing.TB, path string) (good []byte, before [][]byte) {
	t.Helper()
	read := func() []byte {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	l, err := Open(path, "n", Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	for round := range 6 {
		err := l.Update(func(tx *Tx) error {
			for i := range 200 {
				if err := tx.Put(Leases, fmt.Sprintf("lease-%d-%04d", round, i), strings.Repeat("x", i%300)); err != nil {
					return err
				}
				if round > 0 && i%3 == 0 {
					if err := tx.Delete(Leases, fmt.Sprintf("lease-%d-%04d", round-1, i)); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		before = append(before, read())
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	// Without its newest meta page a file is what it was before the last change, which a
	// write that was cut short leaves as well. So the last change is none of the records.
	if l, err = Open(path, "n", Options{NoSync: true}); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return read(), before
}

// contents opens a ledger as a start does, and returns all that is in it.
func contents(path string) (string, error) {
	if err := Check(path, "n", ""); err != nil {
		return "", err
	}
	l, err := Open(path, "n", Options{NoSync: true})
	if err != nil {
		return "", err
	}
	defer l.Close()
	var b strings.Builder
	err = l.View(func(tx *Tx) error {
		for _, bucket := range buckets {
			if err := tx.All(bucket, func(key string, raw json.RawMessage) error {
				_, err := fmt.Fprintf(&b, "%s %s %s\n", bucket, key, raw)
				return err
			}); err != nil {
				return err
			}
		}
		return nil
	})
	return b.String(), err
}

// within fails the test if f does not return in time: a start that hangs is worse than
// one that is refused.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: the ledger is still being opened", what)
	}
}

// A page may have been lost, so that an older one stands in its place, and refer to a
// page above it: the walk down from it never ends.
func TestPageCycle(t *testing.T) {
	dir := t.TempDir()
	good, _ := filled(t, filepath.Join(dir, "good.db"))
	size := os.Getpagesize()
	branches := 0
	for at := 2 * size; at+size <= len(good); at += size {
		if binary.LittleEndian.Uint16(good[at+8:]) != branchPage || binary.LittleEndian.Uint64(good[at:]) != uint64(at/size) {
			continue
		}
		branches++
		bad := slices.Clone(good)
		for i := range int(binary.LittleEndian.Uint16(bad[at+10:])) {
			binary.LittleEndian.PutUint64(bad[at+pageHeader+i*elementSize+8:], uint64(at/size))
		}
		path := filepath.Join(dir, fmt.Sprintf("bad%d.db", branches))
		must(t, os.WriteFile(path, bad, 0o600))
		within(t, fmt.Sprintf("page %d refers to itself", at/size), func() {
			for what, f := range map[string]func() error{
				"--check": func() error { return Check(path, "n", "") },
				"a start": func() error {
					l, err := Open(path, "n", Options{NoSync: true})
					if err == nil {
						l.Close()
					}
					return err
				},
			} {
				// A branch page that is free is nobody's.
				if err := f(); err != nil && (!errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "restore it")) {
					t.Errorf("page %d, %s: %v", at/size, what, err)
				}
			}
		})
	}
	if branches == 0 {
		t.Fatal("the ledger has no branch page")
	}
}

// Pages that are lost, old, in the wrong place or damaged: the ledger is the one that was
// written, or refused in time.
func TestDamagedPages(t *testing.T) {
	dir := t.TempDir()
	first := filepath.Join(dir, "good.db")
	good, before := filled(t, first)
	want, err := contents(first)
	must(t, err)
	size := os.Getpagesize()
	rng := rand.New(rand.NewPCG(1, 2+damageSeed(t)))
	rounds := damages(t, 600)
	if testing.Short() {
		rounds = 100
	}
	refused := 0
	for n := range rounds {
		bad := slices.Clone(good)
		to := size * rng.IntN(len(bad)/size)
		var what string
		switch n % 5 {
		case 0:
			old := before[rng.IntN(len(before))]
			to = min(to, len(old)-size)
			copy(bad[to:to+size], old[to:])
			what = "older page"
		case 1:
			from := size * rng.IntN(len(bad)/size)
			copy(bad[to:to+size], good[from:])
			what = "page from elsewhere"
		case 2:
			clear(bad[to : to+size])
			what = "page of zeros"
		case 3:
			binary.LittleEndian.PutUint64(bad[to+8*rng.IntN(size/8):], rng.Uint64()>>rng.IntN(64))
			what = "8 bytes"
		case 4:
			bad = bad[:rng.IntN(len(bad))]
			what = "cut short"
		}
		path := filepath.Join(dir, fmt.Sprintf("bad%d.db", n)) // bbolt keeps the lock of a file that makes it panic
		must(t, os.WriteFile(path, bad, 0o600))
		within(t, fmt.Sprintf("%s at %d", what, to), func() {
			got, err := contents(path)
			if err != nil {
				refused++
			} else if got != want && len(bad) > 0 {
				t.Errorf("%s at %d: the ledger is another, and nobody said so", what, to)
			}
		})
		must(t, os.Remove(path))
	}
	t.Logf("%d of %d refused", refused, rounds)
}

// The count sees what cancels out in the digest.
func TestCount(t *testing.T) {
	p := file(t)
	l, err := Open(p, "n", Options{NoSync: true})
	must(t, err)
	must(t, l.Put(Leases, "a", 1))
	must(t, l.Put(Leases, "a", 1))
	must(t, l.Put(Leases, "b", 2))
	must(t, l.Update(func(tx *Tx) error {
		return errors.Join(tx.Delete(Leases, "b"), tx.Delete(Leases, "b"), tx.Put(Notes, "c", 3))
	}))
	must(t, l.Close())
	must(t, Check(p, "n", ""))
	set := func(v []byte) {
		t.Helper()
		db, err := bolt.Open(p, 0o600, nil)
		must(t, err)
		must(t, db.Update(func(tx *bolt.Tx) error {
			m := tx.Bucket([]byte(meta))
			if have := m.Get([]byte("count")); string(have) != "2" {
				return fmt.Errorf("%q records are counted", have)
			}
			if v == nil {
				return m.Delete([]byte("count"))
			}
			return m.Put([]byte("count"), v)
		}))
		must(t, db.Close())
	}
	set(nil) // a release that did not count
	l, err = Open(p, "n", Options{NoSync: true})
	must(t, err)
	must(t, l.Close())
	set([]byte("4"))
	if _, err := Open(p, "n", Options{}); !errors.Is(err, ErrCorrupt) {
		t.Error("two records are missing:", err)
	}
}

// FuzzOpen opens a ledger in which two words have been overwritten: it returns, without a
// fault, and has what was written or says that it is corrupt.
func FuzzOpen(f *testing.F) {
	path := filepath.Join(f.TempDir(), "seed.db")
	good, _ := filled(f, path)
	want, err := contents(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint32(2*os.Getpagesize()+pageHeader+8), uint64(2), uint32(0), uint64(0))
	f.Fuzz(func(t *testing.T, at uint32, v uint64, at2 uint32, v2 uint64) {
		b := slices.Clone(good)
		binary.LittleEndian.PutUint64(b[int(at)%(len(b)-8):], v)
		binary.LittleEndian.PutUint64(b[int(at2)%(len(b)-8):], v2)
		p := filepath.Join(t.TempDir(), "l.db")
		if err := os.WriteFile(p, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := contents(p); err == nil && got != want {
			t.Error("the ledger is another, and nobody said so")
		}
	})
}
