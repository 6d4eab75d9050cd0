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
lines for sh, bash and zsh. For a shell that came by ssh, which Slurm did not start:

  eval "$(sluice env)"

Without JOB it is the job that Slurm has adopted this shell into (pam_slurm_adopt), by
its cgroup, else that of SLURM_JOB_ID. A shell that is in no job of yours gets nothing.
A job that asks for no fraction has nothing to print.`,
		Example: "  eval \"$(sluice env)\"\n  eval \"$(sluice env 4711)\"",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			job := ownJob()
			if len(args) == 1 {
				job = args[0]
			}
			if job == "" {
				return errors.New("this shell is in no job that can be seen; name one: sluice env JOB, squeue --me lists yours")
			}
			if !form.IsJobID(job) {
				return fmt.Errorf("job %q: give Slurm's own number of it, which squeue --me -O JobID prints", job)
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
				return fmt.Errorf("job %s has no fraction on this node; ask on its nodes, or submit it with --gres=rgpu:PERCENT", job)
			}
			text, err := rpc.EnvText(ops)
			if err != nil {
				return fmt.Errorf("answer of sluiced: %w; run the same version of sluice and sluiced", err)
			}
			// As the plug-in sets it: jobs that this shell submits undo it by that.
			ops = append(ops, rpc.EnvOp{Name: "SLUICE_ENV", Value: strings.ReplaceAll(text, "\n", "|")})
			var b strings.Builder
			value := map[string]string{}
			for _, o := range ops {
				old, ok := value[o.Name]
				if !ok {
					old = os.Getenv(o.Name)
				}
				value[o.Name] = o.Apply(old)
				fmt.Fprintf(&b, "export %s=%s\n", o.Name, shellQuote(value[o.Name]))
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), b.String())
			return err
		},
	}
	socketFlag(cmd, &socket)
	return cmd
}

// ownJob is the job this process is in. The cgroup comes first: in the tasks of a
// heterogeneous job's second component SLURM_JOB_ID is the first one's.
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
