package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// upgrade replaces what is installed by this tree's build, as packages do: what runs keeps the files that it has.
func upgrade(t *testing.T, s *site.Site) {
	t.Helper()
	for _, name := range []string{"bin/sluice", "bin/sluiced", "bin/sluice-worker", "shim/libcuda.so.1", "shim/libnvidia-ml.so.1"} {
		next := s.Opt(name) + ".new"
		if out, err := exec.Command("cp", "-a", filepath.Join(build, name), next).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := os.Rename(next, s.Opt(name)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestUpgradeInCut cuts a program's network, replaces all files by those of a later release and restarts the daemon of one node. In a second cut it restarts
// the other one. The session goes on each time: first over daemons of different releases, then over daemons of the later one. SLUICE_OLD is a tree of the
// earlier release, built, whose build folder also has the test programs; without it the release replaces itself.
func TestUpgradeInCut(t *testing.T) {
	for _, first := range []string{"owner", "host"} {
		t.Run(first+" first", func(t *testing.T) {
			old := build
			if tree := os.Getenv("SLUICE_OLD"); tree != "" {
				old = filepath.Join(tree, "build")
			}
			s := startWith(t, old, impatient(nil))
			h, o := s.Hosts[0], s.Owners[0]
			order := []*site.Daemon{o, h}
			if first == "host" {
				order = []*site.Daemon{h, o}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			stderr := filepath.Join(h.Node.Dir, "paused.err")
			if err := errors.Join(os.WriteFile(stderr, nil, 0o600), os.Chown(stderr, user, user)); err != nil {
				t.Fatal(err)
			}
			type outcome struct {
				out string
				err error
			}
			run := func() (r outcome) {
				r.out, r.err = h.Node.Run(ctx, h.Run(user, "--fraction", "50", "--", "sh", "-c", `"$0" 5 2000 2>>"$1"`, s.Program("paused"), stderr))
				return r
			}
			done := make(chan outcome, 1)
			go func() { done <- run() }()
			eventually(t, 20*time.Second, "the program works", func() error { return working(s) })
			says := func(what string, times int) {
				t.Helper()
				eventually(t, 20*time.Second, "the program says "+what, func() error {
					b, err := os.ReadFile(stderr)
					if n := strings.Count(string(b), what); n != times {
						return fmt.Errorf("%d times, %w: %s", n, err, b)
					}
					return nil
				})
			}
			for i, d := range order {
				if err := s.Net.Cut(o.Node, true); err != nil {
					t.Fatal(err)
				}
				if i == 0 {
					upgrade(t, s)
				}
				says(" lost (", i+1)
				if err := d.Kill(); err != nil {
					t.Error(err)
				}
				if _, err := d.Up(ctx); err != nil {
					t.Fatal(err)
				}
				if err := s.Net.Cut(o.Node, false); err != nil {
					t.Fatal(err)
				}
				says(" is back after ", i+1)
			}
			cut := <-done
			if cut.err != nil || !strings.Contains(cut.out, "PASS") {
				t.Fatalf("%v: %s", cut.err, cut.out)
			}
			if got := audited(t, o, audit.SessionOpen); got != 1 {
				t.Errorf("%d sessions were begun for the program", got)
			}
			uncut := run()
			if uncut.err != nil || checksum(uncut.out) != checksum(cut.out) {
				t.Errorf("cut: %s\nuncut, by the later release: %v: %s", cut.out, uncut.err, uncut.out)
			}
			allFree(t, s, nil)
		})
	}
}
