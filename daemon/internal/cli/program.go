package cli

// The program under sluice run.
//
// It stays in the process group of sluice, so that signals from a terminal, a shell, timeout(1)
// or Slurm to the group reach it as without sluice. Signals to sluice alone are passed on.
// Signals from the keyboard of a terminal whose foreground group is this one are not, since the
// program has received them already. When the program stops (^Z), sluice stops too, so that the
// shell sees its job stopped.

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

// handedOn are the signals that sluice passes on to the program. SIGKILL and SIGSTOP cannot be
// caught; all others keep their default effect on sluice.
var handedOn = []os.Signal{
	unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2,
	unix.SIGTSTP, unix.SIGCONT, unix.SIGWINCH,
}

// runProgram starts the program with the standard streams of sluice and waits until it ends. An
// error means that it did not start.
func runProgram(path string, args, env []string) (syscall.WaitStatus, error) {
	// The death signal of the program depends on the thread that starts it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	signals := make(chan os.Signal, 16)
	for _, s := range handedOn {
		if !signal.Ignored(s) { // as under nohup, the program ignores it too
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)
	pid, err := syscall.ForkExec(path, args, &syscall.ProcAttr{
		Env:   env,
		Files: []uintptr{0, 1, 2},
		// If sluice is killed it cannot end the program, which can only fail without a lease.
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

// handOn passes on the signals that were sent to sluice alone.
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

// fromKeyboard reports whether the terminal sends sig to the whole group.
func fromKeyboard(sig syscall.Signal) bool {
	switch sig {
	case unix.SIGINT, unix.SIGQUIT, unix.SIGTSTP, unix.SIGWINCH:
	default:
		return false
	}
	tty, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return false // no controlling terminal
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}
