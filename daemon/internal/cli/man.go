package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/sluice-hpc/sluice/remoting/version"
)

// newMan makes the manual pages from the commands themselves, so that they cannot
// say anything else than --help. The date in them is SOURCE_DATE_EPOCH's if set.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:    "man DIR",
		Short:  "Write the manual pages into a directory",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("manual pages: %w", err)
			}
			head := &doc.GenManHeader{Section: "1", Source: "Sluice " + version.Commit, Manual: "Sluice"}
			if err := doc.GenManTree(cmd.Root(), head, args[0]); err != nil {
				return fmt.Errorf("manual pages: %w", err)
			}
			return nil
		},
	}
}
