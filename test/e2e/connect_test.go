package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// libraries are copies of both shims in a directory of their own, with a sluice.conf beside them, as in a
// container.
func libraries(t *testing.T, conf string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		b, err := os.ReadFile(built("shim/" + name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "sluice.conf"), []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// withConf runs a program on such copies, with nothing else to tell it where a worker is.
func withConf(t *testing.T, dir string, env []string, prog string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, prog, args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "SLUICE_") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(append(cmd.Env, "LD_LIBRARY_PATH="+dir), env...)
	return finish(t, ctx, cmd)
}

// A value of sluice.conf may be as long as the file: both libraries find every worker of a list longer than 1,023
// bytes.
func TestLongWorkerList(t *testing.T) {
	var list []string
	for range 3 {
		w := startWorker(t, workerOptions{network: "unix"})
		path, ok := strings.CutPrefix(w.addr, "unix:")
		if !ok {
			t.Fatal(w.addr)
		}
		list = append(list, "unix:"+filepath.Dir(path)+strings.Repeat("/.", 200)+"/"+filepath.Base(path))
	}
	workers := strings.Join(list, ",")
	if len(workers) < 1100 {
		t.Fatalf("the list has %d bytes only", len(workers))
	}
	dir := libraries(t, "# three workers\r\nSLUICE_WORKERS=no\nSLUICE_WORKER="+workers+" \r\n")
	r := withConf(t, dir, nil, built("test/nvml"))
	if r.status != 0 || !strings.Contains(r.stdout, "3 device, NVML and CUDA agree") {
		t.Errorf("status %d\nstdout: %s\nstderr: %s", r.status, r.stdout, r.stderr)
	}
}

// What is too long is refused with a message, by both libraries.
func TestTooLongSettings(t *testing.T) {
	for _, c := range []struct{ name, conf, want string }{
		{"file", "#" + strings.Repeat("x", 16<<10) + "\nSLUICE_WORKER=tcp:127.0.0.1:1\n", "sluice.conf is larger than 16384 bytes"},
		{"address", "SLUICE_WORKER=unix:/" + strings.Repeat("x", 600) + "\n", "SLUICE_WORKER: an address is longer than 511 bytes"},
		{"owners", "SLUICE_WORKER=" + strings.Repeat("tcp:127.0.0.1:1,", 16) + "tcp:127.0.0.1:1\n", "spread over 17 owners: a program can use 16"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := libraries(t, c.conf)
			for prog, args := range map[string][]string{"test/nvml": {"used"}, "test/agent": nil} {
				r := withConf(t, dir, []string{"SLUICE_LOG=error"}, built(prog), args...)
				if !strings.Contains(r.stderr, c.want) {
					t.Errorf("%s: stderr %q, want %q", prog, r.stderr, c.want)
				}
			}
		})
	}
}

// Every level of SLUICE_LOG lets both libraries say why there is no device. Without it the NVML shim says nothing,
// since NVML reports by its results.
func TestLogLevels(t *testing.T) {
	dir := libraries(t, "SLUICE_WORKER=tcp:127.0.0.1:1\n")
	const why = "worker tcp:127.0.0.1:1: "
	for _, level := range []string{"", "error", "warn", "info", "debug", "trace", "everything"} {
		var env []string
		if level != "" {
			env = []string{"SLUICE_LOG=" + level}
		}
		for prog, line := range map[string]string{"test/nvml": "sluice: nvml: " + why, "test/agent": "sluice: " + why} {
			t.Run(fmt.Sprintf("%s %s", level, prog), func(t *testing.T) {
				var args []string
				if prog == "test/nvml" {
					args = []string{"used"}
				}
				r := withConf(t, dir, env, built(prog), args...)
				want := level != "" || prog != "test/nvml"
				if strings.Contains(r.stderr, line) != want {
					t.Errorf("stderr %q; a line with %q is wanted: %v", r.stderr, line, want)
				}
				if strings.Contains(r.stdout, "sluice") {
					t.Errorf("stdout %q", r.stdout)
				}
			})
		}
	}
}

// TestBusyIsNotLost: a worker whose GPU is busy for longer than the keep-alive time takes no more copies meanwhile, and the connection is kept.
func TestBusyIsNotLost(t *testing.T) {
	for name, args := range map[string][]string{"grace": {"--grace", "30s"}, "none": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := startWorker(t, workerOptions{args: args, keepalive: time.Second})
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			r := finish(t, ctx, w.direct(ctx, program("longwait"), "4000", "200"))
			if r.status != 0 || r.stdout != "longwait: the copies arrive\nPASS\n" || r.stderr != "" {
				t.Errorf("status %d after %s\nstdout: %s\nstderr: %s", r.status, r.took, r.stdout, tail(r.stderr, 20))
			}
		})
	}
}
