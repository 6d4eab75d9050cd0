package bench_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The script with a real worker and the simulated GPU, which clears its memory for each process. It serves one user alone, so writer and
// reader are the same here.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	made, nvcc := built(t)
	at := forUsers(t, filepath.Join(made, "simgpu/libcuda.so.1"))
	if out, err := exec.Command("sh", "-c", `cp "$1"/simgpu/libnvidia-ml.so.1 "$0" && mkdir "$0/sim" && chown 65534 "$0/sim"`, at, made).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	compileTwins(t, filepath.Join(at, "twins.so"), "leftovers/twins.c")
	out, status, logs := script(t, []string{
		"SLUICE_BUILD=" + made, "TMPDIR=/tmp", "NVCC=" + nvcc, "SLUICE_READER=65534", "SLUICE_ONLY=remote", "SLUICE_MEM=200M", "LEFTOVERS_MIB=2",
		"SLUICE_OWNER_LIBCUDA=" + filepath.Join(at, "libcuda.so.1"), "SLUICE_OWNER_LIBNVML=" + filepath.Join(at, "libnvidia-ml.so.1"),
		"SLUICE_SIM_STATE=" + filepath.Join(at, "sim/state"), "SLUICE_SIM_KERNELS=" + filepath.Join(at, "twins.so"),
	}, "gpu-leftovers.sh")
	if status != 0 {
		t.Errorf("exit status %d", status)
	}
	want(t, out, `{"commit": "`, "PASS remote.control   device ", "PASS remote.exit      device none in ", "PASS remote.cap  ", "PASS remote.kill  ", "PASS remote.session  ",
		"vmm none in 8 MiB; array none in 8 MiB; host none in 2 MiB", "gpu-leftovers: 0 failed")

	for _, p := range processes(t) {
		if strings.Contains(p, at) {
			t.Errorf("a process is left: %q", p)
		}
	}

	path := filepath.Join(logs, "leftovers.jsonl")
	log, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for finding, change := range map[string][2]string{
		"FAIL remote.exit ": {`"remote.exit", "memory": "vmm", "bytes": 8388608, "marks": 0`, `"remote.exit", "memory": "vmm", "bytes": 8388608, "marks": 262144`},
		"FAIL remote.cap ":  {`"remote.cap", "memory": "host", "bytes": 2097152`, `"remote.cap", "memory": "host", "bytes": 0`},
		"FAIL remote.kill ": {`"remote.kill", "memory": "pool"`, `"remote.kill", "memory": "none"`},
	} {
		if err := os.WriteFile(path, bytes.Replace(log, []byte(change[0]), []byte(change[1]), 1), 0o600); err != nil {
			t.Fatal(err)
		}
		b, err := exec.Command("python3", "leftovers/report.py", path).CombinedOutput()
		if err == nil {
			t.Errorf("%s passes: %s", change[1], b)
		}
		want(t, string(b), finding)
	}
}
