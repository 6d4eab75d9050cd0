package jobctld

// Reports of what jobs have used, in their AdminComment. slurmctld may be away, or wait for
// its database for seconds: nothing here delays the start or the end of a job.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

const (
	// reporters is the number of reports that are written at the same time.
	reporters = 2
	// reportAge is how long the daemon tries to write a report. wholeAge is how long it
	// waits for silent owners when others have answered.
	reportAge = 10 * time.Minute
	wholeAge  = time.Minute
	// maxPause is the longest time between two attempts.
	maxPause = 20 * time.Second
)

// pendingReport is a report of a run that is to be written.
type pendingReport struct {
	jobEnd
	pause time.Duration // before the next attempt
}

// queue adds a report to those that wait.
func (s *Service) queue(t pendingReport) {
	s.mu.Lock()
	s.pending = append(s.pending, t)
	s.mu.Unlock()
	s.wakeReporter()
}

func (s *Service) wakeReporter() {
	select {
	case s.told <- struct{}{}:
	default:
	}
}

// runReports writes reports until ctx ends.
func (s *Service) runReports(ctx context.Context) {
	var wg sync.WaitGroup
	for range reporters {
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-s.told:
				}
				for s.nextReport(ctx) {
				}
			}
		})
	}
	wg.Wait()
}

// nextReport writes the first report that waits. It returns false if none waits.
func (s *Service) nextReport(ctx context.Context) bool {
	s.mu.Lock()
	if len(s.pending) == 0 || ctx.Err() != nil {
		s.mu.Unlock()
		return false
	}
	t := s.pending[0]
	s.pending = s.pending[1:]
	more := len(s.pending) > 0
	s.mu.Unlock()
	if more {
		s.wakeReporter()
	}
	switch err := s.report(ctx, t.jobEnd); {
	case ctx.Err() != nil: // it stays in the ledger
	case errors.Is(err, slurm.ErrLater) && time.Since(t.At) < reportAge:
		t.pause = min(max(2*t.pause, s.cfg.Retry), maxPause)
		time.AfterFunc(t.pause, func() { s.queue(t) })
	default:
		s.reported(err, t.jobEnd)
	}
	return true
}

// report writes what the job has used into its AdminComment.
func (s *Service) report(ctx context.Context, o jobEnd) error {
	if !s.cfg.State.Settings().Report || s.cfg.Line == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, jobs.SettleTime)
	defer cancel()
	list, err := s.cfg.Host.Reports(ctx, s.cfg.Cluster, o.Job)
	if o.UID != nil {
		list = jobs.ReportsOf(*o.UID, list)
	}
	text := s.cfg.Line(list)
	switch {
	case err != nil && (text == "" || time.Since(o.At) < wholeAge):
		return fmt.Errorf("%w; %w", err, slurm.ErrLater)
	case err != nil:
		s.log.Warn("report of a job is not whole", "job", o.Job, "error", err)
	case text == "":
		return nil
	}
	return s.cfg.Slurm.Comment(ctx, o.Job, text)
}

// reported forgets a run's end: the report was its last step.
func (s *Service) reported(err error, o jobEnd) {
	if err != nil {
		s.mu.Lock()
		level := slog.LevelWarn
		if s.mute { // a site without accounting is warned once
			level = slog.LevelDebug
		}
		s.mute = true
		s.mu.Unlock()
		s.log.Log(context.Background(), level, "report of a job cannot be written into its AdminComment; slurm.report: no in sluice.yaml ends the attempts", "job", o.Job, "error", err)
	}
	var last jobEnd
	err = s.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		ok, err := tx.Get(ledger.Notes, endNote+o.Job, &last)
		if err != nil || !ok || last.UpTo != o.UpTo { // of a later run
			return err
		}
		return tx.Delete(ledger.Notes, endNote+o.Job)
	})
	if err != nil {
		s.log.Error("end of a job stays in the ledger, and is delivered again after a restart", "job", o.Job, "error", err)
	}
}
