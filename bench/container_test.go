package bench_test

import (
	"os"
	"path/filepath"
	"testing"
)

// The script with the installed runc and crun and all of Sluice real; the GPU is the
// simulated one.
func TestContainer(t *testing.T) {
	t.Parallel()
	made := os.Getenv("SLUICE_BUILD")
	if made == "" {
		made, _ = filepath.Abs("../build")
	}
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		cache, _ = filepath.Abs("../build/cache")
	}
	for _, f := range []string{made + "/bin/sluiced", made + "/bin/sluice-hook", made + "/test/twins.so", made + "/test/cuda-11.8/train", cache + "/cuda-smi/bin/nvidia-smi-550"} {
		if _, err := os.Stat(f); err != nil {
			t.Fatalf("%v; run make all cuda-programs test-smi", err)
		}
	}
	if os.Getuid() != 0 {
		t.Fatal("daemons and their workers need root")
	}
	out, status, _ := script(t, []string{
		"SLUICE_BUILD=" + made, "SLUICE_SMI=" + cache + "/cuda-smi/bin/nvidia-smi-550", "PYTHON=python3", "SLUICE_STARTS=3", "SLUICE_MOST_MS=5000",
		"TMPDIR=/tmp", // whose folders a container's user can reach
		"SLUICE_OWNER_LIBCUDA=" + filepath.Join(made, "simgpu/libcuda.so.1"), "SLUICE_OWNER_LIBNVML=" + filepath.Join(made, "simgpu/libnvidia-ml.so.1"),
		"SLUICE_OWNER_KEEP_MEM=0", "SLUICE_SIM_STATE=" + filepath.Join(t.TempDir(), "sim"), "SLUICE_SIM_MEM=143771M",
		"SLUICE_SIM_KERNELS=" + filepath.Join(made, "test/twins.so"),
	}, "gpu-container.sh", "installed")
	if status != 0 {
		t.Errorf("exit status %d", status)
	}
	want(t, out, "PASS runc-root-smi                nvidia-smi in the container: 43130 MiB of 143771", "PASS runc-rootless-compute", "PASS crun-root-exec", "PASS crun-rootless-none",
		"PASS refused", "PASS nothing-left", "gpu-container: 23 passed, 0 failed")
}
