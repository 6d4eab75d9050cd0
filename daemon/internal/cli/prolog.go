package cli

// The commands of Slurm's four scripts. They read the run of the job from the environment that
// slurmd and slurmctld set, call the daemon of this node, and end in time. Slurm acts on how
// they end: a Prolog or Epilog that fails drains the node, so those two never fail; a
// PrologSlurmctld that fails requeues the job, which is right when the pool has no room.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/spank/options"
)

// neverFails are the commands whose exit status is 0 whatever happens, even with a mistyped
// flag. prolog-ctld exits with 1 to have the job requeued.
var neverFails = []string{"prolog", "epilog", "prolog-ctld", "epilog-ctld"}

// script is one of the four commands.
type script struct {
	use, short, long string
	timeout          time.Duration
	controller       bool
	config           string // of sluiced
	// call calls the daemon. The text, if it is not empty, is for Slurm's log.
	call func(ctx context.Context, d rpc.JobService, run rpc.JobRun) (say string, requeue bool, err error)
}

func newProlog() *cobra.Command {
	return (&script{
		use: "prolog", short: "Get a job its lease on this node; for Slurm's Prolog", timeout: 25 * time.Second,
		long: `Tell the daemon of this node that a job begins here, as slurmd's environment says, so
that it takes over the lease that the controller has reserved, or gets one.

The exit status is always 0: any other would drain the node. A job that must not run
is told so by the SPANK plug-in when its first task starts.`,
		call: func(ctx context.Context, d rpc.JobService, run rpc.JobRun) (string, bool, error) {
			a, err := d.Prolog(ctx, rpc.Peer{}, run)
			return told(a), false, err
		},
	}).command()
}

func newEpilog() *cobra.Command {
	s := &script{
		use: "epilog", short: "Return a job's lease on this node; for Slurm's Epilog", timeout: 10 * time.Second,
		long: `Tell the daemon of this node that a job has ended here, as slurmd's environment says, so
that it returns what it holds for the job. It may be repeated, and needs no Prolog.

The exit status is always 0: any other would drain the node.`,
	}
	s.call = func(ctx context.Context, d rpc.JobService, run rpc.JobRun) (string, bool, error) {
		list, err := d.Epilog(ctx, rpc.Peer{}, run)
		text := ended(list)
		if e := appendReport(ctx, s.slurm, run, list); e != nil {
			text += "; " + e.Error()
		}
		return text, false, err
	}
	return s.command()
}

func newPrologCtld() *cobra.Command {
	return (&script{
		use: "prolog-ctld", short: "Reserve a job's leases on all its nodes; for PrologSlurmctld", timeout: 25 * time.Second, controller: true,
		long: `Tell the daemon of this node that a job is about to begin, as slurmctld's environment
says, so that it reserves leases for all of the job's nodes, or for none.

The exit status is 1 if the pool has no room: Slurm then puts the job back into the
queue. Otherwise it is 0; without a daemon here, the nodes get their leases by
themselves.`,
		call: func(ctx context.Context, d rpc.JobService, run rpc.JobRun) (string, bool, error) {
			a, err := d.PrologController(ctx, rpc.Peer{}, run)
			return told(a), a.Outcome == rpc.JobRequeue, err
		},
	}).command()
}

func newEpilogCtld() *cobra.Command {
	return (&script{
		use: "epilog-ctld", short: "End a job's leases on all its nodes; for EpilogSlurmctld", timeout: 10 * time.Second, controller: true,
		long: `Tell the daemon of this node that a job has ended, as slurmctld's environment says, so
that what it may still have anywhere is ended, on nodes that are gone too.

The exit status is always 0.`,
		call: func(ctx context.Context, d rpc.JobService, run rpc.JobRun) (string, bool, error) {
			list, err := d.EpilogController(ctx, rpc.Peer{}, run)
			return ended(list), false, err
		},
	}).command()
}

func (s *script) command() *cobra.Command {
	var socket string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: s.use, Short: s.short, Long: s.long, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// slurmd ends a script that takes too long by SIGTERM; that is no failure either.
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			return s.run(ctx, socket, func(format string, a ...any) {
				fmt.Fprintf(cmd.ErrOrStderr(), "sluice: "+s.use+": "+format+"\n", a...)
			})
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", s.timeout, "give up after this long")
	socketFlag(cmd, &socket)
	if !s.controller {
		cmd.Flags().StringVarP(&s.config, "config", "c", config.DefaultPath, "configuration of sluiced, for where Slurm's commands are")
	}
	return cmd
}

// slurm returns Slurm's commands, for what a script asks by itself. If the configuration cannot
// be read, the daemon does not run either and reports that; the commands may still be at their
// usual places.
func (s *script) slurm() *slurm.Commands {
	at := config.Default().Slurm
	if c, err := config.Load(s.config); err == nil {
		at = c.Slurm
	}
	return slurm.New(at.Bin, at.Conf)
}

func (s *script) run(ctx context.Context, socket string, say func(string, ...any)) error {
	run, err := jobRun(s.controller, os.LookupEnv)
	if err != nil {
		say("%v", err)
		return nil
	}
	if s.controller && !form.HasLicence(*run.Licences) {
		return nil // most jobs: no call is needed
	}
	tell := func(text string) { say("%v", form.OfJob(run.Job, errors.New(plain(text)))) }
	d, socket, err := dial(socket)
	if err != nil {
		tell(err.Error())
		return nil
	}
	defer d.Close()
	js, ok := d.(rpc.JobService)
	if !ok {
		tell("this client of sluiced has no calls for jobs")
		return nil
	}
	text, requeue, err := s.call(ctx, js, run)
	switch {
	case err != nil:
		tell(daemonError(socket, err).Error())
		if s.use == "prolog" {
			if err := noteAlone(ctx, s.slurm, socket, run); err != nil {
				tell(err.Error())
			}
		}
	case text != "":
		tell(text)
	}
	if requeue {
		return &exitError{status: exitFailure}
	}
	return nil
}

// told returns a line about a Prolog's answer, "" if there is nothing to report.
func told(a rpc.JobAnswer) string {
	switch {
	case a.Outcome == rpc.JobNone && a.Reason == "":
		return ""
	case a.Outcome == rpc.JobGranted:
		return "granted, lease " + a.Lease
	}
	return string(a.Outcome) + ": " + a.Reason
}

// ended returns a line about an Epilog's answer.
func ended(list []lease.Report) string {
	if len(list) == 0 {
		return ""
	}
	ids := map[string]bool{}
	for _, r := range list {
		ids[r.Lease] = true
	}
	return "ended, " + strings.Join(slices.Sorted(maps.Keys(ids)), " ")
}

// jobRun reads a script's environment.
func jobRun(controller bool, env func(string) (string, bool)) (rpc.JobRun, error) {
	get := func(k string) string { v, _ := env(k); return v }
	number := func(k string) uint32 { // 0 if absent: some are after a loss of slurmctld's state
		n, _ := strconv.ParseUint(get(k), 10, 32)
		return uint32(n)
	}
	run := rpc.JobRun{
		Job: get("SLURM_JOB_ID"), Restart: number("SLURM_JOB_RESTART_COUNT"),
		GID: number("SLURM_JOB_GID"), User: get("SLURM_JOB_USER"),
		Account: get("SLURM_JOB_ACCOUNT"), Name: get("SLURM_JOB_NAME"), Partition: get("SLURM_JOB_PARTITION"),
		Stdout: get("SLURM_JOB_STDOUT"), WorkDir: get("SLURM_JOB_WORK_DIR"), Options: options.Passed(env),
	}
	if !form.JobID(run.Job).Valid() {
		return run, fmt.Errorf("SLURM_JOB_ID is %q; this is for Slurm's scripts, whose environment slurmd and slurmctld set", run.Job)
	}
	uid, err := strconv.ParseUint(get("SLURM_JOB_UID"), 10, 32)
	if err != nil {
		return run, fmt.Errorf("job %s: SLURM_JOB_UID is %q; this is for Slurm's scripts, whose environment slurmd and slurmctld set", run.Job, get("SLURM_JOB_UID"))
	}
	run.UID = uint32(uid)
	if controller {
		if run.Nodes, err = slurm.ParseHosts(get("SLURM_JOB_NODELIST")); err != nil {
			return run, fmt.Errorf("job %s: %w", run.Job, err)
		}
	}
	// A job without licences has no variable. In a node's script the variable exists only from
	// 23.02 on, the release that also added a start time.
	licences, known := env("SLURM_JOB_LICENSES")
	if _, start := env("SLURM_JOB_START_TIME"); known || controller || start {
		run.Licences = &licences
	}
	return run, nil
}
