package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/jobreport"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/usernames"
)

// reporter is the part of the daemon that knows what jobs have used.
type reporter interface {
	Report(ctx context.Context, peer rpc.Peer, job string) ([]lease.Report, error)
}

func newReport() *cobra.Command {
	var socket string
	var past history
	cmd := &cobra.Command{
		Use:   "report [JOB]",
		Short: "Show what a job has used of its fractions, or all jobs of the last week",
		Long: `Print what a job asked for, was granted and has used: the most memory, the time in which
the GPU computed for it, calls and bytes. The job runs, or ended recently (lease.tombstone,
an hour by default). Each line is one lease at one owner. A job has one for each node, and
those of its earlier runs if it was requeued. The line that begins with sluice: sums up the last
run, and says how many were before it. After the end a verdict says whether less would have done.
Slurm keeps the first of the two: sacct -j JOB -o AdminComment%200

JOB is a job as squeue names it, 4711, 4711_3 or 4711+1, or the run-... of sluice run. The
number of an array or of a heterogeneous job is also that of one of its parts: standard error
says which part is shown, if sacct knows it. A node knows the leases of its own jobs, Slurm's controller those of all. Users
see their own jobs.

GPU TIME comes from events on the GPU and NVML's samples, to about a second. HELD is the time
for which the lease had the GPU for itself. WAITED is the time for which its sessions wanted
the GPU and did not have it, added up over sessions, and THROTTLED the part of that caused by
the lease's own share. WAITS counts the calls that waited for an answer. Where connections of
its programs were lost, the line has cuts, how often, and cut-time, for how long. An owner
whose machine was started again has lost what it had counted: the line then has lost, with
the number of such leases.

Without JOB: your jobs that ended in the last seven days, or in the time that --since and --until
give, one a line, from Slurm's accounting (sacct). It works on every login node. GRANTED and MEMORY
are of all the job's nodes together. USED is the time in which GPUs computed, as a part of what the
granted percent of them could in the job's time; it is more than 100 where the share of others was lent. VERDICT
says what to ask for the next time, for jobs that completed or reached their time limit. The sums are
hours of whole GPUs, and UNUSED the jobs of which no program used the GPU. Where an owner has lost
what it had counted, USED and PEAK are -, and the sums have what is known.
Of a job with several runs it is the last. --user, --account and --all are for root, SlurmUser and
Slurm's operators, and --account for its coordinators; others see their own.`,
		Example: "  sluice report 4711\n  sluice report 4711 --json | jq '.[].use[].peak'\n  sluice report\n  sluice report --since 30d --until 7d\n  sluice report --account physics --since 2026-11-01 --json | jq .total",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("%d jobs given; use sluice report JOB, or sluice report for all of the last week", len(args))
			}
			for _, name := range listed {
				if len(args) == 1 && cmd.Flags().Changed(name) {
					return fmt.Errorf("--%s is for the list of jobs; leave job %s or the option out", name, plain(args[0]))
				}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return past.run(cmd)
			}
			return reportOf(cmd, socket, args[0], past.asJSON)
		},
	}
	past.flags(cmd)
	cmd.Flags().BoolVar(&past.asJSON, "json", false, "print all fields as JSON; sizes in bytes, times in RFC 3339, durations in nanoseconds")
	socketFlag(cmd, &socket)
	return cmd
}

// reportOf prints the reports of one job.
func reportOf(cmd *cobra.Command, socket, name string, asJSON bool) error {
	job, err := jobNumber(cmd.Context(), name)
	if err != nil {
		return err
	}
	whole := askParts(cmd.Context(), name, slurmHere())
	rs, err := question(cmd.Context(), socket, func(ctx context.Context, d local) ([]lease.Report, error) {
		r, ok := d.(reporter)
		if !ok {
			return nil, lease.Errorf(lease.WrongPeer, "this sluiced knows no reports")
		}
		return r.Report(ctx, rpc.Peer{}, job)
	})
	if err != nil {
		return err
	}
	ps := whole()
	if len(rs) == 0 {
		return fmt.Errorf("no report of job %q that you may see is known here; run this on its node or on Slurm's controller, or for a job that ended long ago use sacct -j %s -o AdminComment%%200%s", name, plain(name), ps.choice())
	}
	if part := ps.shown(); part != "" {
		fmt.Fprintln(cmd.ErrOrStderr(), "sluice: "+part)
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), rs)
	}
	return printReports(cmd.OutOrStdout(), rs, time.Now())
}

func printReports(w io.Writer, rs []lease.Report, now time.Time) error {
	slices.SortStableFunc(rs, func(a, b lease.Report) int { return a.Made.Compare(b.Made) })
	users := &usernames.Names{}
	r := rs[0]
	head := "job " + plain(r.Key.Job)
	if r.JobName != "" {
		head += " (" + plain(r.JobName) + ")"
	}
	head += " of " + plain(users.Name(r.UID))
	if r.Account != "" && r.Account != "(null)" { // as Slurm writes it without accounting
		head += ", account " + plain(r.Account)
	}
	if _, err := fmt.Fprintln(w, head); err != nil {
		return err
	}
	rows := make([][]string, 0, len(rs))
	for _, r := range rs {
		rows = append(rows, reportRow(r, now))
	}
	if err := table(w, "NODE LEASE OWNER ASKED GRANTED POLICY PEAK GPU_TIME HELD WAITED THROTTLED CALLS WAITS IN OUT SESSIONS TIME STATE", rows); err != nil {
		return err
	}
	for _, r := range rs {
		if r.Failed == 0 {
			continue
		}
		if _, err := fmt.Fprintf(w, "lease %s at %s: %d of %d sessions failed, the last one of %s\n", short(r.Lease), r.Owner, r.Failed, r.Sessions, plain(r.Failure)); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintln(w, jobreport.Line(rs)); err != nil {
		return err
	}
	verdict := jobreport.Verdict(rs)
	if verdict == "" {
		return nil
	}
	_, err := fmt.Fprintln(w, "verdict: "+verdict)
	return err
}

func reportRow(r lease.Report, now time.Time) []string {
	asked := join(r.Asked, func(f lease.Fraction) string {
		if f.Mem == 0 {
			return fmt.Sprintf("%d%%", f.Percent)
		}
		return fmt.Sprintf("%d%%:%s", f.Percent, form.ShortBytes(f.Mem))
	})
	_, peak := total(r.Use)
	state, end := "lives", now
	if !r.Ended.IsZero() {
		state, end = "ended", r.Ended
		if r.Reason != "" {
			state += ": " + r.Reason
		}
	}
	c := r.Counts
	held, waited, throttled := "-", "-", c.Throttle
	if len(r.Shares) > 0 {
		s := lease.SumShares(r.Shares)
		held, waited, throttled = jobreport.Duration(s.Held), jobreport.Duration(s.Waited), s.Throttled
	}
	use := []string{form.ShortBytes(peak), jobreport.Duration(r.GPUTime), held, waited, jobreport.Duration(throttled), form.ShortCount(c.Calls), form.ShortCount(c.Waits),
		form.ShortBytes(c.BytesIn), form.ShortBytes(c.BytesOut), strconv.FormatUint(r.Sessions, 10)}
	if r.Lost && r.Sessions == 0 { // not known
		use = slices.Repeat([]string{"-"}, len(use))
	}
	row := []string{r.Key.Node, short(r.Lease), r.Owner, asked, join(r.Grants, fractionText), (&lease.Request{Policy: r.Policy, Lend: r.Lend}).PolicyName()}
	return append(append(row, use...), elapsed(end.Sub(r.Made)), state)
}

// appendReport appends a job's report to its output if the job asks for it.
func appendReport(ctx context.Context, commands func() *slurm.Commands, run rpc.JobRun, reports []lease.Report) error {
	if !jobreport.Asked(run) || len(reports) == 0 {
		return nil
	}
	// The Epilog's environment names the output only if the user has named it, with its
	// placeholders. So Slurm is asked.
	path, node, err := commands().Output(ctx, run.Job)
	if err != nil {
		return fmt.Errorf("report not appended: %w", err)
	}
	if path == "" || node != os.Getenv("SLURMD_NODENAME") {
		return nil // no script, or not here
	}
	run.Stdout = path
	return jobreport.Append(ctx, run, reports)
}

// newAppend is the child that package jobreport runs as the job's user.
func newAppend() *cobra.Command {
	return &cobra.Command{
		Use:    jobreport.AppendCommand + " UID,GID,... FILE",
		Short:  "Write standard input at the end of a job's output",
		Hidden: true,
		Args:   cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := jobreport.Become(args[0]); err != nil {
				return err
			}
			if status := jobreport.AppendTo(args[1], cmd.InOrStdin()); status != 0 {
				return &exitError{status: status}
			}
			return nil
		},
	}
}
