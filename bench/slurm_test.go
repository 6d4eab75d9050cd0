package bench_test

import (
	"os"
	"path/filepath"
	"testing"
)

// The script with the installed Slurm and all of Sluice real; the GPU is the simulated
// one, and a CUDA program stands in for PyTorch.
func TestSlurm(t *testing.T) {
	t.Parallel()
	made := os.Getenv("SLUICE_BUILD")
	if made == "" {
		made, _ = filepath.Abs("../build")
	}
	for _, f := range []string{"bin/sluiced", "spank/spank_sluice.so", "test/twins.so", "test/cuda-11.8/train"} {
		if _, err := os.Stat(filepath.Join(made, f)); err != nil {
			t.Fatalf("%v; run make all cuda-programs", err)
		}
	}
	if os.Getuid() != 0 {
		t.Fatal("daemons and their workers need root")
	}
	state := t.TempDir()
	out, status, _ := script(t, []string{
		"SLUICE_BUILD=" + made, "FAKE_TRAIN=" + filepath.Join(forUsers(t, filepath.Join(made, "test/cuda-11.8/train")), "train"), "SLUICE_STEPS=20",
		"TMPDIR=/tmp", // whose folders a job's user can reach
		"SLUICE_OWNER_LIBCUDA=" + filepath.Join(made, "simgpu/libcuda.so.1"), "SLUICE_OWNER_LIBNVML=" + filepath.Join(made, "simgpu/libnvidia-ml.so.1"),
		"SLUICE_OWNER_KEEP_MEM=0", "SLUICE_SIM_STATE=" + filepath.Join(state, "sim"), "SLUICE_SIM_MEM=143771M",
		"SLUICE_SIM_KERNELS=" + filepath.Join(made, "test/twins.so"),
	}, "gpu-slurm.sh", "installed")
	if status != 0 {
		t.Errorf("exit status %d", status)
	}
	want(t, out, "PASS half", "MiB of 143771; 55.56 steps/s, native 55.56, 1.000", "PASS report", "PASS side-by-side", "(Licenses) rgpu:40",
		"PASS waited",
		"PASS fixed                        30 % had 30.0 and 70 % had 70.0 percent of the 1000 products a second that the program makes alone", "PASS none", "PASS too-much", "PASS nothing-left", "gpu-slurm: 11 passed, 0 failed")
}
