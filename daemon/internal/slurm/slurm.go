// Package slurm asks Slurm's own commands about jobs, licences and its configuration,
// and tells it the few things that a daemon has to: requeue, comment, reservation.
// Releases 22.05 to 26.05 are understood.
package slurm

import (
	"context"
	"errors"
	"slices"
)

// Errors that a caller may ask for. Any other means that nothing is known: never
// that a job or its licences are gone.
var (
	ErrGone      = errors.New("no such job")
	ErrNoRequeue = errors.New("it cannot be requeued")
	ErrLater     = errors.New("it may do so later")
)

// State of a job, as squeue prints it.
type State string

// idle are the states of a job without nodes: it waits, or has ended.
var idle = []State{
	"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REVOKED",
	"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED", "RECONFIG_FAIL",
}

// Runs says that the job has its nodes, at least for its epilogs. So may one in a state
// that is not known here: releases add some.
func (s State) Runs() bool { return !slices.Contains(idle, s) }

// Starting says that a Prolog of the job may be under way.
func (s State) Starting() bool { return s.Runs() && s != "COMPLETING" && s != "STAGE_OUT" }

// JobState is what the list of all jobs says of one.
type JobState struct {
	State    State
	Restarts uint32
	Nodes    []string
}

// On says that the job is on the node, as far as the list knows.
func (j JobState) On(node string) bool { return j.State.Runs() && slices.Contains(j.Nodes, node) }

// Job is what slurmctld has of one job. Nothing in it is text that a user may choose
// freely: names and comments of jobs could forge the fields beside them.
type Job struct {
	ID string
	JobState
	UID, GID  uint32
	Batch     bool
	Requeue   bool // Slurm may requeue it
	Partition string
	Licences  Counts
	Gres      []Gres // asked for on each of its nodes
	// Others are the requests that are not per node, as Slurm writes them:
	// --gpus-per-task and such never name ours, a --tres-per-task may.
	Others []string
}

// Step is what slurmctld has of a step that srun has started.
type Step struct {
	Gres []Gres // on each of its nodes: what it has asked for, or what its job has where it has asked for none
	// Others are the requests that are not per node, as in Job.
	Others []string
}

// Counts are licences, or such, by name.
type Counts map[string]uint64

// Licence is a licence that Slurm manages.
type Licence struct {
	Total, Used, Free, Reserved uint64
}

// Controller is slurmctld, asked by commands. An implementation bounds every call.
type Controller interface {
	// Job is one job; ErrGone if slurmctld says that there is none.
	Job(ctx context.Context, id string) (Job, error)
	// Step is what one step has asked for, or has of its job's request; ErrGone if slurmctld says that there is none.
	Step(ctx context.Context, job, step string) (Step, error)
	// Jobs are all jobs that slurmctld still has, ended ones too, by their raw id.
	Jobs(ctx context.Context) (map[string]JobState, error)
	// Licences are all licences of the cluster.
	Licences(ctx context.Context) (map[string]Licence, error)
	// Reserve makes the reservation of that name hold back count of a licence, and
	// no nodes; 0 removes it.
	Reserve(ctx context.Context, name, licence string, count uint64) error
	// Requeue puts a batch job back into the queue; ErrNoRequeue if it is none, or
	// has been submitted or configured not to be.
	Requeue(ctx context.Context, id string) error
	// Comment sets our part of the job's AdminComment, in the accounting if the job has ended. The
	// text begins with OwnPrefix and replaces what was set before; text of others stays. It is
	// an error if nothing can be added to that.
	// ErrLater after any failure but a refusal that stays: slurmctld or the accounting does
	// not answer, says something else, or does not know the job yet.
	Comment(ctx context.Context, id, text string) error
	// Notify shows a line on the terminal of the srun or salloc that waits for the job.
	Notify(ctx context.Context, id, text string) error
	// Config is slurm.conf as slurmctld has it, by key.
	Config(ctx context.Context) (map[string]string, error)
}
