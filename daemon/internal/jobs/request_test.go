package jobs_test

import (
	"context"
	"errors"
	"fmt"
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

// sizes is a pool of one GPU, as it was heard to be and as it is now, in bytes.
type sizes struct{ heard, now uint64 }

func (s sizes) GPUs(_ context.Context, _ string, now bool) ([][]lease.GPU, error) {
	g := lease.GPU{Name: "NVIDIA H200", Mem: s.heard}
	if now {
		g.Mem = s.now
	}
	return [][]lease.GPU{nil, {g}}, nil
}

// Nothing is refused by what was heard a while ago.
func TestSizeNow(t *testing.T) {
	for _, c := range []struct {
		heard, now uint64
		refused    string
	}{{80, 80, ""}, {40, 80, ""}, {20, 80, ""}, {40, 40, "cost 75 licences"}, {20, 20, "has 20480 MiB"}, {0, 0, "no GPU can be seen"}} {
		j := slurm.Job{ID: "7", Gres: []slurm.Gres{{Name: "rgpu", Count: 50}}, Licences: slurm.Counts{"rgpu": 50}}
		j.Nodes = []string{"n1"}
		_, err := jobs.Request(t.Context(), jobstest.Settings, sizes{c.heard << 30, c.now << 30}, "c", j, rpc.JobRun{Job: "7", Options: map[string]string{"mem": "30G"}})
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("heard %d GiB, now %d: %v", c.heard, c.now, err)
		}
	}
}

// What is asked of the pool, by the job's record and its user's options.
func TestRequest(t *testing.T) {
	pools := &jobstest.Host{Site: jobstest.NewSite()}
	type opts map[string]string
	for _, c := range []struct {
		name     string
		nodes    int
		gres     string
		licences string
		others   string
		options  opts
		want     string // PERCENTS MEM POOL TYPE POLICY PLACE, or what the refusal says
	}{
		{"half", 1, "gres:rgpu:50", "rgpu:50", "", nil, "[50] 0 default   "},
		{"whole and a rest", 1, "gres:rgpu:250", "rgpu:250", "", nil, "[100 100 50] 0 default   "},
		{"nodes", 3, "gres/rgpu:20", "rgpu:60,matlab:1", "", nil, "[20] 0 default   "},
		{"two entries", 1, "gres:rgpu:20,gres:rgpu:30", "rgpu:50", "", nil, "[50] 0 default   "},
		{"type", 1, "gres:rgpu:H200:50", "rgpu:50,rgpu_h200:50", "", nil, "[50] 0 default h200  "},
		{"type without a licence of its own", 1, "gres:rgpu:a100:50", "rgpu:50", "", nil, "[50] 0 default a100  "},
		{"another pool", 1, "gres:rgpu:50", "rgpu_small:50", "", opts{"pool": "small"}, "[50] 0 small   "},
		{"by licence alone", 2, "", "rgpu:100", "", nil, "[50] 0 default   "},
		{"memory below the share", 1, "gres:rgpu:50", "rgpu:50", "", opts{"mem": "20G"}, "[50] 20480 default   "},
		{"memory above, charged", 2, "gres:rgpu:10", "rgpu:100", "", opts{"mem": "50G"}, "[10] 51200 default   "},
		{"each fraction", 1, "gres:rgpu:150", "rgpu:160", "", opts{"mem": "60G"}, "[100 50] 61440 default   "},
		{"policy and spread", 1, "gres:rgpu:50", "rgpu:50", "", opts{"policy": "fixed", "spread": "1", "report": "1"}, "[50] 0 default  fixed spread"},

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
		{"pool forged", 1, "gres:rgpu:50", "rgpu:50", "", opts{"pool": "small"}, "pool default"},
		{"memory not charged", 1, "gres:rgpu:10", "rgpu:10", "", opts{"mem": "50G"}, "--gres=rgpu:50"},
		{"memory of no GPU", 1, "gres:rgpu:100", "rgpu:100", "", opts{"mem": "101G"}, "ask for less"},
		{"no memory", 1, "gres:rgpu:10", "rgpu:10", "", opts{"mem": "0"}, "2M to 16T"},
		{"no size", 1, "gres:rgpu:10", "rgpu:10", "", opts{"mem": "-1\n"}, "2M to 16T"},
		{"no policy", 1, "gres:rgpu:10", "rgpu:10", "", opts{"policy": "first"}, "best-effort, equal, equal-lend, fixed, fixed-lend"},
		{"no time", 1, "gres:rgpu:10", "rgpu:10", "", opts{"grace": "25h"}, "up to 24h"},
		{"no such type seen", 1, "gres:rgpu:a100:10", "rgpu:10", "", opts{"mem": "1G"}, "no GPU can be seen"},
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
		q, err := jobs.Request(t.Context(), jobstest.Settings, pools, "cluster", j, rpc.JobRun{Job: "7", Options: c.options})
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
	for value, want := range map[string]time.Duration{"": 0, "0": lease.NoGrace, "0s": lease.NoGrace, "90s": 90 * time.Second, "24h": lease.MaxGrace} {
		j := jobstest.Job("7")
		if q, err := jobs.Request(t.Context(), jobstest.Settings, pools, "cluster", j, rpc.JobRun{Job: "7", Options: opts{"grace": value}}); err != nil || q.Grace != want {
			t.Errorf("--rgpu-grace=%s: %v, %v", value, q.Grace, err)
		}
	}
	// What a partition gives is charged as what a user asks for.
	j := jobstest.Job("7")
	j.Partition = "debug"
	q, err := jobs.Request(t.Context(), jobstest.Settings, pools, "cluster", j, rpc.JobRun{Job: "7", Account: "a\nb", Name: strings.Repeat("ü", 300)})
	if err != nil || q.Policy != lease.Equal || q.Place != lease.Spread || q.Fractions[0].Mem != 4<<30 || q.Account != "a b" || len(q.JobName) > form.MaxName {
		t.Errorf("%+v, %v", q, err)
	}
	// Charged for 1 GiB, which the user asked for and which is not told: a task asked
	// before the Prolog.
	j.Gres[0].Count, j.Licences = 1, slurm.Counts{"rgpu": 1}
	if q, err := jobs.Request(t.Context(), jobstest.Settings, pools, "cluster", j, rpc.JobRun{Job: "7"}); lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "the partition's memory") {
		t.Errorf("memory that no licence pays for: %+v, %v", q.Fractions, err)
	}
	if q, err := jobs.Request(t.Context(), jobstest.Settings, pools, "cluster", j, rpc.JobRun{Job: "7", Options: opts{"mem": "1G"}}); err != nil || q.Fractions[0].Mem != 1<<30 {
		t.Errorf("%+v, %v", q.Fractions, err)
	}
}

func FuzzRequest(f *testing.F) {
	f.Add("gres:rgpu:h200:50", "rgpu:50,rgpu_h200:50", "20G", "fixed", "default", 2)
	f.Add("gres/rgpu:250,gres:gpu:1", "rgpu:500", "", "", "", 1)
	pools := &jobstest.Host{Site: jobstest.NewSite()}
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
		q, err := jobs.Request(t.Context(), jobstest.Settings, pools, "c", j, rpc.JobRun{Options: map[string]string{"mem": mem, "policy": policy, "pool": pool}})
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
		if len(q.Fractions) == 0 || len(q.Fractions) > form.MaxDevices || sum*uint64(len(j.Nodes)) > l[jobstest.Settings.Pools[q.Pool].Licence] {
			t.Errorf("more than the licences pay for: %+v of %v", q, l)
		}
	})
}
