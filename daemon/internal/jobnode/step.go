package jobnode

// Steps with a --gres of their own.
//
// Our gres is not consumed, so Slurm makes no step wait for it and tells a node nothing of it. The plug-in in srun says whether srun may have been
// given a gres, and only then this node asks slurmctld. The host keeps what the step has asked for (host.GivePart), and the owner enforces it.
// A step of a job with several GPUs asks for whole GPUs. The host chooses them, and nobody enforces the choice: the step's programs get their numbers.

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobsock"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/spank/options"
)

const (
	// leaveTime is how long a step waits for the end of another one, whose tasks may have ended: slurmstepd stays for a moment after srun has gone,
	// and for longer on a busy node. jobsock's ownTime has it, and the questions to slurmctld before.
	leaveTime = 3 * time.Second
	leaveLook = 20 * time.Millisecond
)

// StepEnv is Env for a step that begins, and implements jobsock.Env. A step with a part of the job's fraction has it from then on.
func (s *Service) StepEnv(ctx context.Context, p rpc.Peer, job string, q jobsock.Step) ([]rpc.EnvOp, error) {
	ops, err := s.Env(ctx, p, job)
	number, ok := form.Number(q.ID)
	if err != nil || len(ops) == 0 || !q.Own || !ok || number >= firstSpecialStep {
		return ops, err
	}
	l, _, held := s.cfg.Host.Held(s.key(job))
	if !held {
		return nil, lease.Errorf(lease.Over, "the lease of job %s has ended; sluice explain %s says why", job, job)
	}
	select {
	case s.askStep <- struct{}{}: // a job may have any number of steps
	case <-ctx.Done():
		return nil, fmt.Errorf("what step %s of job %s asks for is not known: too many steps begin at a time", q.ID, job)
	}
	part, own, err := s.asked(ctx, &l, number, q.Mem)
	<-s.askStep
	if err != nil || !own {
		return ops, err
	}
	if part, err = s.give(ctx, job, part); err != nil {
		return nil, err
	}
	s.log.Info("step has a part of its job's fraction", "job", job, "part", part.String())
	switch {
	case part.Percent == 0:
		return nil, nil
	case part.OnGPUs(): // --rgpu-bind=task divides these among the tasks, see the plug-in's bind_task
		ops = append(ops, rpc.EnvOp{Name: "SLUICE_STEP_DEVICES", Value: part.Devices()}, rpc.EnvOp{Name: "CUDA_VISIBLE_DEVICES", Value: part.Devices()})
	}
	return ops, nil
}

// asked is the part of a lease that a step has asked for. It is false for a step that has all.
func (s *Service) asked(ctx context.Context, l *lease.Lease, step uint32, mem string) (part lease.Part, own bool, _ error) {
	job := l.Request.Key.Job
	st, err := s.cfg.Slurm.Step(ctx, job, fmt.Sprint(step))
	if err != nil {
		return part, false, fmt.Errorf("what step %d of job %s asks for is not known: %w", step, job, err)
	}
	for _, o := range st.Others {
		if strings.Contains(o, form.Gres) {
			return part, false, lease.Errorf(lease.Invalid, "%s of a step by step, socket or task is not supported; use --gres=%s:PERCENT, which is by node", o, form.Gres)
		}
	}
	var percent, had, has uint64
	for _, g := range st.Gres {
		if g.Name != form.Gres {
			continue
		}
		if g.Bare {
			return part, false, lease.Errorf(lease.Invalid, "--gres=%s of step %d does not say how much; write --gres=%s:PERCENT, or leave it out for all that the job has", form.Gres, step, form.Gres)
		}
		percent += g.Count
	}
	for _, g := range l.Grants { // had is before sluice set
		has += uint64(g.Percent)
		if had += uint64(g.First); g.First == 0 {
			had += uint64(g.Percent)
		}
	}
	switch {
	case percent == 0:
		// A job may hold licences without a gres, and so may its steps.
		if j, err := s.cfg.Slurm.Job(ctx, job); err != nil || !asksByGres(j) {
			return part, false, err
		}
		return lease.Part{Step: step}, true, nil
	case len(l.Grants) > 1 && (percent != had || mem != ""):
		part, err := ofSeveral(l, step, percent, mem)
		return part, err == nil, err
	case percent == had && mem != "":
		return part, false, lease.Errorf(lease.Invalid, "--rgpu-mem=%s of a step is for a step with a part of its job's fraction; give --gres=%s:N too, with N below %d", form.Name(mem), form.Gres, had)
	case percent == had:
		return part, false, nil
	case percent > has:
		return part, false, lease.Errorf(lease.Invalid, "--gres=%s:%d of step %d: its job has %d on this node; ask for at most %d, or for more with the job", form.Gres, percent, step, has, has)
	}
	whole := l.Grants[0].Mem
	part = lease.Part{Step: step, Percent: uint32(percent), Mem: whole * percent / has &^ (lease.Granule - 1)}
	if mem != "" {
		mib, ok := options.MiB(mem)
		if !ok {
			return part, false, lease.Errorf(lease.Invalid, "--rgpu-mem=%s of step %d is no size; write it as 20G or 800M", form.Name(mem), step)
		}
		if part.Mem = mib << 20 &^ (lease.Granule - 1); part.Mem > whole {
			return part, false, lease.Errorf(lease.Invalid, "--rgpu-mem=%s of step %d: its job has %d MiB; ask for at most that", form.Name(mem), step, whole>>20)
		}
	}
	if part.Mem == 0 {
		return part, false, lease.Errorf(lease.Invalid, "--gres=%s:%d of step %d is less than the smallest piece of the job's %d MiB; ask for more", form.Gres, percent, step, whole>>20)
	}
	return part, true, s.canSee(ctx, step)
}

// ofSeveral is the part of a lease of several GPUs that a step has asked for. Its GPUs are not yet chosen.
func ofSeveral(l *lease.Lease, step uint32, percent uint64, mem string) (part lease.Part, _ error) {
	whole := uint64(bits.OnesCount32(lease.WholeGPUs(l.Grants)))
	switch {
	case mem != "":
		return part, lease.Errorf(lease.Invalid, "--rgpu-mem=%s of step %d: its job has %d GPUs on this node, and a step has all memory of those that it has; start it without --rgpu-mem", form.Name(mem), step, len(l.Grants))
	case percent > 100*whole:
		return part, lease.Errorf(lease.Invalid, "--gres=%s:%d of step %d: its job has %d whole GPUs on this node; ask for at most %d, or start it without --gres", form.Gres, percent, step, whole, 100*whole)
	case percent%100 != 0:
		return part, lease.Errorf(lease.Invalid, "--gres=%s:%d of step %d: its job has %d GPUs on this node, and a step has whole ones of them; ask for a multiple of 100, or start it without --gres, with --rgpu-bind=task if each task is to have its own GPUs",
			form.Gres, percent, step, len(l.Grants))
	}
	return lease.Part{Step: step, Percent: uint32(percent)}, nil
}

func asksByGres(j slurm.Job) bool {
	for _, g := range j.Gres {
		if g.Name == form.Gres && g.Count > 0 {
			return true
		}
	}
	return false
}

// canSee refuses a part where the kernel does not show which step a process belongs to.
func (s *Service) canSee(ctx context.Context, step uint32) error {
	if s.sees.Load() {
		return nil
	}
	conf, err := s.cfg.Slurm.Config(ctx)
	if err != nil {
		return fmt.Errorf("whether step %d can be given a part of its job's fraction is not known: %w", step, err)
	}
	if t := conf["ProctrackType"]; t != "proctrack/cgroup" {
		return lease.Errorf(lease.Invalid, "step %d asks for a part of its job's fraction, and with ProctrackType=%s nobody can see which processes are the step's; start it without --gres", step, form.Name(t))
	}
	s.sees.Store(true)
	return nil
}

// give gives a step its part, and returns it with its GPUs. If a step that is ending still holds too much of the fraction, it waits for that step briefly.
func (s *Service) give(ctx context.Context, job string, part lease.Part) (lease.Part, error) {
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	for {
		given, err := s.cfg.Host.GivePart(s.key(job), part, s.stepsNow(context.WithoutCancel(ctx), job))
		var e *lease.Error
		if err == nil || !errors.As(err, &e) || e.Code != lease.NoRoom {
			return given, err
		}
		select {
		case <-ctx.Done():
			return given, err
		case <-time.After(leaveLook):
		}
	}
}
