package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func newExplain() *cobra.Command {
	var socket string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain JOB",
		Short: "Show what happened to a job's leases, from the audit log",
		Long: `Print what this node's audit log has of a job, oldest first: who asked, what was
granted or refused and why, which sessions there were, and how the lease ended.

JOB is Slurm's job id, or the run-... of sluice run. Users see their own jobs.`,
		Example: "  sluice explain 4711",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%d jobs given; use sluice explain JOB", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			es, err := question(cmd.Context(), socket, func(ctx context.Context, d local) ([]rpc.Event, error) { return d.Explain(ctx, args[0]) })
			if err != nil {
				return err
			}
			if len(es) == 0 {
				return fmt.Errorf("the audit log of this node has nothing about job %q that you may see; run this on the job's node, and see sluice list for jobs with leases", args[0])
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), es)
			}
			users := userNames{}
			var rows [][]string
			for _, e := range es {
				rows = append(rows, []string{e.Time.Local().Format(time.RFC3339), e.Event, short(e.Lease), users.name(e.UID), e.Host, e.Owner, strings.Join(e.GPUs, ","), e.Reason})
			}
			return table(cmd.OutOrStdout(), "TIME EVENT LEASE USER HOST OWNER GPUS REASON", rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	socketFlag(cmd, &socket)
	return cmd
}
