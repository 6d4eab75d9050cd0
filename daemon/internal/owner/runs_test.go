package owner

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Of leases outside of jobs that ended, each user's newest are remembered, and those that
// a late message could still be about; of jobs' all.
func TestManyRuns(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	defer n.stop()
	bury := func(uid uint32, job string, count int) {
		t.Helper()
		err := n.ledger.Update(func(tx *ledger.Tx) error {
			for i := range count {
				n.clock.pass(time.Millisecond)
				k := lease.Key{Cluster: "c", Job: fmt.Sprint(job, uid, "-", i), Node: "n1"}
				kt := n.tombstone("ended")
				kt.Lease = form.NewLeaseID()
				it := kt
				kt.Key = k.String()
				it.Report = &lease.Report{Lease: it.Lease, Key: k, UID: uid}
				n.mu.Lock()
				n.bury(keyTomb(k), kt)
				n.bury(idTomb(it.Lease), it)
				n.mu.Unlock()
				if err := tx.Put(ledger.Tombstones, keyTomb(k), kt); err != nil {
					return err
				}
				if err := tx.Put(ledger.Tombstones, idTomb(it.Lease), it); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	count := func() map[uint32]int {
		n.mu.RLock()
		defer n.mu.RUnlock()
		m := map[uint32]int{}
		for _, x := range n.tombs {
			if x.Report != nil {
				m[x.Report.UID]++
			}
		}
		return m
	}
	bury(7, "run-", runsKept+150)
	bury(8, "run-", 20)
	bury(9, "", runsKept+30)
	must(t, n.Sweep(t.Context()))
	if c := count(); c[7] != runsKept+150 {
		t.Fatalf("too early: %v", c)
	}
	n.clock.pass(runsLate)
	bury(7, "run-", 10) // the first ten jobs once more, whose keys stay for that
	must(t, n.Sweep(t.Context()))
	want := func(when string) {
		t.Helper()
		if c := count(); c[7] != runsKept || c[8] != 20 || c[9] != runsKept+30 {
			t.Errorf("%s: %v", when, c)
		}
		n.mu.RLock()
		defer n.mu.RUnlock()
		first, last := lease.Key{Cluster: "c", Job: "run-7-0", Node: "n1"}, lease.Key{Cluster: "c", Job: "run-7-9", Node: "n1"}
		if len(n.tombs) != 2*(runsKept+20+runsKept+30) || n.tombs[keyTomb(first)].Lease == "" || n.tombs[keyTomb(last)].Lease == "" {
			t.Errorf("%s: %d tombstones", when, len(n.tombs))
		}
	}
	want("swept")
	n.stop()
	n.start()
	want("after a restart")
}
