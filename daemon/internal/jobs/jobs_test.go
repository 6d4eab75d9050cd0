package jobs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

var (
	user   = rpc.Peer{UID: 1000}
	nobody = rpc.Peer{UID: 1001}
)

// The whole way of a job of two nodes, in releases that tell a node the licences and
// in those that do not.
func TestWay(t *testing.T) {
	for _, licences := range []*string{nil, new("rgpu:100")} {
		st := newSite()
		ctl, n1, n2 := newRig(t, st, "ctl"), newRig(t, st, "n1"), newRig(t, st, "n2")
		j := job("7")
		j.Nodes, j.Licences = []string{"n1", "n2"}, slurm.Counts{"rgpu": 100}
		for _, r := range []*rig{ctl, n1, n2} {
			r.slurm.Set(j)
		}
		run := runOf(j)
		run.Licences = new("rgpu:100")
		for range 2 { // slurmctld may start it twice
			if a, err := ctl.PrologController(t.Context(), rpc.Peer{UID: 64030}, run); err != nil || a.Outcome != rpc.JobGranted {
				t.Fatalf("%+v, %v", a, err)
			}
		}
		if st.count() != 2 {
			t.Fatalf("%d leases for two nodes", st.count())
		}
		run.Licences = licences
		var ids []string
		for _, r := range []*rig{n1, n2} {
			a := r.prolog(run, rpc.JobGranted)
			if b := r.prolog(run, rpc.JobGranted); b != a || a.Lease == "" {
				t.Errorf("prolog again: %+v, %+v", a, b)
			}
			ids = append(ids, a.Lease)
			if licences != nil && r.slurm.Asked != 0 {
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
			if ops, err := r.Env(t.Context(), nobody, "7"); codeOf(err) != lease.Denied || ops != nil {
				t.Errorf("another user: %v, %v", ops, err)
			}
			if !r.marks.has("7") {
				t.Error("no mark")
			}
		}
		if ids[0] == ids[1] {
			t.Error("one lease on two nodes")
		}
		run.Restart++ // as an Epilog is told of a run that is requeued
		for _, r := range []*rig{n1, n2} {
			for range 2 {
				if _, err := r.Epilog(t.Context(), rpc.Peer{}, run); err != nil {
					t.Error(err)
				}
			}
			if r.marks.has("7") {
				t.Error("the mark stays")
			}
		}
		if st.count() != 0 {
			t.Errorf("%d leases after the epilogs", st.count())
		}
	}
}

func TestAsksForNothing(t *testing.T) {
	st := newSite()
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
	if r.slurm.Asked != 0 || len(st.ended) != 0 || r.marks.has("7") {
		t.Errorf("slurmctld asked %d times, %v ended", r.slurm.Asked, st.ended)
	}
	// 22.05: slurmctld is asked once.
	j := job("8")
	j.Licences, j.Gres = slurm.Counts{}, nil
	r.slurm.Set(j)
	r.prolog(runOf(j), rpc.JobNone)
	for range 3 {
		if ops, err := r.Env(t.Context(), user, "8"); err != nil || len(ops) != 0 {
			t.Errorf("%v, %v", ops, err)
		}
	}
	if _, err := r.Epilog(t.Context(), rpc.Peer{}, runOf(j)); err != nil || r.slurm.Asked != 1 || len(st.ended) != 0 {
		t.Errorf("%v: slurmctld asked %d times, %v ended", err, r.slurm.Asked, st.ended)
	}
	// Its Prolog did not come through: the first task has it looked up, once.
	r.slurm.Set(func() slurm.Job { j := j; j.ID = "9"; return j }())
	for range 3 {
		if ops, err := r.Env(t.Context(), user, "9"); err != nil || len(ops) != 0 {
			t.Errorf("%v, %v", ops, err)
		}
	}
	if r.slurm.Asked != 2 {
		t.Errorf("slurmctld asked %d times", r.slurm.Asked)
	}
	// The controller's script is told the licences by every release.
	ctl := newRig(t, st, "ctl")
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, rpc.JobRun{Job: "7", Licences: new("")}); err != nil || a.Outcome != rpc.JobNone || ctl.slurm.Asked != 0 {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestNoRoom(t *testing.T) {
	st := newSite()
	st.refuse = lease.Errorf(lease.NoRoom, "no GPU has 50%% left")
	n1, ctl := newRig(t, st, "n1"), newRig(t, st, "ctl")
	for _, r := range []*rig{n1, ctl} {
		r.slurm.Set(job("7"))
		inter := job("8")
		inter.Batch = false
		r.slurm.Set(inter)
	}
	a, err := ctl.PrologController(t.Context(), rpc.Peer{}, runOf(job("7")))
	ctl.wg.Wait() // for the comment
	if err != nil || a.Outcome != rpc.JobRequeue || !strings.Contains(a.Reason, "50% left") || ctl.slurm.Comments["7"] != "sluice: requeued: no GPU has 50% left" {
		t.Errorf("%+v, %v, %v", a, err, ctl.slurm.Comments)
	}
	n1.prolog(runOf(job("7")), rpc.JobRequeue)
	n1.wg.Wait()
	if !slices.Equal(n1.slurm.Requeued, []string{"7"}) || n1.slurm.Comments["7"] == "" {
		t.Errorf("requeued %v, %v", n1.slurm.Requeued, n1.slurm.Comments)
	}
	if _, err := n1.Env(t.Context(), user, "7"); codeOf(err) != lease.NoRoom {
		t.Errorf("a task of it: %v", err)
	}
	n1.prolog(runOf(job("8")), rpc.JobRefused)
	if _, err := n1.Env(t.Context(), user, "8"); codeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "50% left") {
		t.Errorf("an interactive one: %v", err)
	}
	// Room that comes while it is waited for is taken.
	st.set(func() { st.refuse = lease.Errorf(lease.Down, "busy") })
	set := settingsOf
	set.RoomWait = 10 * time.Second
	n1.SetSettings(set)
	n1.slurm.Set(job("9"))
	time.AfterFunc(30*time.Millisecond, func() { st.set(func() { st.refuse = nil }) })
	n1.prolog(runOf(job("9")), rpc.JobGranted)
}

// A refusal is told when the first task starts, after a restart of the daemon too.
func TestRefusalStays(t *testing.T) {
	r := newRig(t, newSite(), "n1")
	j := job("7")
	j.Licences = slurm.Counts{"rgpu": 5}
	r.slurm.Set(j)
	r.prolog(runOf(j), rpc.JobRefused)
	for range 2 {
		if _, err := r.Env(t.Context(), user, "7"); codeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "want 50") {
			t.Errorf("%v", err)
		}
		if _, err := r.Env(t.Context(), nobody, "7"); codeOf(err) != lease.Denied {
			t.Errorf("another user: %v", err)
		}
		r.restart("boot-1")
		if !r.marks.has("7") {
			t.Error("no mark after the restart")
		}
	}
	if _, err := r.Epilog(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
		t.Error(err)
	}
	r.restart("boot-1")
	if r.marks.has("7") {
		t.Error("the mark stays")
	}
}

func TestBoot(t *testing.T) {
	st := newSite()
	r := newRig(t, st, "n1")
	r.slurm.Set(job("7"))
	r.prolog(runOf(job("7")), rpc.JobGranted)
	r.restart("boot-1")
	if _, err := r.Env(t.Context(), user, "7"); err != nil || st.count() != 1 {
		t.Errorf("after a restart: %v, %d leases", err, st.count())
	}
	r.restart("boot-2")
	if st.count() != 0 || r.marks.has("7") {
		t.Errorf("%d leases after a reboot", st.count())
	}
}

// Prologs that outlive their run get nothing.
func TestLateProlog(t *testing.T) {
	st := newSite()
	r := newRig(t, st, "n1")
	for _, change := range []func(*slurm.Job){
		func(j *slurm.Job) { j.State = "COMPLETING" },
		func(j *slurm.Job) { j.State, j.Nodes = "PENDING", nil },
		func(j *slurm.Job) { j.Restarts = 1 },
		func(j *slurm.Job) { j.UID = 1001 },
		func(j *slurm.Job) { j.Nodes = []string{"n2"} },
	} {
		j := job("7")
		run := runOf(j)
		change(&j)
		r.slurm.Set(j)
		r.prolog(run, rpc.JobRefused)
		if st.count() != 0 {
			t.Fatalf("%+v has a lease", j)
		}
		if _, err := r.Epilog(t.Context(), rpc.Peer{}, run); err != nil {
			t.Error(err)
		}
	}
	// The Epilog comes while the Prolog is at it.
	st.hold = make(chan struct{})
	j := job("8")
	r.slurm.Set(j)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if a, err := r.Prolog(ctx, rpc.Peer{}, runOf(j)); codeOf(err) != lease.Down {
		t.Errorf("%+v, %v", a, err)
	}
	if _, err := r.Env(ctx, user, "8"); codeOf(err) != lease.Down {
		t.Errorf("a task meanwhile: %v", err)
	}
	if _, err := r.Epilog(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
		t.Error(err)
	}
	close(st.hold)
	r.wg.Wait()
	if st.count() != 0 || len(r.host.held) != 0 {
		t.Errorf("%d leases after the epilog", st.count())
	}
}

// The lease of a run whose Epilog was lost is not the next run's, nor that of a job
// that has its number after slurmctld lost its state.
func TestEarlierRun(t *testing.T) {
	st := newSite()
	r, ctl := newRig(t, st, "n1"), newRig(t, st, "ctl")
	j := job("7")
	r.slurm.Set(j)
	first := r.prolog(runOf(j), rpc.JobGranted)
	j.Restarts = 1
	r.slurm.Set(j)
	second := r.prolog(runOf(j), rpc.JobGranted)
	if first.Lease == second.Lease || st.count() != 1 {
		t.Errorf("%v, %v: %d leases", first, second, st.count())
	}
	j.UID, j.Licences, j.Gres[0].Count = 1001, slurm.Counts{"rgpu": 70}, 70
	ctl.slurm.Set(j)
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, runOf(j)); err != nil || a.Outcome != rpc.JobGranted || a.Lease == second.Lease {
		t.Errorf("another job of that number: %+v, %v", a, err)
	}
}

func TestSlurmAway(t *testing.T) {
	st := newSite()
	r := newRig(t, st, "n1")
	set := settingsOf
	set.RoomWait = 50*time.Millisecond - settleTime
	r.SetSettings(set)
	j := job("7")
	r.slurm.Set(j)
	r.slurm.Fail(errors.New("connect failure"))
	// What the controller reserved is found all the same.
	_, _ = r.host.Sponsor(t.Context(), []lease.Request{{Key: lease.Key{Cluster: "cluster", Job: "7", Node: "n1", Incarnation: 1}, UID: 1000}})
	r.prolog(runOf(j), rpc.JobGranted)
	// Nothing reserved: it may ask for something, or not.
	j = job("8")
	r.slurm.Set(j)
	if a := r.prolog(runOf(j), rpc.JobNone); a.Reason == "" {
		t.Error("no reason")
	}
	if ops, err := r.Env(t.Context(), user, "8"); err == nil || errors.As(err, new(*lease.Error)) {
		t.Errorf("not known: %v, %v", ops, err)
	}
	r.slurm.Fail(nil)
	if ops, err := r.Env(t.Context(), user, "8"); err != nil || len(ops) == 0 {
		t.Errorf("once slurmctld is back: %v, %v", ops, err)
	}
	// It asks, says the environment, and cannot be served.
	r.slurm.Fail(errors.New("connect failure"))
	run := runOf(job("9"))
	run.Licences = new("rgpu:50")
	r.prolog(run, rpc.JobNone)
	if _, err := r.Env(t.Context(), user, "9"); err == nil {
		t.Error("a task of it starts")
	}
	ctl := newRig(t, st, "ctl")
	ctl.slurm.Fail(errors.New("connect failure"))
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, run); err != nil || a.Outcome != rpc.JobNone {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestWhoMay(t *testing.T) {
	st := newSite()
	n1, ctl := newRig(t, st, "n1"), newRig(t, st, "ctl")
	run := rpc.JobRun{Job: "7"}
	for _, p := range []rpc.Peer{{UID: 1000}, {UID: 64030}} {
		if _, err := n1.Prolog(t.Context(), p, run); codeOf(err) != lease.Denied {
			t.Errorf("%v", err)
		}
		if _, err := n1.Epilog(t.Context(), p, run); codeOf(err) != lease.Denied {
			t.Errorf("%v", err)
		}
	}
	for _, c := range []struct {
		r *rig
		p rpc.Peer
	}{{ctl, rpc.Peer{UID: 1000}}, {n1, rpc.Peer{}}} {
		if _, err := c.r.PrologController(t.Context(), c.p, run); err == nil {
			t.Errorf("%+v may reserve", c.p)
		}
		if _, err := c.r.EpilogController(t.Context(), c.p, run); err == nil {
			t.Errorf("%+v may end", c.p)
		}
	}
	for _, bad := range []string{"", "x", "../7", "-1", "0"} {
		if _, err := n1.Prolog(t.Context(), rpc.Peer{}, rpc.JobRun{Job: bad}); codeOf(err) != lease.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
		if _, err := n1.Env(t.Context(), user, bad); codeOf(err) != lease.Invalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
	n1.slurm.Set(job("7"))
	if _, err := n1.Env(t.Context(), nobody, "7"); codeOf(err) != lease.Denied || st.asks != 0 {
		t.Errorf("another user's job is looked up: %v", err)
	}
	if list, err := ctl.Report(t.Context(), user, "7"); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := ctl.Report(t.Context(), nobody, "7"); codeOf(err) != lease.Denied {
		t.Errorf("%v", err)
	}
}

// The node's own look: only a job whose extern step was here and is gone is over.
func TestHere(t *testing.T) {
	st := newSite()
	r := newRig(t, st, "n1")
	dir := filepath.Join(r.dir, "n1")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	touch := func(name string) {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.slurm.Set(job("7"))
	r.slurm.Set(job("8"))
	r.prolog(runOf(job("7")), rpc.JobGranted)
	r.prolog(runOf(job("8")), rpc.JobGranted)
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
	if st.count() != 2 {
		t.Fatal("a job with a step has lost its lease")
	}
	if err := os.Remove(filepath.Join(dir, "n1_7.0")); err != nil {
		t.Fatal(err)
	}
	look(2 * time.Hour)
	if st.count() != 2 {
		t.Fatal("no time between two looks")
	}
	look(2*time.Hour + 2*time.Minute)
	if _, ok := st.leases[lease.Key{Cluster: "cluster", Job: "8", Node: "n1"}]; st.count() != 1 || !ok {
		t.Errorf("%v", st.leases)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	look(9 * time.Hour)
	if c := r.Checks(); st.count() != 1 || len(c) != 1 || c[0].Level != rpc.Warn {
		t.Errorf("a directory that is not there: %d leases, %+v", st.count(), c)
	}
}

// A job whose Prolog never reached the daemon gets what its licences say, if that is all.
func TestPrologLost(t *testing.T) {
	r := newRig(t, newSite(), "n1")
	r.slurm.Set(job("7"))
	if ops, err := r.Env(t.Context(), user, "7"); err != nil || len(ops) == 0 {
		t.Errorf("%v, %v", ops, err)
	}
	more := job("8")
	more.Licences = slurm.Counts{"rgpu": 80}
	r.slurm.Set(more)
	if _, err := r.Env(t.Context(), user, "8"); codeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "did not reach") {
		t.Errorf("%v", err)
	}
	more.ID = "9"
	r.slurm.Set(more)
	run := runOf(more)
	run.Wishes = map[string]string{"mem": "80G"}
	r.slurm.Fail(errors.New("connect failure"))
	set := settingsOf
	set.RoomWait = 50*time.Millisecond - settleTime
	r.SetSettings(set)
	r.prolog(run, rpc.JobNone)
	r.restart("boot-1") // which may come before the answer
	r.slurm.Fail(nil)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := r.Env(ctx, user, "9"); err != nil {
		t.Error(err)
	}
	if l := r.host.held["9"]; len(l.Request.Fractions) != 1 || l.Request.Fractions[0].Mem != 80<<30 {
		t.Errorf("the user's wish is lost: %+v", l.Request)
	}
}

// What Slurm does not know, or has elsewhere, is no reason to end a task of a job that asks
// for nothing.
func TestEnvOfOthers(t *testing.T) {
	r := newRig(t, newSite(), "n1")
	if ops, err := r.Env(t.Context(), user, "7"); err == nil || errors.As(err, new(*lease.Error)) {
		t.Errorf("a job that slurmctld does not know: %v, %v", ops, err)
	}
	for _, c := range []struct {
		state slurm.State
		node  string
	}{{"PENDING", ""}, {"RUNNING", "n2"}, {"COMPLETING", "n1"}} {
		j := job("8")
		j.State, j.Nodes = c.state, []string{c.node}
		r.slurm.Set(j)
		if _, err := r.Env(t.Context(), user, "8"); codeOf(err) != lease.Over || !strings.Contains(err.Error(), "does not run on node n1") {
			t.Errorf("%s on %q, asks: %v", c.state, c.node, err)
		}
		j.Licences, j.Gres = nil, nil
		r.slurm.Set(j)
		if ops, err := r.Env(t.Context(), user, "8"); err != nil || len(ops) > 0 {
			t.Errorf("%s on %q, asks for nothing: %v, %v", c.state, c.node, ops, err)
		}
	}
}
