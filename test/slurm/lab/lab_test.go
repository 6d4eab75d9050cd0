package lab

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}

// TestLab brings a cluster up, runs a job, cuts a node's power and brings it back, and takes the cluster down:
// nothing of it is left.
func TestLab(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	before, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	l, err := Up(ctx, Options{NoSluice: true, Nodes: []NodeSpec{{}, {}}, Slurm: map[string]string{"SlurmdTimeout": "5"}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	}()
	run := func() {
		t.Helper()
		job, err := l.Sbatch(ctx, Alice, "srun hostname; id -un; cat /proc/sys/kernel/random/boot_id", "-N2")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.WaitJob(ctx, job, 60*time.Second, "COMPLETED"); err != nil {
			t.Fatalf("%v\n%s", err, l.Logs(20))
		}
		for _, want := range []string{l.Nodes[0].Name, l.Nodes[1].Name, "alice"} {
			if out := l.Output(Alice, job); !strings.Contains(out, want) {
				t.Errorf("no %s in:\n%s", want, out)
			}
		}
		if err := Until(ctx, 30*time.Second, "clean", func() error { return l.Clean(ctx) }); err != nil {
			t.Error(err)
		}
	}
	run()
	n := l.Nodes[1]
	first, err := n.Run(ctx, Root, "cat", "/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	init := n.init.PID
	if err := n.Crash(); err != nil {
		t.Fatal(err)
	}
	if startTime(init) != 0 || len(n.PIDs("")) != 0 {
		t.Errorf("node %s is still there", n.Name)
	}
	if err := n.Boot(ctx); err != nil {
		t.Fatal(err)
	}
	if err := n.StartDaemons(ctx); err != nil {
		t.Fatal(err)
	}
	if second, err := n.Run(ctx, Root, "cat", "/proc/sys/kernel/random/boot_id"); err != nil || second == first {
		t.Errorf("boot %s after %s, %v", second, first, err)
	}
	if err := l.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	run()

	// Another process finds the same cluster.
	again, err := Open(l.Options.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Clean(ctx); err != nil {
		t.Error(err)
	}
	inits := map[string]int{}
	for _, x := range l.all() {
		inits[x.Name] = x.init.PID
	}
	if err := again.Down(); err != nil {
		t.Fatal(err)
	}
	for name, pid := range inits {
		if startTime(pid) != 0 {
			t.Errorf("process %d of node %s is left", pid, name)
		}
		groups, _ := filepath.Glob("/sys/fs/cgroup/*/slurm_" + name)
		if len(groups) > 0 {
			t.Errorf("left: %v", groups)
		}
	}
	if _, err := os.Stat(l.Options.Dir); !os.IsNotExist(err) {
		t.Errorf("%s: %v", l.Options.Dir, err)
	}
	after, _ := os.ReadFile("/proc/self/mounts")
	if string(before) != string(after) {
		t.Errorf("mounts before:\n%s\nafter:\n%s", before, after)
	}
}

// TestControllerBoot has a cluster with accounting and a node in no partition. It becomes ready, and so it does after its controller's power was
// cut with the database's daemon on it.
func TestControllerBoot(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	l, err := Up(ctx, Options{NoSluice: true, Accounting: true, Nodes: []NodeSpec{{Name: "in"}, {Name: "out"}}, SlurmLines: []string{"PartitionName=main Nodes=in Default=YES State=UP"}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	}()
	// slurmctld 26.05 does not start after a power cut that came before it had saved its associations' usage once, as it does when it ends.
	if err := errors.Join(l.Ctl.Stop("slurmctld"), l.StartSlurmctld(ctx)); err != nil {
		t.Fatal(err)
	}
	if err := l.Ctl.Crash(); err != nil {
		t.Fatal(err)
	}
	if err := l.Ctl.Boot(ctx); err != nil {
		t.Fatal(err)
	}
	if err := l.StartController(ctx); err != nil {
		t.Fatal(err)
	}
	if err := l.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	job, err := l.Sbatch(ctx, Alice, "true")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.WaitJob(ctx, job, 60*time.Second, "COMPLETED"); err != nil {
		t.Errorf("%v\n%s", err, l.Logs(20))
	}
}
