package jobnode

// Prolog and Epilog.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Prolog implements rpc.NodeJobs.
func (s *Service) Prolog(ctx context.Context, p rpc.Peer, run rpc.JobRun) (rpc.JobAnswer, error) {
	if p.UID != 0 {
		return rpc.JobAnswer{}, lease.Errorf(lease.Denied, "a Prolog is run by slurmd, as root")
	}
	if err := jobs.CheckRun(run); err != nil {
		return rpc.JobAnswer{}, err
	}
	n, err := s.await(ctx, s.settle(run, true))
	if err != nil {
		return rpc.JobAnswer{}, err
	}
	a := rpc.JobAnswer{Outcome: n.Outcome, Reason: n.Reason}
	if n.Outcome == "" {
		a.Outcome = rpc.JobNone
	}
	if l, _, ok := s.cfg.Host.Held(s.key(run.Job)); ok && a.Outcome == rpc.JobGranted {
		a.Lease = l.ID
	}
	return a, nil
}

// settle starts to get a run its lease, in the background and once, and returns the entry
// that will have the outcome. The work goes on when its caller has gone: the job starts all
// the same, and its first task asks. told says that run has everything its Prolog knows.
func (s *Service) settle(run rpc.JobRun, told bool) *entry {
	n := note{Job: run.Job, Restart: run.Restart, UID: run.UID, Account: form.Name(run.Account), Name: form.Name(run.Name), Options: run.Options}
	e, first := s.begin(n)
	if !first {
		return e
	}
	if jobs.AsksForNothing(run) {
		n.Outcome = rpc.JobNone
		s.put(e, n, true)
		return e
	}
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(s.base, s.cfg.State.Settings().RoomWait+jobs.SettleTime)
		defer cancel()
		n := s.outcome(ctx, e, n, run, told)
		if n.Outcome != rpc.JobNone {
			s.log.Info("job begins", "job", run.Job, "restart", run.Restart, "uid", run.UID, "outcome", n.Outcome, "reason", n.Reason)
		}
		s.cfg.State.Count(n.Outcome)
		if n.Outcome == rpc.JobRefused {
			s.comment(run.Job, "refused: "+n.Reason)
		}
		if !s.put(e, n, true) && n.Outcome == rpc.JobGranted {
			s.release(s.base, run.Job, "the job ended while it began")
		}
	})
	return e
}

// outcome gets a run its lease. The note it returns says whether it did, and why not.
func (s *Service) outcome(ctx context.Context, e *entry, n note, run rpc.JobRun, told bool) note {
	epoch := s.cfg.Host.Epoch()
	var j slurm.Job
	if run.Licences == nil { // this release of Slurm does not pass them to a Prolog
		var err error
		switch j, err = s.cfg.Slurm.Job(ctx, run.Job); {
		case errors.Is(err, slurm.ErrGone), err == nil && !jobs.Asks(j):
			n.Outcome = rpc.JobNone
			return n
		case err != nil:
			n.Unsure = true
			s.log.Warn("whether a job asks for a fraction is not known yet", "job", run.Job, "error", err)
		}
	}
	n.Asks = true
	s.put(e, n, false) // before any owner hears of it

	key := s.key(run.Job)
	l, found, err := s.cfg.Host.Attach(ctx, key)
	switch {
	case found && ours(l, run):
		n.Outcome, n.Unsure = rpc.JobGranted, false
		return n
	case found && l.Request.Restart < run.Restart: // an earlier run's, whose Epilog did not come
		s.supersede(ctx, &epoch, l)
	case found: // another job's of that number, or a later run's: this Prolog is stale
	case err != nil: // Over too: slurmctld knows whether it is this run that has ended
		s.log.Warn("whether the controller has reserved a job's lease is not known", "job", run.Job, "error", err)
		if lease.CodeOf(err) == lease.Over {
			j = slurm.Job{}
		}
	}

	if last := s.cfg.Host.LastEpoch(ctx, s.cfg.Cluster, run.Job); last >= epoch {
		// An earlier run's epoch, from a clock ahead of this one's. slurmctld is asked again
		// whether this run still begins.
		epoch, j = last+1, slurm.Job{}
	}
	for j.ID == "" {
		if j, err = s.cfg.Slurm.Job(ctx, run.Job); err == nil {
			break
		}
		if errors.Is(err, slurm.ErrGone) {
			return refused(n, lease.Errorf(lease.Over, "Slurm has no job %s", run.Job))
		}
		if !jobs.Pause(ctx, s.cfg.Retry) {
			n.Reason = fmt.Sprintf("slurmctld cannot be asked what job %s asks for: %v", run.Job, err)
			return n
		}
	}
	other := found && l.Request.Restart >= run.Restart
	if !jobs.Asks(j) {
		if other {
			s.supersede(ctx, &epoch, l)
		}
		n.Outcome, n.Asks = rpc.JobNone, false
		return n
	}
	n.Unsure = false
	if err := s.here(j, run); err != nil {
		return refused(n, err)
	}
	if other {
		s.supersede(ctx, &epoch, l)
	}
	return s.acquire(ctx, n, j, run, epoch, told)
}

// ours says whether a lease is of this run.
func ours(l lease.Lease, run rpc.JobRun) bool {
	return l.Request.UID == run.UID && l.Request.Restart == run.Restart
}

// supersede ends a lease that is in this run's way, and raises the run's epoch above that
// lease's, whatever the clocks of the controller and of this node say.
func (s *Service) supersede(ctx context.Context, epoch *uint64, l lease.Lease) {
	if err := s.cfg.Host.Release(ctx, jobs.Root, "", l.Request.Key, "a later run of the job has begun"); err != nil {
		s.log.Error("release of an earlier run", "job", l.Request.Key.Job, "error", err)
	}
	*epoch = max(*epoch, l.Request.Key.Incarnation+1)
}

// here refuses a run that Slurm does not start on this node now: a Prolog may outlive its
// job.
func (s *Service) here(j slurm.Job, run rpc.JobRun) error {
	switch {
	case !j.State.Starting() || j.Restarts != run.Restart:
		return lease.Errorf(lease.Over, "job %s: this run of it has ended; Slurm says %s, restart %d", j.ID, j.State, j.Restarts)
	case !slices.Contains(j.Nodes, s.cfg.Node):
		return lease.Errorf(lease.Invalid, "job %s is not on node %s, Slurm says; compare node in sluice.yaml with Slurm's NodeName", j.ID, s.cfg.Node)
	case j.UID != run.UID:
		return lease.Errorf(lease.Over, "job %s is uid %d's now, no longer uid %d's", j.ID, j.UID, run.UID)
	}
	return nil
}

// acquire gets a lease without the controller's help.
func (s *Service) acquire(ctx context.Context, n note, j slurm.Job, run rpc.JobRun, epoch uint64, told bool) note {
	end := time.Now().Add(s.cfg.State.Settings().RoomWait)
	for times := 1; ; times++ {
		r, err := jobs.Request(ctx, s.cfg.State.Settings(), s.cfg.Host, s.cfg.Cluster, j, run)
		if err == nil && !told {
			err = s.blind(j, r)
		}
		if err == nil {
			r.Key = s.key(run.Job)
			r.Key.Incarnation = epoch
			_, _, err = s.cfg.Host.Acquire(audit.Later(ctx), jobs.Root, r)
		}
		if err == nil {
			n.Outcome = rpc.JobGranted
			return n
		}
		if jobs.MayPass(err) && time.Now().Before(end) && jobs.Pause(ctx, s.cfg.Retry) {
			continue
		}
		if ctx.Err() != nil { // what follows still has to reach owners and Slurm
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(s.base, jobs.SettleTime)
			defer cancel()
		}
		// The room may be taken by what the controller has got for this job, at an owner that did not answer before.
		if l, found, _ := s.cfg.Host.Attach(ctx, s.key(run.Job)); found && ours(l, run) {
			n.Outcome = rpc.JobGranted
			return n
		}
		key := s.key(run.Job)
		key.Incarnation = epoch
		s.cfg.Host.Refused(key, j.UID, err, times)
		if !jobs.MayPass(err) {
			return refused(n, err)
		}
		// The licences said yes: the pool is fragmented, or an owner is away.
		if !j.Batch || !j.Requeue {
			return refused(n, fmt.Errorf("%w; Slurm requeues batch jobs only, and of them none with --no-requeue", err))
		}
		s.comment(run.Job, "requeued: "+err.Error())
		if failed := s.cfg.Slurm.Requeue(ctx, run.Job); failed != nil {
			return refused(n, fmt.Errorf("%w; %w", err, failed))
		}
		n.Outcome, n.Reason = rpc.JobRequeue, err.Error()
		return n
	}
}

// blind refuses a job whose licences pay for more memory than its share's when no Prolog has
// passed the user's options: how much memory they are for is not known then.
func (s *Service) blind(j slurm.Job, r lease.Request) error {
	set := s.cfg.State.Settings()
	var percent uint64
	for _, f := range r.Fractions {
		percent += uint64(f.Percent)
	}
	if set.Partitions[j.Partition].Mem > 0 || j.Licences[set.Pools[r.Pool].Licence] <= percent*uint64(len(j.Nodes)) {
		return nil
	}
	return lease.Errorf(lease.Invalid, "the licences pay for more memory than a share's, and how much is not known, because the job's Prolog did not reach sluiced; submit the job again")
}

func refused(n note, err error) note {
	n.Outcome, n.Reason = rpc.JobRefused, err.Error()
	return n
}

// Epilog implements rpc.NodeJobs. It needs no Prolog before it. It does not
// use the run's restart count: slurmd passes that of the next run already.
func (s *Service) Epilog(ctx context.Context, p rpc.Peer, run rpc.JobRun) ([]lease.Report, error) {
	if p.UID != 0 {
		return nil, lease.Errorf(lease.Denied, "an Epilog is run by slurmd, as root")
	}
	if err := jobs.CheckRun(run); err != nil {
		return nil, err
	}
	key := s.key(run.Job)
	l, _, held := s.cfg.Host.Held(key)
	n, busy, ok := s.known(run.Job)
	none := ok && busy == nil && n.Outcome == rpc.JobNone && !n.Asks || jobs.AsksForNothing(run)
	s.forget(run.Job)
	if none && !held {
		return nil, nil
	}
	if !s.release(ctx, run.Job, "the job has ended") {
		return nil, nil
	}
	s.log.Info("job ends", "job", run.Job)
	list, err := s.cfg.Host.Reports(ctx, s.cfg.Cluster, run.Job)
	if err != nil {
		s.log.Warn("report of a job is not whole", "job", run.Job, "error", err)
	}
	list = jobs.ReportsOf(run.UID, list)
	// Reports of earlier runs on this node are left out.
	return slices.DeleteFunc(list, func(r lease.Report) bool {
		return held && r.Key.Node == key.Node && r.Key.Incarnation != l.Request.Key.Incarnation
	}), nil
}
