package node

import (
	"slices"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/host"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
)

// quotas are the configuration's, as the host wants them.
func quotas(cfg *config.Config) []host.Quota {
	out := make([]host.Quota, 0, len(cfg.Quotas))
	for i := range cfg.Quotas {
		q := &cfg.Quotas[i]
		out = append(out, host.Quota{
			User: q.User, Group: q.Group, Account: q.Account, Pool: q.Pool, Jobs: q.Slurm,
			Percent: q.Percent, Mem: (*uint64)(q.Mem), Leases: q.Leases, Whose: q.Whose(), Of: q.Of(),
		})
	}
	return out
}

// commands are the site's programs for idle leases, each once.
func commands(cfg *config.Config) []string {
	all := []string{cfg.Lease.Idle.Command}
	for _, name := range cfg.PoolNames() {
		all = append(all, cfg.IdleOf(name).Command)
	}
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(c string) bool { return c == "" })
}

// idles is what becomes of leases without work, as the owner wants it.
func idles(cfg *config.Config) owner.Idles {
	one := func(i config.Idle) owner.Idle {
		return owner.Idle{After: i.After, Action: i.Action, Command: i.Command}
	}
	out := owner.Idles{Default: one(cfg.Lease.Idle), Pools: map[string]owner.Idle{}}
	for name, p := range cfg.Pools {
		if p.Idle != nil {
			out.Pools[name] = one(*p.Idle)
		}
	}
	return out
}
