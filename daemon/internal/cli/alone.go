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

// noteAlone is what is left for a Prolog without a daemon: to find out whether the job
// needs it, and to note so. The plug-in then waits for a daemon that comes back, and
// otherwise lets the job fail with a reason instead of running without its GPU.
func noteAlone(ctx context.Context, commands func() *slurm.Commands, socket string, run rpc.JobRun) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), aloneTime)
	defer cancel()
	need := false
	if run.Licences != nil {
		need = form.HasLicence(*run.Licences)
	} else {
		// Slurm 22.05 tells a Prolog no licences. A daemon that is away is rare enough
		// to ask slurmctld for each job meanwhile.
		j, err := commands().Job(ctx, run.Job)
		if err != nil {
			return fmt.Errorf("whether it needs a GPU is not known: %w", err)
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
