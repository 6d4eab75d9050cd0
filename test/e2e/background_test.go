package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

// Copies from page-locked memory that the program does not wait for return at once over a slow link, and everything is as if they had not.
func TestBackground(t *testing.T) {
	const steps, mib = 6, 8
	for _, c := range []struct {
		name    string
		network string
		race    bool
		rate    string
		args    []string
		env     []string
		none    bool
	}{
		{name: "1 Gb/s", rate: "1G"},
		{name: "1 Gb/s, compressed", rate: "1G", env: []string{"SLUICE_COMPRESS=1"}},
		{name: "1 Gb/s, as can be resumed", rate: "1G", args: []string{"--grace", "30s"}},
		{name: "4 Gb/s, bulk connections", rate: "4G", env: []string{"SLUICE_BULK=3"}},
		{name: "bulk connections, as can be resumed", args: []string{"--grace", "30s"}, env: []string{"SLUICE_BULK=3"}},
		{name: "under the race detector", race: true},
		{name: "shared memory", network: "unix", none: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := startWorker(t, workerOptions{network: c.network, race: c.race, args: c.args})
			stats := filepath.Join(t.TempDir(), "stats")
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			cmd := w.direct(ctx, built("test/background"), fmt.Sprint(steps), fmt.Sprint(mib))
			if c.rate != "" {
				addr, _ := slowLink(t, w, c.rate)
				cmd.Env = append(cmd.Env, "SLUICE_WORKER="+addr)
			}
			cmd.Env = append(append(cmd.Env, "SLUICE_STATS="+stats), c.env...)
			r := finish(t, ctx, cmd)
			var took struct {
				Calls float64 `json:"calls_ms"`
				All   float64 `json:"all_ms"`
				On    bool    `json:"went_on"`
			}
			if r.status != 0 || r.stderr != "" || json.Unmarshal([]byte(r.stdout), &took) != nil {
				t.Fatalf("status %d\nstdout: %s\nstderr: %s", r.status, r.stdout, tail(r.stderr, 20))
			}
			var s struct {
				Background int64 `json:"background"`
				Compressed int64 `json:"compressed"`
				Bulk       int64 `json:"bulk_out"`
			}
			readStats(t, stats, &s)
			t.Logf("%+v %+v", took, s)
			if c.rate != "" && s.Background < (steps+8)*mib<<20 || c.none && s.Background != 0 {
				t.Errorf("%+v was sent in the background", s)
			}
			if c.rate == "1G" && took.Calls > took.All/4 {
				t.Errorf("the calls of the copies, and of what is behind them, took %.1f of %.1f ms", took.Calls, took.All)
			}
			if c.rate == "1G" && !took.On {
				t.Error("work of another stream that waits for a word in host memory went on only after the copies")
			}
			w.healthy()
		})
	}
}

// The worker ends in the middle of copies in the background: the program hears of it, and ends.
func TestBackgroundWorkerEnds(t *testing.T) {
	for i := range 4 {
		w := newWorker(t, workerOptions{keepalive: 2 * time.Second})
		addr, _ := slowLink(t, w, "1G")
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := w.direct(ctx, built("test/background"), "60", "8")
		cmd.Env = append(cmd.Env, "SLUICE_WORKER="+addr)
		r := w.endsWithin(ctx, cmd, time.Duration(i)*41*time.Millisecond)
		cancel()
		if r.status != 1 {
			t.Errorf("status %d: %s%s", r.status, r.stdout, r.stderr)
		}
		w.stop()
	}
}

// The connection is cut at random bytes while copies are in the background.
func TestBackgroundCuts(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--grace", "30s"}, keepalive: time.Second})
	var cuts int64
	for seed := range uint64(4) {
		c := newCutter(t, w, seed, 1000, 16<<20, 4)
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		cmd := w.direct(ctx, built("test/background"), "8")
		cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr(), fmt.Sprintf("SLUICE_BULK=%d", 2*(seed%2)))
		r := finish(t, ctx, cmd)
		cancel()
		cuts += c.cuts.Load()
		c.close()
		if r.status != 0 {
			t.Fatalf("seed %d: status %d: %s\n%s", seed, r.status, r.stdout, tail(r.stderr, 20))
		}
		waitFor(t, 40*time.Second, "the session has ended", func() bool { return len(w.sessions()) == 0 })
	}
	if t.Logf("%d cuts", cuts); cuts < 4 {
		t.Errorf("%d cuts", cuts)
	}
	w.healthy()
}
