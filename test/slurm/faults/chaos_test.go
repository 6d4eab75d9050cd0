package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// chaosJobs is how many jobs a run has, and chaosAtOnce how many of them are there at a time.
const (
	chaosJobs   = 300
	chaosAtOnce = 28
)

// chaos is a run of random jobs, and of random things that happen to them.
type chaos struct {
	*rig
	t     *heard
	mu    sync.Mutex
	rnd   *rand.Rand
	count map[string]int       // what was done, how often
	waits map[string]time.Time // jobs that were put back, since when; the submitter's
	gaps  [][2]time.Time       // when slurmctld or the daemon beside it was away
	anew  time.Time            // when slurmctld was last started anew
	lost  atomic.Bool          // a disturbance itself failed, which is the test's fault
}

// TestChaos has 300 random jobs on five nodes, while jobs are cancelled, put back, suspended, and daemons, steps
// and whole nodes are killed. Afterwards nothing is left, and what Slurm has accounted is what the owners lent.
func TestChaos(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv("SLUICE_SEED"), 10, 64); err == nil {
		seed = s
	}
	jobs := chaosJobs
	if n, err := strconv.Atoi(os.Getenv("SLUICE_CHAOS")); err == nil {
		jobs = n
	}
	t.Logf("SLUICE_SEED=%d repeats the choices", seed)
	h := &heard{T: t}
	t.Cleanup(h.again) // behind the cluster's logs, which are taken down after it
	r := start(t, site{flags: "Alloc,Contain", more: lab.Options{
		Accounting: true, Nodes: []lab.NodeSpec{{}, {}, {}, {GPUs: 4}, {GPUs: 4}},
		// A killed slurmstepd leaves a cpuset that the job's next run cannot use, and Slurm drains the node for it.
		Slurm: map[string]string{"TaskPlugin": "task/none"},
	}})
	c := &chaos{rig: r, t: h, rnd: rand.New(rand.NewPCG(seed, 1)), count: map[string]int{}}

	ctx, stop := context.WithCancel(r.ctx)
	var wg sync.WaitGroup
	wg.Go(func() { c.disturb(ctx) })
	began := time.Now()
	for i := range jobs {
		c.wait(chaosAtOnce)
		c.submit(i)
	}
	stop()
	wg.Wait()
	if c.lost.Load() {
		t.FailNow()
	}
	c.repair()
	c.drain()
	t.Logf("%d jobs in %.0f s: %v", jobs, time.Since(began).Seconds(), c.count)

	// What outlived its slurmstepd is nobody's any more; it must not hold anything either.
	r.until(h, time.Minute, "no lease and no session is left", func() error {
		for _, n := range r.Nodes {
			ls, err := n.Leases(r.ctx)
			if err != nil || len(ls) > 0 {
				return fmt.Errorf("node %s: %w %v", n.Name, err, ls)
			}
		}
		return r.noWorkers()
	})
	c.orphans()
	r.until(h, 2*time.Minute, "the cluster is clean", func() error {
		c.undrain()
		return r.left()
	})
	c.addUp(jobs)
}

func (c *chaos) intn(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rnd.IntN(n)
}

func pick[T any](c *chaos, of ...T) T { return of[c.intn(len(of))] }

func (c *chaos) did(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count[what]++
}

// submit gives the cluster a job whose name says what it asked for.
func (c *chaos) submit(i int) {
	percent := pick(c, 0, 10, 25, 30, 50, 50, 70, 100, 150, 200)
	nodes := pick(c, 1, 1, 1, 2)
	tasks := pick(c, 1, 1, 1, 1, 1, 1, 3)
	script := pick(c, "true", "sleep 0.3", "sleep 1", "sleep 2", "exit 3", "srun sleep 0.5", "srun -N1 true; srun -N1 false", "sleep 30 & exit 0",
		"@vecadd", "@vecadd", "timeout 2 @steady", "srun -N1 timeout 1 @steady", "@steady & sleep 1; kill -9 $!")
	if percent == 0 {
		script = strings.ReplaceAll(script, "@", "true ")
	}
	script = strings.ReplaceAll(script, "@", c.program(""))
	args := []string{"-J", fmt.Sprintf("c-%d-%d", percent, nodes), "-N", strconv.Itoa(nodes)}
	if percent > 0 {
		args = append(args, "--gres=rgpu:"+strconv.Itoa(percent))
	}
	if c.intn(6) == 0 {
		args = append(args, "--no-requeue")
	}
	if c.intn(8) == 0 && tasks == 1 {
		c.did("srun")
		go func() {
			_, _ = c.Ctl.Run(c.ctx, lab.Alice, append(append([]string{"timeout", "300", "srun"}, args...), "sh", "-c", strings.ReplaceAll(script, "srun", "env srun --overlap"))...)
		}()
		return
	}
	if tasks > 1 {
		args = append(args, "--array=1-"+strconv.Itoa(tasks))
	}
	// slurmctld may be away at the moment: who submits tries again, as sbatch itself does for a while.
	err := lab.Until(c.ctx, time.Minute, fmt.Sprintf("job %d is submitted", i), func() error {
		_, err := c.Sbatch(c.ctx, lab.Alice, script, args...)
		return err
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.did("sbatch")
}

// active are the jobs that have not ended, each task of an array for itself, their states and reasons; an error while
// slurmctld is away.
func (c *chaos) active() ([]string, error) {
	out, err := c.Ctl.Run(c.ctx, lab.Root, "squeue", "-h", "-r", "-o", "%i %T %r")
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSpace(out), "\n"), nil
}

func (c *chaos) wait(below int) {
	c.t.Helper()
	c.until(c.t, 5*time.Minute, fmt.Sprintf("fewer than %d jobs", below), func() error {
		all, err := c.active()
		if err == nil && len(all) >= below {
			c.hurry()
			err = fmt.Errorf("%d: %v", len(all), all)
		}
		return err
	})
}

// hurry lets requeued jobs start without the wait that Slurm has for them, but for as long as it mistakes a new
// run for the old one. One that was suspended during its PrologSlurmctld, and had to go back, Slurm leaves held.
func (c *chaos) hurry() {
	out, err := c.Ctl.Run(c.ctx, lab.Root, "squeue", "-h", "-r", "-t", "PD", "-o", "%i %r")
	if err != nil {
		return
	}
	waits := map[string]time.Time{}
	for line := range strings.Lines(out) {
		switch id, why, _ := strings.Cut(strings.TrimSpace(line), " "); {
		case strings.Contains(why, "requeued") || strings.Contains(strings.ToLower(why), "held"):
			_, _ = c.Scontrol(c.ctx, "release", id)
			c.did("released")
		case why == "BeginTime" && c.waits[id].IsZero():
			waits[id] = time.Now()
		case why == "BeginTime" && time.Since(c.waits[id]) > 3*time.Second:
			_, _ = c.Scontrol(c.ctx, "update", "JobId="+id, "StartTime=now")
		case why == "BeginTime":
			waits[id] = c.waits[id]
		}
	}
	c.waits = waits
	c.undrain()
}

var lostProlog = regexp.MustCompile(`Waiting for JobId=(\d+) (?:SLUID=\w+ )?REQUEST_LAUNCH_PROLOG notification failed`)

// lostPrologs are the jobs of which a node's slurmd has not heard that their Prolog ran, for whatever was killed
// meanwhile; none if a Prolog did fail there.
func (r *rig) lostPrologs(n *lab.Node) []string {
	b, _ := os.ReadFile(filepath.Join(n.Dir, "log", "slurmd.log"))
	log := string(b)
	if strings.Contains(log, "prolog failed status") {
		return nil
	}
	var jobs []string
	for _, m := range lostProlog.FindAllStringSubmatch(log, -1) {
		if !slices.Contains(jobs, m[1]) {
			jobs = append(jobs, m[1])
		}
	}
	return jobs
}

// undrain has nodes back that are drained for a Prolog that Slurm itself has lost; see slurmdKilledAfterProlog. A
// Prolog that failed leaves its node drained, and the test fails for it.
func (c *chaos) undrain() {
	out, err := c.Ctl.Run(c.ctx, lab.Root, "sinfo", "-h", "-N", "-o", "%N %T %E")
	if err != nil {
		return
	}
	for line := range strings.Lines(out) {
		f := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if len(f) < 3 || !strings.Contains(f[1], "drain") || f[2] != "Prolog error" {
			continue
		}
		n := c.Node(f[0])
		jobs := c.lostPrologs(n)
		for _, job := range jobs {
			for _, e := range c.events(job) {
				if e.hook == "Prolog" && e.node == n.Name && e.end && e.rc != "0" {
					c.t.Errorf("Prolog of job %s on %s ended with %s", job, n.Name, e.rc)
				}
			}
		}
		if len(jobs) == 0 {
			continue
		}
		if _, err := c.Scontrol(c.ctx, "update", "NodeName="+n.Name, "State=RESUME"); err == nil {
			c.did("lost Prolog")
			c.t.Logf("node %s was drained: Slurm had lost a Prolog, of jobs %v so far", n.Name, jobs)
		}
	}
}

// disturb does something to somebody until it is told to stop.
func (c *chaos) disturb(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(100+c.intn(500)) * time.Millisecond):
		}
		what := pick(c, "scancel", "scancel", "scancel", "scancel", "scancel", "requeue", "requeue", "suspend", "stepd", "stepd", "slurmd",
			"sluiced", "sluiced", "sluiced", "hang", "slurmctld", "node")
		if err := c.one(what); err != nil {
			c.t.Errorf("%s: %v", what, err)
			c.lost.Store(true)
			return
		}
	}
}

func (c *chaos) one(what string) error {
	job := ""
	if all, err := c.active(); err == nil && len(all) > 0 {
		job, _, _ = strings.Cut(all[c.intn(len(all))], " ")
	}
	node := c.Nodes[c.intn(len(c.Nodes))]
	pause := time.Duration(c.intn(2000)) * time.Millisecond
	switch what {
	case "scancel", "requeue", "suspend":
		if job == "" {
			return nil
		}
		if what == "scancel" {
			if c.intn(4) == 0 { // all of an array
				job, _, _ = strings.Cut(job, "_")
			}
			_, _ = c.Ctl.Run(c.ctx, lab.Root, "scancel", job)
			break
		}
		// Most refuse: they do not run at the moment.
		if _, err := c.Scontrol(c.ctx, what, job); err != nil {
			return nil
		}
		if what == "suspend" {
			time.Sleep(pause)
			_ = lab.Until(c.ctx, 20*time.Second, "resume", func() error {
				_, err := c.Scontrol(c.ctx, "resume", job)
				return err
			})
		}
	case "stepd":
		pids := node.PIDs("slurmstepd")
		if len(pids) == 0 {
			return nil
		}
		_ = syscall.Kill(pids[c.intn(len(pids))], syscall.SIGKILL)
	case "slurmd":
		if err := node.Kill("slurmd"); err != nil {
			return err
		}
		time.Sleep(pause)
		c.did(what)
		return node.StartSlurmd(c.ctx)
	case "sluiced":
		nodes := append([]*lab.Node{c.Ctl}, c.Nodes...)
		if node = nodes[c.intn(len(nodes))]; node == c.Ctl {
			defer c.gap(time.Now())
		}
		if err := node.Kill("sluiced"); err != nil {
			return err
		}
		time.Sleep(pause)
		c.did(what)
		return node.StartSluiced(c.ctx)
	case "hang":
		node.Signal("sluiced", syscall.SIGSTOP)
		time.Sleep(pause)
		node.Signal("sluiced", syscall.SIGCONT)
	case "slurmctld":
		defer c.gap(time.Now())
		// Not killed: it would forget jobs, give their numbers to others, and drain nodes that still have them.
		if err := c.Ctl.Stop("slurmctld"); err != nil {
			return err
		}
		time.Sleep(pause)
		c.did(what)
		c.mu.Lock()
		c.anew = time.Now()
		c.mu.Unlock()
		return c.StartSlurmctld(c.ctx)
	case "node":
		if err := node.Crash(); err != nil {
			return err
		}
		time.Sleep(pause)
		c.did(what)
		return errors.Join(node.Boot(c.ctx), node.StartDaemons(c.ctx))
	}
	c.did(what)
	return nil
}

// gap notes that nobody was there to write reports, until now.
func (c *chaos) gap(since time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gaps = append(c.gaps, [2]time.Time{since, time.Now()})
}

// inGap says whether a run ended when nobody was there to write its report, or just before.
func (c *chaos) inGap(r run) bool {
	return slices.ContainsFunc(c.gaps, func(g [2]time.Time) bool {
		return r.end.After(g[0].Add(-3*time.Second)) && r.end.Before(g[1].Add(time.Second))
	})
}

// repair ends what was in the middle of being disturbed.
func (c *chaos) repair() {
	if err := c.StartController(c.ctx); err != nil {
		c.t.Fatal(err)
	}
	for _, n := range c.Nodes {
		if err := errors.Join(n.Boot(c.ctx), n.StartDaemons(c.ctx)); err != nil {
			c.t.Fatal(err)
		}
	}
}

// drain waits until all jobs have ended. One whose batch step's slurmstepd was killed runs for ever, as far as
// Slurm can see.
func (c *chaos) drain() {
	began := time.Now()
	c.until(c.t, 5*time.Minute, "all jobs have ended", func() error {
		all, err := c.active()
		if err != nil {
			return err
		}
		if len(all) == 1 && all[0] == "" {
			return nil
		}
		c.hurry()
		for _, a := range all {
			f := append(strings.Fields(a), "", "")
			switch id, state := f[0], f[1]; {
			case state == "SUSPENDED": // slurmctld was away when it was to be resumed
				_, _ = c.Scontrol(c.ctx, "resume", id)
			case state == "RUNNING" && time.Since(began) > 20*time.Second:
				_, _ = c.Ctl.Run(c.ctx, lab.Root, "scancel", id)
				c.did("scancel at last")
			}
		}
		return fmt.Errorf("%v", all)
	})
}

// orphans ends the processes whose slurmstepd was killed: nobody else will, but a reboot.
func (c *chaos) orphans() {
	k := 0
	for _, n := range c.Nodes {
		for _, pid := range n.PIDs("") {
			fi, err := os.Stat("/proc/" + strconv.Itoa(pid))
			if err != nil {
				continue
			}
			if st, ok := fi.Sys().(*syscall.Stat_t); ok && int(st.Uid) == lab.Alice.UID {
				_ = syscall.Kill(pid, syscall.SIGKILL)
				k++
			}
		}
	}
	c.t.Logf("%d processes had outlived their slurmstepd", k)
}
