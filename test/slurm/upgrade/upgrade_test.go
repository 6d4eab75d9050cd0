// Package upgrade tests that a cluster is upgraded node by node while jobs run, from another release to this one.
package upgrade

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

const (
	newBuild, newTree = "/opt/new", "/opt/newtree"
	slurmLib          = "/usr/lib/sluice/slurm/"
)

// rig is a cluster of another release, and its jobs.
type rig struct {
	*lab.Lab
	ctx   context.Context
	build string // this release's

	mu   sync.Mutex
	jobs []string // all that were submitted
}

// packages is what the packages of a release bring, by its place in the build folder and in the tree.
func packages(build, tree string) map[string]string {
	m := map[string]string{
		"/usr/bin/sluice": build + "/bin/sluice", "/usr/sbin/sluiced": build + "/bin/sluiced", "/usr/sbin/sluice-worker": build + "/bin/sluice-worker",
		"/usr/lib/sluice/libcuda.so.1": build + "/shim/libcuda.so.1", "/usr/lib/sluice/libnvidia-ml.so.1": build + "/shim/libnvidia-ml.so.1",
		slurmLib + "spank_sluice.so": build + "/spank/spank_sluice.so", slurmLib + "sluice.lua": tree + "/prolog/sluice.lua",
	}
	for _, hook := range []string{"prolog", "epilog", "prolog-ctld", "epilog-ctld", "healthcheck"} {
		m[slurmLib+hook+".sh"] = tree + "/prolog/" + hook + ".sh"
	}
	return m
}

// install replaces a node's files by this release's, or takes that back. What runs keeps the files that it has.
func (r *rig) install(t *testing.T, n *lab.Node, back bool) {
	t.Helper()
	files := packages(newBuild, newTree)
	var script strings.Builder
	for _, to := range slices.Sorted(maps.Keys(files)) {
		if back {
			fmt.Fprintf(&script, "umount -l %s\n", to)
		} else {
			fmt.Fprintf(&script, "mount --bind %s %s\n", files[to], to)
		}
	}
	if out, err := n.Run(r.ctx, lab.Root, "sh", "-ec", script.String()); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// restart ends a node's daemon, as systemctl restart does or as the kernel does, and starts the one that is installed.
func (r *rig) restart(t *testing.T, n *lab.Node, kill bool) {
	t.Helper()
	end := n.Stop
	if kill {
		end = n.Kill
	}
	if err := end("sluiced"); err != nil {
		t.Fatal(err)
	}
	if err := n.StartSluiced(r.ctx); err != nil {
		t.Fatal(err)
	}
}

// submit submits a job and remembers it.
func (r *rig) submit(script string, args ...string) error {
	job, err := r.Sbatch(r.ctx, lab.Alice, script, args...)
	if err == nil {
		r.mu.Lock()
		r.jobs = append(r.jobs, job)
		r.mu.Unlock()
	}
	return err
}

// count is how many jobs there were.
func (r *rig) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.jobs)
}

// states is how many of the cluster's jobs are in each state.
func (r *rig) states() (map[string]int, error) {
	out, err := r.Ctl.Run(r.ctx, lab.Root, "squeue", "-h", "-t", "all", "-o", "%T")
	n := map[string]int{}
	for _, s := range strings.Fields(out) {
		n[s]++
	}
	return n, err
}

// load submits short jobs until it is told to stop, a few ahead of what runs.
func (r *rig) load(program string, stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		case <-r.ctx.Done():
			return r.ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
		n, err := r.states()
		if err != nil {
			return err
		}
		if n["PENDING"] < 3 {
			if err := r.submit("srun "+program, "--gres=rgpu:10", "-n1"); err != nil {
				return err
			}
		}
	}
}

// worker is whether the session of a job of its own, on a node, has this release's worker.
func (r *rig) worker(t *testing.T) error {
	t.Helper()
	want, err := os.Stat(filepath.Join(r.build, "bin/sluice-worker"))
	if err != nil {
		return err
	}
	seen := 0
	for _, n := range r.Nodes {
		for _, pid := range n.PIDs("sluice-worker") {
			args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			exe, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
			if err == nil && os.SameFile(exe, want) && strings.Contains(string(args), "\x00session\x00") {
				seen++
			}
		}
	}
	if seen == 0 {
		return errors.New("no session has this release's worker")
	}
	return nil
}

// TestRolling: every node of a cluster is upgraded in turn, in the midst of jobs. No job is lost or begun anew, no session ends, each result
// is right, and what begins on an upgraded owner has the new worker. SLUICE_OLD is a tree of another release, built, whose build folder also
// has the test programs; without it the release replaces itself. SLUICE_NODES is how many nodes there are.
func TestRolling(t *testing.T) {
	nodes := 4
	if v := os.Getenv("SLUICE_NODES"); v != "" {
		var err error
		if nodes, err = strconv.Atoi(v); err != nil || nodes < 2 {
			t.Fatalf("SLUICE_NODES=%s: want a number from 2 on", v)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	build, tree := os.Getenv("SLUICE_BUILD"), lab.Repository()
	o := lab.Options{
		Name: "up" + strconv.Itoa(os.Getpid()), Jobs: true, Install: map[string]string{newBuild: build, newTree: tree},
		Slurm: map[string]string{"MinJobAge": "3600"},
	}
	if old := os.Getenv("SLUICE_OLD"); old != "" {
		o.Repository, o.Build = old, filepath.Join(old, "build")
	}
	for i := range nodes {
		s := lab.NodeSpec{}
		if i%4 == 0 {
			s.GPUs = 1
		}
		o.Nodes = append(o.Nodes, s)
	}
	l, err := lab.Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{Lab: l, ctx: ctx, build: build}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s", l.Logs(12))
		}
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	dir := "test/cuda-" + l.Options.CUDA + "/"
	end := l.Path("home", "end")
	// The signal must not come before the program listens to it.
	long := fmt.Sprintf("exec 3>&1 >said.$SLURM_JOB_ID\n%s 50 & p=$!\nwhile [ ! -e %s ] || ! grep -q devices said.$SLURM_JOB_ID; do sleep 0.2; done\n"+
		"kill $p\nwait $p; rc=$?\ncat said.$SLURM_JOB_ID >&3\nexit $rc\n", l.Built(dir+"steady"), end)

	// One long job on each node, each with a session from before the upgrade.
	for _, n := range l.Nodes {
		if err := r.submit(long, "--gres=rgpu:15", "-n1", "-w", n.Name); err != nil {
			t.Fatal(err)
		}
	}
	r.until(t, "the long jobs compute", func() error {
		for _, j := range r.jobs[:nodes] {
			out, err := os.ReadFile(l.Path("home", lab.Alice.Name, "said."+j))
			if err != nil || !strings.Contains(string(out), "steady: 1 devices") {
				return fmt.Errorf("job %s: %q, %v: %s", j, out, err, l.Output(lab.Alice, j))
			}
		}
		return nil
	})
	stop, loaded := make(chan struct{}), make(chan error, 1)
	go func() { loaded <- r.load(l.Built(dir+"vecadd"), stop) }()

	began := time.Now()
	for i, n := range slices.Insert(slices.Clone(l.Nodes), nodes/2, l.Ctl) {
		before := r.count()
		r.install(t, n, false)
		r.restart(t, n, i%3 == 2)
		r.until(t, "jobs begin after "+n.Name, func() error { return r.more(before, 2) })
	}
	took := time.Since(began)
	// A session that begins now has the new worker.
	if err := r.submit(long, "--gres=rgpu:15", "-n1"); err != nil {
		t.Fatal(err)
	}
	r.until(t, "a session has the new worker", func() error { return r.worker(t) })

	// The way back, of an owner and of a node that owns nothing.
	for _, n := range []*lab.Node{l.Nodes[0], l.Nodes[nodes-1]} {
		before := r.count()
		r.install(t, n, true)
		r.restart(t, n, false)
		r.until(t, "jobs begin after the way back of "+n.Name, func() error { return r.more(before, 2) })
	}
	close(stop)
	if err := <-loaded; err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(end, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	r.until(t, "all jobs have ended", func() error {
		n, err := r.states()
		if err == nil && n["COMPLETED"]+n["FAILED"]+n["CANCELLED"]+n["NODE_FAIL"] < r.count() {
			err = fmt.Errorf("%d jobs: %v", r.count(), n)
		}
		return err
	})
	if r.judge(t); t.Failed() {
		return
	}
	t.Logf("%d nodes in %v, from %s: %d jobs, all completed at their first start; %d sessions lived through it", nodes, took.Round(time.Second), r.version(t), r.count(), nodes)
}

// version is what the old release says it is.
func (r *rig) version(t *testing.T) string {
	out, err := r.Nodes[0].Run(r.ctx, lab.Root, "sluice", "version")
	if err != nil {
		t.Error(err)
	}
	return strings.TrimSpace(out)
}

// more reports whether some of the jobs after the first ones have completed.
func (r *rig) more(first, want int) error {
	r.mu.Lock()
	jobs := slices.Clone(r.jobs[first:])
	r.mu.Unlock()
	have := 0
	for _, j := range jobs {
		if strings.Contains(r.Output(lab.Alice, j), "PASS") {
			have++
		}
	}
	if have < want {
		return fmt.Errorf("%d of %d jobs have completed since", have, len(jobs))
	}
	return nil
}

func (r *rig) until(t *testing.T, what string, f func() error) {
	t.Helper()
	if err := lab.Until(r.ctx, 2*time.Minute, what, f); err != nil {
		t.Fatal(err)
	}
}

// judge looks at every job and at what the daemons have logged.
func (r *rig) judge(t *testing.T) {
	t.Helper()
	for _, id := range r.jobs {
		j, err := r.Job(r.ctx, id)
		out := r.Output(lab.Alice, id)
		if err != nil || j["JobState"] != "COMPLETED" || j["Restarts"] != "0" || strings.Count(out, "PASS") != 1 {
			t.Errorf("job %s: %s, %s restarts, %v: %s", id, j["JobState"], j["Restarts"], err, out)
		}
	}
	for _, n := range append([]*lab.Node{r.Ctl}, r.Nodes...) {
		log, err := os.ReadFile(filepath.Join(n.Dir, "log/sluiced.log"))
		if err != nil {
			t.Error(err)
		}
		for _, line := range strings.Split(string(log), "\n") {
			if strings.Contains(line, "level=ERROR") {
				t.Errorf("%s: %s", n.Name, line)
			}
		}
	}
	r.until(t, "the cluster is clean", func() error { return r.Clean(r.ctx) })
}
