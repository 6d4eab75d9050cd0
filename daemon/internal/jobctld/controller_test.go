package jobctld

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs/jobstest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm/slurmtest"
)

// The end waits for what still runs of the job, and no longer.
func TestEnd(t *testing.T) {
	st := jobstest.NewSite()
	ctl := newRig(t, st)
	j := jobstest.Job("7")
	ctl.Slurm.Set(j)
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil || a.Outcome != rpc.JobGranted {
		t.Fatalf("%+v, %v", a, err)
	}
	look := func() {
		ctl.mu.Lock()
		waiting := map[string]jobEnd{}
		for k, o := range ctl.ends {
			waiting[k] = o
		}
		ctl.mu.Unlock()
		ctl.endJobs(t.Context(), waiting)
	}
	j.State = "COMPLETING"
	ctl.Slurm.Set(j)
	if _, err := ctl.EpilogController(t.Context(), rpc.Peer{UID: 64030}, jobstest.RunOf(j)); err != nil {
		t.Fatal(err)
	}
	look()
	if st.Count() != 1 {
		t.Fatal("a job that is completing has lost its lease")
	}
	ctl.Slurm.Fail(errors.New("connect failure"))
	look()
	if st.Count() != 1 {
		t.Fatal("that nothing is known has ended a job")
	}
	ctl.Slurm.Fail(nil)
	ctl.restart() // which forgets nothing
	if len(ctl.ends) != 1 {
		t.Fatalf("%v after the restart", ctl.ends)
	}
	j.State, j.Nodes = "NODE_FAIL", nil
	ctl.Slurm.Set(j)
	look()
	ctl.nextReport(t.Context())
	if st.Count() != 0 || len(ctl.ends) != 0 || ctl.Slurm.Comments["7"] != "used by 7" {
		t.Errorf("%d leases, %v, %q", st.Count(), ctl.ends, ctl.Slurm.Comments)
	}
	ctl.restart()
	if len(ctl.ends) != 0 {
		t.Errorf("%v stay in the ledger", ctl.ends)
	}
	// Several at once, one of them gone from slurmctld's list.
	for _, id := range []string{"8", "9"} {
		j := jobstest.Job(id)
		ctl.Slurm.Set(j)
		if _, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
			t.Fatal(err)
		}
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, jobstest.RunOf(j)); err != nil {
			t.Fatal(err)
		}
	}
	c := jobstest.Job("8")
	c.State = "COMPLETING"
	ctl.Slurm.Set(c)
	ctl.Slurm.Lock()
	delete(ctl.Slurm.All, "9")
	ctl.Slurm.Unlock()
	look()
	if _, ok := ctl.ends["8"]; !ok || len(ctl.ends) != 1 || st.Count() != 1 {
		t.Errorf("%v, %d leases", ctl.ends, st.Count())
	}
}

func TestRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := jobstest.NewSite()
		fake := slurmtest.New()
		fake.Have["rgpu"] = slurm.Licence{Total: 200}
		s := &Service{
			cfg: Config{Cluster: "cluster", Host: &jobstest.Host{Site: st}, Slurm: fake, State: jobs.NewState(jobstest.Settings), Reconcile: time.Minute},
			log: slog.New(slog.DiscardHandler), ends: map[string]jobEnd{}, wake: make(chan struct{}, 1),
			orphans: map[string]string{}, absent: map[string]int{},
		}
		st.Leases[lease.Key{Cluster: "cluster", Job: "5", Node: "n1"}] = lease.Lease{ID: "x", State: lease.Granted, Request: lease.Request{Key: lease.Key{Cluster: "cluster", Job: "5", Node: "n1", Incarnation: 5}}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		time.Sleep(90 * time.Second)
		if st.Count() != 1 {
			t.Error("one look ended it")
		}
		time.Sleep(time.Minute)
		st.Set(func() {
			if len(st.Ended) != 1 || st.Ended[0].Incarnation != 5 {
				t.Errorf("%v", st.Ended)
			}
		})
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestReconcile(t *testing.T) {
	st := jobstest.NewSite()
	ctl := newRig(t, st)
	put := func(id, job, node string, restart uint32) {
		k := lease.Key{Cluster: "cluster", Job: job, Node: node}
		r := lease.Request{Key: k, Restart: restart}
		r.Key.Incarnation = 5
		st.Leases[k] = lease.Lease{ID: id, State: lease.Granted, Host: node, Request: r}
	}
	put("runs", "1", "n1", 0)
	put("gone", "2", "n1", 0)
	put("elsewhere", "1", "n2", 0)
	put("older run", "3", "n1", 0)
	put("completing", "4", "n1", 0)
	put("in a state of a later release", "6", "n1", 0)
	put("user", "run-abc", "n1", 0)
	for id, c := range map[string]slurm.JobState{
		"1": {State: "RUNNING", Nodes: []string{"n1"}}, "3": {State: "RUNNING", Restarts: 1, Nodes: []string{"n1"}},
		"4": {State: "COMPLETING", Restarts: 1, Nodes: []string{"n1"}}, "6": {State: "EXPEDITING", Nodes: []string{"n1"}},
	} {
		ctl.Slurm.Set(slurm.Job{ID: id, JobState: c})
	}
	ctl.Reconcile(t.Context())
	for range 3 { // not known is neither there nor gone
		ctl.Slurm.Fail(errors.New("connect failure"))
		ctl.Reconcile(t.Context())
		ctl.Slurm.Fail(nil)
	}
	if len(st.Ended) != 0 {
		t.Fatalf("%v ended at the first look", st.Ended)
	}
	ctl.Reconcile(t.Context())
	if st.Count() != 4 {
		t.Errorf("%v", st.Leases)
	}
	for _, id := range []string{"1", "4", "6", "run-abc"} {
		if _, ok := st.Leases[lease.Key{Cluster: "cluster", Job: id, Node: "n1"}]; !ok {
			t.Errorf("job %s has lost its lease", id)
		}
	}
}

// Of two leases that the same run of a job has on a node, the one that this daemon sponsors is given back, at the second look.
func TestDoubled(t *testing.T) {
	st := jobstest.NewSite()
	ctl := newRig(t, st)
	put := func(id, job, node, sponsor string, restart uint32, state lease.State) {
		r := lease.Request{Key: lease.Key{Cluster: "cluster", Job: job, Node: node, Incarnation: 5}, Restart: restart}
		st.Extra = append(st.Extra, lease.Status{Lease: lease.Lease{ID: id, State: state, Host: node, Sponsor: sponsor, Request: r}})
	}
	put("attached", "1", "n1", "", 0, lease.Granted)
	put("second", "1", "n1", "ctl", 0, lease.Granted)
	put("other node", "1", "n2", "ctl", 0, lease.Granted)
	put("ends", "2", "n1", "", 0, lease.Granted)
	put("next run", "2", "n1", "ctl", 1, lease.Granted)
	put("reserved", "3", "n1", "", 0, lease.Reserved)
	put("granted", "3", "n1", "ctl", 0, lease.Granted)
	put("at two owners", "4", "n1", "ctl", 0, lease.Granted)
	put("at two owners", "4", "n1", "ctl", 0, lease.Granted)
	put("attached twice", "5", "n1", "", 0, lease.Granted)
	put("attached twice, too", "5", "n1", "", 0, lease.Granted)
	for job, nodes := range map[string][]string{"1": {"n1", "n2"}, "2": {"n1"}, "3": {"n1"}, "4": {"n1"}, "5": {"n1"}} {
		j := slurm.JobState{State: "RUNNING", Nodes: nodes}
		if job == "2" {
			j.Restarts = 1
		}
		ctl.Slurm.Set(slurm.Job{ID: job, JobState: j})
	}
	ids := func() (out []string) {
		for _, l := range st.Extra {
			out = append(out, l.ID)
		}
		return out
	}
	all := ids()
	ctl.Reconcile(t.Context())
	if !slices.Equal(ids(), all) {
		t.Fatalf("%q after one look", ids())
	}
	ctl.Reconcile(t.Context())
	if want := slices.DeleteFunc(all, func(id string) bool { return id == "second" }); !slices.Equal(ids(), want) {
		t.Errorf("%q, want %q", ids(), want)
	}
}

func TestHoldBack(t *testing.T) {
	st := jobstest.NewSite()
	ctl := newRig(t, st)
	ctl.Slurm.Have["rgpu"] = slurm.Licence{Total: 400}
	ctl.Slurm.Have["rgpu_h200"] = slurm.Licence{Total: 200}
	g2 := rpc.PoolOwner{Name: "g2", Inventory: lease.Inventory{Owner: "g2", GPUs: []lease.GPU{{UUID: "c", Name: "A100", Healthy: true}, {UUID: "d", Name: "A100", Healthy: true}}}}
	st.Pools[0].Owners = append(st.Pools[0].Owners, g2)
	expect := func(what string, rgpu, h200 uint64) {
		t.Helper()
		ctl.Reconcile(t.Context())
		if got := ctl.Slurm.Reserved["sluice_rgpu"]["rgpu"]; got != rgpu {
			t.Errorf("%s: %d rgpu held back, want %d", what, got, rgpu)
		}
		if got := ctl.Slurm.Reserved["sluice_rgpu_h200"]["rgpu_h200"]; got != h200 {
			t.Errorf("%s: %d rgpu_h200 held back, want %d", what, got, h200)
		}
	}
	expect("all well", 0, 0)
	st.Pools[0].Owners[0].Inventory.GPUs[1].Healthy = false
	expect("a GPU is ill", 100, 100)
	st.Pools[0].Owners[0].Inventory.GPUs[1].Healthy = true
	expect("it is well again", 0, 0)
	st.Pools[0].Owners[1] = rpc.PoolOwner{Name: "g2", Error: "does not answer"}
	expect("an owner restarts", 0, 0)
	expect("an owner is away", 200, 0)
	st.Pools[0].Owners[1] = g2
	expect("it is back", 0, 0)
	grant := lease.Status{Lease: lease.Lease{ID: "r", State: lease.Granted, Request: lease.Request{Key: lease.Key{Cluster: "cluster", Job: "run-1"}}, Grants: []lease.Grant{{GPU: "a", Percent: 30}}}}
	other := lease.Status{Lease: lease.Lease{ID: "o", State: lease.Granted, Request: lease.Request{Key: lease.Key{Cluster: "other", Job: "7"}}, Grants: []lease.Grant{{GPU: "c", Percent: 20}}}}
	st.Extra = []lease.Status{grant, other}
	expect("others use the pool", 50, 30)
	st.Extra = nil
	// Jobs on a drained GPU have their licences still; the rest of its 100 is held back.
	mine := lease.Status{Lease: lease.Lease{ID: "m", State: lease.Granted, Request: lease.Request{Key: lease.Key{Cluster: "cluster", Job: "7", Node: "n1"}}, Grants: []lease.Grant{{GPU: "c", Percent: 20}}}}
	ctl.Slurm.Set(jobstest.Job("7"))
	st.Extra = []lease.Status{mine}
	g2.Inventory.GPUs[0].Drain = lease.Drain{By: "0@g2", Since: time.Unix(1, 0), Reason: "fans"}
	expect("a GPU is drained", 80, 0)
	g2.Inventory.GPUs[0].Drain = lease.Drain{}
	expect("it is resumed", 0, 0)
	st.Extra = nil
	ctl.Slurm.Have["rgpu"] = slurm.Licence{Total: 1000}
	expect("slurm.conf has too many", 600, 0)
	ctl.Slurm.Have["rgpu"] = slurm.Licence{Total: 10}
	expect("slurm.conf has fewer", 0, 0)
	delete(ctl.Slurm.Have, "rgpu")
	ctl.Reconcile(t.Context())
	for _, c := range ctl.State.Checks() {
		if c.Name == "licences" && c.Level == rpc.Warn && strings.Contains(c.Text, "slurm.conf has no licence rgpu") {
			return
		}
	}
	t.Errorf("a licence that Slurm does not have: %+v", ctl.State.Checks())
}

func TestCompareConfig(t *testing.T) {
	ctl := newRig(t, jobstest.NewSite())
	ctl.Slurm.Conf = map[string]string{"ClusterName": "lab", "SlurmdTimeout": "30 sec"}
	ctl.compareConfig(t.Context())
	names := map[string]rpc.Level{}
	for _, c := range ctl.State.Checks() {
		names[c.Name] = c.Level
	}
	if names["cluster"] != rpc.Fail || names["silence"] != rpc.Warn || names["slurm"] != rpc.OK {
		t.Errorf("%+v", ctl.State.Checks())
	}
}

// slurmctld passes the licences in every release: a job that asks for nothing costs no question.
func TestAsksForNothing(t *testing.T) {
	ctl := newRig(t, jobstest.NewSite())
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, rpc.JobRun{Job: "7", Licences: new("")}); err != nil || a.Outcome != rpc.JobNone || ctl.Slurm.Asked != 0 {
		t.Errorf("%+v, %v", a, err)
	}
}

// Slurm kills an interactive job that finds no room, with words about the node's boot. Its user is told the reason before.
func TestNoRoomInteractive(t *testing.T) {
	st := jobstest.NewSite()
	st.Refuse = lease.Errorf(lease.NoRoom, "no GPU has 50%% left")
	ctl := newRig(t, st)
	j := jobstest.Job("7")
	j.Batch = false
	ctl.Slurm.Set(j)
	a, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(j))
	ctl.wg.Wait() // for the comment
	if err != nil || a.Outcome != rpc.JobRequeue || ctl.Slurm.Comments["7"] != "sluice: no room: no GPU has 50% left; killed, being interactive" {
		t.Errorf("%v, %+v, %q", err, a, ctl.Slurm.Comments)
	}
	if n := ctl.Slurm.Notified; len(n) != 1 || !strings.HasPrefix(n[0], "7: sluice: no room for this job: no GPU has 50% left. The nodes are well.") {
		t.Errorf("told: %q", n)
	}
}

// A job with an idle lease says so in its AdminComment, once for each time, if the owner's site wants to know.
func TestIdleComment(t *testing.T) {
	st := jobstest.NewSite()
	ctl := newRig(t, st)
	idle := func(id, job string, noted bool) lease.Status {
		return lease.Status{Lease: lease.Lease{ID: id, State: lease.Granted, Request: lease.Request{Key: lease.Key{Cluster: "cluster", Job: job, Node: "n1"}}}, Idle: time.Hour, IdleNoted: noted}
	}
	look := func(want string, all ...lease.Status) {
		t.Helper()
		st.Set(func() { st.Extra = all })
		ctl.Reconcile(t.Context())
		ctl.wg.Wait()
		if got := ctl.Slurm.Comments["7"]; !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for _, id := range []string{"7", "8"} {
		ctl.Slurm.Set(jobstest.Job(id))
	}
	const text = "sluice: idle: its GPU on g1 has had no work from node n1 since 2"
	look("", idle("a", "7", false), idle("b", "run-1", true))
	look(text, idle("a", "7", true))
	ctl.Slurm.Comments["7"] = "another's"
	look("another's", idle("a", "7", true)) // it has been said
	look("another's", idle("a", "7", false))
	look(text, idle("a", "7", true)) // and again
	ctl.Slurm.Comments["7"] = ""
	ctl.State.SetSettings(jobs.Settings{Report: false})
	look("", idle("c", "7", true))
}

func TestNoRoom(t *testing.T) {
	st := jobstest.NewSite()
	st.Refuse = lease.Errorf(lease.NoRoom, "no GPU has 50%% left")
	ctl := newRig(t, st)
	ctl.Slurm.Set(jobstest.Job("7"))
	a, err := ctl.PrologController(t.Context(), rpc.Peer{}, jobstest.RunOf(jobstest.Job("7")))
	ctl.wg.Wait() // for the comment
	if err != nil || a.Outcome != rpc.JobRequeue || !strings.Contains(a.Reason, "50% left") || ctl.Slurm.Comments["7"] != "sluice: requeued: no GPU has 50% left" {
		t.Errorf("%+v, %v, %v", a, err, ctl.Slurm.Comments)
	}
	// However often it has tried, that is one line of the audit log.
	if len(st.Refusals) != 1 || !strings.HasPrefix(st.Refusals[0], "7 of 1000: no GPU has 50% left, ") || strings.HasSuffix(st.Refusals[0], ", 0 times") {
		t.Errorf("refusals: %q", st.Refusals)
	}
}

func TestSlurmAway(t *testing.T) {
	ctl := newRig(t, jobstest.NewSite())
	ctl.Slurm.Fail(errors.New("connect failure"))
	run := jobstest.RunOf(jobstest.Job("9"))
	run.Licences = new("rgpu:50")
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, run); err != nil || a.Outcome != rpc.JobNone {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestWhoMay(t *testing.T) {
	run := rpc.JobRun{Job: "7"}
	elsewhere := Elsewhere{Node: "n1", User: 64030}
	for _, c := range []struct {
		s    rpc.ControllerJobs
		p    rpc.Peer
		want lease.Code
	}{
		{newRig(t, jobstest.NewSite()), rpc.Peer{UID: 1000}, lease.Denied},
		{elsewhere, rpc.Peer{UID: 1000}, lease.Denied},
		{elsewhere, rpc.Peer{}, lease.Invalid},
		{elsewhere, rpc.Peer{UID: 64030}, lease.Invalid},
	} {
		if _, err := c.s.PrologController(t.Context(), c.p, run); lease.CodeOf(err) != c.want {
			t.Errorf("%+v reserves: %v", c.p, err)
		}
		if _, err := c.s.EpilogController(t.Context(), c.p, run); lease.CodeOf(err) != c.want {
			t.Errorf("%+v ends: %v", c.p, err)
		}
	}
}

// PrologSlurmctld hears in time that there is no room, even if the site lets jobs wait for longer and slurmctld is busy.
func TestRequeueInTime(t *testing.T) {
	st := jobstest.NewSite()
	st.Refuse = lease.Errorf(lease.NoRoom, "no GPU has 50%% left")
	ctl := newRig(t, st)
	ctl.cfg.Slurm = &busySlurm{Fake: ctl.Slurm}
	set := jobstest.Settings
	set.RoomWait = time.Minute
	ctl.State.SetSettings(set)
	ctl.Slurm.Set(jobstest.Job("7"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if a, err := ctl.PrologController(ctx, rpc.Peer{}, jobstest.RunOf(jobstest.Job("7"))); err != nil || a.Outcome != rpc.JobRequeue || ctx.Err() != nil {
		t.Errorf("%+v, %v, %v", a, err, ctx.Err())
	}
}
