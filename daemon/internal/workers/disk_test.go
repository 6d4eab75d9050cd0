package workers

import (
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/internal/safefile/disktest"
)

// unfinished are the files below a directory that somebody began to write.
func unfinished(t *testing.T, dir string) (all []string) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // it has gone meanwhile
		}
		if _, ok := safefile.Unfinished(d.Name()); ok {
			all = append(all, path)
		}
		return nil
	})
	return all
}

// TestDiskFaults: whichever system call fails by which the daemon writes a lease's account, records, totals, socket and directories at the beginning of its first
// session, that session is refused with the file and the cause, nothing of it is left, others go on, and it begins once the disk does. At the end of the lease
// a fault is logged, and the next lease of that name begins with nothing of it.
func TestDiskFaults(t *testing.T) {
	dir := setup(t)
	change := func(c *Config) {
		run := filepath.Join(dir, "run")
		c.Dir, c.Turns, c.Shared = filepath.Join(run, "owner"), filepath.Join(run, "turns"), filepath.Join(run, "shared")
	}
	p := newPool(t, dir, change)
	steady, first := begin(t, p, "b")
	id := strings.Repeat("a", 32)
	gone := func(what string) {
		t.Helper()
		if err := p.End(t.Context(), id); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if err := p.Forget(id); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if left, _ := filepath.Glob(filepath.Join(p.cfg.Dir, id)); len(left) > 0 {
			t.Errorf("%s: %v is left", what, left)
		}
	}
	refused, anyway, ends := map[string]int{}, map[string]int{}, map[string]int{}
	for only, fault := range map[string]disktest.Fault{"": {Err: unix.EIO}, "write": {Err: unix.EIO, Short: true}} {
		for n := 0; ; n++ {
			c, w := pair(t)
			disk := &disktest.One{Dir: filepath.Join(dir, "run"), Only: only, N: n, Fault: fault}
			var err error
			disktest.Run(t, disk.Judge, func() {
				_, err = p.Start(t.Context(), testLease("a", 0), request("a"), w, gpus(0))
			})
			w.Close()
			if err == nil {
				if err := c.hello(); err != nil {
					t.Errorf("%s: %v", disk.Hit, err)
				}
				if disk.Hit.Name == "" {
					gone("without a fault")
					break
				}
				anyway[disk.Hit.Name]++
				gone(disk.Hit.String())
				continue
			}
			refused[disk.Hit.Name]++
			if !strings.Contains(err.Error(), unix.EIO.Error()) || !strings.Contains(err.Error(), filepath.Dir(disk.Hit.Path)) || strings.Contains(err.Error(), ".new") {
				t.Errorf("%s: the error is %q; want the cause and the file", disk.Hit, err)
			}
			files, _ := filepath.Glob(filepath.Join(p.cfg.Dir, id, sessionPrefix+"*"))
			links, _ := filepath.Glob(filepath.Join(p.cfg.Dir, id, linkPrefix+"*"))
			if left := append(append(files, links...), unfinished(t, filepath.Join(dir, "run"))...); len(left) > 0 || len(p.Sessions(id)) > 0 {
				t.Errorf("%s: left are %v, sessions %v", disk.Hit, left, p.Sessions(id))
			}
			if err := steady.activate(0); err != nil {
				t.Fatalf("%s: the lease beside: %v", disk.Hit, err)
			}
			begin(t, p, "a")
			gone(disk.Hit.String())
		}
	}
	for n := 0; ; n++ {
		begin(t, p, "a")
		disk := &disktest.One{Dir: filepath.Join(dir, "run"), N: n, Fault: disktest.Fault{Err: unix.EIO}}
		disktest.Run(t, disk.Judge, func() {
			_ = p.End(t.Context(), id)
			_ = p.Forget(id)
		})
		gone("the end, " + disk.Hit.String())
		if disk.Hit.Name == "" {
			break
		}
		ends[disk.Hit.Name]++
	}
	if left := unfinished(t, filepath.Join(dir, "run")); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
	t.Logf("refused: %v; went on all the same: %v; at the end: %v", refused, anyway, ends)
	if refused["renameat"] < 2 || refused["write"] < 4 || refused["fallocate"] == 0 || refused["linkat"] == 0 || len(ends) == 0 {
		t.Error("not all calls were reached")
	}
	p.Close()
	next := newPool(t, dir, change)
	next.OnEnd(func(lease.Session, string) {})
	if all := next.Sessions(first.Lease); len(all) != 1 {
		t.Errorf("the next daemon finds sessions %v", all)
	}
}
