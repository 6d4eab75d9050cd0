// Package cluster tests the daemons of whole sites: nodes made of namespaces, hosts and owners with
// simulated GPUs, real munge, real CUDA programs. It needs root. Each test has a site of its own. Those that mostly wait run
// beside each other; TestHostile, TestPause, TestDeathIsNotSilence and TestProbe measure times, and run alone.
//
// The artefacts come from make: SLUICE_BUILD names its build folder (default: build/ of the repository),
// SLUICE_CUDA the compiler's version whose programs are run.
package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/audit/audittest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// user and other own the jobs of these tests.
const (
	user  = 2001
	other = 2002
)

var build string

func TestMain(m *testing.M) {
	node.Main()
	build = os.Getenv("SLUICE_BUILD")
	if build == "" {
		build = "../../../build"
	}
	abs, err := filepath.Abs(build)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
	build = abs
	os.Exit(m.Run())
}

// withFaults builds sluiced with its fault points, once.
var withFaults = sync.OnceValues(func() (string, error) {
	out := filepath.Join(build, "test", "faults")
	if err := os.MkdirAll(out, 0o755); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-tags", "faults", "-o", out+"/", "../../cmd/sluiced")
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, b)
	}
	return filepath.Join(out, "sluiced"), nil
})

// start makes a site and brings its daemons up. When the test has failed, the ends of their logs are shown.
func start(t *testing.T, o site.Options) *site.Site {
	t.Helper()
	return startWith(t, build, o)
}

// startWith is start with what another tree has built.
func startWith(t *testing.T, from string, o site.Options) *site.Site {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("nodes are made of namespaces, which needs root")
	}
	o.Build, o.CUDA = from, os.Getenv("SLUICE_CUDA")
	if o.Faults {
		if _, err := withFaults(); err != nil {
			t.Fatal(err)
		}
	}
	s, err := site.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, d := range s.Daemons() {
				t.Logf("the end of %s's log:\n%s", d.Node.Name, site.Tail(d.Log, 8))
			}
			if keep := os.Getenv("SLUICE_TEST_KEEP"); keep != "" {
				for _, d := range s.Daemons() {
					if p := d.Process(); p != nil {
						_ = p.Signal(syscall.SIGQUIT) // what its goroutines are at
					}
				}
				time.Sleep(time.Second)
				_ = exec.Command("cp", "-a", filepath.Join(s.Dir, "n"), keep).Run()
			}
		}
		s.Close()
	})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := s.Up(ctx); err != nil {
		t.Fatal(err)
	}
	for _, h := range s.Hosts {
		waitPool(t, h, o.Owners*o.GPUs)
	}
	return s
}

// eventually asks until f is content.
func eventually(t *testing.T, limit time.Duration, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s, still after %v: %v", what, limit, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// pool is all that a host sees of its default pool; an owner that does not answer is an error.
func pool(h *site.Daemon) ([]lease.GPU, error) {
	c, err := h.Local()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	pools, err := c.Pool(ctx, "default")
	if err != nil {
		return nil, err
	}
	var all []lease.GPU
	for _, p := range pools {
		for _, o := range p.Owners {
			if o.Error != "" {
				return nil, fmt.Errorf("owner %s: %s", o.Name, o.Error)
			}
			all = append(all, o.Inventory.GPUs...)
		}
	}
	return all, nil
}

func waitPool(t *testing.T, h *site.Daemon, gpus int) {
	t.Helper()
	eventually(t, 30*time.Second, h.Node.Name+" sees the pool", func() error {
		all, err := pool(h)
		if err != nil {
			return err
		}
		n := 0
		for _, g := range all {
			if g.Healthy {
				n++
			}
		}
		if n != gpus {
			return fmt.Errorf("%d of %d GPUs are healthy: %+v", n, gpus, all)
		}
		return nil
	})
}

// allFree waits until nobody holds anything, then checks every owner's history.
func allFree(t *testing.T, s *site.Site, keep map[string]bool) {
	t.Helper()
	h := s.Hosts[0]
	eventually(t, 30*time.Second, "everything is free again", func() error {
		all, err := pool(h)
		if err != nil {
			return err
		}
		for _, g := range all {
			if len(keep) == 0 && (g.FreePercent != 100 || g.FreeMem != g.Mem || g.Leases != 0) {
				return fmt.Errorf("gpu %s of %s: %d%% and %d of %d bytes free, %d leases", g.UUID, g.Owner, g.FreePercent, g.FreeMem, g.Mem, g.Leases)
			}
		}
		for _, d := range s.Hosts {
			ls, err := list(d)
			if err != nil {
				return err
			}
			for _, l := range ls {
				if !keep[l.ID] {
					return fmt.Errorf("%s still has lease %s of %s (%s)", d.Node.Name, l.ID, l.Request.Key, l.State)
				}
			}
		}
		return nil
	})
	checkHistory(t, s, keep)
}

// checkHistory holds every owner's audit log against the rules; what began and is not in live has ended.
// It answers how many lines of each event there are.
func checkHistory(t *testing.T, s *site.Site, live map[string]bool) map[string]int {
	t.Helper()
	gpus, err := pool(s.Hosts[0])
	if err != nil {
		t.Fatal(err)
	}
	sum := make(map[string]int)
	for _, o := range s.Owners {
		rules := audittest.Rules{Owner: o.Node.Name, Mem: make(map[string]uint64)}
		for _, g := range gpus {
			if g.Owner == o.Node.Name {
				rules.Mem[g.UUID] = g.Mem
			}
		}
		var lines []audit.Event
		began := make(map[string]int)
		for _, e := range events(t, o) {
			lines = append(lines, e)
			if e.Owner != o.Node.Name {
				continue
			}
			sum[e.Event]++
			switch e.Event {
			case audit.Reserve, audit.Grant:
				began[e.Lease] = 1
			case audit.Release, audit.Reclaim:
				delete(began, e.Lease)
			}
		}
		for id := range began {
			if !live[id] {
				t.Errorf("%s: lease %s has no end", o.Node.Name, id)
			}
		}
		for i, w := range audittest.History(lines, rules) {
			if i < 10 {
				t.Errorf("%s: %v", o.Node.Name, w)
			}
		}
	}
	t.Logf("history of %d owners: %v", len(s.Owners), sum)
	return sum
}

// events are the lines of a daemon's audit log.
func events(t *testing.T, d *site.Daemon) []audit.Event {
	t.Helper()
	var all []audit.Event
	if err := audit.Read(d.Audit, func(e *audit.Event) bool { all = append(all, *e); return true }); err != nil {
		t.Fatal(err)
	}
	return all
}

func list(d *site.Daemon) ([]lease.Status, error) {
	c, err := d.Local()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return c.List(ctx)
}

// key names a job of this host.
func key(h *site.Daemon, job string) lease.Key {
	return lease.Key{Cluster: "test", Job: job, Node: h.Node.Name}
}

// fractions are shares in percent.
func fractions(percent ...uint32) []lease.Fraction {
	f := make([]lease.Fraction, len(percent))
	for i, p := range percent {
		f[i].Percent = p
	}
	return f
}

// acquire asks the host for a lease of user's, as root does for a Slurm job.
func acquire(ctx context.Context, h *site.Daemon, job string, uid uint32, percent ...uint32) (lease.Lease, string, error) {
	c, err := h.Local()
	if err != nil {
		return lease.Lease{}, "", err
	}
	return c.Acquire(ctx, lease.Request{Key: key(h, job), Fractions: fractions(percent...), UID: uid, GID: uid})
}

func release(ctx context.Context, h *site.Daemon, l lease.Lease) error {
	c, err := h.Local()
	if err != nil {
		return err
	}
	return c.Release(ctx, l.ID, l.Request.Key, "the test is done with it")
}

// onLease is a program that uses a lease as a Slurm task does: by its environment.
func onLease(s *site.Site, h *site.Daemon, socket string, uid int, argv ...string) node.Command {
	return node.Command{Argv: argv, UID: uid, GID: uid, Dir: "/",
		Env: h.Env("SLUICE_SOCKET="+socket, "LD_LIBRARY_PATH="+s.Opt("shim"))}
}

// job is a program that goes on until it is told to stop.
type job struct {
	lease lease.Lease
	host  *site.Daemon
	proc  *node.Process
	out   string
}

// steady starts a job that must notice nothing of what happens to daemons.
func steady(t *testing.T, s *site.Site, h *site.Daemon, name string, percent ...uint32) *job {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	l, socket, err := acquire(ctx, h, name, user, percent...)
	if err != nil {
		t.Fatal(err)
	}
	j := &job{lease: l, host: h, out: filepath.Join(h.Node.Dir, "out."+name)}
	c := onLease(s, h, socket, user, s.Program("steady"), "50")
	// The file is opened by the node's first process, which is root.
	c.Stdout, c.Stderr = j.out, j.out
	if j.proc, err = h.Node.Start(c); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("steady: %d devices", len(percent))
	eventually(t, 30*time.Second, name+" computes", func() error {
		b, err := os.ReadFile(j.out)
		if err == nil && !strings.Contains(string(b), want) {
			err = fmt.Errorf("%s (%v)", b, j.proc.Err())
		}
		return err
	})
	return j
}

// lost says what a job noticed, if it has ended.
func (j *job) lost() error {
	if !j.proc.Ended() {
		return nil
	}
	return fmt.Errorf("session of lease %s on %s is lost: %w:\n%s", j.lease.ID, j.host.Node.Name, j.proc.Err(), site.Tail(j.out, 20))
}

// stop ends a job, which must have computed well until then.
func (j *job) stop(t *testing.T) {
	t.Helper()
	if err := j.lost(); err != nil {
		t.Error(err)
		return
	}
	if err := j.proc.Signal(15); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := j.proc.Wait(ctx); err != nil || !strings.Contains(site.Tail(j.out, 1), "PASS") {
		t.Errorf("job on lease %s: %v:\n%s", j.lease.ID, err, site.Tail(j.out, 20))
	}
	t.Logf("%s: %s", j.lease.Request.Key, site.Tail(j.out, 2))
	if err := release(ctx, j.host, j.lease); err != nil {
		t.Error(err)
	}
}
