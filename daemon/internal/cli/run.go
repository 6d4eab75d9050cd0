package cli

// sluice run: find the program and the shim, get a lease, start the program in its changed
// environment, wait, end the lease, pass the status on. The lease is the daemon's (held.go) or,
// with --worker, that of a worker started by hand (worker.go). program.go runs the program.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// shimFile is what must be in the shim's directory.
const shimFile = "libcuda.so.1"

type runOptions struct {
	worker string
	socket string
	ask    ask
	lib    string
	log    string
	trace  bool

	timeline string // file
	traces   string // folder in which the shim puts what the timeline is made of
}

// daemonOnly are the flags that do not apply to a worker started by hand.
var daemonOnly = []string{"fraction", "rgpu", "type", "pool", "policy", "lend", "place", "count", "time", "min-mem", "same-owner", "grace", "socket"}

func newRun() *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run {--fraction PERCENT | --mem SIZE | --worker ADDR} [flags] -- PROGRAM [ARGS...]",
		Short: "Run a program on a fraction of a remote GPU",
		Long: `Run PROGRAM with the CUDA driver replaced by Sluice's, so that it computes on a
fraction of a GPU that may be in another machine.

With --fraction or --mem, sluice asks the daemon of this node, sluiced, for a lease. The
lease is all or nothing: PROGRAM starts when every fraction has been granted, and the
lease ends when PROGRAM does. If sluice is killed, the daemon notices and ends the
lease. A restart of the daemon does not disturb PROGRAM.

With --worker, sluice uses a sluice-worker that was started by hand at ADDR (HOST:PORT,
tcp:HOST:PORT or unix:PATH), and needs no daemon.

The exit status is PROGRAM's, 128+N if it died of signal N, 127 if it was not
found, 126 if it cannot be executed, and 125 if sluice itself failed.`,
		Example: `  sluice run --fraction 50 --mem 20G -- python3 train.py
  sluice run --fraction 50,50 --type h200 --time 2:00:00 -- ./two-gpus
  sluice run --fraction 100 --count 4 --same-owner -- ./four-gpus
  sluice run --worker gpu01:7070 --mem 20G -- python3 train.py`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("no program given; use sluice run --fraction PERCENT -- PROGRAM [ARGS...]")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			byHand, err := o.byHand(cmd)
			if err != nil {
				return failed(err)
			}
			say := func(format string, a ...any) {
				fmt.Fprintf(cmd.ErrOrStderr(), "sluice: "+format+"\n", a...)
			}
			return o.run(cmd.Context(), args, byHand, say)
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false) // what follows PROGRAM is PROGRAM's, "--" or not
	f.Var(&o.ask.fractions, "fraction", "percent of a GPU, or a list for several GPUs as 50,50; 250 is two whole GPUs and a half")
	f.Var(&o.ask.fractions, "rgpu", "the same as --fraction, as Slurm's --gres=rgpu:N spells it")
	f.Var(&o.ask.mem, "mem", "device memory of each fraction, as 20G (default: its percentage of the GPU's; with --worker: all that the worker offers)")
	f.StringVar(&o.ask.gpuType, "type", "", "only GPUs whose name contains this, as h200, without regard to case")
	f.Var(&o.ask.minMem, "min-mem", "only GPUs that have at least this much memory as a whole, as 80G")
	f.IntVar(&o.ask.count, "count", 1, "number of times to request the fractions of --fraction, each on a GPU of its own")
	f.BoolVar(&o.ask.sameOwner, "same-owner", false, "all fractions on GPUs of one machine")
	f.StringVar(&o.ask.pool, "pool", "", "pool to ask (default: the one named default)")
	f.StringVar(&o.ask.policy, "policy", "", "how the GPU's time is shared: "+strings.Join(policies, ", ")+" (default best-effort)")
	lendFlag(cmd, &o.ask.lend, "others may use this lease's time while it has no work, with policy equal or fixed (default: as the GPU's owner says)")
	f.StringVar(&o.ask.place, "place", "", "which GPUs to prefer: "+strings.Join(places, ", ")+" (default: as the pool says)")
	f.Var(&o.ask.life, "time", "end the lease after this long, as Slurm's --time: minutes, h:mm:ss, d-hh (default: when PROGRAM ends)")
	f.StringVar(&o.ask.grace, "grace", "", "how long to wait for a lost network, as 30m; 0: PROGRAM ends with its connection (default: as the pool says, or the GPU's owner)")
	f.StringVar(&o.worker, "worker", "", "use a worker started by hand, not the daemon: HOST:PORT, tcp:HOST:PORT or unix:PATH (default: $SLUICE_WORKER)")
	f.StringVar(&o.lib, "lib", "", "directory of the shim (default: ../lib/sluice or ../shim beside the executable)")
	f.StringVar(&o.log, "log", "", "how much the shim writes to stderr: "+strings.Join(logLevels, ", "))
	f.BoolVar(&o.trace, "trace", false, "when PROGRAM ends, list on stderr which CUDA calls waited for the GPU's machine, how often and how long")
	f.StringVar(&o.timeline, "timeline", "", "write a timeline of PROGRAM's kernels, copies, waits and turns to this file, see sluice trace")
	socketFlag(cmd, &o.socket)
	_ = cmd.MarkFlagDirname("lib")
	_ = cmd.MarkFlagFilename("timeline", "json")
	fixed(cmd, "log", logLevels)
	fixed(cmd, "policy", policies)
	fixed(cmd, "place", places)
	completePools(cmd, &o.socket)
	return cmd
}

var logLevels = []string{"error", "warn", "info", "debug", "trace"}

// byHand reports whether to use a worker started by hand instead of the daemon. The command
// line overrides SLUICE_WORKER.
func (o *runOptions) byHand(cmd *cobra.Command) (bool, error) {
	asked := ""
	for _, name := range daemonOnly {
		if cmd.Flags().Changed(name) {
			asked = name
			break
		}
	}
	if cmd.Flags().Changed("worker") {
		if asked != "" {
			return false, fmt.Errorf("--%s needs the daemon, which --worker does not use; give one of them", asked)
		}
		return true, nil
	}
	if w := os.Getenv("SLUICE_WORKER"); w != "" && asked == "" {
		o.worker = w
		return true, nil
	}
	return false, nil
}

// granted is a lease while its program runs.
type granted interface {
	// env returns the variables that lead the shim to the lease, "" to unset one.
	env() map[string]string
	// watch calls lost once with the reason if the lease ends before release.
	watch(lost func(reason string))
	// release ends the lease and the watch.
	release()
}

func (o *runOptions) run(ctx context.Context, args []string, byHand bool, say func(string, ...any)) error {
	if o.log != "" && !slices.Contains(logLevels, o.log) {
		return failed(fmt.Errorf("log level %q is not one of %s", o.log, strings.Join(logLevels, ", ")))
	}
	var open func() (granted, error)
	if byHand {
		at, err := parseAddress(o.worker)
		if err != nil {
			return failed(err)
		}
		open = func() (granted, error) { return openWorkerLease(at, uint64(o.ask.mem), args[0]) }
	} else {
		r, err := o.ask.request(args[0])
		if err != nil {
			return failed(err)
		}
		open = func() (granted, error) { return hold(ctx, o.socket, r, say) }
	}
	lib, err := shimDir(o.lib)
	if err != nil {
		return failed(err)
	}
	path, err := lookProgram(args[0])
	if err != nil {
		return err
	}
	var record *collected
	if o.timeline != "" {
		if record, err = collect(o.timeline); err != nil {
			return failed(err)
		}
		o.traces = record.dir
	}
	l, err := open()
	if err != nil {
		if record != nil {
			record.drop()
		}
		return failed(err)
	}
	l.watch(func(reason string) {
		say("%s: %s", args[0], reason)
	})
	ws, err := runProgram(path, args, o.environ(os.Environ(), lib, l))
	l.release()
	if record != nil {
		record.finish(say)
	}
	if err != nil {
		return &exitError{exitNotRunnable, err}
	}
	return programStatus(ws)
}

// callsFail is what the end of a lease means for the program.
const callsFail = "; CUDA calls fail from here on"

// programStatus is how the program ended, as a shell reports it.
func programStatus(ws syscall.WaitStatus) error {
	if ws.Signaled() {
		return &exitError{status: exitSignalBase + int(ws.Signal())}
	}
	if ws.ExitStatus() != 0 {
		return &exitError{status: ws.ExitStatus()}
	}
	return nil
}

func failed(err error) error { return &exitError{exitRunFailed, err} }

// shimDir returns the absolute directory of the shim.
func shimDir(given string) (string, error) {
	if given != "" {
		dir, err := filepath.Abs(given)
		if err != nil {
			return "", fmt.Errorf("shim directory %s: %w", given, err)
		}
		if _, err := os.Stat(filepath.Join(dir, shimFile)); err != nil {
			return "", fmt.Errorf("shim directory %s has no %s; give the directory that has it with --lib", dir, shimFile)
		}
		return dir, nil
	}
	exe, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("the shim cannot be found: %w; give its directory with --lib", err)
	}
	base := filepath.Dir(filepath.Dir(exe))
	// As installed (bin, lib/sluice) and as built (build/bin, build/shim).
	for _, dir := range []string{filepath.Join(base, "lib", "sluice"), filepath.Join(base, "shim")} {
		if _, err := os.Stat(filepath.Join(dir, shimFile)); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no %s in lib/sluice or shim under %s; give its directory with --lib", shimFile, base)
}

// ours are the variables that name a lease. Those of a lease that the caller already has must
// not reach the program.
var ours = []string{"SLUICE_WORKER", "SLUICE_LEASE", "SLUICE_SOCKET"}

// environ returns env with the variables that lead the program to Sluice's driver.
func (o *runOptions) environ(env []string, lib string, l granted) []string {
	env = withoutJob(env)
	set := l.env()
	for _, k := range ours {
		if _, ok := set[k]; !ok {
			set[k] = ""
		}
	}
	set["LD_LIBRARY_PATH"] = lib
	if o.log != "" {
		set["SLUICE_LOG"] = o.log
	}
	if o.trace {
		set["SLUICE_TRACE"] = "1"
	}
	if o.traces != "" {
		set[timelineVariable] = o.traces
	}
	out := make([]string, 0, len(env)+len(set))
	for _, kv := range env {
		k, v, _ := strings.Cut(kv, "=")
		if k == "LD_LIBRARY_PATH" && v != "" {
			set[k] = lib + ":" + v
		}
		if _, change := set[k]; !change {
			out = append(out, kv)
		}
	}
	for _, k := range slices.Concat(ours, []string{"SLUICE_LOG", "SLUICE_TRACE", timelineVariable, "LD_LIBRARY_PATH"}) {
		if v := set[k]; v != "" {
			out = append(out, k+"="+v)
		}
	}
	return withContainers(out, lib, l)
}
