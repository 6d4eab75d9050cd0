package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

const ask = "--gres=rgpu:50"

// TestPairing is the table of which hook runs when, with PrologFlags as we ask sites to set them.
func TestPairing(t *testing.T) {
	t.Parallel()
	all(t, site{flags: "Alloc,Contain"}, []row{
		{"all nodes at allocation", allNodes},
		{"array", array},
		{"steps", steps},
		{"scancel during Prolog", scancelInProlog},
		{"requeue", requeue},
		{"Prolog left out by Slurm", prologLeftOutBySlurm},
		{"suspend", suspend},
		{"slurmd killed, job goes on", slurmdKilled},
		{"slurmd killed in Prolog", slurmdKilledInProlog},
		{"slurmd killed after Prolog", slurmdKilledAfterProlog},
		{"slurmd ended in Prolog", slurmdEndedInProlog},
		{"slurmd killed in Epilog", slurmdKilledInEpilog},
		{"power cycle in Epilog", powerCycleInEpilog},
		{"node away", nodeAway},
		{"node back in time", nodeBack},
		{"slurmctld away at the end", ctldAway},
		{"slurmctld killed", ctldKilled},
		{"node set down", nodeSetDown},
		{"slurmctld without state", ctldForgets},
		{"slurmd away at scancel", slurmdAway},
	})
}

// long is a job that ends only when it is told to.
const long = "echo begun; exec sleep 600"

func allNodes(t *testing.T, r *rig) {
	j := r.sbatch(t, long, ask, "-N2")
	r.begun(t, j)
	r.holds(t, j, 2, 5*time.Second)
	r.scancel(t, j)
	for _, n := range r.Nodes[:2] {
		r.seen(t, j, "Epilog", n.Name, true, 1)
		if k := r.ran(j, "Prolog", n.Name); k != 1 {
			t.Errorf("%d Prologs on %s", k, n.Name)
		}
	}
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
}

func array(t *testing.T, r *rig) {
	j := r.sbatch(t, long, "--gres=rgpu:20", "-a1-3")
	tasks := []string{}
	r.until(t, 20*time.Second, "three tasks run", func() error { return r.running(j, 3, &tasks) })
	for _, id := range tasks {
		r.holds(t, id, 1, 5*time.Second)
	}
	r.scancel(t, j)
	for _, id := range tasks {
		r.seen(t, id, "Epilog", "", true, 1)
		if k := r.ran(id, "Prolog", ""); k != 1 {
			t.Errorf("%d Prologs of job %s", k, id)
		}
	}
}

func steps(t *testing.T, r *rig) {
	j := r.sbatch(t, "srun true && srun true && srun sh -c 'echo $SLUICE_LEASE_ID'; echo $SLUICE_LEASE_ID", ask)
	r.state(t, j, 30*time.Second, "COMPLETED")
	if k := r.ran(j, "Prolog", ""); k != 1 {
		t.Errorf("%d Prologs", k)
	}
	r.seen(t, j, "Epilog", "", true, 1)
	if k := r.ran(j, "Epilog", ""); k != 1 {
		t.Errorf("%d Epilogs", k)
	}
	r.oneLease(t, j, 2)
}

func scancelInProlog(t *testing.T, r *rig) {
	r.set(t, "Prolog.before", "/bin/sleep 4")
	j := r.sbatch(t, long, ask)
	r.seen(t, j, "Prolog", "", false, 1)
	r.scancel(t, j)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
	if r.ended(j, "Prolog", "") != 0 {
		t.Error("EpilogSlurmctld came after Prolog")
	}
	r.seen(t, j, "Epilog", "", true, 1)
}

func requeue(t *testing.T, r *rig) {
	j := r.sbatch(t, long, ask)
	r.begun(t, j)
	first := r.holds(t, j, 1, 5*time.Second)
	r.scontrol(t, "requeue", j)
	r.state(t, j, 20*time.Second, "PENDING")
	r.now(t, j)
	r.begun(t, j)
	second := r.holds(t, j, 1, 5*time.Second)
	if len(first) > 0 && len(second) > 0 && first[0].ID == second[0].ID {
		t.Error("the second run has the first one's lease")
	}
	r.scancel(t, j)
}

// slurmd of 22.05 clears its list of ended jobs no more than once in two seconds. A job that is put back and starts
// within these is still on it: no Prolog is run for it on that node. Its first task there asks instead.
func prologLeftOutBySlurm(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, long, ask, "-w", n.Name)
	r.begun(t, j)
	r.scontrol(t, "requeue", j)
	r.state(t, j, 20*time.Second, "PENDING")
	r.seen(t, j, "Epilog", n.Name, true, 1)
	nextSecond()
	other := r.sbatch(t, "true", "-w", n.Name)
	r.seen(t, other, "Prolog", n.Name, false, 1)
	r.scontrol(t, "update", "JobId="+j, "StartTime=now")
	r.begun(t, j)
	r.holds(t, j, 1, 5*time.Second)
	switch again := len(slurmdSaid(n, "reissued job credential for job "+j)) > 0; {
	case r.ran(j, "Prolog", n.Name) == 2:
		t.Log("this release runs it")
	case !again:
		t.Error("no Prolog was run, and slurmd has not taken the job's credential for one given anew")
	default:
		t.Log("this release leaves it out")
	}
	r.scancel(t, j)
	r.seen(t, j, "Epilog", n.Name, true, 2)
}

func suspend(t *testing.T, r *rig) {
	j := r.sbatch(t, long, ask)
	r.begun(t, j)
	r.scontrol(t, "suspend", j)
	r.state(t, j, 10*time.Second, "SUSPENDED")
	time.Sleep(silence + 2*time.Second)
	r.holds(t, j, 1, time.Second)
	r.scontrol(t, "resume", j)
	r.state(t, j, 10*time.Second, "RUNNING")
	r.holds(t, j, 1, time.Second)
	r.scancel(t, j)
}

func slurmdKilled(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, long, ask, "-w", n.Name)
	r.begun(t, j)
	r.killSlurmd(t, n)
	time.Sleep(silence + time.Second)
	r.holds(t, j, 1, time.Second)
	r.startSlurmd(t, n)
	r.state(t, j, 10*time.Second, "RUNNING")
	r.scancel(t, j)
	r.seen(t, j, "Epilog", n.Name, true, 1)
}

func slurmdKilledInProlog(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Prolog.before", "/bin/sleep 3")
	j := r.sbatch(t, long, ask, "-w", n.Name)
	r.seen(t, j, "Prolog", n.Name, false, 1)
	r.killSlurmd(t, n)
	r.seen(t, j, "Prolog", n.Name, true, 1)
	r.unset(t, "Prolog.before")
	r.startSlurmd(t, n)
	// Nobody has heard that the Prolog ended: the job would be requeued some minutes later.
	r.scancel(t, j)
	r.seen(t, j, "Epilog", n.Name, true, 1)
}

// From 24.11 on the next slurmd does not know that the job's Prolog ran. It waits for that with the first task, gives
// up after 20 s, and has its node drained for a Prolog that failed: Slurm's own doing, of which TestChaos has to know.
func slurmdKilledAfterProlog(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.salloc(t, ask, "-w", n.Name)
	r.seen(t, j, "Prolog", n.Name, true, 1)
	// Slurm starts nothing before it has heard of the Prolog's end.
	r.until(t, 20*time.Second, "the job is configured", func() error {
		job, err := r.Job(r.ctx, j)
		if err == nil && job["Reason"] != "None" {
			err = fmt.Errorf("it waits for %s", job["Reason"])
		}
		return err
	})
	r.killSlurmd(t, n)
	r.startSlurmd(t, n)
	if out, err := r.Ctl.Run(r.ctx, lab.Alice, "srun", "--jobid="+j, "true"); err == nil {
		t.Log("this release remembers")
		r.fit(t, n)
	} else {
		t.Logf("srun says: %s%v", out, err)
		r.drained(t, n, "Prolog error")
		if lost := r.lostPrologs(n); !slices.Equal(lost, []string{j}) {
			t.Errorf("slurmd names jobs %v", lost)
		}
	}
	r.scancel(t, j)
}

func slurmdEndedInProlog(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Prolog.before", "/bin/sleep 3")
	j := r.sbatch(t, long, ask, "-w", n.Name)
	r.seen(t, j, "Prolog", n.Name, false, 1)
	if err := n.Stop("slurmd"); err != nil {
		t.Fatal(err)
	}
	if r.ended(j, "Prolog", n.Name) != 1 {
		t.Error("slurmd did not wait for its Prolog")
	}
	r.unset(t, "Prolog.before")
	r.startSlurmd(t, n)
	r.scancel(t, j)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
}

func slurmdKilledInEpilog(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Epilog.before", "/bin/sleep 3")
	j := r.sbatch(t, "true", ask, "-w", n.Name)
	r.seen(t, j, "Epilog", n.Name, false, 1)
	r.killSlurmd(t, n)
	r.seen(t, j, "Epilog", n.Name, true, 1)
	r.unset(t, "Epilog.before")
	r.startSlurmd(t, n)
}

func powerCycleInEpilog(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Epilog.before", "/bin/sleep 60")
	j := r.sbatch(t, "true", ask, "-w", n.Name)
	r.seen(t, j, "Epilog", n.Name, false, 1)
	r.crash(t, n)
	r.unset(t, "Epilog.before")
	r.boot(t, n)
	r.holds(t, j, 0, 20*time.Second)
}

func nodeAway(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, long, ask, "-w", n.Name, "--no-requeue")
	r.begun(t, j)
	r.holds(t, j, 1, 5*time.Second)
	r.crash(t, n)
	r.state(t, j, 4*slurmdSilent, "NODE_FAIL")
	r.holds(t, j, 0, 3*time.Second)
	r.boot(t, n)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
	if r.ran(j, "Epilog", n.Name) != 0 {
		t.Log("this release runs Epilog when the node returns")
	}
}

func nodeBack(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, long, ask, "-w", n.Name, "--no-requeue")
	r.begun(t, j)
	r.crash(t, n)
	r.boot(t, n)
	r.state(t, j, 10*slurmdSilent, "NODE_FAIL", "FAILED", "CANCELLED", "COMPLETED")
	r.holds(t, j, 0, 5*time.Second)
}

func ctldAway(t *testing.T, r *rig) {
	j := r.sbatch(t, "echo begun; sleep 2", ask)
	r.begun(t, j)
	if err := r.Ctl.Stop("slurmctld"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(4 * time.Second)
	r.startCtld(t)
	r.seen(t, j, "Epilog", "", true, 1)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
}

// A controller that is killed has saved its state some seconds ago. It has to have saved that the job runs: one that it knows as pending
// it starts once more, and Slurm drains the node that has it already. Without any record of the job: ctldForgets.
func ctldKilled(t *testing.T, r *rig) {
	j := r.sbatch(t, "echo begun; sleep 12", ask)
	r.begun(t, j)
	running := time.Now()
	r.scontrol(t, "update", "JobId="+j, "Comment=runs") // something to save
	r.saved(t, running)
	r.killCtld(t)
	time.Sleep(time.Until(running.Add(14 * time.Second))) // it ends meanwhile
	r.startCtld(t)
	r.holds(t, j, 0, 20*time.Second)
}

func nodeSetDown(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, long, ask, "-w", n.Name, "--no-requeue")
	r.begun(t, j)
	r.scontrol(t, "update", "NodeName="+n.Name, "State=DOWN", "Reason=test")
	r.holds(t, j, 0, 20*time.Second)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
	// With ReturnToService=2 it may be back already.
	_, _ = r.Scontrol(r.ctx, "update", "NodeName="+n.Name, "State=RESUME")
}

func ctldForgets(t *testing.T, r *rig) {
	j := r.sbatch(t, long, ask)
	r.begun(t, j)
	r.killCtld(t)
	files, _ := filepath.Glob(r.Path("state", "job_state*"))
	for _, f := range files {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	r.startCtld(t, "-c")
	r.holds(t, j, 0, 40*time.Second)
	r.seen(t, j, "Epilog", "", true, 1)
	if k := r.ran(j, "EpilogSlurmctld", ""); k != 0 {
		t.Logf("this release runs EpilogSlurmctld of a forgotten job (%d)", k)
	}
	// Its number is given again, and means another job.
	r.until(t, 30*time.Second, "the nodes are idle", func() error { return r.Clean(r.ctx) })
	nextSecond()
	again := r.sbatch(t, "echo $SLUICE_LEASE_ID; sleep 1", ask)
	if again != j {
		t.Errorf("the next job is %s, not %s", again, j)
	}
	r.state(t, again, 30*time.Second, "COMPLETED")
	if out := strings.TrimSpace(r.Output(lab.Alice, again)); len(out) != 32 {
		t.Errorf("the job that got the number again has lease %q", out)
	}
}

func slurmdAway(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, long, ask, "-w", n.Name)
	r.begun(t, j)
	r.killSlurmd(t, n)
	r.scancel(t, j)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
	r.startSlurmd(t, n)
	r.seen(t, j, "Epilog", n.Name, true, 1)
}
