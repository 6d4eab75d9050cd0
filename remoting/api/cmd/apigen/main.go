// Command apigen writes the files that are generated from the API table and the wire table, or
// with -check says which of them are not up to date.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-hpc/sluice/remoting/api"
)

func main() {
	root := flag.String("root", ".", "the project's root")
	check := flag.Bool("check", false, "only compare, exit 1 if a file is out of date")
	flag.Parse()
	if err := run(*root, *check); err != nil {
		fmt.Fprintln(os.Stderr, "apigen:", err)
		os.Exit(1)
	}
}

func run(root string, check bool) error {
	files, err := api.Generate()
	if err != nil {
		return err
	}
	page, err := os.ReadFile(filepath.Join(root, api.ProtocolPage))
	if err != nil {
		return err
	}
	if files[api.ProtocolPage], err = api.Protocol(page); err != nil {
		return err
	}
	for name, want := range files {
		path := filepath.Join(root, name)
		have, err := os.ReadFile(path)
		if err == nil && bytes.Equal(have, want) {
			continue
		}
		if check {
			return fmt.Errorf("%s is out of date: run go generate ./remoting/api", name)
		}
		if err := os.WriteFile(path, want, 0o644); err != nil {
			return err
		}
	}
	return nil
}
