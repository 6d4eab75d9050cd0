// Command sluiced is the node daemon: it lends this node's GPUs, and gets fractions
// of others' for the jobs here.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/data"
	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
	"github.com/sluice-hpc/sluice/daemon/internal/node"
	"github.com/sluice-hpc/sluice/internal/process"
	"github.com/sluice-hpc/sluice/remoting/version"
)

func main() {
	if err := root().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "sluiced:", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	var path string
	var check bool
	cmd := &cobra.Command{
		Use:           "sluiced",
		Short:         "lend this node's GPUs, and get fractions of GPUs for its jobs",
		Version:       version.Commit,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := config.Load(path)
			if err != nil {
				return err
			}
			if check {
				if err := node.Check(cfg); err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s: good; node %s, %d pools; %s\n", path, cfg.Node, len(cfg.Pools), node.Summary(cfg))
				return nil
			}
			return serve(cmd.Context(), cfg, path)
		},
	}
	cmd.Flags().StringVar(&path, "config", config.DefaultPath, "the configuration; \"\" for the defaults and the environment")
	cmd.Flags().BoolVar(&check, "check", false, "look at the configuration, the state and the keys, and end")

	var lib string
	nvml := &cobra.Command{
		Use: "nvml", Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return inventory.Child(lib, os.Stdin, os.Stdout) },
	}
	nvml.Flags().StringVar(&lib, "lib", "libnvidia-ml.so.1", "the NVML library")
	relay := &cobra.Command{
		Use: "relay", Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return data.RelayMain() },
	}
	cmd.AddCommand(nvml, relay)
	cmd.CompletionOptions.HiddenDefaultCmd = true
	return cmd
}

func serve(ctx context.Context, cfg *config.Config, path string) error {
	// A daemon that mostly waits rather collects more often than it holds memory
	// that the node's jobs could use.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(25)
	}
	_ = process.SetOOMScore(process.OOMDaemon) // only root may; its unit does as well
	log, level := node.Logger(os.Stderr, cfg.Log.Level, cfg.Log.Format)
	start, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	n, err := node.Start(start, cfg, log, level)
	stop()
	if err != nil {
		return err
	}
	defer n.Stop()
	return n.Serve(ctx, func() (*config.Config, error) { return config.Load(path) })
}
