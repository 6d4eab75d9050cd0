// Package cli is the sluice command line. Main runs one command and returns the exit status, so
// that everything but os.Exit can be tested.
package cli

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/remoting/version"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/spf13/cobra"
)

// Exit statuses of sluice itself; the status of a program that it ran is passed on. The values
// are those of env(1), nice(1) and timeout(1).
const (
	exitFailure     = 1
	exitRunFailed   = 125 // sluice run failed before the program started
	exitNotRunnable = 126 // the program was found and cannot be executed
	exitNotFound    = 127 // the program was not found
	exitSignalBase  = 128 // plus the number of the signal the program died of
)

// exitError carries the exit status of a command that failed, or of the program that it ran.
// For a program err is nil, and nothing is printed.
type exitError struct {
	status int
	err    error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.status)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// Main runs the command that args name, without the program's name, and returns the exit
// status. Its own messages go to stderr, one line each.
func Main(args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	status := exitFailure
	if cmd != nil && cmd.Name() == "run" {
		status = exitRunFailed // also for a bad flag: 1 would look like the program's own
	}
	if cmd != nil && cmd.Name() == "health" {
		status = healthUnknown // 1 would look like a warning
	}
	if cmd != nil && slices.Contains(neverFails, cmd.Name()) {
		status = 0
	}
	var ee *exitError
	if errors.As(err, &ee) {
		status = ee.status
		if ee.err == nil {
			return status
		}
	}
	fmt.Fprintf(stderr, "sluice: %v\n", err)
	return status
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "sluice",
		Short: "Run programs on GPUs of other machines",
		Long: `sluice runs programs on fractions of GPUs that may be in other machines, and shows
what the daemon of this node, sluiced, knows of leases, sessions and GPUs.

Users see and change what is theirs, root everything.`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
	}
	root.AddCommand(newRun(), newList(), newTop(), newGPUs(), newRelease(), newSet(), newDrain(), newResume(), newSmi(), newHealth(), newProbe(), newExplain(), newTrace(), newAudit(), newBugreport(), newReport(), newAppend(), newProlog(), newEpilog(), newPrologCtld(), newEpilogCtld(), newEnv(), newSetup(), newSlurm(), newCA(), newMan(), newVersion())
	root.InitDefaultCompletionCmd() // now, so that its manual pages are made too
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			c.Args, c.RunE = cobra.ArbitraryArgs, otherShell
		}
	}
	root.SetHelpCommand(newHelp())
	return root
}

// noArgs is for commands without arguments and without subcommands. cobra.NoArgs calls an argument an unknown command.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s takes no arguments, and %q is one; see %s --help", cmd.CommandPath(), args[0], cmd.CommandPath())
	}
	return nil
}

// otherShell is sluice completion without one of its subcommands. Its output may be read by a shell.
func otherShell(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	return fmt.Errorf("there is no completion for %q; give bash, fish, powershell or zsh", args[0])
}

// newHelp is cobra's, but a command that there is not is an error.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Help about any command",
		RunE: func(cmd *cobra.Command, args []string) error {
			of, _, err := cmd.Root().Find(args)
			if err != nil || len(args) > 0 && of == cmd.Root() {
				return fmt.Errorf("there is no command %q; see sluice --help", strings.Join(args, " "))
			}
			of.InitDefaultHelpFlag()
			return of.Help()
		},
	}
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "sluice version %s, protocol %d, %s\n", version.Commit, wire.Version, runtime.Version())
			return err
		},
	}
}
