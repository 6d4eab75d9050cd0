package e2e

import (
	"context"
	"strings"
	"testing"
	"time"
)

// TestCuts runs programs whose connections are cut at random bytes. They compute what they compute without.
func TestCuts(t *testing.T) {
	w := startWorker(t, workerOptions{keepalive: time.Second, args: []string{"--grace", "30s"}, gpuMem: "4G", mem: "3G"})
	for i, prog := range []string{"vecadd", "threads", "streams_events", "graphhost", "pinned", "zerocopy", "train", "reduce", "pipeline", "graph", "printf", "managed", "engine", "bigcopy"} {
		t.Run(prog, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
			defer cancel()
			want := finish(t, ctx, w.direct(ctx, program(prog)))
			if want.status != 0 {
				t.Skipf("status %d: %s%s", want.status, want.stdout, want.stderr)
			}
			c := newCutter(t, w, uint64(i), 20, 1<<20, 0)
			cmd := w.direct(ctx, program(prog))
			cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr())
			got := finish(t, ctx, cmd)
			lost, back := strings.Count(got.stderr, " lost ("), strings.Count(got.stderr, " is back after ")
			t.Logf("%s: %d cuts, lost %d times, back %d times, %d connections; %v, uncut %v", prog, c.cuts.Load(), lost, back, c.again.Load(), got.took, want.took)
			if got.status != 0 || got.stdout != want.stdout {
				t.Errorf("status %d: %s\n%s\nuncut: %s", got.status, got.stdout, got.stderr, want.stdout)
			}
		})
	}
}
