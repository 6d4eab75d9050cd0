package jobs

// The node's part: Prolog and Epilog.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// settleTime bounds what a Prolog may take beyond the wait for room. It goes on aside
// when its caller has gone: the job starts all the same, and its first task asks.
const settleTime = 15 * time.Second

// Prolog implements rpc.JobService.
func (s *Service) Prolog(ctx context.Context, p rpc.Peer, run rpc.JobRun) (rpc.JobAnswer, error) {
	if p.UID != 0 {
		return rpc.JobAnswer{}, lease.Errorf(lease.Denied, "a Prolog is run by slurmd, as root")
	}
	if err := checkRun(run); err != nil {
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

// settle has a run of a job settled, aside and once. told says that a Prolog has told
// all of it.
func (s *Service) settle(run rpc.JobRun, told bool) *entry {
	n := note{Job: run.Job, Restart: run.Restart, UID: run.UID, Account: line(run.Account), Name: line(run.Name), Wishes: run.Wishes}
	e, first := s.begin(n)
	if !first {
		return e
	}
	if run.Licences != nil && !asksFor(*run.Licences) {
		n.Outcome = rpc.JobNone
		s.put(e, n, true)
		return e
	}
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(s.base, s.settings().RoomWait+settleTime)
		defer cancel()
		n := s.outcome(ctx, e, n, run, told)
		if n.Outcome != rpc.JobNone {
			s.log.Info("job begins", "job", run.Job, "restart", run.Restart, "uid", run.UID, "outcome", n.Outcome, "reason", n.Reason)
		}
		s.counted(n.Outcome)
		if n.Outcome == rpc.JobRefused {
			s.aside(run.Job, "refused: "+n.Reason)
		}
		if !s.put(e, n, true) && n.Outcome == rpc.JobGranted {
			s.release(s.base, run.Job, "the job ended while it began")
		}
	})
	return e
}

// outcome gets a job its lease, or says why not.
func (s *Service) outcome(ctx context.Context, e *entry, n note, run rpc.JobRun, told bool) note {
	epoch := s.cfg.Host.Epoch()
	var j slurm.Job
	if run.Licences == nil { // a release that does not tell them
		var err error
		switch j, err = s.cfg.Slurm.Job(ctx, run.Job); {
		case errors.Is(err, slurm.ErrGone), err == nil && !asked(j):
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
	case found && l.Request.UID == run.UID && l.Request.Restart == run.Restart:
		n.Outcome, n.Unsure = rpc.JobGranted, false
		return n
	case found && l.Request.Restart < run.Restart: // of an earlier run whose Epilog did not come
		s.supersede(ctx, &epoch, l)
	case found: // of another job of that number, or of a later run, which this Prolog has lived to see
	case err != nil && codeOf(err) == lease.Over:
		return refused(n, err)
	case err != nil:
		s.log.Warn("whether the controller has reserved a job's lease is not known", "job", run.Job, "error", err)
	}

	if last := s.cfg.Host.LastEpoch(ctx, s.cfg.Cluster, run.Job); last >= epoch {
		// Of an earlier run, by a clock that is ahead of ours: if slurmctld still says that this one begins.
		epoch, j = last+1, slurm.Job{}
	}
	for j.ID == "" {
		if j, err = s.cfg.Slurm.Job(ctx, run.Job); err == nil {
			break
		}
		if errors.Is(err, slurm.ErrGone) {
			return refused(n, lease.Errorf(lease.Over, "Slurm has no job %s", run.Job))
		}
		if !pause(ctx, s.cfg.Retry) {
			n.Reason = fmt.Sprintf("slurmctld cannot be asked what job %s asks for: %v", run.Job, err)
			return n
		}
	}
	other := found && l.Request.Restart >= run.Restart
	if !asked(j) {
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

// supersede ends a lease that is in this run's way, whose epoch then has to be later,
// whatever the clocks of the controller and of this node say.
func (s *Service) supersede(ctx context.Context, epoch *uint64, l lease.Lease) {
	if err := s.cfg.Host.Release(ctx, root, "", l.Request.Key, "the job has begun anew"); err != nil {
		s.log.Error("release of an earlier run", "job", l.Request.Key.Job, "error", err)
	}
	*epoch = max(*epoch, l.Request.Key.Incarnation+1)
}

// here says whether Slurm starts this very run on this node: a Prolog may outlive its
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
	end := time.Now().Add(s.settings().RoomWait)
	for {
		r, err := s.request(ctx, j, run)
		if err == nil && !told {
			err = s.blind(j, r)
		}
		if err == nil {
			r.Key = s.key(run.Job)
			r.Key.Incarnation = epoch
			_, _, err = s.cfg.Host.Acquire(ctx, root, r)
		}
		switch {
		case err == nil:
			n.Outcome = rpc.JobGranted
			return n
		case !mayHelp(err):
			return refused(n, err)
		case time.Now().Before(end) && pause(ctx, s.cfg.Retry):
			continue
		}
		// The licences said yes: the pool is fragmented, or an owner is away.
		if ctx.Err() != nil { // Slurm is told all the same
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(s.base, settleTime)
			defer cancel()
		}
		if !j.Batch || !j.Requeue {
			return refused(n, fmt.Errorf("%w; Slurm requeues batch jobs only, and of them none with --no-requeue", err))
		}
		s.aside(run.Job, "requeued: "+err.Error())
		if failed := s.cfg.Slurm.Requeue(ctx, run.Job); failed != nil {
			return refused(n, fmt.Errorf("%w; %w", err, failed))
		}
		n.Outcome, n.Reason = rpc.JobRequeue, err.Error()
		return n
	}
}

func refused(n note, err error) note {
	n.Outcome, n.Reason = rpc.JobRefused, err.Error()
	return n
}

// mayHelp says whether to wait may help.
func mayHelp(err error) bool {
	switch codeOf(err) {
	case lease.NoRoom, lease.Conflict, lease.Down, lease.Internal:
		return true
	}
	return false
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Epilog implements rpc.JobService. It does not need a Prolog, and what it says of the
// run is not believed: it is told the restart count of the next one already.
func (s *Service) Epilog(ctx context.Context, p rpc.Peer, run rpc.JobRun) ([]lease.Report, error) {
	if p.UID != 0 {
		return nil, lease.Errorf(lease.Denied, "an Epilog is run by slurmd, as root")
	}
	if err := checkRun(run); err != nil {
		return nil, err
	}
	key := s.key(run.Job)
	l, _, held := s.cfg.Host.Held(key)
	n, busy, ok := s.known(run.Job)
	none := ok && busy == nil && n.Outcome == rpc.JobNone && !n.Asks || run.Licences != nil && !asksFor(*run.Licences)
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
	list = ofUser(list, run.UID)
	// The node's part of earlier runs is theirs.
	return slices.DeleteFunc(list, func(r lease.Report) bool {
		return held && r.Key.Node == key.Node && r.Key.Incarnation != l.Request.Key.Incarnation
	}), nil
}
