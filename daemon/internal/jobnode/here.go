package jobnode

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// externStep is the step that holds a job's place on a node for as long as it lasts, with
// PrologFlags=Contain.
const externStep = "4294967292"

// firstSpecialStep is the first of the numbers by which Slurm means no step that srun has started, but the batch script and such.
const firstSpecialStep = 0xfffffff0

// Run looks at intervals which jobs are on this node, until ctx ends. slurmd keeps a socket
// for each step in its spool directory, so slurmctld need not be asked. A job is over only if
// its extern step was here and no step of it is left: its Epilog was lost, with a power cycle
// for instance. Without extern steps a job may be between two steps, so its lease stays.
func (s *Service) Run(ctx context.Context) error {
	t := time.NewTicker(s.cfg.Look)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		s.Look(ctx, time.Now())
	}
}

// Look looks once, and ends the jobs that are over.
func (s *Service) Look(ctx context.Context, now time.Time) {
	s.mu.Lock()
	some := false
	for _, e := range s.jobs {
		some = some || e.note.Asks && e.wait == nil
	}
	s.mu.Unlock()
	if !some {
		return
	}
	steps, err := s.steps(ctx)
	if err != nil {
		s.cfg.State.Found("steps", rpc.Warn, "which jobs are on this node cannot be seen: "+err.Error(), "set slurm.spool in sluice.yaml to SlurmdSpoolDir")
		return
	}
	s.cfg.State.Found("steps", "", "", "")
	var over, live []string
	var seen []note
	s.mu.Lock()
	for job, e := range s.jobs {
		if !e.note.Asks || e.wait != nil {
			continue
		}
		live = append(live, job)
		here := steps[job]
		switch {
		case here.extern:
			e.gone = time.Time{}
			if !e.note.Seen {
				e.note.Seen = true
				seen = append(seen, e.note)
			}
		case here.any || !e.note.Seen:
			e.gone = time.Time{}
		case e.gone.IsZero():
			e.gone = now
		case now.Sub(e.gone) >= s.cfg.Gone:
			over = append(over, job)
		}
	}
	s.mu.Unlock()
	for _, n := range seen { // a later daemon has to know, too
		err := s.cfg.Ledger.Update(func(tx *ledger.Tx) error {
			var now note
			if ok, err := tx.Get(ledger.Notes, jobNote+n.Job, &now); err != nil || !ok || now.Restart != n.Restart || !now.At.Equal(n.At) {
				return err // its Epilog has come meanwhile, or its next run
			}
			return tx.Put(ledger.Notes, jobNote+n.Job, n)
		})
		if err != nil {
			s.log.Error("that a job was here cannot be written", "job", n.Job, "error", err)
		}
	}
	for _, job := range live {
		if err := s.cfg.Host.DropParts(s.key(job), s.stepsNow(ctx, job)); err != nil && lease.CodeOf(err) != lease.Over {
			s.log.Warn("parts of steps that have ended", "job", job, "error", err)
		}
	}
	for _, job := range over {
		s.log.Warn("job has left this node without its Epilog", "job", job)
		s.forget(job)
		if s.release(ctx, job, "its job has left the node; its Epilog was lost") {
			s.cfg.State.CountOrphan()
		}
	}
}

// stepsOf says which steps of a job are here.
type stepsOf struct {
	any, extern bool
	numbers     map[uint32]bool // of the steps that srun has started
}

// has says whether a step that srun has started is here.
func (o stepsOf) has(step uint32) bool { return o.numbers[step] }

// stepsNow says which steps of a job are here when it is first called: a part that the lease's record has then is of a step that began before.
// If that cannot be seen, all are.
func (s *Service) stepsNow(ctx context.Context, job string) func(step uint32) bool {
	look := sync.OnceValues(func() (map[string]stepsOf, error) { return s.steps(ctx) })
	return func(step uint32) bool {
		steps, err := look()
		return err != nil || steps[job].has(step)
	}
}

// steps returns the jobs that have a step on this node.
func (s *Service) steps(ctx context.Context) (map[string]stepsOf, error) {
	dir, err := s.spoolDir(ctx)
	if err != nil {
		return nil, err
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	out := map[string]stepsOf{}
	for _, n := range names {
		rest, ok := strings.CutPrefix(n, s.cfg.Node+"_")
		if !ok {
			continue
		}
		job, step, ok := strings.Cut(rest, ".")
		if !ok || !form.JobID(job).Valid() {
			continue
		}
		o := out[job]
		o.any = true
		o.extern = o.extern || strings.HasPrefix(step, externStep)
		step, _, _ = strings.Cut(step, ".") // a component of a heterogeneous step
		if n, ok := form.Number(step); ok && n < firstSpecialStep {
			if o.numbers == nil {
				o.numbers = map[uint32]bool{}
			}
			o.numbers[n] = true
		}
		out[job] = o
	}
	return out, nil
}

// spoolDir returns slurmd's spool directory. If it is not configured, slurmctld is asked once.
func (s *Service) spoolDir(ctx context.Context) (string, error) {
	s.mu.Lock()
	dir := s.spool
	s.mu.Unlock()
	if dir != "" {
		return dir, nil
	}
	if dir = s.cfg.Spool; dir == "" {
		conf, err := s.cfg.Slurm.Config(ctx)
		if err != nil {
			return "", err
		}
		if dir = conf["SlurmdSpoolDir"]; dir == "" {
			dir = "/var/spool/slurmd"
		}
	}
	short, err := os.Hostname()
	if err != nil {
		return "", err
	}
	short, _, _ = strings.Cut(short, ".")
	dir = filepath.Clean(strings.NewReplacer("%n", s.cfg.Node, "%h", short).Replace(dir))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spool = dir
	return dir, nil
}
