package jobctld

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs/jobstest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm/slurmtest"
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

// Two runs end before either could be told to the owners, each on nodes of its own.
func TestTwoRunsEnd(t *testing.T) {
	ctl := newRig(t, jobstest.NewSite())
	for i, nodes := range [][]string{{"n1", "n2"}, {"n2", "n3"}} {
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, rpc.JobRun{Job: "7", Restart: uint32(i), Nodes: nodes}); err != nil {
			t.Fatal(err)
		}
	}
	ctl.restart()
	nodes := slices.Sorted(slices.Values(ctl.ends["7"].Nodes))
	if !slices.Equal(nodes, []string{"n1", "n2", "n3"}) {
		t.Errorf("%v", nodes)
	}
}

// A slurmctld that takes no comment for now holds up neither ends nor starts.
func TestReportsHoldUpNothing(t *testing.T) {
	st := jobstest.NewSite()
	ctl := newRig(t, st)
	ctl.cfg.Slurm = &busySlurm{Fake: ctl.Slurm}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); ctl.runReports(ctx) }()
	for i := range 3 * reporters {
		j := jobstest.Job(fmt.Sprint(i + 1))
		ctl.Slurm.Set(j)
		if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil || a.Outcome != rpc.JobGranted {
			t.Fatalf("job %s: %+v, %v", j.ID, a, err)
		}
		j.State, j.Nodes = "COMPLETED", nil
		ctl.Slurm.Set(j)
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
			t.Fatal(err)
		}
		if ctl.endJobs(t.Context(), maps.Clone(ctl.ends)); st.Count() != 0 || len(ctl.ends) != 0 {
			t.Fatalf("job %s: %d leases, %v", j.ID, st.Count(), ctl.ends)
		}
	}
	cancel()
	<-done
}

// A report is written when Slurm takes it, also by a daemon that was started anew meanwhile.
func TestReportLater(t *testing.T) {
	ctl := newRig(t, jobstest.NewSite())
	ctl.cfg.Retry = time.Millisecond
	j := jobstest.Job("7")
	j.State = "COMPLETED"
	ctl.Slurm.Set(j)
	if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
		t.Fatal(err)
	}
	ctl.endJobs(t.Context(), maps.Clone(ctl.ends))
	ctl.Slurm.Fail(fmt.Errorf("the DB index is being set: %w", slurm.ErrLater))
	for range 3 {
		<-ctl.told
		ctl.nextReport(t.Context())
	}
	ctl.Slurm.Fail(nil)
	ctl.restart()
	ctl.endJobs(t.Context(), maps.Clone(ctl.ends))
	<-ctl.told
	ctl.nextReport(t.Context())
	if c := ctl.Slurm.Comments["7"]; c != "used by 7" {
		t.Errorf("%q", c)
	}
	if ctl.restart(); len(ctl.ends) != 0 {
		t.Errorf("%v stay in the ledger", ctl.ends)
	}
}

// The end of a large job is one message to each owner.
func TestLargeJobEnds(t *testing.T) {
	st := jobstest.NewSite()
	ctl := newRig(t, st)
	j := jobstest.Job("7")
	j.Nodes, j.Licences = nil, slurm.Counts{"rgpu": 50 * 5000}
	for i := range 5000 {
		j.Nodes = append(j.Nodes, fmt.Sprint("n", i))
	}
	ctl.Slurm.Set(j)
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil || a.Outcome != rpc.JobGranted || st.Count() != 5000 {
		t.Fatalf("%+v, %v, %d leases", a, err, st.Count())
	}
	if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
		t.Fatal(err)
	}
	ctl.endJobs(t.Context(), maps.Clone(ctl.ends))
	if st.Count() != 0 || st.Named > maxNamed {
		t.Errorf("%d leases stay, %d nodes named at once", st.Count(), st.Named)
	}
}

// Jobs that end one after the other do not have slurmctld asked for each.
func TestManyEnds(t *testing.T) {
	ctl := newRig(t, jobstest.NewSite())
	busy := &busySlurm{Fake: ctl.Slurm}
	ctl.cfg.Slurm = busy
	for _, id := range []string{"1", "2"} {
		j := jobstest.Job(id)
		j.State = "COMPLETING"
		ctl.Slurm.Set(j)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	begun := time.Now()
	go func() { defer close(done); ctl.runEnds(ctx) }()
	for range 100 {
		for _, id := range []string{"1", "2"} {
			if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, jobstest.RunOf(jobstest.Job(id))); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	cancel()
	<-done
	took := time.Since(begun)
	if n := busy.lists.Load(); n > 2+int32(took/endLook) {
		t.Errorf("slurmctld was asked for all its jobs %d times in %v", n, took)
	}
}

// Slurm reuses job ids, and an owner remembers what an id's earlier job has used: AdminComment
// does not show it to the later job's user, who got no lease at all.
func TestReportOfRecycledNumber(t *testing.T) {
	ctl := newRig(t, jobstest.NewSite())
	j := jobstest.Job("7")
	ctl.Host.Told = []lease.Report{{Lease: "stranger", UID: 999, Key: lease.Key{Cluster: "cluster", Job: "7", Node: "n1", Incarnation: 1}}}
	j.State = "COMPLETED"
	ctl.Slurm.Set(j)
	if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
		t.Fatal(err)
	}
	ctl.endJobs(t.Context(), maps.Clone(ctl.ends))
	<-ctl.told
	ctl.nextReport(t.Context())
	if c, ok := ctl.Slurm.Comments["7"]; ok {
		t.Errorf("its comment is %q", c)
	}
}
