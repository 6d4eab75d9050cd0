package owner

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/safefile/disktest"
)

// promise is what an owner has said of a lease.
type promise struct {
	State   lease.State
	Percent uint32
}

// kept is what a ledger says of leases, and of those that have ended.
func kept(l *ledger.Ledger) (all map[string]promise, ended []string, err error) {
	recs, err := ledger.All[record](l, ledger.Leases)
	all = make(map[string]promise)
	for id, r := range recs {
		all[id] = promise{r.Lease.State, r.Lease.Grants[0].Percent}
	}
	tombs, terr := ledger.All[tombstone](l, ledger.Tombstones)
	for name := range tombs {
		ended = append(ended, name)
	}
	return all, ended, errors.Join(err, terr)
}

// diskRun has the ledger of one owner fail while the owner does its work.
type diskRun struct {
	t        *testing.T
	n        *node
	disk     *disktest.Disk
	what     string
	promised map[string]promise
	over     []string
	failed   int // attempts
}

// judged is the owner's disk from now on, also for the goroutine that ends a lease.
func (r *diskRun) judged() {
	hook := r.n.hook
	r.n.hook = func(p string) {
		hook(p)
		if p == "release-2-killed" {
			disktest.Here(r.t, r.disk.Judge)
		}
	}
}

// until asks the owner until it does as it is asked, as a host does, and looks each time at what the owner believes and at what would be left of it
// if the power went.
func (r *diskRun) until(step string, ask func() error, then func()) {
	for range 5 {
		err := ask()
		if err == nil {
			then()
		} else if r.failed++; lease.CodeOf(err) != lease.Internal || !strings.Contains(err.Error(), r.n.ledger.Path()) || !strings.Contains(err.Error(), unix.EIO.Error()) && !strings.Contains(err.Error(), unix.ENOSPC.Error()) {
			r.t.Errorf("%s, %s: %v", r.what, step, err)
		}
		r.agrees(step)
		r.survives(step)
		if err == nil {
			return
		}
	}
	r.t.Errorf("%s, %s: it never succeeds", r.what, step)
}

// agrees wants the owner to believe what its ledger says.
func (r *diskRun) agrees(step string) {
	all, _, err := kept(r.n.ledger)
	if err != nil {
		r.t.Errorf("%s, %s: %v", r.what, step, err)
	}
	r.n.mu.RLock()
	defer r.n.mu.RUnlock()
	for id, e := range r.n.leases {
		if p := (promise{e.rec.Lease.State, e.rec.Lease.Grants[0].Percent}); all[id] != p && !e.ending {
			r.t.Errorf("%s, %s: the owner says %v, its ledger %v", r.what, step, p, all[id])
		}
	}
	for id := range all {
		if r.n.leases[id] == nil {
			r.t.Errorf("%s, %s: the ledger has a lease that the owner does not know", r.what, step)
		}
	}
}

// survives wants all that was promised to be on the disk.
func (r *diskRun) survives(step string) {
	path := filepath.Join(r.t.TempDir(), "after.db")
	if err := os.WriteFile(path, r.disk.PowerLoss(r.t), 0o600); err != nil {
		r.t.Error(err)
	}
	l, err := ledger.Open(path, r.n.name, ledger.Options{NoSync: true})
	if err != nil {
		r.t.Errorf("%s, %s: after a power loss: %v", r.what, step, err)
		return
	}
	defer l.Close()
	all, ended, err := kept(l)
	if err != nil {
		r.t.Errorf("%s, %s: after a power loss: %v", r.what, step, err)
	}
	for id, p := range r.promised {
		if all[id] != p {
			r.t.Errorf("%s, %s: after a power loss a lease is %v, promised was %v", r.what, step, all[id], p)
		}
	}
	for _, id := range r.over {
		if _, ok := all[id]; ok || !slices.Contains(ended, idTomb(id)) {
			r.t.Errorf("%s, %s: after a power loss a lease is back that has ended", r.what, step)
		}
	}
}

// work is a life of leases.
func (r *diskRun) work() {
	n := r.n
	direct, two, never := n.want("h1", "1", 30), n.want("h1", "2", 20), n.want("h1", "3", 10)
	reserve := func(l lease.Lease, ttl time.Duration) func() error {
		return func() error { _, err := n.Reserve(ctx, "h1", l, ttl); return err }
	}
	r.until("reserve and grant", reserve(direct, 0), func() { r.promised[direct.ID] = promise{lease.Granted, 30} })
	r.until("reserve", reserve(two, time.Minute), func() { r.promised[two.ID] = promise{lease.Reserved, 20} })
	// Whether the lease was confirmed is open until the answer is yes.
	delete(r.promised, two.ID)
	r.until("confirm", func() error { return n.Confirm(ctx, "h1", two.ID) }, func() { r.promised[two.ID] = promise{lease.Granted, 20} })
	delete(r.promised, direct.ID)
	r.until("set", func() error {
		_, err := n.Set(ctx, "h1", lease.Change{Lease: direct.ID, Shares: []uint32{15}})
		return err
	}, func() { r.promised[direct.ID] = promise{lease.Granted, 15} })
	delete(r.promised, two.ID)
	r.until("release", func() error { return n.Release(ctx, "h1", two.ID, two.Request.Key, "job ended") }, func() { r.over = append(r.over, two.ID) })
	r.until("release of a lease that never came", func() error { return n.Release(ctx, "h1", never.ID, never.Request.Key, "job ended") }, func() { r.over = append(r.over, never.ID) })
	r.until("reserve it late", func() error {
		_, err := n.Reserve(ctx, "h1", never, 0)
		if lease.CodeOf(err) == lease.Over {
			return nil
		}
		return fmt.Errorf("not refused: %w", err)
	}, func() {})
	drain := func(resume bool) func() error {
		return func() error {
			d := lease.DrainOrder{Owner: n.name, GPU: "0", Resume: resume}
			if !resume {
				d.Reason = "test"
			}
			_, err := n.Drain(ctx, n.name, d)
			return err
		}
	}
	r.until("drain", drain(false), func() {})
	r.until("resume", drain(true), func() {})
}

// TestDiskFaults: whichever system call on the ledger fails, and however, the host is told, with the file and the cause; the owner believes what its
// ledger says; what it has promised would be there after a loss of power, at any moment; the next attempt succeeds; and the
// history is that of an owner without faults.
func TestDiskFaults(t *testing.T) {
	hit, failed := map[string]int{}, 0
	for _, kind := range disktest.Kinds {
		if kind.Err != unix.EIO {
			continue // what is not an error changes nothing, and which error it is neither: package ledger tests that
		}
		for n := 0; ; n++ {
			node := newNode(t, "gpu01", 1)
			node.syncs = true
			node.kill()
			path := node.ledger.Path()
			calls, at := 0, disktest.Call{}
			r := &diskRun{t: t, n: node, what: fmt.Sprintf("%s at call %d", kind.Name, n), promised: map[string]promise{}}
			r.disk = disktest.NewDisk(t, path, rand.New(rand.NewPCG(8, uint64(n))), func(c disktest.Call) disktest.Fault {
				if kind.Short && c.Name != "pwrite64" {
					return disktest.Fault{}
				}
				if calls++; calls != n+1 {
					return disktest.Fault{}
				}
				at = c
				return kind.Fault
			})
			r.judged()
			disktest.Run(t, r.disk.Judge, r.work)
			if at.Name == "" {
				if r.failed > 0 {
					t.Error("refused without a fault")
				}
				break
			}
			hit[at.Name]++
			failed += r.failed
			node.kill()
			all, _, err := kept(node.ledger)
			must(t, err)
			if fmt.Sprint(all) != fmt.Sprint(r.promised) {
				t.Errorf("%s: the next daemon has %v, promised were %v", r.what, all, r.promised)
			}
			if p, _ := node.free(0); p != 85 {
				t.Errorf("%s: %d%% are free", r.what, p)
			}
			for id := range r.promised {
				must(t, node.Release(ctx, "h1", id, lease.Key{}, ""))
			}
			node.check(true)
		}
	}
	t.Logf("faults at %v; %d attempts failed", hit, failed)
	if hit["pwrite64"] < 40 || hit["fdatasync"] < 15 || failed < 50 {
		t.Error("too few")
	}
}
