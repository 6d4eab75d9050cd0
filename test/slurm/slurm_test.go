// Package slurm tests jobs with fractions of GPUs on a real Slurm cluster (package lab) through the doors that
// users take: sbatch, srun, salloc. Every test leaves the cluster as if no job had ever been there.
//
// SLUICE_BUILD names make's build folder, SLUICE_CUDA the compiler whose programs are run, SLUICE_SLURM_ROOT
// another system whose Slurm is used. It needs root.
package slurm

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// The pool: three GPUs of 8 GiB at two owners, of the type "simulated"; the third node has none.
const (
	units  = 300
	gpuMiB = 8192
)

// fault is a hook that does first what a test has put into the file of its name.
func fault(name, body string) string {
	return strings.Replace(body, "#!/bin/sh\n", fmt.Sprintf("#!/bin/sh\n[ ! -e %[1]s ] || . %[1]s\n", filepath.Join("/etc/slurm/fault", name)), 1)
}

func options() lab.Options {
	hooks := map[string]string{}
	for name, body := range lab.SluiceHooks() {
		hooks[name] = fault(name, body)
	}
	return lab.Options{
		Jobs: true, Accounting: true, Hooks: hooks,
		Nodes:    []lab.NodeSpec{{GPUs: 2}, {GPUs: 1}, {}},
		Gres:     "rgpu:simulated:no_consume:1600",
		Licences: fmt.Sprintf("rgpu:%d,rgpu_simulated:%[1]d", units),
		Slurm:    map[string]string{"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"},
		SlurmLines: []string{
			"PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:64 PriorityTier=2 PreemptMode=OFF",
			"PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1",
			"PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=9",
			"PartitionName=half Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=FORCE:64 PriorityTier=2 PreemptMode=OFF",
		},
		Sluice: map[string]string{
			"pools.default.types": "{simulated: rgpu_simulated}", "partitions.half.mem": "1G", "partitions.half.policy": "fixed",
			"lease.silence": "40s", "lease.renew": "2s", "slurm.room_wait": "3s", "slurm.reconcile": "5s",
		},
	}
}

// shared is the cluster of all tests that need nothing special.
var shared = sync.OnceValues(func() (*lab.Lab, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return lab.Up(ctx, options())
})

func TestMain(m *testing.M) {
	lab.Main()
	code := m.Run()
	if os.Getuid() == 0 && used {
		if l, err := shared(); err == nil {
			if err := l.Down(); err != nil {
				fmt.Fprintln(os.Stderr, "slurm:", err)
				code = 1
			}
		}
	}
	os.Exit(code)
}

var used bool

// site is a test's view of the cluster.
type site struct {
	*lab.Lab
	t   *testing.T
	ctx context.Context
}

// ownSite is a cluster for one test that needs another configuration. ctx ends after so long.
func ownSite(t *testing.T, o lab.Options, most time.Duration) (*site, context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), most)
	t.Cleanup(cancel)
	l, err := lab.Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	s := &site{l, t, ctx}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s", l.Logs(12))
		}
		s.must(l.Down())
	})
	return s, ctx
}

// cluster is the shared cluster, which must be clean when the test has ended. Tests run one after the other.
func cluster(t *testing.T) *site {
	t.Helper()
	used = true
	l, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	s := &site{l, t, ctx}
	t.Cleanup(func() {
		defer cancel()
		if t.Failed() {
			// What the test left would spoil the next.
			t.Logf("%s", l.Logs(12))
			_, _ = l.Ctl.Run(ctx, lab.Root, "scancel", "--user=alice")
			_, _ = l.Ctl.Run(ctx, lab.Root, "scancel", "--user=bob")
			_, _ = l.Ctl.Run(ctx, lab.Root, "scontrol", "update", "nodename=ALL", "state=resume")
		}
		s.clean()
	})
	return s
}

// clean waits until nothing of any job is left.
func (s *site) clean() {
	s.t.Helper()
	if err := lab.Until(s.ctx, 60*time.Second, "the cluster is clean", func() error { return s.Clean(s.ctx) }); err != nil {
		s.t.Error(err)
	}
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// sbatch submits as alice.
func (s *site) sbatch(script string, args ...string) string {
	s.t.Helper()
	job, err := s.Sbatch(s.ctx, lab.Alice, script, args...)
	s.must(err)
	return job
}

// wait waits for a state of the job.
func (s *site) wait(job string, states ...string) map[string]string {
	s.t.Helper()
	j, err := s.WaitJob(s.ctx, job, 60*time.Second, states...)
	if err != nil {
		s.t.Fatalf("%v\n%v\n%s", err, j, s.Output(lab.Alice, job))
	}
	return j
}

// done waits until the job has ended well, and answers what it printed.
func (s *site) done(job string) string {
	s.t.Helper()
	j, err := s.WaitJob(s.ctx, job, 90*time.Second, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
	out := s.Output(lab.Alice, job)
	if err != nil || j["JobState"] != "COMPLETED" {
		s.t.Fatalf("job %s: %v: %s, exit code %s, %s\n%s", job, err, j["JobState"], j["ExitCode"], j["AdminComment"], out)
	}
	return out
}

func (s *site) until(limit time.Duration, what string, f func() error) {
	s.t.Helper()
	s.must(lab.Until(s.ctx, limit, what, f))
}

// alice runs a program on the controller, as she does at a login node.
func (s *site) alice(argv ...string) (string, error) { return s.Ctl.Run(s.ctx, lab.Alice, argv...) }

// leases are a job's, by node: those that the nodes hold.
func (s *site) leases(job string) map[string]lab.Lease {
	s.t.Helper()
	m := map[string]lab.Lease{}
	for _, n := range s.Nodes {
		ls, err := n.Leases(s.ctx)
		s.must(err)
		for _, l := range ls {
			if l.Request.Key.Job == job && l.Request.Key.Node == n.Name {
				m[n.Name] = l
			}
		}
	}
	return m
}

// percents are a lease's grants.
func percents(l lab.Lease) string {
	var p []string
	for _, g := range l.Grants {
		p = append(p, fmt.Sprint(g.Percent))
	}
	return strings.Join(p, "+")
}

// program is a CUDA program by its path, the same on every node.
func (s *site) program(name string) string {
	return s.Built(filepath.Join("test", "cuda-"+s.Options.CUDA, name))
}

// version is the release of the cluster's Slurm, as 22.05.
func (s *site) version() string {
	s.t.Helper()
	out, err := s.alice("sinfo", "--version")
	s.must(err)
	return regexp.MustCompile(`\d+\.\d+`).FindString(out)
}

// used is how much of a licence is in use.
func (s *site) used(name string) int {
	s.t.Helper()
	all, err := s.Licences(s.ctx)
	s.must(err)
	return all[name].Used
}

// hook has a hook do something first, on all nodes, until the test ends.
func (s *site) hook(name, shell string) {
	s.t.Helper()
	s.must(os.MkdirAll(s.Path("etc", "fault"), 0o755))
	path := s.Path("etc", "fault", name)
	s.must(os.WriteFile(path, []byte(shell+"\n"), 0o644))
	s.t.Cleanup(func() { _ = os.Remove(path) })
}

// contains fails the test where the text lacks one of the parts.
func contains(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("no %q in:\n%s", p, text)
		}
	}
}

// matches counts a pattern.
func matches(text, pattern string) int {
	return len(regexp.MustCompile(pattern).FindAllString(text, -1))
}
