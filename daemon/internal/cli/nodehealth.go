package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// Slurm's HealthCheckProgram, sluice health --drain:
//
//	1  this node's findings that only an administrator here can mend; a daemon that is restarted has daemonBack
//	2  what Slurm says of the node: drained by nobody, by us, or by somebody else
//	3  drain, resume, or nothing
//
// A reason of ours begins with drainReason. A node in whose reason somebody has changed that is somebody else's.

const (
	drainReason = "sluice: "
	// daemonBack is how long a daemon that does not answer is waited for. Slurm ends a HealthCheckProgram after 60 s.
	daemonBack = 15 * time.Second
)

// nodeHealth has the options of sluice health that are about this node alone.
type nodeHealth struct {
	only, drain, stay, json bool
	config, socket          string
	kernelLog               string
}

func (o *nodeHealth) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&o.only, "node", false, "only what makes this node unfit for jobs with fractions")
	cmd.Flags().BoolVar(&o.drain, "drain", false, "for Slurm's HealthCheckProgram: drain this node for what --node finds, resume it afterwards")
	cmd.Flags().BoolVar(&o.stay, "no-resume", false, "with --drain: leave it to an administrator to resume the node")
	cmd.Flags().StringVarP(&o.config, "config", "c", config.DefaultPath, "configuration of sluiced, for --node, --drain and --all")
	cmd.MarkFlagsMutuallyExclusive("node", "quiet")
}

func (o *nodeHealth) run(cmd *cobra.Command) error {
	cfg, err := config.Load(o.config)
	var found []rpc.Check
	if err != nil {
		found = append(found, rpc.Check{Name: "config", Level: rpc.Fail, Node: true, Text: err.Error(), Remedy: "sluiced --check"})
		def := config.Default()
		cfg = &def
	}
	if o.socket == "" && os.Getenv("SLUICED_SOCKET") == "" {
		o.socket = cfg.Socket()
	}
	found = append(found, o.findings(cmd.Context(), cfg)...)
	if o.json {
		err = printJSON(cmd.OutOrStdout(), found)
	} else {
		for _, c := range found {
			fmt.Fprintln(cmd.OutOrStdout(), sentence(c))
		}
	}
	if o.drain && err == nil {
		if cfg.Node == "" {
			name, _ := os.Hostname()
			cfg.Node, _, _ = strings.Cut(name, ".")
		}
		err = o.tellSlurm(cmd, slurm.New(cfg.Slurm.Bin, cfg.Slurm.Conf), cfg.Node, found)
	}
	if err != nil {
		return &exitError{healthUnknown, err}
	}
	if len(found) > 0 {
		return &exitError{status: healthFail}
	}
	return nil
}

// sentence is a finding on one line, with the place that explains it.
func sentence(c rpc.Check) string {
	s := c.Name + ": " + c.Text
	if c.Remedy != "" {
		s += "; " + c.Remedy
	}
	return s + " (docs/health.md#" + anchor(c.Name) + ")"
}

// anchor is a finding's heading in docs/health.md: the finding owner gpu01 is one of owner.
func anchor(name string) string {
	name, _, _ = strings.Cut(name, " ")
	return strings.ToLower(name)
}

// findings are those of this node alone.
func (o *nodeHealth) findings(ctx context.Context, cfg *config.Config) []rpc.Check {
	var out []rpc.Check
	for end := time.Now().Add(daemonBack); ; {
		found, err := question(ctx, o.socket, func(ctx context.Context, d local) ([]rpc.Check, error) { return d.Health(ctx) })
		if err == nil {
			for _, c := range append(found, xids(ctx, o.socket, o.kernelLog)...) {
				if c.Node && c.Level == rpc.Fail {
					out = append(out, c)
				}
			}
			break
		}
		if time.Now().After(end) || ctx.Err() != nil {
			out = append(out, rpc.Check{Name: "daemon", Level: rpc.Fail, Node: true, Text: err.Error(), Remedy: "systemctl status sluiced"})
			break
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	shim := filepath.Join(cfg.Slurm.Lib, "libcuda.so.1")
	if fi, err := os.Stat(shim); err != nil {
		out = append(out, rpc.Check{Name: "shim", Level: rpc.Fail, Node: true, Text: err.Error(), Remedy: "install the package sluice-client"})
	} else if fi.Mode().Perm()&0o004 == 0 {
		out = append(out, rpc.Check{Name: "shim", Level: rpc.Fail, Node: true, Text: shim + " cannot be read by users", Remedy: "chmod o+r " + shim})
	}
	return out
}

// slurmNode is the part of *slurm.Commands that reads and sets a node's state.
type slurmNode interface {
	NodeState(ctx context.Context, node string) (state, reason string, err error)
	DrainNode(ctx context.Context, node, reason string) error
	ResumeNode(ctx context.Context, node string) error
}

// tellSlurm drains the node for what was found, or resumes it.
func (o *nodeHealth) tellSlurm(cmd *cobra.Command, s slurmNode, node string, found []rpc.Check) error {
	if os.Geteuid() != 0 {
		return errors.New("--drain is for root: Slurm lets nobody else drain a node")
	}
	state, reason, err := s.NodeState(cmd.Context(), node)
	if err != nil {
		return err
	}
	drained, ours := strings.Contains(state, "DRAIN"), strings.HasPrefix(reason, drainReason)
	switch {
	case len(found) > 0 && !drained:
		var parts []string
		for _, c := range found {
			parts = append(parts, sentence(c))
		}
		return s.DrainNode(cmd.Context(), node, drainReason+strings.Join(parts, "; "))
	case len(found) == 0 && drained && ours && !o.stay:
		return s.ResumeNode(cmd.Context(), node)
	}
	return nil
}
