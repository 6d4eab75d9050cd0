package e2e

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestVersion: every program and both shims say the commit that make built them from, in the file and in the log.
func TestVersion(t *testing.T) {
	made, err := os.ReadFile(built("version"))
	if err != nil {
		t.Fatal(err)
	}
	want := "version " + strings.TrimSpace(string(made))
	for _, args := range [][]string{{"sluice", "version"}, {"sluiced", "--version"}, {"sluice-worker", "--version"}} {
		out, err := exec.Command(built("bin/"+args[0]), args[1:]...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), args[0]+" "+want) {
			t.Errorf("%v: %v, %q does not have %q", args, err, out, want)
		}
	}
	for _, lib := range []string{"shim/libcuda.so.1", "shim/libnvidia-ml.so.1"} {
		text, err := os.ReadFile(built(lib))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), "sluice "+want+"\x00") {
			t.Errorf("%s does not have the text %q", lib, want)
		}
	}

	w := startWorker(t, workerOptions{})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.direct(ctx, built("test/nvml"))
	cmd.Env = append(cmd.Env, "SLUICE_LOG=info")
	r := finish(t, ctx, cmd)
	for _, line := range []string{"sluice: sluice " + want + "\n", "sluice: nvml: sluice " + want + "\n"} {
		if strings.Count(r.stderr, line) != 1 {
			t.Errorf("status %d: the log has not one line %q: %s", r.status, line, r.stderr)
		}
	}
}
