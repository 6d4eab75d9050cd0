package faults

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestDaemons has sluiced away at every moment of a job's life, on each of the nodes that have to do with it.
func TestDaemons(t *testing.T) {
	t.Parallel()
	all(t, site{flags: "Alloc,Contain"}, []row{
		{"host never there", hostNever},
		{"host killed in Prolog", hostKilledInProlog},
		{"host hangs in Prolog", hostHangs},
		{"host killed in the job", hostKilledInJob},
		{"host away at Epilog", hostAwayAtEpilog},
		{"owner away at Prolog", ownerAway},
		{"owner away at Epilog", ownerAwayAtEpilog},
		{"owner killed in the job", ownerKilledInJob},
		{"controller's away", ctlAway},
		{"controller's away at the end", ctlAwayAtEnd},
		{"stepd killed", stepdKilled},
		{"slurmd, stepd and sluiced killed", allKilled},
		{"power cut of the owner", ownerCrash},
		{"next job of a dead node's pool", nextJob},
		{"owner hangs at Prolog", ownerHangs},
		{"controller's hangs at Prolog", ctlHangs},
		{"power cut of the controller", ctlCrash},
	})
}

func (r *rig) killSluiced(t *testing.T, n *lab.Node) {
	t.Helper()
	if err := n.Kill("sluiced"); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) startSluiced(t *testing.T, n *lab.Node) {
	t.Helper()
	if err := n.StartSluiced(r.ctx); err != nil {
		t.Fatal(err)
	}
}

// program is a CUDA program by its path.
func (r *rig) program(name string) string {
	return r.Built("test/cuda-" + r.Options.CUDA + "/" + name)
}

// computes waits until a job's program has a session.
func (r *rig) computes(t *testing.T, job string, sessions int) {
	t.Helper()
	r.until(t, 30*time.Second, fmt.Sprintf("job %s has %d sessions", job, sessions), func() error {
		ls, err := r.Nodes[2].Leases(r.ctx)
		k := 0
		for _, l := range ls {
			if l.Request.Key.Job == job {
				k += len(l.Sessions)
			}
		}
		if err == nil && k != sessions {
			err = fmt.Errorf("it has %d: %s", k, r.Output(lab.Alice, job))
		}
		return err
	})
}

func hostNever(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.killSluiced(t, n)
	j := r.sbatch(t, "echo begun", ask, "-w", n.Name)
	r.state(t, j, time.Minute, "FAILED")
	if out := r.Output(lab.Alice, j); strings.Contains(out, "begun") || !strings.Contains(out, "sluice") {
		t.Errorf("the job says %q", out)
	}
	// A job that asks for no fraction does not notice.
	other := r.sbatch(t, "echo begun", "-w", n.Name)
	r.state(t, other, time.Minute, "COMPLETED")
	r.fit(t, n)
	r.startSluiced(t, n)
}

func hostKilledInProlog(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Prolog.before", "/bin/sleep 2")
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask, "-w", n.Name)
	r.seen(t, j, "Prolog", n.Name, false, 1)
	r.killSluiced(t, n)
	time.Sleep(4 * time.Second)
	r.startSluiced(t, n)
	r.state(t, j, time.Minute, "COMPLETED", "FAILED")
	r.fit(t, n)
	t.Logf("the job says %q", r.Output(lab.Alice, j))
}

func hostHangs(t *testing.T, r *rig) {
	n := r.Nodes[0]
	n.Signal("sluiced", syscall.SIGSTOP)
	began := time.Now()
	j := r.sbatch(t, "echo begun", ask, "-w", n.Name)
	r.state(t, j, 90*time.Second, "FAILED", "COMPLETED")
	if out := r.Output(lab.Alice, j); strings.Contains(out, "begun") {
		t.Errorf("the job says %q", out)
	}
	t.Logf("told after %.1f s: %s", time.Since(began).Seconds(), r.Output(lab.Alice, j))
	r.fit(t, n)
	n.Signal("sluiced", syscall.SIGCONT)
}

func (r *rig) steady() string { return "echo begun; exec " + r.program("steady") }

func hostKilledInJob(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, r.steady(), ask, "-w", n.Name)
	r.computes(t, j, 1)
	before := r.holds(t, j, 1, 5*time.Second)
	r.killSluiced(t, n)
	time.Sleep(silence + 2*time.Second)
	r.startSluiced(t, n)
	after := r.holds(t, j, 1, 5*time.Second)
	if len(before) == 1 && len(after) == 1 && before[0].ID != after[0].ID {
		t.Errorf("lease %s was %s", after[0].ID, before[0].ID)
	}
	r.computes(t, j, 1)
	r.scancel(t, j)
}

func hostAwayAtEpilog(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, r.steady(), ask, "-w", n.Name)
	r.computes(t, j, 1)
	r.killSluiced(t, n)
	r.scancel(t, j)
	r.seen(t, j, "Epilog", n.Name, true, 1)
	r.fit(t, n)
	r.startSluiced(t, n)
}

func ownerAway(t *testing.T, r *rig) {
	owner := r.Nodes[2]
	r.killSluiced(t, owner)
	j := r.sbatch(t, long, ask, "-w", r.Nodes[0].Name)
	r.seen(t, j, "PrologSlurmctld", "", true, 1)
	r.state(t, j, 20*time.Second, "PENDING")
	r.startSluiced(t, owner)
	r.until(t, 30*time.Second, "the pool is seen", func() error { return r.Ready(r.ctx) })
	r.now(t, j)
	r.begun(t, j)
	r.holds(t, j, 1, 5*time.Second)
	r.scancel(t, j)
}

func ownerAwayAtEpilog(t *testing.T, r *rig) {
	owner := r.Nodes[2]
	j := r.sbatch(t, long, ask, "-w", r.Nodes[0].Name)
	r.begun(t, j)
	r.killSluiced(t, owner)
	r.scancel(t, j)
	r.seen(t, j, "Epilog", "", true, 1)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
	r.startSluiced(t, owner)
	r.holds(t, j, 0, 20*time.Second)
}

func ownerKilledInJob(t *testing.T, r *rig) {
	owner := r.Nodes[2]
	j := r.sbatch(t, r.steady(), ask, "-w", r.Nodes[0].Name)
	r.computes(t, j, 1)
	r.killSluiced(t, owner)
	time.Sleep(silence + 2*time.Second)
	r.startSluiced(t, owner)
	r.computes(t, j, 1)
	r.scancel(t, j)
	r.state(t, j, 20*time.Second, "CANCELLED")
}

// Without the controller's daemon each node gets its lease by itself.
func ctlAway(t *testing.T, r *rig) {
	r.killSluiced(t, r.Ctl)
	j := r.sbatch(t, "srun sh -c 'echo $SLUICE_LEASE_ID'", ask, "-N2")
	r.state(t, j, time.Minute, "COMPLETED")
	if f := strings.Fields(r.Output(lab.Alice, j)); len(f) != 2 || f[0] == f[1] || len(f[0]) != 32 {
		t.Errorf("leases %q", f)
	}
	r.startSluiced(t, r.Ctl)
}

func ctlAwayAtEnd(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, long, ask, "-w", n.Name, "--no-requeue")
	r.begun(t, j)
	r.killSluiced(t, r.Ctl)
	// Nobody says that it ended: no Epilog of a dead node, and no daemon behind EpilogSlurmctld.
	r.crash(t, n)
	r.state(t, j, 4*slurmdSilent, "NODE_FAIL")
	r.holds(t, j, 0, silence)
	r.startSluiced(t, r.Ctl)
	r.boot(t, n)
}

func stepdKilled(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, r.steady(), ask, "-w", n.Name, "--no-requeue")
	r.computes(t, j, 1)
	if err := n.Kill("slurmstepd"); err != nil {
		t.Fatal(err)
	}
	// Slurm finds out at its next look at the node, which scancel does not wait for.
	r.scancel(t, j)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
	r.computes(t, j, 0)
	r.orphans(t, n)
}

// orphans ends what slurmstepd can no longer end, as an administrator or a reboot would.
func (r *rig) orphans(t *testing.T, n *lab.Node) {
	t.Helper()
	for _, name := range []string{"steady", "sleep", "slurm_script"} {
		if err := n.Kill(name); err != nil {
			t.Error(err)
		}
	}
}

func allKilled(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, r.steady(), ask, "-w", n.Name, "--no-requeue")
	r.computes(t, j, 1)
	r.killSlurmd(t, n)
	if err := n.Kill("slurmstepd"); err != nil {
		t.Fatal(err)
	}
	r.killSluiced(t, n)
	// The program lives on, of nobody's knowledge, until Slurm says that the job has ended.
	r.state(t, j, 4*slurmdSilent, "NODE_FAIL")
	r.computes(t, j, 0)
	r.holds(t, j, 0, 5*time.Second)
	r.orphans(t, n)
	if err := n.StartDaemons(r.ctx); err != nil {
		t.Fatal(err)
	}
}

// A job whose GPU's node is gone waits for it, in case it is the network. When the node is back without the session the job
// cannot go on, says why, and must not stand in the way afterwards.
func ownerCrash(t *testing.T, r *rig) {
	n, owner := r.Nodes[0], r.Nodes[2]
	j := r.sbatch(t, r.steady(), ask, "-w", n.Name)
	r.computes(t, j, 1)
	r.crash(t, owner)
	r.until(t, 20*time.Second, "the job says that its connection is lost", func() error {
		if out := r.Output(lab.Alice, j); !strings.Contains(out, "lost (") || !strings.Contains(out, "trying again for up to 5m") {
			return fmt.Errorf("it says %q", out)
		}
		return nil
	})
	r.boot(t, owner)
	r.state(t, j, time.Minute, "FAILED")
	if out := r.Output(lab.Alice, j); !strings.Contains(out, "was lost, and the session has ended") {
		t.Errorf("the job says %q", out)
	}
	r.holds(t, j, 0, 20*time.Second)
	// What its session counted was in the owner's memory.
	for command, want := range map[string]string{"explain": "not known: counts were lost with the reboot of " + owner.Name, "report": " lost 1\nverdict: what the job used is not known: "} {
		r.until(t, 20*time.Second, "sluice "+command+" knows that counts were lost", func() error {
			out, err := r.Ctl.Run(r.ctx, lab.Alice, "sluice", command, j)
			if err == nil && (!strings.Contains(out, want) || strings.Contains(out, "no program")) {
				err = fmt.Errorf("it says %q", out)
			}
			return err
		})
	}
}

// The licences of a dead node's job are given to the next one at once: by then its lease must have ended.
func nextJob(t *testing.T, r *rig) {
	n := r.Nodes[0]
	a := r.sbatch(t, long, "--gres=rgpu:200", "-w", n.Name, "--no-requeue")
	r.begun(t, a)
	b := r.sbatch(t, long, "--gres=rgpu:200", "-w", r.Nodes[1].Name)
	if j := r.state(t, b, 10*time.Second, "PENDING"); j["Reason"] != "Licenses" && j["Reason"] != "None" && j["Reason"] != "Priority" {
		t.Errorf("the second waits for %s", j["Reason"])
	}
	r.crash(t, n)
	r.state(t, a, 4*slurmdSilent, "NODE_FAIL")
	failed := time.Now()
	r.begun(t, b)
	t.Logf("the second job began %.1f s after the first was given up", time.Since(failed).Seconds())
	if k := r.ran(b, "PrologSlurmctld", ""); k != 1 {
		t.Errorf("it took %d tries", k)
	}
	r.holds(t, b, 1, time.Second)
	r.scancel(t, b)
	r.boot(t, n)
}

func ownerHangs(t *testing.T, r *rig) {
	owner := r.Nodes[2]
	owner.Signal("sluiced", syscall.SIGSTOP)
	j := r.sbatch(t, long, ask, "-w", r.Nodes[0].Name)
	r.seen(t, j, "PrologSlurmctld", "", true, 1)
	r.state(t, j, 20*time.Second, "PENDING")
	r.fit(t, r.Nodes[0])
	owner.Signal("sluiced", syscall.SIGCONT)
	r.now(t, j)
	r.begun(t, j)
	r.holds(t, j, 1, 5*time.Second)
	r.scancel(t, j)
}

func ctlHangs(t *testing.T, r *rig) {
	r.Ctl.Signal("sluiced", syscall.SIGSTOP)
	began := time.Now()
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask)
	r.state(t, j, 90*time.Second, "COMPLETED")
	t.Logf("it ended after %.1f s", time.Since(began).Seconds())
	r.oneLease(t, j, 1)
	r.Ctl.Signal("sluiced", syscall.SIGCONT)
}

// The nodes and the owners go on without it, for as long as they like.
func ctlCrash(t *testing.T, r *rig) {
	j := r.sbatch(t, r.steady(), ask, "-w", r.Nodes[0].Name)
	r.computes(t, j, 1)
	running := time.Now()
	r.scontrol(t, "update", "JobId="+j, "Comment=runs") // something to save
	r.saved(t, running)
	r.crash(t, r.Ctl)
	time.Sleep(silence + 2*time.Second)
	r.computes(t, j, 1)
	if err := r.Ctl.Boot(r.ctx); err != nil {
		t.Fatal(err)
	}
	if err := r.StartController(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.state(t, j, 30*time.Second, "RUNNING")
	r.computes(t, j, 1)
	r.scancel(t, j)
	r.state(t, j, 30*time.Second, "CANCELLED")
}
