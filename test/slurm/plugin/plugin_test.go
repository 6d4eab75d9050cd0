// Package plugin tests the SPANK plug-in in a real Slurm: as it is built for one release, as a wrong one that
// Slurm refuses, with its options in every place, and in steps of every sort.
package plugin

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

const (
	library = "/usr/lib/sluice/slurm/spank_sluice.so"
	stack   = "plugstack.conf.d/sluice.conf"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// up is a cluster of two nodes, of which the first owns a GPU. Its tests must leave it clean.
func up(t *testing.T, o lab.Options) (*lab.Lab, context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	o.Jobs, o.Nodes = true, []lab.NodeSpec{{GPUs: 2}, {}}
	o.Slurm = map[string]string{"LaunchParameters": "use_interactive_step"}
	l, err := lab.Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Until(ctx, time.Minute, "the cluster is clean", func() error { return l.Clean(ctx) }); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("%s", l.Logs(15))
		}
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l, ctx
}

// done runs a batch script to its end, and answers what it printed and whether it ended well.
func done(ctx context.Context, t *testing.T, l *lab.Lab, script string, args ...string) (string, bool) {
	t.Helper()
	job, err := l.Sbatch(ctx, lab.Alice, script, args...)
	if err != nil {
		t.Fatal(err)
	}
	j, err := l.WaitJob(ctx, job, time.Minute, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
	if err != nil {
		t.Fatalf("%v: %s", err, l.Output(lab.Alice, job))
	}
	return l.Output(lab.Alice, job), j["JobState"] == "COMPLETED"
}

// run runs a program as alice on the controller, and answers all that it said.
func run(ctx context.Context, l *lab.Lab, argv ...string) (string, error) {
	out, err := l.Ctl.Command(ctx, lab.Alice, argv...).CombinedOutput()
	return string(out), err
}

// build makes the plug-in for the release whose headers are under prefix, and answers its path.
func build(t *testing.T, prefix string) string {
	t.Helper()
	out := t.TempDir()
	cmd := exec.Command("make", "-s", "-f", "spank/build.mk", "spank-release", "CC=gcc", "SLURM_PREFIX="+prefix, "SPANK_OUT="+out)
	cmd.Dir = "../../.."
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	so, err := filepath.Glob(filepath.Join(out, "*", "spank_sluice.so"))
	if err != nil || len(so) != 1 {
		t.Fatalf("%v, %v", so, err)
	}
	return so[0]
}

// prefix is where the headers of the Slurm under test are.
func prefix() string { return filepath.Join("/", os.Getenv("SLUICE_SLURM_ROOT"), "usr") }

// TestUniversal: the one plug-in for all releases, and its options in all places.
func TestUniversal(t *testing.T) {
	l, ctx := up(t, lab.Options{Name: "plugu"})
	vecadd := l.Built("test/cuda-" + l.Options.CUDA + "/vecadd")

	t.Run("options", func(t *testing.T) {
		out, ok := done(ctx, t, l, "#SBATCH --rgpu-mem=1g --rgpu-spread\n"+vecadd+"\nsrun "+vecadd+"\nsrun --rgpu-mem=2G /bin/true\nsrun --rgpu-policy=fixed /bin/true", "--gres=rgpu:30", "--export=NIL")
		if !ok || strings.Count(out, "PASS") != 2 {
			t.Errorf("%s", out)
		}
		for _, text := range []string{"sluice: --rgpu-policy has no effect on a step", "--rgpu-mem=2G of a step is for a step with a part of its job's fraction; give --gres=rgpu:N too, with N below 30"} {
			if n := strings.Count(out, text); n != 1 {
				t.Errorf("%q is said %d times:\n%s", text, n, out)
			}
		}
		if strings.Contains(out, "--rgpu-spread") {
			t.Errorf("a step is told of what is its job's:\n%s", out)
		}
	})
	t.Run("bind", func(t *testing.T) {
		show := `sh -c 'echo task $SLURM_LOCALID sees ${CUDA_VISIBLE_DEVICES-all} of $SLUICE_GPUS'`
		sees := func(out string, of string, want ...string) {
			t.Helper()
			for task, w := range want {
				if line := fmt.Sprintf("task %d sees %s of %s\n", task, w, of); strings.Count(out, line) != 1 {
					t.Errorf("no line %q in:\n%s", line, out)
				}
			}
		}
		// Given to a job it is for all of its steps, not for the script itself; a step may say otherwise.
		script := "echo script sees ${CUDA_VISIBLE_DEVICES-all}\nsrun " + show + "\necho next\nsrun --rgpu-bind=all " + show + "\necho next\nSLURM_RGPU_BIND=all srun " + show +
			"\necho next\nSLURM_RGPU_BIND=all srun --rgpu-bind=task " + show +
			"\necho next\nsrun -n1 " + vecadd
		out, ok := done(ctx, t, l, script, "--gres=rgpu:200", "-n2", "-N1", "--rgpu-bind=task")
		parts := strings.Split(out, "next\n")
		if !ok || len(parts) != 5 || !strings.Contains(parts[0], "script sees all\n") || !strings.Contains(parts[4], "PASS") {
			t.Fatalf("%s", out)
		}
		sees(parts[0], "2", "0", "1")
		sees(parts[1], "2", "all", "all")
		sees(parts[2], "2", "all", "all")
		sees(parts[3], "2", "0", "1")
		// Given to a step alone.
		out, ok = done(ctx, t, l, "srun "+show+"\necho next\nsrun --rgpu-bind=task "+show, "--gres=rgpu:200", "-n2", "-N1")
		if parts = strings.Split(out, "next\n"); !ok || len(parts) != 2 {
			t.Fatalf("%s", out)
		}
		sees(parts[0], "2", "all", "all")
		sees(parts[1], "2", "0", "1")
		// srun as a job of its own, by option and by variable.
		out, err := run(ctx, l, "srun", "--gres=rgpu:200", "-n2", "-N1", "--rgpu-bind=task", "sh", "-c", `echo task $SLURM_LOCALID sees $CUDA_VISIBLE_DEVICES of $SLUICE_GPUS`)
		if err != nil {
			t.Error(err)
		}
		sees(out, "2", "0", "1")
		out, err = run(ctx, l, "env", "SLURM_RGPU_BIND=task", "srun", "--gres=rgpu:200", "-n2", "-N1", "sh", "-c", `echo task $SLURM_LOCALID sees $CUDA_VISIBLE_DEVICES of $SLUICE_GPUS`)
		if err != nil {
			t.Error(err)
		}
		sees(out, "2", "0", "1")
		if out, err := run(ctx, l, "srun", "--gres=rgpu:200", "--rgpu-bind=gpu", "true"); err == nil || !strings.Contains(out, "one of all, task") {
			t.Errorf("%v: %s", err, out)
		}
	})
	t.Run("bad options", func(t *testing.T) {
		for _, c := range [][2]string{{"--rgpu-mem=20", "from 2M to 16T"}, {"--rgpu-policy=greedy", "one of best-effort, equal, equal-lend, fixed, fixed-lend"}, {"--rgpu-pool=a/b", "a pool's name"}} {
			for _, tool := range [][]string{{"sbatch", "--wrap", "true"}, {"srun", "true"}, {"salloc", "true"}} {
				argv := append([]string{tool[0], "--gres=rgpu:30", c[0]}, tool[1:]...)
				if out, err := run(ctx, l, argv...); err == nil || !strings.Contains(out, c[1]) {
					t.Errorf("%v: %v, %s", argv, err, out)
				}
			}
		}
	})
	t.Run("interactive step", func(t *testing.T) {
		cmd := l.Ctl.Command(ctx, lab.Alice, "script", "-qec", "salloc --gres=rgpu:30", "/dev/null")
		cmd.Stdin = strings.NewReader("echo step=$SLURM_STEP_ID; " + vecadd + "; exit\n")
		out, err := cmd.CombinedOutput()
		if err != nil || !regexp.MustCompile(`step=(4294967290|-6)\b`).Match(out) || !strings.Contains(string(out), "PASS") {
			t.Errorf("%v: %s", err, out)
		}
	})
	t.Run("tasks", func(t *testing.T) {
		// Of a refused step each node says once why.
		node := l.Nodes[1]
		if err := node.Kill("sluiced"); err != nil {
			t.Fatal(err)
		}
		out, err := run(ctx, l, "srun", "-w", node.Name, "-n2", "--gres=rgpu:30", "true")
		if err == nil || strings.Count(out, "asks for a fraction of a GPU, and sluiced does not answer") != 1 {
			t.Errorf("%v: %s", err, out)
		}
		if out, err := run(ctx, l, "srun", "-w", node.Name, "-n2", "sh", "-c", "env"); err != nil || strings.Contains(strings.ToLower(out), "sluice") {
			t.Errorf("who does not ask: %v: %s", err, out)
		}
		if err := node.StartSluiced(ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// TestRelease: the plug-in that is built from this release's header.
func TestRelease(t *testing.T) {
	l, ctx := up(t, lab.Options{Name: "plugr", Install: map[string]string{library: build(t, prefix())}, Etc: map[string]string{stack: "required " + library + " socket=/run/sluice/job.sock\n"}})
	out, ok := done(ctx, t, l, l.Built("test/cuda-"+l.Options.CUDA+"/vecadd"), "--gres=rgpu:30", "--rgpu-mem=1G")
	if !ok || !strings.Contains(out, "PASS") {
		t.Errorf("%s", out)
	}
}

// TestWrongRelease: Slurm refuses a plug-in of another release. As it is optional, nodes and jobs go on, and programs
// without a fraction do not notice.
func TestWrongRelease(t *testing.T) {
	old := t.TempDir()
	if err := os.CopyFS(filepath.Join(old, "include", "slurm"), os.DirFS(filepath.Join(prefix(), "include", "slurm"))); err != nil {
		t.Fatal(err)
	}
	version := filepath.Join(old, "include", "slurm", "slurm_version.h")
	text, err := os.ReadFile(version)
	if err != nil {
		t.Fatal(err)
	}
	text = regexp.MustCompile(`(#define SLURM_VERSION_NUMBER\s+)0x[0-9a-f]+`).ReplaceAll(text, []byte("${1}0x150800"))
	if err := os.WriteFile(version, text, 0o644); err != nil {
		t.Fatal(err)
	}
	l, ctx := up(t, lab.Options{Name: "plugw", Install: map[string]string{library: build(t, old)}})
	if out, err := run(ctx, l, "srun", "-N2", "true"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := run(ctx, l, "srun", "--rgpu-mem=1G", "true"); err == nil || !strings.Contains(out, "rgpu-mem") {
		t.Errorf("an option of nobody's: %v: %s", err, out)
	}
}

// TestArguments: mistakes in plugstack.conf are in slurmd's log, and disturb nobody.
func TestArguments(t *testing.T) {
	l, ctx := up(t, lab.Options{Name: "pluga", Etc: map[string]string{stack: "optional " + library + " socket=job.sock colour=blue\n"}})
	out, err := run(ctx, l, "srun", "--gres=rgpu:30", l.Built("test/cuda-"+l.Options.CUDA+"/vecadd"))
	if err != nil || !strings.Contains(out, "PASS") || strings.Contains(out, "plugstack") {
		t.Errorf("%v: %s", err, out)
	}
	log, err := os.ReadFile(filepath.Join(l.Nodes[0].Dir, "log", "slurmd.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"unknown argument colour=blue", "socket=job.sock: want an absolute path"} {
		if !strings.Contains(string(log), want) {
			t.Error(fmt.Errorf("slurmd's log lacks %q", want))
		}
	}
}
