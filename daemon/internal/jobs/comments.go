package jobs

// What Slurm is told of a job, in its AdminComment. slurmctld may be away, or wait for its
// database for seconds: nothing here holds up the start or the end of a job.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

const (
	// reporters write reports at once.
	reporters = 2
	// reportAge is how long a report is tried to be written, and wholeAge how long what
	// silent owners have to say is waited for where others have said something.
	reportAge = 10 * time.Minute
	wholeAge  = time.Minute
	// maxPause is the longest time between two tries.
	maxPause = 20 * time.Second
)

// telling is the report of a run, to be written.
type telling struct {
	over
	pause time.Duration // before the next try
}

// tell has a report written.
func (s *Service) tell(t telling) {
	s.mu.Lock()
	s.tellings = append(s.tellings, t)
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

// nextReport writes the first report that waits, and says whether there was one.
func (s *Service) nextReport(ctx context.Context) bool {
	s.mu.Lock()
	if len(s.tellings) == 0 || ctx.Err() != nil {
		s.mu.Unlock()
		return false
	}
	t := s.tellings[0]
	s.tellings = s.tellings[1:]
	more := len(s.tellings) > 0
	s.mu.Unlock()
	if more {
		s.wakeReporter()
	}
	switch err := s.report(ctx, t.over); {
	case ctx.Err() != nil: // it stays in the ledger
	case errors.Is(err, slurm.ErrLater) && time.Since(t.At) < reportAge:
		t.pause = min(max(2*t.pause, s.cfg.Retry), maxPause)
		time.AfterFunc(t.pause, func() { s.tell(t) })
	default:
		s.reported(err, t.over)
	}
	return true
}

// report writes what the job has used into its AdminComment.
func (s *Service) report(ctx context.Context, o over) error {
	if !s.settings().Report || s.cfg.Line == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	list, err := s.cfg.Host.Reports(ctx, s.cfg.Cluster, o.Job)
	if o.UID != nil {
		list = ofUser(list, *o.UID)
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

// ofUser leaves out what is another user's: Slurm gives numbers of jobs out again, and an
// owner remembers reports for longer than Slurm remembers a job.
func ofUser(list []lease.Report, uid uint32) []lease.Report {
	return slices.DeleteFunc(list, func(r lease.Report) bool { return r.UID != uid })
}

// reported forgets a run's end, whose last part its report was.
func (s *Service) reported(err error, o over) {
	if err != nil {
		s.mu.Lock()
		level := slog.LevelWarn
		if s.mute { // a site without accounting hears it once
			level = slog.LevelDebug
		}
		s.mute = true
		s.mu.Unlock()
		s.log.Log(context.Background(), level, "report of a job cannot be written into its AdminComment; slurm.report: no in sluice.yaml ends the attempts", "job", o.Job, "error", err)
	}
	var last over
	err = s.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		ok, err := tx.Get(ledger.Notes, overNote+o.Job, &last)
		if err != nil || !ok || last.UpTo != o.UpTo { // of a later run
			return err
		}
		return tx.Delete(ledger.Notes, overNote+o.Job)
	})
	if err != nil {
		s.log.Error("end of a job stays in the ledger, and is told again after a restart", "job", o.Job, "error", err)
	}
}

// aside comments a job while its Prolog goes on.
func (s *Service) aside(job, text string) {
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(s.base, settleTime)
		defer cancel()
		if err := s.cfg.Slurm.Comment(ctx, job, "sluice: "+line(text)); err != nil {
			s.log.Warn("comment of a job", "job", job, "error", err)
		}
	})
}
