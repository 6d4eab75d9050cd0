package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/usernames"
)

func newExplain() *cobra.Command {
	var socket string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain JOB",
		Short: "Show what happened to a job's leases, from the audit log",
		Long: `Print what is known of a job, oldest first: who asked, what was granted, where and how
much of it, or refused and why, how the lease ended, and what was used of it. It is what this
node's audit log has, and what the owners of the GPUs tell (until lease.tombstone after the
end, an hour by default). Refusals are known where they were made: on Slurm's controller for
jobs, on this node for sluice run. Refusals of a job that follow each other are one line, with their number.

JOB is a job as squeue names it, 4711, 4711_3 or 4711+1, or the run-... of sluice run. The
number of an array or of a heterogeneous job is also that of one of its parts: standard error
says which part is shown, if sacct knows it. Users see their own jobs.`,
		Example: "  sluice explain 4711",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%d jobs given; use sluice explain JOB", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			job, err := jobNumber(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			whole := askParts(cmd.Context(), args[0], slurmHere())
			es, err := question(cmd.Context(), socket, func(ctx context.Context, d local) ([]rpc.Event, error) { return d.Explain(ctx, job) })
			if err != nil {
				return err
			}
			ps := whole()
			if len(es) == 0 {
				return fmt.Errorf("this node's audit log and the owners know nothing about job %q that you may see; run this on the job's node or on Slurm's controller, and see sluice list for jobs with leases%s", args[0], ps.choice())
			}
			if part := ps.shown(); part != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), "sluice: "+part)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), es)
			}
			users := &usernames.Names{}
			var rows [][]string
			for _, e := range es {
				rows = append(rows, explainRow(&e, users))
			}
			return table(cmd.OutOrStdout(), "TIME EVENT LEASE USER NODE OWNER GRANTED REASON", rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	socketFlag(cmd, &socket)
	return cmd
}

func explainRow(e *rpc.Event, users *usernames.Names) []string {
	node, owner, reason := e.Key.Node, e.Owner, e.Reason
	if node == "" {
		node = e.Host
	}
	if owner == "" {
		owner = strings.Join(lease.Owners(e.Grants), ",")
	}
	if e.Times > 1 {
		reason += fmt.Sprintf(" (asked %d times, this is the last answer)", e.Times)
	}
	user := users.Name(e.UID)
	if e.Lease == "" && e.Key.Job == "" {
		user = "" // an owner that was not asked
	}
	return []string{e.Time.Local().Format(time.RFC3339), e.Event, short(e.Lease), user, node, owner, join(e.Grants, fractionText), reason}
}
