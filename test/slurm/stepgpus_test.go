package slurm

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// devicesOf are the GPUs that a line "WHAT sees LIST of LIST" names; both lists must be the same.
func devicesOf(t *testing.T, out, what string) (all []string) {
	t.Helper()
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) == 5 && f[0] == what && f[1] == "sees" && f[2] == f[4] {
			all = append(all, strings.Split(f[2], ",")...)
		}
	}
	if len(all) == 0 {
		t.Errorf("%s sees no GPUs of its own:\n%s", what, out)
	}
	return all
}

// TestStepGPUs: a step of a job with several GPUs has whole GPUs by its own --gres, and other steps have others, over restarts of the daemons.
// It has them until it ends. What is no number of whole GPUs, is not there or is not free is refused; srun itself refuses more than the job has.
func TestStepGPUs(t *testing.T) {
	s := cluster(t)
	n := s.Nodes[2]
	steady, vecadd := s.program("steady"), s.program("vecadd")
	at := func(name string) string { return s.Path("home", "alice", name) } // a file that says how far the test is
	sees := func(what string) string {
		return "echo " + what + " sees $CUDA_VISIBLE_DEVICES of $SLUICE_STEP_DEVICES"
	}
	step := func(what, gres string) string {
		return fmt.Sprintf(`srun -n1 --overlap %s sh -c '%s; %s 5 & p=$!; while [ ! -e %s ]; do sleep 0.05; done; kill -TERM $p; wait $p' &
`, gres, sees(what), steady, at("gpus.go"))
	}
	for _, f := range []string{"gpus.go", "gpus.more", "gpus.told"} {
		_ = os.Remove(at(f))
		defer os.Remove(at(f))
	}
	job := s.sbatch(step("one", "--gres=rgpu:100")+step("two", "--gres=rgpu:200")+`
while [ ! -e `+at("gpus.more")+` ]; do sleep 0.05; done
srun -n1 --overlap --gres=rgpu:100 `+vecadd+`; echo more than is free: $?
srun -n1 --overlap --gres=rgpu:150 `+vecadd+`; echo no whole number: $?
srun -n1 --overlap --gres=rgpu:400 `+vecadd+`; echo more than the job has: $?
srun -n1 --overlap --gres=rgpu:100 --rgpu-mem=1G `+vecadd+`; echo with memory: $?
srun -n1 --overlap sh -c 'echo ${CUDA_VISIBLE_DEVICES-all}${SLUICE_STEP_DEVICES-all} && `+vecadd+`'; echo a step without: $?
srun -n1 --overlap --gres=rgpu:300 sh -c 'echo ${CUDA_VISIBLE_DEVICES-all}${SLUICE_STEP_DEVICES-all} && `+vecadd+`'; echo all by number: $?
touch `+at("gpus.told")+`
wait
echo second
for i in 1 2; do srun -n1 --overlap --gres=rgpu:200 sh -c '`+sees("again")+` && `+s.program("two_devices")+`'; echo one after another: $?; done
srun -n2 --overlap --gres=rgpu:200 --rgpu-bind=task sh -c 'echo task $SLURM_LOCALID sees $CUDA_VISIBLE_DEVICES of $SLUICE_STEP_DEVICES. && `+vecadd+`'; echo tasks: $?
srun -n1 --overlap --gres=rgpu:100 sh -c 'unset SLURM_CPU_BIND; srun -n1 --overlap sh -c "echo within: \${CUDA_VISIBLE_DEVICES-all}\${SLUICE_STEP_DEVICES-all}"'; echo a step within a step: $?
`, "-n2", "-N1", "--gres=rgpu:300", "-w", n.Name)
	s.until(waitLong, "both steps compute, and are listed", func() error {
		parts, without, err := s.partsOf(n, job)
		if err == nil && (len(parts) != 2 || without != 0 || parts[100].GPUs|parts[200].GPUs != 7 || parts[100].GPUs&parts[200].GPUs != 0) {
			err = fmt.Errorf("%+v, %d without: %s", parts, without, s.Output(lab.Alice, job))
		}
		return err
	})
	list, err := n.Run(s.ctx, lab.Alice, "sluice", "list", "--sessions")
	s.must(err)
	for _, x := range s.Nodes {
		s.must(x.Kill("sluiced"))
		s.must(x.StartSluiced(s.ctx))
	}
	s.must(os.WriteFile(at("gpus.more"), nil, 0o644))
	s.until(waitLong, "the script has tried", func() error { _, err := os.Stat(at("gpus.told")); return err })
	s.must(os.WriteFile(at("gpus.go"), nil, 0o644))
	out := s.done(job)
	first, second, _ := strings.Cut(out, "\nsecond\n")
	one, two := devicesOf(t, first, "one"), devicesOf(t, first, "two")
	if all := slices.Sorted(slices.Values(append(one, two...))); len(one) != 1 || !slices.Equal(all, []string{"0", "1", "2"}) {
		t.Errorf("steps have %v and %v", one, two)
	}
	contains(t, list, " GPU"+one[0]+" ", " GPU"+strings.Join(two, ",")+" ")
	contains(t, first, "other steps leave none (step ", "ask for a multiple of 100", "start it without --rgpu-mem", "allall\n")
	for _, what := range []string{"more than is free", "no whole number", "more than the job has", "with memory"} {
		if matches(first, "(?m)^"+what+": [1-9]") != 1 {
			t.Errorf("%s is not refused", what)
		}
	}
	for what, times := range map[string]int{"a step without": 1, "all by number": 1, "one after another": 2, "tasks": 1, "a step within a step": 1} {
		if matches(out, "(?m)^"+what+": 0$") != times {
			t.Errorf("%s fails", what)
		}
	}
	if again := devicesOf(t, second, "again"); len(again) != 4 {
		t.Errorf("steps one after another have %v", again)
	}
	own := strings.Split(strings.Join(devicesOf(t, second, "again")[:2], ","), ",")
	for i, d := range own {
		contains(t, second, fmt.Sprintf("task %d sees %s of %s.\n", i, d, strings.Join(own, ",")))
	}
	contains(t, second, "within: allall\n")
	if t.Failed() {
		t.Logf("all of it:\n%s\n%s", list, out)
	}
}
