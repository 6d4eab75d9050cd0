package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurmconf"
)

// A daemon that has begun measures its GPUs and asks the owners: setup waits that long for failures to go, and for warnings.
const (
	failTime = 20 * time.Second
	warnTime = 5 * time.Second
)

func newSetup() *cobra.Command {
	var path, socket, cluster string
	var controllers, owners []string
	cmd := &cobra.Command{
		Use:   "setup --cluster NAME --controllers NODE,... --owners NODE,...",
		Short: "Configure and start this node's daemon",
		Long: `Add to sluice.yaml which machines run slurmctld and which lend their GPUs, check it, enable and
start the service sluiced, and print its health. The same command does for every node: owners
first, then slurmctld's machine, then the nodes of jobs. It is for sites with one pool; sites
with more write the file themselves. A sluice.yaml that has settings already is not changed; if
they differ, that is an error.

The exit status is that of sluice health. Run as root.`,
		Example: "  sluice setup --cluster prod --controllers head1,head2 --owners gpu01,gpu02",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cluster == "" || len(controllers) == 0 || len(owners) == 0 {
				return errors.New("give --cluster, which is ClusterName in slurm.conf, --controllers, the machines of slurmctld, and --owners, the machines that lend GPUs")
			}
			changed, err := configure(path, cluster, controllers, owners)
			if err != nil {
				return err
			}
			if changed {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: written\n", path)
			} else {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: has these settings already\n", path)
			}
			if err := runService(cmd, path, changed); err != nil {
				return err
			}
			return settle(cmd, socket)
		},
	}
	cmd.Flags().StringVar(&cluster, "cluster", "", "Slurm's ClusterName")
	cmd.Flags().StringSliceVar(&controllers, "controllers", nil, "machines of slurmctld, backups too")
	cmd.Flags().StringSliceVar(&owners, "owners", nil, "machines that lend GPUs")
	cmd.Flags().StringVarP(&path, "config", "c", config.DefaultPath, "configuration of sluiced")
	socketFlag(cmd, &socket)
	return cmd
}

// configure adds the settings to a sluice.yaml without any, and says whether it did.
func configure(path, cluster string, controllers, owners []string) (bool, error) {
	was, err := os.ReadFile(path)
	if err != nil {
		return false, fmt.Errorf("%w; install the package sluice-node", err)
	}
	lines := fmt.Sprintf("cluster: %s\nslurm: {controllers: [%s]}\npools: {default: {owners: [%s]}}\n", cluster, strings.Join(controllers, ", "), strings.Join(owners, ", "))
	want, err := config.Parse("sluice.yaml", []byte(lines))
	if err != nil {
		return false, err
	}
	if !blank(was) {
		have, err := config.Load(path)
		if err != nil {
			return false, err
		}
		if have.Cluster != want.Cluster || !slices.Equal(have.Slurm.Controllers, want.Slurm.Controllers) || !slices.Equal(have.Pools["default"].Owners, want.Pools["default"].Owners) {
			return false, fmt.Errorf("%s has other settings already; edit it, then systemctl enable --now sluiced, and sluice health", path)
		}
		return false, nil
	}
	now := bytes.Clone(was)
	if len(now) > 0 && now[len(now)-1] != '\n' {
		now = append(now, '\n')
	}
	now = append(now, "\n# By sluice setup:\n"+lines...)
	if _, err := config.Parse(path, now); err != nil {
		return false, err
	}
	return true, change(slurmconf.Change{Path: path, Was: was, Now: now})
}

// blank says that a file has only comments.
func blank(text []byte) bool {
	for l := range bytes.Lines(text) {
		if l = bytes.TrimSpace(l); len(l) > 0 && l[0] != '#' {
			return false
		}
	}
	return true
}

// runService checks the configuration and has systemd run the daemon with it. A running daemon is restarted, which ends no session.
func runService(cmd *cobra.Command, path string, changed bool) error {
	if err := perform(cmd, "sluiced", "--check", "--config", path); err != nil {
		return err
	}
	runs := exec.CommandContext(cmd.Context(), "systemctl", "-q", "is-active", "sluiced").Run() == nil
	if err := perform(cmd, "systemctl", "enable", "--now", "sluiced"); err != nil {
		return fmt.Errorf("%w; journalctl -u sluiced says why", err)
	}
	if runs && changed {
		return perform(cmd, "systemctl", "restart", "sluiced")
	}
	return nil
}

// perform runs a command of the system with its output on ours.
func perform(cmd *cobra.Command, argv ...string) error {
	c := exec.CommandContext(cmd.Context(), argv[0], argv[1:]...)
	c.Stdout, c.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
	}
	return nil
}

// settle waits until the daemon is content, for a while, and prints what it has found.
func settle(cmd *cobra.Command, socket string) error {
	began := time.Now()
	for {
		_, _ = question(cmd.Context(), socket, func(ctx context.Context, d local) ([]rpc.Pool, error) { return d.Pool(ctx, "") })
		cs, err := question(cmd.Context(), socket, func(ctx context.Context, d local) ([]rpc.Check, error) { return d.Health(ctx) })
		status, waited := healthStatus(cs), time.Since(began)
		if err == nil && (status == 0 || status == healthWarn && waited > warnTime) || waited > failTime {
			if err == nil {
				err = printHealth(cmd, cs, false, false)
			}
			if err != nil {
				return &exitError{healthUnknown, err}
			}
			if status != 0 {
				return &exitError{status: status}
			}
			return nil
		}
		select {
		case <-cmd.Context().Done():
			return cmd.Context().Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
}
