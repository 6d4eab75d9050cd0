package node

import (
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
