package slurm

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// stepPart is what `sluice list --json` says of a session's part.
type stepPart struct {
	Step    uint32 `json:"step"`
	Percent uint32 `json:"percent"`
	Mem     uint64 `json:"mem"`
	GPUs    uint32 `json:"gpus"`
}

// partsOf are the parts of a job's sessions, as its node lists them, in the order of their percent.
func (s *site) partsOf(n *lab.Node, job string) (parts map[uint32]stepPart, without int, _ error) {
	out, err := n.Run(s.ctx, lab.Alice, "sluice", "list", "--json")
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %s", err, out)
	}
	var all []struct {
		Request struct {
			Key struct{ Job, Node string } `json:"key"`
		} `json:"request"`
		Sessions []struct {
			Part *stepPart `json:"part"`
		} `json:"sessions"`
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return nil, 0, err
	}
	parts = map[uint32]stepPart{}
	for _, l := range all {
		if l.Request.Key.Job != job || l.Request.Key.Node != n.Name {
			continue
		}
		for _, x := range l.Sessions {
			if x.Part == nil {
				without++
			} else {
				parts[x.Part.Percent] = *x.Part
			}
		}
	}
	return parts, without, nil
}

// TestStepParts: a step has the part of its job's fraction that its own --gres asks for: side by side, one after another, with the memory
// that goes with it, over restarts of the daemons. What is not there is refused, and so is everything to a step with --gres=none.
func TestStepParts(t *testing.T) {
	s := cluster(t)
	n := s.Nodes[2]
	memcheck, steady, vecadd := s.program("memcheck"), s.program("steady"), s.program("vecadd")
	at := func(name string) string { return s.Path("home", "alice", name) } // a file that says how far the test is
	step := func(percent, mib int, gres string) string {
		return fmt.Sprintf(`srun -n1 --overlap %s sh -c '%s %d && echo cap %d; %s 5 & p=$!; while [ ! -e %s ]; do sleep 0.05; done; kill -TERM $p; wait $p; %[2]s %[3]d && echo cap again %[4]d' &
`, gres, memcheck, mib, percent, steady, at("parts.go"))
	}
	_ = os.Remove(at("parts.go"))
	_ = os.Remove(at("parts.more"))
	job := s.sbatch(step(10, 818, "--gres=rgpu:10")+step(40, 3276, "--gres=rgpu:40")+`
while [ ! -e `+at("parts.more")+` ]; do sleep 0.05; done
echo first; srun -n1 --overlap --gres=rgpu:1 `+vecadd+`; echo more than is left: $?
srun -n1 --overlap --gres=rgpu:60 `+vecadd+`; echo more than the job has: $?
`+vecadd+`; echo the script: $?
srun -n1 --overlap `+vecadd+`; echo a step without: $?
srun -n1 --overlap --gres=none sh -c 'echo none=$SLUICE_SOCKET$LD_LIBRARY_PATH.'; echo a step with none: $?
S=$SLUICE_SOCKET srun -n1 --overlap --gres=none sh -c 'SLUICE_SOCKET=$S LD_LIBRARY_PATH=/usr/lib/sluice `+vecadd+`'; echo with none by hand: $?
touch `+at("parts.told")+`
wait
echo second
for mib in 3276 3276; do srun -n1 --overlap --gres=rgpu:40 `+memcheck+` $mib; echo one after another: $?; done
srun -n1 --overlap --gres=rgpu:10 --rgpu-mem=1G `+memcheck+` 1024; echo with memory: $?
srun -n1 --overlap --rgpu-mem=1G `+memcheck+` 1024; echo with memory alone: $?
srun -n1 --overlap `+memcheck+` 4096; echo all: $?
srun -n1 --overlap --gres=rgpu:50 `+memcheck+` 4096; echo all by number: $?
srun -n1 --overlap --gres=rgpu:20 `+s.program("multi_process")+`; echo processes: $?
srun -n2 --overlap --gres=rgpu:20 --export=ALL sh -c '`+vecadd+` >/dev/null && echo task $SLURM_PROCID'; echo tasks: $?
srun -n1 --overlap --gres=rgpu:10 --export=NONE `+memcheck+` 818; echo without environment: $?
`, "-n2", "-N1", "--gres=rgpu:50", "-w", n.Name)
	s.until(waitLong, "both steps compute", func() error {
		parts, without, err := s.partsOf(n, job)
		if err == nil && (len(parts) != 2 || without != 0 || parts[10].Mem != 818<<20 || parts[40].Mem != 3276<<20 || matches(s.Output(lab.Alice, job), "(?m)^cap ") != 2) {
			err = fmt.Errorf("%+v, %d without: %s", parts, without, s.Output(lab.Alice, job))
		}
		return err
	})
	s.until(waitLong, "the schedule has all of the lease", func() error {
		l, err := s.sharingOf(n, lab.Alice, job)
		if err == nil && l.Shares[0].Due < 4998 {
			err = fmt.Errorf("%+v", l.Shares)
		}
		return err
	})
	// The daemons of the job's node and of the owners are replaced. Parts stay, those that are known to the node and those of sessions.
	for _, x := range s.Nodes {
		s.must(x.Kill("sluiced"))
		s.must(x.StartSluiced(s.ctx))
	}
	s.must(os.WriteFile(at("parts.more"), nil, 0o644))
	s.until(waitLong, "the script has tried", func() error { _, err := os.Stat(at("parts.told")); return err })
	s.must(os.WriteFile(at("parts.go"), nil, 0o644))
	out := s.done(job)
	// The last task of an array has the array's number, by which Slurm's commands mean all of its tasks.
	array := s.sbatch("srun -n1 --gres=rgpu:10 "+memcheck+" 818", "-a0-1", "--gres=rgpu:20", "-w", n.Name)
	for _, f := range []string{"parts.go", "parts.more", "parts.told"} {
		_ = os.Remove(at(f))
	}
	first, second, _ := strings.Cut(out, "\nsecond\n")
	contains(t, first+"\n", "cap 10\n", "cap 40\n", "cap again 10\n", "cap again 40\n", "none=.\n", "a step with none: 0\n", "asks for 1% and 80 MiB, and of its job's 50% and 4096 MiB on this node 0% and 2 MiB are left beside other steps (step ",
		": 10%, 818 MiB", ": 40%, 3276 MiB", "are those of its job's steps with a --gres of their own", "was started with --gres=none")
	for _, what := range []string{"more than is left", "more than the job has", "the script", "a step without", "with none by hand"} {
		if matches(first, "(?m)^"+what+": [1-9]") != 1 {
			t.Errorf("%s is not refused:\n%s", what, first)
		}
	}
	for what, times := range map[string]int{"one after another": 2, "with memory": 1, "all": 1, "all by number": 1, "processes": 1, "tasks": 1, "without environment": 1} {
		if matches(second, "(?m)^"+what+": 0$") != times {
			t.Errorf("%s:\n%s", what, second)
		}
	}
	for _, task := range []string{array + "_0", array + "_1"} {
		s.wait(task, "COMPLETED")
	}
	contains(t, second, "task 0\n", "task 1\n", "give --gres=rgpu:N too")
	if t.Failed() {
		t.Logf("all of it:\n%s", out)
	}
}
