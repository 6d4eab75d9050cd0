package jobnode

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs/jobstest"
	"github.com/sluice-hpc/sluice/daemon/internal/jobsock"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

func gres(n uint64) []slurm.Gres { return []slurm.Gres{{Name: "rgpu", Count: n}} }

// stepRig is a node with a job of 50 percent and 50 GiB, whose steps have these requests.
func stepRig(t *testing.T, steps map[string]slurm.Step) *rig {
	t.Helper()
	r := newRig(t, jobstest.NewSite(), "n1")
	r.Slurm.Set(jobstest.Job("7"))
	r.Slurm.Conf["ProctrackType"] = "proctrack/cgroup"
	for n, s := range steps {
		r.Slurm.Steps["7."+n] = s
	}
	r.prolog(jobstest.RunOf(jobstest.Job("7")), rpc.JobGranted)
	if err := os.MkdirAll(filepath.Join(r.Dir, "n1"), 0o755); err != nil {
		t.Fatal(err)
	}
	return r
}

// here makes, or removes, the socket of a step's slurmstepd.
func (r *rig) here(step string, is bool) {
	r.t.Helper()
	path := filepath.Join(r.Dir, "n1", "n1_7."+step)
	err := os.Remove(path)
	if is {
		err = os.WriteFile(path, nil, 0o600)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// What a step may have of its job's fraction follows from its own --gres, as slurmctld has it.
func TestStep(t *testing.T) {
	r := stepRig(t, map[string]slurm.Step{
		"0": {Gres: gres(10)}, "1": {Gres: gres(50)}, "2": {}, "3": {Gres: gres(60)}, "4": {Gres: gres(0)},
		"5": {Gres: gres(10), Others: []string{"gres:rgpu:5"}}, "6": {Gres: append(gres(5), slurm.Gres{Name: "rgpu", Type: "h200", Count: 6})},
		"7": {Gres: []slurm.Gres{{Name: "rgpu", Count: 1, Bare: true}}},
	})
	for _, c := range []struct {
		step string
		own  bool
		mem  string
		part *lease.Part // nil: all
		text string
	}{
		{step: "0"}, // srun was given no gres: what slurmctld has does not count
		{"0", true, "", &lease.Part{Percent: 10, Mem: 10 << 30}, ""},
		{"0", true, "5G", &lease.Part{Percent: 10, Mem: 5 << 30}, ""},
		{"0", true, "51G", nil, "its job has 51200 MiB"},
		{"0", true, "lots", nil, "is no size"},
		{"1", true, "", nil, ""},
		{"1", true, "5G", nil, "with N below 50"},
		{"2", true, "", &lease.Part{Step: 2}, ""},
		{"3", true, "", nil, "its job has 50 on this node; ask for at most 50"},
		{"4", true, "", &lease.Part{Step: 4}, ""},
		{"5", true, "", nil, "by step, socket or task is not supported"},
		{"6", true, "", &lease.Part{Step: 6, Percent: 11, Mem: 11 << 30}, ""},
		{"7", true, "", nil, "does not say how much; write --gres=rgpu:PERCENT"},
		{"4294967291", true, "", nil, ""}, // the batch script
	} {
		r.Host.Parts = nil
		ops, err := r.StepEnv(t.Context(), user, "7", jobsock.Step{ID: c.step, Own: c.own, Mem: c.mem})
		switch {
		case c.text != "":
			if lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), c.text) || len(r.Host.Parts) != 0 {
				t.Errorf("%+v: %v, %v", c, err, r.Host.Parts)
			}
		case err != nil:
			t.Errorf("%+v: %v", c, err)
		case c.part == nil:
			if len(ops) == 0 || len(r.Host.Parts) != 0 {
				t.Errorf("%+v: %v, %v", c, ops, r.Host.Parts)
			}
		default:
			if (len(ops) == 0) != (c.part.Percent == 0) || len(r.Host.Parts) != 1 || r.Host.Parts[0] != *c.part {
				t.Errorf("%+v: %v, %v", c, ops, r.Host.Parts)
			}
		}
	}
	// What is not known is no answer: the plug-in says so, and no program starts.
	if _, err := r.StepEnv(t.Context(), user, "7", jobsock.Step{ID: "9", Own: true}); err == nil || errors.As(err, new(*lease.Error)) {
		t.Errorf("a step that slurmctld does not know: %v", err)
	}
	r.Slurm.Conf["ProctrackType"] = "proctrack/linuxproc"
	r.restart("boot-1")
	if _, err := r.StepEnv(t.Context(), user, "7", jobsock.Step{ID: "0", Own: true}); lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), "ProctrackType=proctrack/linuxproc") {
		t.Errorf("without control groups: %v", err)
	}
	if _, err := r.StepEnv(t.Context(), nobody, "7", jobsock.Step{ID: "0", Own: true}); lease.CodeOf(err) != lease.Denied {
		t.Errorf("another user: %v", err)
	}
	// A job that holds licences without a gres: its steps have no gres to inherit, and all of it.
	j := jobstest.Job("7")
	j.Gres = nil
	r.Slurm.Set(j)
	if ops, err := r.StepEnv(t.Context(), user, "7", jobsock.Step{ID: "2", Own: true}); err != nil || len(ops) == 0 {
		t.Errorf("by licences alone: %v, %v", ops, err)
	}
}

// Questions about jobs that strangers have made up, and that slurmctld is slow to answer, keep nobody else's from it.
func TestStrangersAsk(t *testing.T) {
	r := stepRig(t, map[string]slurm.Step{"0": {Gres: gres(10)}})
	for range cap(r.askOther) {
		r.askOther <- struct{}{} // one that waits for slurmctld
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := r.StepEnv(ctx, user, "7", jobsock.Step{ID: "0", Own: true}); err != nil {
		t.Errorf("a step of a job with a lease: %v", err)
	}
	if _, err := r.Env(ctx, user, "8"); err == nil || ctx.Err() != nil {
		t.Errorf("a job that does not exist, for a user with another one here: %v", err)
	}
	short, end := context.WithTimeout(ctx, 10*time.Millisecond)
	defer end()
	if _, err := r.Env(short, nobody, "8"); err == nil || !strings.Contains(err.Error(), "too many jobs are being looked up") {
		t.Errorf("another stranger: %v", err)
	}
}

// A step waits for a moment for one that is ending, and is refused where the other one stays.
func TestStepAfterStep(t *testing.T) {
	r := stepRig(t, map[string]slurm.Step{"0": {Gres: gres(40)}, "1": {Gres: gres(40)}, "2": {Gres: gres(10)}})
	begin := func(ctx context.Context, step string) error {
		_, err := r.StepEnv(ctx, user, "7", jobsock.Step{ID: step, Own: true})
		return err
	}
	r.here("0", true)
	if err := begin(t.Context(), "0"); err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(t.Context(), time.Second) // the test does not wait for all of leaveTime
	defer cancel()
	if err := begin(soon, "1"); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "10% left") {
		t.Errorf("beside it: %v", err)
	}
	if err := begin(t.Context(), "2"); err != nil {
		t.Errorf("what is left: %v", err)
	}
	time.AfterFunc(50*time.Millisecond, func() { r.here("0", false) })
	if err := begin(t.Context(), "1"); err != nil {
		t.Errorf("after it: %v", err)
	}
	// Parts of steps that are gone are dropped.
	r.here("1", true)
	r.Look(t.Context(), time.Now())
	if len(r.Host.Parts) != 1 || r.Host.Parts[0].Step != 1 {
		t.Errorf("%v", r.Host.Parts)
	}
}

// severalRig is a node with a job of several GPUs, whose steps have these requests.
func severalRig(t *testing.T, percent uint64, steps map[string]uint64) *rig {
	t.Helper()
	r := newRig(t, jobstest.NewSite(), "n1")
	j := jobstest.Job("7")
	j.Gres, j.Licences = gres(percent), slurm.Counts{"rgpu": percent}
	r.Slurm.Set(j)
	for n, p := range steps {
		r.Slurm.Steps["7."+n] = slurm.Step{Gres: gres(p)}
	}
	r.prolog(jobstest.RunOf(j), rpc.JobGranted)
	if err := os.MkdirAll(filepath.Join(r.Dir, "n1"), 0o755); err != nil {
		t.Fatal(err)
	}
	return r
}

// variable is what a step's programs are told, "-" if nothing.
func variable(ops []rpc.EnvOp, name string) string {
	for _, op := range ops {
		if op.Name == name {
			return op.Value
		}
	}
	return "-"
}

// A step of a job with several GPUs on the node has whole ones of them. No control group has to show its processes.
func TestStepOfSeveral(t *testing.T) {
	for _, c := range []struct {
		job, step uint64
		mem       string
		devices   string // "-": all of the job's
		text      string
	}{
		{400, 100, "", "0", ""},
		{400, 300, "", "0,1,2", ""},
		{400, 400, "", "-", ""},
		{250, 200, "", "0,1", ""},
		{250, 250, "", "-", ""},
		{150, 100, "", "0", ""},
		{400, 150, "", "", "--gres=rgpu:150 of step 0: its job has 4 GPUs on this node, and a step has whole ones of them; ask for a multiple of 100"},
		{400, 10, "", "", "ask for a multiple of 100"},
		{250, 50, "", "", "ask for a multiple of 100"},
		{400, 500, "", "", "--gres=rgpu:500 of step 0: its job has 4 whole GPUs on this node; ask for at most 400"},
		{250, 300, "", "", "its job has 2 whole GPUs on this node; ask for at most 200"},
		{400, 1 << 40, "", "", "ask for at most 400"},
		{400, 100, "5G", "", "--rgpu-mem=5G of step 0: its job has 4 GPUs on this node, and a step has all memory of those that it has; start it without --rgpu-mem"},
		{400, 400, "5G", "", "start it without --rgpu-mem"},
		{400, 150, "lots", "", "start it without --rgpu-mem"},
	} {
		r := severalRig(t, c.job, map[string]uint64{"0": c.step})
		r.Slurm.Conf["ProctrackType"] = "proctrack/linuxproc"
		ops, err := r.StepEnv(t.Context(), user, "7", jobsock.Step{ID: "0", Own: true, Mem: c.mem})
		switch {
		case c.text != "":
			if lease.CodeOf(err) != lease.Invalid || !strings.Contains(err.Error(), c.text) || len(r.Host.Parts) != 0 {
				t.Errorf("%+v: %v, %v", c, err, r.Host.Parts)
			}
		case err != nil || variable(ops, "SLUICE_STEP_DEVICES") != c.devices || variable(ops, "CUDA_VISIBLE_DEVICES") != c.devices || variable(ops, "SLUICE_SOCKET") == "-":
			t.Errorf("%+v: %v, %v", c, ops, err)
		}
	}
}

// Steps that run at once have different GPUs, and keep them when they ask again; a step for which too few are free is refused, and has them when
// another step has ended. A step with no gres of its own has all.
func TestStepsOfSeveral(t *testing.T) {
	r := severalRig(t, 400, map[string]uint64{"0": 100, "1": 200, "2": 200, "3": 100, "4": 100, "5": 0})
	begin := func(step, want string) {
		t.Helper()
		r.here(step, true)
		ops, err := r.StepEnv(t.Context(), user, "7", jobsock.Step{ID: step, Own: true})
		if got := variable(ops, "SLUICE_STEP_DEVICES"); err != nil || got != want {
			t.Errorf("step %s has %s, want %s: %v", step, got, want, err)
		}
	}
	refused := func(step, text string) {
		t.Helper()
		soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // the test does not wait for all of leaveTime
		defer cancel()
		if _, err := r.StepEnv(soon, user, "7", jobsock.Step{ID: step, Own: true}); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), text) {
			t.Errorf("step %s: %v", step, err)
		}
	}
	begin("0", "0")
	begin("1", "1,2")
	begin("1", "1,2")
	refused("2", "--gres=rgpu:200 of step 2: its job has 4 whole GPUs on this node, and other steps leave GPU 3 (step 0: GPU 0; step 1: GPU 1,2); start it with --gres=rgpu:100, or when another step has ended")
	begin("3", "3")
	refused("4", "other steps leave none (step 0: GPU 0; step 1: GPU 1,2; step 3: GPU 3); start it when another step has ended")
	r.Slurm.Steps["7.6"] = slurm.Step{Gres: gres(400)}
	begin("6", "-")
	begin("5", "-")
	r.here("0", false)
	begin("3", "3")
	begin("4", "0")
	time.AfterFunc(50*time.Millisecond, func() { r.here("1", false) })
	begin("2", "1,2")
}
