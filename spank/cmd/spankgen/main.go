// Command spankgen writes what is generated from the table of the plug-in's
// options, or with -check says what of it is not up to date.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-hpc/sluice/spank/options"
)

func main() {
	root := flag.String("root", ".", "the project's root")
	check := flag.Bool("check", false, "only compare, exit 1 if a file is out of date")
	flag.Parse()
	if err := run(*root, *check); err != nil {
		fmt.Fprintln(os.Stderr, "spankgen:", err)
		os.Exit(1)
	}
}

func run(root string, check bool) error {
	all, err := options.Generated(func(name string) ([]byte, error) { return os.ReadFile(filepath.Join(root, name)) })
	if err != nil {
		return err
	}
	for name, want := range all {
		path := filepath.Join(root, name)
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, want) {
			continue
		}
		if check {
			return fmt.Errorf("%s is out of date: run go run ./spank/cmd/spankgen", name)
		}
		if err := os.WriteFile(path, want, 0o644); err != nil {
			return err
		}
	}
	return nil
}
