package workers

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

func TestMemoryByLease(t *testing.T) {
	for _, c := range []struct {
		mem  []uint64
		want uint64
	}{{nil, 6 << 30}, {[]uint64{80 << 30}, 16 << 30}, {[]uint64{8 << 30, 16 << 30}, 10 << 30}} {
		var l lease.Lease
		for _, m := range c.mem {
			l.Grants = append(l.Grants, lease.Grant{Mem: m})
		}
		if got := MemoryByLease(l); got != c.want {
			t.Errorf("%v: %d, want %d", c.mem, got, c.want)
		}
	}
}

// A session that takes more host memory than its lease gives it is ended, by its control group or, where
// there is none, by itself, and its end says why. The others go on.
func TestHostMemory(t *testing.T) {
	for _, cgroup := range []string{"auto", "off"} {
		t.Run(cgroup, func(t *testing.T) {
			p := newPool(t, setup(t), func(c *Config) {
				c.Cgroup = cgroup
				c.StoreKeepFree = 1 << 60 // so that images stay in memory
				c.MemoryMax = func(l lease.Lease) uint64 { return 256<<20 + uint64(len(l.Grants))<<20 }
			})
			ends := make(chan string, 2)
			p.OnEnd(func(s lease.Session, reason string) { ends <- s.Lease[:1] + " " + reason })
			open := func(id string) (*client, lease.Session) {
				c, w := pair(t)
				s, err := p.Start(t.Context(), testLease(id, 0), request(id), w, gpus(0))
				if err != nil {
					t.Fatal(err)
				}
				w.Close()
				if err := c.hello(); err != nil {
					t.Fatal(err)
				}
				return c, s
			}
			good, _ := open("a")
			bad, s := open("b")
			if p.cg.memory != "" {
				b, err := os.ReadFile(filepath.Join(p.cg.memory, s.ID, p.cg.memoryFile()))
				if err != nil || strings.TrimSpace(string(b)) != fmt.Sprint(257<<20) {
					t.Errorf("limit of the session's group: %s, %v", b, err)
				}
			}
			for _, c := range []*client{good, bad} {
				if err := c.activate(0); err != nil {
					t.Fatal(err)
				}
			}
			const size, piece = 1 << 30, 4 << 20
			b := make([]byte, piece)
			for i := range b {
				b[i] = byte(i)
			}
			for off := 0; off < size-piece; off += piece {
				if bad.chunk([32]byte{1}, off, size, b) != nil {
					break
				}
			}
			if got := <-ends; !strings.HasPrefix(got, "b ") || !strings.Contains(got, "its host memory passed worker.memory_max") {
				t.Errorf("end: %s", got)
			}
			if sum := p.Total(testLease("b", 0).ID); sum.Failed != 1 || !strings.Contains(sum.Failure, memoryPassed) {
				t.Errorf("%d sessions failed, the last one of %q", sum.Failed, sum.Failure)
			}
			if err := good.activate(0); err != nil {
				t.Errorf("the other session: %v", err)
			}
		})
	}
}

// A session, and a process that waits for one, goes before anything else when memory is short.
func TestOOMScore(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	score := func(pid int) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	if err := p.Probe(t.Context(), gpus(0)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a warm worker", func() bool { return p.ready(simUUID(0)) })
	p.mu.Lock()
	warm := p.warm[simUUID(0)][0].Cmd.Process.Pid
	p.mu.Unlock()
	waitFor(t, "the warm worker's score", func() bool { return score(warm) == "500" })
	c, w := pair(t)
	s, err := p.Start(t.Context(), testLease("a", 0), request("a"), w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	if got := score(s.Worker.PID); s.Worker.PID != warm || got != "500" {
		t.Errorf("process %d has %s", s.Worker.PID, got)
	}
}

// What is written to a session's group, and read of it, in either version; plain files stand for the kernel's.
func TestMemoryFiles(t *testing.T) {
	for _, v2 := range []bool{false, true} {
		top := t.TempDir()
		c := &cgroups{log: testLog(), dirs: []string{top}, limits: map[string][]string{}, memory: top, v2: v2}
		c.limits[top] = []string{c.memoryFile() + " 100"}
		is := func(file, want string) {
			t.Helper()
			b, err := os.ReadFile(filepath.Join(top, "s", file))
			if got := strings.TrimSpace(string(b)); got != want || (err == nil) != (want != "") {
				t.Errorf("v2 %v: %s has %q, want %q", v2, file, got, want)
			}
		}
		if err := c.put("s", 4711); err != nil {
			t.Fatal(err)
		}
		is("cgroup.procs", "4711")
		is(c.memoryFile(), "100")
		none, events := "-1", "memory.oom_control"
		if v2 {
			none, events = "max", "memory.events"
			is("memory.oom.group", "1")
			is("memory.swap.max", "0")
		} else {
			is("memory.oom.group", "")
		}
		if !c.setMemory("s", 200) {
			t.Error("no limit of memory")
		}
		is(c.memoryFile(), "200")
		if !c.setMemory("s", 0) {
			t.Error("no limit of memory is not written")
		}
		is(c.memoryFile(), none)
		for text, want := range map[string]bool{"": false, "oom 1\noom_kill 0\n": false, "oom 3\noom_kill 1\noom_group_kill 0\n": true} {
			if err := os.WriteFile(filepath.Join(top, "s", events), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if c.outOfMemory("s") != want {
				t.Errorf("v2 %v: %q is a kill for memory: %v", v2, text, !want)
			}
		}
		if c.setMemory("none", 100) || (&cgroups{}).setMemory("s", 100) || !(&cgroups{}).setMemory("s", 0) {
			t.Errorf("v2 %v: a session without a group", v2)
		}
	}
}
