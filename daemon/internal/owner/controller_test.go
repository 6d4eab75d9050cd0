package owner

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// control makes n listen to the controller "ctl", after restarts too.
func control(n *node) *node {
	n.control = []string{"ctl"}
	n.SetControllers(n.control)
	return n
}

// sponsored is a lease for host that ctl asks for.
func (n *node) sponsored(host, job string, epoch uint64, restart uint32, percents ...uint32) lease.Lease {
	l := n.want(host, job, percents...)
	l.Sponsor, l.Request.Restart, l.Request.Key.Incarnation = "ctl", restart, epoch
	return l
}

func TestSponsor(t *testing.T) {
	n := newNode(t, "gpu01", 2)
	w := n.sponsored("h1", "7", 100, 0, 50)
	_, err := n.Reserve(ctx, "ctl", w, 0)
	code(t, err, lease.Denied) // nobody is a controller yet
	control(n)
	for from, l := range map[string]lease.Lease{"h2": w, "h1": w, "": w, "ctl": n.want("h1", "7", 50)} {
		if _, err := n.Reserve(ctx, from, l, 0); err == nil {
			t.Errorf("%q got a lease of h1", from)
		}
	}
	own := w
	own.Host, own.Request.Key.Node = "ctl", "ctl"
	_, err = n.Reserve(ctx, "ctl", own, 0)
	code(t, err, lease.Invalid)
	l, err := n.Reserve(ctx, "ctl", w, time.Minute)
	must(t, err)
	if l.Host != "h1" || l.Sponsor != "ctl" {
		t.Errorf("%+v", l)
	}
	code(t, n.Confirm(ctx, "h2", l.ID), lease.Denied)
	must(t, n.Confirm(ctx, "ctl", l.ID))
	// The lease is its host's: no sessions for the sponsor.
	_, err = n.Offer(ctx, "ctl", request(l.ID))
	code(t, err, lease.Denied)

	// The same run asked again, by whomever, is a conflict with what is there.
	for from, again := range map[string]lease.Lease{"ctl": n.sponsored("h1", "7", 101, 0, 50), "h1": n.sponsored("h1", "7", 102, 0, 50)} {
		if from == "h1" {
			again.Sponsor = ""
		}
		have, err := n.Reserve(ctx, from, again, 0)
		code(t, err, lease.Conflict)
		if have.ID != l.ID {
			t.Errorf("%s: %+v", from, have)
		}
	}
	_, err = n.Reserve(ctx, "ctl", n.sponsored("h1", "7", 100, 1, 50), 0)
	code(t, err, lease.Over) // another run, in the same epoch
	// The next one ends it.
	next, err := n.Reserve(ctx, "ctl", n.sponsored("h1", "7", 103, 1, 50), 0)
	must(t, err)
	if s := n.events(l.ID); !strings.HasSuffix(s, " grant session-refuse release") {
		t.Error(s)
	}
	_, err = n.Reserve(ctx, "ctl", n.sponsored("h1", "7", 100, 0, 50), 0)
	code(t, err, lease.Over)
	code(t, n.Release(ctx, "h2", next.ID, lease.Key{}, ""), lease.Denied)
	must(t, n.Release(ctx, "ctl", next.ID, lease.Key{}, "not all"))
	if p, _ := n.free(0); p != 100 {
		t.Error(p)
	}
	n.check(true)
}

func TestSponsorRenews(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	l, err := n.Reserve(ctx, "ctl", n.sponsored("h1", "7", 1, 0, 50), 0)
	must(t, err)
	renew := func(host string, want int) {
		t.Helper()
		if known, err := n.Renew(ctx, host, []string{l.ID}); err != nil || len(known) != want {
			t.Fatal(host, known, err)
		}
	}
	for range 5 {
		n.clock.pass(4 * time.Minute)
		renew("h2", 0)
		renew("ctl", 1)
		must(t, n.Sweep(ctx))
	}
	renew("h1", 1)
	n.clock.pass(4 * time.Minute)
	renew("ctl", 0)
	n.kill() // which forgets who has spoken: the sponsor counts again, if it still asks
	renew("ctl", 1)
	renew("h1", 1)
	n.clock.pass(6 * time.Minute)
	renew("ctl", 0)
	must(t, n.Sweep(ctx))
	if list, _ := n.List(ctx, ""); len(list) != 0 {
		t.Error("a host that is gone is not missed")
	}
	n.check(true)
}

// A sponsor takes back what its node has not claimed, by the id alone; what the node has claimed stays, over a crash and without a renewal
// since, until somebody ends it with its key.
func TestClaim(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	reserve := func(node string, epoch uint64) lease.Lease {
		t.Helper()
		l, err := n.Reserve(ctx, "ctl", n.sponsored(node, "7", epoch, 0, 50), 0)
		must(t, err)
		return l
	}
	code(t, n.Claim(ctx, "h1", "none"), lease.Over)
	l := reserve("h1", 1)
	code(t, n.Claim(ctx, "h2", l.ID), lease.Over)
	code(t, n.Claim(ctx, "ctl", l.ID), lease.Over)
	_, err := n.Renew(ctx, "h1", []string{l.ID}) // which says nothing of a job
	must(t, err)
	must(t, n.Release(ctx, "ctl", l.ID, lease.Key{}, "not all"))
	code(t, n.Claim(ctx, "h1", l.ID), lease.Over)
	l = reserve("h1", 1)
	for range 2 {
		must(t, n.Claim(ctx, "h1", l.ID))
		code(t, n.Release(ctx, "ctl", l.ID, lease.Key{}, "not all"), lease.Conflict)
		n.kill()
		code(t, n.Release(ctx, "ctl", l.ID, lease.Key{}, "not all"), lease.Conflict)
	}
	must(t, n.Release(ctx, "h1", l.ID, lease.Key{}, "a part of it has ended"))
	l = reserve("h1", 2)
	must(t, n.Claim(ctx, "h1", l.ID))
	must(t, n.Release(ctx, "ctl", l.ID, l.Request.Key, "released"))
	code(t, n.Claim(ctx, "h1", l.ID), lease.Over)

	// The node's own lease, which a controller has only found.
	own := n.granted("h1", "9", 20)
	code(t, n.Release(ctx, "ctl", own.ID, lease.Key{}, "not all"), lease.Conflict)
	must(t, n.Release(ctx, "ctl", own.ID, own.Request.Key, "released"))

	// Both at once: one of them has it.
	for i := range 50 {
		l := reserve("h1", uint64(10+i))
		claimed := make(chan error, 1)
		go func() { claimed <- n.Claim(ctx, "h1", l.ID) }()
		released := n.Release(ctx, "ctl", l.ID, lease.Key{}, "not all")
		if err := <-claimed; (err == nil) == (released == nil) {
			t.Fatalf("claim: %v, release: %v", err, released)
		}
		if released != nil {
			must(t, n.Release(ctx, "h1", l.ID, l.Request.Key, ""))
		}
	}
	n.check(true)
}

func TestEndJob(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	var all []lease.Lease
	for i, h := range []string{"h1", "h2", "h3"} {
		l, err := n.Reserve(ctx, "ctl", n.sponsored(h, "7", uint64(100+i), 0, 20), 0)
		must(t, err)
		must(t, n.admitOne(l.ID))
		all = append(all, l)
	}
	other := n.granted("h1", "8", 20)
	job := lease.Key{Cluster: "c", Job: "7", Incarnation: 101}
	code(t, n.Release(ctx, "h1", "", job, ""), lease.Denied)
	for range 2 {
		must(t, n.Release(ctx, "ctl", "", job, "job ended"))
		if list, _ := n.List(ctx, ""); len(list) != 2 {
			t.Fatalf("%d leases", len(list)) // job 8, and the later run of 7 on h3
		}
	}
	n.kill()
	for _, h := range []string{"h1", "h4"} { // where it was, and where it never came
		_, err := n.Reserve(ctx, "ctl", n.sponsored(h, "7", 101, 0, 20), 0)
		code(t, err, lease.Over)
		_, err = n.Reserve(ctx, h, func() lease.Lease { l := n.sponsored(h, "7", 99, 0, 20); l.Sponsor = ""; return l }(), 0)
		code(t, err, lease.Over)
	}
	_, err := n.Reserve(ctx, "ctl", n.sponsored("h1", "7", 102, 1, 20), 0)
	must(t, err)
	must(t, n.Release(ctx, "ctl", "", job, "late")) // of the run before
	if known, _ := n.Renew(ctx, "h3", []string{all[2].ID}); len(known) != 1 {
		t.Error("a later run was ended")
	}
	must(t, n.Release(ctx, "ctl", "", lease.Key{Cluster: "c", Job: "7", Node: "h3", Incarnation: 200}, "node down"))
	must(t, n.Release(ctx, "ctl", "", lease.Key{Cluster: "c", Job: "7", Incarnation: 200}, "job ended"))
	must(t, n.Release(ctx, "h1", other.ID, other.Request.Key, ""))
	if p, _ := n.free(0); p != 100 || len(n.workers.Leases()) != 0 {
		t.Error(p, n.workers.Leases())
	}
	// As many jobs as a site has in an hour are remembered.
	for i := range maxUnknown + 10 {
		must(t, n.Release(ctx, "ctl", "", lease.Key{Cluster: "c", Job: fmt.Sprint("x", i), Incarnation: 1}, ""))
	}
	_, err = n.Reserve(ctx, "ctl", n.sponsored("h1", fmt.Sprint("x", maxUnknown+9), 1, 0, 20), 0)
	code(t, err, lease.Over)
	n.check(true)
}

func TestReports(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	w := n.sponsored("h1", "7", 1, 0, 50)
	w.Request.Account, w.Request.JobName = "acc", "train"
	l, err := n.Reserve(ctx, "ctl", w, 0)
	must(t, err)
	two, err := n.Reserve(ctx, "ctl", n.sponsored("h2", "7", 1, 0, 20), 0)
	must(t, err)
	back, err := n.Reserve(ctx, "ctl", n.sponsored("h3", "7", 1, 0, 20), 0)
	must(t, err)
	must(t, n.Release(ctx, "ctl", back.ID, lease.Key{}, "not all of it could be had"))
	n.granted("h1", "8", 10)
	must(t, n.admitOne(l.ID))
	must(t, n.admitOne(l.ID))
	get := func(host string, want int) []lease.Report {
		t.Helper()
		r, err := n.Reports(ctx, host, "c", "7")
		must(t, err)
		if len(r) != want {
			t.Fatalf("%s sees %d: %+v", host, len(r), r)
		}
		return r
	}
	same := func(r lease.Report, ended bool) {
		t.Helper()
		if r.Lease != l.ID || r.Key != w.Request.Key || r.Owner != "gpu01" || r.UID != 1000 || r.Account != "acc" || r.JobName != "train" || len(r.Asked) != 1 || r.Asked[0].Percent != 50 ||
			len(r.Grants) != 1 || r.Sessions != 2 || r.Counts.Calls != 20 || len(r.Use) != 1 || r.Use[0].Peak != 2<<20 || r.GPUTime != 2*time.Second || r.Made.IsZero() || r.Ended.IsZero() == ended {
			t.Errorf("%+v", r)
		}
	}
	same(get("h1", 1)[0], false)
	if r := get("h2", 1)[0]; r.Lease != two.ID || r.Sessions != 0 || len(r.Use) != 1 || r.Use[0].Granted != two.Grants[0].Mem {
		t.Errorf("without a session: %+v", r)
	}
	get("h3", 0) // it was never told of
	get("h9", 0)
	get("ctl", 2)
	must(t, n.Release(ctx, "h1", l.ID, l.Request.Key, "job ended"))
	if len(n.workers.made) != 0 {
		t.Error("accounts stay:", n.workers.made)
	}
	for range 2 {
		same(get("h1", 1)[0], true)
		if r := get("ctl", 2); r[0].Reason != "job ended" && r[1].Reason != "job ended" {
			t.Errorf("%+v", r)
		}
		n.kill()
	}
	_, err = n.Reports(ctx, "h1", "c", "")
	code(t, err, lease.Invalid)
	n.clock.pass(2 * time.Hour)
	must(t, n.Sweep(ctx)) // reclaims
	must(t, n.Sweep(ctx))
	get("h1", 0)
	get("ctl", 1) // the other one, just reclaimed
}

// Of a job that has ended its last epoch is told, though it had no lease here.
func TestLastEnd(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	last := func(host, job string) (epoch uint64) {
		t.Helper()
		all, err := n.Reports(ctx, host, "c", job)
		must(t, err)
		for _, r := range all {
			if r.Lease != "" || r.Ended.IsZero() || r.Key.Job != job {
				t.Errorf("%+v", r)
			}
			epoch = max(epoch, r.Key.Incarnation)
		}
		return epoch
	}
	must(t, n.Release(ctx, "h1", "", lease.Key{Cluster: "c", Job: "7", Node: "h1", Incarnation: 90}, "over"))
	must(t, n.Release(ctx, "h2", "", lease.Key{Cluster: "c", Job: "7", Node: "h2", Incarnation: 80}, "over"))
	if a, b, c, d := last("ctl", "7"), last("h1", "7"), last("h2", "7"), last("h3", "7"); a != 90 || b != 90 || c != 80 || d != 0 {
		t.Error(a, b, c, d)
	}
	must(t, n.Release(ctx, "ctl", "", lease.Key{Cluster: "c", Job: "7", Incarnation: 85}, "over"))
	if a, b, c, d := last("ctl", "7"), last("h1", "7"), last("h2", "7"), last("h3", "7"); a != 90 || b != 90 || c != 85 || d != 85 {
		t.Error(a, b, c, d)
	}
	if other := last("ctl", "77"); other != 0 {
		t.Error(other)
	}
}
