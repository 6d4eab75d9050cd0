package jobctld

// PrologSlurmctld: a lease for each of a job's nodes, or none.

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// answerTime is how much of the caller's time is kept for the answer that there is no room.
const answerTime = 5 * time.Second

// PrologController implements rpc.ControllerJobs. A fault of the job itself is left
// to its node, which shows the user the reason: a requeue would not mend it.
func (s *Service) PrologController(ctx context.Context, p rpc.Peer, run rpc.JobRun) (rpc.JobAnswer, error) {
	if err := errors.Join(mayControl(p, s.cfg.User), jobs.CheckRun(run)); err != nil {
		return rpc.JobAnswer{}, err
	}
	if jobs.AsksForNothing(run) {
		return rpc.JobAnswer{Outcome: rpc.JobNone}, nil
	}
	a, err := s.reserve(ctx, run)
	s.cfg.State.Count(a.Outcome)
	s.log.Info("job reserves", "job", run.Job, "restart", run.Restart, "nodes", len(run.Nodes), "outcome", a.Outcome, "reason", a.Reason, "error", err)
	return a, err
}

func (s *Service) reserve(ctx context.Context, run rpc.JobRun) (rpc.JobAnswer, error) {
	// The epoch is taken before slurmctld is asked: if this run still starts, whatever has ended
	// up to the epoch was an earlier run.
	epoch := max(s.cfg.Host.Epoch(), s.cfg.Host.LastEpoch(ctx, s.cfg.Cluster, run.Job)+1)
	j, err := s.cfg.Slurm.Job(ctx, run.Job)
	switch {
	case errors.Is(err, slurm.ErrGone):
		return rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: "Slurm has no such job"}, nil
	case err != nil:
		return rpc.JobAnswer{Outcome: rpc.JobNone, Reason: "left to the nodes, since slurmctld does not answer: " + err.Error()}, nil
	case !jobs.Asks(j):
		return rpc.JobAnswer{Outcome: rpc.JobNone}, nil
	case !j.State.Starting() || j.Restarts != run.Restart || j.UID != run.UID:
		return rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: "this run of it has ended"}, nil
	}
	end := time.Now().Add(s.cfg.State.Settings().RoomWait)
	wctx := ctx
	if d, ok := ctx.Deadline(); ok { // a caller that has gone cannot requeue the job
		d = d.Add(-min(answerTime, time.Until(d)/4))
		var cancel context.CancelFunc
		wctx, cancel = context.WithDeadline(ctx, d)
		defer cancel()
		if d.Before(end) {
			end = d
		}
	}
	for times := 1; ; times++ {
		leases, err := s.sponsor(audit.Later(wctx), j, run, epoch)
		if err == nil {
			return rpc.JobAnswer{Outcome: rpc.JobGranted, Lease: leases[0].ID}, nil
		}
		if jobs.MayPass(err) && time.Now().Before(end) && jobs.Pause(wctx, s.cfg.Retry) {
			continue
		}
		s.cfg.Host.Refused(lease.Key{Cluster: s.cfg.Cluster, Job: j.ID, Incarnation: epoch}, j.UID, err, times)
		switch {
		case lease.CodeOf(err) == lease.Denied:
			return rpc.JobAnswer{Outcome: rpc.JobNone, Reason: "left to the nodes: " + err.Error() + "; is this node in slurm.controllers of sluice.yaml at the owners?"}, nil
		case !jobs.MayPass(err):
			return rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: err.Error()}, nil
		case ctx.Err() != nil:
			return rpc.JobAnswer{}, lease.Errorf(lease.Down, "job %s: the caller gave up: %v", run.Job, err)
		default:
			s.noRoom(wctx, j, err)
			return rpc.JobAnswer{Outcome: rpc.JobRequeue, Reason: err.Error()}, nil
		}
	}
}

// noRoom tells the user why a job does not start. Slurm puts a batch job back into the queue. It kills an interactive job, with
// messages about PrologSlurmctld and the node's boot; so that user gets the reason on the terminal before.
func (s *Service) noRoom(ctx context.Context, j slurm.Job, why error) {
	if j.Batch {
		s.comment(j.ID, "requeued: "+why.Error())
		return
	}
	s.comment(j.ID, "no room: "+why.Error()+"; killed, being interactive")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), notifyTime)
	defer cancel()
	if err := s.cfg.Slurm.Notify(ctx, j.ID, "sluice: no room for this job: "+why.Error()+". The nodes are well. Slurm ends an interactive job that cannot start; ask again, for less, or by sbatch, which waits"); err != nil {
		s.log.Warn("user of an interactive job is not told why it cannot start", "job", j.ID, "error", err)
	}
}

// notifyTime bounds the message to an interactive job, whose Prolog waits for it.
const notifyTime = 2 * time.Second

// sponsor gets a lease for each node, or none. A lease that exists already and differs from
// what this run asks for belongs to an earlier job of that number: slurmctld has lost its
// state and reuses numbers.
func (s *Service) sponsor(ctx context.Context, j slurm.Job, run rpc.JobRun, epoch uint64) ([]lease.Lease, error) {
	one, err := jobs.Request(ctx, s.cfg.State.Settings(), s.cfg.Host, s.cfg.Cluster, j, run)
	if err != nil {
		return nil, err
	}
	one.Key.Incarnation = epoch
	reqs := make([]lease.Request, len(j.Nodes))
	for i, n := range j.Nodes {
		reqs[i] = one
		reqs[i].Key.Node = n
	}
	for range 2 {
		leases, err := s.cfg.Host.Sponsor(ctx, reqs)
		if err != nil {
			return nil, err
		}
		other := slices.IndexFunc(leases, func(l lease.Lease) bool {
			r := one
			r.Key.Node = l.Request.Key.Node
			return !r.SameRun(l.Request)
		})
		if other < 0 {
			return leases, nil
		}
		upTo := leases[other].Request.Key.Incarnation
		s.log.Warn("lease of another job of that number is ended", "job", j.ID, "lease", leases[other].ID)
		if _, err := s.cfg.Host.EndJob(ctx, s.cfg.Cluster, j.ID, nil, min(upTo, epoch-1), "another job has its number now"); err != nil {
			return nil, err
		}
	}
	return nil, lease.Errorf(lease.Conflict, "job %s: another job's lease is in the way", j.ID)
}
