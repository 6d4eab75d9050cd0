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

func newSet() *cobra.Command {
	var socket, policy string
	var share shares
	var lends lend
	cmd := &cobra.Command{
		Use:   "set {LEASE | JOB} [--share PERCENT] [--policy POLICY] [--lend[=BOOL]]",
		Short: "Change the compute share of a lease",
		Long: `Change how much of its GPUs' time a lease gets, while its programs run. The change takes
effect with the next turn, and lasts until the lease ends or is changed again. Memory does
not change.

LEASE is an id as sluice list shows it, or the beginning of one (4 characters at
least). JOB is Slurm's job id or the run-... of sluice run. Users may change their own
leases, up to the percent that the lease was granted at first. Root may give more, to any
lease of this node and, where this node has the GPU, to any lease on it. All leases on one
GPU have at most 100 percent together.`,
		Example: "  sluice set 4711 --share 40 --policy fixed\n  sluice set 3f9c21aa --share 50,25 --lend\n  sluice set 4711 --lend=false",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("want one lease: sluice set LEASE --share PERCENT, and see sluice list")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c := lease.Change{Shares: share, Lend: lease.Lend(lends)}
			if policy != "" {
				p, l, err := lease.ParsePolicy(policy)
				if err != nil {
					return err
				}
				if c.Policy = p; c.Lend == "" {
					c.Lend = l
				}
			}
			if len(c.Shares) == 0 && c.Policy == "" && c.Lend == "" {
				return errors.New("nothing to change; give --share PERCENT (1 to 100), --policy or --lend")
			}
			name, err := jobNumber(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			ls, err := leases(cmd.Context(), socket)
			if err != nil {
				return err
			}
			if c.Lease, err = named(ls, name); err != nil {
				return err
			}
			now, err := question(cmd.Context(), socket, func(ctx context.Context, d local) (lease.Lease, error) { return d.Set(ctx, c) })
			if err != nil {
				return err // it names the lease
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %s %s\n", now.ID, join(now.Grants, fractionText), now.Request.PolicyName())
			return err
		},
		ValidArgsFunction: completeLeases(&socket),
	}
	f := cmd.Flags()
	f.Var(&share, "share", "percent of a GPU for each fraction, or a list in the order of sluice list as 50,25")
	f.StringVar(&policy, "policy", "", "how the GPU's time is shared: "+strings.Join(policies, ", "))
	lendFlag(cmd, &lends, "others may use this lease's time while it has no work; --lend=false takes that back")
	fixed(cmd, "policy", policies)
	socketFlag(cmd, &socket)
	return cmd
}

// shares are percent given on the command line, one for each fraction. It implements
// pflag.Value.
type shares []uint32

func (s *shares) Set(text string) error {
	var out shares
	for part := range strings.SplitSeq(text, ",") {
		n, err := form.ParsePercent(part, 100)
		if err != nil {
			return fmt.Errorf("share %q: want 1 to 100 percent of a GPU, or a list for several fractions as 50,25", part)
		}
		out = append(out, uint32(n))
	}
	if len(out) > form.MaxDevices {
		return fmt.Errorf("%d shares: a lease has at most %d fractions", len(out), form.MaxDevices)
	}
	*s = out
	return nil
}

func (s *shares) Type() string   { return "PERCENT" }
func (s *shares) String() string { return form.FormatPercents(*s) }
