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

// PoolSource tells what GPUs a pool has, by owner, *host.Host. With now it does not tell what it heard a while ago.
type PoolSource interface {
	GPUs(ctx context.Context, pool string, now bool) ([][]lease.GPU, error)
}

// Asks says whether a job asks for a fraction, by what slurmctld has of it.
func Asks(j slurm.Job) bool {
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

// Request returns what a job asks for on each of its nodes; the key's node and incarnation
// are left to the caller. Pool and amount come from the licences, which users cannot forge,
// and the user's options are checked against them. The error is for the user.
func Request(ctx context.Context, set Settings, pools PoolSource, cluster string, j slurm.Job, run rpc.JobRun) (lease.Request, error) {
	r := lease.Request{
		Key: lease.Key{Cluster: cluster, Job: j.ID}, UID: j.UID, GID: j.GID, Restart: run.Restart,
		Account: form.Name(run.Account), JobName: form.Name(run.Name),
	}
	if r.UID == math.MaxUint32 || r.GID == math.MaxUint32 {
		return r, lease.Errorf(lease.Invalid, "uid %d, gid %d: that is nobody", r.UID, r.GID)
	}
	nodes := uint64(len(j.Nodes))
	if nodes == 0 {
		return r, lease.Errorf(lease.Over, "job %s has no nodes", j.ID)
	}
	r.Nodes = uint32(nodes)
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
		return r, lease.Errorf(lease.Invalid, "%d%% on each of %d nodes, and %d licences of pool %s: want %d; submit the job again", percent, nodes, units, pool, percent*nodes)
	}
	if typ != "" {
		if l := set.Pools[pool].Types[typ]; l != "" && j.Licences[l] < percent*nodes {
			return r, lease.Errorf(lease.Invalid, "type %s: %d licences %s, and it takes %d; submit the job again", typ, j.Licences[l], l, percent*nodes)
		}
	}
	r.Pool, r.Type = pool, typ
	for _, p := range form.Fractions(percent) {
		r.Fractions = append(r.Fractions, lease.Fraction{Percent: p})
	}
	return r, applyOptions(ctx, set, pools, j, run, units/nodes, &r)
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

// applyOptions applies the partition's defaults and the user's options to a request for which
// the job holds units licences on each node.
func applyOptions(ctx context.Context, set Settings, source PoolSource, j slurm.Job, run rpc.JobRun, units uint64, r *lease.Request) error {
	def := set.Partitions[j.Partition]
	r.Policy, r.Lend, r.Place = def.Policy, def.Lend, def.Place
	mem, whose := def.Mem, "the partition's memory"
	if p := run.Options["pool"]; p != "" && p != r.Pool {
		return lease.Errorf(lease.Invalid, "--rgpu-pool=%s, but the licences are those of pool %s; submit the job again, with --rgpu-pool on its own command line or #SBATCH line", form.Name(p), r.Pool)
	}
	if err := options.CheckPassed(run.Options); err != nil {
		return lease.Errorf(lease.Invalid, "%s", form.Name(err.Error()))
	}
	if p := run.Options["policy"]; p != "" {
		policy, lend, err := lease.ParsePolicy(p)
		if err != nil {
			return lease.Errorf(lease.Invalid, "--rgpu-policy: %v", err)
		}
		if r.Policy = policy; lend != lease.LendSite {
			r.Lend = lend
		}
	}
	if g := run.Options["grace"]; g != "" {
		d, _ := options.Duration(g)
		r.Grace = lease.GraceOf(d)
	}
	if run.Options["spread"] != "" {
		r.Place = lease.Spread
	}
	if m := run.Options["mem"]; m != "" {
		mib, _ := options.MiB(m)
		mem, whose = mib<<20, "--rgpu-mem"
	}
	// The partition's memory is checked too: the job may have been charged for less, by an
	// option of its user's that is not known here.
	if mem > 0 {
		if err := charged(ctx, source, r, mem, units, whose); err != nil {
			return err
		}
	}
	for i := range r.Fractions {
		r.Fractions[i].Mem = mem
	}
	return nil
}

// charged refuses more memory for each fraction than units licences pay for: a share of a
// GPU's memory costs as many licences as the same share of its time.
func charged(ctx context.Context, source PoolSource, r *lease.Request, mem, units uint64, whose string) error {
	err := chargedFor(ctx, source, false, r, mem, units, whose)
	if err != nil { // nothing is refused by what was heard a while ago
		err = chargedFor(ctx, source, true, r, mem, units, whose)
	}
	return err
}

func chargedFor(ctx context.Context, source PoolSource, now bool, r *lease.Request, mem, units uint64, whose string) error {
	owners, err := source.GPUs(ctx, r.Pool, now)
	if err != nil {
		return err
	}
	var least uint64
	for _, gpus := range owners {
		for i := range gpus {
			if g := &gpus[i]; (least == 0 || g.Mem < least) && g.IsType(r.Type) {
				least = g.Mem
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
