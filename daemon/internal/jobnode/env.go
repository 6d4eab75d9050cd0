package jobnode

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/spank/options"
)

// Env implements rpc.NodeJobs. A job that this node knows nothing of, because its
// Prolog did not come through or the daemon has been restarted, is looked up now.
func (s *Service) Env(ctx context.Context, p rpc.Peer, job string) ([]rpc.EnvOp, error) {
	if err := jobs.CheckRun(rpc.JobRun{Job: job}); err != nil {
		return nil, err
	}
	n, busy, ok := s.known(job)
	l, socket, held := s.cfg.Host.Held(s.key(job))
	var err error
	switch {
	case ok && !p.May(n.UID), held && !p.May(l.Request.UID):
		return nil, lease.Errorf(lease.Denied, "job %s is not yours", job)
	case busy != nil:
		if n, err = s.await(ctx, busy); err != nil {
			return nil, err
		}
	case held:
		return s.ops(l, socket, n.Options), nil
	case !ok || n.Outcome == "":
		if n, err = s.lookUp(ctx, p, job); err != nil {
			return nil, err
		}
	}
	switch n.Outcome {
	case rpc.JobGranted:
		if l, socket, held = s.cfg.Host.Held(s.key(job)); held {
			return s.ops(l, socket, n.Options), nil
		}
		return nil, lease.Errorf(lease.Over, "the lease of job %s has ended; sluice explain %s says why", job, job)
	case rpc.JobRefused:
		return nil, lease.Errorf(lease.Invalid, "%s", n.Reason)
	case rpc.JobRequeue:
		return nil, lease.Errorf(lease.NoRoom, "%s; the job goes back into the queue", n.Reason)
	case "":
		if !n.Unsure {
			return nil, lease.Errorf(lease.Down, "%s", n.Reason)
		}
		return nil, errors.New(n.Reason)
	}
	return nil, nil
}

// Knows says whether a user has a job on this node that asks for something.
func (s *Service) Knows(uid uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.jobs {
		if e.note.UID == uid && e.note.Asks {
			return true
		}
	}
	return false
}

// lookUp settles a job by what slurmctld knows of it.
func (s *Service) lookUp(ctx context.Context, p rpc.Peer, job string) (note, error) {
	ask := s.askOther
	if s.Knows(p.UID) {
		ask = s.askKnown
	}
	select {
	case ask <- struct{}{}: // anybody may ask for any number
		defer func() { <-ask }()
	case <-ctx.Done():
		return note{}, fmt.Errorf("job %s: too many jobs are being looked up", job)
	}
	n, busy, ok := s.known(job)
	if ok && busy == nil && n.Outcome != "" {
		return n, nil // another caller has looked it up meanwhile
	}
	j, err := s.cfg.Slurm.Job(ctx, job)
	switch {
	case errors.Is(err, slurm.ErrGone): // or slurmctld has lost its state
		return note{}, fmt.Errorf("job %s is not known to Slurm", job)
	case err != nil:
		return note{}, fmt.Errorf("what job %s asks for is not known: %w", job, err)
	case !p.May(j.UID):
		return note{}, lease.Errorf(lease.Denied, "job %s is not yours", job)
	case !j.State.Starting() || !slices.Contains(j.Nodes, s.cfg.Node):
		if !jobs.Asks(j) {
			return note{Outcome: rpc.JobNone}, nil
		}
		return note{}, lease.Errorf(lease.Over, "job %s does not run on node %s; Slurm says %s on %s; compare node in sluice.yaml with Slurm's NodeName", job, s.cfg.Node, j.State, form.Name(strings.Join(j.Nodes, ",")))
	}
	told := ok && n.Restart == j.Restarts
	run := rpc.JobRun{Job: job, Restart: j.Restarts, UID: j.UID, GID: j.GID, Partition: j.Partition}
	switch {
	case !jobs.Asks(j):
		none := ""
		run.Licences = &none
	case told:
		run.Account, run.Name, run.Options = n.Account, n.Name, n.Options
	}
	return s.await(ctx, s.settle(run, told))
}

// ops are the variables by which a job's programs find the shim and the shim its lease, in
// containers too, and the plug-in what a task sees of the GPUs.
func (s *Service) ops(l lease.Lease, socket string, opts map[string]string) []rpc.EnvOp {
	out := []rpc.EnvOp{
		{Prepend: true, Name: "LD_LIBRARY_PATH", Value: s.cfg.Lib},
		{Name: "SLUICE_SOCKET", Value: socket},
		{Name: "SLUICE_LEASE_ID", Value: l.ID},
		{Name: "SLUICE_GPUS", Value: strconv.Itoa(len(l.Grants))},
	}
	if how := opts["bind"]; slices.Contains(options.Bindings, how) {
		out = append(out, rpc.EnvOp{Name: "SLUICE_BIND", Value: how})
	}
	if s.cfg.Containers != nil {
		out = append(out, s.cfg.Containers(l)...)
	}
	return out
}

// Report implements rpc.NodeJobs.
func (s *Service) Report(ctx context.Context, p rpc.Peer, job string) ([]lease.Report, error) {
	// Leases of sluice run have reports too.
	if !form.IsRunJob(job) {
		if err := jobs.CheckRun(rpc.JobRun{Job: job}); err != nil {
			return nil, err
		}
	}
	list, err := s.cfg.Host.Reports(ctx, s.cfg.Cluster, job)
	all := len(list)
	list = slices.DeleteFunc(list, func(r lease.Report) bool { return !p.May(r.UID) && p.UID != s.cfg.User })
	switch {
	case len(list) > 0:
		if err != nil {
			s.log.Warn("report of a job is not whole", "job", job, "error", err)
		}
		return list, nil
	case all > 0:
		return nil, lease.Errorf(lease.Denied, "job %s is not yours", job)
	}
	return nil, err
}
