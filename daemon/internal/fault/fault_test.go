package fault

import (
	"bytes"
	"flag"
	"fmt"
	"go/format"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write names.go")

// A point is a call with a literal, of this package or of a method that wraps it
// so that a test of the package can crash there without a process of its own.
var point = regexp.MustCompile(`(?:\bfault\.Point|\.point)\("([^"]*)"\)`)

// TestNames compares names.go with the points that there are.
func TestNames(t *testing.T) {
	var found []string
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range point.FindAllSubmatch(b, -1) {
			found = append(found, string(m[1]))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(found)
	found = slices.Compact(found)
	for _, n := range found {
		if !regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`).MatchString(n) {
			t.Errorf("point %q: lower case words and dashes only", n)
		}
	}
	var b bytes.Buffer
	b.WriteString("// Generated from the daemon's sources by go generate; do not edit.\n\npackage fault\n\nvar names = []string{\n")
	for _, n := range found {
		fmt.Fprintf(&b, "%q,\n", n)
	}
	b.WriteString("}\n")
	want, err := format.Source(b.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile("names.go", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile("names.go")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, want) {
		t.Fatal("names.go is not what the sources say; run go generate ./daemon/internal/fault")
	}
}
