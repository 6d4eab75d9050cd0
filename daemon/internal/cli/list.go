package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/jobreport"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/usernames"
)

func leases(ctx context.Context, socket string) ([]lease.Status, error) {
	ls, err := question(ctx, socket, func(ctx context.Context, d local) ([]lease.Status, error) { return d.List(ctx) })
	slices.SortFunc(ls, func(a, b lease.Status) int {
		if c := a.Made.Compare(b.Made); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return ls, err
}

func newList() *cobra.Command {
	var socket string
	var asJSON, sessions bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the leases of this node and their sessions",
		Long: `List the leases that this node's daemon holds: yours, or as root all of them.

FRACTIONS shows percent and memory of each fraction, POLICY how the time of their GPUs is
shared, which sluice set changes. USED counts the memory of all sessions and their overhead,
which is what the worker's context takes on the GPU. CUTS counts how often a session's
connection was lost and made again, CUT_TIME says for how long there was none. IDLE says for how
long no program has had work for the GPU, from a minute on. PART is what a step with a --gres of
its own has of the lease: percent and memory, or whole GPUs by their numbers.`,
		Example: "  sluice list\n  sluice list --sessions\n  sluice list --json | jq -r '.[].id'",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ls, err := leases(cmd.Context(), socket)
			if err != nil {
				return err
			}
			w := cmd.OutOrStdout()
			if asJSON {
				if ls == nil {
					ls = []lease.Status{}
				}
				return printJSON(w, ls)
			}
			now, users := time.Now(), &usernames.Names{}
			if err := table(w, "LEASE JOB USER STATE FRACTIONS POLICY OWNERS USED PEAK SESSIONS IDLE AGE LEFT", leaseRows(ls, now, users)); err != nil || !sessions {
				return err
			}
			var rows [][]string
			for _, l := range ls {
				for _, s := range l.Sessions {
					used, peak := total(s.Use)
					rows = append(rows, []string{short(s.ID), short(l.ID), strconv.FormatUint(uint64(s.Client), 10), s.Program, partText(s.Part),
						form.ShortBytes(used), form.ShortBytes(peak), strconv.FormatUint(s.Counts.Calls, 10), strconv.FormatUint(s.Counts.Waits, 10),
						form.ShortBytes(s.Counts.BytesIn), form.ShortBytes(s.Counts.BytesOut), strconv.FormatUint(s.Counts.Errors, 10),
						strconv.FormatUint(s.Counts.Cuts, 10), jobreport.Duration(s.Counts.CutTime), since(now, s.Started)})
				}
			}
			if _, err := fmt.Fprintln(w); err != nil {
				return err
			}
			return table(w, "SESSION LEASE PID PROGRAM PART USED PEAK CALLS WAITS IN OUT ERRORS CUTS CUT_TIME AGE", rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print all fields as JSON; sizes in bytes, times in RFC 3339")
	cmd.Flags().BoolVar(&sessions, "sessions", false, "list the sessions too")
	socketFlag(cmd, &socket)
	return cmd
}

// partText is what a session's step may have of the lease, where that is not all.
func partText(p *lease.Part) string {
	if p == nil {
		return "-"
	}
	if p.OnGPUs() {
		return "GPU" + p.Devices()
	}
	return fmt.Sprintf("%d%%+%s", p.Percent, form.ShortBytes(p.Mem))
}

// idleText is for how long a lease has had no work, if that is longer than a program pauses.
func idleText(l *lease.Status) string {
	if l.Idle < time.Minute {
		return "-"
	}
	return elapsed(l.Idle)
}

func leaseRows(ls []lease.Status, now time.Time, users *usernames.Names) [][]string {
	rows := make([][]string, 0, len(ls))
	for _, l := range ls {
		var owners []string
		for _, g := range l.Grants {
			if !slices.Contains(owners, g.Owner) {
				owners = append(owners, g.Owner)
			}
		}
		left := "-"
		if !l.Expires.IsZero() {
			left = elapsed(l.Expires.Sub(now))
		}
		used, peak := total(l.Use)
		rows = append(rows, []string{short(l.ID), l.Request.Key.Job, users.Name(l.Request.UID), string(l.State),
			join(l.Grants, fractionText), l.Request.PolicyName(), strings.Join(owners, ","), form.ShortBytes(used), form.ShortBytes(peak),
			strconv.Itoa(len(l.Sessions)), idleText(&l), since(now, l.Made), left})
	}
	return rows
}
