package jobs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// reservation begins the names of our reservations in Slurm.
	reservation = "sluice_"
	// absences are the looks in turn at which an owner is silent before its GPUs count
	// as gone: a daemon that restarts takes none away.
	absences = 2
)

// holdBack makes Slurm's free licences those that the pools can serve: GPUs that are ill
// or away, and what others than this cluster's jobs hold, is reserved. Jobs that are
// too large for the rest stay pending, which is why the totals are left alone.
func (s *Service) holdBack(ctx context.Context, leases map[string][]lease.Status, silent map[string]error) error {
	have, err := s.cfg.Slurm.Licences(ctx)
	if err != nil {
		return err
	}
	pools, err := s.cfg.Host.Pool(ctx, root, "")
	if err != nil {
		return err
	}
	foreign := s.foreign(leases)
	capacity, unsure := map[string]uint64{}, map[string]bool{} // by licence
	set := s.settings()
	gone := s.gone(pools, silent)
	for _, p := range pools {
		conf := set.Pools[p.Name]
		capacity[conf.Licence] += 0 // known, even if nothing is left
		for _, l := range conf.Types {
			capacity[l] += 0
		}
		for _, o := range p.Owners {
			if o.Error != "" {
				if !gone[o.Name] { // keep what is set until it is sure
					unsure[conf.Licence] = true
					for _, l := range conf.Types {
						unsure[l] = true
					}
				}
				continue
			}
			for _, g := range o.Inventory.GPUs {
				if !g.Healthy {
					continue
				}
				free := 100 - min(100, foreign[g.UUID])
				capacity[conf.Licence] += free
				for t, l := range conf.Types {
					if g.IsType(t) {
						capacity[l] += free
					}
				}
			}
		}
	}
	return s.reserveAll(ctx, have, capacity, unsure)
}

func (s *Service) reserveAll(ctx context.Context, have map[string]slurm.Licence, capacity map[string]uint64, unsure map[string]bool) error {
	var errs []error
	var short []string
	for _, l := range slices.Sorted(maps.Keys(capacity)) {
		lic, ok := have[l]
		switch {
		case l == "" || strings.Contains(l, "@"): // another server's, whose count is its own
			continue
		case !ok:
			errs = append(errs, fmt.Errorf("slurm.conf has no licence %s", l))
			continue
		case unsure[l]:
			continue
		}
		missing := lic.Total - min(lic.Total, capacity[l])
		if missing > 0 {
			short = append(short, fmt.Sprintf("%d of %d %s", missing, lic.Total, l))
		}
		name := reservation + strings.NewReplacer(".", "_", "-", "_").Replace(l)
		if err := s.cfg.Slurm.Reserve(ctx, name, l, missing); err != nil {
			errs = append(errs, fmt.Errorf("reservation %s of %d %s: %w", name, missing, l, err))
		}
	}
	switch {
	case len(errs) > 0:
		return errors.Join(errs...)
	case len(short) > 0:
		s.found("licences", rpc.Warn, "held back, since the pools cannot serve them: "+strings.Join(short, ", "), "see sluice gpus and sluice health at the owners")
	default:
		s.found("licences", rpc.OK, "the pools can serve all of them", "")
	}
	return nil
}

// foreign is the percent of each GPU that no licence of this cluster stands for.
func (s *Service) foreign(leases map[string][]lease.Status) map[string]uint64 {
	out := map[string]uint64{}
	for _, list := range leases {
		for _, l := range list {
			if l.State == lease.Ended || l.Request.Key.Cluster == s.cfg.Cluster && form.IsJobID(l.Request.Key.Job) {
				continue
			}
			for _, g := range l.Grants {
				out[g.GPU] += uint64(g.Percent)
			}
		}
	}
	return out
}

// gone are the owners that have not answered for long enough.
func (s *Service) gone(pools []rpc.Pool, silent map[string]error) map[string]bool {
	out, now := map[string]bool{}, map[string]int{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range pools {
		for _, o := range p.Owners {
			if o.Error != "" || silent[o.Name] != nil {
				now[o.Name] = s.absent[o.Name] + 1
				out[o.Name] = now[o.Name] >= absences
			}
		}
	}
	s.absent = now
	return out
}
