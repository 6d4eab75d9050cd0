package slurm

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestLimits: what Slurm limits and accounts is license/rgpu, by QOS, by account and in sacct.
func TestLimits(t *testing.T) {
	s := cluster(t)
	modify := func(args ...string) {
		t.Helper()
		_, err := s.Ctl.Run(s.ctx, lab.Root, append([]string{"sacctmgr", "-i", "modify"}, args...)...)
		s.must(err)
	}
	limit := func(kind string, args []string, reason string) {
		t.Helper()
		set := func(v string) { modify(append(append([]string{}, args...), "set", kind+"=license/rgpu="+v)...) }
		set("100")
		defer set("-1")
		first := s.running("--gres=rgpu:60")
		second := s.sbatch(s.holding(), "--gres=rgpu:60")
		s.until(waitLong, "the second job waits for "+reason, func() error {
			j, err := s.Job(s.ctx, second)
			if err == nil && !strings.Contains(j["Reason"], reason) {
				err = fmt.Errorf("%s (%s)", j["JobState"], j["Reason"])
			}
			return err
		})
		s.release(first, second)
		s.done(first)
		s.done(second)
	}
	limit("MaxTRESPerUser", []string{"qos", "normal"}, "QOS")
	limit("GrpTRES", []string{"account", "research"}, "Assoc")

	job := s.running("--gres=rgpu:50", "-N2")
	s.release(job)
	s.done(job)
	s.until(waitLong, "sacct counts what was charged", func() error {
		out, err := s.alice("sacct", "-X", "-n", "-P", "-j", job, "-o", "state,user,account,alloctres")
		if err == nil && !(strings.HasPrefix(out, "COMPLETED|alice|research|") && strings.Contains(out, "license/rgpu=100")) {
			err = fmt.Errorf("sacct: %s", out)
		}
		return err
	})
}

// TestShrink: what an owner that is gone would serve is held back, so that jobs wait instead of being refused, and
// is free again when it returns.
func TestShrink(t *testing.T) {
	s := cluster(t)
	reserved := func(want int) {
		t.Helper()
		s.until(waitLong, fmt.Sprintf("%d units are held back", want), func() error {
			all, err := s.Licences(s.ctx)
			if err == nil && (all["rgpu"].Reserved != want || all["rgpu_simulated"].Reserved != want) {
				err = fmt.Errorf("%+v", all)
			}
			return err
		})
	}
	owner := s.Nodes[1]
	s.must(owner.Stop("sluiced"))
	reserved(100)
	large := s.sbatch(s.program("vecadd"), "--gres=rgpu:300", "-w", s.Nodes[2].Name)
	s.until(waitLong, "the large job waits for licences", func() error {
		j, err := s.Job(s.ctx, large)
		if err == nil && (j["JobState"] != "PENDING" || j["Reason"] != "Licenses") {
			err = fmt.Errorf("%s (%s)", j["JobState"], j["Reason"])
		}
		return err
	})
	contains(t, s.done(s.sbatch(s.program("vecadd"), "--gres=rgpu:100", "-w", s.Nodes[0].Name)), "PASS")
	s.must(owner.StartSluiced(s.ctx))
	reserved(0)
	contains(t, s.done(large), "PASS")

	// What users take outside of jobs is held back too.
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	run := s.Nodes[2].Command(ctx, lab.Bob, "sluice", "run", "--fraction", "40", "--", s.program("steady"), "20")
	s.must(run.Start())
	reserved(40)
	s.Nodes[2].Signal("steady", 15)
	s.must(run.Wait())
	reserved(0)
}

// TestPools: two pools with a licence each; a partition's jobs are served by its pool.
func TestPools(t *testing.T) {
	o := options()
	o.Accounting, o.Nodes = false, []lab.NodeSpec{{GPUs: 1}, {GPUs: 1, Mem: "4G"}, {}}
	o.Licences = "rgpu:100,rgpu_small:100"
	o.SlurmLines = []string{
		"PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:64",
		"PartitionName=tiny Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=FORCE:64",
	}
	o.Sluice = map[string]string{"partitions.tiny.pool": "small", "slurm.reconcile": "5s", "lease.renew": "2s", "lease.silence": "40s"}
	l, err := lab.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	s := &site{l, t, ctx}
	defer func() {
		if t.Failed() {
			t.Logf("%s", l.Logs(12))
		}
		s.must(l.Down())
	}()
	l.Options.Sluice["pools.default.owners"] = "[" + l.Nodes[0].Owner() + "]"
	l.Options.Sluice["pools.small.owners"] = "[" + l.Nodes[1].Owner() + "]"
	for _, n := range append([]*lab.Node{l.Ctl}, l.Nodes...) {
		s.must(l.WriteSluice(n))
	}
	s.must(l.Boot(ctx))

	for _, c := range []struct {
		args    string
		licence string
		owner   int
		mib     uint64
		charged int
	}{
		{"--gres=rgpu:50", "rgpu", 0, gpuMiB / 2, 50},
		{"--gres=rgpu:50 -p tiny", "rgpu_small", 1, gpuMiB / 4, 50},
		{"--gres=rgpu:50 --rgpu-pool=small", "rgpu_small", 1, gpuMiB / 4, 50},
		{"--gres=rgpu:50 -p tiny --rgpu-pool=default", "rgpu", 0, gpuMiB / 2, 50},
		// Half of the small GPU's memory is a quarter of a large one's.
		{"--gres=rgpu:10 -p tiny --rgpu-mem=2G", "rgpu_small", 1, 2048, 50},
	} {
		job := s.running(strings.Fields(c.args)...)
		if got := s.used(c.licence); got != c.charged {
			t.Errorf("%s: %d of %s are charged, want %d", c.args, got, c.licence, c.charged)
		}
		for _, ls := range s.leases(job) {
			if g := ls.Grants[0]; g.Owner != l.Nodes[c.owner].Name || g.Mem>>20 != c.mib {
				t.Errorf("%s: granted %d MiB of %s, want %d of %s", c.args, g.Mem>>20, g.Owner, c.mib, l.Nodes[c.owner].Name)
			}
		}
		s.release(job)
		s.done(job)
		s.clean()
	}
	// A full pool keeps nobody from the other.
	full := s.running("--gres=rgpu:100", "-p", "tiny")
	waiting := s.sbatch(s.program("vecadd"), "--gres=rgpu:100", "-p", "tiny")
	contains(t, s.done(s.sbatch(s.program("vecadd"), "--gres=rgpu:100")), "PASS")
	if j := s.wait(waiting, "PENDING"); j["Reason"] != "Licenses" {
		t.Errorf("it waits for %s", j["Reason"])
	}
	s.release(full)
	s.done(full)
	contains(t, s.done(waiting), "PASS")
	if _, err := s.alice("sbatch", "--gres=rgpu:200", "-p", "tiny", "--wrap=true"); err == nil || !strings.Contains(err.Error(), "1 to 100") {
		t.Errorf("two GPUs of a pool of one: %v", err)
	}
	s.clean()
}
