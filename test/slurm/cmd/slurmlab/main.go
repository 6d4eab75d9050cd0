// Slurmlab starts and ends a real Slurm cluster with Sluice on it, in a folder; package lab says what it is.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

const usage = `usage: slurmlab up DIR [OPTIONS.json]   start a cluster in DIR, which must be empty; fields of lab.Options
       slurmlab down DIR                end it and remove DIR
       slurmlab status DIR              say what runs and what is left of jobs
       slurmlab run DIR [-n NODE] [-u USER] COMMAND...   on the controller, as alice, if nothing else is said
       slurmlab crash|boot DIR NODE     cut a node's power; bring it back with its daemons
       slurmlab env DIR                 shell lines: names and folders of the cluster`

func main() {
	lab.Main()
	if err := run(os.Args[1:]); err != nil {
		var exit *exec.ExitError
		if len(os.Args) > 1 && os.Args[1] == "run" && errors.As(err, &exit) {
			os.Exit(exit.ExitCode())
		}
		fmt.Fprintln(os.Stderr, "slurmlab:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New(usage)
	}
	ctx := context.Background()
	verb, dir, rest := args[0], args[1], args[2:]
	if verb == "up" {
		return up(ctx, dir, rest)
	}
	l, err := lab.Open(dir)
	if err != nil {
		return err
	}
	switch verb {
	case "down":
		return l.Down()
	case "status":
		if err := l.Ready(ctx); err != nil {
			return err
		}
		return l.Clean(ctx)
	case "run":
		return command(ctx, l, rest)
	case "crash", "boot":
		if len(rest) != 1 || l.Node(rest[0]) == nil {
			return errors.New("name a node of the cluster")
		}
		n := l.Node(rest[0])
		if verb == "crash" {
			return n.Crash()
		}
		if err := n.Boot(ctx); err != nil {
			return err
		}
		if n == l.Ctl {
			return l.StartController(ctx)
		}
		return n.StartDaemons(ctx)
	case "env":
		fmt.Printf("LAB=%s\nLAB_CTL=%s\nSLURM_CONF=%s\n", l.Options.Dir, l.Ctl.Name, l.Path("etc", "slurm.conf"))
		for i, n := range l.Nodes {
			fmt.Printf("LAB_NODE%d=%s\n", i+1, n.Name)
		}
		return nil
	}
	return errors.New(usage)
}

func up(ctx context.Context, dir string, rest []string) error {
	var o lab.Options
	if len(rest) > 0 {
		b, err := os.ReadFile(rest[0])
		if err != nil {
			return err
		}
		if err := json.Unmarshal(b, &o); err != nil {
			return fmt.Errorf("%s: %w", rest[0], err)
		}
	}
	o.Dir = dir
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	start := time.Now()
	l, err := lab.Up(ctx, o)
	if err != nil {
		return err
	}
	fmt.Printf("cluster %s in %s: ready after %.1f s\n", l.Options.Name, l.Options.Dir, time.Since(start).Seconds())
	return nil
}

// command runs one with this terminal's streams.
func command(ctx context.Context, l *lab.Lab, args []string) error {
	n, u := l.Ctl, lab.Alice
	for len(args) >= 2 && (args[0] == "-n" || args[0] == "-u") {
		if args[0] == "-n" {
			if n = l.Node(args[1]); n == nil {
				return fmt.Errorf("no node %s in this cluster", args[1])
			}
		} else {
			found := false
			for _, x := range []lab.User{lab.Root, lab.Slurm, lab.Alice, lab.Bob} {
				if x.Name == args[1] {
					u, found = x, true
				}
			}
			if !found {
				return fmt.Errorf("no user %s: there are root, slurm, alice and bob", args[1])
			}
		}
		args = args[2:]
	}
	if len(args) == 0 {
		return errors.New(usage)
	}
	c := n.Command(ctx, u, args...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	return c.Run()
}
