package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurmconf"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

func newSlurmSetup() *cobra.Command {
	var from poolSource
	var nodes []string
	var remove, dry bool
	cmd := &cobra.Command{
		Use:   "setup",
		Short: "Put into this machine's Slurm configuration what the pools need, or take it away",
		Long: `Merge the lines of sluice slurm conf into slurm.conf, and print what changes. On slurmctld's
machine also install job_submit.lua, if the site has none, and the table of the pools; where
the plug-in is installed also have plugstack.conf include it. Each line that is changed is
kept in a comment above it. What belongs to the site and cannot be merged, such as a Prolog of
its own, is an error that says what to do, and then nothing is changed.

Run it on slurmctld's machine and on each machine with a slurm.conf of its own: equal files
stay equal. Run it again after a change of the pools. The command restarts nothing. All owners
have to answer.

With --remove everything is put back as it was; this needs no daemon.`,
		Example: "  sluice slurm setup --dry-run\n  sluice slurm setup --nodes 'node[01-20],big01'\n  sluice slurm setup --remove",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := config.Load(from.file)
			if err != nil {
				return err
			}
			conf := slurmConf(cmd.Context(), cfg)
			var changes []slurmconf.Change
			if remove {
				changes, err = slurmconf.Unset(cfg, conf)
			} else {
				var t slurmconf.Table
				if cfg, t, err = from.table(cmd.Context()); err == nil {
					changes, err = t.Setup(cfg, conf, hostlist(nodes))
				}
			}
			if err != nil {
				return err
			}
			return makeChanges(cmd, changes, dry)
		},
	}
	from.flags(cmd)
	cmd.Flags().StringSliceVar(&nodes, "nodes", nil, "NodeNames whose jobs may ask, as slurm.conf has them (default: all)")
	cmd.Flags().BoolVar(&remove, "remove", false, "take away what setup has added")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print the changes and make none")
	return cmd
}

// hostlist joins what pflag has cut at the commas inside of brackets.
func hostlist(parts []string) []string {
	var out []string
	for _, p := range parts {
		if n := len(out); n > 0 && strings.Count(out[n-1], "[") > strings.Count(out[n-1], "]") {
			out[n-1] += "," + p
			continue
		}
		out = append(out, p)
	}
	return out
}

// slurmConf is the slurm.conf of this machine, "" if it has none or has slurmctld's (configless mode).
func slurmConf(ctx context.Context, cfg *config.Config) string {
	path := cfg.Slurm.Conf
	if path == "" {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if c, err := slurm.New(cfg.Slurm.Bin, cfg.Slurm.Conf).Config(ctx); err == nil {
			path = c["SLURM_CONF"]
		}
	}
	if path == "" {
		path = "/etc/slurm/slurm.conf"
	}
	if _, err := os.Stat(path); err != nil || strings.HasPrefix(path, "/run/") {
		return ""
	}
	return path
}

// makeChanges prints the changes and makes them.
func makeChanges(cmd *cobra.Command, changes []slurmconf.Change, dry bool) error {
	out := cmd.OutOrStdout()
	for _, c := range changes {
		switch {
		case c.Now == nil:
			fmt.Fprintf(out, "%s: removed\n", c.Path)
		case c.Was == nil:
			fmt.Fprintf(out, "%s: new\n", c.Path)
		default:
			fmt.Fprintf(out, "%s:\n", c.Path)
			printLines(cmd, c)
		}
		if dry {
			continue
		}
		if err := change(c); err != nil {
			return err
		}
	}
	switch {
	case len(changes) == 0:
		fmt.Fprintln(out, "nothing is to be changed")
	case dry:
		fmt.Fprintln(out, "nothing was changed")
	default:
		fmt.Fprintln(out, "next, when all machines have it: systemctl restart slurmctld, then systemctl restart slurmd on the nodes")
	}
	return nil
}

// printLines prints the lines that a file loses and gets, in their order.
func printLines(cmd *cobra.Command, c slurmconf.Change) {
	was, now := strings.Split(string(c.Was), "\n"), strings.Split(string(c.Now), "\n")
	print := func(sign string, lines, others []string) {
		for _, l := range lines {
			if l != "" && !strings.HasPrefix(l, "#sluice-") && !slices.Contains(others, l) {
				fmt.Fprintf(cmd.OutOrStdout(), "  %s %s\n", sign, l)
			}
		}
	}
	print("-", was, now)
	print("+", now, was)
}

// change writes a file of Slurm's in the place of the one that is there, with its owner and mode; a link to it stays.
func change(c slurmconf.Change) error {
	path := c.Path
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if c.Now == nil {
		return os.Remove(path)
	}
	how := safefile.How{Mode: 0o644}
	uid, gid := os.Geteuid(), os.Getegid()
	switch fi, err := os.Stat(path); {
	case err == nil:
		st := fi.Sys().(*syscall.Stat_t)
		how.Mode, uid, gid = fi.Mode().Perm(), int(st.Uid), int(st.Gid)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	p, err := safefile.Create(path, how)
	if err != nil {
		return err
	}
	if err = p.Chown(uid, gid); err == nil {
		_, err = p.Write(c.Now)
	}
	if err == nil {
		err = p.Commit()
	}
	return errors.Join(err, p.Close())
}
