package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// minPrefix is the shortest beginning of an id that names a lease.
const minPrefix = 4

func newRelease() *cobra.Command {
	var socket, reason string
	cmd := &cobra.Command{
		Use:   "release {LEASE | JOB}...",
		Short: "End leases and their sessions",
		Long: `End leases. Programs that use them get CUDA errors from then on.

LEASE is an id as sluice list shows it, or the beginning of one (4 characters at
least). JOB is Slurm's job id or the run-... of sluice run. Users may end their own
leases, root all. A lease that has ended already is no error if its whole id is given.`,
		Example: "  sluice release 3f9c21aa\n  sluice release --reason 'node goes down' 4711 4712",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("no lease given; use sluice release LEASE, and see sluice list")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ls, err := leases(cmd.Context(), socket)
			if err != nil {
				return err
			}
			// All names are resolved first: a mistyped name ends nothing.
			var ids []string
			for _, a := range args {
				a, err := jobNumber(cmd.Context(), a)
				if err != nil {
					return err
				}
				id, err := named(ls, a)
				if err != nil {
					return err
				}
				ids = append(ids, id)
			}
			var failed error
			for _, id := range ids {
				_, err := question(cmd.Context(), socket, func(ctx context.Context, d local) (struct{}, error) {
					return struct{}{}, d.Release(ctx, id, lease.Key{}, reason)
				})
				if err != nil {
					failed = errors.Join(failed, fmt.Errorf("lease %s: %w", short(id), err))
					continue
				}
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "released %s\n", id); err != nil {
					return err
				}
			}
			return failed
		},
		ValidArgsFunction: completeLeases(&socket),
	}
	cmd.Flags().StringVar(&reason, "reason", "sluice release", "reason for the audit log")
	socketFlag(cmd, &socket)
	return cmd
}

// completeLeases offers the leases that exist.
func completeLeases(socket *string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		var out []string
		ls, err := leases(cmd.Context(), *socket)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		for _, l := range ls {
			out = append(out, short(l.ID)+"\tjob "+plain(l.Request.Key.Job)+", "+join(l.Grants, fractionText))
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

// named returns the id of the lease that a user names.
func named(ls []lease.Status, name string) (string, error) {
	var found []string
	for _, l := range ls {
		if l.ID == name {
			return name, nil
		}
		if l.Request.Key.Job == name || len(name) >= minPrefix && strings.HasPrefix(l.ID, name) {
			found = append(found, l.ID)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return "", fmt.Errorf("%q matches %d leases: %s; give more of the id", name, len(found), join(found, short))
	case form.LeaseID(name).Valid():
		return name, nil // not here any more, or another user's: the daemon says which
	}
	if form.JobID(name).Valid() {
		return "", fmt.Errorf("no lease %q of yours on this node; see sluice list, and for a job on other nodes srun --jobid=%s --overlap sluice list", name, name)
	}
	return "", fmt.Errorf("no lease %q of yours on this node; see sluice list", name)
}
