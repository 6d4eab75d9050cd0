package jobctld

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// reservation begins the names of our reservations in Slurm.
	reservation = "sluice_"
	// absences is the number of looks in a row at which an owner is silent before its GPUs
	// count as gone: a daemon's restart takes no licence away.
	absences = 2
)

// holdBack reserves licences in Slurm until as many are free as the pools can serve: for GPUs
// that are ill or away, and for what others than this cluster's jobs hold. It leaves the
// totals alone, so that jobs that are too large for the rest stay pending.
func (s *Service) holdBack(ctx context.Context, leases map[string][]lease.Brief, silent map[string]error) error {
	have, err := s.cfg.Slurm.Licences(ctx)
	if err != nil {
		return err
	}
	pools, err := s.cfg.Host.Pool(ctx, jobs.Root, "")
	if err != nil {
		return err
	}
	foreign, ours := s.held(leases)
	capacity, unsure := map[string]uint64{}, map[string]bool{} // by licence
	set := s.cfg.State.Settings()
	gone := s.gone(pools, silent)
	for _, p := range pools {
		conf := set.Pools[p.Name]
		capacity[conf.Licence] += 0 // known, even if nothing is left
		for _, l := range conf.Types {
			capacity[l] += 0
		}
		for _, o := range p.Owners {
			if o.Error != "" {
				if !gone[o.Name] { // keep the reservation until it is certain
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
				if !g.Drain.IsZero() {
					free = ours[g.UUID] // whose jobs have their licences still
				}
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
		case l == "" || strings.Contains(l, "@"): // another license server's, which counts by itself
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
		s.cfg.State.Found("licences", rpc.Warn, "held back, since the pools cannot serve them: "+strings.Join(short, ", "), "see sluice gpus and sluice health at the owners")
	default:
		s.cfg.State.Found("licences", rpc.OK, "the pools can serve all of them", "")
	}
	return nil
}

// held returns the percent of each GPU that is granted to leases outside of this cluster's
// jobs, and to these jobs, by GPU.
func (s *Service) held(leases map[string][]lease.Brief) (foreign, ours map[string]uint64) {
	foreign, ours = map[string]uint64{}, map[string]uint64{}
	for _, list := range leases {
		for _, l := range list {
			if l.State == lease.Ended {
				continue
			}
			out := foreign
			if l.Key.Cluster == s.cfg.Cluster && form.JobID(l.Key.Job).Valid() {
				out = ours
			}
			for _, g := range l.Grants {
				out[g.GPU] += uint64(g.Percent)
			}
		}
	}
	return foreign, ours
}

// gone returns the owners that have been silent for long enough.
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
