package jobs

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// Settings are those that a reload may change.
type Settings struct {
	Pools      map[string]Pool
	Partitions map[string]Partition
	RoomWait   time.Duration // how long a job waits for room before it is refused or requeued
	Report     bool          // write reports into AdminComment
	Silence    time.Duration // lease.silence, to compare it with Slurm's SlurmdTimeout
}

// Pool is what the services need to know of a pool.
type Pool struct {
	Licence string            // one unit is one percent of a GPU
	Types   map[string]string // type of GPU: the licence that it takes besides
}

// Partition is what a partition's jobs get unless they say otherwise.
type Partition struct {
	Policy lease.Policy
	Lend   lease.Lend
	Place  lease.Place
	Mem    uint64 // bytes of each fraction; 0 by its percentage
}

// Counters are counted since the start.
type Counters struct {
	Granted, Refused, Requeued uint64 // Prologs of this node, and of slurmctld on the controller, by how they ended
	Orphans                    uint64 // leases that were ended because Slurm, or the node, no longer has their job
}

// State is what the services of one daemon share: settings in, findings and counters out.
// All methods may be called at the same time.
type State struct {
	mu       sync.Mutex
	set      Settings
	checks   map[string]rpc.Check // by name
	counters Counters
}

// NewState returns a State without findings.
func NewState(set Settings) *State { return &State{set: set, checks: map[string]rpc.Check{}} }

// Settings returns the settings of now.
func (s *State) Settings() Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.set
}

// SetSettings takes over what a reload changed.
func (s *State) SetSettings(set Settings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set = set
}

// Found sets the finding of that name. An empty text removes it.
func (s *State) Found(name string, level rpc.Level, text, remedy string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text == "" {
		delete(s.checks, name)
		return
	}
	s.checks[name] = rpc.Check{Name: name, Level: level, Text: text, Remedy: remedy}
}

// Checks returns the findings about Slurm, for the daemon's health.
func (s *State) Checks() []rpc.Check {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.checks))
}

// Count counts the outcome of a Prolog.
func (s *State) Count(o rpc.JobOutcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch o {
	case rpc.JobGranted:
		s.counters.Granted++
	case rpc.JobRefused:
		s.counters.Refused++
	case rpc.JobRequeue:
		s.counters.Requeued++
	}
}

// CountOrphan counts a lease that was ended because its job was gone.
func (s *State) CountOrphan() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counters.Orphans++
}

// Counters returns the counters of now.
func (s *State) Counters() Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counters
}
