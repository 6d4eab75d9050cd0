package jobs_test

// The two services together: what the controller reserves is what the node gives.

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobctld"
	"github.com/sluice-hpc/sluice/daemon/internal/jobnode"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs/jobstest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

var (
	user   = rpc.Peer{UID: 1000}
	nobody = rpc.Peer{UID: 1001}
)

// node is a node's service and what it talks to.
type node struct {
	*jobnode.Service
	*jobstest.Node
	t *testing.T
}

func newNode(t *testing.T, st *jobstest.Site, name string) *node {
	t.Helper()
	n := jobstest.NewNode(t, st, name)
	led := n.Start()
	s, err := jobnode.New(t.Context(), jobnode.Config{
		Node: name, Cluster: "cluster", User: 64030, Lib: "/usr/lib/sluice", Spool: n.Dir + "/%n", Boot: "boot-1",
		Host: n.Host, Slurm: n.Slurm, Ledger: led, Marks: n.Marks, State: n.State, Retry: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return &node{s, n, t}
}

func (n *node) prolog(run rpc.JobRun, want rpc.JobOutcome) rpc.JobAnswer {
	n.t.Helper()
	a, err := n.Prolog(n.t.Context(), rpc.Peer{}, run)
	if err != nil || a.Outcome != want {
		n.t.Fatalf("prolog: %+v, %v; want %s", a, err, want)
	}
	return a
}

// controller is the service beside slurmctld and what it talks to.
type controller struct {
	*jobctld.Service
	*jobstest.Node
}

func newController(t *testing.T, st *jobstest.Site) *controller {
	t.Helper()
	n := jobstest.NewNode(t, st, "ctl")
	led := n.Start()
	s, err := jobctld.New(jobctld.Config{
		Cluster: "cluster", User: 64030, Host: n.Host, Slurm: n.Slurm, Ledger: led, State: n.State, Retry: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return &controller{s, n}
}

// run has the ends of jobs delivered until the test ends.
func (c *controller) run(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = c.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

// The whole way of a job of two nodes, in releases that tell a node the licences and
// in those that do not.
func TestWay(t *testing.T) {
	for _, licences := range []*string{nil, new("rgpu:100")} {
		st := jobstest.NewSite()
		ctl, n1, n2 := newController(t, st), newNode(t, st, "n1"), newNode(t, st, "n2")
		j := jobstest.Job("7")
		j.Nodes, j.Licences = []string{"n1", "n2"}, slurm.Counts{"rgpu": 100}
		for _, r := range []*jobstest.Node{ctl.Node, n1.Node, n2.Node} {
			r.Slurm.Set(j)
		}
		run := jobstest.RunOf(j)
		run.Licences = new("rgpu:100")
		for range 2 { // slurmctld may start it twice
			if a, err := ctl.PrologController(t.Context(), rpc.Peer{UID: 64030}, run); err != nil || a.Outcome != rpc.JobGranted {
				t.Fatalf("%+v, %v", a, err)
			}
		}
		if st.Count() != 2 {
			t.Fatalf("%d leases for two nodes", st.Count())
		}
		run.Licences = licences
		var ids []string
		for _, r := range []*node{n1, n2} {
			a := r.prolog(run, rpc.JobGranted)
			if b := r.prolog(run, rpc.JobGranted); b != a || a.Lease == "" {
				t.Errorf("prolog again: %+v, %+v", a, b)
			}
			ids = append(ids, a.Lease)
			if licences != nil && r.Slurm.Asked != 0 {
				t.Error("slurmctld was asked what the environment told")
			}
			ops, err := r.Env(t.Context(), user, "7")
			if err != nil || !slices.Contains(ops, rpc.EnvOp{Name: "SLUICE_SOCKET", Value: "/run/sluice/leases/" + a.Lease + "/sock"}) ||
				ops[0] != (rpc.EnvOp{Prepend: true, Name: "LD_LIBRARY_PATH", Value: "/usr/lib/sluice"}) {
				t.Errorf("%+v, %v", ops, err)
			}
			for _, o := range ops {
				if err := o.Check(); err != nil {
					t.Error(err)
				}
			}
			if ops, err := r.Env(t.Context(), nobody, "7"); lease.CodeOf(err) != lease.Denied || ops != nil {
				t.Errorf("another user: %v, %v", ops, err)
			}
			if !r.Marks.Has("7") {
				t.Error("no mark")
			}
		}
		if ids[0] == ids[1] {
			t.Error("one lease on two nodes")
		}
		run.Restart++ // as an Epilog is told of a run that is requeued
		for _, r := range []*node{n1, n2} {
			for range 2 {
				if _, err := r.Epilog(t.Context(), rpc.Peer{}, run); err != nil {
					t.Error(err)
				}
			}
			if r.Marks.Has("7") {
				t.Error("the mark stays")
			}
		}
		if st.Count() != 0 {
			t.Errorf("%d leases after the epilogs", st.Count())
		}
	}
}

// The lease of a run whose Epilog was lost is not the next run's, nor that of a job
// that has its number after slurmctld lost its state.
func TestEarlierRun(t *testing.T) {
	st := jobstest.NewSite()
	r, ctl := newNode(t, st, "n1"), newController(t, st)
	j := jobstest.Job("7")
	r.Slurm.Set(j)
	first := r.prolog(jobstest.RunOf(j), rpc.JobGranted)
	j.Restarts = 1
	r.Slurm.Set(j)
	second := r.prolog(jobstest.RunOf(j), rpc.JobGranted)
	if first.Lease == second.Lease || st.Count() != 1 {
		t.Errorf("%v, %v: %d leases", first, second, st.Count())
	}
	j.UID, j.Licences, j.Gres[0].Count = 1001, slurm.Counts{"rgpu": 70}, 70
	ctl.Slurm.Set(j)
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil || a.Outcome != rpc.JobGranted || a.Lease == second.Lease {
		t.Errorf("another job of that number: %+v, %v", a, err)
	}
}

// A Prolog that has outlived its run leaves the lease of the next one alone.
func TestOrphanProlog(t *testing.T) {
	st := jobstest.NewSite()
	n1, ctl := newNode(t, st, "n1"), newController(t, st)
	j := jobstest.Job("7")
	j.Restarts = 1
	n1.Slurm.Set(j)
	ctl.Slurm.Set(j)
	a, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(j))
	if err != nil || a.Outcome != rpc.JobGranted {
		t.Fatalf("%+v, %v", a, err)
	}
	old := jobstest.RunOf(j)
	old.Restart = 0
	n1.prolog(old, rpc.JobRefused)
	if b := n1.prolog(jobstest.RunOf(j), rpc.JobGranted); b.Lease != a.Lease {
		t.Errorf("lease %s of the run has become %s", a.Lease, b.Lease)
	}
}

// Another controller's clock was ahead when it ended the run before: this run begins all the same, and ends.
func TestClockOfAnotherController(t *testing.T) {
	for _, sponsored := range []bool{true, false} {
		st := jobstest.NewSite()
		ctl, n1 := newController(t, st), newNode(t, st, "n1")
		j := jobstest.Job("7")
		key := lease.Key{Cluster: "cluster", Job: "7", Node: "n1"}
		st.Tombs[key] = 5000
		ctl.Slurm.Set(j)
		n1.Slurm.Set(j)
		if sponsored {
			if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil || a.Outcome != rpc.JobGranted {
				t.Fatalf("%+v, %v", a, err)
			}
		}
		n1.prolog(jobstest.RunOf(j), rpc.JobGranted)
		if e := st.Leases[key].Request.Key.Incarnation; e != 5001 {
			t.Errorf("sponsored %v: epoch %d", sponsored, e)
		}
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
			t.Fatal(err)
		}
		ctl.run(t)
		for end := time.Now().Add(10 * time.Second); st.Count() != 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("sponsored %v: %d leases stay", sponsored, st.Count())
			}
		}
	}
}
