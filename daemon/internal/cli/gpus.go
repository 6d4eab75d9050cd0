package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

func newGPUs() *cobra.Command {
	var socket, pool string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "gpus",
		Short: "Show the GPUs of the pools and what is free",
		Long: `Show every GPU of which this node's jobs can have fractions, by pool and owner. The owner is
the machine with the GPU. FREE and FREE% are what no lease holds. OVERHEAD is the memory that
the context of one session takes of its fraction. An owner that does not answer is listed with
the reason, and is not asked again for a while.`,
		Example: "  sluice gpus\n  sluice gpus --pool train --json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ps, err := question(cmd.Context(), socket, func(ctx context.Context, d local) ([]rpc.Pool, error) { return d.Pool(ctx, pool) })
			if err != nil {
				return err
			}
			if asJSON {
				if ps == nil {
					ps = []rpc.Pool{}
				}
				return printJSON(cmd.OutOrStdout(), ps)
			}
			return printPools(cmd.OutOrStdout(), ps)
		},
	}
	cmd.Flags().StringVar(&pool, "pool", "", "only this pool")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print all fields as JSON; sizes in bytes")
	socketFlag(cmd, &socket)
	completePools(cmd, &socket)
	return cmd
}

func printPools(w io.Writer, ps []rpc.Pool) error {
	rows := [][]string{}
	var silent []string
	for _, p := range ps {
		for _, o := range p.Owners {
			if o.Error != "" {
				silent = append(silent, fmt.Sprintf("owner %s of pool %s does not answer: %s", plain(o.Name), plain(p.Name), plain(o.Error)))
				continue
			}
			gpus := slices.SortedFunc(slices.Values(o.Inventory.GPUs), func(a, b lease.GPU) int { return cmp.Compare(a.Index, b.Index) })
			for _, g := range gpus {
				state := "ok"
				if why := g.WhyNot(); why != "" {
					state = why
				}
				rows = append(rows, []string{p.Name, o.Name, strconv.Itoa(g.Index), g.Name, form.ShortBytes(g.Mem), form.ShortBytes(g.FreeMem),
					strconv.FormatUint(uint64(g.FreePercent), 10) + "%", form.ShortBytes(g.Overhead), strconv.Itoa(g.Leases), state})
			}
		}
	}
	if err := table(w, "POOL OWNER GPU NAME MEMORY FREE FREE% OVERHEAD LEASES STATE", rows); err != nil {
		return err
	}
	for _, s := range silent {
		if _, err := fmt.Fprintln(w, s); err != nil {
			return err
		}
	}
	return nil
}

// completePools lets a shell complete --pool with the names of the pools.
func completePools(cmd *cobra.Command, socket *string) {
	_ = cmd.RegisterFlagCompletionFunc("pool", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		var out []string
		ps, _ := question(cmd.Context(), *socket, func(ctx context.Context, d local) ([]rpc.Pool, error) { return d.Pool(ctx, "") })
		for _, p := range ps {
			out = append(out, p.Name)
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	})
}

func fixed(cmd *cobra.Command, flag string, values []string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}
