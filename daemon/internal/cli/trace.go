package cli

// sluice trace, and --timeline of sluice run.
//
//	a program    its environment names a folder; the shim of each of its processes writes there what its workers say, and once the
//	             program has ended, one timeline is made of all (collected)
//	a lease      each session of it is asked through the lease's socket (tracelive.go), into a folder as well

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/timeline"
	"github.com/sluice-hpc/sluice/internal/pattern"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// timelineVariable names the folder for the shim.
const timelineVariable = "SLUICE_TIMELINE"

func newTrace() *cobra.Command {
	var socket, out string
	var seconds float64
	cmd := &cobra.Command{
		Use:   "trace [-o FILE] {-- PROGRAM [ARGS...] | LEASE | JOB}",
		Short: "Record when kernels, copies, waits and turns began and ended",
		Long: `Write a timeline of what programs do on their GPUs, for https://ui.perfetto.dev or
chrome://tracing. Profilers that use CUPTI, such as torch.profiler with CUDA activities and
Nsight Systems, cannot see a GPU of another machine; this is what there is instead.

With -- PROGRAM, trace runs PROGRAM and records all of it. PROGRAM needs a lease, so run
this in a job, as srun sluice trace -o t.json -- python3 train.py. Without Slurm use
sluice run --timeline t.json -- PROGRAM. The exit status is PROGRAM's, or one of those of
sluice run.

With LEASE or JOB, trace records for --seconds what the programs of a lease of this node do
that runs already: yours, or as root any. The programs are not disturbed otherwise. ^C ends
it early. LEASE is an id as sluice list shows it, or the beginning of one.

The timeline has, for each process that uses the lease:

  streams    kernels by name with grid and block, copies with direction and bytes, fills and
             graphs. The argument "given" is when the worker gave the work to the driver
  calls      that the program waited for, from their arrival at the worker to the answer.
             The network's time is not in it; sluice run --trace shows that
  turns      on a GPU that is shared, waits for them, and waits within them (throttled)
  others     host functions, and times without a connection

Begin and end of work are what events around it measured on the GPU, so a gap of a few
microseconds between two kernels may be the events' own. These events cost the worker time
for each launch, and may keep small kernels of different streams from running side by side:
look for proportions, and measure speed without trace. Work in a capture has no events; of
a graph there is one span for each launch.

A trace has at most 64 MiB for each session, about 800,000 records, and FILE at most
512 MiB. What did not fit is counted: in FILE, and on standard error.`,
		Example: `  srun sluice trace -o step.json -- python3 train.py
  sluice run --fraction 50 --timeline step.json -- python3 train.py
  sluice trace 4711 --seconds 5 -o step.json`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case dash == 0 && len(args) > 0, dash < 0 && len(args) == 1:
				return nil
			case dash < 0 && len(args) > 1:
				return errors.New("want one lease or job; a program comes after --, as sluice trace -- PROGRAM [ARGS...]")
			}
			return errors.New("nothing to trace; use sluice trace -- PROGRAM [ARGS...], or sluice trace JOB, and see sluice list")
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			say := func(format string, a ...any) { fmt.Fprintf(cmd.ErrOrStderr(), "sluice: "+format+"\n", a...) }
			if cmd.ArgsLenAtDash() == 0 {
				if cmd.Flags().Changed("seconds") {
					return failed(errors.New("--seconds is for a lease; a program is traced until it ends"))
				}
				return traceProgram(args, out, say)
			}
			d := time.Duration(seconds * float64(time.Second))
			if most := wire.MaxTraceMS * time.Millisecond; d < time.Millisecond || d > most {
				return fmt.Errorf("--seconds %g: want 0.001 to %g", seconds, most.Seconds())
			}
			return traceLease(cmd.Context(), socket, args[0], d, out, say)
		},
		ValidArgsFunction: completeLeases(&socket),
	}
	f := cmd.Flags()
	f.StringVarP(&out, "output", "o", "sluice-trace.json", "file for the timeline; one that exists is replaced")
	f.Float64Var(&seconds, "seconds", 10, "how long to trace a lease; at most 600")
	socketFlag(cmd, &socket)
	_ = cmd.MarkFlagFilename("output", "json")
	return cmd
}

// traceProgram runs a program and writes its timeline.
func traceProgram(args []string, out string, say func(string, ...any)) error {
	path, err := lookProgram(args[0])
	if err != nil {
		return err
	}
	c, err := collect(out)
	if err != nil {
		return failed(err)
	}
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, timelineVariable+"=") })
	ws, err := runProgram(path, args, append(env, timelineVariable+"="+c.dir))
	if err != nil {
		c.drop()
		return &exitError{exitNotRunnable, err}
	}
	c.finish(say)
	return programStatus(ws)
}

// collected is traces on their way into a timeline.
type collected struct {
	dir  string // of the traces
	file *safefile.Pending
	path string
}

// collect makes a folder for traces, and sees that the timeline can be written.
func collect(path string) (*collected, error) {
	file, err := safefile.Create(path, safefile.How{Mode: 0o600, Volatile: true, Unnamed: true})
	if err != nil {
		return nil, fmt.Errorf("timeline: %w; give another file, whose folder is there", err)
	}
	dir, err := os.MkdirTemp("", "sluice-trace")
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("folder for traces: %w; TMPDIR names another place", err)
	}
	return &collected{dir, file, path}, nil
}

func (c *collected) drop() {
	_ = os.RemoveAll(c.dir)
	_ = c.file.Close()
}

// traceFile is the name of a trace that a shim writes: of a process, and its number of the lease's owner.
var traceFile = pattern.New(`^[0-9]+-([0-9]+)(?:-[0-9]+)?\.trace$`)

// write makes the timeline.
func (c *collected) write(t *timeline.Writer) error {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	type one struct {
		path, where string
		began       uint64
	}
	var all []one
	for _, e := range entries {
		m := traceFile().FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		o := one{path: filepath.Join(c.dir, e.Name())}
		if m[1] != "0" {
			o.where = "at owner " + m[1]
		}
		ok := false
		if err := with(o.path, func(r io.Reader) error { o.began, ok = timeline.Began(r); return nil }); err != nil {
			return err
		}
		if ok {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b one) int { return cmp.Compare(a.began, b.began) })
	var errs []error // a trace that cannot be read does not keep the others out
	for _, o := range all {
		errs = append(errs, with(o.path, func(r io.Reader) error { return t.Add(r, o.where) }))
	}
	return errors.Join(errs...)
}

func with(path string, f func(io.Reader) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	return f(file)
}

// finish writes the timeline and says what it lacks. Why there is none is said as well: the program has run all the same.
func (c *collected) finish(say func(string, ...any)) bool {
	defer c.drop()
	t := timeline.New(c.file, timeline.DefaultMost)
	err := c.write(t)
	if t.Sessions() == 0 && err == nil {
		say("no timeline: no process of the program used a GPU of Sluice's, or all were killed at once, or its driver is of a release that has no traces")
		return false
	}
	if err != nil {
		say("timeline %s: %v", c.path, err) // what was read before is written
	}
	if err = t.Close(); err == nil {
		err = c.file.Commit()
	}
	if err != nil {
		say("no timeline: %v", err)
		return false
	}
	say("timeline of %d sessions with %d events: %s; open it in https://ui.perfetto.dev", t.Sessions(), t.Events(), c.path)
	if n := t.Lost + t.Dropped; n > 0 {
		say("%d more events are not in it: %d were lost by workers, and for %d the file had no room", n, t.Lost, t.Dropped)
	}
	return true
}
