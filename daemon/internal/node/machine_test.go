package node

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// A daemon that works for root alone, and one that would not start again, are not well.
func TestModes(t *testing.T) {
	cfg := config.Default()
	dir := t.TempDir()
	cfg.StateDir, cfg.RunDir, cfg.Audit.File = filepath.Join(dir, "state"), filepath.Join(dir, "run"), filepath.Join(dir, "log", "audit.log")
	for _, d := range []string{cfg.StateDir, filepath.Join(cfg.RunDir, "leases"), filepath.Dir(cfg.Audit.File)} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{cfg.Socket(), cfg.JobSocket()} {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := os.Chmod(path, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if c := modes(&cfg); len(c) > 0 {
		t.Errorf("of a good node: %+v", c)
	}
	for _, c := range []struct {
		path string
		mode os.FileMode
		node bool
		want string
	}{
		{cfg.RunDir, 0o700, true, "chmod 0755 " + cfg.RunDir},
		{filepath.Join(cfg.RunDir, "leases"), 0o750, true, "chmod 0755"},
		{cfg.Socket(), 0o600, true, "chmod 0666 " + cfg.Socket()},
		{cfg.JobSocket(), 0o644, true, "chmod 0666"},
		{cfg.StateDir, 0o777, false, "state_dir: directory " + cfg.StateDir},
		{filepath.Dir(cfg.Audit.File), 0o775, false, "audit.file"},
	} {
		st, err := os.Stat(c.path)
		if err == nil {
			err = os.Chmod(c.path, c.mode)
		}
		if err != nil {
			t.Fatal(err)
		}
		got := modes(&cfg)
		if len(got) != 1 || got[0].Level != rpc.Fail || got[0].Node != c.node || !strings.Contains(got[0].Text+"; "+got[0].Remedy, c.want) {
			t.Errorf("%s with mode %o: %+v", c.path, c.mode, got)
		}
		if err := os.Chmod(c.path, st.Mode().Perm()); err != nil {
			t.Fatal(err)
		}
	}
}
