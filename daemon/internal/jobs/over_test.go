package jobs

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm/slurmtest"
	"github.com/sluice-hpc/sluice/internal/form"
)

// busySlurm is a slurmctld that takes no comment, and counts the questions about all jobs.
type busySlurm struct {
	*slurmtest.Fake
	lists atomic.Int32
}

func (b *busySlurm) Comment(ctx context.Context, _, _ string) error {
	<-ctx.Done()
	return ctx.Err()
}

func (b *busySlurm) Jobs(ctx context.Context) (map[string]slurm.JobState, error) {
	b.lists.Add(1)
	return b.Fake.Jobs(ctx)
}

// Whoever waits for PrologSlurmctld's answer hears in time that there is no room, however
// long the site lets jobs wait for it and however busy slurmctld is.
func TestRequeueInTime(t *testing.T) {
	st := newSite()
	st.refuse = lease.Errorf(lease.NoRoom, "no GPU has 50%% left")
	ctl := newRig(t, st, "ctl")
	ctl.cfg.Slurm = &busySlurm{Fake: ctl.slurm}
	set := settingsOf
	set.RoomWait = time.Minute
	ctl.SetSettings(set)
	ctl.slurm.Set(job("7"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if a, err := ctl.PrologController(ctx, rpc.Peer{}, runOf(job("7"))); err != nil || a.Outcome != rpc.JobRequeue || ctx.Err() != nil {
		t.Errorf("%+v, %v, %v", a, err, ctx.Err())
	}
}

// Two runs end before either could be told to the owners, each on nodes of its own.
func TestTwoRunsEnd(t *testing.T) {
	ctl := newRig(t, newSite(), "ctl")
	for i, nodes := range [][]string{{"n1", "n2"}, {"n2", "n3"}} {
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, rpc.JobRun{Job: "7", Restart: uint32(i), Nodes: nodes}); err != nil {
			t.Fatal(err)
		}
	}
	ctl.restart("boot-1")
	nodes := slices.Sorted(slices.Values(ctl.overs["7"].Nodes))
	if !slices.Equal(nodes, []string{"n1", "n2", "n3"}) {
		t.Errorf("%v", nodes)
	}
}

// A slurmctld that takes no comment for now holds up neither ends nor starts.
func TestReportsHoldUpNothing(t *testing.T) {
	st := newSite()
	ctl := newRig(t, st, "ctl")
	ctl.cfg.Slurm = &busySlurm{Fake: ctl.slurm}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); ctl.runReports(ctx) }()
	for i := range 3 * reporters {
		j := job(fmt.Sprint(i + 1))
		ctl.slurm.Set(j)
		if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, runOf(j)); err != nil || a.Outcome != rpc.JobGranted {
			t.Fatalf("job %s: %+v, %v", j.ID, a, err)
		}
		j.State, j.Nodes = "COMPLETED", nil
		ctl.slurm.Set(j)
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
			t.Fatal(err)
		}
		if ctl.endOver(t.Context(), maps.Clone(ctl.overs)); st.count() != 0 || len(ctl.overs) != 0 {
			t.Fatalf("job %s: %d leases, %v", j.ID, st.count(), ctl.overs)
		}
	}
	cancel()
	<-done
}

// Slurm gives numbers of jobs out again, and an owner remembers what the number's earlier
// job has used: neither the Epilog's answer nor AdminComment tells it to the later job's
// user, and an Epilog reports its own run.
func TestReportOfRecycledNumber(t *testing.T) {
	st := newSite()
	n1, ctl := newRig(t, st, "n1"), newRig(t, st, "ctl")
	j := job("7")
	n1.slurm.Set(j)
	n1.prolog(runOf(j), rpc.JobGranted)
	l, _, _ := n1.host.Held(lease.Key{Cluster: "cluster", Job: "7", Node: "n1"})
	report := func(id string, uid uint32, node string, epoch uint64) lease.Report {
		return lease.Report{Lease: id, UID: uid, Key: lease.Key{Cluster: "cluster", Job: "7", Node: node, Incarnation: epoch}}
	}
	now := l.Request.Key.Incarnation
	all := []lease.Report{report("stranger", 999, "n1", now-2), report("earlier", 1000, "n1", now-1), report("this", 1000, "n1", now), report("other node", 1000, "n2", now+1)}
	n1.host.reports = all
	list, err := n1.Epilog(t.Context(), rpc.Peer{}, runOf(j))
	if err != nil || len(list) != 2 || list[0].Lease != "this" || list[1].Lease != "other node" {
		t.Errorf("the Epilog is told %+v, %v", list, err)
	}

	// The later job got no lease at all.
	ctl.host.reports = all[:1]
	j.State = "COMPLETED"
	ctl.slurm.Set(j)
	if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
		t.Fatal(err)
	}
	ctl.endOver(t.Context(), maps.Clone(ctl.overs))
	<-ctl.told
	ctl.nextReport(t.Context())
	if c, ok := ctl.slurm.Comments["7"]; ok {
		t.Errorf("its comment is %q", c)
	}
}

// A report is written when Slurm takes it, also by a daemon that was started anew meanwhile.
func TestReportLater(t *testing.T) {
	ctl := newRig(t, newSite(), "ctl")
	ctl.cfg.Retry = time.Millisecond
	j := job("7")
	j.State = "COMPLETED"
	ctl.slurm.Set(j)
	if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
		t.Fatal(err)
	}
	ctl.endOver(t.Context(), maps.Clone(ctl.overs))
	ctl.slurm.Fail(fmt.Errorf("the DB index is being set: %w", slurm.ErrLater))
	for range 3 {
		<-ctl.told
		ctl.nextReport(t.Context())
	}
	ctl.slurm.Fail(nil)
	ctl.restart("boot-1")
	ctl.endOver(t.Context(), maps.Clone(ctl.overs))
	<-ctl.told
	ctl.nextReport(t.Context())
	if c := ctl.slurm.Comments["7"]; c != "used by 7" {
		t.Errorf("%q", c)
	}
	if ctl.restart("boot-1"); len(ctl.overs) != 0 {
		t.Errorf("%v stay in the ledger", ctl.overs)
	}
}

// The end of a large job is one message to each owner.
func TestLargeJobEnds(t *testing.T) {
	st := newSite()
	ctl := newRig(t, st, "ctl")
	j := job("7")
	j.Nodes, j.Licences = nil, slurm.Counts{"rgpu": 50 * 5000}
	for i := range 5000 {
		j.Nodes = append(j.Nodes, fmt.Sprint("n", i))
	}
	ctl.slurm.Set(j)
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, runOf(j)); err != nil || a.Outcome != rpc.JobGranted || st.count() != 5000 {
		t.Fatalf("%+v, %v, %d leases", a, err, st.count())
	}
	if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
		t.Fatal(err)
	}
	ctl.endOver(t.Context(), maps.Clone(ctl.overs))
	if st.count() != 0 || st.named > maxNamed {
		t.Errorf("%d leases stay, %d nodes named at once", st.count(), st.named)
	}
}

// Jobs that end one after the other do not have slurmctld asked for each.
func TestManyEnds(t *testing.T) {
	ctl := newRig(t, newSite(), "ctl")
	busy := &busySlurm{Fake: ctl.slurm}
	ctl.cfg.Slurm = busy
	for _, id := range []string{"1", "2"} {
		j := job(id)
		j.State = "COMPLETING"
		ctl.slurm.Set(j)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); ctl.runOver(ctx) }()
	for range 100 {
		for _, id := range []string{"1", "2"} {
			if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, runOf(job(id))); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	cancel()
	<-done
	if n := busy.lists.Load(); n > 3 {
		t.Errorf("slurmctld was asked for all its jobs %d times in half a second", n)
	}
}

// A Prolog that has outlived its run leaves the lease of the next one alone.
func TestOrphanProlog(t *testing.T) {
	st := newSite()
	n1, ctl := newRig(t, st, "n1"), newRig(t, st, "ctl")
	j := job("7")
	j.Restarts = 1
	n1.slurm.Set(j)
	ctl.slurm.Set(j)
	a, err := ctl.PrologController(t.Context(), rpc.Peer{}, runOf(j))
	if err != nil || a.Outcome != rpc.JobGranted {
		t.Fatalf("%+v, %v", a, err)
	}
	old := runOf(j)
	old.Restart = 0
	n1.prolog(old, rpc.JobRefused)
	if b := n1.prolog(runOf(j), rpc.JobGranted); b.Lease != a.Lease {
		t.Errorf("lease %s of the run has become %s", a.Lease, b.Lease)
	}
}

// The controller's clock is ahead of the node's, which still gets the next run its lease.
func TestClockBehind(t *testing.T) {
	st := newSite()
	n1 := newRig(t, st, "n1")
	k := lease.Key{Cluster: "cluster", Job: "7", Node: "n1"}
	r := lease.Request{Key: k, UID: 1000}
	r.Key.Incarnation = 1 << 40
	st.leases[k] = lease.Lease{ID: form.NewLeaseID(), Request: r, State: lease.Granted, Host: "n1"}
	j := job("7")
	j.Restarts = 1
	n1.slurm.Set(j)
	n1.prolog(runOf(j), rpc.JobGranted)
}

// Another controller's clock was ahead when it ended the run before: this run begins all the same, and ends.
func TestClockOfAnotherController(t *testing.T) {
	for _, sponsored := range []bool{true, false} {
		st := newSite()
		ctl, n1 := newRig(t, st, "ctl"), newRig(t, st, "n1")
		j := job("7")
		key := lease.Key{Cluster: "cluster", Job: "7", Node: "n1"}
		st.tombs[key] = 5000
		for _, r := range []*rig{ctl, n1} {
			r.slurm.Set(j)
		}
		if sponsored {
			if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, runOf(j)); err != nil || a.Outcome != rpc.JobGranted {
				t.Fatalf("%+v, %v", a, err)
			}
		}
		n1.prolog(runOf(j), rpc.JobGranted)
		if e := st.leases[key].Request.Key.Incarnation; e != 5001 {
			t.Errorf("sponsored %v: epoch %d", sponsored, e)
		}
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
			t.Fatal(err)
		}
		ctl.endOver(t.Context(), maps.Clone(ctl.overs))
		if st.count() != 0 {
			t.Errorf("sponsored %v: %v stays", sponsored, st.leases)
		}
	}
}
