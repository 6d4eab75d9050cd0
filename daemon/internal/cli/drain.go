package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func newDrain() *cobra.Command {
	var socket, reason string
	var wait bool
	cmd := &cobra.Command{
		Use:   "drain OWNER[:GPU] --reason TEXT",
		Short: "Keep new leases off a GPU",
		Long: `Keep new leases off one GPU of an owner, or off all of them. Leases that have a drained GPU
keep it, and their programs go on. The GPU stays drained until sluice resume, also across
restarts; sluice gpus says since when, by whom and why. The licences of drained GPUs are held
back from Slurm's jobs.

The last line says how many leases still have a part of what is drained. With --wait the
command ends when no lease has one.

GPU is its number in sluice gpus, or its UUID. Only root may, on the owner itself or on a
controller's node.`,
		Example: "  sluice drain gpu01 --reason 'new driver at noon'\n  sluice drain gpu01:3 --reason 'ECC errors, ticket 4711'",
		Args:    oneOwner("drain"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if strings.TrimSpace(reason) == "" {
				return errors.New("give --reason TEXT, for those who find the GPU drained")
			}
			return drain(cmd, socket, lease.DrainOrder{Reason: strings.TrimSpace(reason)}, args[0], wait)
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, in one line")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until no lease has a part of it")
	socketFlag(cmd, &socket)
	return cmd
}

func newResume() *cobra.Command {
	var socket string
	cmd := &cobra.Command{
		Use:     "resume OWNER[:GPU]",
		Short:   "Lend a drained GPU again",
		Long:    "End what sluice drain began: new leases get the owner's GPUs, or that GPU, again.",
		Example: "  sluice resume gpu01\n  sluice resume gpu01:3",
		Args:    oneOwner("resume"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return drain(cmd, socket, lease.DrainOrder{Resume: true}, args[0], false)
		},
	}
	socketFlag(cmd, &socket)
	return cmd
}

func oneOwner(verb string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 || args[0] == "" {
			return errors.New("want one owner, or one of its GPUs: sluice " + verb + " gpu01, sluice " + verb + " gpu01:3; see sluice gpus")
		}
		return nil
	}
}

// drainLook is the time between two looks of --wait.
var drainLook = 2 * time.Second

// drain has the daemon carry it out, and shows the owner's GPUs as they are then. With wait it goes on until no lease is left.
func drain(cmd *cobra.Command, socket string, d lease.DrainOrder, what string, wait bool) error {
	var one bool
	if d.Owner, d.GPU, one = strings.Cut(what, ":"); one && d.GPU == "" {
		return errors.New("no GPU behind the colon; give its number or its UUID, as sluice gpus shows them")
	}
	gpus, err := question(cmd.Context(), socket, func(ctx context.Context, l local) ([]lease.GPU, error) { return l.Drain(ctx, d) })
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	err = printPools(out, []rpc.Pool{{Name: "-", Owners: []rpc.PoolOwner{{Name: d.Owner, Inventory: lease.Inventory{GPUs: gpus}}}}})
	if err != nil || d.Resume {
		return err
	}
	for told := -1; ; {
		left, drained := leasesOn(gpus, d.GPU)
		if !drained {
			return fmt.Errorf("%s was resumed meanwhile, and is lent again", what)
		}
		if left == 0 {
			_, err := fmt.Fprintf(out, "%s is empty: no lease has a part of it\n", what)
			return err
		}
		if left != told {
			if _, err := fmt.Fprintf(out, "%s is not empty: %d of its parts are in leases, which keep them until they end\n", what, left); err != nil || !wait {
				return err
			}
			told = left
		}
		select {
		case <-time.After(drainLook):
		case <-cmd.Context().Done():
			return cmd.Context().Err()
		}
		// A daemon that is being restarted, or does not answer, is asked later.
		now, err := gpusOf(cmd.Context(), socket, d.Owner)
		if err == nil {
			gpus = now
		} else if !errors.Is(err, errNoDaemon) && lease.CodeOf(err) != lease.Down {
			return err
		}
	}
}

// gpusOf asks for the GPUs of an owner.
func gpusOf(ctx context.Context, socket, owner string) ([]lease.GPU, error) {
	pools, err := question(ctx, socket, func(ctx context.Context, l local) ([]rpc.Pool, error) { return l.Pool(ctx, "") })
	if err != nil {
		return nil, err
	}
	for _, p := range pools {
		for _, o := range p.Owners {
			if o.Name == owner && o.Error != "" {
				return nil, lease.Errorf(lease.Down, "%s", o.Error)
			}
			if o.Name == owner {
				return o.Inventory.GPUs, nil
			}
		}
	}
	return nil, lease.Errorf(lease.NotFound, "it is drained, but no pool of this node has %s, so --wait cannot see its leases; use it on a controller", owner)
}

// leasesOn counts the parts of GPUs that leases have: of one, by its number or UUID, or of all. drained says whether all of these are drained.
func leasesOn(gpus []lease.GPU, one string) (n int, drained bool) {
	drained = true
	for _, g := range gpus {
		if one == "" || one == strconv.Itoa(g.Index) || one == g.UUID {
			n += g.Leases
			drained = drained && !g.Drain.IsZero()
		}
	}
	return n, drained
}
