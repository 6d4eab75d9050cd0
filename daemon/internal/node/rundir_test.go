package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// testConfig is of a node whose directories are below dir.
func testConfig(dir string) *config.Config {
	c := config.Default()
	c.Node = "n"
	c.StateDir, c.RunDir, c.Audit.File = filepath.Join(dir, "state"), filepath.Join(dir, "run"), filepath.Join(dir, "log", "audit.log")
	return &c
}

func TestLockRunDir(t *testing.T) {
	c := testConfig(t.TempDir())
	first, err := lockRunDir(c, time.Millisecond)
	must(t, err)
	if _, err := lockRunDir(c, time.Millisecond); err == nil || !strings.Contains(err.Error(), "stop that one first") {
		t.Errorf("a second daemon: %v", err)
	}
	first.Close()
	again, err := lockRunDir(c, time.Millisecond)
	must(t, err)
	// One that is stopping is waited for.
	time.AfterFunc(50*time.Millisecond, func() { again.Close() })
	next, err := lockRunDir(c, time.Minute)
	must(t, err)
	next.Close()
}

// use does with the ledgers what a start does.
func use(c *config.Config) error {
	if err := ledgersThere(c); err != nil {
		return err
	}
	if err := Prepare(c); err != nil {
		return err
	}
	for _, name := range roleLedgers(c) {
		led, err := openLedger(c, name)
		if err != nil {
			return err
		}
		if err := led.Close(); err != nil {
			return err
		}
	}
	return nil
}

func TestOtherLedger(t *testing.T) {
	dir := t.TempDir()
	c := testConfig(dir)
	must(t, use(c))
	must(t, use(c))

	refused := func(what string, c *config.Config) {
		t.Helper()
		err := use(c)
		if !errors.Is(err, ledger.ErrOther) || !strings.Contains(err.Error(), "is mounted") || !strings.Contains(err.Error(), "remove "+filepath.Join(c.RunDir, ownerLedger)+".id") {
			t.Errorf("%s: %v", what, err)
		}
		if err := Check(c); !errors.Is(err, ledger.ErrOther) {
			t.Errorf("%s: --check: %v", what, err)
		}
	}
	typo := *c
	typo.StateDir = filepath.Join(dir, "sate")
	refused("a mistyped state_dir", &typo)
	if _, err := os.Stat(typo.StateDir); err == nil {
		t.Error("the mistyped state_dir has been made")
	}
	must(t, os.Mkdir(typo.StateDir, 0o700))
	refused("an empty state_dir", &typo)
	if files, err := os.ReadDir(typo.StateDir); err != nil || len(files) > 0 {
		t.Errorf("the empty state_dir now has %v, %v", files, err)
	}
	must(t, os.WriteFile(filepath.Join(typo.StateDir, ownerLedger), nil, 0o600))
	refused("a ledger that was only created", &typo)

	// One that has ledgers of its own, of another run_dir.
	other := testConfig(t.TempDir())
	must(t, use(other))
	mixed := *other
	mixed.RunDir = c.RunDir
	before, err := os.ReadFile(filepath.Join(other.StateDir, ownerLedger))
	must(t, err)
	refused("another state_dir", &mixed)
	if after, err := os.ReadFile(filepath.Join(other.StateDir, ownerLedger)); err != nil || !slices.Equal(before, after) {
		t.Errorf("the other ledger was written to: %v", err)
	}
	must(t, use(c))

	// A state_dir may move with what is in it.
	moved := *c
	moved.StateDir = filepath.Join(dir, "moved")
	must(t, os.Rename(c.StateDir, moved.StateDir))
	must(t, use(&moved))

	// A reboot empties run_dir.
	must(t, os.RemoveAll(c.RunDir))
	must(t, use(&typo))
	// The remedy: the administrator gives the ledgers up.
	refused("back again", &moved)
	must(t, os.Remove(identityFile(&moved, ownerLedger)))
	must(t, os.Remove(identityFile(&moved, hostLedger)))
	must(t, use(&moved))
}

// A daemon may be killed between creating a ledger and naming it.
func TestLedgerWithoutName(t *testing.T) {
	c := testConfig(t.TempDir())
	must(t, Prepare(c))
	led, err := ledger.Open(ledgerPath(c, ownerLedger), c.Node, ledger.Options{})
	must(t, err)
	must(t, led.Close())
	must(t, os.WriteFile(identityFile(c, ownerLedger)+".new", []byte("to"), 0o600)) // torn
	must(t, use(c))
	if id, err := identityOf(c, ownerLedger); err != nil || id != led.ID() {
		t.Errorf("run_dir names ledger %q, not %q: %v", id, led.ID(), err)
	}
	must(t, os.WriteFile(identityFile(c, ownerLedger), nil, 0o600))
	if err := use(c); err == nil {
		t.Error("an empty name is taken for any ledger's")
	}
}
