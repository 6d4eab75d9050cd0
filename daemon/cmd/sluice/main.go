// Command sluice is the user's command line: it runs programs on a remote GPU.
package main

import (
	"os"

	"github.com/sluice-hpc/sluice/daemon/internal/cli"
)

func main() {
	os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
}
