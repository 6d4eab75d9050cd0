package owner

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// shared wants the workers to have been told this of a lease.
func (n *node) shared(id, policy string, percents ...uint32) {
	n.t.Helper()
	n.workers.mu.Lock()
	l := n.workers.shares[id]
	n.workers.mu.Unlock()
	if l.Request.PolicyName() != policy || len(l.Grants) != len(percents) {
		n.t.Fatalf("the workers know %s of %+v, want %s", l.Request.PolicyName(), l.Grants, policy)
	}
	for i, p := range percents {
		if l.Grants[i].Percent != p {
			n.t.Fatalf("the workers know %+v, want %v", l.Grants, percents)
		}
	}
}

func TestSet(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	a, b := n.granted("h1", "1", 50, 20), n.granted("h1", "2", 30)
	n.shared(a.ID, "best-effort", 50, 20)
	set := func(host string, c lease.Change, want lease.Code, text string) {
		t.Helper()
		_, err := n.Set(ctx, host, c)
		code(t, err, want)
		if want != "" && !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want it to say %q", err, text)
		}
	}
	// Refused, with the range that is good.
	set("h1", lease.Change{Lease: a.ID}, lease.Invalid, "nothing to change")
	set("h1", lease.Change{Lease: "no", Policy: lease.Fixed}, lease.Invalid, "32 hexadecimal digits")
	set("h1", lease.Change{Lease: form.NewLeaseID(), Policy: lease.Fixed}, lease.NotFound, "not known")
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{101}}, lease.Invalid, "want 1 to 100")
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{10, 10, 10}}, lease.Invalid, "want at most 2")
	set("h1", lease.Change{Lease: a.ID, Policy: "all"}, lease.Invalid, "best-effort, equal or fixed")
	set("h1", lease.Change{Lease: a.ID, Lend: "maybe"}, lease.Invalid, "yes, no or site")
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{60}}, lease.Denied, "want 1 to 50")
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{80}}, lease.NoRoom, "want 1 to 50")
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{80}, Beyond: true}, lease.NoRoom, "want 1 to 70")
	set("h2", lease.Change{Lease: a.ID, Shares: []uint32{10}}, lease.Denied, "not of node h2")
	n.shared(a.ID, "best-effort", 50, 20)
	// Granted, and what is free follows.
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{40}, Policy: lease.Fixed}, "", "")
	n.shared(a.ID, "fixed", 40, 20)
	if p, _ := n.free(0); p != 30 {
		t.Errorf("%d%% free, want 30", p)
	}
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{0, 15}, Lend: lease.LendYes}, "", "")
	n.shared(a.ID, "fixed-lend", 40, 15)
	// Back to what it was granted, but not beyond.
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{50, 20}}, "", "")
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{51}}, lease.Denied, "want 1 to 50")
	// Root's, there and on the owner's own node.
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{70, 80}, Beyond: true, By: 0}, "", "")
	set("ctl", lease.Change{Lease: a.ID, Shares: []uint32{60}, Beyond: true}, lease.Denied, "not of node ctl")
	set("gpu01", lease.Change{Lease: a.ID, Shares: []uint32{60}, Beyond: true}, "", "")
	set("gpu01", lease.Change{Lease: b.ID, Shares: []uint32{40}, Beyond: true, Policy: lease.Equal, Lend: lease.LendNo}, "", "")
	set("gpu01", lease.Change{Lease: b.ID, Lend: lease.LendReset}, "", "")
	n.shared(b.ID, "equal", 40)
	// It lasts, and the schedule is set from it.
	clear(n.workers.shares)
	n.kill()
	n.shared(a.ID, "fixed-lend", 60, 80)
	n.shared(b.ID, "equal", 40)
	list, err := n.List(ctx, "h1")
	must(t, err)
	for _, l := range list {
		if l.ID == a.ID && (l.Grants[0].Paid() != 50 || l.Grants[1].Paid() != 20 || l.Request.PolicyName() != "fixed-lend" || l.Shares[0].Held != time.Minute) {
			t.Errorf("%+v", l)
		}
	}
	must(t, n.Release(ctx, "h1", a.ID, a.Request.Key, ""))
	set("h1", lease.Change{Lease: a.ID, Shares: []uint32{1}}, lease.NotFound, "has ended")
	if len(n.workers.shares) != 1 {
		t.Error("an ended lease stays on the schedule")
	}
	must(t, n.Release(ctx, "h1", b.ID, b.Request.Key, ""))
	r, err := n.Reports(ctx, "ctl", "c", "1")
	must(t, err)
	if len(r) != 1 || len(r[0].Shares) != 2 || r[0].Shares[1].Held != 80*time.Second || r[0].Policy != lease.Fixed {
		t.Errorf("%+v", r)
	}
	n.check(true)
	var sets int
	for _, e := range n.history() {
		if e.Event == audit.Set {
			if sets++; e.Lease == a.ID && e.Change == 0 || e.Reason == "" || len(e.GPUs) == 0 {
				t.Errorf("%+v", e)
			}
		}
	}
	if sets != 7 {
		t.Errorf("%d changes in the log, want 7", sets)
	}
}

// A change whose line cannot be written yet is made, and its line comes later, once.
func TestSetWithoutAudit(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	a := n.granted("h1", "1", 50)
	n.audit.fail(errors.New("disk full"))
	for _, p := range []uint32{40, 30} {
		_, err := n.Set(ctx, "h1", lease.Change{Lease: a.ID, Shares: []uint32{p}})
		must(t, err)
	}
	n.audit.fail(nil)
	n.kill()
	n.shared(a.ID, "best-effort", 30)
	must(t, n.Sweep(ctx))
	if s := n.events(a.ID); s != "grant set set" {
		t.Error(s)
	}
	must(t, n.Release(ctx, "h1", a.ID, a.Request.Key, ""))
	n.check(true)
}
