package ledger

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

func file(t *testing.T) string { return filepath.Join(t.TempDir(), "ledger.db") }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestRoundTripAndEpoch(t *testing.T) {
	p := file(t)
	for epoch := uint64(1); epoch < 4; epoch++ {
		l, err := Open(p, "gpu01", Options{})
		must(t, err)
		if l.Epoch() != epoch {
			t.Fatalf("epoch %d, want %d", l.Epoch(), epoch)
		}
		must(t, l.Put(Leases, fmt.Sprint(epoch), map[string]uint64{"n": epoch}))
		must(t, l.Put(Notes, "x", "note"))
		all, err := All[map[string]uint64](l, Leases)
		must(t, err)
		if len(all) != int(epoch) || all["1"]["n"] != 1 {
			t.Fatal(all)
		}
		var s string
		ok, err := l.Get(Notes, "x", &s)
		if err != nil || !ok || s != "note" {
			t.Fatal(ok, err, s)
		}
		must(t, l.Delete(Notes, "x"))
		must(t, l.Delete(Notes, "x"))
		if ok, _ := l.Get(Notes, "x", &s); ok {
			t.Fatal("deleted and there")
		}
		must(t, l.Close())
		must(t, Check(p, "gpu01", ""))
	}
	fi, err := os.Stat(p)
	must(t, err)
	if fi.Mode().Perm() != 0o600 {
		t.Fatal(fi.Mode())
	}
}

func TestUpdateIsAllOrNothing(t *testing.T) {
	l, err := Open(file(t), "n", Options{NoSync: true})
	must(t, err)
	defer l.Close()
	want := errors.New("no")
	err = l.Update(func(tx *Tx) error {
		must(t, tx.Put(Leases, "a", 1))
		return want
	})
	if !errors.Is(err, want) {
		t.Fatal(err)
	}
	if all, err := All[int](l, Leases); err != nil || len(all) != 0 {
		t.Fatal(all, err)
	}
}

func TestOutbox(t *testing.T) {
	p := file(t)
	l, err := Open(p, "n", Options{NoSync: true})
	must(t, err)
	var seqs []uint64
	for i := range 3 {
		must(t, l.Update(func(tx *Tx) error {
			seq, err := tx.Enqueue(i)
			seqs = append(seqs, seq)
			return err
		}))
	}
	l.Flushed(seqs[0])
	l.Flushed(seqs[2])
	must(t, l.Settle())
	must(t, l.Settle())
	must(t, l.Close())
	l, err = Open(p, "n", Options{NoSync: true})
	must(t, err)
	defer l.Close()
	var left []string
	must(t, l.View(func(tx *Tx) error {
		return tx.Queued(func(seq uint64, raw json.RawMessage) error {
			left = append(left, fmt.Sprint(seq, " ", string(raw)))
			return nil
		})
	}))
	if len(left) != 1 || left[0] != fmt.Sprint(seqs[1], " 1") {
		t.Fatal(left)
	}
}

func TestRefusals(t *testing.T) {
	p := file(t)
	l, err := Open(p, "gpu01", Options{})
	must(t, err)
	if _, err := Open(p, "gpu01", Options{Wait: 50 * time.Millisecond}); !errors.Is(err, ErrInUse) {
		t.Error("open twice:", err)
	}
	must(t, l.Close())
	if _, err := Open(p, "gpu02", Options{}); !errors.Is(err, ErrOwner) || !strings.Contains(err.Error(), `"gpu01"`) {
		t.Error("another node's:", err)
	}
	db, err := bolt.Open(p, 0o600, nil)
	must(t, err)
	must(t, db.Update(func(tx *bolt.Tx) error { return tx.Bucket([]byte(meta)).Put([]byte("format"), []byte("2")) }))
	must(t, db.Close())
	for _, f := range []func() error{func() error { _, err := Open(p, "gpu01", Options{}); return err }, func() error { return Check(p, "gpu01", "") }} {
		before, rerr := os.ReadFile(p)
		must(t, rerr)
		if err := f(); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "install the release that wrote it") {
			t.Error("another format:", err)
		}
		if now, err := os.ReadFile(p); err != nil || !bytes.Equal(now, before) {
			t.Error("another format: the file was changed,", err)
		}
	}
	must(t, os.Chmod(p, 0o644))
	if _, err := Open(p, "gpu01", Options{}); !errors.Is(err, safefile.ErrUnsafe) || !strings.Contains(err.Error(), p) {
		t.Error("mode:", err)
	}
	must(t, os.Chmod(p, 0o600))
	must(t, os.Chmod(filepath.Dir(p), 0o777))
	if _, err := Open(p, "gpu01", Options{}); !errors.Is(err, safefile.ErrUnsafe) {
		t.Error("directory:", err)
	}
	if err := Check(filepath.Join(t.TempDir(), "none"), "n", ""); err != nil {
		t.Error("none there:", err)
	}
	if _, err := Open(filepath.Join(t.TempDir(), "no", "where"), "n", Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// Every byte of the file may rot: then the ledger is read as it was written or
// refused, and never differently.
func TestCorruption(t *testing.T) {
	p := file(t)
	l, err := Open(p, "n", Options{})
	must(t, err)
	const text = "a lease that must not change"
	must(t, l.Put(Leases, "0123", text))
	must(t, l.Close())
	whole, err := os.ReadFile(p)
	must(t, err)
	at := bytes.Index(whole, []byte(text))
	if at < 0 {
		t.Fatal("no record in the file")
	}
	hurt := append([]byte(nil), whole...)
	for i := range hurt { // in every copy of the page
		if bytes.HasPrefix(hurt[i:], []byte(text)) {
			hurt[i] ^= 1
		}
	}
	must(t, os.WriteFile(p, hurt, 0o600))
	for _, f := range []func() error{func() error { _, err := Open(p, "n", Options{}); return err }, func() error { return Check(p, "n", "") }} {
		if err := f(); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "0123") || !strings.Contains(err.Error(), p) {
			t.Fatal("a record changed:", err)
		}
	}
	step := 131
	if testing.Short() {
		step = 397
	}
	for i := 0; i < len(whole); i += step {
		copy(hurt, whole)
		hurt[i] ^= 0x41
		must(t, os.WriteFile(p, hurt, 0o600))
		l, err := Open(p, "n", Options{NoSync: true})
		if err != nil {
			continue
		}
		all, err := All[string](l, Leases)
		// An older meta page is a state before the last change, which is one that was.
		if err == nil && len(all) != 0 && all["0123"] != text {
			t.Errorf("byte %d: %v", i, all)
		}
		l.Close()
	}
	for _, n := range []int{1, 100, 4096, 8192, len(whole) / 2, len(whole) - 4096} {
		must(t, os.WriteFile(p, whole[:n], 0o600))
		if l, err := Open(p, "n", Options{NoSync: true}); err == nil {
			all, err := All[string](l, Leases)
			if err == nil && all["0123"] != text {
				t.Errorf("cut to %d: %v", n, all)
			}
			l.Close()
		}
	}
}

// A process is killed while it writes; what it said was written is there.
func TestKill(t *testing.T) {
	if p := os.Getenv("LEDGER_KILL"); p != "" {
		l, err := Open(p, "n", Options{})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		for i := 0; ; i++ {
			if err := l.Put(Leases, fmt.Sprintf("%d-%d", l.Epoch(), i), i); err != nil {
				os.Exit(1)
			}
			fmt.Printf("%d-%d\n", l.Epoch(), i)
		}
	}
	p := file(t)
	runs := 10
	if testing.Short() {
		runs = 3
	}
	var said []string
	for i := range runs {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestKill$")
		cmd.Env = append(os.Environ(), "LEDGER_KILL="+p)
		var out bytes.Buffer
		cmd.Stdout = &out
		must(t, cmd.Start())
		time.Sleep(time.Duration(30+7*i) * time.Millisecond)
		must(t, cmd.Process.Signal(syscall.SIGKILL))
		_ = cmd.Wait()
		lines := strings.Split(out.String(), "\n")
		said = append(said, lines[:len(lines)-1]...)
	}
	l, err := Open(p, "n", Options{})
	must(t, err)
	defer l.Close()
	all, err := All[int](l, Leases)
	must(t, err)
	for _, k := range said {
		if _, ok := all[k]; !ok {
			t.Errorf("%s was written and is gone", k)
		}
	}
	if len(said) == 0 {
		t.Fatal("nothing was written before the kill")
	}
	t.Logf("%d changes in %d lives", len(said), runs)
}

func TestIdentity(t *testing.T) {
	p := file(t)
	if _, err := Open(p, "n", Options{ID: "other"}); !errors.Is(err, ErrOther) {
		t.Error("none there:", err)
	}
	if _, err := os.Stat(p); err == nil {
		t.Error("a ledger was created although another was wanted")
	}
	l, err := Open(p, "n", Options{NoSync: true})
	must(t, err)
	id := l.ID()
	must(t, l.Close())
	if len(id) < 20 {
		t.Fatalf("identity %q", id)
	}
	if _, err := Open(p, "n", Options{ID: "other"}); !errors.Is(err, ErrOther) {
		t.Error("another's:", err)
	}
	if err := Check(p, "n", "other"); !errors.Is(err, ErrOther) {
		t.Error("another's, checked:", err)
	}
	must(t, Check(p, "n", id))
	l, err = Open(p, "n", Options{ID: id})
	must(t, err)
	if l.ID() != id || l.Epoch() != 2 {
		t.Errorf("identity %q, epoch %d", l.ID(), l.Epoch())
	}
	must(t, l.Close())

	// A ledger of a release that gave none gets one, and is not the one that was wanted before.
	db, err := bolt.Open(p, 0o600, nil)
	must(t, err)
	must(t, db.Update(func(tx *bolt.Tx) error { return tx.Bucket([]byte(meta)).Delete([]byte("id")) }))
	must(t, db.Close())
	if _, err := Open(p, "n", Options{ID: id}); !errors.Is(err, ErrOther) {
		t.Error("without identity:", err)
	}
	l, err = Open(p, "n", Options{})
	must(t, err)
	if l.ID() == "" || l.ID() == id {
		t.Errorf("identity %q", l.ID())
	}
	must(t, l.Close())
}
