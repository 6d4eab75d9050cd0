package jobs

// The controller's part: PrologSlurmctld and EpilogSlurmctld.

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// controls says whether the caller may speak for slurmctld to this daemon.
func (s *Service) controls(p rpc.Peer) error {
	switch {
	case p.UID != 0 && p.UID != s.cfg.User:
		return lease.Errorf(lease.Denied, "uid %d is neither root nor SlurmUser; see slurm.user in sluice.yaml", p.UID)
	case !s.cfg.Controller:
		return lease.Errorf(lease.Invalid, "this node, %s, runs no slurmctld, says slurm.controllers in sluice.yaml", s.cfg.Node)
	}
	return nil
}

// answerTime is what is left of the caller's time when it is told that there is no room.
const answerTime = 5 * time.Second

// PrologController implements rpc.JobService. What is wrong with the job itself is left
// to its node, which tells the user: a requeue would not mend it.
func (s *Service) PrologController(ctx context.Context, p rpc.Peer, run rpc.JobRun) (rpc.JobAnswer, error) {
	if err := errors.Join(s.controls(p), checkRun(run)); err != nil {
		return rpc.JobAnswer{}, err
	}
	if run.Licences != nil && !asksFor(*run.Licences) {
		return rpc.JobAnswer{Outcome: rpc.JobNone}, nil
	}
	a, err := s.reserve(ctx, run)
	s.counted(a.Outcome)
	if err == nil && a.Outcome == rpc.JobRequeue {
		s.aside(run.Job, "requeued: "+a.Reason) // the script that waits has not all time
	}
	s.log.Info("job reserves", "job", run.Job, "restart", run.Restart, "nodes", len(run.Nodes), "outcome", a.Outcome, "reason", a.Reason, "error", err)
	return a, err
}

func (s *Service) reserve(ctx context.Context, run rpc.JobRun) (rpc.JobAnswer, error) {
	// Before slurmctld is asked: what has ended by then was an earlier run, if this one still starts.
	epoch := max(s.cfg.Host.Epoch(), s.cfg.Host.LastEpoch(ctx, s.cfg.Cluster, run.Job)+1)
	j, err := s.cfg.Slurm.Job(ctx, run.Job)
	switch {
	case errors.Is(err, slurm.ErrGone):
		return rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: "Slurm has no such job"}, nil
	case err != nil:
		return rpc.JobAnswer{Outcome: rpc.JobNone, Reason: "left to the nodes, since slurmctld does not answer: " + err.Error()}, nil
	case !asked(j):
		return rpc.JobAnswer{Outcome: rpc.JobNone}, nil
	case !j.State.Starting() || j.Restarts != run.Restart || j.UID != run.UID:
		return rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: "this run of it has ended"}, nil
	}
	end := time.Now().Add(s.settings().RoomWait)
	wctx := ctx
	if d, ok := ctx.Deadline(); ok { // who has gone cannot be told to requeue the job
		d = d.Add(-min(answerTime, time.Until(d)/4))
		var cancel context.CancelFunc
		wctx, cancel = context.WithDeadline(ctx, d)
		defer cancel()
		if d.Before(end) {
			end = d
		}
	}
	for {
		leases, err := s.sponsor(wctx, j, run, epoch)
		switch {
		case err == nil:
			return rpc.JobAnswer{Outcome: rpc.JobGranted, Lease: leases[0].ID}, nil
		case codeOf(err) == lease.Denied:
			return rpc.JobAnswer{Outcome: rpc.JobNone, Reason: "left to the nodes: " + err.Error() + "; is this node in slurm.controllers of sluice.yaml at the owners?"}, nil
		case !mayHelp(err):
			return rpc.JobAnswer{Outcome: rpc.JobRefused, Reason: err.Error()}, nil
		case time.Now().Before(end) && pause(wctx, s.cfg.Retry):
		case ctx.Err() != nil:
			return rpc.JobAnswer{}, lease.Errorf(lease.Down, "job %s: the caller gave up: %v", run.Job, err)
		default:
			return rpc.JobAnswer{Outcome: rpc.JobRequeue, Reason: err.Error()}, nil
		}
	}
}

// sponsor gets a lease for each node, or none. What is there already and is not what this
// run asks for is of another job of that number: slurmctld has lost its state.
func (s *Service) sponsor(ctx context.Context, j slurm.Job, run rpc.JobRun, epoch uint64) ([]lease.Lease, error) {
	one, err := s.request(ctx, j, run)
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
			h := l.Request
			return h.UID != one.UID || h.Restart != one.Restart || h.Type != one.Type || !slices.Equal(h.Fractions, one.Fractions)
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

// over is the end of a run that is waited for.
type over struct {
	Job   string    `json:"job"`
	Nodes []string  `json:"nodes"`
	UID   *uint32   `json:"uid,omitempty"` // nil where an earlier release wrote the note
	UpTo  uint64    `json:"up_to"`
	At    time.Time `json:"at"`
}

const (
	// overLook is the least time between two looks at the jobs that are completing.
	overLook = time.Second
	// overAge is beyond any Epilog.
	overAge = time.Hour
	// finishes are under way at once.
	finishes = 8
	// maxNamed nodes of a job are told to each owner by name, one after the other. Of a
	// larger job an owner is told once that all of it is over.
	maxNamed = 16
)

// EpilogController implements rpc.JobService. slurmctld calls at once when a job begins to
// end, when its processes still have their time for a last checkpoint and its Epilogs
// are to come. So the end waits aside until Slurm is done with the job, which is when
// its licences are free for the next: where nodes are down, at once.
func (s *Service) EpilogController(ctx context.Context, p rpc.Peer, run rpc.JobRun) ([]lease.Report, error) {
	if err := errors.Join(s.controls(p), checkRun(run)); err != nil {
		return nil, err
	}
	if run.Licences != nil && !asksFor(*run.Licences) {
		return nil, nil
	}
	o := over{Job: run.Job, Nodes: run.Nodes, UID: &run.UID, UpTo: s.cfg.Host.Epoch(), At: time.Now().UTC()}
	// slurmctld starts the job's next run when this has been answered, so all that there is has ended.
	if last := s.cfg.Host.LastEpoch(ctx, s.cfg.Cluster, run.Job); ctx.Err() == nil {
		o.UpTo = max(o.UpTo, last)
	}
	s.mu.Lock()
	// An earlier run may have been on other nodes, and this end replaces its.
	for _, n := range s.overs[o.Job].Nodes {
		if len(o.Nodes) > 0 && !slices.Contains(o.Nodes, n) {
			o.Nodes = append(slices.Clip(o.Nodes), n)
		}
	}
	s.mu.Unlock()
	if err := s.cfg.Ledger.Put(ledger.Notes, overNote+o.Job, o); err != nil {
		s.log.Error("end of a job cannot be written", "job", o.Job, "error", err)
	}
	s.waitOver(o)
	return nil, nil
}

// waitOver has a run ended once it is over for Slurm.
func (s *Service) waitOver(o over) {
	s.mu.Lock()
	s.overs[o.Job] = o
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// runOver ends the runs that are over, until ctx ends. One question to slurmctld serves
// all of them, and where that takes long there are fewer.
func (s *Service) runOver(ctx context.Context) {
	for {
		s.mu.Lock()
		waiting := maps.Clone(s.overs)
		s.mu.Unlock()
		wait, wake := time.Hour, s.wake
		if len(waiting) > 0 {
			// Those that end meanwhile wait for the next question.
			wait, wake = max(overLook, 10*s.endOver(ctx, waiting)), nil
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		case <-wake:
			t.Stop()
		}
	}
}

// endOver ends those of the runs that are over, and says how long slurmctld took to answer.
func (s *Service) endOver(ctx context.Context, waiting map[string]over) (asked time.Duration) {
	start := time.Now()
	jobs, err := s.states(ctx, waiting)
	asked = time.Since(start)
	if err != nil {
		return asked // not known is not over
	}
	var wg sync.WaitGroup
	turn := make(chan struct{}, finishes)
	for job, o := range waiting {
		if j, ok := jobs[job]; ok && j.State == "COMPLETING" && time.Since(o.At) < overAge {
			continue
		}
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			ctx, cancel := context.WithTimeout(ctx, settleTime)
			defer cancel()
			s.finish(ctx, o)
		})
	}
	wg.Wait()
	return asked
}

// states are those of some jobs; for one slurmctld need not tell all.
func (s *Service) states(ctx context.Context, of map[string]over) (map[string]slurm.JobState, error) {
	if len(of) > 1 {
		return s.cfg.Slurm.Jobs(ctx)
	}
	out := map[string]slurm.JobState{}
	for job := range of {
		j, err := s.cfg.Slurm.Job(ctx, job)
		if err == nil {
			out[job] = j.JobState
		} else if !errors.Is(err, slurm.ErrGone) {
			return nil, err
		}
	}
	return out, nil
}

// finish ends what a run still has at any owner. Its report is written aside.
func (s *Service) finish(ctx context.Context, o over) {
	nodes := o.Nodes
	if len(nodes) > maxNamed {
		nodes = nil
	}
	unreached, err := s.cfg.Host.EndJob(ctx, s.cfg.Cluster, o.Job, nodes, o.UpTo, "the job has ended")
	if err != nil {
		s.log.Error("end of a job", "job", o.Job, "error", err)
	}
	if len(unreached) > 0 {
		s.log.Warn("end of a job not delivered everywhere yet", "job", o.Job, "owners", unreached)
	}
	s.log.Info("job is over", "job", o.Job, "nodes", len(o.Nodes))
	s.mu.Lock()
	if s.overs[o.Job].UpTo == o.UpTo { // no later run ends already
		delete(s.overs, o.Job)
	}
	s.mu.Unlock()
	s.tell(telling{over: o})
}
