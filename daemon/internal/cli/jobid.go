package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

// jobNumber returns the job id of what a user names as squeue does: leases have the id, and a task of an
// array or a component of a heterogeneous job has one besides its name. Every other name stays as it is.
func jobNumber(ctx context.Context, name string) (string, error) {
	if job, step, ok := strings.Cut(name, "."); ok && (form.JobID(job).Valid() || slurm.IsTask(job)) {
		return "", fmt.Errorf("%s is step %s of job %s; give the job: %s", form.Name(name), form.Name(step), job, job)
	}
	if !slurm.IsTask(name) {
		return name, nil
	}
	id, err := slurmHere().Number(ctx, name)
	if err != nil {
		return "", form.OfJob(name, fmt.Errorf("no word from Slurm of its own job id: %w; sacct -j %s -X -n -o JobIDRaw prints it", err, name))
	}
	return id, nil
}

// slurmHere returns Slurm's commands as the configuration of this node has them, or at their usual places.
func slurmHere() *slurm.Commands {
	at := config.Default().Slurm
	if c, err := config.Load(config.DefaultPath); err == nil {
		at = c.Slurm
	}
	return slurm.New(at.Bin, at.Conf)
}
