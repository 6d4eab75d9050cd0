package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestReleasesCut: a lost connection is made again between a shim and a worker of different releases, as within one. SLUICE_OLD is a tree of another
// release, in which make shim was run and build/bin has its sluice-worker; the two are then tried with this tree's, either way. Without it there is a
// shim whose tables differ from the worker's.
func TestReleasesCut(t *testing.T) {
	type pair struct{ what, shim, worker string }
	var pairs []pair
	if old := os.Getenv("SLUICE_OLD"); old != "" {
		pairs = []pair{{"old shim", filepath.Join(old, "build/shim"), ""}, {"old worker", built("shim"), filepath.Join(old, "build/bin/sluice-worker")}}
	} else {
		pairs = []pair{{"other tables", otherShim(t, func(forms string) string { return forms + "\n" }), ""}}
	}
	for _, p := range pairs {
		t.Run(p.what, func(t *testing.T) {
			w := startWorker(t, workerOptions{args: []string{"--grace", "30s"}, exe: p.worker})
			want := w.run(runOptions{}, program("paused"), "11", "60")
			if want.status != 0 {
				t.Fatalf("uncut: status %d: %s%s", want.status, want.stdout, want.stderr)
			}
			c := newCutter(t, w, 11, 20, 1<<18, 0)
			ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
			defer cancel()
			cmd := with(t, w, p.shim, program("paused"))
			cmd.Args = append(cmd.Args, "11", "60")
			cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr())
			got := finish(t, ctx, cmd)
			back := strings.Count(got.stderr, " is back after ")
			if got.status != 0 || got.stdout != want.stdout || back == 0 {
				t.Errorf("%d cuts, back %d times, status %d: %s%s\nuncut: %s", c.cuts.Load(), back, got.status, got.stdout, got.stderr, want.stdout)
			}
			t.Logf("%d cuts, back %d times", c.cuts.Load(), back)
		})
	}
}
