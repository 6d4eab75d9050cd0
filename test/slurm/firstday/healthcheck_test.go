package firstday

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestHealthCheckProgram: slurmd runs ours. It drains a node for what has to be mended on that node, with the reason, and
// resumes it once that is mended. It drains no node for another's silence, ends no job, and leaves an administrator's drain alone.
func TestHealthCheckProgram(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	l, err := lab.Up(ctx, lab.Options{
		Name: "hc" + strconv.Itoa(os.Getpid()), Jobs: true, Nodes: []lab.NodeSpec{{GPUs: 1}, {}},
		Slurm: map[string]string{"HealthCheckProgram": "/usr/lib/sluice/slurm/healthcheck.sh", "HealthCheckInterval": "1", "HealthCheckNodeState": "ANY"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(l.Logs(10))
		}
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	own, job := l.Nodes[0], l.Nodes[1]
	on := func(n *lab.Node, argv ...string) string {
		t.Helper()
		out, err := n.Run(ctx, lab.Root, argv...)
		if err != nil {
			t.Fatalf("%v %s", err, out)
		}
		return out
	}
	// state is what Slurm says of a node, and the reason.
	state := func(n *lab.Node) string {
		return strings.TrimSpace(on(l.Ctl, "sinfo", "-h", "-N", "-n", n.Name, "-o", "%T %E"))
	}
	wait := func(n *lab.Node, begins, has string) {
		t.Helper()
		if err := lab.Until(ctx, 40*time.Second, n.Name+" is "+begins, func() error {
			if s := state(n); !strings.HasPrefix(s, begins) || !strings.Contains(s, has) {
				return fmt.Errorf("it is %s", s)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	// stays looks for some rounds of the program whether that is so.
	stays := func(n *lab.Node, want string) {
		t.Helper()
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
			if s := state(n); !strings.HasPrefix(s, want) {
				t.Fatalf("%s is %s, want %s", n.Name, s, want)
			}
		}
	}
	wait(own, "idle", "")
	wait(job, "idle", "")

	// A job that runs while its node's disk is full, and is mended, ends as it would have.
	id, err := l.Sbatch(ctx, lab.Alice, "sleep 6; echo ended well", "--gres=rgpu:10", "--nodelist="+job.Name)
	if err != nil {
		t.Fatal(err)
	}
	wait(job, "mix", "")
	on(job, "mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "day", "/var/lib/sluice")
	wait(job, "drain", "sluice: disk: state_dir /var/lib/sluice has 8 MiB free")
	t.Logf("drained: %s", state(job))
	if s := state(own); !strings.HasPrefix(s, "idle") && !strings.HasPrefix(s, "mix") {
		t.Errorf("the owner, where all is well, is %s", s)
	}
	on(job, "umount", "/var/lib/sluice")
	// Not by the reason: Slurm 24.11 keeps that of the last drain.
	if err := lab.Until(ctx, 40*time.Second, job.Name+" is resumed", func() error {
		if s := state(job); strings.HasPrefix(s, "drain") {
			return fmt.Errorf("it is %s", s)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if j, err := l.WaitJob(ctx, id, 30*time.Second, "COMPLETED"); err != nil {
		t.Errorf("%v %v", err, j)
	}
	wait(job, "idle", "")

	// An owner whose daemon has ended is unfit itself, and nobody else is.
	if err := own.Stop("sluiced"); err != nil {
		t.Fatal(err)
	}
	wait(own, "drained", "sluice: daemon: ")
	stays(job, "idle")
	if out, err := job.Run(ctx, lab.Root, "sluice", "health"); err == nil || !strings.Contains(out, "owner "+own.Name) {
		t.Errorf("health of the other node says nothing of the owner: %v %s", err, out)
	}
	if err := own.StartSluiced(ctx); err != nil {
		t.Fatal(err)
	}
	wait(own, "idle", "")

	// What an administrator has drained stays drained, for the administrator's reason.
	on(l.Ctl, "scontrol", "update", "nodename="+job.Name, "state=drain", "reason=ticket 4711")
	stays(job, "drained ticket 4711")
	on(job, "mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "day", "/var/lib/sluice")
	stays(job, "drained ticket 4711")
	if out, err := job.Run(ctx, lab.Root, "sluice", "health", "--node"); err == nil || !strings.HasPrefix(out, "disk: ") || !strings.Contains(out, "docs/health.md#disk") {
		t.Errorf("sluice health --node: %v %s", err, out)
	}
	on(job, "umount", "/var/lib/sluice")
	stays(job, "drained ticket 4711")
	on(l.Ctl, "scontrol", "update", "nodename="+job.Name, "state=resume")
	wait(job, "idle", "")
	if out := on(job, "sluice", "health", "--node"); out != "" {
		t.Errorf("sluice health --node of a good node: %s", out)
	}
}
