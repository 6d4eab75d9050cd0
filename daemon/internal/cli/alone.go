package cli

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/jobsock"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

// aloneTime bounds the Prolog of a node whose daemon does not answer.
const aloneTime = 5 * time.Second

// noteAlone is what a Prolog can do without a daemon: find out whether the job needs it, and
// make a note of that. The plug-in then waits for the daemon to come back, or fails the job
// with a reason instead of running it without its GPU.
func noteAlone(ctx context.Context, commands func() *slurm.Commands, socket string, run rpc.JobRun) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), aloneTime)
	defer cancel()
	need := false
	if run.Licences != nil {
		need = form.HasLicence(*run.Licences)
	} else {
		// Slurm 22.05 passes a Prolog no licences. A daemon is away rarely enough to ask
		// slurmctld for each job.
		j, err := commands().Job(ctx, run.Job)
		if err != nil {
			return fmt.Errorf("it is not known whether the job needs a GPU: %w", err)
		}
		for name, n := range j.Licences {
			need = need || n > 0 && form.IsLicence(name)
		}
	}
	if !need {
		return nil
	}
	c := config.Default()
	c.RunDir = filepath.Dir(socket)
	notes, err := jobsock.NewNotes(c.JobSocket())
	if err != nil {
		return err
	}
	return notes.Put(run.Job)
}
