package jobnode

// Notes of the jobs of this node, in memory and in the ledger.

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// maxEntries bounds what is remembered of jobs that ask for nothing.
const maxEntries = 1 << 14

// entry is what this node knows of a job.
type entry struct {
	note note
	wait chan struct{} // closed when the answer is there; nil then
	gone time.Time     // since when nothing of it is here
}

// note is what the ledger keeps of a job.
type note struct {
	Job     string         `json:"job"`
	Restart uint32         `json:"restart"`
	UID     uint32         `json:"uid"`
	Outcome rpc.JobOutcome `json:"outcome"` // "" while it is not known
	Reason  string         `json:"reason,omitempty"`
	Asks    bool           `json:"asks"`             // for something of ours, or it is not known
	Unsure  bool           `json:"unsure,omitempty"` // it is not known
	Seen    bool           `json:"seen,omitempty"`   // its extern step was here
	Boot    string         `json:"boot"`
	At      time.Time      `json:"at"`
	// What only the Prolog knows of the run, for one that gets its lease later.
	Account string            `json:"account,omitempty"`
	Name    string            `json:"name,omitempty"`
	Options map[string]string `json:"wishes,omitempty"`
}

// jobNote begins the ledger's keys of notes.
const jobNote = "job/"

// load reads the ledger's notes.
func (s *Service) load(ctx context.Context) error {
	all, err := s.notes()
	if err != nil {
		return err
	}
	keep := map[string]bool{}
	ctx, cancel := context.WithTimeout(ctx, startTime) // an owner that does not answer now is sent the release later
	defer cancel()
	for job, n := range all {
		if n.Boot != s.cfg.Boot {
			// None of its processes has outlived the boot, and its Epilog may never come.
			s.log.Info("job of before this node's boot is over", "job", job)
			s.release(ctx, job, "its node was rebooted")
			s.forget(job)
			continue
		}
		if _, _, ok := s.cfg.Host.Held(s.key(job)); n.Outcome == "" && ok {
			n.Outcome = rpc.JobGranted
		}
		s.jobs[job] = &entry{note: n}
		keep[job] = !n.Unsure
	}
	s.cfg.Marks.Keep(keep)
	return nil
}

// notes are those in the ledger, by job.
func (s *Service) notes() (map[string]note, error) {
	out := map[string]note{}
	err := s.cfg.Ledger.View(func(tx *ledger.Tx) error {
		return tx.All(ledger.Notes, func(key string, raw json.RawMessage) error {
			job, ok := strings.CutPrefix(key, jobNote)
			if !ok {
				return nil
			}
			var n note
			if err := json.Unmarshal(raw, &n); err != nil {
				return fmt.Errorf("ledger %s: %s: %w", s.cfg.Ledger.Path(), key, err)
			}
			out[job] = n
			return nil
		})
	})
	return out, err
}

// begin makes a job's entry with a wait channel. If another caller is already getting the
// answer, it returns that caller's entry and false.
func (s *Service) begin(n note) (e *entry, first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e = s.jobs[n.Job]; e != nil && e.wait != nil {
		return e, false
	}
	s.trim()
	e = &entry{note: n, wait: make(chan struct{})}
	s.jobs[n.Job] = e
	return e, true
}

// put stores what is known of a run, in the ledger too if the run asks for something. done
// wakes those who wait for the entry. put returns false if an Epilog has come meanwhile.
func (s *Service) put(e *entry, n note, done bool) bool {
	n.Boot, n.At = s.cfg.Boot, time.Now().UTC()
	s.mu.Lock()
	had := e.note.Asks
	e.note = n
	current := s.jobs[n.Job] == e
	s.mu.Unlock()
	switch {
	case !current:
	case n.Asks:
		if n.Unsure {
			s.cfg.Marks.Remove(n.Job)
		} else if err := s.cfg.Marks.Put(n.Job); err != nil {
			s.log.Warn("job without a mark", "job", n.Job, "error", err)
		}
		if err := s.cfg.Ledger.Put(ledger.Notes, jobNote+n.Job, n); err != nil {
			s.log.Error("what became of a job cannot be written", "job", n.Job, "error", err)
		}
	case had:
		s.erase(n.Job)
	}
	if done {
		s.mu.Lock()
		close(e.wait)
		e.wait = nil
		s.mu.Unlock()
	}
	return current
}

// trim makes room by forgetting a job that asks for nothing. If the job starts another step,
// slurmctld is asked again. mu is held.
func (s *Service) trim() {
	if len(s.jobs) < maxEntries {
		return
	}
	for job, e := range s.jobs {
		if !e.note.Asks && e.wait == nil {
			delete(s.jobs, job)
			return
		}
	}
}

// forget drops everything this node knows of a job.
func (s *Service) forget(job string) {
	s.mu.Lock()
	delete(s.jobs, job)
	s.mu.Unlock()
	s.erase(job)
}

func (s *Service) erase(job string) {
	if err := s.cfg.Ledger.Delete(ledger.Notes, jobNote+job); err != nil {
		s.log.Error("note of a job stays", "job", job, "error", err)
	}
	s.cfg.Marks.Remove(job)
}

// known returns what is known of a job. busy is the entry to wait for if its answer is still
// to come.
func (s *Service) known(job string) (n note, busy *entry, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.jobs[job]
	switch {
	case e == nil:
		return note{}, nil, false
	case e.wait != nil:
		return e.note, e, true
	}
	return e.note, nil, true
}

// await waits until an entry has its answer.
func (s *Service) await(ctx context.Context, e *entry) (note, error) {
	s.mu.Lock()
	n, wait := e.note, e.wait
	s.mu.Unlock()
	if wait == nil {
		return n, nil
	}
	select {
	case <-wait:
		s.mu.Lock()
		defer s.mu.Unlock()
		return e.note, nil
	case <-ctx.Done():
		return n, lease.Errorf(lease.Down, "job %s: its lease is still being got; start the step again", n.Job)
	}
}
