package faults

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestDefaultFlags is the table without PrologFlags: a node's Prolog comes with its first step, if there is one.
func TestDefaultFlags(t *testing.T) {
	t.Parallel()
	all(t, site{flags: "none"}, []row{
		{"sbatch without step on its second node", noStepOnSecond},
		{"salloc without step", sallocNoStep},
		{"heterogeneous job without step", hetNoStep},
		{"step on all nodes", stepOnAll},
		{"requeue", requeue},
		{"scancel during Prolog", scancelInProlog},
		{"node away", nodeAway},
	})
}

func noStepOnSecond(t *testing.T, r *rig) {
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID; sleep 1", ask, "-N2")
	r.state(t, j, 40*time.Second, "COMPLETED")
	first, second := r.Nodes[0].Name, r.Nodes[1].Name
	r.seen(t, j, "Epilog", first, true, 1)
	r.seen(t, j, "Epilog", second, true, 1)
	if r.ran(j, "Prolog", first) != 1 || r.ran(j, "Prolog", second) != 0 {
		t.Errorf("Prologs: %d and %d", r.ran(j, "Prolog", first), r.ran(j, "Prolog", second))
	}
	r.oneLease(t, j, 1)
}

// salloc gives an allocation that nothing runs in yet.
func (r *rig) salloc(t *testing.T, args ...string) string {
	t.Helper()
	out, err := r.Ctl.Run(r.ctx, lab.Alice, append([]string{"sh", "-c", `exec salloc --no-shell "$@" 2>&1`, "sh"}, args...)...)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, id, _ := strings.Cut(out, "Granted job allocation ")
	id, _, _ = strings.Cut(id, "\n")
	return strings.TrimSpace(id)
}

func sallocNoStep(t *testing.T, r *rig) {
	j := r.salloc(t, ask, "-N2")
	r.holds(t, j, 2, 5*time.Second)
	r.scancel(t, j)
	for _, n := range r.Nodes[:2] {
		r.seen(t, j, "Epilog", n.Name, true, 1)
	}
	if k := r.ran(j, "Prolog", ""); k != 0 {
		t.Errorf("%d Prologs", k)
	}
}

func hetNoStep(t *testing.T, r *rig) {
	script := "#!/bin/sh\n#SBATCH --gres=rgpu:30 -N1\n#SBATCH hetjob\n#SBATCH --gres=rgpu:40 -N1\necho begun\nexec sleep 600\n"
	leases := 1
	j, err := r.Sbatch(r.ctx, lab.Alice, script)
	if err != nil && strings.Contains(err.Error(), "in the first component") {
		// Later releases take licences of the first component only, and sluice.lua says so.
		leases = 0
		j, err = r.Sbatch(r.ctx, lab.Alice, strings.Replace(script, "--gres=rgpu:40 ", "", 1))
	}
	if err != nil {
		t.Fatal(err)
	}
	r.begun(t, j)
	var k int
	if _, err := fmt.Sscan(j, &k); err != nil {
		t.Fatal(err)
	}
	second := fmt.Sprint(k + 1)
	r.holds(t, j, 1, 5*time.Second)
	r.holds(t, second, leases, 5*time.Second)
	r.scancel(t, j)
	r.seen(t, second, "Epilog", "", true, 1)
	r.seen(t, second, "EpilogSlurmctld", "", true, 1)
	if k := r.ran(second, "Prolog", ""); k != 0 {
		t.Errorf("%d Prologs of the second component", k)
	}
}

func stepOnAll(t *testing.T, r *rig) {
	j := r.sbatch(t, "srun -N2 sh -c 'echo $SLUICE_LEASE_ID'", ask, "-N2")
	r.state(t, j, 40*time.Second, "COMPLETED")
	if f := strings.Fields(r.Output(lab.Alice, j)); len(f) != 2 || f[0] == f[1] || len(f[0]) != 32 || len(f[1]) != 32 {
		t.Errorf("leases of the two nodes: %q", f)
	}
}

// TestNodesOnly is a site whose controller takes no part: no PrologSlurmctld, no EpilogSlurmctld, nobody in
// slurm.controllers. The nodes get leases, give them back, and find out what was lost, by themselves.
func TestNodesOnly(t *testing.T) {
	t.Parallel()
	all(t, site{flags: "Alloc,Contain", hooks: []string{"Prolog", "Epilog"}, more: lab.Options{Sluice: map[string]string{"slurm.controllers": "[]"}}}, []row{
		{"all nodes at allocation", func(t *testing.T, r *rig) {
			j := r.sbatch(t, long, ask, "-N2")
			r.begun(t, j)
			r.holds(t, j, 2, 10*time.Second)
			r.scancel(t, j)
		}},
		{"no room", noRoomNodes},
		{"no room for an array's last task", noRoomForTask},
		{"requeue", requeue},
		{"Epilog lost", epilogLostNodes},
		{"power cycle in Epilog", powerCycleInEpilog},
		{"node away", nodeAwayNodes},
		{"next job of a dead node's pool", nextJobNodes},
		{"slurmctld hangs in Prolog", ctldHangs},
	})
}

// Without PrologSlurmctld the node's daemon puts the job back into the queue; its script must not have begun.
func noRoomNodes(t *testing.T, r *rig) {
	free := r.fill(t)
	j := r.sbatch(t, long, ask)
	r.seen(t, j, "Prolog", "", true, 1)
	r.turnedAway(t, j)
	if out := r.Output(lab.Alice, j); strings.Contains(out, "begun") {
		t.Error("its script has begun")
	}
	free()
	r.now(t, j)
	r.begun(t, j)
	r.scancel(t, j)
}

// The steps' sockets tell the node that the job is over; a minute without any of them is long enough.
func epilogLostNodes(t *testing.T, r *rig) {
	r.set(t, "Epilog.before", "skip=1")
	j := r.sbatch(t, "echo begun; sleep 12", ask) // longer than the time between two looks
	r.begun(t, j)
	r.state(t, j, 40*time.Second, "COMPLETED")
	r.holds(t, j, 0, 100*time.Second)
}

func nodeAwayNodes(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, long, ask, "-w", n.Name, "--no-requeue")
	r.begun(t, j)
	r.crash(t, n)
	// Nobody tells the owners: that nothing is heard of the node is enough, before Slurm gives it up.
	r.holds(t, j, 0, slurmdSilent)
	r.state(t, j, 4*slurmdSilent, "NODE_FAIL")
	r.boot(t, n)
}

func nextJobNodes(t *testing.T, r *rig) {
	n := r.Nodes[0]
	a := r.sbatch(t, long, "--gres=rgpu:200", "-w", n.Name, "--no-requeue")
	r.begun(t, a)
	b := r.sbatch(t, long, "--gres=rgpu:200", "-w", r.Nodes[1].Name)
	r.crash(t, n)
	r.state(t, a, 4*slurmdSilent, "NODE_FAIL")
	r.begun(t, b)
	r.holds(t, b, 1, 5*time.Second)
	r.scancel(t, b)
	r.boot(t, n)
}

// TestRunInJob has the hooks within the job's own control group and step, which Slurm knows from 24.05 on.
func TestRunInJob(t *testing.T) {
	t.Parallel()
	flags := "Alloc,Contain,RunInJob"
	if v := release(t); v < "24.05" {
		t.Logf("Slurm %s has no PrologFlags=RunInJob", v)
		return
	}
	all(t, site{flags: flags}, []row{
		{"all nodes at allocation", allNodes},
		{"steps", steps},
		{"scancel during Prolog", scancelInProlog},
		{"requeue", requeue},
		{"stepd killed", stepdKilledRunInJob},
		{"node away", nodeAway},
	})
}

// The Epilog would have run in the step that was killed: Slurm waits for it until the administrator gives the node
// up. The licences are held as long, and so is the lease.
func stepdKilledRunInJob(t *testing.T, r *rig) {
	n := r.Nodes[0]
	j := r.sbatch(t, r.steady(), ask, "-w", n.Name, "--no-requeue")
	r.computes(t, j, 1)
	if err := n.Kill("slurmstepd"); err != nil {
		t.Fatal(err)
	}
	r.orphans(t, n)
	r.scancel(t, j)
	r.seen(t, j, "EpilogSlurmctld", "", true, 1)
	r.scontrol(t, "update", "NodeName="+n.Name, "State=DOWN", "Reason=test")
	r.holds(t, j, 0, 30*time.Second)
	_, _ = r.Scontrol(r.ctx, "update", "NodeName="+n.Name, "State=RESUME")
}

// The node has to ask slurmctld what the job wants. Its Prolog ends in time whatever comes of that.
func ctldHangs(t *testing.T, r *rig) {
	n := r.Nodes[0]
	r.set(t, "Prolog.before", "/bin/sleep 2")
	j := r.sbatch(t, "echo $SLUICE_LEASE_ID", ask, "-w", n.Name)
	r.seen(t, j, "Prolog", n.Name, false, 1)
	r.Ctl.Signal("slurmctld", syscall.SIGSTOP)
	began := time.Now()
	r.seen(t, j, "Prolog", n.Name, true, 1)
	t.Logf("its Prolog ended after %.1f s", time.Since(began).Seconds())
	r.Ctl.Signal("slurmctld", syscall.SIGCONT)
	r.state(t, j, time.Minute, "COMPLETED", "FAILED")
	t.Logf("the job says %q", r.Output(lab.Alice, j))
	r.fit(t, n)
}
