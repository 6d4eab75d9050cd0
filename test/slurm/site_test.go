package slurm

import (
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestSite: the command that makes a site's configuration says what this cluster has, and the one that checks it
// finds nothing wrong, on slurmctld's machine and on a node; a new table counts from the next job on.
func TestSite(t *testing.T) {
	s := cluster(t)
	sluice := func(n *lab.Node, args ...string) string {
		t.Helper()
		out, err := n.Run(s.ctx, lab.Root, append([]string{"sluice", "slurm"}, args...)...)
		if err != nil && args[0] != "check" { // whose status may be that of a warning
			t.Fatalf("sluice slurm %s: %v %s", args[0], err, out)
		}
		return out
	}
	conf := sluice(s.Ctl, "conf")
	for _, want := range []string{"GresTypes=rgpu", "Gres=rgpu:simulated:no_consume:1600", "Licenses=rgpu:300,rgpu_simulated:300", "JobSubmitPlugins=lua"} {
		if !strings.Contains(conf, want) {
			t.Errorf("sluice slurm conf does not say %s:\n%s", want, conf)
		}
	}
	for _, n := range []*lab.Node{s.Ctl, s.Nodes[2]} {
		out := sluice(n, "check")
		if strings.Contains(out, "\nfail") || !strings.Contains(out, "\nok     licences") || !strings.Contains(out, "\nok     plug-in") {
			t.Errorf("sluice slurm check on %s:\n%s", n.Name, out)
		}
	}

	const table = "/etc/slurm/sluice_pools.lua"
	put := func(text string) {
		t.Helper()
		if _, err := s.Ctl.RunIn(s.ctx, lab.Root, text, "tee", table); err != nil {
			t.Fatal(err)
		}
	}
	was := sluice(s.Ctl, "lua")
	t.Cleanup(func() { put(was) })
	put(strings.ReplaceAll(was, "gpus = 3", "gpus = 1"))
	if out, err := s.alice("sbatch", "--hold", "--gres=rgpu:101", "--wrap=true"); err == nil || !strings.Contains(err.Error()+out, "give 1 to 100 percent") {
		t.Errorf("with one GPU in the table: %s %v", out, err)
	}
	if out := sluice(s.Ctl, "check"); !strings.Contains(out, "is not that of the pools") {
		t.Errorf("an old table is not found:\n%s", out)
	}
	sluice(s.Ctl, "lua", "--out", table)
	job := s.sbatch("true", "--hold", "--gres=rgpu:101")
	_, err := s.alice("scancel", job)
	s.must(err)
}
