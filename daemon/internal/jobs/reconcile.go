package jobs

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Run does what nobody asks for, until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { s.watchHere(ctx) })
	if s.cfg.Controller {
		wg.Go(func() { s.runOver(ctx) })
		wg.Go(func() { s.runReports(ctx) })
		wg.Go(func() {
			s.compareConfig(ctx)
			t := time.NewTicker(s.cfg.Reconcile)
			defer t.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-t.C:
				}
				s.Reconcile(ctx)
			}
		})
	}
	wg.Wait()
	return nil
}

// Reconcile compares all leases with Slurm's jobs, and the pools with its licences. A
// lease without its job at two looks in turn is ended: what its Epilogs would have done,
// had they run. That Slurm or an owner does not answer means that nothing is known.
func (s *Service) Reconcile(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*settleTime)
	defer cancel()
	leases, silent := s.cfg.Host.All(ctx)
	jobs, err := s.cfg.Slurm.Jobs(ctx)
	if err != nil {
		s.log.Warn("Slurm's jobs are not known", "error", err)
		s.found("slurm", rpc.Fail, "slurmctld cannot be asked: "+err.Error(), "see that slurmctld runs, and slurm.bin and slurm.conf in sluice.yaml")
		return
	}
	s.found("slurm", rpc.OK, fmt.Sprintf("slurmctld answers, with %d jobs", len(jobs)), "")
	s.endStray(ctx, leases, jobs)
	if err := s.holdBack(ctx, leases, silent); err != nil {
		s.log.Warn("licences cannot be compared with the pools", "error", err)
		s.found("licences", rpc.Warn, err.Error(), "compare Licenses in slurm.conf with pools in sluice.yaml")
	}
}

// endStray ends the leases that have had no job twice.
func (s *Service) endStray(ctx context.Context, leases map[string][]lease.Status, jobs map[string]slurm.JobState) {
	s.mu.Lock()
	before := s.suspects
	s.mu.Unlock()
	now := map[string]string{}
	done := map[string]bool{}
	for _, list := range leases {
		for _, l := range list {
			k := l.Request.Key
			if k.Cluster != s.cfg.Cluster || !form.IsJobID(k.Job) || l.State == lease.Ended || done[l.ID] {
				continue
			}
			done[l.ID] = true
			j, known := jobs[k.Job]
			// A job that goes back into the queue has its next run's count while it completes.
			if known && j.On(k.Node) && (j.Restarts <= l.Request.Restart || j.State == "COMPLETING") {
				continue
			}
			why := "Slurm no longer has its job"
			if known {
				why = fmt.Sprintf("Slurm says that its job is %s, and not on %s in that run", j.State, k.Node)
			}
			if before[l.ID] == "" {
				now[l.ID] = why
				continue
			}
			s.log.Warn("lease without its job is ended", "lease", l.ID, "job", k.Job, "node", k.Node, "reason", why)
			if _, err := s.cfg.Host.EndJob(ctx, k.Cluster, k.Job, []string{k.Node}, k.Incarnation, why); err != nil {
				s.log.Error("end of a job", "job", k.Job, "error", err)
				now[l.ID] = why
				continue
			}
			s.countStray()
		}
	}
	s.mu.Lock()
	s.suspects = now
	s.mu.Unlock()
}

// compareConfig looks at what of slurm.conf has to fit sluice.yaml.
func (s *Service) compareConfig(ctx context.Context) {
	conf, err := s.cfg.Slurm.Config(ctx)
	for err != nil {
		s.found("slurm", rpc.Fail, "slurmctld cannot be asked: "+err.Error(), "see that slurmctld runs, and slurm.bin and slurm.conf in sluice.yaml")
		if !pause(ctx, s.cfg.Reconcile) {
			return
		}
		conf, err = s.cfg.Slurm.Config(ctx)
	}
	s.found("slurm", rpc.OK, "slurmctld answers", "")
	if n := conf["ClusterName"]; n != s.cfg.Cluster {
		s.found("cluster", rpc.Fail, fmt.Sprintf("Slurm's ClusterName is %s, and cluster in sluice.yaml %s", n, s.cfg.Cluster), "set cluster to the same on all nodes")
	}
	if d, ok := seconds(conf["SlurmdTimeout"]); ok && d > 0 && s.settings().Silence >= d {
		s.found("silence", rpc.Warn, fmt.Sprintf("lease.silence is %v and Slurm's SlurmdTimeout %v: without EpilogSlurmctld a dead node's fractions are held longer than its licences", s.settings().Silence, d),
			"set lease.silence below SlurmdTimeout at the owners")
	}
}

// seconds reads "300 sec".
func seconds(s string) (time.Duration, bool) {
	n, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(s, "sec")), 10, 32)
	return time.Duration(n) * time.Second, err == nil
}
