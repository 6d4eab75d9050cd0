package cli

// The program under sluice run.
//
// It stays in our process group, so whatever a terminal, a shell, timeout(1) or
// Slurm sends to the group reaches it as if we were not there. Signals sent to
// us alone are handed on; keyboard signals of a terminal whose foreground group
// is ours are not, since the program has had them already. When the program stops
// (^Z) we stop too, so that the shell sees its job stopped.

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

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
