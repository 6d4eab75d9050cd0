package faults

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestHooks is the table of what becomes of a node and a job when a hook fails, or takes its time. A site's own
// part of a hook may fail, whatever ours does.
func TestHooks(t *testing.T) {
	t.Parallel()
	all(t, site{flags: "Alloc,Contain"}, []row{
		{"Prolog fails", prologFails},
		{"Prolog is slow", prologSlow},
		{"Prolog is left out", prologLeftOut},
		{"Prolog repeated", prologRepeated},
		{"Epilog before Prolog", epilogFirst},
		{"Epilog fails", epilogFails},
		{"Epilog repeated", epilogRepeated},
		{"Epilog lost", epilogLost},
		{"EpilogSlurmctld fails", epilogCtldFails},
		{"both Epilogs lost", epilogsLost},
		{"no room for an array's last task", noRoomForTask},
	})
	// Slurm must not know yet that the pool is in use: its controller's daemon would hold the licences back.
	all(t, site{flags: "Alloc,Contain", more: lab.Options{Sluice: map[string]string{"slurm.reconcile": "1h"}}}, []row{
		{"no room", noRoom},
		{"no room for srun", noRoomSrun},
	})
	all(t, site{flags: "Alloc,Contain", more: lab.Options{Slurm: map[string]string{"PrologEpilogTimeout": "3"}}}, []row{
		{"Prolog over time", prologOverTime},
		{"Epilog over time", epilogOverTime},
	})
}

// drained waits until a node is, and has it back.
func (r *rig) drained(t *testing.T, n *lab.Node, reason string) {
	t.Helper()
	r.until(t, 30*time.Second, "node "+n.Name+" is drained", func() error {
		out, err := r.Ctl.Run(r.ctx, lab.Root, "sinfo", "-h", "-n", n.Name, "-o", "%T %E")
		if err == nil && (!strings.Contains(out, "drain") || !strings.Contains(out, reason)) {
			err = fmt.Errorf("it is %s", out)
		}
		return err
	})
	r.scontrol(t, "update", "NodeName="+n.Name, "State=RESUME")
}

func prologFails(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Prolog.after", "rc=1")
	j := r.sbatch(t, long, ask, "-w", n.Name)
	r.drained(t, n, "Prolog error")
	r.unset(t, "Prolog.after")
	r.holds(t, j, 0, 10*time.Second)
	r.scancel(t, j)
}

func prologOverTime(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Prolog.before", "/bin/sleep 30")
	j := r.sbatch(t, long, ask, "-w", n.Name)
	r.drained(t, n, "Prolog error")
	r.unset(t, "Prolog.before")
	r.holds(t, j, 0, 10*time.Second)
	r.scancel(t, j)
}

// The lease that the controller has reserved outlives a Prolog that is longer than an owner's patience.
func prologSlow(t *testing.T, r *rig) {
	r.set(t, "Prolog.before", fmt.Sprintf("/bin/sleep %d", int(silence.Seconds())+3))
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask)
	r.seen(t, j, "Prolog", "", false, 1)
	before := r.holds(t, j, 1, 5*time.Second)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.oneLease(t, j, 1)
	if out := strings.TrimSpace(r.Output(lab.Alice, j)); len(before) == 1 && out != before[0].ID {
		t.Errorf("the job has lease %s, the controller reserved %s", out, before[0].ID)
	}
}

// Without a Prolog the first task's question gets the job its lease.
func prologLeftOut(t *testing.T, r *rig) {
	r.set(t, "Prolog.before", "skip=1")
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.oneLease(t, j, 1)
}

func prologRepeated(t *testing.T, r *rig) {
	again := "for i in 1 2 3; do /usr/bin/sluice prolog & done; wait"
	r.set(t, "Prolog.before", again)
	r.set(t, "Prolog.after", again)
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID; exec sleep 600", ask)
	r.state(t, j, 40*time.Second, "RUNNING")
	ls := r.holds(t, j, 1, 5*time.Second)
	r.until(t, 20*time.Second, "the job has its lease", func() error {
		if out := strings.TrimSpace(r.Output(lab.Alice, j)); len(ls) != 1 || out != ls[0].ID {
			return fmt.Errorf("it is %q, not %v", out, ls)
		}
		return nil
	})
	r.scancel(t, j)
}

// An Epilog that comes first ends the run: its Prolog is late, and the job is told so.
func epilogFirst(t *testing.T, r *rig) {
	r.set(t, "Prolog.before", "/usr/bin/sluice epilog")
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask)
	r.state(t, j, 40*time.Second, "COMPLETED", "FAILED")
	r.fit(t, r.Nodes[0])
}

func epilogFails(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Epilog.before", "skip=1")
	r.set(t, "Epilog.after", "rc=1")
	j := r.sbatch(t, "echo begun", ask, "-w", n.Name)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.drained(t, n, "Epilog error")
	r.holds(t, j, 0, 10*time.Second)
}

func epilogOverTime(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Epilog.before", "/bin/sleep 30")
	j := r.sbatch(t, "echo begun", ask, "-w", n.Name)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.drained(t, n, "Epilog error")
	r.holds(t, j, 0, 10*time.Second)
}

func epilogRepeated(t *testing.T, r *rig) {
	again := "for i in 1 2 3; do /usr/bin/sluice epilog & done; wait"
	r.set(t, "Epilog.before", again)
	r.set(t, "Epilog.after", again)
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.oneLease(t, j, 1)
}

func epilogLost(t *testing.T, r *rig) {
	r.set(t, "Epilog.before", "skip=1")
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.oneLease(t, j, 1)
	r.holds(t, j, 0, 10*time.Second)
}

func epilogCtldFails(t *testing.T, r *rig) {
	r.set(t, "EpilogSlurmctld.before", "skip=1")
	r.set(t, "EpilogSlurmctld.after", "rc=1")
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.oneLease(t, j, 1)
	r.holds(t, j, 0, 10*time.Second)
	r.fit(t, r.Nodes[0])
}

// Then the comparison of all leases with Slurm's jobs is what ends them.
func epilogsLost(t *testing.T, r *rig) {
	r.set(t, "Epilog.before", "skip=1")
	r.set(t, "EpilogSlurmctld.before", "skip=1")
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.oneLease(t, j, 1)
	r.holds(t, j, 0, 30*time.Second)
}

// fill takes all of the pool by something that Slurm does not know of, and gives it back by what it answers.
func (r *rig) fill(t *testing.T) func() {
	t.Helper()
	ctx, cancel := context.WithCancel(r.ctx)
	n := r.Nodes[1]
	cmd := n.Command(ctx, lab.Bob, "sluice", "run", "--fraction", "200", "--", "sleep", "600")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := func() {
		n.Signal("sleep", syscall.SIGTERM)
		_ = cmd.Wait()
		cancel()
	}
	r.until(t, 20*time.Second, "the pool is full", func() error {
		gpus, err := n.GPUs(r.ctx)
		for _, g := range gpus {
			if g.FreePercent != 0 {
				return fmt.Errorf("gpu %s has %d%%", g.UUID, g.FreePercent)
			}
		}
		return err
	})
	return done
}

// turnedAway waits until a job is back in the queue and says why. Its node is none the worse for it.
func (r *rig) turnedAway(t *testing.T, j string) {
	t.Helper()
	job := r.state(t, j, 30*time.Second, "PENDING")
	r.until(t, 10*time.Second, "the job says why", func() (err error) {
		if job, err = r.Job(r.ctx, j); err == nil && !strings.Contains(job["AdminComment"], "sluice: ") {
			err = fmt.Errorf("it says %q", job["AdminComment"])
		}
		return err
	})
	t.Logf("reason %s, AdminComment %q", job["Reason"], job["AdminComment"])
	r.fit(t, r.Nodes[0])
}

// Slurm says yes and the pool says no: the job goes back into the queue, says why, and the node stays up.
func noRoom(t *testing.T, r *rig) {
	free := r.fill(t)
	j := r.sbatch(t, long, ask)
	r.seen(t, j, "PrologSlurmctld", "", true, 1)
	r.turnedAway(t, j)
	if k := r.ran(j, "Prolog", ""); k != 0 {
		t.Errorf("%d Prologs of a job for which there was no room", k)
	}
	free()
	r.now(t, j)
	r.begun(t, j)
	r.holds(t, j, 1, 5*time.Second)
	r.scancel(t, j)
}

// The last task of an array has the array's number, by which Slurm's commands mean all of its tasks: only this one is
// put back, and only it says why.
func noRoomForTask(t *testing.T, r *rig) {
	j := r.sbatch(t, long, "--gres=rgpu:60", "-a1-3%2") // of two GPUs
	last, tasks := j+"_3", []string{}
	r.until(t, 40*time.Second, "two tasks run", func() error { return r.running(j, 2, &tasks) })
	r.scontrol(t, "update", "JobId="+j, "ArrayTaskThrottle=0")
	r.until(t, 40*time.Second, "the last task is put back", func() error {
		job, err := r.Job(r.ctx, last)
		if err == nil && (job["JobId"] != j || job["JobState"] != "PENDING" || !strings.Contains(job["AdminComment"], "sluice: requeued: ")) {
			err = fmt.Errorf("job %s is %s and says %q", job["JobId"], job["JobState"], job["AdminComment"])
		}
		return err
	})
	for _, task := range []string{j + "_1", j + "_2"} {
		if job := r.state(t, task, 10*time.Second, "RUNNING"); job["Restarts"] != "0" || strings.Contains(job["AdminComment"], "sluice") {
			t.Errorf("job %s has %s restarts and says %q", task, job["Restarts"], job["AdminComment"])
		}
	}
	r.scancel(t, j+"_1")
	nextSecond()
	r.scontrol(t, "update", "JobId="+last, "StartTime=now")
	r.state(t, last, 40*time.Second, "RUNNING")
	r.holds(t, j, 1, 5*time.Second)
	r.scancel(t, j)
}

func noRoomSrun(t *testing.T, r *rig) {
	free := r.fill(t)
	defer free()
	out, err := r.Ctl.Run(r.ctx, lab.Alice, "srun", ask, "echo", "began")
	if err == nil || strings.Contains(out, "began") {
		t.Errorf("srun without room: %v, %q", err, out)
	}
	t.Logf("srun says: %v", err)
	r.fit(t, r.Nodes[0])
}
