package workers

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fakeCgroup2 makes a folder that stands for a mounted cgroup2, with groups, and a proc whose process is in one of them.
func fakeCgroup2(t *testing.T, own string, groups ...string) (proc, top string) {
	t.Helper()
	dir := t.TempDir()
	proc, top = filepath.Join(dir, "proc"), filepath.Join(dir, "cgroup")
	write := func(path, text string) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(proc, "cgroup"), "0::"+own+"\n")
	write(filepath.Join(proc, "mountinfo"), "30 23 0:26 / "+top+" rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
	for _, g := range append(groups, own) {
		write(filepath.Join(top, g, "cgroup.controllers"), "cpu memory pids\n")
		write(filepath.Join(top, g, "cgroup.procs"), "")
	}
	return proc, top
}

// Sessions are below the unit that is there for them; else below the daemon's group, whose leaf the daemon may be in.
func TestWhereSessionsAre(t *testing.T) {
	for _, c := range []struct{ own, beside, want string }{
		{"/system.slice/sluiced.service", "/system.slice/sluice-sessions.service", "/system.slice/sluice-sessions.service"},
		{"/system.slice/sluiced.service/daemon", "/system.slice/sluice-sessions.service", "/system.slice/sluice-sessions.service"},
		{"/system.slice/sluiced.service/daemon", "/gpu.slice/sluice-sessions.service", "/system.slice/sluiced.service"},
		{"/system.slice/sluiced.service", "/gpu.slice/sluice-sessions.service", "/system.slice/sluiced.service"},
		{"/", "/a", "/"},
	} {
		proc, top := fakeCgroup2(t, c.own, c.beside, c.want)
		all, err := hierarchies(proc)
		if err != nil || len(all) != 1 {
			t.Fatalf("%+v: %v, %v", c, all, err)
		}
		h := all[0]
		if h.base != filepath.Join(top, c.want) || !h.v2 || h.unit != (c.want == c.beside) || !slices.Contains(h.controllers, "memory") {
			t.Errorf("%+v: %+v", c, h)
		}
	}
}

// The waiting process leaves the group before it is divided, and each session gets all limits.
func TestLimitsBelowUnit(t *testing.T) {
	proc, top := fakeCgroup2(t, "/s/sluiced.service", "/s/sluice-sessions.service")
	unit := filepath.Join(top, "s/sluice-sessions.service")
	if err := os.WriteFile(filepath.Join(unit, "cgroup.procs"), []byte("4711\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &cgroups{log: testLog(), strict: true, limits: map[string][]string{}}
	cfg := Config{PidsMax: 100, CPUs: 3, MemoryMax: MemoryByLease}
	if err := c.find(proc, cfg); err != nil {
		t.Fatal(err)
	}
	if err := c.put("x", 12); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		unit + "/waiting/cgroup.procs": "4711", unit + "/cgroup.subtree_control": "+cpu", unit + "/sluice/cgroup.subtree_control": "+cpu",
		unit + "/sluice/x/pids.max": "100", unit + "/sluice/x/cpu.max": "300000 100000", unit + "/sluice/x/memory.max": "6442450944",
		unit + "/sluice/x/cgroup.procs": "12",
	} {
		b, err := os.ReadFile(file)
		if err != nil || strings.TrimSpace(string(b)) != want {
			t.Errorf("%s has %q, want %q; %v", strings.TrimPrefix(file, top), b, want, err)
		}
	}
}
