// Package slurmtest is a slurmctld in memory, for tests of what talks to one.
package slurmtest

import (
	"context"
	"errors"
	"maps"
	"sync"

	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// Fake is a slurmctld. Its fields may be changed while Lock is held.
type Fake struct {
	sync.Mutex
	Down     error // every call fails with it
	All      map[string]slurm.Job
	Have     map[string]slurm.Licence
	Conf     map[string]string
	Steps    map[string]slurm.Step
	Reserved map[string]slurm.Counts // by reservation
	Comments map[string]string
	Requeued []string
	Notified []string
	Asked    int // calls of Job
}

var _ slurm.Controller = (*Fake)(nil)

// New is a slurmctld without jobs.
func New() *Fake {
	return &Fake{
		All: map[string]slurm.Job{}, Steps: map[string]slurm.Step{}, Have: map[string]slurm.Licence{},
		Conf:     map[string]string{"ClusterName": "cluster"},
		Reserved: map[string]slurm.Counts{}, Comments: map[string]string{},
	}
}

// Set puts a job in.
func (f *Fake) Set(j slurm.Job) {
	f.Lock()
	defer f.Unlock()
	f.All[j.ID] = j
}

// Fail has every call fail from now on, nil for no longer.
func (f *Fake) Fail(err error) {
	f.Lock()
	defer f.Unlock()
	f.Down = err
}

// Job implements slurm.Controller.
func (f *Fake) Job(_ context.Context, id string) (slurm.Job, error) {
	f.Lock()
	defer f.Unlock()
	f.Asked++
	if f.Down != nil {
		return slurm.Job{}, f.Down
	}
	j, ok := f.All[id]
	if !ok {
		return slurm.Job{}, slurm.ErrGone
	}
	return j, nil
}

// Step implements slurm.Controller; Steps has the steps, by JOB.STEP.
func (f *Fake) Step(_ context.Context, job, step string) (slurm.Step, error) {
	f.Lock()
	defer f.Unlock()
	if f.Down != nil {
		return slurm.Step{}, f.Down
	}
	s, ok := f.Steps[job+"."+step]
	if !ok {
		return slurm.Step{}, slurm.ErrGone
	}
	return s, nil
}

// Jobs implements slurm.Controller.
func (f *Fake) Jobs(context.Context) (map[string]slurm.JobState, error) {
	f.Lock()
	defer f.Unlock()
	if f.Down != nil {
		return nil, f.Down
	}
	out := map[string]slurm.JobState{}
	for id, j := range f.All {
		out[id] = j.JobState
	}
	return out, nil
}

// Licences implements slurm.Controller.
func (f *Fake) Licences(context.Context) (map[string]slurm.Licence, error) {
	f.Lock()
	defer f.Unlock()
	return maps.Clone(f.Have), f.Down
}

// Reserve implements slurm.Controller.
func (f *Fake) Reserve(_ context.Context, name, licence string, count uint64) error {
	f.Lock()
	defer f.Unlock()
	if f.Down != nil {
		return f.Down
	}
	if count > f.Have[licence].Total {
		return errors.New("scontrol update: Invalid license specification")
	}
	delete(f.Reserved, name)
	if count > 0 {
		f.Reserved[name] = slurm.Counts{licence: count}
	}
	return nil
}

// Requeue implements slurm.Controller.
func (f *Fake) Requeue(_ context.Context, id string) error {
	f.Lock()
	defer f.Unlock()
	if f.Down != nil {
		return f.Down
	}
	j, ok := f.All[id]
	switch {
	case !ok:
		return slurm.ErrGone
	case !j.Batch || !j.Requeue:
		return slurm.ErrNoRequeue
	}
	j.State, j.Nodes = "PENDING", nil
	j.Restarts++
	f.All[id] = j
	f.Requeued = append(f.Requeued, id)
	return nil
}

// Comment implements slurm.Controller.
func (f *Fake) Comment(_ context.Context, id, text string) error {
	f.Lock()
	defer f.Unlock()
	if f.Down == nil {
		f.Comments[id] = text
	}
	return f.Down
}

// Notify implements slurm.Controller; Notified has the texts.
func (f *Fake) Notify(_ context.Context, id, text string) error {
	f.Lock()
	defer f.Unlock()
	f.Notified = append(f.Notified, id+": "+text)
	return f.Down
}

// Config implements slurm.Controller.
func (f *Fake) Config(context.Context) (map[string]string, error) {
	f.Lock()
	defer f.Unlock()
	return maps.Clone(f.Conf), f.Down
}
