package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// Slurm's HealthCheckProgram, sluice health --drain:
//
//	1  this node's findings that only an administrator here can mend; a daemon that is restarted has daemonBack, and all of it healthTime
//	2  what Slurm says of the node: drained by nobody, by us, or by somebody else
//	3  drain, resume, or nothing
//
// A reason of ours begins with drainReason. A node in whose reason somebody has changed that is somebody else's.
// A finding that is not known neither drains a node nor resumes one. NVML says at any time what is wrong with a GPU. The kernel's log forgets: so the
// reason of a drain in Slurm is what remembers the GPUs with Xids, each as xidOf has it, and such a drain is over only if the log
// says so, or nothing of it is lost.

const (
	drainReason = "sluice: "
	// daemonBack is how long a daemon that does not answer is waited for. Slurm ends a HealthCheckProgram after 60 s.
	daemonBack = 15 * time.Second
	// healthTime bounds the questions to the daemon. Two commands of Slurm's, of up to 10 s each, come after them.
	healthTime = 35 * time.Second
	// longReason is the length from which a reason may have been cut (slurm.Commands cuts at 1024 bytes).
	longReason = 1000
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
	state := o.findings(cmd.Context(), cfg)
	state.found = append(found, state.found...)
	if o.json {
		err = printJSON(cmd.OutOrStdout(), append(state.found, state.unknown...))
	} else {
		for _, c := range state.found {
			fmt.Fprintln(cmd.OutOrStdout(), sentence(c))
		}
		for _, c := range state.unknown {
			fmt.Fprintln(cmd.OutOrStdout(), "not known: "+sentence(c))
		}
	}
	if o.drain && err == nil {
		if cfg.Node == "" {
			name, _ := os.Hostname()
			cfg.Node, _, _ = strings.Cut(name, ".")
		}
		err = o.tellSlurm(cmd, slurm.New(cfg.Slurm.Bin, cfg.Slurm.Conf), cfg.Node, state)
	}
	if err != nil {
		return &exitError{healthUnknown, err}
	}
	if len(state.found) > 0 {
		return &exitError{status: healthFail}
	}
	if len(state.unknown) > 0 {
		return &exitError{status: healthUnknown}
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

// nodeState is what is found of this node alone.
type nodeState struct {
	found   []rpc.Check // drain it
	unknown []rpc.Check // could not be looked at
	xids    nodeXids
}

func (s *nodeState) add(cs ...rpc.Check) {
	for _, c := range cs {
		switch {
		case c.Node && c.Level == rpc.Fail:
			s.found = append(s.found, c)
		case c.Unknown:
			s.unknown = append(s.unknown, c)
		}
	}
}

// findings are those of this node alone.
func (o *nodeHealth) findings(ctx context.Context, cfg *config.Config) (out nodeState) {
	ctx, cancel := context.WithTimeout(ctx, healthTime)
	defer cancel()
	for end := time.Now().Add(daemonBack); ; {
		found, err := question(ctx, o.socket, func(ctx context.Context, d local) ([]rpc.Check, error) { return d.Health(ctx) })
		if err == nil {
			out.add(found...)
			out.xids = xids(ctx, o.socket, o.kernelLog)
			out.add(out.xids.checks...)
			break
		}
		if time.Now().After(end) || ctx.Err() != nil {
			out.add(rpc.Check{Name: "daemon", Level: rpc.Fail, Node: true, Text: err.Error(), Remedy: "systemctl status sluiced"})
			break
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	shim := filepath.Join(cfg.Slurm.Lib, "libcuda.so.1")
	if fi, err := os.Stat(shim); err != nil {
		out.add(rpc.Check{Name: "shim", Level: rpc.Fail, Node: true, Text: err.Error(), Remedy: "install the package sluice-client"})
	} else if fi.Mode().Perm()&0o004 == 0 {
		out.add(rpc.Check{Name: "shim", Level: rpc.Fail, Node: true, Text: shim + " cannot be read by users", Remedy: "chmod o+r " + shim})
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
func (o *nodeHealth) tellSlurm(cmd *cobra.Command, s slurmNode, node string, is nodeState) error {
	if os.Geteuid() != 0 {
		return errors.New("--drain is for root: Slurm lets nobody else drain a node")
	}
	state, reason, err := s.NodeState(cmd.Context(), node)
	if err != nil {
		return err
	}
	drained, ours := strings.Contains(state, "DRAIN"), strings.HasPrefix(reason, drainReason)
	switch {
	case !drained && len(is.found) > 0:
		return s.DrainNode(cmd.Context(), node, reasonFor(is.found, ""))
	case !drained || !ours:
	case len(is.found) > 0:
		// The reason is to name each GPU that has had an Xid.
		fresh := slices.DeleteFunc(slices.Clone(is.found), func(c rpc.Check) bool {
			gpu, _, ok := strings.Cut(c.Text, "Xid ")
			return c.Name != "xid" || !ok || strings.Contains(reason, xidName+gpu)
		})
		if len(fresh) > 0 {
			return s.DrainNode(cmd.Context(), node, reasonFor(fresh, reason))
		}
	case len(is.unknown) > 0 || o.stay:
	default:
		if why := is.xids.stillDrains(reason); why != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "not known: %s; if it is mended, scontrol update nodename=%s state=resume (docs/health.md#xid)\n", why, node)
			return nil
		}
		return s.ResumeNode(cmd.Context(), node)
	}
	return nil
}

// xidName begins an Xid in a drain's reason.
const xidName = "xid: "

// reasonFor is the reason of a drain for what was found, in addition to an earlier one. Xids come first: they must not be cut off.
func reasonFor(found []rpc.Check, earlier string) string {
	var first, then []string
	for _, c := range found {
		if c.Name == "xid" {
			first = append(first, sentence(c))
		} else {
			then = append(then, sentence(c))
		}
	}
	if e := strings.TrimPrefix(earlier, drainReason); e != "" {
		then = append(then, e)
	}
	return drainReason + strings.Join(append(first, then...), "; ")
}

// stillDrains is why a drain with that reason is not over, "" if it is. There is no finding of Xids any more.
func (x *nodeXids) stillDrains(reason string) string {
	if !strings.Contains(reason, xidName) {
		return ""
	}
	long := len(reason) >= longReason
	for _, gpu := range slices.Sorted(maps.Keys(x.forgotten)) {
		if long || strings.Contains(reason, xidName+gpu) {
			return fmt.Sprintf("whether the GPU of %q is mended: %s", gpu, x.forgotten[gpu])
		}
	}
	named := 0
	for _, gpu := range x.well {
		named += strings.Count(reason, xidName+gpu)
	}
	if named < strings.Count(reason, xidName) {
		return "whether a GPU is mended that the reason of the drain names: sluiced does not have it now"
	}
	return ""
}
