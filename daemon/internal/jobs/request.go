package jobs

import (
	"context"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/spank/options"
)

// asksFor says whether the licences of a job, as Slurm writes them, have one of ours.
func asksFor(licences string) bool { return form.HasLicence(licences) }

// asked is what a job asks for, as slurmctld has it.
func asked(j slurm.Job) bool {
	for name, n := range j.Licences {
		if form.IsLicence(name) && n > 0 {
			return true
		}
	}
	for _, g := range j.Gres {
		if g.Name == form.Gres && g.Count > 0 {
			return true
		}
	}
	return slices.ContainsFunc(j.Others, func(s string) bool { return strings.Contains(s, form.Gres) })
}

// request makes of a job what is asked for on each of its nodes; the key's node is left
// open. The pool and the amount are the licences', which users cannot forge; their
// wishes are checked against them. The error is for the user.
func (s *Service) request(ctx context.Context, j slurm.Job, run rpc.JobRun) (lease.Request, error) {
	set := s.settings()
	r := lease.Request{
		Key: lease.Key{Cluster: s.cfg.Cluster, Job: j.ID}, UID: j.UID, GID: j.GID, Restart: run.Restart,
		Account: line(run.Account), JobName: line(run.Name),
	}
	if r.UID == math.MaxUint32 || r.GID == math.MaxUint32 {
		return r, lease.Errorf(lease.Invalid, "uid %d, gid %d: that is nobody", r.UID, r.GID)
	}
	nodes := uint64(len(j.Nodes))
	if nodes == 0 {
		return r, lease.Errorf(lease.Over, "job %s has no nodes", j.ID)
	}
	percent, typ, err := perNode(j)
	if err != nil {
		return r, err
	}
	pool, units, err := poolOf(set, j.Licences)
	if err != nil {
		return r, err
	}
	if pool == "" {
		return r, lease.Errorf(lease.Invalid, "--gres=%s:%d holds no licence of a pool; the site's job_submit plug-in has to charge one: JobSubmitPlugins=lua", form.Gres, percent)
	}
	if percent == 0 { // asked for by --licenses alone, where the site lets users
		if units%nodes != 0 {
			return r, lease.Errorf(lease.Invalid, "%d licences on %d nodes: want the same number for each", units, nodes)
		}
		percent = units / nodes
	}
	if percent > form.MaxPercent {
		return r, lease.Errorf(lease.Invalid, "--gres=%s:%d: want 1 to %d percent on each node", form.Gres, percent, form.MaxPercent)
	}
	if percent > math.MaxUint64/nodes || percent*nodes > units {
		return r, lease.Errorf(lease.Invalid, "%d%% on each of %d nodes, and %d licences of pool %s: want %d; submit the job anew", percent, nodes, units, pool, percent*nodes)
	}
	if typ != "" {
		if l := set.Pools[pool].Types[typ]; l != "" && j.Licences[l] < percent*nodes {
			return r, lease.Errorf(lease.Invalid, "type %s: %d licences %s, and it takes %d; submit the job anew", typ, j.Licences[l], l, percent*nodes)
		}
	}
	r.Pool, r.Type = pool, typ
	for _, p := range form.Fractions(percent) {
		r.Fractions = append(r.Fractions, lease.Fraction{Percent: p})
	}
	return r, s.wishes(ctx, set, j, run, units/nodes, &r)
}

// perNode is what the gres request says, 0 if it says nothing.
func perNode(j slurm.Job) (percent uint64, typ string, _ error) {
	for _, o := range j.Others {
		if strings.Contains(o, form.Gres) {
			return 0, "", lease.Errorf(lease.Invalid, "%s by job, socket or task is not supported; use --gres=%s:PERCENT, which is by node", o, form.Gres)
		}
	}
	n := 0
	for _, g := range j.Gres {
		if g.Name != form.Gres || g.Count == 0 {
			continue
		}
		t := strings.ToLower(g.Type)
		if n++; n > 1 && t != typ {
			return 0, "", lease.Errorf(lease.Invalid, "GPUs of types %q and %q in one job; ask for one type, or for any", typ, t)
		}
		typ = t
		if percent += g.Count; g.Count > 1<<32 || percent > 1<<32 {
			return 0, "", lease.Errorf(lease.Invalid, "--gres=%s:%d: want 1 to %d percent on each node", form.Gres, g.Count, form.MaxPercent)
		}
	}
	return percent, typ, nil
}

// poolOf is the pool whose licences a job holds, and how many; "" for none.
func poolOf(set Settings, have slurm.Counts) (pool string, units uint64, _ error) {
	known := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(set.Pools)) {
		p := set.Pools[name]
		known[p.Licence] = true
		for _, l := range p.Types {
			known[l] = true
		}
		if have[p.Licence] == 0 {
			continue
		}
		if pool != "" {
			return "", 0, lease.Errorf(lease.Invalid, "licences of pools %s and %s in one job; ask for one", pool, name)
		}
		pool, units = name, have[p.Licence]
	}
	for l, n := range have {
		if form.IsLicence(l) && n > 0 && !known[l] {
			return "", 0, lease.Errorf(lease.Invalid, "licence %s belongs to no pool in sluice.yaml of this node; the same pools have to be on all nodes", l)
		}
	}
	return pool, units, nil
}

// wishes lays the partition's defaults and the user's options over a request for which
// units licences are held on each node.
func (s *Service) wishes(ctx context.Context, set Settings, j slurm.Job, run rpc.JobRun, units uint64, r *lease.Request) error {
	def := set.Partitions[j.Partition]
	r.Policy, r.Lend, r.Place = def.Policy, def.Lend, def.Place
	mem, whose := def.Mem, "the partition's memory"
	if p := run.Wishes["pool"]; p != "" && p != r.Pool {
		return lease.Errorf(lease.Invalid, "--rgpu-pool=%s, but the licences are those of pool %s; submit the job anew, with --rgpu-pool on its own command line or #SBATCH line", line(p), r.Pool)
	}
	if err := options.CheckPassed(run.Wishes); err != nil {
		return lease.Errorf(lease.Invalid, "%s", line(err.Error()))
	}
	if p := run.Wishes["policy"]; p != "" {
		policy, lend, err := lease.ParsePolicy(p)
		if err != nil {
			return lease.Errorf(lease.Invalid, "--rgpu-policy: %v", err)
		}
		if r.Policy = policy; lend != lease.LendSite {
			r.Lend = lend
		}
	}
	if run.Wishes["spread"] != "" {
		r.Place = lease.Spread
	}
	if m := run.Wishes["mem"]; m != "" {
		mib, _ := options.MiB(m)
		mem, whose = mib<<20, "--rgpu-mem"
	}
	// The partition's too: a job may have been charged for less, that its user wished for
	// and that is not told here.
	if mem > 0 {
		if err := s.charged(ctx, r, mem, units, whose); err != nil {
			return err
		}
	}
	for i := range r.Fractions {
		r.Fractions[i].Mem = mem
	}
	return nil
}

// blind refuses what cannot be known when no Prolog has told the user's wishes: how much
// memory the licences beyond the share are for.
func (s *Service) blind(j slurm.Job, r lease.Request) error {
	set := s.settings()
	var percent uint64
	for _, f := range r.Fractions {
		percent += uint64(f.Percent)
	}
	if set.Partitions[j.Partition].Mem > 0 || j.Licences[set.Pools[r.Pool].Licence] <= percent*uint64(len(j.Nodes)) {
		return nil
	}
	return lease.Errorf(lease.Invalid, "the licences pay for more memory than a share's, and how much is not known, because the job's Prolog did not reach sluiced; submit the job anew")
}

// charged says whether the licences pay for as much memory of each fraction: a share of
// a GPU's memory costs as many as the same share of its time.
func (s *Service) charged(ctx context.Context, r *lease.Request, mem, units uint64, whose string) error {
	pools, err := s.cfg.Host.Pool(ctx, root, r.Pool)
	if err != nil {
		return err
	}
	var least uint64
	for _, p := range pools {
		for _, o := range p.Owners {
			for _, g := range o.Inventory.GPUs {
				if g.IsType(r.Type) && (least == 0 || g.Mem < least) {
					least = g.Mem
				}
			}
		}
	}
	if least == 0 {
		return lease.Errorf(lease.Down, "pool %s: no GPU can be seen; see sluice health", r.Pool)
	}
	if mem > least {
		return lease.Errorf(lease.Invalid, "%s: %d MiB, and a GPU of pool %s has %d MiB; ask for less, or for a type with more: --gres=%s:TYPE:PERCENT", whose, mem>>20, r.Pool, least>>20, form.Gres)
	}
	percents := make([]uint32, len(r.Fractions))
	for i, f := range r.Fractions {
		percents[i] = f.Percent
	}
	want := form.Units(percents, mem, least)
	if want > units {
		return lease.Errorf(lease.Invalid, "%s: %d MiB of each fraction cost %d licences on each node, and the job holds %d; ask for --gres=%s:%d, or for less memory", whose, mem>>20, want, units, form.Gres, want)
	}
	return nil
}

// line is as much of a user's text as is kept.
func line(s string) string { return form.Line(s, form.MaxName) }
