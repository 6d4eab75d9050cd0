package workers

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// TestSharedDir follows a lease's directory for /dev/shm: its session's user alone has it, a daemon that restarts leaves it alone and
// removes those of leases that have ended, and it goes with the lease. Where somebody else's directory lies, no session starts.
func TestSharedDir(t *testing.T) {
	dir := setup(t)
	stale, strange := strings.Repeat("d", 32), strings.Repeat("c", 32)
	for _, id := range []string{stale, "notes"} { // "notes" is no lease's
		if err := os.MkdirAll(filepath.Join(dir, "shared", id, "below"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	p := newPool(t, dir, func(c *Config) { c.Sandbox = sandbox.Off })
	gone := func(id string) func() bool {
		return func() bool {
			_, err := os.Lstat(filepath.Join(p.cfg.Shared, id))
			return errors.Is(err, os.ErrNotExist)
		}
	}
	waitFor(t, "the directory of an ended lease goes", gone(stale))
	c, w := pair(t)
	s, err := p.Start(t.Context(), testLease("a", 0), request("a"), w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(p.cfg.Shared, s.Lease)
	fi, err := os.Lstat(own)
	if err != nil || fi.Mode() != os.ModeDir|0o700 || fi.Sys().(*syscall.Stat_t).Uid != testUID {
		t.Fatalf("%+v, %v", fi, err)
	}
	if err := os.WriteFile(filepath.Join(own, "cuda.shm"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(p.cfg.Shared, stale), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.sweepShared(); err != nil {
		t.Error(err)
	}
	waitFor(t, "the directory of another ended lease goes", gone(stale))
	if gone(s.Lease)() || gone("notes")() {
		t.Error("a restart removes the directory of a living lease, or one that is no lease's")
	}
	if err := p.End(t.Context(), s.Lease); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the lease's directory goes with it", gone(s.Lease))

	if err := os.Mkdir(filepath.Join(p.cfg.Shared, strange), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(p.cfg.Shared, strange), 4242, 4242); err != nil {
		t.Fatal(err)
	}
	_, w = pair(t)
	defer w.Close()
	if _, err := p.Start(t.Context(), testLease("c", 0), request("c"), w, gpus(0)); err == nil || !strings.Contains(err.Error(), "directory for /dev/shm") || !strings.Contains(err.Error(), "user 4242, not to 65534: remove it") {
		t.Errorf("a session in another user's directory: %v", err)
	}
}
