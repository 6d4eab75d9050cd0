package slurm

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestSteps: the steps and tasks of a job share its lease and its cap on each node.
func TestSteps(t *testing.T) {
	s := cluster(t)
	steady := s.program("steady")
	job := s.sbatch(`echo batch $SLUICE_LEASE_ID
srun -n1 --overlap sh -c 'echo step $SLUICE_LEASE_ID; timeout -s TERM 20 `+steady+` 20' &
srun -n2 --overlap sh -c 'echo step $SLUICE_LEASE_ID; timeout -s TERM 20 `+steady+` 20' &
`+s.stay()+`
scancel --signal=TERM $SLURM_JOB_ID
wait`, "-n2", "-N1", "--gres=rgpu:50")
	s.until(waitLong, "three processes compute on one lease", func() error {
		ls := s.leases(job)
		if len(ls) != 1 {
			return fmt.Errorf("%d leases", len(ls))
		}
		for _, l := range ls {
			if len(l.Sessions) != 3 {
				return fmt.Errorf("%d sessions: %s", len(l.Sessions), s.Output(lab.Alice, job))
			}
		}
		return nil
	})
	s.release(job)
	s.done(job)
	out := s.Output(lab.Alice, job)
	seen := map[string]bool{}
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 2 && (f[0] == "step" || f[0] == "batch") {
			seen[f[1]] = true
		}
	}
	if len(seen) != 1 || matches(out, "(?m)^step ") != 3 {
		t.Errorf("%d leases in:\n%s", len(seen), out)
	}
}

// TestProcesses: groups of processes that a program forks, and processes that a job leaves in the background,
// use its lease; nothing of them outlives the job.
func TestProcesses(t *testing.T) {
	s := cluster(t)
	contains(t, s.done(s.sbatch(s.program("multi_process"), "--gres=rgpu:50")), "PASS")

	job := s.sbatch("setsid nohup "+s.program("steady")+" 50 >$HOME/bg.$SLURM_JOB_ID 2>&1 &\n"+s.stay(), "--gres=rgpu:50", "-w", s.Nodes[2].Name)
	s.until(waitLong, "the background process computes", func() error {
		for _, l := range s.leases(job) {
			if len(l.Sessions) == 1 {
				return nil
			}
		}
		return fmt.Errorf("no session: %v", s.leases(job))
	})
	s.release(job)
	s.done(job)
	s.until(waitLong, "the background process is gone", func() error {
		if n := len(s.Nodes[2].PIDs("steady")); n > 0 {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	})
}

// TestTwoJobs: two jobs of one user on one node have two leases, and each its own cap.
func TestTwoJobs(t *testing.T) {
	s := cluster(t)
	script := func(mib int) string {
		return fmt.Sprintf("echo lease $SLUICE_LEASE_ID\n%s %d\nsrun %[1]s %d\n", s.program("memcheck"), mib, mib) + s.holding()
	}
	a := s.sbatch(script(gpuMiB/2), "--gres=rgpu:50", "-w", s.Nodes[2].Name)
	b := s.sbatch(script(gpuMiB/4), "--gres=rgpu:25", "-w", s.Nodes[2].Name)
	seen := map[string]string{}
	for _, j := range []string{a, b} {
		s.until(waitLong, "job "+j+" has computed", func() error {
			if n := matches(s.Output(lab.Alice, j), "(?m)^PASS$"); n < 3 {
				return fmt.Errorf("%d passed: %s", n, s.Output(lab.Alice, j))
			}
			return nil
		})
		ls := s.leases(j)
		if len(ls) != 1 {
			t.Fatalf("job %s has leases %+v", j, ls)
		}
		seen[j] = ls[s.Nodes[2].Name].ID
		contains(t, s.Output(lab.Alice, j), "lease "+seen[j])
	}
	if seen[a] == seen[b] {
		t.Errorf("both jobs have lease %s", seen[a])
	}
	s.release(a)
	s.done(a)
	// The other goes on as it was.
	if ls := s.leases(b); ls[s.Nodes[2].Name].ID != seen[b] {
		t.Errorf("job %s has lost its lease: %+v", b, ls)
	}
	s.release(b)
	s.done(b)
}

// TestAdopted: a process that came in by ssh and was put into the job's control group, as pam_slurm_adopt does,
// gets the job's lease by `sluice env`; another user gets nothing.
func TestAdopted(t *testing.T) {
	s := cluster(t)
	node := s.Nodes[2]
	job := s.sbatch("echo begun\n"+s.holding(), "--gres=rgpu:50", "-w", node.Name)
	// Its own step is there before its script begins.
	s.until(waitLong, "it has begun and has its lease", func() error {
		if out, n := s.Output(lab.Alice, job), len(s.leases(job)); !strings.HasPrefix(out, "begun") || n != 1 {
			return fmt.Errorf("%d leases, it says %q", n, out)
		}
		return nil
	})
	group := filepath.Join("slurm_"+node.Name, "uid_"+strconv.Itoa(lab.Alice.UID), "job_"+job, "step_extern")
	in := func(u lab.User, what string) (string, error) {
		// The session's leader waits until it is in the group, as sshd does.
		enter := "for d in /sys/fs/cgroup/*/" + group + "; do [ ! -d $d ] || echo $$ >$d/cgroup.procs; done; exec setpriv --reuid=" + strconv.Itoa(u.UID) + " --regid=" + strconv.Itoa(u.UID) + " --clear-groups env -u SLURM_JOB_ID sh -c \"$1\""
		return node.Run(s.ctx, lab.Root, "sh", "-c", enter, "sh", what)
	}
	out, err := in(lab.Alice, `eval "$(sluice env)" && echo lease $SLUICE_LEASE_ID && `+s.program("vecadd"))
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
	contains(t, out, "PASS", "lease "+s.leases(job)[node.Name].ID)
	if out, err := node.Run(s.ctx, lab.Bob, "sluice", "env", job); err == nil || strings.Contains(out, "SLUICE_SOCKET") {
		t.Errorf("bob got alice's: %s", out)
	}
	s.release(job)
	s.done(job)
}

// TestInherited: a job that is submitted from within another has what is its own: nothing, or its own lease.
func TestInherited(t *testing.T) {
	s := cluster(t)
	out := s.done(s.sbatch("echo first $SLUICE_LEASE_ID $LD_LIBRARY_PATH\nsbatch --wait -o inner.%j -N1 -w "+s.Nodes[1].Name+" --wrap 'echo none=$SLUICE_SOCKET$SLUICE_LEASE_ID$LD_LIBRARY_PATH.; "+
		"srun sh -c \"echo step=\\$SLUICE_SOCKET\\$LD_LIBRARY_PATH.\"'\nsbatch --wait -o inner.%j --gres=rgpu:30 --wrap 'echo second $SLUICE_LEASE_ID $LD_LIBRARY_PATH; "+s.program("vecadd")+"'\ncat inner.*; rm inner.*\n"+s.program("vecadd"), "--gres=rgpu:50", "-w", s.Nodes[0].Name))
	contains(t, out, "none=.\n", "step=.\n")
	var first, second string
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) == 3 && f[0] == "first" {
			first = f[1]
		} else if len(f) == 3 && f[0] == "second" {
			second = f[1]
		}
		if len(f) == 3 && (f[0] == "first" || f[0] == "second") && strings.Count(f[2], "/usr/lib/sluice") != 1 {
			t.Errorf("library path %s", f[2])
		}
	}
	if first == "" || second == "" || first == second || matches(out, "(?m)^PASS$") != 2 {
		t.Errorf("leases %q and %q:\n%s", first, second, out)
	}
}

// TestOtherUser: a user who knows another's socket gets no session on it.
func TestOtherUser(t *testing.T) {
	s := cluster(t)
	node := s.Nodes[2]
	job := s.sbatch("echo socket $SLUICE_SOCKET\n"+s.holding(), "--gres=rgpu:50", "-w", node.Name)
	var socket string
	s.until(waitLong, "it says its socket", func() error {
		for line := range strings.Lines(s.Output(lab.Alice, job)) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "socket" {
				socket = f[1]
				return nil
			}
		}
		return fmt.Errorf("not yet: %s", s.Output(lab.Alice, job))
	})
	if out, err := node.Run(s.ctx, lab.Bob, "env", "SLUICE_SOCKET="+socket, "LD_LIBRARY_PATH=/usr/lib/sluice", s.program("vecadd")); err == nil {
		t.Errorf("bob computes on alice's lease: %s", out)
	}
	s.release(job)
	s.done(job)
}

// TestReport: the job's report is in the accounting, in its output if asked for, and at hand afterwards.
func TestReport(t *testing.T) {
	s := cluster(t)
	job := s.sbatch(s.program("vecadd"), "--gres=rgpu:50", "--rgpu-report")
	contains(t, s.done(job), "PASS")
	s.until(waitLong, "the report is in the job's output", func() error {
		if out := s.Output(lab.Alice, job); !strings.Contains(out, "granted 50%") {
			return fmt.Errorf("output: %s", out)
		}
		return nil
	})
	out, err := s.alice("sluice", "report", job)
	s.must(err)
	contains(t, out, "50%")
	s.until(waitLong, "sacct has it", func() error {
		out, err := s.alice("sacct", "-X", "-n", "-P", "-j", job, "-o", "state,admincomment,alloctres")
		if err == nil && !(strings.Contains(out, "COMPLETED") && strings.Contains(out, "granted 50%") && strings.Contains(out, "license/rgpu=50")) {
			err = fmt.Errorf("sacct: %s", out)
		}
		return err
	})
}
