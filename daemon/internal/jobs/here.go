package jobs

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// externStep is the step that holds a job's place on a node for as long as it lasts, with
// PrologFlags=Contain.
const externStep = "4294967292"

// watchHere looks at which jobs are on this node until ctx ends. slurmd keeps a socket for
// each step in its spool directory, which tells without a question to slurmctld. Only
// a job whose extern step has been here, and of which nothing is any more, is over: its
// Epilog was lost, with a power cycle for instance. Without extern steps nothing is
// known between two steps, and the lease stays.
func (s *Service) watchHere(ctx context.Context) {
	t := time.NewTicker(s.cfg.Look)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		s.Look(ctx, time.Now())
	}
}

// Look is one look at the node's jobs.
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
		s.found("steps", rpc.Warn, "which jobs are on this node cannot be seen: "+err.Error(), "set slurm.spool in sluice.yaml to SlurmdSpoolDir")
		return
	}
	s.found("steps", "", "", "")
	var over []string
	s.mu.Lock()
	for job, e := range s.jobs {
		if !e.note.Asks || e.wait != nil {
			continue
		}
		here := steps[job]
		switch {
		case here.extern:
			e.seen, e.gone = true, time.Time{}
		case here.any || !e.seen:
			e.gone = time.Time{}
		case e.gone.IsZero():
			e.gone = now
		case now.Sub(e.gone) >= s.cfg.Gone:
			over = append(over, job)
		}
	}
	s.mu.Unlock()
	for _, job := range over {
		s.log.Warn("job has left this node without its Epilog", "job", job)
		s.forget(job)
		if s.release(ctx, job, "its job has left the node; its Epilog was lost") {
			s.countStray()
		}
	}
}

// stepsOf is what of a job is here.
type stepsOf struct{ any, extern bool }

// steps are the jobs that have a step on this node.
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
		if !ok || !form.IsJobID(job) {
			continue
		}
		o := out[job]
		o.any = true
		o.extern = o.extern || strings.HasPrefix(step, externStep)
		out[job] = o
	}
	return out, nil
}

// spoolDir is slurmd's directory, asked once from slurmctld if it is not configured.
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
