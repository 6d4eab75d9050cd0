// Command sluice is the command line: it runs programs on fractions of remote
// GPUs, and shows and ends leases.
package main

import (
	"os"

	"github.com/sluice-hpc/sluice/daemon/internal/cli"
)

func main() {
	os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
}
