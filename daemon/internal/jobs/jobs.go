// Package jobs has what the two services for Slurm's jobs have in common: reading what a
// job asks for, the settings, and what they report. Package jobnode serves the jobs of a
// node, package jobctld runs beside slurmctld.
package jobs

// Slurm repeats, reorders and forgets its scripts. So neither service waits for the other:
// a lease has the epoch of the daemon that first heard of the run, an Epilog ends all
// leases up to now, and what a node does not know it asks when a task starts.

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

// SettleTime bounds one piece of work for a job: a Prolog beyond its wait for room, the end
// of a run at the owners, a comment.
const SettleTime = 15 * time.Second

// Retry is the time between two attempts to get room.
const Retry = 500 * time.Millisecond

// Root is the peer as which both services call the daemon's host role.
var Root = rpc.Peer{PID: os.Getpid()}

// CheckRun refuses a run without a job id of Slurm's.
func CheckRun(run rpc.JobRun) error {
	if _, err := form.ParseJobID(run.Job); err != nil {
		return lease.Errorf(lease.Invalid, "%v", err)
	}
	return nil
}

// AsksForNothing says whether Slurm passed the run's licences and none of them is ours.
func AsksForNothing(run rpc.JobRun) bool {
	return run.Licences != nil && !form.HasLicence(*run.Licences)
}

// MayPass says whether a request that failed with err may succeed later.
func MayPass(err error) bool {
	switch lease.CodeOf(err) {
	case lease.NoRoom, lease.Conflict, lease.Down, lease.Internal:
		return true
	}
	return false
}

// Pause waits for d. It reports false if ctx ends first.
func Pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// ReportsOf leaves out other users' reports: Slurm reuses job ids, and an owner remembers
// reports for longer than Slurm remembers a job.
func ReportsOf(uid uint32, list []lease.Report) []lease.Report {
	return slices.DeleteFunc(list, func(r lease.Report) bool { return r.UID != uid })
}

// Comment sets a job's AdminComment to slurm.OwnPrefix and text. It logs a failure.
func Comment(ctx context.Context, s slurm.Controller, log *slog.Logger, job, text string) {
	ctx, cancel := context.WithTimeout(ctx, SettleTime)
	defer cancel()
	if err := s.Comment(ctx, job, slurm.OwnPrefix+" "+form.Name(text)); err != nil {
		log.Warn("comment of a job", "job", job, "error", err)
	}
}
