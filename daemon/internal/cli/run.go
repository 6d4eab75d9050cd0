package cli

// sluice run: look the program and the shim up, open the lease, start the
// program in its changed environment, wait, end the lease, pass the status on.
//
// The program stays in our process group, so whatever a terminal, a shell,
// timeout(1) or Slurm sends to the group reaches it as if we were not there.
// Signals sent to us alone are handed on; keyboard signals of a terminal whose
// foreground group is ours are not, since the program has had them already. When
// the program stops (^Z) we stop too, so that the shell sees its job stopped.

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// shimFile is what must be in the shim's directory.
const shimFile = "libcuda.so.1"

type runOptions struct {
	worker string
	mem    size
	lib    string
	log    string
}

func newRun() *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run --worker ADDR [flags] -- PROGRAM [ARGS...]",
		Short: "Run a program on a worker's GPU",
		Long: `Run PROGRAM with the CUDA driver replaced by Sluice's, so that it computes on the
GPU of the worker at ADDR (HOST:PORT, tcp:HOST:PORT or unix:PATH).

The exit status is PROGRAM's, 128+N if it died of signal N, 127 if it was not
found, 126 if it cannot be executed, and 125 if sluice itself failed.`,
		Example: "  sluice run --worker gpu01:7070 --mem 20G -- python3 train.py",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("no program given; say sluice run --worker ADDR -- PROGRAM [ARGS...]")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(args, func(format string, a ...any) {
				fmt.Fprintf(cmd.ErrOrStderr(), "sluice: "+format+"\n", a...)
			})
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false) // what follows PROGRAM is PROGRAM's, "--" or not
	f.StringVar(&o.worker, "worker", os.Getenv("SLUICE_WORKER"), "where the worker listens: HOST:PORT, tcp:HOST:PORT or unix:PATH")
	f.Var(&o.mem, "mem", "device memory to ask for on each GPU, as 20G (default: all that the worker offers)")
	f.StringVar(&o.lib, "lib", "", "directory of the shim (default: ../lib/sluice or ../shim beside the executable)")
	f.StringVar(&o.log, "log", "", "how much the shim writes to stderr: error, warn, info or debug")
	_ = cmd.MarkFlagDirname("lib")
	_ = cmd.RegisterFlagCompletionFunc("log", cobra.FixedCompletions(logLevels, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

var logLevels = []string{"error", "warn", "info", "debug"}

func (o *runOptions) run(args []string, say func(string, ...any)) error {
	if o.worker == "" {
		return failed(errors.New("no worker given; say --worker HOST:PORT or unix:PATH, or set SLUICE_WORKER"))
	}
	at, err := parseAddress(o.worker)
	if err != nil {
		return failed(err)
	}
	if o.log != "" && !slices.Contains(logLevels, o.log) {
		return failed(fmt.Errorf("log level %q is none of %s", o.log, strings.Join(logLevels, ", ")))
	}
	lib, err := shimDir(o.lib)
	if err != nil {
		return failed(err)
	}
	path, err := lookProgram(args[0])
	if err != nil {
		return err
	}
	l, err := openLease(at, uint64(o.mem), args[0])
	if err != nil {
		return failed(err)
	}
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		l.watch()
	}()
	done := make(chan struct{})
	go func() {
		select {
		case <-done:
		case <-watched:
			select {
			case <-done: // release closed it
				return
			default:
			}
			say("worker %s ended the lease; CUDA calls of %s fail from here on", at, args[0])
		}
	}()
	ws, err := runProgram(path, args, o.environ(os.Environ(), lib, l))
	close(done)
	l.release(watched)
	if err != nil {
		return &exitError{exitNotRunnable, err}
	}
	if ws.Signaled() {
		return &exitError{status: exitSignalBase + int(ws.Signal())}
	}
	if ws.ExitStatus() != 0 {
		return &exitError{status: ws.ExitStatus()}
	}
	return nil
}

func failed(err error) error { return &exitError{exitRunFailed, err} }

// shimDir answers the absolute directory that holds the shim.
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
		return "", fmt.Errorf("where the shim is cannot be told: %w; give its directory with --lib", err)
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

func lookProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil || errors.Is(err, exec.ErrDot):
		return path, nil
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return "", &exitError{exitNotFound, fmt.Errorf("program %s not found; give its path, or put its directory into PATH", name)}
	default:
		return "", &exitError{exitNotRunnable, fmt.Errorf("program %s cannot be executed: %w; check its mode and path", name, err)}
	}
}

// environ is env with the variables that lead the program to our driver.
func (o *runOptions) environ(env []string, lib string, l *lease) []string {
	set := map[string]string{
		"SLUICE_WORKER":   l.worker.String(),
		"SLUICE_LEASE":    l.env(),
		"LD_LIBRARY_PATH": lib,
	}
	if o.log != "" {
		set["SLUICE_LOG"] = o.log
	}
	out := make([]string, 0, len(env)+len(set))
	for _, kv := range env {
		k, v, _ := strings.Cut(kv, "=")
		if k == "LD_LIBRARY_PATH" && v != "" {
			set[k] = lib + ":" + v
		}
		if _, ours := set[k]; !ours {
			out = append(out, kv)
		}
	}
	for _, k := range []string{"SLUICE_WORKER", "SLUICE_LEASE", "SLUICE_LOG", "LD_LIBRARY_PATH"} {
		if v, ok := set[k]; ok {
			out = append(out, k+"="+v)
		}
	}
	return out
}

// handedOn are the signals that reach the program through us. SIGKILL and
// SIGSTOP cannot be caught; the rest keeps its default effect on us.
var handedOn = []os.Signal{
	unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2,
	unix.SIGTSTP, unix.SIGCONT, unix.SIGWINCH,
}

// runProgram starts the program with our standard streams and waits for its
// end. An error means that it did not start.
func runProgram(path string, args, env []string) (syscall.WaitStatus, error) {
	// The program's death signal is tied to the thread that starts it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	signals := make(chan os.Signal, 16)
	for _, s := range handedOn {
		if !signal.Ignored(s) { // nohup stays nohup
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)
	pid, err := syscall.ForkExec(path, args, &syscall.ProcAttr{
		Env:   env,
		Files: []uintptr{0, 1, 2},
		// Killed, we cannot end it; without a lease it can only fail.
		Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM},
	})
	if err != nil {
		return 0, fmt.Errorf("program %s cannot be executed: %w; is it built for this machine?", path, err)
	}
	stop := make(chan struct{})
	defer close(stop)
	go handOn(pid, signals, stop)
	for {
		var ws syscall.WaitStatus
		_, err := syscall.Wait4(pid, &ws, syscall.WUNTRACED, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 0, fmt.Errorf("waiting for program %s: %w", path, err)
		case ws.Stopped():
			_ = syscall.Kill(syscall.Getpid(), syscall.SIGSTOP)
		default:
			return ws, nil
		}
	}
}

// handOn gives the program the signals that were meant for us alone.
func handOn(pid int, signals <-chan os.Signal, stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case s := <-signals:
			if sig := s.(syscall.Signal); !fromKeyboard(sig) {
				_ = syscall.Kill(pid, sig)
			}
		}
	}
}

// fromKeyboard reports whether the terminal sends sig to our whole group.
func fromKeyboard(sig syscall.Signal) bool {
	switch sig {
	case unix.SIGINT, unix.SIGQUIT, unix.SIGTSTP, unix.SIGWINCH:
	default:
		return false
	}
	tty, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return false // no terminal controls us
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}
