package e2e

import (
	"context"
	"testing"
	"time"
)

// locked runs test/cuda/locked.c, with page-locked memory whose copies are on their way.
func locked(t *testing.T, w *worker, rate, what string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.direct(ctx, built("test/locked"), what)
	if rate != "" {
		addr, _ := slowLink(t, w, rate)
		cmd.Env = append(cmd.Env, "SLUICE_WORKER="+addr)
	}
	r := finish(t, ctx, cmd)
	if r.status != 0 || r.stdout != "PASS\n" || r.stderr != "" {
		t.Fatalf("locked %s: status %d\nstdout: %s\nstderr: %s", what, r.status, r.stdout, tail(r.stderr, 20))
	}
}

// TestExitWithCopies: a program that ends while a copy is on its way says so, and its session does not wait for another connection.
func TestExitWithCopies(t *testing.T) {
	for name, args := range map[string][]string{"grace": {"--grace", "1m"}, "none": nil} {
		t.Run(name, func(t *testing.T) {
			w := startWorker(t, workerOptions{args: args})
			for range 3 {
				locked(t, w, "100M", "exit")
				waitFor(t, 20*time.Second, "the session has ended", func() bool { return len(w.sessions()) == 0 })
			}
		})
	}
}

// TestCancelledWait: a thread that is cancelled while it waits for host functions holds no lock of the shim's afterwards.
func TestCancelledWait(t *testing.T) {
	locked(t, startWorker(t, workerOptions{}), "", "cancel")
}

// TestReachedDuringCopy: kernels are given the address of page-locked memory while another thread copies from it. The copy is right, and nothing waits for ever.
func TestReachedDuringCopy(t *testing.T) {
	for name, args := range map[string][]string{"grace": {"--grace", "30s"}, "none": nil} {
		t.Run(name, func(t *testing.T) {
			locked(t, startWorker(t, workerOptions{args: args}), "1G", "reach")
		})
	}
}

// TestQueryBehindCopies: a query of an event or a stream does not wait for the copies that the work stands behind.
func TestQueryBehindCopies(t *testing.T) {
	locked(t, startWorker(t, workerOptions{}), "1G", "query")
}

// TestBehindHostFunction: copies of more bytes than the worker takes ahead of a slow host function arrive: the function's end is heard of behind them.
func TestBehindHostFunction(t *testing.T) {
	for name, args := range map[string][]string{"grace": {"--grace", "30s"}, "none": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locked(t, startWorker(t, workerOptions{args: args}), "", "behind")
		})
	}
}
