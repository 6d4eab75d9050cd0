package jobnode

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs/jobstest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

var (
	user   = rpc.Peer{UID: 1000}
	nobody = rpc.Peer{UID: 1001}
)

func TestAsksForNothing(t *testing.T) {
	st := jobstest.NewSite()
	r := newRig(t, st, "n1")
	// 23.02 and later: the environment says it, and nobody is asked anything.
	run := rpc.JobRun{Job: "7", UID: 1000, Licences: new("matlab:1")}
	r.prolog(run, rpc.JobNone)
	if ops, err := r.Env(t.Context(), user, "7"); err != nil || len(ops) != 0 {
		t.Errorf("%v, %v", ops, err)
	}
	if list, err := r.Epilog(t.Context(), rpc.Peer{}, run); err != nil || list != nil {
		t.Errorf("%v, %v", list, err)
	}
	if r.Slurm.Asked != 0 || len(st.Ended) != 0 || r.Marks.Has("7") {
		t.Errorf("slurmctld asked %d times, %v ended", r.Slurm.Asked, st.Ended)
	}
	// 22.05: slurmctld is asked once.
	j := jobstest.Job("8")
	j.Licences, j.Gres = slurm.Counts{}, nil
	r.Slurm.Set(j)
	r.prolog(jobstest.RunOf(j), rpc.JobNone)
	for range 3 {
		if ops, err := r.Env(t.Context(), user, "8"); err != nil || len(ops) != 0 {
			t.Errorf("%v, %v", ops, err)
		}
	}
	if _, err := r.Epilog(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil || r.Slurm.Asked != 1 || len(st.Ended) != 0 {
		t.Errorf("%v: slurmctld asked %d times, %v ended", err, r.Slurm.Asked, st.Ended)
	}
	// Its Prolog did not come through: the first task has it looked up, once.
	r.Slurm.Set(func() slurm.Job { j := j; j.ID = "9"; return j }())
	for range 3 {
		if ops, err := r.Env(t.Context(), user, "9"); err != nil || len(ops) != 0 {
			t.Errorf("%v, %v", ops, err)
		}
	}
	if r.Slurm.Asked != 2 {
		t.Errorf("slurmctld asked %d times", r.Slurm.Asked)
	}
}

func TestNoRoom(t *testing.T) {
	st := jobstest.NewSite()
	st.Refuse = lease.Errorf(lease.NoRoom, "no GPU has 50%% left")
	n1 := newRig(t, st, "n1")
	n1.Slurm.Set(jobstest.Job("7"))
	inter := jobstest.Job("8")
	inter.Batch = false
	n1.Slurm.Set(inter)
	n1.prolog(jobstest.RunOf(jobstest.Job("7")), rpc.JobRequeue)
	n1.wg.Wait()
	if !slices.Equal(n1.Slurm.Requeued, []string{"7"}) || n1.Slurm.Comments["7"] == "" {
		t.Errorf("requeued %v, %v", n1.Slurm.Requeued, n1.Slurm.Comments)
	}
	if _, err := n1.Env(t.Context(), user, "7"); lease.CodeOf(err) != lease.NoRoom {
		t.Errorf("a task of it: %v", err)
	}
	n1.prolog(jobstest.RunOf(jobstest.Job("8")), rpc.JobRefused)
	if _, err := n1.Env(t.Context(), user, "8"); lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "50% left") {
		t.Errorf("an interactive one: %v", err)
	}
	// Room that comes while it is waited for is taken.
	st.Set(func() { st.Refuse = lease.Errorf(lease.Down, "busy") })
	set := jobstest.Settings
	set.RoomWait = 10 * time.Second
	n1.State.SetSettings(set)
	n1.Slurm.Set(jobstest.Job("9"))
	time.AfterFunc(30*time.Millisecond, func() { st.Set(func() { st.Refuse = nil }) })
	n1.prolog(jobstest.RunOf(jobstest.Job("9")), rpc.JobGranted)
}

// A refusal is told when the first task starts, after a restart of the daemon too.
func TestRefusalStays(t *testing.T) {
	r := newRig(t, jobstest.NewSite(), "n1")
	j := jobstest.Job("7")
	j.Licences = slurm.Counts{"rgpu": 5}
	r.Slurm.Set(j)
	r.prolog(jobstest.RunOf(j), rpc.JobRefused)
	for range 2 {
		if _, err := r.Env(t.Context(), user, "7"); lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "want 50") {
			t.Errorf("%v", err)
		}
		if _, err := r.Env(t.Context(), nobody, "7"); lease.CodeOf(err) != lease.Denied {
			t.Errorf("another user: %v", err)
		}
		r.restart("boot-1")
		if !r.Marks.Has("7") {
			t.Error("no mark after the restart")
		}
	}
	if _, err := r.Epilog(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
		t.Error(err)
	}
	r.restart("boot-1")
	if r.Marks.Has("7") {
		t.Error("the mark stays")
	}
}

func TestBoot(t *testing.T) {
	st := jobstest.NewSite()
	r := newRig(t, st, "n1")
	r.Slurm.Set(jobstest.Job("7"))
	r.prolog(jobstest.RunOf(jobstest.Job("7")), rpc.JobGranted)
	r.restart("boot-1")
	if _, err := r.Env(t.Context(), user, "7"); err != nil || st.Count() != 1 {
		t.Errorf("after a restart: %v, %d leases", err, st.Count())
	}
	r.restart("boot-2")
	if st.Count() != 0 || r.Marks.Has("7") {
		t.Errorf("%d leases after a reboot", st.Count())
	}
}

// Prologs that outlive their run get nothing.
func TestLateProlog(t *testing.T) {
	st := jobstest.NewSite()
	r := newRig(t, st, "n1")
	for _, change := range []func(*slurm.Job){
		func(j *slurm.Job) { j.State = "COMPLETING" },
		func(j *slurm.Job) { j.State, j.Nodes = "PENDING", nil },
		func(j *slurm.Job) { j.Restarts = 1 },
		func(j *slurm.Job) { j.UID = 1001 },
		func(j *slurm.Job) { j.Nodes = []string{"n2"} },
	} {
		j := jobstest.Job("7")
		run := jobstest.RunOf(j)
		change(&j)
		r.Slurm.Set(j)
		r.prolog(run, rpc.JobRefused)
		if st.Count() != 0 {
			t.Fatalf("%+v has a lease", j)
		}
		if _, err := r.Epilog(t.Context(), rpc.Peer{}, run); err != nil {
			t.Error(err)
		}
	}
	// The Epilog comes while the Prolog is at it.
	st.Hold = make(chan struct{})
	j := jobstest.Job("8")
	r.Slurm.Set(j)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if a, err := r.Prolog(ctx, rpc.Peer{}, jobstest.RunOf(j)); lease.CodeOf(err) != lease.Down {
		t.Errorf("%+v, %v", a, err)
	}
	if _, err := r.Env(ctx, user, "8"); lease.CodeOf(err) != lease.Down {
		t.Errorf("a task meanwhile: %v", err)
	}
	if _, err := r.Epilog(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
		t.Error(err)
	}
	close(st.Hold)
	r.wg.Wait()
	if st.Count() != 0 || len(r.Host.Has) != 0 {
		t.Errorf("%d leases after the epilog", st.Count())
	}
}

func TestSlurmAway(t *testing.T) {
	st := jobstest.NewSite()
	r := newRig(t, st, "n1")
	set := jobstest.Settings
	set.RoomWait = 50*time.Millisecond - jobs.SettleTime
	r.State.SetSettings(set)
	j := jobstest.Job("7")
	r.Slurm.Set(j)
	r.Slurm.Fail(errors.New("connect failure"))
	// What the controller reserved is found all the same.
	_, _ = r.Host.Sponsor(t.Context(), []lease.Request{{Key: lease.Key{Cluster: "cluster", Job: "7", Node: "n1", Incarnation: 1}, UID: 1000}})
	r.prolog(jobstest.RunOf(j), rpc.JobGranted)
	// Nothing reserved: it may ask for something, or not.
	j = jobstest.Job("8")
	r.Slurm.Set(j)
	if a := r.prolog(jobstest.RunOf(j), rpc.JobNone); a.Reason == "" {
		t.Error("no reason")
	}
	if ops, err := r.Env(t.Context(), user, "8"); err == nil || errors.As(err, new(*lease.Error)) {
		t.Errorf("not known: %v, %v", ops, err)
	}
	r.Slurm.Fail(nil)
	if ops, err := r.Env(t.Context(), user, "8"); err != nil || len(ops) == 0 {
		t.Errorf("once slurmctld is back: %v, %v", ops, err)
	}
	// It asks, says the environment, and cannot be served.
	r.Slurm.Fail(errors.New("connect failure"))
	run := jobstest.RunOf(jobstest.Job("9"))
	run.Licences = new("rgpu:50")
	r.prolog(run, rpc.JobNone)
	if _, err := r.Env(t.Context(), user, "9"); err == nil {
		t.Error("a task of it starts")
	}
}

func TestWhoMay(t *testing.T) {
	st := jobstest.NewSite()
	n1 := newRig(t, st, "n1")
	run := rpc.JobRun{Job: "7"}
	for _, p := range []rpc.Peer{{UID: 1000}, {UID: 64030}} {
		if _, err := n1.Prolog(t.Context(), p, run); lease.CodeOf(err) != lease.Denied {
			t.Errorf("%v", err)
		}
		if _, err := n1.Epilog(t.Context(), p, run); lease.CodeOf(err) != lease.Denied {
			t.Errorf("%v", err)
		}
	}
	for _, bad := range []string{"", "x", "../7", "-1", "0"} {
		if _, err := n1.Prolog(t.Context(), rpc.Peer{}, rpc.JobRun{Job: bad}); lease.CodeOf(err) != lease.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
		if _, err := n1.Env(t.Context(), user, bad); lease.CodeOf(err) != lease.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
	n1.Slurm.Set(jobstest.Job("7"))
	if _, err := n1.Env(t.Context(), nobody, "7"); lease.CodeOf(err) != lease.Denied || st.Asks != 0 {
		t.Errorf("another user's job is looked up: %v", err)
	}
	if list, err := n1.Report(t.Context(), user, "7"); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := n1.Report(t.Context(), nobody, "7"); lease.CodeOf(err) != lease.Denied {
		t.Errorf("%v", err)
	}
}

// The node's own look: only a job whose extern step was here and is gone is over.
func TestHere(t *testing.T) {
	st := jobstest.NewSite()
	r := newRig(t, st, "n1")
	dir := r.spool()
	touch := func(name string) {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.Slurm.Set(jobstest.Job("7"))
	r.Slurm.Set(jobstest.Job("8"))
	r.prolog(jobstest.RunOf(jobstest.Job("7")), rpc.JobGranted)
	r.prolog(jobstest.RunOf(jobstest.Job("8")), rpc.JobGranted)
	now := time.Now()
	look := func(after time.Duration) { r.Look(t.Context(), now.Add(after)) }
	touch("n1_7.4294967292")
	touch("n1_7.0")
	touch("n1_8.0") // no extern step: nothing is known between two steps
	look(0)
	for _, f := range []string{"n1_7.4294967292", "n1_8.0"} {
		if err := os.Remove(filepath.Join(dir, f)); err != nil {
			t.Fatal(err)
		}
	}
	look(time.Hour)
	if st.Count() != 2 {
		t.Fatal("a job with a step has lost its lease")
	}
	if err := os.Remove(filepath.Join(dir, "n1_7.0")); err != nil {
		t.Fatal(err)
	}
	look(2 * time.Hour)
	if st.Count() != 2 {
		t.Fatal("no time between two looks")
	}
	look(2*time.Hour + 2*time.Minute)
	if _, ok := st.Leases[lease.Key{Cluster: "cluster", Job: "8", Node: "n1"}]; st.Count() != 1 || !ok {
		t.Errorf("%v", st.Leases)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	look(9 * time.Hour)
	if c := r.State.Checks(); st.Count() != 1 || len(c) != 1 || c[0].Level != rpc.Warn {
		t.Errorf("a directory that is not there: %d leases, %+v", st.Count(), c)
	}
}

// A daemon that has started since knows that a job's extern step was here.
func TestHereAfterRestart(t *testing.T) {
	st := jobstest.NewSite()
	r := newRig(t, st, "n1")
	dir := r.spool()
	step := filepath.Join(dir, "n1_7.4294967292")
	if err := os.WriteFile(step, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, job := range []string{"7", "8"} {
		r.Slurm.Set(jobstest.Job(job))
		r.prolog(jobstest.RunOf(jobstest.Job(job)), rpc.JobGranted)
	}
	now := time.Now()
	r.Look(t.Context(), now)
	r.restart("boot-1")
	if err := os.Remove(step); err != nil {
		t.Fatal(err)
	}
	r.Look(t.Context(), now.Add(time.Hour))
	r.Look(t.Context(), now.Add(2*time.Hour))
	if _, ok := st.Leases[lease.Key{Cluster: "cluster", Job: "8", Node: "n1"}]; st.Count() != 1 || !ok {
		t.Errorf("%v", st.Leases)
	}
}

// A lease that the controller has got at an owner that did not answer at first is found before the job is put back into the queue.
func TestFoundLate(t *testing.T) {
	st := jobstest.NewSite()
	r := newRig(t, st, "n1")
	set := jobstest.Settings
	set.RoomWait = 10 * time.Second
	r.State.SetSettings(set)
	r.Slurm.Set(jobstest.Job("7"))
	st.Hold = make(chan struct{})
	st.Refuse = lease.Errorf(lease.NoRoom, "no room")
	go func() {
		st.Hold <- struct{}{} // the node has looked, and asks for a lease of its own
		k := lease.Key{Cluster: "cluster", Job: "7", Node: "n1"}
		q := lease.Request{Key: k, UID: 1000}
		q.Key.Incarnation = 5
		st.Set(func() {
			st.Leases[k] = lease.Lease{ID: form.NewLeaseID(), Request: q, State: lease.Granted, Host: "n1"}
			st.Refuse = lease.Errorf(lease.Never, "no GPU is that large")
		})
		st.Hold <- struct{}{}
	}()
	r.prolog(jobstest.RunOf(jobstest.Job("7")), rpc.JobGranted)
	if len(st.Refusals) > 0 {
		t.Errorf("%q", st.Refusals)
	}
}

// That an earlier run has ended here, by a clock that was ahead, is no reason to refuse a run that slurmctld says begins.
func TestEndedAhead(t *testing.T) {
	st := jobstest.NewSite()
	r := newRig(t, st, "n1")
	r.Slurm.Set(jobstest.Job("7"))
	st.Down = lease.Errorf(lease.Over, "job 7 has ended here")
	r.prolog(jobstest.RunOf(jobstest.Job("7")), rpc.JobGranted)
}

// A job whose Prolog never reached the daemon gets what its licences say, if that is all.
func TestPrologLost(t *testing.T) {
	r := newRig(t, jobstest.NewSite(), "n1")
	r.Slurm.Set(jobstest.Job("7"))
	if ops, err := r.Env(t.Context(), user, "7"); err != nil || len(ops) == 0 {
		t.Errorf("%v, %v", ops, err)
	}
	more := jobstest.Job("8")
	more.Licences = slurm.Counts{"rgpu": 80}
	r.Slurm.Set(more)
	if _, err := r.Env(t.Context(), user, "8"); lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "did not reach") {
		t.Errorf("%v", err)
	}
	more.ID = "9"
	r.Slurm.Set(more)
	run := jobstest.RunOf(more)
	run.Options = map[string]string{"mem": "80G"}
	r.Slurm.Fail(errors.New("connect failure"))
	set := jobstest.Settings
	set.RoomWait = 50*time.Millisecond - jobs.SettleTime
	r.State.SetSettings(set)
	r.prolog(run, rpc.JobNone)
	r.restart("boot-1") // which may come before the answer
	r.Slurm.Fail(nil)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := r.Env(ctx, user, "9"); err != nil {
		t.Error(err)
	}
	if l := r.Host.Has["9"]; len(l.Request.Fractions) != 1 || l.Request.Fractions[0].Mem != 80<<30 {
		t.Errorf("the user's option is lost: %+v", l.Request)
	}
}

// What Slurm does not know, or has elsewhere, is no reason to end a task of a job that asks
// for nothing.
func TestEnvOfOthers(t *testing.T) {
	r := newRig(t, jobstest.NewSite(), "n1")
	if ops, err := r.Env(t.Context(), user, "7"); err == nil || errors.As(err, new(*lease.Error)) {
		t.Errorf("a job that slurmctld does not know: %v, %v", ops, err)
	}
	for _, c := range []struct {
		state slurm.State
		node  string
	}{{"PENDING", ""}, {"RUNNING", "n2"}, {"COMPLETING", "n1"}} {
		j := jobstest.Job("8")
		j.State, j.Nodes = c.state, []string{c.node}
		r.Slurm.Set(j)
		if _, err := r.Env(t.Context(), user, "8"); lease.CodeOf(err) != lease.Over || !strings.Contains(err.Error(), "does not run on node n1") {
			t.Errorf("%s on %q, asks: %v", c.state, c.node, err)
		}
		j.Licences, j.Gres = nil, nil
		r.Slurm.Set(j)
		if ops, err := r.Env(t.Context(), user, "8"); err != nil || len(ops) > 0 {
			t.Errorf("%s on %q, asks for nothing: %v, %v", c.state, c.node, ops, err)
		}
	}
}

// Slurm reuses job ids, and an owner remembers what an id's earlier job has used: the
// Epilog's answer does not show it to the later job's user, and an Epilog reports its own run.
func TestReportOfRecycledNumber(t *testing.T) {
	st := jobstest.NewSite()
	n1 := newRig(t, st, "n1")
	j := jobstest.Job("7")
	n1.Slurm.Set(j)
	n1.prolog(jobstest.RunOf(j), rpc.JobGranted)
	l, _, _ := n1.Host.Held(lease.Key{Cluster: "cluster", Job: "7", Node: "n1"})
	report := func(id string, uid uint32, node string, epoch uint64) lease.Report {
		return lease.Report{Lease: id, UID: uid, Key: lease.Key{Cluster: "cluster", Job: "7", Node: node, Incarnation: epoch}}
	}
	now := l.Request.Key.Incarnation
	all := []lease.Report{report("stranger", 999, "n1", now-2), report("earlier", 1000, "n1", now-1), report("this", 1000, "n1", now), report("other node", 1000, "n2", now+1)}
	n1.Host.Told = all
	list, err := n1.Epilog(t.Context(), rpc.Peer{}, jobstest.RunOf(j))
	if err != nil || len(list) != 2 || list[0].Lease != "this" || list[1].Lease != "other node" {
		t.Errorf("the Epilog is told %+v, %v", list, err)
	}
}

// The controller's clock is ahead of the node's, which still gets the next run its lease.
func TestClockBehind(t *testing.T) {
	st := jobstest.NewSite()
	n1 := newRig(t, st, "n1")
	k := lease.Key{Cluster: "cluster", Job: "7", Node: "n1"}
	r := lease.Request{Key: k, UID: 1000}
	r.Key.Incarnation = 1 << 40
	st.Leases[k] = lease.Lease{ID: form.NewLeaseID(), Request: r, State: lease.Granted, Host: "n1"}
	j := jobstest.Job("7")
	j.Restarts = 1
	n1.Slurm.Set(j)
	n1.prolog(jobstest.RunOf(j), rpc.JobGranted)
}
