package jobs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm/slurmtest"
	"github.com/sluice-hpc/sluice/internal/form"
)

// What is asked of the pool, by the job's record and its user's wishes.
func TestRequest(t *testing.T) {
	r := newRig(t, newSite(), "n1")
	type wish map[string]string
	for _, c := range []struct {
		name     string
		nodes    int
		gres     string
		licences string
		others   string
		wishes   wish
		want     string // PERCENTS MEM POOL TYPE POLICY PLACE, or what the refusal says
	}{
		{"half", 1, "gres:rgpu:50", "rgpu:50", "", nil, "[50] 0 default   "},
		{"whole and a rest", 1, "gres:rgpu:250", "rgpu:250", "", nil, "[100 100 50] 0 default   "},
		{"nodes", 3, "gres/rgpu:20", "rgpu:60,matlab:1", "", nil, "[20] 0 default   "},
		{"two entries", 1, "gres:rgpu:20,gres:rgpu:30", "rgpu:50", "", nil, "[50] 0 default   "},
		{"type", 1, "gres:rgpu:H200:50", "rgpu:50,rgpu_h200:50", "", nil, "[50] 0 default h200  "},
		{"type without a licence of its own", 1, "gres:rgpu:a100:50", "rgpu:50", "", nil, "[50] 0 default a100  "},
		{"another pool", 1, "gres:rgpu:50", "rgpu_small:50", "", wish{"pool": "small"}, "[50] 0 small   "},
		{"by licence alone", 2, "", "rgpu:100", "", nil, "[50] 0 default   "},
		{"memory below the share", 1, "gres:rgpu:50", "rgpu:50", "", wish{"mem": "20G"}, "[50] 20480 default   "},
		{"memory above, charged", 2, "gres:rgpu:10", "rgpu:100", "", wish{"mem": "50G"}, "[10] 51200 default   "},
		{"each fraction", 1, "gres:rgpu:150", "rgpu:160", "", wish{"mem": "60G"}, "[100 50] 61440 default   "},
		{"policy and spread", 1, "gres:rgpu:50", "rgpu:50", "", wish{"policy": "fixed", "spread": "1", "report": "1"}, "[50] 0 default  fixed spread"},

		{"no licence", 1, "gres:rgpu:50", "", "", nil, "JobSubmitPlugins"},
		{"too few", 2, "gres:rgpu:50", "rgpu:50", "", nil, "want 100"},
		{"too few of the type", 1, "gres:rgpu:h200:50", "rgpu:50,rgpu_h200:5", "", nil, "takes 50"},
		{"two pools", 1, "gres:rgpu:50", "rgpu:50,rgpu_small:50", "", nil, "pools default and small"},
		{"unknown licence", 1, "gres:rgpu:50", "rgpu:50,rgpu_x:1", "", nil, "rgpu_x belongs to no pool"},
		{"two types", 1, "gres:rgpu:h200:20,gres:rgpu:a100:20", "rgpu:40,rgpu_h200:40", "", nil, "ask for one type"},
		{"too much", 1, "gres:rgpu:1700", "rgpu:1700", "", nil, "1 to 1600"},
		{"far too much", 1, "gres:rgpu:4194304k", "rgpu:50", "", nil, "1 to 1600"},
		{"odd licences", 2, "", "rgpu:51", "", nil, "same number"},
		{"by task", 1, "gres:rgpu:50", "rgpu:50", "gres:rgpu:5", nil, "--gres=rgpu:PERCENT"},
		{"pool forged", 1, "gres:rgpu:50", "rgpu:50", "", wish{"pool": "small"}, "pool default"},
		{"memory not charged", 1, "gres:rgpu:10", "rgpu:10", "", wish{"mem": "50G"}, "--gres=rgpu:50"},
		{"memory of no GPU", 1, "gres:rgpu:100", "rgpu:100", "", wish{"mem": "101G"}, "ask for less"},
		{"no memory", 1, "gres:rgpu:10", "rgpu:10", "", wish{"mem": "0"}, "2M to 16T"},
		{"no size", 1, "gres:rgpu:10", "rgpu:10", "", wish{"mem": "-1\n"}, "2M to 16T"},
		{"no policy", 1, "gres:rgpu:10", "rgpu:10", "", wish{"policy": "first"}, "best-effort, equal, equal-lend, fixed, fixed-lend"},
		{"no such type seen", 1, "gres:rgpu:a100:10", "rgpu:10", "", wish{"mem": "1G"}, "no GPU can be seen"},
	} {
		gres, err1 := slurm.ParseGres(c.gres)
		licences, err2 := slurm.ParseLicences(c.licences)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		j := slurm.Job{ID: "7", UID: 1000, GID: 1000, Partition: "main", Gres: gres, Licences: licences}
		for i := range c.nodes {
			j.Nodes = append(j.Nodes, fmt.Sprintf("n%d", i+1))
		}
		if c.others != "" {
			j.Others = []string{c.others}
		}
		q, err := r.request(t.Context(), j, rpc.JobRun{Job: "7", Wishes: c.wishes})
		got := ""
		if err == nil {
			var p []uint32
			for _, f := range q.Fractions {
				p = append(p, f.Percent)
			}
			got = fmt.Sprintf("%v %d %s %s %s %s", p, q.Fractions[0].Mem>>20, q.Pool, q.Type, q.Policy, q.Place)
		}
		if err == nil && got != c.want || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %q, %v; want %q", c.name, got, err, c.want)
		}
	}
	// What a partition gives is charged as what a user wishes for.
	j := job("7")
	j.Partition = "debug"
	q, err := r.request(t.Context(), j, rpc.JobRun{Job: "7", Account: "a\nb", Name: strings.Repeat("ü", 300)})
	if err != nil || q.Policy != lease.Equal || q.Place != lease.Spread || q.Fractions[0].Mem != 4<<30 || q.Account != "a b" || len(q.JobName) > form.MaxName {
		t.Errorf("%+v, %v", q, err)
	}
	// Charged for 1 GiB, which the user wished for and which is not told: a task asked
	// before the Prolog.
	j.Gres[0].Count, j.Licences = 1, slurm.Counts{"rgpu": 1}
	if q, err := r.request(t.Context(), j, rpc.JobRun{Job: "7"}); codeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "the partition's memory") {
		t.Errorf("memory that no licence pays for: %+v, %v", q.Fractions, err)
	}
	if q, err := r.request(t.Context(), j, rpc.JobRun{Job: "7", Wishes: wish{"mem": "1G"}}); err != nil || q.Fractions[0].Mem != 1<<30 {
		t.Errorf("%+v, %v", q.Fractions, err)
	}
}

func FuzzRequest(f *testing.F) {
	f.Add("gres:rgpu:h200:50", "rgpu:50,rgpu_h200:50", "20G", "fixed", "default", 2)
	f.Add("gres/rgpu:250,gres:gpu:1", "rgpu:500", "", "", "", 1)
	s := &Service{cfg: Config{Cluster: "c", Host: &fakeHost{site: newSite()}}, set: settingsOf}
	f.Fuzz(func(t *testing.T, gres, licences, mem, policy, pool string, nodes int) {
		g, err1 := slurm.ParseGres(gres)
		l, err2 := slurm.ParseLicences(licences)
		if err1 != nil || err2 != nil {
			return
		}
		j := slurm.Job{ID: "7", Gres: g, Licences: l}
		for range min(max(nodes, 0), 64) {
			j.Nodes = append(j.Nodes, "n")
		}
		q, err := s.request(t.Context(), j, rpc.JobRun{Wishes: map[string]string{"mem": mem, "policy": policy, "pool": pool}})
		if err != nil {
			return
		}
		var sum uint64
		for _, f := range q.Fractions {
			if f.Percent < 1 || f.Percent > 100 || f.Mem > 100<<30 {
				t.Errorf("%+v", q)
			}
			sum += max(uint64(f.Percent), f.Mem/(1<<30)) // a GPU here has 100 GiB
		}
		if len(q.Fractions) == 0 || len(q.Fractions) > form.MaxDevices || sum*uint64(len(j.Nodes)) > l[settingsOf.Pools[q.Pool].Licence] {
			t.Errorf("more than the licences pay for: %+v of %v", q, l)
		}
	})
}

// The end waits for what still runs of the job, and no longer.
func TestEnd(t *testing.T) {
	st := newSite()
	ctl := newRig(t, st, "ctl")
	j := job("7")
	ctl.slurm.Set(j)
	if a, err := ctl.PrologController(t.Context(), rpc.Peer{}, runOf(j)); err != nil || a.Outcome != rpc.JobGranted {
		t.Fatalf("%+v, %v", a, err)
	}
	look := func() {
		ctl.mu.Lock()
		waiting := map[string]over{}
		for k, o := range ctl.overs {
			waiting[k] = o
		}
		ctl.mu.Unlock()
		ctl.endOver(t.Context(), waiting)
	}
	j.State = "COMPLETING"
	ctl.slurm.Set(j)
	if _, err := ctl.EpilogController(t.Context(), rpc.Peer{UID: 64030}, runOf(j)); err != nil {
		t.Fatal(err)
	}
	look()
	if st.count() != 1 {
		t.Fatal("a job that is completing has lost its lease")
	}
	ctl.slurm.Fail(errors.New("connect failure"))
	look()
	if st.count() != 1 {
		t.Fatal("that nothing is known has ended a job")
	}
	ctl.slurm.Fail(nil)
	ctl.restart("boot-1") // which forgets nothing
	if len(ctl.overs) != 1 {
		t.Fatalf("%v after the restart", ctl.overs)
	}
	j.State, j.Nodes = "NODE_FAIL", nil
	ctl.slurm.Set(j)
	look()
	ctl.nextReport(t.Context())
	if st.count() != 0 || len(ctl.overs) != 0 || ctl.slurm.Comments["7"] != "used by 7" {
		t.Errorf("%d leases, %v, %q", st.count(), ctl.overs, ctl.slurm.Comments)
	}
	ctl.restart("boot-1")
	if len(ctl.overs) != 0 {
		t.Errorf("%v stay in the ledger", ctl.overs)
	}
	// Several at once, one of them gone from slurmctld's list.
	for _, id := range []string{"8", "9"} {
		j := job(id)
		ctl.slurm.Set(j)
		if _, err := ctl.PrologController(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
			t.Fatal(err)
		}
		if _, err := ctl.EpilogController(t.Context(), rpc.Peer{}, runOf(j)); err != nil {
			t.Fatal(err)
		}
	}
	c := job("8")
	c.State = "COMPLETING"
	ctl.slurm.Set(c)
	ctl.slurm.Lock()
	delete(ctl.slurm.All, "9")
	ctl.slurm.Unlock()
	look()
	if _, ok := ctl.overs["8"]; !ok || len(ctl.overs) != 1 || st.count() != 1 {
		t.Errorf("%v, %d leases", ctl.overs, st.count())
	}
}

func TestRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSite()
		fake := slurmtest.New()
		fake.Have["rgpu"] = slurm.Licence{Total: 200}
		s := &Service{
			cfg: Config{Cluster: "cluster", Controller: true, Host: &fakeHost{site: st}, Slurm: fake, Reconcile: time.Minute, Look: time.Second},
			log: slog.New(slog.DiscardHandler), set: settingsOf, jobs: map[string]*entry{}, overs: map[string]over{}, wake: make(chan struct{}, 1),
			checks: map[string]rpc.Check{}, suspects: map[string]string{}, absent: map[string]int{},
		}
		st.leases[lease.Key{Cluster: "cluster", Job: "5", Node: "n1"}] = lease.Lease{ID: "x", State: lease.Granted, Request: lease.Request{Key: lease.Key{Cluster: "cluster", Job: "5", Node: "n1", Incarnation: 5}}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		time.Sleep(90 * time.Second)
		if st.count() != 1 {
			t.Error("one look ended it")
		}
		time.Sleep(time.Minute)
		st.set(func() {
			if len(st.ended) != 1 || st.ended[0].Incarnation != 5 {
				t.Errorf("%v", st.ended)
			}
		})
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestReconcile(t *testing.T) {
	st := newSite()
	ctl := newRig(t, st, "ctl")
	put := func(id, job, node string, restart uint32) {
		k := lease.Key{Cluster: "cluster", Job: job, Node: node}
		r := lease.Request{Key: k, Restart: restart}
		r.Key.Incarnation = 5
		st.leases[k] = lease.Lease{ID: id, State: lease.Granted, Host: node, Request: r}
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
		ctl.slurm.Set(slurm.Job{ID: id, JobState: c})
	}
	ctl.Reconcile(t.Context())
	for range 3 { // not known is neither there nor gone
		ctl.slurm.Fail(errors.New("connect failure"))
		ctl.Reconcile(t.Context())
		ctl.slurm.Fail(nil)
	}
	if len(st.ended) != 0 {
		t.Fatalf("%v ended at the first look", st.ended)
	}
	ctl.Reconcile(t.Context())
	if st.count() != 4 {
		t.Errorf("%v", st.leases)
	}
	for _, id := range []string{"1", "4", "6", "run-abc"} {
		if _, ok := st.leases[lease.Key{Cluster: "cluster", Job: id, Node: "n1"}]; !ok {
			t.Errorf("job %s has lost its lease", id)
		}
	}
}

func TestHoldBack(t *testing.T) {
	st := newSite()
	ctl := newRig(t, st, "ctl")
	ctl.slurm.Have["rgpu"] = slurm.Licence{Total: 400}
	ctl.slurm.Have["rgpu_h200"] = slurm.Licence{Total: 200}
	g2 := rpc.PoolOwner{Name: "g2", Inventory: lease.Inventory{Owner: "g2", GPUs: []lease.GPU{{UUID: "c", Name: "A100", Healthy: true}, {UUID: "d", Name: "A100", Healthy: true}}}}
	st.pools[0].Owners = append(st.pools[0].Owners, g2)
	expect := func(what string, rgpu, h200 uint64) {
		t.Helper()
		ctl.Reconcile(t.Context())
		if got := ctl.slurm.Reserved["sluice_rgpu"]["rgpu"]; got != rgpu {
			t.Errorf("%s: %d rgpu held back, want %d", what, got, rgpu)
		}
		if got := ctl.slurm.Reserved["sluice_rgpu_h200"]["rgpu_h200"]; got != h200 {
			t.Errorf("%s: %d rgpu_h200 held back, want %d", what, got, h200)
		}
	}
	expect("all well", 0, 0)
	st.pools[0].Owners[0].Inventory.GPUs[1].Healthy = false
	expect("a GPU is ill", 100, 100)
	st.pools[0].Owners[0].Inventory.GPUs[1].Healthy = true
	expect("it is well again", 0, 0)
	st.pools[0].Owners[1] = rpc.PoolOwner{Name: "g2", Error: "does not answer"}
	expect("an owner restarts", 0, 0)
	expect("an owner is away", 200, 0)
	st.pools[0].Owners[1] = g2
	expect("it is back", 0, 0)
	grant := lease.Status{Lease: lease.Lease{ID: "r", State: lease.Granted, Request: lease.Request{Key: lease.Key{Cluster: "cluster", Job: "run-1"}}, Grants: []lease.Grant{{GPU: "a", Percent: 30}}}}
	other := lease.Status{Lease: lease.Lease{ID: "o", State: lease.Granted, Request: lease.Request{Key: lease.Key{Cluster: "other", Job: "7"}}, Grants: []lease.Grant{{GPU: "c", Percent: 20}}}}
	st.extra = []lease.Status{grant, other}
	expect("others use the pool", 50, 30)
	st.extra = nil
	ctl.slurm.Have["rgpu"] = slurm.Licence{Total: 1000}
	expect("slurm.conf has too many", 600, 0)
	ctl.slurm.Have["rgpu"] = slurm.Licence{Total: 10}
	expect("slurm.conf has fewer", 0, 0)
	delete(ctl.slurm.Have, "rgpu")
	ctl.Reconcile(t.Context())
	for _, c := range ctl.Checks() {
		if c.Name == "licences" && c.Level == rpc.Warn && strings.Contains(c.Text, "slurm.conf has no licence rgpu") {
			return
		}
	}
	t.Errorf("a licence that Slurm does not have: %+v", ctl.Checks())
}

func TestCompareConfig(t *testing.T) {
	ctl := newRig(t, newSite(), "ctl")
	ctl.slurm.Conf = map[string]string{"ClusterName": "lab", "SlurmdTimeout": "30 sec"}
	ctl.compareConfig(t.Context())
	names := map[string]rpc.Level{}
	for _, c := range ctl.Checks() {
		names[c.Name] = c.Level
	}
	if names["cluster"] != rpc.Fail || names["silence"] != rpc.Warn || names["slurm"] != rpc.OK {
		t.Errorf("%+v", ctl.Checks())
	}
}
