package rpc

import (
	"context"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// JobRun is what a Prolog or an Epilog is told of a run of a job, by slurmd on a
// node and by slurmctld on the controller. What is not known is left empty.
type JobRun struct {
	Job       string            `json:"job"` // Slurm's job id; of an array's task and a heterogeneous job's component its own
	Restart   uint32            `json:"restart"`
	Nodes     []string          `json:"nodes,omitempty"` // all of the job's, on the controller
	UID       uint32            `json:"uid"`
	GID       uint32            `json:"gid"`
	User      string            `json:"user,omitempty"`
	Account   string            `json:"account,omitempty"`
	Name      string            `json:"name,omitempty"`
	Partition string            `json:"partition,omitempty"`
	Licences  *string           `json:"licences,omitempty"` // SLURM_JOB_LICENSES; nil where this release or script has none
	Options   map[string]string `json:"wishes,omitempty"`   // the user's options, by name without "--rgpu-"; older daemons know the field as wishes
	Stdout    string            `json:"stdout,omitempty"`
	WorkDir   string            `json:"work_dir,omitempty"`
}

// JobOutcome is what became of a Prolog.
type JobOutcome string

// The outcomes.
const (
	JobNone    JobOutcome = "none"    // the job asks for no fraction
	JobGranted JobOutcome = "granted" // its lease is there
	JobRefused JobOutcome = "refused" // it asks for one and must not run; Reason says why
	JobRequeue JobOutcome = "requeue" // nothing wrong with the job: the pool has no room now, or cannot be asked
)

// JobAnswer answers a Prolog.
type JobAnswer struct {
	Outcome JobOutcome `json:"outcome"`
	Lease   string     `json:"lease,omitempty"`
	Reason  string     `json:"reason,omitempty"`
}

// EnvOp is one change of the environment of a job's tasks.
type EnvOp struct {
	Prepend bool   `json:"prepend,omitempty"` // before the value that is there, with Separator between
	Name    string `json:"name"`
	Value   string `json:"value"`
}

// JobService is what a daemon does for Slurm's jobs. Slurm may repeat a call, make the
// calls out of order, or leave one out. Root may make every call, the user of slurm.user
// those of ControllerJobs and Report, a user Env and Report of the user's own jobs.
type JobService interface {
	NodeJobs
	ControllerJobs
}

// NodeJobs are the calls for the jobs of this node.
type NodeJobs interface {
	// Prolog gives the job its lease on this node: the one that the controller
	// reserved, or else a new one. A refusal is remembered and told by Env.
	Prolog(ctx context.Context, peer Peer, run JobRun) (JobAnswer, error)
	// Epilog returns it. The report may be empty.
	Epilog(ctx context.Context, peer Peer, run JobRun) ([]lease.Report, error)
	// Env is what a job's tasks on this node need. Without a lease: an empty list
	// if the job asked for none, an *lease.Error if it was refused one.
	Env(ctx context.Context, peer Peer, job string) ([]EnvOp, error)
	// Report is what became of a job's leases, in all pools this node knows.
	Report(ctx context.Context, peer Peer, job string) ([]lease.Report, error)
}

// ControllerJobs are the calls of slurmctld, for the jobs of all nodes.
type ControllerJobs interface {
	// PrologController reserves on all of the job's nodes, or on none.
	PrologController(ctx context.Context, peer Peer, run JobRun) (JobAnswer, error)
	// EpilogController ends what the job has anywhere.
	EpilogController(ctx context.Context, peer Peer, run JobRun) ([]lease.Report, error)
}
