package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/xid"
)

// Exit statuses of sluice health, those of monitoring plug-ins.
const (
	healthWarn    = 1
	healthFail    = 2
	healthUnknown = 3 // the daemon does not answer
)

func newHealth() *cobra.Command {
	var socket string
	var asJSON, quiet bool
	slurm := nodeHealth{kernelLog: xid.KernelLog}
	var all allHealth
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Show the state of this node's daemon, with remedies",
		Long: `Print the findings of this node's daemon, the worst first, each with a remedy.

The exit status is 0 if all is well, 1 with a warning, 2 with a failure, and 3 if the
daemon does not answer or an option is wrong. docs/health.md has each check, with what to do. Xids, the errors that
the driver has written to the kernel's log, are looked for if root asks.

With --node it prints only what must be mended on this node before jobs can have fractions
here: never what a job has done, and never another node's silence. A daemon that is being
restarted has some seconds to answer. The exit status is 0, 2 with a finding, or 3 if there is no finding but
something could not be looked at.

With --drain, for root, it does what Slurm's HealthCheckProgram is for: a node for which --node has a finding
is drained, with the finding as reason. A node that was drained in this way, and is known to be mended, is
resumed. Nodes that others have drained are left alone.

With --all, for root and SlurmUser on a controller's node: what this node and all owners of its pools
have found of themselves, asked at the same time, and which nodes sluice health --drain has drained. The
same finding of several nodes is one line. Owners that do not answer, run a release without this
question or refuse to answer are findings as well. A node that lends no GPU listens on no port: it is known by its drain.`,
		Example: "  sluice health\n  sluice health --all\n  sluice health --quiet || echo 'something is wrong'\n  sluice health --node",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if all.wanted {
				all.socket, all.config, all.json = socket, slurm.config, asJSON
				return all.run(cmd)
			}
			if slurm.only || slurm.drain {
				slurm.socket, slurm.json = socket, asJSON
				return slurm.run(cmd)
			}
			// The owners are asked first, so that health tells what they say now. What comes of it is in the findings.
			_, _ = question(cmd.Context(), socket, func(ctx context.Context, d local) ([]rpc.Pool, error) { return d.Pool(ctx, "") })
			cs, err := question(cmd.Context(), socket, func(ctx context.Context, d local) ([]rpc.Check, error) { return d.Health(ctx) })
			if err != nil {
				return &exitError{healthUnknown, err}
			}
			if len(cs) > 0 {
				cs = append(cs, xids(cmd.Context(), socket, slurm.kernelLog).checks...)
				rpc.SortChecks(cs)
			}
			if err := printHealth(cmd, cs, asJSON, quiet); err != nil {
				return &exitError{healthUnknown, err}
			}
			if s := healthStatus(cs); s != 0 {
				return &exitError{status: s}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print only warnings and failures")
	slurm.flags(cmd)
	all.flags(cmd)
	socketFlag(cmd, &socket)
	return cmd
}

func printHealth(cmd *cobra.Command, cs []rpc.Check, asJSON, quiet bool) error {
	if len(cs) == 0 {
		return errors.New("sluiced returned no findings; run the same version of sluice and sluiced")
	}
	if quiet {
		bad := []rpc.Check{}
		for _, c := range cs {
			if c.Level != rpc.OK {
				bad = append(bad, c)
			}
		}
		cs = bad
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), cs)
	}
	var rows [][]string
	for _, c := range cs {
		text := c.Text
		if c.Remedy != "" {
			text += "; " + c.Remedy
		}
		rows = append(rows, []string{string(c.Level), c.Name, text})
	}
	if len(rows) == 0 {
		return nil
	}
	return table(cmd.OutOrStdout(), "LEVEL CHECK FINDING", rows)
}

func healthStatus(cs []rpc.Check) int {
	status := 0
	for _, c := range cs {
		switch c.Level {
		case rpc.OK:
		case rpc.Warn:
			status = max(status, healthWarn)
		default: // also one that only a newer daemon knows
			status = healthFail
		}
	}
	return status
}
