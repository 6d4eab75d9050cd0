package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestRareCalls: functions that few programs call answer through the shim as they do without it.
func TestRareCalls(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, built("test/rarecalls"))
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+built("simgpu"), "RARECALLS_FORGE=1")
	native := finish(t, ctx, cmd)
	if native.status != 0 {
		t.Fatalf("status %d without the shim: %s", native.status, native.stderr)
	}
	want := strings.Split(native.stdout, "\n")
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			w := startWorker(t, workerOptions{network: network})
			r := w.run(runOptions{mem: "512M", env: []string{"RARECALLS_FORGE=1"}}, built("test/rarecalls"))
			if r.status != 0 {
				t.Fatalf("status %d: %s", r.status, tail(r.stderr, 20))
			}
			got := strings.Split(r.stdout, "\n")
			for i := range max(len(got), len(want)) {
				g, n := at(got, i), at(want, i)
				if g != n {
					t.Fatalf("line %d: %q through the shim, %q without it", i+1, g, n)
				}
			}
		})
	}
}

// TestCallsOfTheLibrary: what the shim answers by itself is what testdata/rarecalls.txt has. A driver 580 on an H100 was
// asked for most of it on 22 November 2026 and answered the same.
func TestCallsOfTheLibrary(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "rarecalls.txt"))
	if err != nil {
		t.Fatal(err)
	}
	w := startWorker(t, workerOptions{})
	r := w.run(runOptions{mem: "512M"}, built("test/rarecalls"), "logs", "coredumps", "notifications", "batches", "handles", "copies in bodies")
	if r.status != 0 {
		t.Fatalf("status %d: %s", r.status, tail(r.stderr, 20))
	}
	want, got := strings.Split(string(text), "\n"), strings.Split(r.stdout, "\n")
	for i := range max(len(got), len(want)) {
		if g, n := at(got, i), at(want, i); g != n {
			t.Errorf("line %d: %q, want %q", i+1, g, n)
		}
	}
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return ""
}
