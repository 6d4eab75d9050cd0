package owner

import (
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// What is said of a lease that changes. That reservations wait is shown by package host, whose tests have a clock that runs.
func TestWatchHeld(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	watch := func(since lease.Mark, want ...lease.Held) lease.HeldChanges {
		t.Helper()
		c, err := n.WatchHeld(ctx, "ctl", lease.HeldWatch{Since: since, Wait: time.Hour})
		must(t, err)
		if len(c.Parts) != len(want) || len(want) > 0 && c.Parts[0].Held != want[0] {
			t.Errorf("%+v, want %+v", c.Parts, want)
		}
		return c
	}
	w := n.want("h1", "7", 50, 20)
	l, err := n.Reserve(ctx, "h1", w, time.Minute)
	must(t, err)
	held := lease.Held{Percent: 70, Mem: l.Grants[0].Mem + l.Grants[1].Mem, Leases: 1, Reserved: 1}
	c := watch(lease.Mark{}, held)
	if p := c.Parts[0]; p.ID != l.ID || p.UID != l.Request.UID || p.Cluster != l.Request.Key.Cluster || p.Run {
		t.Errorf("%+v", p)
	}
	// The owner reports a grant only with its next news, because a grant counts as the reservation did.
	must(t, n.Confirm(ctx, "h1", l.ID))
	if news, _ := n.news("ctl", c.At); news {
		t.Error("a grant is news")
	}
	_, err = n.Set(ctx, "h1", lease.Change{Lease: l.ID, Shares: []uint32{10, 0}})
	must(t, err)
	held.Reserved = 0
	c = watch(c.At, held) // as it was granted
	_, err = n.Set(ctx, "gpu01", lease.Change{Lease: l.ID, Shares: []uint32{80, 0}, Beyond: true})
	must(t, err)
	held.Percent = 100
	c = watch(c.At, held)
	must(t, n.Release(ctx, "h1", l.ID, lease.Key{}, "over"))
	c = watch(c.At)
	if len(c.Leases) == 0 || !c.Leases[len(c.Leases)-1].Over {
		t.Errorf("%+v", c.Leases)
	}
	_, err = n.HeldEverywhere(ctx, "h1", lease.HeldQuestion{Holdings: make([]lease.Holding, lease.MaxHoldings+1)})
	code(t, err, lease.Invalid)
}

// An owner promises nothing that its ledger cannot keep.
func TestPromiseOnFullDisk(t *testing.T) {
	n := control(newNode(t, "gpu01", 1))
	n.cfg.Ledger.Close()
	_, err := n.WatchHeld(ctx, "ctl", lease.HeldWatch{})
	code(t, err, lease.Internal)
	if p := n.promises.to["ctl"]; p.until > 0 {
		t.Error("it has promised something")
	}
}
