package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// allHealth has the options of sluice health --all.
type allHealth struct {
	wanted, json   bool
	config, socket string
}

func (o *allHealth) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&o.wanted, "all", false, "ask all owners of the pools, for root and SlurmUser on a controller's node")
	for _, other := range []string{"quiet", "node", "drain"} {
		cmd.MarkFlagsMutuallyExclusive("all", other)
	}
}

// drains is the part of *slurm.Commands that knows which nodes are drained.
type drains interface {
	DrainsWith(ctx context.Context, prefix string) (map[string]string, error)
}

func (o *allHealth) run(cmd *cobra.Command) error {
	all, err := question(cmd.Context(), o.socket, func(ctx context.Context, d local) (rpc.HealthAll, error) { return d.HealthAll(ctx) })
	if err != nil {
		return &exitError{healthUnknown, err}
	}
	if all.Asked == 0 {
		return &exitError{healthUnknown, errors.New("sluiced asked no node; run the same version of sluice and sluiced")}
	}
	if c, err := config.Load(o.config); err != nil {
		noDrains(&all, err, "give sluiced's configuration by --config, as somebody who may read it")
	} else {
		addDrains(cmd.Context(), &all, slurm.New(c.Slurm.Bin, c.Slurm.Conf))
	}
	if all.Findings == nil {
		all.Findings = []rpc.NodesCheck{} // [] in JSON
	}
	if o.json {
		err = printJSON(cmd.OutOrStdout(), all)
	} else {
		err = printHealthAll(cmd.OutOrStdout(), &all)
	}
	if err != nil {
		return &exitError{healthUnknown, err}
	}
	if s := healthAllStatus(&all); s != 0 {
		return &exitError{status: s}
	}
	return nil
}

// addDrains adds the nodes that sluice health --drain has drained: nodes without GPUs of their own are known by nothing else.
func addDrains(ctx context.Context, all *rpc.HealthAll, s drains) {
	found, err := s.DrainsWith(ctx, drainReason)
	if err != nil {
		noDrains(all, err, "see that scontrol show nodes works here")
		return
	}
	same := map[string][]string{}
	for node, reason := range found {
		same[reason] = append(same[reason], node)
	}
	for _, reason := range slices.Sorted(maps.Keys(same)) {
		c := rpc.Check{Name: "drained", Level: rpc.Fail, Node: true, Text: reason, Remedy: "mend it there; sluice health --drain resumes the node"}
		all.Findings = append(all.Findings, rpc.NodesCheck{Check: c, Nodes: slices.Sorted(slices.Values(same[reason]))})
	}
	slices.SortStableFunc(all.Findings, func(a, b rpc.NodesCheck) int { return a.Level.Rank() - b.Level.Rank() })
}

// noDrains adds that drained nodes may be missing.
func noDrains(all *rpc.HealthAll, err error, remedy string) {
	c := rpc.Check{Name: "slurm", Level: rpc.Warn, Text: "which nodes are drained is not known: " + err.Error(), Remedy: remedy}
	all.Findings = append(all.Findings, rpc.NodesCheck{Check: c, Nodes: []string{"slurmctld"}})
}

func printHealthAll(w io.Writer, all *rpc.HealthAll) error {
	for _, f := range all.Findings {
		text := f.Text
		if f.Remedy != "" {
			text += "; " + f.Remedy
		}
		if _, err := fmt.Fprintf(w, "%-4s  %s: %s: %s\n", plain(string(f.Level)), plain(slurm.FoldHosts(f.Nodes)), plain(f.Name), plain(text)); err != nil {
			return err
		}
	}
	if all.LeftOut > 0 {
		more := fmt.Sprintf("%d more findings are", all.LeftOut)
		if all.LeftOut == 1 {
			more = "1 more finding is"
		}
		if _, err := fmt.Fprintf(w, "%s left out, the least severe: see sluice health on the nodes\n", more); err != nil {
			return err
		}
	}
	nodes := "nodes"
	if all.Asked == 1 {
		nodes = "node"
	}
	_, err := fmt.Fprintf(w, "%d %s asked: %d well, %d with warnings, %d with failures, %d without an answer\n", all.Asked, nodes, all.Well, all.Warned, all.Failed, all.Unheard)
	return err
}

// healthAllStatus is the worst of the findings and of the sums: some findings may be left out. A node that was not heard
// is a warning or a failure, which its finding says; failures are left out last.
func healthAllStatus(all *rpc.HealthAll) int {
	cs := make([]rpc.Check, len(all.Findings))
	for i, f := range all.Findings {
		cs[i] = f.Check
	}
	status := healthStatus(cs)
	if all.Failed > 0 {
		status = healthFail
	}
	if all.Warned+all.Unheard+all.LeftOut > 0 {
		status = max(status, healthWarn)
	}
	return status
}
