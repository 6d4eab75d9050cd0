package cli

import (
	"bytes"
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurmconf"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

func newSlurm() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "slurm",
		Short: "Write the pools' part of Slurm's configuration, and check it",
		Long: `Write the parts of Slurm's configuration that the pools of sluice.yaml need, and check
whether a site's configuration has them all. For administrators; the guide is docs/admin.md.`,
		Example: "  sluice slurm conf\n  sluice slurm setup --dry-run\n  sluice slurm check",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newSlurmConf(), newSlurmLua(), newSlurmSetup(), newSlurmCheck())
	return cmd
}

func newSlurmConf() *cobra.Command {
	var from poolSource
	cmd := &cobra.Command{
		Use:   "conf",
		Short: "Print the lines that slurm.conf needs",
		Long: `Print what is to be added to slurm.conf: the gres by which jobs ask, the licences that
are the pool, and the scripts. All owners have to answer, since they say how many GPUs
there are.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, t, err := from.table(cmd.Context())
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(t.Conf(cfg))
			return err
		},
	}
	from.flags(cmd)
	return cmd
}

func newSlurmLua() *cobra.Command {
	var from poolSource
	var out string
	cmd := &cobra.Command{
		Use:   "lua",
		Short: "Write the table of the pools for job_submit.lua",
		Long: `Write what job_submit.lua has to know of the pools: licences, numbers of GPUs, and their
memory, by which --rgpu-mem is charged. To be run on slurmctld's node after a change of the
pools in sluice.yaml or of their GPUs; slurmctld need not be told.

A file that is right already is left as it is. All owners have to answer.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, t, err := from.table(cmd.Context())
			if err != nil {
				return err
			}
			if out == "" {
				_, err = cmd.OutOrStdout().Write(t.Lua())
				return err
			}
			return replace(out, t.Lua())
		},
	}
	from.flags(cmd)
	cmd.Flags().StringVarP(&out, "out", "o", "", "file to write (default: standard output)")
	return cmd
}

func newSlurmCheck() *cobra.Command {
	var from poolSource
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check Slurm's configuration, scripts and plug-in, with remedies",
		Long: `Compare what slurmctld, the scripts and the plug-in's configuration say with the pools,
and print what is found, each with a remedy. On slurmctld's node and on a node of the jobs:
each sees its own part.

The exit status is 0 if all is well, 1 with a warning, 2 with a failure, and 3 if sluice.yaml
cannot be read.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := config.Load(from.file)
			if err != nil {
				return &exitError{healthUnknown, err}
			}
			var table *slurmconf.Table
			_, t, why := from.table(cmd.Context())
			if why == nil {
				table = &t
			}
			found := slurmconf.Check(cmd.Context(), cfg, table, why, slurm.New(cfg.Slurm.Bin, cfg.Slurm.Conf))
			if err := printHealth(cmd, found, asJSON, false); err != nil {
				return &exitError{healthUnknown, err}
			}
			if s := healthStatus(found); s != 0 {
				return &exitError{status: s}
			}
			return nil
		},
	}
	from.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// poolSource is where a command reads the pools: the configuration and this node's daemon.
type poolSource struct{ file, socket string }

func (p *poolSource) flags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&p.file, "config", "c", config.DefaultPath, "configuration of sluiced")
	socketFlag(cmd, &p.socket)
}

// table reads the configuration and asks this node's daemon for what the pools have.
func (p *poolSource) table(ctx context.Context) (*config.Config, slurmconf.Table, error) {
	cfg, err := config.Load(p.file)
	if err != nil {
		return nil, slurmconf.Table{}, err
	}
	pools, err := question(ctx, p.socket, func(ctx context.Context, d local) ([]rpc.Pool, error) { return d.Pool(ctx, "") })
	if err != nil {
		return nil, slurmconf.Table{}, err
	}
	t, err := slurmconf.New(cfg, pools)
	return cfg, t, err
}

// replace writes a file that slurmctld may read at any moment. It is not secret.
func replace(path string, text []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, text) {
		return nil
	}
	if err := safefile.Write(path, text, safefile.How{Mode: 0o644}); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
