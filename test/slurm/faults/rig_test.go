// Package faults has the tests of what goes wrong between Slurm and Sluice: every row of the table of what
// Slurm's hooks do when something fails, and a long run of random jobs with kills. After each of them the
// cluster is as if no job had ever been there. They need root, see package lab.
package faults

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	flag.Parse()
	// A cluster waits most of its time, for timeouts of Slurm's.
	if err := flag.Set("test.parallel", "10"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// rig is a cluster whose hooks write down when they begin and end, and do more on demand.
type rig struct {
	*lab.Lab
	ctx context.Context
}

// Times of the tests' clusters: an owner takes back what is silent well before Slurm gives a node's jobs to
// others, which is the order that a site must keep.
const (
	silence      = 5 * time.Second
	slurmdSilent = 12 * time.Second
)

func quick() map[string]string {
	return map[string]string{
		"lease.renew": "1s", "lease.silence": silence.String(), "lease.reserve": "3s", "lease.tombstone": "10m",
		"slurm.room_wait": "2s", "slurm.reconcile": "2s", "session.keepalive": "2s",
	}
}

// site is what a cluster has beside the defaults.
type site struct {
	flags string   // PrologFlags
	hooks []string // nil: all four
	more  lab.Options
}

var allHooks = []string{"Prolog", "Epilog", "PrologSlurmctld", "EpilogSlurmctld"}

func start(t *testing.T, s site) *rig {
	t.Helper()
	o := installed(s.more)
	o.PrologFlags = s.flags
	if o.Nodes == nil {
		o.Nodes = []lab.NodeSpec{{}, {}, {GPUs: 2}}
	}
	if s.hooks == nil {
		s.hooks = allHooks
	}
	dir, err := os.MkdirTemp("/tmp", "f")
	if err != nil {
		t.Fatal(err)
	}
	o.Dir, o.Hooks = dir, map[string]string{}
	for _, h := range s.hooks {
		o.Hooks[h] = hook(filepath.Join(dir, "ctl"), h, o.NoSluice)
	}
	o.Slurm = with(o.Slurm, map[string]string{"SlurmdTimeout": strconv.Itoa(int(slurmdSilent.Seconds())), "CompleteWait": "0"})
	o.Sluice = with(o.Sluice, quick())
	ctx, cancel := context.WithTimeout(context.Background(), 25*time.Minute)
	t.Cleanup(cancel)
	l, err := lab.New(o)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{l, ctx}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s", l.Logs(10))
			if to := os.Getenv("SLUICE_LOGS"); to != "" {
				keepLogs(t, l, filepath.Join(to, strings.ReplaceAll(t.Name(), "/", "-")))
			}
		}
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	if err := os.Mkdir(l.Path("ctl"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.Path("ctl", "hooks.log"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	// PrologSlurmctld and its pair run as SlurmUser.
	if err := os.Chmod(l.Path("ctl", "hooks.log"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := l.Boot(ctx); err != nil {
		t.Fatal(err)
	}
	return r
}

// keepLogs copies all logs of a cluster, which takes them along otherwise.
func keepLogs(t *testing.T, l *lab.Lab, to string) {
	files, _ := filepath.Glob(l.Path("n", "*", "log", "*"))
	for _, path := range append(files, l.Path("ctl", "hooks.log"), l.Path("state", "slurmdbd.log"), l.Path("mysql", "error.log")) {
		b, err := os.ReadFile(path)
		if err != nil || len(b) == 0 {
			continue
		}
		name := filepath.Join(to, strings.ReplaceAll(strings.TrimPrefix(path, l.Path()+"/"), "/", "-"))
		if err := errors.Join(os.MkdirAll(to, 0o755), os.WriteFile(name, b, 0o644)); err != nil {
			t.Error(err)
			return
		}
	}
}

func with(m, more map[string]string) map[string]string {
	out := map[string]string{}
	for _, x := range []map[string]string{more, m} {
		for k, v := range x {
			out[k] = v
		}
	}
	return out
}

// hook is the site's script of that name. What a test puts into the files NAME.before and NAME.after of the
// folder is run around our own part of it.
func hook(dir, name string, none bool) string {
	own := lab.SluiceHooks()[name]
	_, command, _ := strings.Cut(strings.TrimSpace(own), "exec ")
	if none {
		command = "true"
	}
	return fmt.Sprintf(`#!/bin/sh
base=%[3]s
note() { echo "%[1]s $1 $(/bin/date +%%s.%%N) ${SLURMD_NODENAME:--} $SLURM_JOB_ID ${SLURM_JOB_RESTART_COUNT:-none} ${rc:--}" >>$base/hooks.log; }
note begin
rc=0
[ ! -e $base/%[1]s.before ] || . $base/%[1]s.before
[ -n "$skip" ] || %[2]s || rc=$?
[ ! -e $base/%[1]s.after ] || . $base/%[1]s.after
note end
exit $rc
`, name, command, dir)
}

// event is a line of hooks.log.
type event struct {
	hook    string
	end     bool
	at      float64
	node    string
	job     string
	restart string
	rc      string
}

// events are what the hooks did for a job, in order.
func (r *rig) events(job string) []event {
	b, _ := os.ReadFile(r.Path("ctl", "hooks.log"))
	var out []event
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) != 7 || job != "" && f[4] != job {
			continue
		}
		at, _ := strconv.ParseFloat(f[2], 64)
		out = append(out, event{f[0], f[1] == "end", at, f[3], f[4], f[5], f[6]})
	}
	return out
}

// ran is how often a hook began for a job; on any node for "".
func (r *rig) ran(job, hook, node string) int {
	return r.times(job, hook, node, false)
}

func (r *rig) ended(job, hook, node string) int {
	return r.times(job, hook, node, true)
}

func (r *rig) times(job, hook, node string, end bool) int {
	k := 0
	for _, e := range r.events(job) {
		if e.hook == hook && e.end == end && (node == "" || e.node == node) {
			k++
		}
	}
	return k
}

// set makes a hook do more, before or after its own work; until the test ends or unset.
func (r *rig) set(t *testing.T, name, shell string) {
	t.Helper()
	at := r.Path("ctl", name)
	if err := os.WriteFile(at+".new", []byte(shell+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(at+".new", at); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.unset(t, name) })
}

func (r *rig) unset(t *testing.T, name string) {
	t.Helper()
	if err := os.Remove(r.Path("ctl", name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
}

// until waits for a fact.
func (r *rig) until(t testing.TB, limit time.Duration, what string, f func() error) {
	t.Helper()
	if err := lab.Until(r.ctx, limit, what, f); err != nil {
		t.Fatalf("%v\n%s", err, r.story())
	}
}

// seen waits until a hook has begun (or, with end, ended) k times.
func (r *rig) seen(t *testing.T, job, hook, node string, end bool, k int) {
	t.Helper()
	what := fmt.Sprintf("%s of job %s on %q, end %t, %d times", hook, job, node, end, k)
	r.until(t, 40*time.Second, what, func() error {
		if n := r.times(job, hook, node, end); n < k {
			return fmt.Errorf("it was %d times", n)
		}
		return nil
	})
}

// story is what the hooks did, for a test that failed.
func (r *rig) story() string {
	b, _ := os.ReadFile(r.Path("ctl", "hooks.log"))
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// must fails the test on an error.
func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func (r *rig) sbatch(t *testing.T, script string, args ...string) string {
	t.Helper()
	return must[string](t)(r.Sbatch(r.ctx, lab.Alice, script, args...))
}

func (r *rig) state(t *testing.T, job string, limit time.Duration, states ...string) map[string]string {
	t.Helper()
	j, err := r.WaitJob(r.ctx, job, limit, states...)
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, r.Output(lab.Alice, job), r.story())
	}
	return j
}

// begun waits until a batch job's script runs: it says so as its first word.
func (r *rig) begun(t *testing.T, job string) {
	t.Helper()
	r.until(t, 40*time.Second, "job "+job+" has begun", func() error {
		if j, err := r.Job(r.ctx, job); err != nil || j["JobState"] != "RUNNING" {
			return fmt.Errorf("it is %s (%s): %w", j["JobState"], j["Reason"], err)
		}
		if out := r.Output(lab.Alice, job); !strings.HasPrefix(out, "begun") {
			return fmt.Errorf("it has printed %q", out)
		}
		return nil
	})
}

func (r *rig) scontrol(t *testing.T, args ...string) {
	t.Helper()
	must[string](t)(r.Scontrol(r.ctx, args...))
}

func (r *rig) scancel(t *testing.T, args ...string) {
	t.Helper()
	must[string](t)(r.Ctl.Run(r.ctx, lab.Root, append([]string{"scancel"}, args...)...))
}

// now lets a requeued job start at once; Slurm has it wait otherwise.
func (r *rig) now(t *testing.T, job string) {
	t.Helper()
	r.numbered(t, job)
	nextSecond()
	r.scontrol(t, "update", "JobId="+job, "StartTime=now")
}

// nextSecond waits until the second has passed in which this is called. Slurm counts the time of credentials in whole
// seconds, and slurmd refuses what was made within the second of a run's end as revoked with that run: the job's next
// run, and a job that has its number anew.
func nextSecond() {
	// Slurm reads a coarse clock, which may be a tick behind.
	const tick = 20 * time.Millisecond
	now := time.Now()
	time.Sleep(now.Truncate(time.Second).Add(time.Second + tick).Sub(now))
}

// leases are those of a job, as hosts and owners have them: one for each node.
func (r *rig) leases(job string) ([]lab.Lease, error) {
	seen := map[string]bool{}
	var out []lab.Lease
	for _, n := range append([]*lab.Node{r.Ctl}, r.Nodes...) {
		if len(n.PIDs("sluiced")) == 0 {
			continue
		}
		all, err := n.Leases(r.ctx)
		if err != nil {
			return nil, err
		}
		for _, l := range all {
			if l.Request.Key.Job == job && l.State == "granted" && !seen[l.ID] {
				seen[l.ID] = true
				out = append(out, l)
			}
		}
	}
	return out, nil
}

// holds waits until a job has that many leases.
func (r *rig) holds(t *testing.T, job string, k int, limit time.Duration) []lab.Lease {
	t.Helper()
	if r.Options.NoSluice {
		return nil
	}
	var ls []lab.Lease
	r.until(t, limit, fmt.Sprintf("job %s holds %d leases", job, k), func() (err error) {
		if ls, err = r.leases(job); err == nil && len(ls) != k {
			err = fmt.Errorf("it holds %d", len(ls))
		}
		return err
	})
	return ls
}

// clean waits until nothing is left of any job.
func (r *rig) clean(t *testing.T) {
	t.Helper()
	r.until(t, 2*time.Minute, "the cluster is clean", r.left)
}

// left says what is left of jobs.
func (r *rig) left() error {
	if err := r.Clean(r.ctx); err != nil {
		return err
	}
	return r.noWorkers()
}

// noWorkers says which workers have a session: those have become a user, and who only waits for one has not.
func (r *rig) noWorkers() error {
	var errs []error
	for _, n := range r.Nodes {
		for _, pid := range n.PIDs("sluice-worker") {
			fi, err := os.Stat("/proc/" + strconv.Itoa(pid))
			if err != nil {
				continue
			}
			if st, ok := fi.Sys().(*syscall.Stat_t); ok && st.Uid != 0 {
				errs = append(errs, fmt.Errorf("node %s: worker %d of user %d", n.Name, pid, st.Uid))
			}
		}
	}
	return errors.Join(errs...)
}

// up says whether the node is fit for work.
func (r *rig) fit(t *testing.T, n *lab.Node) {
	t.Helper()
	out := must[string](t)(r.Ctl.Run(r.ctx, lab.Root, "sinfo", "-h", "-n", n.Name, "-o", "%T"))
	if s := strings.TrimSpace(out); strings.Contains(s, "drain") || strings.Contains(s, "down") || strings.Contains(s, "fail") {
		t.Errorf("node %s is %s", n.Name, s)
	}
}

// running waits for k of an array's tasks, and names their job numbers.
func (r *rig) running(array string, k int, ids *[]string) error {
	out, err := r.Ctl.Run(r.ctx, lab.Root, "squeue", "-h", "-j", array, "-t", "R", "-o", "%A")
	if err != nil {
		return err
	}
	if *ids = strings.Fields(out); len(*ids) != k {
		return fmt.Errorf("%d do", len(*ids))
	}
	return nil
}

// oneLease looks at what a job's steps have printed: all the same lease.
func (r *rig) oneLease(t *testing.T, job string, lines int) {
	t.Helper()
	if r.Options.NoSluice {
		return
	}
	// srun may have had something to say as well.
	f := regexp.MustCompile(`(?m)^[0-9a-f]{32}$`).FindAllString(r.Output(lab.Alice, job), -1)
	if len(f) != lines || len(f) > 0 && f[0] != f[len(f)-1] {
		t.Errorf("leases of the steps: %q", f)
	}
}

func (r *rig) killSlurmd(t *testing.T, n *lab.Node) {
	t.Helper()
	if err := n.Kill("slurmd"); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) startSlurmd(t *testing.T, n *lab.Node) {
	t.Helper()
	if err := n.StartSlurmd(r.ctx); err != nil {
		t.Fatal(err)
	}
}

// saved waits until slurmctld has saved the state of its jobs, later than at a time.
func (r *rig) saved(t *testing.T, since time.Time) {
	t.Helper()
	r.until(t, 30*time.Second, "slurmctld has saved its jobs", func() error {
		fi, err := os.Stat(r.Path("state", "job_state"))
		if err == nil && fi.ModTime().Before(since) {
			err = fmt.Errorf("it did so at %s", fi.ModTime())
		}
		return err
	})
}

func (r *rig) killCtld(t *testing.T) {
	t.Helper()
	if err := r.Ctl.Kill("slurmctld"); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) startCtld(t *testing.T, args ...string) {
	t.Helper()
	if err := r.StartSlurmctld(r.ctx, args...); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) crash(t *testing.T, n *lab.Node) {
	t.Helper()
	if err := n.Crash(); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) boot(t *testing.T, n *lab.Node) {
	t.Helper()
	if err := n.Boot(r.ctx); err != nil {
		t.Fatal(err)
	}
	if err := n.StartDaemons(r.ctx); err != nil {
		t.Fatal(err)
	}
}

// row is a test of one thing that goes wrong.
type row struct {
	name string
	f    func(*testing.T, *rig)
}

// all runs rows, each on a cluster of its own, and looks after each that nothing is left.
func all(t *testing.T, s site, rows []row) {
	for _, c := range rows {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, s)
			began := time.Now()
			c.f(t, r)
			r.clean(t)
			t.Logf("%.1f s", time.Since(began).Seconds())
		})
	}
}
