// Package formtest has the cases that all implementations of a form are held to, whatever
// their language.
package formtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Dir is the directory of the tables. It is found from the repository's root, at or above the folder in which go test runs a
// test: a program built with -trimpath does not know where its sources are.
func Dir() string {
	for root := "."; ; root = filepath.Join(root, "..") {
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			return filepath.Join(root, "internal", "form", "testdata")
		}
		if abs, err := filepath.Abs(root); err != nil || abs == "/" {
			return root
		}
	}
}

// Each calls f with every case of a table: lines "VALUE => WANT", and comments.
func Each(t *testing.T, table string, f func(value, want string)) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(Dir(), table))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSuffix(line, "\n"); strings.HasPrefix(line, "#") {
			continue
		}
		value, want, ok := strings.Cut(line, " => ")
		if !ok {
			t.Fatalf("%s: %q is no case", table, line)
		}
		f(value, want)
		n++
	}
	if n < 10 {
		t.Errorf("%s has %d cases", table, n)
	}
}
