package slurmconf

import (
	"fmt"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
)

// Where the files of a package are.
const (
	Scripts = "/usr/lib/sluice/slurm"
	// TableName is the file of Lua's table, beside slurm.conf.
	TableName = "sluice_pools.lua"
)

// Conf is the lines that a site adds to slurm.conf, with the reasons.
func (t Table) Conf(cfg *config.Config) []byte {
	var counts, tres []string
	all := t.Licences()
	for _, l := range sorted(all) {
		counts = append(counts, fmt.Sprintf("%s:%d", l, all[l]))
		name, _, _ := strings.Cut(l, "@")
		tres = append(tres, "license/"+name)
	}
	local := func(l string) bool { return !strings.Contains(l, "@") }
	var here, remote []string
	for _, c := range counts {
		if local(c) {
			here = append(here, c)
		} else {
			remote = append(remote, c)
		}
	}
	var b strings.Builder
	p := func(format string, a ...any) { fmt.Fprintf(&b, format+"\n", a...) }
	p("# What Sluice needs in the slurm.conf of cluster %s. Made by `sluice slurm conf`.", cfg.Cluster)
	p("# A key that is a list takes ours besides, with a comma. A script of the site's, as its Prolog, gets our line inside.")
	p("")
	p("# The request: --gres=%s:50. Nodes whose jobs may ask have the line below added to", Gres)
	p("# their Gres=; it is a ceiling and counts nothing, and needs no gres.conf.")
	p("GresTypes=%s", Gres)
	p("#NodeName=... Gres=%s", t.NodeGres())
	p("")
	p("# The pool: what jobs wait for and are accounted by. 1 is 1 percent of a GPU.")
	if len(here) > 0 {
		p("Licenses=%s", strings.Join(here, ","))
	}
	for _, r := range remote {
		name, count, _ := strings.Cut(r, ":")
		res, server, _ := strings.Cut(name, "@")
		p("# %s is a licence of several clusters, made once in the accounting:", name)
		p("#   sacctmgr add resource name=%s server=%s count=%s type=license cluster=%s percentallowed=100", res, server, count, cfg.Cluster)
	}
	p("")
	p("# With slurmdbd only: slurmctld does not start with it otherwise.")
	p("AccountingStorageTRES=%s", strings.Join(tres, ","))
	p("")
	p("# Charges the pool for what jobs ask; job_submit.lua is beside this file.")
	p("JobSubmitPlugins=lua")
	p("")
	p("# Contain: each node of a job runs its Prolog at the start, and the daemon sees which jobs live.")
	p("PrologFlags=Contain")
	for _, h := range hooks {
		p("%s=%s/%s.sh", h.key, Scripts, h.file)
	}
	p("")
	p("# Drains a node that an administrator has to mend before its jobs can have fractions.")
	p("#HealthCheckProgram=%s/healthcheck.sh", Scripts)
	p("#HealthCheckInterval=60")
	p("")
	p("# A dead node's licences go to the next job after this many seconds, and its GPUs after")
	p("# lease.silence (%v) of sluice.yaml, which must be less.", cfg.Lease.Silence)
	p("#SlurmdTimeout=%d", int(cfg.Lease.Silence.Seconds())+60)
	return []byte(b.String())
}

// hooks are Slurm's four scripts.
var hooks = []struct{ key, file string }{
	{"Prolog", "prolog"}, {"Epilog", "epilog"}, {"PrologSlurmctld", "prolog-ctld"}, {"EpilogSlurmctld", "epilog-ctld"},
}
