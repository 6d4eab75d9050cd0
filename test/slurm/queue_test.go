package slurm

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

const waitLong = 30 * time.Second

// holding is a script that computes once and then stays until it is released.
func (s *site) holding() string {
	return s.program("vecadd") + "\n" + s.stay()
}

// stay waits until the job is released.
func (s *site) stay() string {
	return "while [ ! -e " + s.Path("home", "alice", "go.") + "$SLURM_JOB_ID ]; do sleep 0.05; done"
}

// release ends what holding started.
func (s *site) release(jobs ...string) {
	s.t.Helper()
	for _, j := range jobs {
		s.must(os.WriteFile(s.Path("home", "alice", "go."+j), nil, 0o644))
	}
}

// TestInteractiveNoRoom has room in pieces: Slurm ends srun with words about the node's boot, so its terminal shows the reason before.
func TestInteractiveNoRoom(t *testing.T) {
	s := cluster(t)
	var pieces []string
	for range 3 {
		pieces = append(pieces, s.sbatch(s.stay(), "--gres=rgpu:60"))
		s.wait(pieces[len(pieces)-1], "RUNNING")
	}
	for _, tool := range []string{"srun", "salloc"} {
		out, err := s.alice(tool, "--gres=rgpu:80", "true")
		if err == nil {
			t.Errorf("%s found room", tool)
		}
		contains(t, fmt.Sprint(out, err), "sluice: no room for this job: ", "40% too little", "The nodes are well.")
	}
	s.release(pieces...)
	for _, j := range pieces {
		s.done(j)
	}
	s.clean()
}

// TestQueue fills the pool: what comes then waits for licences, in its order, and starts in its order.
func TestQueue(t *testing.T) {
	s := cluster(t)
	first := []string{s.sbatch(s.holding(), "--gres=rgpu:100"), s.sbatch(s.holding(), "--gres=rgpu:100"), s.sbatch(s.holding(), "--gres=rgpu:100")}
	for _, j := range first {
		s.wait(j, "RUNNING")
	}
	var waiting []string
	for range 4 {
		waiting = append(waiting, s.sbatch("date +%s.%N; "+s.holding(), "--gres=rgpu:100"))
	}
	small := s.sbatch("true", "--gres=rgpu:10")
	for _, j := range append(waiting, small) {
		s.until(waitLong, "job "+j+" waits for licences", func() error {
			r, err := s.Job(s.ctx, j)
			if err == nil && (r["JobState"] != "PENDING" || r["Reason"] != "Licenses" && r["Reason"] != "Priority") {
				err = fmt.Errorf("%s, %s", r["JobState"], r["Reason"])
			}
			return err
		})
	}
	out, err := s.alice("squeue", "-h", "-t", "PD", "-o", "%i %r %W", "-S", "i")
	s.must(err)
	contains(t, out, waiting[0]+" Licenses rgpu:100")
	if _, err := s.alice("srun", "--immediate=1", "--gres=rgpu:10", "true"); err == nil {
		t.Error("srun got a fraction of a full pool")
	}
	// A job without a fraction is not kept by those that wait.
	s.done(s.sbatch("true"))
	order := append(append([]string{}, first...), waiting...)
	for i, j := range waiting {
		s.release(order[i])
		s.wait(j, "RUNNING", "COMPLETED")
		for _, later := range waiting[i+1:] {
			if r, err := s.Job(s.ctx, later); err != nil || r["JobState"] != "PENDING" {
				t.Errorf("job %s is %s before its turn (%v)", later, r["JobState"], err)
			}
		}
	}
	s.release(order...)
	for _, j := range order {
		contains(t, s.done(j), "PASS")
	}
	s.done(small)
}

// TestArray runs fifty tasks, each with a lease of its own, never more at once than the pool has.
func TestArray(t *testing.T) {
	s := cluster(t)
	job := s.sbatch(s.program("vecadd")+"\necho lease=$SLUICE_LEASE_ID", "--array=1-50", "--gres=rgpu:30", "--output="+s.Path("home", "alice", "array-%A_%a.out"))
	most := 0
	s.until(4*time.Minute, "all fifty have ended", func() error {
		most = max(most, s.used("rgpu"))
		out, err := s.alice("squeue", "-h", "-j", job)
		if err != nil {
			return nil // it is known no more
		}
		if n := strings.Count(out, "\n"); n > 0 {
			return fmt.Errorf("%d lines in the queue", n)
		}
		return nil
	})
	seen := map[string]bool{}
	for i := 1; i <= 50; i++ {
		b, err := os.ReadFile(s.Path("home", "alice", fmt.Sprintf("array-%s_%d.out", job, i)))
		if err != nil || !strings.Contains(string(b), "PASS") {
			t.Errorf("task %d: %v: %s", i, err, b)
		}
		for line := range strings.Lines(string(b)) {
			if id, ok := strings.CutPrefix(line, "lease="); ok && strings.TrimSpace(id) != "" {
				seen[id] = true
			}
		}
	}
	if len(seen) != 50 {
		t.Errorf("%d different leases for 50 tasks", len(seen))
	}
	if most > units || most < 90 {
		t.Errorf("at most %d of %d units were used at once", most, units)
	}
	t.Logf("at most %d units at once", most)
}

// TestMultiNode: every node of a job has a lease, and its tasks use that of their node.
func TestMultiNode(t *testing.T) {
	s := cluster(t)
	job := s.sbatch("srun sh -c 'echo lease $SLURMD_NODENAME $SLUICE_LEASE_ID; "+s.program("vecadd")+"'\n"+s.holding(), "-N3", "--gres=rgpu:40")
	s.until(waitLong, "it computes", func() error {
		if n := matches(s.Output(lab.Alice, job), "(?m)^PASS$"); n < 4 {
			return fmt.Errorf("%d passed: %s", n, s.Output(lab.Alice, job))
		}
		return nil
	})
	ls := s.leases(job)
	if len(ls) != 3 {
		t.Errorf("%d leases: %+v", len(ls), ls)
	}
	out := s.Output(lab.Alice, job)
	for node, l := range ls {
		contains(t, out, "lease "+node+" "+l.ID)
	}
	s.release(job)
	s.done(job)
}

// TestHet: the components of a heterogeneous job are charged and served each by itself, where Slurm lets them.
func TestHet(t *testing.T) {
	s := cluster(t)
	script := func(second string) string {
		return "#!/bin/sh\n#SBATCH --gres=rgpu:50 -N1\n#SBATCH hetjob\n#SBATCH -N1 " + second + "\n#SBATCH hetjob\n#SBATCH -N1\n" +
			"srun --het-group=0 " + s.program("memcheck") + " 4096\nsrun --het-group=1 sh -c 'echo g1 $SLUICE_SOCKET.'\nsrun --het-group=2 sh -c 'echo g2 $SLUICE_SOCKET.'\n"
	}
	both := script("--gres=rgpu:20") + "srun --het-group=1 " + s.program("vecadd") + "\n" + s.holding()
	job, err := s.Sbatch(s.ctx, lab.Alice, both)
	charged, passed, second := 70, 3, "g1 /run"
	if version := s.version(); version != "22.05" {
		// From some release on, Slurm allows licences in the first component alone.
		if err == nil || !strings.Contains(err.Error(), "first component") {
			t.Fatalf("Slurm %s: %v", version, err)
		}
		job, err = s.Sbatch(s.ctx, lab.Alice, script("")+s.holding())
		charged, passed, second = 50, 2, "g1 ."
	}
	s.must(err)
	s.wait(job, "RUNNING")
	if got := s.used("rgpu"); got != charged {
		t.Errorf("charged %d units, want %d", got, charged)
	}
	s.release(job)
	out := s.done(job)
	contains(t, out, second, "g2 .")
	if matches(out, "(?m)^PASS$") != passed {
		t.Errorf("output:\n%s", out)
	}
}

// TestFragmented: licences are free but no GPU has the room. The job goes back into the queue, says why, and runs
// when there is room; nodes stay as they are.
func TestFragmented(t *testing.T) {
	s := cluster(t)
	var first []string
	for range 3 {
		j := s.sbatch(s.holding(), "--gres=rgpu:60")
		s.wait(j, "RUNNING")
		first = append(first, j)
	}
	job := s.sbatch(s.program("vecadd"), "--gres=rgpu:50")
	s.until(waitLong, "it is requeued with the reason", func() error {
		r, err := s.Job(s.ctx, job)
		if err == nil && (r["JobState"] != "PENDING" || !strings.Contains(r["AdminComment"], "sluice")) {
			err = fmt.Errorf("%s, restarts %s, admin comment %q", r["JobState"], r["Restarts"], r["AdminComment"])
		}
		return err
	})
	out, err := s.Scontrol(s.ctx, "-o", "show", "node")
	s.must(err)
	if strings.Contains(out, "DRAIN") {
		t.Errorf("a node is drained: %s", out)
	}
	s.release(first...)
	contains(t, s.done(job), "PASS")
	for _, j := range first {
		s.done(j)
	}
}
