package content

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A second call removes what a killed one left unfinished, and leaves a call that still runs
// alone.
func TestPrepare(t *testing.T) {
	from, dir := t.TempDir(), filepath.Join(t.TempDir(), "container")
	write := func(path string, age time.Duration) {
		t.Helper()
		if err := os.WriteFile(path, []byte(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1", "nvidia-smi"} {
		write(filepath.Join(from, name), 0)
	}
	smi := filepath.Join(from, "nvidia-smi")
	if err := Prepare(dir, from, "/run/sock", smi); err != nil {
		t.Fatal(err)
	}
	old := []string{filepath.Join(dir, ".libcuda.so.1.0123456789abcdef.new"), filepath.Join(dir, "bin/.nvidia-smi.0123456789abcdef.new")}
	for _, path := range old {
		write(path, 24*time.Hour)
	}
	young := filepath.Join(dir, ".libcuda.so.1.fedcba9876543210.new")
	write(young, time.Minute)
	if err := Prepare(dir, from, "/run/sock", smi); err != nil {
		t.Fatal(err)
	}
	for _, path := range old {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s stays: %v", path, err)
		}
	}
	for _, path := range []string{young, filepath.Join(dir, "libcuda.so.1"), filepath.Join(dir, "libcuda.so"), filepath.Join(dir, Smi), filepath.Join(dir, "sluice.conf"), filepath.Join(dir, "lease")} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}
