package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/identity"
)

// caDir is the default directory of a CA.
const caDir = "/etc/sluice/ca"

func newCA() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ca",
		Short: "Make the certificates of auth: tls",
		Long: `Make a CA for the site and certificates for its nodes, for sites whose sluice.yaml says
auth: tls. auth: munge, the default, needs no certificates.

The CA's key stays on the machine where it was made. Every node gets ca.pem, and its own
NODE.pem and NODE.key.`,
		Example: `  sluice ca init
  sluice ca issue gpu01 gpu02 --out certs`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var dir, name string
	init := &cobra.Command{
		Use:   "init",
		Short: "Make a CA: ca.pem and ca.key",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := identity.InitCA(dir, name, time.Now()); err != nil {
				return caRemedy(err)
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "made %s for %d days; every node gets it as tls.ca\n", filepath.Join(dir, "ca.pem"), int(identity.CALife.Hours()/24))
			return err
		},
	}
	init.Flags().StringVar(&name, "name", "Sluice CA", "name that the certificate shows")

	var out string
	issue := &cobra.Command{
		Use:   "issue NODE...",
		Short: "Make certificate and key of nodes: NODE.pem and NODE.key",
		Long: `Make a certificate and a key for each NODE. NODE is the value of node in its sluice.yaml,
which is also its name in the pools. Existing files are not replaced.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("no node given; use sluice ca issue NODE, with the name that its sluice.yaml has as node")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			at := out
			if at == "" {
				at = dir
			}
			for _, node := range args {
				cert, key, err := identity.Issue(dir, node, at, time.Now())
				if err != nil {
					return caRemedy(err)
				}
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "made %s and %s for %d days; node %s gets them as tls.cert and tls.key\n",
					cert, key, int(identity.NodeLife.Hours()/24), node); err != nil {
					return err
				}
			}
			return nil
		},
	}
	issue.Flags().StringVar(&out, "out", "", "directory for the new files (default: the CA's)")
	_ = issue.MarkFlagDirname("out")
	for _, c := range []*cobra.Command{init, issue} {
		c.Flags().StringVar(&dir, "dir", caDir, "directory of the CA")
		_ = c.MarkFlagDirname("dir")
	}
	cmd.AddCommand(init, issue)
	return cmd
}

// caRemedy adds what to do about an error of the CA's directory.
func caRemedy(err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w; run this as root, or give a directory of yours with --dir", err)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w; sluice ca init makes a CA, and --dir says where it is", err)
	}
	return err
}
