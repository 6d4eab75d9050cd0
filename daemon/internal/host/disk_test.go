package host

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/safefile/disktest"
)

// TestDiskFaults: whichever system call on the host's ledger fails while a lease is acquired, the job is refused with the file and the cause, and
// no owner keeps anything for it, or it has its lease; the next request has one; and the next daemon knows of that and of no other.
func TestDiskFaults(t *testing.T) {
	hit, refused := map[string]int{}, 0
	for _, short := range []bool{false, true} {
		for n := 0; ; n++ {
			o := newFake("gpu01", 1)
			s := newSite(t, o)
			s.syncs = true
			s.restart()
			disk := &disktest.One{Dir: s.book.Path(), N: n, Fault: disktest.Fault{Err: unix.EIO, Short: short}}
			if short {
				disk.Only = "pwrite64"
			}
			var l lease.Lease
			var err error
			disktest.Run(t, disk.Judge, func() { l, _, err = s.Acquire(context.Background(), root, ask("1", 30)) })
			what := fmt.Sprintf("call %d, %s", n, disk.Hit)
			if disk.Hit.Name == "" {
				if err != nil {
					t.Fatal(err)
				}
				break
			}
			hit[disk.Hit.Name]++
			if err != nil {
				refused++
				if lease.CodeOf(err) != lease.Internal || !strings.Contains(err.Error(), s.book.Path()) || !strings.Contains(err.Error(), unix.EIO.Error()) {
					t.Errorf("%s: %v", what, err)
				}
				s.wait(what+": the owner keeps nothing", func() bool { return s.total() == 0 })
				l = s.must(ask("1", 30))
			}
			if _, err := os.Stat(s.Socket(l.ID)); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			s.wait(what+": nothing else is in the ledger", func() bool {
				all, err := ledger.All[record](s.book, ledger.Leases)
				return err == nil && len(all) == 1 && all[l.ID].Phase == granted
			})
			s.restart()
			if again := s.must(ask("1", 30)); again.ID != l.ID || s.total() != 1 {
				t.Errorf("%s: the next daemon has another lease, and the owner %d", what, s.total())
			}
			s.end()
		}
	}
	t.Logf("faults at %v; %d requests refused", hit, refused)
	if hit["pwrite64"] == 0 || hit["fdatasync"] == 0 || refused < 5 {
		t.Error("too few")
	}
}
