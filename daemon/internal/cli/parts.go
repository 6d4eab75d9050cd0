package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// partsTime bounds how long an answer about a job waits for Slurm's accounting to name the job's parts.
	partsTime = 3 * time.Second
	// mostParts are listed by name.
	mostParts = 10
)

// partLister is the part of *slurm.Commands that knows the parts of jobs.
type partLister interface {
	Parts(ctx context.Context, id string) ([]slurm.Part, error)
}

// parts are those of an array job or a heterogeneous job. One of them has the number of the whole job: what is known
// by that number is known of this part alone.
type parts struct {
	job  string
	list []slurm.Part
}

// askParts asks for the parts of a job while the caller does something else. The function that it returns waits for
// the answer, which has none if the accounting is not here or does not answer in time: an answer about the job is
// given all the same.
func askParts(ctx context.Context, job string, a partLister) func() parts {
	if !form.JobID(job).Valid() {
		return func() parts { return parts{} }
	}
	got := make(chan parts, 1)
	go func() {
		ctx, cancel := context.WithTimeout(ctx, partsTime)
		defer cancel()
		list, _ := a.Parts(ctx, job)
		got <- parts{job, list}
	}()
	return func() parts { return <-got }
}

// shown says which part has the number of the whole job; "" for a job without parts.
func (p parts) shown() string {
	i := slices.IndexFunc(p.list, func(x slurm.Part) bool { return x.ID == p.job && slurm.IsTask(x.Name) })
	if i < 0 {
		return ""
	}
	whole, part := p.words()
	text := fmt.Sprintf("job %s is %s: this is its %s %s", p.job, whole, part, p.list[i].Name)
	if others := names(slices.Delete(slices.Clone(p.list), i, i+1)); others != "" {
		text += "; others: " + others
	}
	return text
}

// choice is the end of an error about an unknown job. It lists the parts that have records of their own, and is "" for a job without parts.
func (p parts) choice() string {
	if len(p.list) == 0 {
		return ""
	}
	whole, part := p.words()
	return fmt.Sprintf("; job %s is %s, and each %s has a record of its own: %s", p.job, whole, part, names(p.list))
}

// words are what the job is, and what each of its parts is.
func (p parts) words() (whole, part string) {
	if strings.Contains(p.list[0].Name, "+") {
		return "a heterogeneous job", "component"
	}
	return "an array", "task"
}

func names(list []slurm.Part) string {
	var all []string
	for _, p := range list[:min(len(list), mostParts)] {
		all = append(all, p.Name)
	}
	text := strings.Join(all, ", ")
	if n := len(list) - mostParts; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}
