package ledger

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile/disktest"
)

// show is what is in an open ledger.
func show(t *testing.T, l *Ledger) string {
	t.Helper()
	all, err := All[string](l, Leases)
	must(t, err)
	return fmt.Sprint(all)
}

// TestFirstStart: whichever system call of the first start with a ledger fails, and however, the error names the ledger and the cause, and the
// next start makes it.
func TestFirstStart(t *testing.T) {
	hit := map[string]int{}
	for _, kind := range disktest.Kinds {
		for n := 0; ; n++ {
			path := file(t)
			disk := &disktest.One{Dir: filepath.Dir(path), N: n, Fault: kind.Fault}
			open := func() error {
				l, err := Open(path, "n", Options{})
				if err != nil {
					return err
				}
				return errors.Join(l.Put(Leases, "a", "x"), l.Close())
			}
			var err error
			disktest.Run(t, disk.Judge, func() { err = open() })
			if disk.Hit.Name == "" {
				must(t, err)
				break
			}
			hit[disk.Hit.Name]++
			what := kind.Name + " at " + disk.Hit.String()
			if err == nil != disk.Harmless() {
				t.Errorf("%s: %v", what, err)
			}
			if err != nil && (!strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), unix.EIO.Error()) && !strings.Contains(err.Error(), unix.ENOSPC.Error())) {
				t.Errorf("%s: %v", what, err)
			}
			if err := Check(path, "n", ""); err != nil {
				t.Errorf("%s: --check: %v", what, err)
			}
			if err := open(); err != nil {
				t.Errorf("%s: the next start: %v", what, err)
			}
			entries, err := os.ReadDir(filepath.Dir(path))
			must(t, err)
			if len(entries) != 1 {
				t.Errorf("%s: there are %v", what, entries)
			}
		}
	}
	t.Logf("faults at %v", hit)
	if len(hit) < 5 {
		t.Error("not all calls were reached")
	}
}

// TestDiskFaults: calls fail in the middle of changes, then the power does. A change whose error was nil is on the disk, and one that Sure
// has been asked about since; one with an error was made whole or not at all, which View tells. After the power loss the ledger is what it was at the
// last of these moments or at one after it, and it goes on.
func TestDiskFaults(t *testing.T) {
	faults := map[string]int{}
	failed, visible, lost := 0, 0, 0
	rounds, seed := damages(t, 24), damageSeed(t)<<32
	for round := range rounds {
		dir := t.TempDir()
		path := filepath.Join(dir, "l.db")
		l, err := Open(path, "n", Options{})
		must(t, err)
		r := rand.New(rand.NewPCG(8, seed+uint64(round)))
		chance := rand.New(rand.NewPCG(9, seed+uint64(round)))
		d := disktest.NewDisk(t, path, chance, func(c disktest.Call) disktest.Fault {
			if chance.IntN(6) > 0 {
				return disktest.Fault{}
			}
			short := c.Name == "pwrite64" && chance.IntN(2) == 0
			if faults[c.Name]++; short {
				faults["by half"]++
			}
			return disktest.Fault{Err: unix.EIO, Short: short}
		})
		mine := map[string]string{}
		may := []string{fmt.Sprint(mine)} // what the ledger may be after a power loss; the first must be kept
		disktest.Run(t, d.Judge, func() {
			for range 30 {
				next := map[string]string{}
				for k, v := range mine {
					next[k] = v
				}
				err := l.Update(func(tx *Tx) error {
					for range 1 + r.IntN(8) {
						k := fmt.Sprintf("lease-%03d", r.IntN(60))
						if r.IntN(4) == 0 {
							delete(next, k)
							must(t, tx.Delete(Leases, k))
							continue
						}
						next[k] = strings.Repeat("x", r.IntN(1500))
						must(t, tx.Put(Leases, k, next[k]))
					}
					return nil
				})
				got := show(t, l)
				switch {
				case err == nil && got != fmt.Sprint(next):
					t.Errorf("round %d: a change without an error is not there", round)
				case err != nil && (!strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), unix.EIO.Error())):
					t.Errorf("round %d: %v", round, err)
				}
				if err == nil {
					may = nil
				} else if failed++; got == fmt.Sprint(next) {
					visible++
				} else if got == fmt.Sprint(mine) {
					next = mine
				} else {
					t.Errorf("round %d: after an error the ledger is neither the old one nor the new one", round)
				}
				mine, may = next, append(may, fmt.Sprint(next))
				if r.IntN(3) == 0 && l.Sure() == nil {
					may = may[len(may)-1:]
				}
				if r.IntN(40) == 0 {
					break
				}
			}
		})
		image := d.PowerLoss(t)
		must(t, l.Close())
		after := filepath.Join(dir, "after.db")
		must(t, os.WriteFile(after, image, 0o600))
		l, err = Open(after, "n", Options{})
		if err != nil {
			t.Fatalf("round %d: after the power loss: %v", round, err)
		}
		got := show(t, l)
		if !slices.Contains(may, got) {
			t.Errorf("round %d: after the power loss the ledger is another; %d states are possible", round, len(may))
		} else if got != may[len(may)-1] {
			lost++ // a change that could not be read left the state before it, so that equal states follow each other in may
		}
		must(t, l.Put(Leases, "later", "x"))
		must(t, l.Close())
		must(t, Check(after, "n", ""))
	}
	t.Logf("%d disks: %d changes failed, of which %d could be read all the same; %d power losses took such a change; faults %v", rounds, failed, visible, lost, faults)
	if len(faults) < 4 || visible == 0 || visible == failed || lost == 0 && rounds >= 500 { // about one power loss in forty takes a change
		t.Error("the disks are all alike")
	}
}
