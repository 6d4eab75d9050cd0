package workers

// Control groups. Each session has a group of its own, sluice/SESSION, below a group that
// the daemon may divide. It limits the session's memory, threads and processors. The daemon
// uses a controller where it is mounted: as version 1, as version 2, or some of each.
//
// In version 2 a group holds either processes or groups with limits. So sessions cannot be
// below the daemon's own unit: while one lives, systemd cannot start a new daemon in the
// unit's group (systemd 252 was seen to fail with status 219/CGROUP at each attempt), but a
// daemon must be able to restart while sessions live. Sessions are below a unit of their
// own, sluice-sessions.service, in the daemon's slice. That unit has one process, which only
// waits: without a process systemd would remove the group. The daemon moves this process
// into a leaf.
//
// If that unit does not run, the daemon divides its own group. It must then itself be in a
// leaf named "daemon", as DelegateSubgroup=daemon of systemd 254 and later makes it. Only the
// root group may hold both.

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

const (
	// sessionsUnit is the unit that the sessions' groups are in. waiting is the leaf for its own process.
	sessionsUnit = "sluice-sessions.service"
	waiting      = "waiting"
	// cpuPeriod is the period of processor limits in microseconds.
	cpuPeriod = 100_000
)

type cgroups struct {
	log    *slog.Logger
	strict bool                // a missing limit is an error
	dirs   []string            // .../sluice, one for each hierarchy
	limits map[string][]string // directory to lines "file value"
	memory string              // the directory that limits memory, "" for none
	v2     bool                // memory is in a hierarchy of version 2
}

// memoryFile returns the name of the file that limits a group's memory.
func (c *cgroups) memoryFile() string {
	if c.v2 {
		return "memory.max"
	}
	return "memory.limit_in_bytes"
}

// newCgroups finds the hierarchies. In mode auto it logs what is missing.
func newCgroups(log *slog.Logger, cfg Config) (*cgroups, error) {
	c := &cgroups{log: log, strict: cfg.Cgroup == "required", limits: map[string][]string{}}
	if cfg.Cgroup == "off" {
		return c, nil
	}
	err := c.find("/proc/self", cfg)
	if err != nil && c.strict {
		return nil, fmt.Errorf("worker.cgroup: %w", err)
	} else if err != nil {
		log.Warn("sessions run without all of their limits", "error", err)
	}
	return c, nil
}

// hierarchy is a mounted hierarchy: its controllers, and the group that the daemon divides.
type hierarchy struct {
	v2          bool
	controllers []string
	base        string
	unit        bool // base is the group of sessionsUnit
}

func hierarchies(proc string) ([]hierarchy, error) {
	own := map[string]string{}
	b, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 {
			own[f[1]] = f[2]
		}
	}
	m, err := os.Open(filepath.Join(proc, "mountinfo"))
	if err != nil {
		return nil, err
	}
	defer m.Close()
	var all []hierarchy
	for s := bufio.NewScanner(m); s.Scan(); {
		head, tail, ok := strings.Cut(s.Text(), " - ")
		f, g := strings.Fields(head), strings.Fields(tail)
		if !ok || len(f) < 5 || len(g) < 3 {
			continue
		}
		// In a container the root of the mount may be a group, and paths are below it.
		base := func(path string) string { return filepath.Join(f[4], strings.TrimPrefix(path, f[3])) }
		switch g[0] {
		case "cgroup2":
			h := hierarchy{v2: true, base: base(own[""])}
			if filepath.Base(h.base) == "daemon" {
				h.base = filepath.Dir(h.base)
			}
			if beside := filepath.Join(filepath.Dir(h.base), sessionsUnit); isDir(beside) {
				h.base, h.unit = beside, true
			}
			b, _ := os.ReadFile(filepath.Join(h.base, "cgroup.controllers"))
			h.controllers = strings.Fields(string(b))
			all = append(all, h)
		case "cgroup":
			for names, path := range own {
				cs := strings.Split(names, ",")
				opts := strings.Split(g[2], ",")
				if names != "" && !slices.ContainsFunc(cs, func(c string) bool { return !slices.Contains(opts, c) }) {
					all = append(all, hierarchy{controllers: cs, base: base(path)})
				}
			}
		}
	}
	return all, nil
}

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}

// settle moves the processes of a group into a leaf of it.
func settle(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return err
	}
	pids := strings.Fields(string(b))
	if len(pids) == 0 {
		return nil
	}
	leaf := filepath.Join(dir, waiting)
	if err := os.MkdirAll(leaf, 0o755); err != nil {
		return err
	}
	for _, pid := range pids {
		err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(pid), 0)
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

func (c *cgroups) find(proc string, cfg Config) error {
	all, err := hierarchies(proc)
	if err != nil {
		return err
	}
	var errs []error
	names := []string{"memory", "pids"}
	if cfg.CPUs > 0 {
		names = append(names, "cpu")
	}
	for _, name := range names {
		i := slices.IndexFunc(all, func(h hierarchy) bool { return slices.Contains(h.controllers, name) })
		if i < 0 {
			errs = append(errs, fmt.Errorf("no controller %s: neither version 1 nor 2 of it is mounted here", name))
			continue
		}
		h := all[i]
		dir := filepath.Join(h.base, "sluice")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			errs = append(errs, fmt.Errorf("controller %s: %w", name, err))
			continue
		}
		if h.unit {
			if err := settle(h.base); err != nil {
				errs = append(errs, fmt.Errorf("controller %s: %w", name, err))
				continue
			}
		}
		if h.v2 {
			if err := enable(h.base, name); err != nil {
				errs = append(errs, err)
				continue
			}
			if err := enable(dir, name); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		if !slices.Contains(c.dirs, dir) {
			c.dirs = append(c.dirs, dir)
		}
		switch {
		case name == "memory":
			c.memory, c.v2 = dir, h.v2
			if n := cfg.MemoryMax(lease.Lease{}); n > 0 {
				c.limits[dir] = append(c.limits[dir], c.memoryFile()+" "+strconv.FormatUint(n, 10))
			}
		case name == "pids" && cfg.PidsMax > 0:
			c.limits[dir] = append(c.limits[dir], "pids.max "+strconv.Itoa(cfg.PidsMax))
		case name == "cpu" && h.v2:
			c.limits[dir] = append(c.limits[dir], fmt.Sprintf("cpu.max %d %d", cfg.CPUs*cpuPeriod, cpuPeriod))
		case name == "cpu":
			c.limits[dir] = append(c.limits[dir], "cpu.cfs_quota_us "+strconv.Itoa(cfg.CPUs*cpuPeriod))
		}
	}
	return errors.Join(errs...)
}

// enable makes a controller available to the groups below dir.
func enable(dir, name string) error {
	path := filepath.Join(dir, "cgroup.subtree_control")
	if b, _ := os.ReadFile(path); slices.Contains(strings.Fields(string(b)), name) {
		return nil
	}
	err := os.WriteFile(path, []byte("+"+name), 0)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("controller %s: %s holds processes, so it cannot hold sessions: start sluice-sessions.service before sluiced, in the same slice", name, dir)
	}
	if err != nil {
		return fmt.Errorf("controller %s: %w", name, err)
	}
	return nil
}

// put makes a session's group and moves its process there.
func (c *cgroups) put(id string, pid int) error {
	for _, top := range c.dirs {
		err := c.putOne(top, filepath.Join(top, id), pid)
		if err != nil && c.strict {
			return fmt.Errorf("cgroup: %w; set worker.cgroup: auto to run without it", err)
		} else if err != nil {
			c.log.Warn("a session runs without all of its limits", "session", id, "error", err)
		}
	}
	return nil
}

func (c *cgroups) putOne(top, dir string, pid int) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for _, l := range c.limits[top] {
		file, v, _ := strings.Cut(l, " ")
		if err := os.WriteFile(filepath.Join(dir, file), []byte(v), 0); err != nil {
			return err
		}
	}
	if top == c.memory && c.v2 {
		// Old kernels, and kernels without swap, lack these files. The first makes the kernel kill the whole
		// group, should it ever have a second process. The second keeps the session from filling the swap.
		_ = os.WriteFile(filepath.Join(dir, "memory.oom.group"), []byte("1"), 0)
		if slices.ContainsFunc(c.limits[top], func(l string) bool { return strings.HasPrefix(l, c.memoryFile()+" ") }) {
			_ = os.WriteFile(filepath.Join(dir, "memory.swap.max"), []byte("0"), 0)
		}
	}
	return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
}

// setMemory limits the memory of a session to max bytes, 0 for no limit. It returns false if no group enforces the limit:
// the session then has to watch its memory by itself.
func (c *cgroups) setMemory(id string, max uint64) bool {
	if c.memory == "" {
		return max == 0
	}
	v := strconv.FormatUint(max, 10)
	if max == 0 {
		v = map[bool]string{true: "max", false: "-1"}[c.v2]
	}
	err := os.WriteFile(filepath.Join(c.memory, id, c.memoryFile()), []byte(v), 0)
	if err != nil {
		c.log.Warn("no limit of a session's memory by its cgroup", "session", id, "error", err)
	}
	return err == nil
}

// outOfMemory reports whether the kernel has killed a session because it exceeded its memory limit.
func (c *cgroups) outOfMemory(id string) bool {
	if c.memory == "" {
		return false
	}
	file := map[bool]string{true: "memory.events", false: "memory.oom_control"}[c.v2]
	b, err := os.ReadFile(filepath.Join(c.memory, id, file))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "oom_kill" && f[1] != "0" {
			return true
		}
	}
	return false
}

// remove removes a session's group. The session's process has ended.
func (c *cgroups) remove(id string) {
	if id == "" {
		return // it never had a process, and the path would be that of all sessions' directory
	}
	for _, top := range c.dirs {
		for n := range 5 {
			err := unix.Rmdir(filepath.Join(top, id))
			if err == nil || errors.Is(err, unix.ENOENT) {
				break
			}
			// The kernel may not be done with the process yet.
			time.Sleep(time.Millisecond << n)
		}
	}
}

// sweep removes the empty groups that an earlier daemon left behind. It spares recent ones: another
// daemon on this machine may be starting a worker in such a group.
func (c *cgroups) sweep() {
	for _, top := range c.dirs {
		all, _ := os.ReadDir(top)
		for _, d := range all {
			if fi, err := d.Info(); err == nil && d.IsDir() && time.Since(fi.ModTime()) > time.Minute {
				_ = unix.Rmdir(filepath.Join(top, d.Name())) // fails if the group is in use
			}
		}
	}
}
