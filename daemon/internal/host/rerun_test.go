package host

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// slurmctld was restarted and repeats its Prolog, when the nodes have their leases already
// and the sponsor has forgotten them: it is answered with them.
func TestSponsorAgainAfterAttach(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	first := w.sponsor(job("7", 0, both, 60))
	for _, n := range both {
		w.attach(n, "7")
	}
	w.wait("the sponsor forgets", func() bool { return w.records("ctl") == 0 })
	before := w.have()
	for i, l := range w.sponsor(job("7", 0, both, 60)) {
		if l.ID != first[i].ID {
			t.Errorf("node %d: lease %s is replaced by %s", i, first[i].ID, l.ID)
		}
	}
	for _, n := range both {
		w.renewed(n, 3)
		if _, _, ok := w.hosts[n].Held(lease.Key{Job: "7"}); !ok {
			t.Errorf("%s has lost its lease", n)
		}
	}
	if w.have() != before {
		t.Errorf("%q, before %q", w.have(), before)
	}
}

// A node that could not ask the owner of its sponsored lease has got one of its own:
// the other does not stay.
func TestSponsoredAndOwn(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1")
	// The node's first look at its owners is over, or it finds the lease before it is cut off.
	w.wait("n1 has met its owners", func() bool {
		return !slices.ContainsFunc(w.hosts["n1"].owners(), func(p *peer) bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return !p.known
		})
	})
	// The sponsored one is where the node cannot look.
	w.sever("ctl", "b", true)
	w.sponsor(job("7", 0, []string{"n1"}, 60))
	w.sever("ctl", "b", false)
	w.sever("n1", "a", true)
	h := w.hosts["n1"]
	if _, found, err := h.Attach(t.Context(), lease.Key{Job: "7"}); found || lease.CodeOf(err) != lease.Down {
		t.Fatal(found, err)
	}
	own := job("7", 0, []string{"n1"}, 60)[0]
	own.Key.Incarnation = h.Epoch()
	if _, _, err := h.Acquire(t.Context(), root, own); err != nil {
		t.Fatal(err)
	}
	w.sever("n1", "a", false)
	w.wait("one lease for the job", func() bool { return w.have() == "7@n1:b:60" })
}

// A job has two leases when slurmctld repeats its Prolog while the owner of the first one is silent. The sponsor can withdraw the
// lease that the node has not attached, and no other.
func TestWithdraw(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1")
	ctl := w.hosts["ctl"]
	w.sever("ctl", "b", true)
	w.sponsor(job("7", 0, []string{"n1"}, 60))
	first := w.attach("n1", "7")
	w.wait("the sponsor forgets", func() bool { return w.records("ctl") == 0 })
	w.sever("ctl", "b", false)
	w.sever("ctl", "a", true)
	second := w.sponsor(job("7", 0, []string{"n1"}, 60))[0]
	w.sever("ctl", "a", false)
	if second.ID == first.ID || w.have() != "7@n1:a:60 7@n1:b:60" {
		t.Fatalf("leases %s and %s, %q", first.ID, second.ID, w.have())
	}
	if ctl.Withdraw(t.Context(), first.ID, "x") || w.hosts["n1"].Withdraw(t.Context(), first.ID, "x") || ctl.Withdraw(t.Context(), "none", "x") {
		t.Error("a lease is withdrawn by another than its sponsor")
	}
	if !ctl.Withdraw(t.Context(), second.ID, "its job has another lease on this node") {
		t.Error("the second lease is not the controller's")
	}
	w.wait("one lease for the job", func() bool { return w.have() == "7@n1:a:60" })
	if again := w.attach("n1", "7"); again.ID != first.ID {
		t.Errorf("lease %s, not %s", again.ID, first.ID)
	}
	// What the node has attached stays.
	third := w.sponsor(job("8", 0, []string{"n1"}, 20))[0]
	w.attach("n1", "8")
	ctl.Withdraw(t.Context(), third.ID, "x") // true only before the sponsor forgets
	w.renewed("n1", 2)
	if again := w.attach("n1", "8"); again.ID != third.ID {
		t.Errorf("lease %s, not %s", again.ID, third.ID)
	}
}

// Clocks differ: a node asks by itself, for a run whose lease has a later incarnation, and is given that lease.
func TestSameRunEarlierIncarnation(t *testing.T) {
	w := newTown(t, []string{"a"}, "ctl", "n1")
	reqs := job("7", 0, []string{"n1"}, 60)
	reqs[0].Key.Incarnation = w.hosts["n1"].Epoch() + 100000
	have := w.sponsor(reqs)[0]
	own := job("7", 0, []string{"n1"}, 60)[0]
	own.Key.Incarnation = w.hosts["n1"].Epoch()
	for range 2 { // at the owner, then in the node's own records
		if l, _, err := w.hosts["n1"].Acquire(t.Context(), root, own); err != nil || l.ID != have.ID {
			t.Errorf("lease %s, %v; want %s", l.ID, err, have.ID)
		}
	}
	own.Restart, own.Key.Incarnation = 1, w.hosts["n1"].Epoch()
	if _, _, err := w.hosts["n1"].Acquire(t.Context(), root, own); lease.CodeOf(err) != lease.Over {
		t.Errorf("another run by an earlier incarnation: %v", err)
	}
}

// The end of an earlier run does not meddle with the run that begins at the same time.
func TestEndSparesLaterRun(t *testing.T) {
	w := newTown(t, []string{"a"}, "ctl", "n1", "n2")
	ctl := w.hosts["ctl"]
	w.sponsor(job("7", 0, []string{"n1"}, 60))
	upTo := ctl.Epoch()
	later := job("7", 1, []string{"n1"}, 60)
	later[0].Key.Cluster, later[0].Key.Incarnation = "c", ctl.Epoch()
	// It is under way.
	ctx, done, err := ctl.fly(t.Context(), later[0].Key)
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	// Nor does the end wait for it.
	if _, err := ctl.EndJob(t.Context(), "c", "7", []string{"n1"}, upTo, "over"); err != nil {
		t.Error(err)
	}
	if ctx.Err() != nil {
		t.Errorf("the later run is cut off: %v", context.Cause(ctx))
	}
}

// What an owner that was away hears of two ends is what each of them said.
func TestEndsStayApart(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1", "n2")
	ctl := w.hosts["ctl"]
	w.sever("ctl", "b", true)
	// An old run, on n1; b does not hear of its end.
	if left, err := ctl.EndJob(t.Context(), "c", "7", []string{"n1"}, ctl.Epoch(), "over"); err != nil || !slices.Equal(left, []string{"b"}) {
		t.Fatal(left, err)
	}
	// The next, on both, leaves n2 and stays on n1.
	all := w.sponsor(job("7", 1, both, 60))
	for _, n := range both {
		w.attach(n, "7")
	}
	if _, err := ctl.EndJob(t.Context(), "c", "7", []string{"n2"}, all[0].Request.Key.Incarnation, "not on n2 any more"); err != nil {
		t.Fatal(err)
	}
	if w.have() != "7@n1:a:60" {
		t.Errorf("%q", w.have())
	}
	w.sever("ctl", "b", false)
	w.wait("told", func() bool { ctl.mu.Lock(); defer ctl.mu.Unlock(); return len(ctl.ends) == 0 })
	if w.have() != "7@n1:a:60" {
		t.Errorf("%q", w.have())
	}
}

// The clock of one of two controllers is ahead. The other takes over, and its runs are later all the same.
func TestClocksOfControllers(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "ctl2", "n1")
	ctl, fast := w.hosts["ctl"], w.hosts["ctl2"]
	fast.clock.last = ctl.Epoch() + 60_000
	end := func(h *Host) {
		t.Helper()
		if _, err := h.EndJob(t.Context(), "c", "7", nil, max(h.Epoch(), h.LastEpoch(t.Context(), "c", "7")), "over"); err != nil {
			t.Fatal(err)
		}
	}
	run := func(h *Host, restart uint32, epoch uint64) error {
		reqs := job("7", restart, []string{"n1"}, 60)
		reqs[0].Key.Incarnation = epoch
		_, err := h.Sponsor(t.Context(), reqs)
		return err
	}
	if err := run(fast, 0, fast.Epoch()); err != nil {
		t.Fatal(err)
	}
	w.attach("n1", "7")
	end(fast)
	if w.have() != "" {
		t.Fatalf("%q", w.have())
	}
	for restart := uint32(1); restart < 3; restart++ {
		if err := run(ctl, restart, ctl.Epoch()); lease.CodeOf(err) != lease.Over {
			t.Errorf("by the clock alone: %v", err)
		}
		last := ctl.LastEpoch(t.Context(), "c", "7")
		if seen := w.hosts["n1"].LastEpoch(t.Context(), "c", "7"); seen != last {
			t.Errorf("the node has seen %d, the controller %d", seen, last)
		}
		if err := run(ctl, restart, last+1); err != nil {
			t.Fatal(err)
		}
		if l := w.attach("n1", "7"); l.Request.Restart != restart {
			t.Errorf("restart %d has the lease of %d", restart, l.Request.Restart)
		}
		if err := run(fast, restart-1, last+1); lease.CodeOf(err) != lease.Over {
			t.Errorf("an earlier run in the epoch of this one: %v", err)
		}
		end(ctl)
		if w.have() != "" {
			t.Errorf("%q is left", w.have())
		}
		if err := run(ctl, restart, last+1); lease.CodeOf(err) != lease.Over {
			t.Errorf("a late request of the run that has ended: %v", err)
		}
	}
	if reports, err := ctl.Reports(t.Context(), "c", "7"); err != nil || len(reports) != 3 {
		t.Errorf("%d reports, %v", len(reports), err)
	}
}

// Two runs in one epoch, by whatever clocks: neither is given the other's lease.
func TestOneEpochTwoRuns(t *testing.T) {
	w := newTown(t, []string{"a", "b"}, "ctl", "n1")
	ctl := w.hosts["ctl"]
	epoch := ctl.Epoch()
	for _, restart := range []uint32{1, 0, 2} {
		reqs := job("7", restart, []string{"n1"}, 60)
		reqs[0].Key.Incarnation = epoch
		if _, err := ctl.Sponsor(t.Context(), reqs); (err == nil) != (restart == 1) || err != nil && lease.CodeOf(err) != lease.Over {
			t.Errorf("restart %d: %v", restart, err)
		}
	}
	if !strings.HasPrefix(w.have(), "7@n1:") {
		t.Errorf("%q", w.have())
	}
}
