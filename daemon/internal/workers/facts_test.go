package workers

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// A daemon that is restarted does not ask the driver again, unless something has changed that the answer depends
// on.
func TestFactsKept(t *testing.T) {
	dir := setup(t)
	first := newPool(t, dir, nil)
	if err := first.Probe(t.Context(), gpus(0, 1)); err != nil {
		t.Fatal(err)
	}
	first.Close()

	over, cancel := context.WithCancel(t.Context())
	cancel() // a pool that asks the driver fails
	knows := func(p *Pool) bool {
		t.Helper()
		err := p.Probe(over, gpus(0, 1))
		if n, unknown := p.Overhead(simUUID(1)); err == nil && (unknown != nil || n != 64<<20) {
			t.Fatalf("overhead %d, %v", n, unknown)
		}
		p.Close()
		return err == nil
	}
	// A killed daemon's unfinished file is swept; it is no fact.
	torn := filepath.Join(first.factsDir(), ".x.0123456789abcdef.new")
	past := time.Now().Add(-2 * time.Hour)
	if err := errors.Join(os.WriteFile(torn, []byte("{"), 0o600), os.Chtimes(torn, past, past)); err != nil {
		t.Fatal(err)
	}
	if !knows(newPool(t, dir, nil)) {
		t.Error("the second daemon asks again")
	}
	t.Setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
	if knows(newPool(t, dir, nil)) {
		t.Error("what was learned in another environment is believed")
	}
	os.Unsetenv("CUDA_DEVICE_MAX_CONNECTIONS")
	if knows(newPool(t, dir, func(c *Config) { c.Seccomp = !c.Seccomp })) {
		t.Error("what was learned in another sandbox is believed")
	}
	third := newPool(t, dir, nil)
	if err := os.WriteFile(third.factsPath(simUUID(0)), []byte(`{"Source":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if knows(third) {
		t.Error("half a file is believed")
	}
	fourth := newPool(t, dir, nil)
	if err := fourth.Probe(t.Context(), gpus(0)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(torn); err == nil {
		t.Error("the unfinished file is left")
	}
}

// A GPU that stops answering while no daemon runs is known as such soon after the next start.
func TestFactsRechecked(t *testing.T) {
	dir := setup(t)
	// A simulated machine keeps its GPUs as long as a process uses it, so no worker is started ahead.
	unused := func(c *Config) { c.Warm = 0 }
	first := newPool(t, dir, unused)
	if err := first.Probe(t.Context(), gpus(0, 1)); err != nil {
		t.Fatal(err)
	}
	first.Close()
	p := newPool(t, dir, unused)
	if err := p.Probe(t.Context(), gpus(0, 1)); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	kept := slices.Sorted(slices.Values(p.kept))
	p.mu.Unlock()
	if want := []string{simUUID(0), simUUID(1)}; !slices.Equal(kept, want) {
		t.Fatalf("the second pool believes what was kept of %q, not of %q", kept, want)
	}
	t.Setenv("SLUICE_SIM_DEVICES", "1")
	if err := p.Recheck(t.Context()); err == nil || !strings.Contains(err.Error(), simUUID(1)) || strings.Contains(err.Error(), simUUID(0)) {
		t.Errorf("recheck: %v", err)
	}
	if _, err := p.Overhead(simUUID(0)); err != nil {
		t.Error("the GPU that answers is unknown")
	}
	if _, err := p.Overhead(simUUID(1)); err == nil {
		t.Error("the GPU that is gone is still known")
	}
	if _, err := os.Stat(p.factsPath(simUUID(1))); err == nil {
		t.Error("what was known of the GPU that is gone is kept")
	}
	if err := p.Recheck(t.Context()); err != nil {
		t.Errorf("a second recheck: %v", err)
	}
}
