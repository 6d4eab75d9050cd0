package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/probe"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// probeTime is how long one may take, with the pause that a user's has to wait for.
const probeTime = probe.Life + callTime

// probed is what is known of one owner's link: JSON's object.
type probed struct {
	Owner    string       `json:"owner"`
	Probe    *lease.Probe `json:"probe,omitempty"`
	Expect   []string     `json:"expect,omitempty"`
	Findings []rpc.Check  `json:"findings,omitempty"`
	Error    string       `json:"error,omitempty"`
}

func newProbe() *cobra.Command {
	var socket string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "probe [OWNER...]",
		Short: "Measure the link to an owner, both ways",
		Long: `Measure the link from this node to owners, over connections that are opened as those of
programs are, encrypted if theirs are: round trip, rate to and from the owner over one connection
and over four at a time, segments that were sent again, sizes of packets, and the owner's clock.
Then say what programs may expect, and what is wrong with the link, with a remedy; docs/probe.md
explains each finding. Without OWNER every owner of this node's pools is measured, one after the other.

A probe sends as fast as it can, for about 4 s. Those of users are shorter, and follow each other
after a pause. An owner takes one at a time.

The exit status is 1 if an owner could not be measured.`,
		Example:           "  sluice probe gpu01\n  sluice probe\n  sluice probe gpu01 --json | jq '.[].probe.flows'",
		ValidArgsFunction: completeOwners(&socket),
		RunE: func(cmd *cobra.Command, args []string) error {
			if slices.Contains(args, "") {
				return errors.New("an owner without a name; see sluice gpus")
			}
			owners := slices.Clone(args)
			if len(owners) == 0 {
				var err error
				if owners, err = ownersOf(cmd.Context(), socket); err != nil {
					return err
				}
			}
			return probeAll(cmd, socket, owners, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON; rates in bytes a second, times in nanoseconds")
	socketFlag(cmd, &socket)
	return cmd
}

// ownersOf are the owners of all pools, answering or not.
func ownersOf(ctx context.Context, socket string) ([]string, error) {
	pools, err := question(ctx, socket, func(ctx context.Context, d local) ([]rpc.Pool, error) { return d.Pool(ctx, "") })
	if err != nil {
		return nil, err
	}
	var names []string
	for _, p := range pools {
		for _, o := range p.Owners {
			names = append(names, o.Name)
		}
	}
	slices.Sort(names)
	if names = slices.Compact(names); len(names) == 0 {
		return nil, errors.New("no pool has an owner; name the owners under pools in sluice.yaml")
	}
	return names, nil
}

func completeOwners(socket *string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		names, err := ownersOf(cmd.Context(), *socket)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names = slices.DeleteFunc(names, func(n string) bool { return slices.Contains(args, n) })
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// probeAll measures the owners one after the other, and prints each as soon as it is known.
func probeAll(cmd *cobra.Command, socket string, owners []string, asJSON bool) error {
	w := cmd.OutOrStdout()
	var all []probed
	failed := false
	for i, name := range owners {
		r := probed{Owner: name}
		p, err := within(cmd.Context(), probeTime, socket, func(ctx context.Context, d local) (lease.Probe, error) { return d.Probe(ctx, name) })
		switch {
		case errors.Is(err, errNoDaemon), err != nil && len(owners) == 1 && !asJSON:
			return err
		case err != nil:
			failed, r.Error = true, err.Error()
		default:
			r.Probe, r.Expect, r.Findings = &p, probe.Expect(&p), probe.Findings(&p)
		}
		if asJSON {
			all = append(all, r)
			continue
		}
		if i > 0 {
			fmt.Fprintln(w)
		}
		if err := printProbe(w, &r); err != nil {
			return err
		}
	}
	if asJSON {
		if err := printJSON(w, all); err != nil {
			return err
		}
	}
	if failed {
		return &exitError{status: exitFailure}
	}
	return nil
}

func printProbe(w io.Writer, r *probed) error {
	var b strings.Builder
	p := r.Probe
	switch {
	case p == nil:
		fmt.Fprintf(&b, "%s: %s\n", plain(r.Owner), plain(r.Error))
	case !p.Local:
		how := "not encrypted"
		if p.Encrypted {
			how = "encrypted"
		}
		fmt.Fprintf(&b, "%s from %s, %s\n", plain(p.Owner), plain(p.Node), how)
		for _, f := range facts(p) {
			fmt.Fprintf(&b, "  %-10s  %s\n", f[0], plain(f[1]))
		}
		b.WriteByte('\n')
	}
	for _, s := range r.Expect {
		fmt.Fprintln(&b, plain(s))
	}
	for _, c := range r.Findings {
		fmt.Fprintf(&b, "%s: %s: %s; %s (docs/probe.md#%s)\n", c.Level, c.Name, plain(c.Text), plain(c.Remedy), c.Name)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// facts are the figures, a line each.
func facts(p *lease.Probe) [][2]string {
	out := [][2]string{{"round trip", fmt.Sprintf("%s shortest, %s median, %s for 99 of 100, of %d", probe.Time(p.RoundTrip), probe.Time(p.RoundTripMedian), probe.Time(p.RoundTrip99), p.Exchanges)}}
	for _, way := range []struct {
		up   bool
		name string
	}{{true, "to it"}, {false, "from it"}} {
		var rates []string
		var segments, resent uint64
		for _, f := range p.Flows {
			if f.Up != way.up {
				continue
			}
			segments, resent = segments+f.Segments, resent+f.Resent
			over := "one connection"
			if f.Connections != 1 {
				over = strconv.FormatUint(uint64(f.Connections), 10)
			}
			rates = append(rates, probe.Rate(f.Rate)+" over "+over)
		}
		if len(rates) > 0 {
			out = append(out, [2]string{way.name, fmt.Sprintf("%s; %d of %d segments sent again", strings.Join(rates, ", "), resent, segments)})
		}
	}
	out = append(out, [2]string{"here", end(&p.From)}, [2]string{"there", end(&p.To)})
	where := "ahead"
	if p.Ahead < 0 {
		where = "behind"
	}
	return append(out, [2]string{"its clock", fmt.Sprintf("%s %s, give or take %s", probe.Time(p.Ahead.Abs()), where, probe.Time(p.RoundTrip/2))})
}

// end is what one machine says of the link.
func end(e *lease.ProbeEnd) string {
	said := "interface " + plain(e.Device)
	if e.DeviceSpeed > 0 {
		said += fmt.Sprintf(" of %g Gb/s", float64(e.DeviceSpeed)/1e9)
	}
	return said + fmt.Sprintf(", packets of %d bytes, %d on the way, %d of data in each; buffers %d KiB out, %d KiB in", e.DeviceMTU, e.PathMTU, e.Segment, e.SendBuffer>>10, e.ReceiveBuffer>>10)
}
