package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/process"
)

// environs is the part of the daemon that knows what jobs' tasks need.
type environs interface {
	Env(ctx context.Context, peer rpc.Peer, job string) ([]rpc.EnvOp, error)
}

func newEnv() *cobra.Command {
	var socket string
	cmd := &cobra.Command{
		Use:   "env [JOB]",
		Short: "Print the environment of a job's tasks, for a shell that Slurm did not start",
		Long: `Print what Slurm's plug-in sets in the environment of a job's tasks on this node, as
lines for sh, bash and zsh. It is for a shell that Slurm did not start, as after ssh:

  eval "$(sluice env)"

Without JOB the job is the one into which Slurm has adopted this shell (pam_slurm_adopt),
found by its cgroup, or else that of SLURM_JOB_ID. It is an error if the shell is in no job
of yours, or if the job asks for no fraction.`,
		Example: "  eval \"$(sluice env)\"\n  eval \"$(sluice env 4711)\"",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			job := ownJob()
			if len(args) == 1 {
				job = args[0]
			}
			if job == "" {
				return errors.New("no job of this shell can be found; use sluice env JOB, and squeue --me for your jobs")
			}
			job, err := jobNumber(cmd.Context(), job)
			if err != nil {
				return err
			}
			if !form.JobID(job).Valid() {
				return fmt.Errorf("job %q: use Slurm's own job id, which squeue --me -O JobID prints", job)
			}
			ops, err := question(cmd.Context(), socket, func(ctx context.Context, d local) ([]rpc.EnvOp, error) {
				e, ok := d.(environs)
				if !ok {
					return nil, lease.Errorf(lease.WrongPeer, "this sluiced knows no jobs of Slurm's")
				}
				return e.Env(ctx, rpc.Peer{}, job)
			})
			if err != nil {
				return err
			}
			if len(ops) == 0 {
				return fmt.Errorf("job %s has no fraction on this node; run this on one of its nodes, or submit it with --gres=rgpu:PERCENT", job)
			}
			text, err := rpc.EnvText(ops)
			if err != nil {
				return fmt.Errorf("answer of sluiced: %w; run the same version of sluice and sluiced", err)
			}
			// The plug-in sets the same record: jobs that this shell submits undo the changes
			// by it.
			ops = append(ops, rpc.EnvOp{Name: "SLUICE_ENV", Value: strings.ReplaceAll(text, "\n", "|")})
			var b strings.Builder
			value := map[string]string{}
			var names []string // each once, in their order
			for _, o := range ops {
				old, ok := value[o.Name]
				if !ok {
					old = os.Getenv(o.Name)
					names = append(names, o.Name)
				}
				value[o.Name] = o.Apply(old)
			}
			for _, name := range names {
				fmt.Fprintf(&b, "export %s=%s\n", name, shellQuote(value[name]))
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), b.String())
			return err
		},
	}
	socketFlag(cmd, &socket)
	return cmd
}

// ownJob returns the job of this process. Its cgroup comes first: in tasks of a heterogeneous
// job's second component, SLURM_JOB_ID is the first one's.
func ownJob() string {
	if b, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		if job := process.SlurmJob(b); job != "" {
			return job
		}
	}
	return os.Getenv("SLURM_JOB_ID")
}

// shellQuote makes one word of s in sh, whatever is in it.
func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
