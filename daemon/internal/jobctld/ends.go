package jobctld

// EpilogSlurmctld: the end of all leases of a job. It is in the ledger until the job's
// report is written.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// jobEnd is the end of a run, which waits until Slurm is done with the job.
type jobEnd struct {
	Job   string    `json:"job"`
	Nodes []string  `json:"nodes"`
	UID   *uint32   `json:"uid,omitempty"` // nil where an earlier release wrote the note
	UpTo  uint64    `json:"up_to"`
	At    time.Time `json:"at"`
}

// endNote begins the ledger's keys of ends.
const endNote = "over/"

const (
	// endLook is the least time between two questions about jobs that are completing.
	endLook = time.Second
	// endAge is longer than any Epilog runs: a job that is still completing is ended then.
	endAge = time.Hour
	// finishes bounds how many ends are delivered to the owners at the same time.
	finishes = 8
	// maxNamed is the most nodes of a job that each owner is sent by name, one after the
	// other. For a larger job an owner is sent one message that all of it has ended.
	maxNamed = 16
)

// EpilogController implements rpc.ControllerJobs. slurmctld calls it as soon as a job begins
// to end: the job's processes may still write a last checkpoint, and its Epilogs are yet to
// run. So the end waits in the background until Slurm is done with the job and frees its
// licences. Where the job's nodes are down, that is at once.
func (s *Service) EpilogController(ctx context.Context, p rpc.Peer, run rpc.JobRun) ([]lease.Report, error) {
	if err := errors.Join(mayControl(p, s.cfg.User), jobs.CheckRun(run)); err != nil {
		return nil, err
	}
	if jobs.AsksForNothing(run) {
		return nil, nil
	}
	e := jobEnd{Job: run.Job, Nodes: run.Nodes, UID: &run.UID, UpTo: s.cfg.Host.Epoch(), At: time.Now().UTC()}
	// slurmctld starts the job's next run only after this answer, so every lease of now has ended.
	if last := s.cfg.Host.LastEpoch(ctx, s.cfg.Cluster, run.Job); ctx.Err() == nil {
		e.UpTo = max(e.UpTo, last)
	}
	s.mu.Lock()
	// An earlier run may have been on other nodes, and this end replaces its.
	for _, n := range s.ends[e.Job].Nodes {
		if len(e.Nodes) > 0 && !slices.Contains(e.Nodes, n) {
			e.Nodes = append(slices.Clip(e.Nodes), n)
		}
	}
	s.mu.Unlock()
	if err := s.cfg.Ledger.Put(ledger.Notes, endNote+e.Job, e); err != nil {
		s.log.Error("end of a job cannot be written", "job", e.Job, "error", err)
	}
	s.waitEnd(e)
	return nil, nil
}

// load reads the ends that an earlier daemon did not finish.
func (s *Service) load() error {
	return s.cfg.Ledger.View(func(tx *ledger.Tx) error {
		return tx.All(ledger.Notes, func(key string, raw json.RawMessage) error {
			if !strings.HasPrefix(key, endNote) {
				return nil
			}
			var e jobEnd
			if err := json.Unmarshal(raw, &e); err != nil {
				return fmt.Errorf("ledger %s: %s: %w", s.cfg.Ledger.Path(), key, err)
			}
			s.waitEnd(e)
			return nil
		})
	})
}

// waitEnd queues the end of a run.
func (s *Service) waitEnd(e jobEnd) {
	s.mu.Lock()
	s.ends[e.Job] = e
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// runEnds ends the runs that Slurm is done with, until ctx ends. One question to slurmctld
// serves all of them. The longer slurmctld takes to answer, the less often it is asked.
func (s *Service) runEnds(ctx context.Context) {
	for {
		s.mu.Lock()
		waiting := maps.Clone(s.ends)
		s.mu.Unlock()
		wait, wake := time.Hour, s.wake
		if len(waiting) > 0 {
			// Runs that end meanwhile wait for the next question.
			wait, wake = max(endLook, 10*s.endJobs(ctx, waiting)), nil
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

// endJobs ends those of the runs that Slurm is done with. It returns how long slurmctld took
// to answer.
func (s *Service) endJobs(ctx context.Context, waiting map[string]jobEnd) (asked time.Duration) {
	start := time.Now()
	states, err := s.states(ctx, waiting)
	asked = time.Since(start)
	if err != nil {
		return asked // without an answer no job counts as ended
	}
	var wg sync.WaitGroup
	turn := make(chan struct{}, finishes)
	for job, e := range waiting {
		if j, ok := states[job]; ok && j.State == "COMPLETING" && time.Since(e.At) < endAge {
			continue
		}
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			ctx, cancel := context.WithTimeout(ctx, jobs.SettleTime)
			defer cancel()
			s.finish(ctx, e)
		})
	}
	wg.Wait()
	return asked
}

// states asks for the states of some jobs: for one job by itself, for more by the whole list.
func (s *Service) states(ctx context.Context, of map[string]jobEnd) (map[string]slurm.JobState, error) {
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

// finish ends all leases that a run still has at any owner, and queues its report.
func (s *Service) finish(ctx context.Context, e jobEnd) {
	nodes := e.Nodes
	if len(nodes) > maxNamed {
		nodes = nil
	}
	unreached, err := s.cfg.Host.EndJob(ctx, s.cfg.Cluster, e.Job, nodes, e.UpTo, "the job has ended")
	if err != nil {
		s.log.Error("end of a job", "job", e.Job, "error", err)
	}
	if len(unreached) > 0 {
		s.log.Warn("end of a job not delivered everywhere yet", "job", e.Job, "owners", unreached)
	}
	s.log.Info("job is over", "job", e.Job, "nodes", len(e.Nodes))
	s.mu.Lock()
	if s.ends[e.Job].UpTo == e.UpTo { // unless a later run has ended meanwhile
		delete(s.ends, e.Job)
	}
	s.mu.Unlock()
	s.queue(pendingReport{jobEnd: e})
}
