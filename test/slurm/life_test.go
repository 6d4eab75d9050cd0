package slurm

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// running submits a job that stays, and waits until it has computed.
func (s *site) running(args ...string) string {
	s.t.Helper()
	job := s.sbatch(s.holding(), args...)
	s.computed(job)
	return job
}

func (s *site) computed(job string) {
	s.t.Helper()
	s.until(waitLong, "job "+job+" has computed", func() error {
		if out := s.Output(lab.Alice, job); !strings.Contains(out, "PASS") {
			r, _ := s.Job(s.ctx, job)
			return fmt.Errorf("%s %s %s: %s", r["JobState"], r["Reason"], r["AdminComment"], out)
		}
		return nil
	})
}

// TestRequeue: a job that is requeued loses its lease, waits, and gets another.
func TestRequeue(t *testing.T) {
	s := cluster(t)
	job := s.running("--gres=rgpu:50", "-N2")
	before := s.leases(job)
	_, err := s.alice("scontrol", "requeue", job)
	s.must(err)
	s.wait(job, "PENDING")
	s.until(waitLong, "its leases are gone", func() error {
		if n := len(s.leases(job)); n != 0 {
			return fmt.Errorf("%d are left", n)
		}
		return nil
	})
	s.wait(job, "RUNNING")
	s.until(waitLong, "it has leases again", func() error {
		if n := len(s.leases(job)); n != 2 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	for node, l := range s.leases(job) {
		if before[node].ID == l.ID {
			t.Errorf("%s: the same lease %s after a requeue", node, l.ID)
		}
	}
	s.release(job)
	contains(t, s.done(job), "PASS")
}

// TestCancel cancels a job in each of its phases.
func TestCancel(t *testing.T) {
	s := cluster(t)
	cancel := func(job string) {
		t.Helper()
		_, err := s.alice("scancel", job)
		s.must(err)
	}
	t.Run("pending", func(t *testing.T) {
		job := s.sbatch("true", "--gres=rgpu:50", "--hold")
		cancel(job)
		s.clean()
	})
	for _, hook := range []string{"PrologSlurmctld", "Prolog"} {
		t.Run(hook, func(t *testing.T) {
			s.hook(hook, "echo in "+hook+" >>"+s.Path("hooks.log")+"; /bin/sleep 3")
			job := s.sbatch(s.holding(), "--gres=rgpu:50")
			s.until(waitLong, "it is in "+hook, func() error {
				if b, _ := os.ReadFile(s.Path("hooks.log")); !strings.Contains(string(b), "in "+hook+"\n") {
					return fmt.Errorf("not yet")
				}
				return nil
			})
			cancel(job)
			s.must(os.Remove(s.Path("etc", "fault", hook)))
			s.wait(job, "CANCELLED")
			// Nobody says when a hook whose job is gone has ended, if it was not killed: a grant by it would come now.
			time.Sleep(4 * time.Second)
			s.clean()
		})
	}
	t.Run("running", func(t *testing.T) {
		job := s.running("--gres=rgpu:50", "-N2")
		cancel(job)
		s.wait(job, "CANCELLED")
		s.clean()
	})
	t.Run("computing", func(t *testing.T) {
		job := s.sbatch("srun "+s.program("steady")+" 20", "--gres=rgpu:50")
		s.until(waitLong, "it computes", func() error {
			for _, l := range s.leases(job) {
				if len(l.Sessions) > 0 {
					return nil
				}
			}
			return fmt.Errorf("no session: %s", s.Output(lab.Alice, job))
		})
		cancel(job)
		s.clean()
	})
	t.Run("stubborn", func(t *testing.T) {
		// It ignores SIGTERM: KillWait passes.
		job := s.sbatch("trap '' TERM; "+s.program("vecadd")+"; while :; do sleep 0.2; done", "--gres=rgpu:50")
		s.computed(job)
		cancel(job)
		s.clean()
	})
	t.Run("completing", func(t *testing.T) {
		s.hook("Epilog", "/bin/sleep 3")
		job := s.running("--gres=rgpu:100")
		s.release(job)
		s.wait(job, "COMPLETING")
		_, _ = s.alice("scancel", job) // it may say that the job is ending already
		if got := s.used("rgpu"); got != 100 {
			t.Errorf("%d units are charged while the epilog runs", got)
		}
		s.clean()
	})
}

// TestSuspend: a job that is suspended keeps its lease and its licences, and goes on afterwards.
func TestSuspend(t *testing.T) {
	s := cluster(t)
	job := s.sbatch("srun "+s.program("steady")+" 20; echo steady ended $?", "--gres=rgpu:50")
	var before lab.Lease
	s.until(waitLong, "it computes", func() error {
		for _, l := range s.leases(job) {
			before = l
			if len(l.Sessions) > 0 {
				return nil
			}
		}
		return fmt.Errorf("no session: %s", s.Output(lab.Alice, job))
	})
	_, err := s.Scontrol(s.ctx, "suspend", job)
	s.must(err)
	s.wait(job, "SUSPENDED")
	// Longer than keep-alives and renewals need.
	time.Sleep(6 * time.Second)
	for _, l := range s.leases(job) {
		if l.ID != before.ID || len(l.Sessions) != len(before.Sessions) {
			t.Errorf("the lease was %+v and is %+v", before, l)
		}
	}
	if got := s.used("rgpu"); got != 50 {
		t.Errorf("%d units are charged while it is suspended", got)
	}
	_, err = s.Scontrol(s.ctx, "resume", job)
	s.must(err)
	s.wait(job, "RUNNING")
	_, err = s.alice("scancel", "--signal=TERM", job)
	s.must(err)
	out := s.done(job)
	contains(t, out, "PASS", "steady ended 0")
}

// TestPreempt: a job that is preempted is requeued without its lease and gets another when it runs again.
func TestPreempt(t *testing.T) {
	s := cluster(t)
	low := s.running("-p", "low", "-N3", "--exclusive", "--gres=rgpu:50")
	before := s.leases(low)
	high := s.sbatch(s.holding(), "-p", "high", "-N3", "--exclusive", "--gres=rgpu:50")
	s.computed(high)
	s.wait(low, "PENDING")
	if ls := s.leases(low); len(ls) != 0 {
		t.Errorf("the job that was preempted has %+v", ls)
	}
	s.release(high)
	s.done(high)
	s.wait(low, "RUNNING")
	s.until(waitLong, "it has leases again", func() error {
		if n := len(s.leases(low)); n != 3 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	for node, l := range s.leases(low) {
		if before[node].ID == l.ID {
			t.Errorf("%s: the same lease after a preemption", node)
		}
	}
	s.release(low)
	s.done(low)
}

// hookEnv is what slurmd gives to the hooks of a job.
func (s *site) hookEnv(node *lab.Node, job, restart string) []string {
	return []string{"env", "-i", "SLURMD_NODENAME=" + node.Name, "SLURM_CLUSTER_NAME=" + s.Options.Name, "SLURM_JOB_ID=" + job,
		"SLURM_JOB_UID=" + strconv.Itoa(lab.Alice.UID), "SLURM_JOB_GID=" + strconv.Itoa(lab.Alice.UID), "SLURM_JOB_USER=alice", "SLURM_JOB_PARTITION=main",
		"SLURM_JOB_RESTART_COUNT=" + restart}
}

// TestRepeated: a Prolog that is repeated changes nothing, an Epilog that is repeated or comes for a job that is
// unknown ends nothing else.
func TestRepeated(t *testing.T) {
	s := cluster(t)
	job := s.running("--gres=rgpu:50", "-N2")
	other := s.running("--gres=rgpu:30", "-N1", "-w", s.Nodes[2].Name)
	before := s.leases(job)
	for node := range before {
		n := s.Node(node)
		for range 3 {
			if out, err := n.Run(s.ctx, lab.Root, append(s.hookEnv(n, job, "0"), "/etc/slurm/prolog")...); err != nil {
				t.Errorf("prolog: %v %s", err, out)
			}
		}
	}
	for node, l := range s.leases(job) {
		if l.ID != before[node].ID {
			t.Errorf("%s: lease %s became %s by a second prolog", node, before[node].ID, l.ID)
		}
	}
	s.release(job)
	s.done(job)
	for node := range before {
		n := s.Node(node)
		for _, id := range []string{job, job, "999999"} {
			if out, err := n.Run(s.ctx, lab.Root, append(s.hookEnv(n, id, "1"), "/etc/slurm/epilog")...); err != nil {
				t.Errorf("epilog: %v %s", err, out)
			}
		}
		// A Prolog that was late gets nothing: nobody would return it.
		if out, err := n.Run(s.ctx, lab.Root, append(s.hookEnv(n, job, "0"), "/etc/slurm/prolog")...); err != nil {
			t.Errorf("late prolog: %v %s", err, out)
		}
	}
	if ls := s.leases(job); len(ls) != 0 {
		t.Errorf("a late prolog got %+v", ls)
	}
	if ls := s.leases(other); len(ls) != 1 {
		t.Errorf("the other job has %d leases", len(ls))
	}
	s.release(other)
	s.done(other)
}

// TestEpilogLost: the hooks at the end of a job do not run on its node; the lease ends all the same.
func TestEpilogLost(t *testing.T) {
	s := cluster(t)
	for _, lost := range [][]string{{"Epilog"}, {"EpilogSlurmctld"}, {"Epilog", "EpilogSlurmctld"}} {
		t.Run(strings.Join(lost, "+"), func(t *testing.T) {
			for _, h := range lost {
				s.hook(h, "exit 0")
			}
			job := s.running("--gres=rgpu:50", "-N2")
			s.release(job)
			s.done(job)
			s.until(90*time.Second, "everything is released", func() error { return s.Clean(s.ctx) })
			for _, h := range lost {
				s.must(os.Remove(s.Path("etc", "fault", h)))
			}
		})
	}
}
