// Command sluice-hook brings a job's GPU fraction into a container: a hook for OCI
// runtimes, a wrapper around one, and a writer of CDI specifications.
package main

import (
	"os"

	"github.com/sluice-hpc/sluice/oci-hook/internal/command"
)

func main() {
	os.Exit(command.Main(os.Args, os.Stdin, os.Stdout, os.Stderr))
}
