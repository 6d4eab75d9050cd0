package jobctld

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

// runReconcile compares leases and licences at intervals, until ctx ends.
func (s *Service) runReconcile(ctx context.Context) {
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
		debug.FreeOSMemory() // a look at tens of thousands of leases and jobs makes more garbage than the daemon does in minutes
	}
}

// Reconcile compares all leases with Slurm's jobs, and the pools with Slurm's licences. It
// ends a lease whose job is gone at two looks in a row, as the job's Epilogs would have done,
// had they run. When Slurm or an owner does not answer, nothing is concluded.
func (s *Service) Reconcile(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*jobs.SettleTime)
	defer cancel()
	leases, silent := s.cfg.Host.All(ctx)
	running, err := s.cfg.Slurm.Jobs(ctx)
	if err != nil {
		s.log.Warn("Slurm's jobs are not known", "error", err)
		s.cfg.State.Found("slurm", rpc.Fail, "slurmctld cannot be asked: "+err.Error(), "see that slurmctld runs, and slurm.bin and slurm.conf in sluice.yaml")
		return
	}
	s.cfg.State.Found("slurm", rpc.OK, fmt.Sprintf("slurmctld answers, with %d jobs", len(running)), "")
	s.endOrphans(ctx, leases, running)
	s.withdrawDoubled(ctx, leases)
	s.commentIdle(leases)
	if err := s.holdBack(ctx, leases, silent); err != nil {
		s.log.Warn("licences cannot be compared with the pools", "error", err)
		s.cfg.State.Found("licences", rpc.Warn, err.Error(), "compare Licenses in slurm.conf with pools in sluice.yaml")
	}
}

// commentIdle has the AdminComment of each Slurm job say that a lease of it is idle, once, where the owner's site says that this is too long.
// The comment says so until the job's report takes its place, even if the lease works again.
func (s *Service) commentIdle(leases map[string][]lease.Brief) {
	if !s.cfg.State.Settings().Report {
		return
	}
	now := map[string]bool{}
	s.mu.Lock()
	before, ends := s.idle, maps.Clone(s.ends)
	s.idle = now
	s.mu.Unlock()
	for _, owner := range slices.Sorted(maps.Keys(leases)) {
		for _, l := range leases[owner] {
			k := l.Key
			if !l.IdleNoted || !s.compares(k) || l.State != lease.Granted || now[l.ID] {
				continue
			}
			now[l.ID] = true
			if _, over := ends[k.Job]; over || before[l.ID] { // the job's report is about to be written, or was
				continue
			}
			since := time.Now().Add(-l.Idle).Format(time.DateTime)
			s.comment(k.Job, fmt.Sprintf("idle: its GPU on %s has had no work from node %s since %s", owner, k.Node, since))
		}
	}
}

// compares says whether a lease is of a job of this daemon's cluster, and not of sluice run.
func (s *Service) compares(k lease.Key) bool {
	return k.Cluster == s.cfg.Cluster && form.JobID(k.Job).Valid()
}

// endOrphans ends the leases that had no job at this look and the one before.
func (s *Service) endOrphans(ctx context.Context, leases map[string][]lease.Brief, running map[string]slurm.JobState) {
	s.mu.Lock()
	before := s.orphans
	s.mu.Unlock()
	now := map[string]string{}
	done := map[string]bool{}
	for _, list := range leases {
		for _, l := range list {
			k := l.Key
			if !s.compares(k) || l.State == lease.Ended || done[l.ID] {
				continue
			}
			done[l.ID] = true
			j, known := running[k.Job]
			// A requeued job has the next run's restart count already while it completes.
			if known && j.On(k.Node) && (j.Restarts <= l.Restart || j.State == "COMPLETING") {
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
			s.cfg.State.CountOrphan()
		}
	}
	s.mu.Lock()
	s.orphans = now
	s.mu.Unlock()
}

// withdrawDoubled gives back what this daemon has got for a node on which the same run of the job had another lease at this look and the
// one before. That happens when slurmctld repeats its Prolog while the lease's owner is silent, and when a node gets its lease by itself
// beside this daemon.
func (s *Service) withdrawDoubled(ctx context.Context, leases map[string][]lease.Brief) {
	type run struct {
		job, node    string
		restart, uid uint32
	}
	runs := map[run][]*lease.Brief{}
	for _, list := range leases {
		for i := range list {
			l := &list[i]
			k := l.Key
			if !s.compares(k) || l.State != lease.Granted {
				continue
			}
			r := run{k.Job, k.Node, l.Restart, l.UID}
			if !slices.ContainsFunc(runs[r], func(o *lease.Brief) bool { return o.ID == l.ID }) { // each of its owners has it
				runs[r] = append(runs[r], l)
			}
		}
	}
	now := map[string]bool{}
	s.mu.Lock()
	before := s.doubled
	s.doubled = now
	s.mu.Unlock()
	for r, list := range runs {
		if len(list) < 2 {
			continue
		}
		again := true
		for _, l := range list {
			again = again && before[l.ID]
			now[l.ID] = true
		}
		if !again {
			continue
		}
		// A node that attaches one in this moment takes the latest.
		slices.SortFunc(list, func(a, b *lease.Brief) int { return cmp.Compare(a.Key.Incarnation, b.Key.Incarnation) })
		for _, l := range list {
			if s.cfg.Host.Withdraw(ctx, l.ID, "its job has another lease on this node") {
				s.log.Warn("one of two leases of a job on a node is given back, unless the node has attached it", "lease", l.ID, "job", r.job, "node", r.node)
				break // another stays
			}
		}
	}
}

// compareConfig compares the values of slurm.conf that have to agree with sluice.yaml.
func (s *Service) compareConfig(ctx context.Context) {
	conf, err := s.cfg.Slurm.Config(ctx)
	for err != nil {
		s.cfg.State.Found("slurm", rpc.Fail, "slurmctld cannot be asked: "+err.Error(), "see that slurmctld runs, and slurm.bin and slurm.conf in sluice.yaml")
		if !jobs.Pause(ctx, s.cfg.Reconcile) {
			return
		}
		conf, err = s.cfg.Slurm.Config(ctx)
	}
	s.cfg.State.Found("slurm", rpc.OK, "slurmctld answers", "")
	if n := conf["ClusterName"]; n != s.cfg.Cluster {
		s.cfg.State.Found("cluster", rpc.Fail, fmt.Sprintf("Slurm's ClusterName is %s, and cluster in sluice.yaml %s", n, s.cfg.Cluster), "set cluster to the same on all nodes")
	}
	if d, ok := seconds(conf["SlurmdTimeout"]); ok && d > 0 && s.cfg.State.Settings().Silence >= d {
		s.cfg.State.Found("silence", rpc.Warn, fmt.Sprintf("lease.silence is %v and Slurm's SlurmdTimeout %v: without EpilogSlurmctld a dead node's fractions are held longer than its licences", s.cfg.State.Settings().Silence, d),
			"set lease.silence below SlurmdTimeout at the owners")
	}
}

// seconds reads "300 sec".
func seconds(s string) (time.Duration, bool) {
	n, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(s, "sec")), 10, 32)
	return time.Duration(n) * time.Second, err == nil
}
