package e2e

import (
	"bufio"
	"context"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestSlowIsNotLost: a link that is slow and far is no lost one, though what is in flight takes several times the keep-alive time to arrive, and no
// answer comes within it.
func TestSlowIsNotLost(t *testing.T) {
	t.Parallel()
	w := startWorker(t, workerOptions{args: []string{"--grace", "30s", "--no-compress"}, keepalive: time.Second})
	relay := exec.Command(built("bin/relay"), "--to", strings.TrimPrefix(w.addr, "tcp:"), "--rtt", "600ms", "--rate", "24M")
	out, err := relay.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := relay.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = relay.Process.Signal(syscall.SIGTERM)
		_ = relay.Wait()
	})
	lines := bufio.NewScanner(out)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), "listening ") {
		t.Fatalf("the relay said %q", lines.Text())
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.direct(ctx, program("vecadd"))
	cmd.Env = append(cmd.Env, "SLUICE_WORKER=tcp:"+strings.TrimPrefix(lines.Text(), "listening "))
	r := finish(t, ctx, cmd)
	if r.status != 0 || r.stderr != "" || r.took < 3*time.Second {
		t.Errorf("status %d after %v: %s%s", r.status, r.took, r.stdout, tail(r.stderr, 20))
	}
	t.Logf("%v", r.took.Round(time.Millisecond))
}
