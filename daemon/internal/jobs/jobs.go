// Package jobs gives Slurm's jobs their leases and takes them back: what Slurm's four
// scripts and its SPANK plug-in ask of a daemon, and what a daemon compares with Slurm
// by itself.
package jobs

// Flow:
//
//	controller.go  PrologSlurmctld: the job's licences -> a lease for each node, or none;
//	               EpilogSlurmctld: the end of them all, once Slurm is done with the job
//	prolog.go      Prolog: the lease that the controller has reserved, or one of its own;
//	               Epilog: its release
//	env.go         SPANK: what the job's tasks need, or why they must not run
//	request.go     what slurmctld has of a job -> what is asked of the pool
//	reconcile.go   the controller's look at all leases and all of Slurm's jobs
//	capacity.go    the licences that a pool cannot serve now are held back
//	here.go        the node's own knowledge of which jobs it has
//
// Slurm repeats, reorders and forgets its scripts. So nothing here waits for another
// half: a lease has the epoch of the daemon that first heard of the run, an Epilog
// ends what there is up to now, and what is not known is asked when a task starts.
//
// A job that asks for nothing costs a node one entry in memory. One that does has a
// note in the ledger, so that a restart forgets no refusal and a reboot no lease, and
// a mark, by which the plug-in knows without the daemon that the job cannot do without
// it.
//
// Locking: mu guards the maps and what is in an entry, and is held over no call.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// Host is the daemon's host role, *host.Host.
type Host interface {
	Acquire(ctx context.Context, p rpc.Peer, r lease.Request) (lease.Lease, string, error)
	Release(ctx context.Context, p rpc.Peer, id string, key lease.Key, reason string) error
	Pool(ctx context.Context, p rpc.Peer, name string) ([]rpc.Pool, error)
	Sponsor(ctx context.Context, reqs []lease.Request) ([]lease.Lease, error)
	Attach(ctx context.Context, key lease.Key) (l lease.Lease, found bool, err error)
	Held(key lease.Key) (l lease.Lease, socket string, ok bool)
	EndJob(ctx context.Context, cluster, job string, nodes []string, upTo uint64, reason string) (unreached []string, err error)
	Reports(ctx context.Context, cluster, job string) ([]lease.Report, error)
	All(ctx context.Context) (map[string][]lease.Status, map[string]error)
	Epoch() uint64
}

// Pool is what jobs need to know of one.
type Pool struct {
	Licence string            // one unit is one percent of a GPU
	Types   map[string]string // type of GPU: the licence that it takes besides
}

// Marks are files by which the plug-in knows, without the daemon, which jobs have
// something of ours: *jobsock.Notes.
type Marks interface {
	Put(job string) error
	Remove(job string)
	Keep(jobs map[string]bool)
}

// Partition is what a partition's jobs get unless they say otherwise.
type Partition struct {
	Policy lease.Policy
	Place  lease.Place
	Mem    uint64 // bytes of each fraction; 0 by its percentage
}

// Settings are those that a reload may change.
type Settings struct {
	Pools      map[string]Pool
	Partitions map[string]Partition
	RoomWait   time.Duration
	Report     bool          // into AdminComment
	Silence    time.Duration // of lease.silence, to compare it with Slurm's
}

// Config is what the service needs. Zero times mean the defaults.
type Config struct {
	Node       string
	Cluster    string
	Controller bool   // this node runs slurmctld
	User       uint32 // SlurmUser, who may call the controller's two methods
	Lib        string // directory of the shim, in a job's eyes
	Spool      string // SlurmdSpoolDir; "" asks Slurm
	Boot       string // this boot's id; "" asks the kernel

	Host     Host
	Slurm    slurm.Controller
	Ledger   *ledger.Ledger // the host's
	Marks    Marks
	Settings Settings
	// Line is what AdminComment says of a job, "" for nothing.
	Line func([]lease.Report) string
	Log  *slog.Logger

	Reconcile time.Duration // 1 min
	Look      time.Duration // between two looks at the node's own jobs; 10 s
	Gone      time.Duration // without any step, a job that had some is over; 1 min
	Retry     time.Duration // between two tries to get room; 500 ms
}

// startTime bounds what a start waits for owners.
const startTime = 2 * time.Second

// maxEntries bounds what is remembered of jobs that ask for nothing.
const maxEntries = 1 << 14

// entry is what this node knows of a job.
type entry struct {
	note  note
	wait  chan struct{} // closed when the answer is there; nil then
	seen  bool          // its extern step was here
	gone  time.Time     // since when nothing of it is here
	since time.Time
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
	Boot    string         `json:"boot"`
	At      time.Time      `json:"at"`
	// What only its Prolog was told of the run, for one that is settled later.
	Account string            `json:"account,omitempty"`
	Name    string            `json:"name,omitempty"`
	Wishes  map[string]string `json:"wishes,omitempty"`
}

// Service implements rpc.JobService.
type Service struct {
	cfg  Config
	log  *slog.Logger
	base context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup
	ask  chan struct{} // bounds questions to slurmctld that anybody may cause
	wake chan struct{} // a job's end is to be waited for

	mu       sync.Mutex
	set      Settings
	jobs     map[string]*entry
	overs    map[string]over // jobs whose end is waited for
	spool    string
	checks   map[string]rpc.Check
	suspects map[string]string // leases without a job at the last look, by id
	absent   map[string]int    // owners by the number of looks at which they were silent
	mute     bool              // that reports cannot be written was said
}

var _ rpc.JobService = (*Service)(nil)

// New reads what was known before, and ends what another boot left. Run does the rest.
func New(ctx context.Context, cfg Config) (*Service, error) {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&cfg.Reconcile, time.Minute)
	set(&cfg.Look, 10*time.Second)
	set(&cfg.Gone, time.Minute)
	set(&cfg.Retry, 500*time.Millisecond)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Boot == "" {
		id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, err
		}
		cfg.Boot = strings.TrimSpace(string(id))
	}
	s := &Service{
		cfg: cfg, log: cfg.Log, set: cfg.Settings, ask: make(chan struct{}, 4),
		jobs: map[string]*entry{}, overs: map[string]over{}, wake: make(chan struct{}, 1),
		checks: map[string]rpc.Check{}, suspects: map[string]string{}, absent: map[string]int{},
	}
	s.base, s.end = context.WithCancel(context.Background())
	if err := s.load(ctx); err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

// Close ends what goes on aside. Leases stay.
func (s *Service) Close() {
	s.end()
	s.wg.Wait()
}

// SetSettings takes over what a reload changed.
func (s *Service) SetSettings(set Settings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set = set
}

func (s *Service) settings() Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.set
}

// Checks are findings about Slurm, for the daemon's health.
func (s *Service) Checks() []rpc.Check {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]rpc.Check, 0, len(s.checks))
	for _, c := range s.checks {
		out = append(out, c)
	}
	return out
}

// found sets the finding of that name; an empty text takes it away.
func (s *Service) found(name string, level rpc.Level, text, remedy string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text == "" {
		delete(s.checks, name)
		return
	}
	s.checks[name] = rpc.Check{Name: name, Level: level, Text: text, Remedy: remedy}
}

func (s *Service) key(job string) lease.Key {
	return lease.Key{Cluster: s.cfg.Cluster, Job: job, Node: s.cfg.Node}
}

const (
	jobNote  = "job/"
	overNote = "over/"
)

// load reads the ledger's notes.
func (s *Service) load(ctx context.Context) error {
	all, err := s.notes()
	if err != nil {
		return err
	}
	keep := map[string]bool{}
	ctx, cancel := context.WithTimeout(ctx, startTime) // what owners do not hear now they hear later
	defer cancel()
	for job, n := range all.jobs {
		if n.Boot != s.cfg.Boot {
			// Nothing of it has outlived the boot, and its Epilog may never come.
			s.log.Info("job of before this node's boot is over", "job", job)
			s.release(ctx, job, "its node was booted anew")
			s.forget(job)
			continue
		}
		if _, _, ok := s.cfg.Host.Held(s.key(job)); n.Outcome == "" && ok {
			n.Outcome = rpc.JobGranted
		}
		s.jobs[job] = &entry{note: n, since: time.Now()}
		keep[job] = !n.Unsure
	}
	s.cfg.Marks.Keep(keep)
	for _, o := range all.over {
		s.waitOver(o)
	}
	return nil
}

// notes are what the ledger has of this package.
type notes struct {
	jobs map[string]note
	over []over
}

func (s *Service) notes() (notes, error) {
	out := notes{jobs: map[string]note{}}
	err := s.cfg.Ledger.View(func(tx *ledger.Tx) error {
		return tx.All(ledger.Notes, func(key string, raw json.RawMessage) error {
			switch job, isJob := strings.CutPrefix(key, jobNote); {
			case isJob:
				var n note
				if err := json.Unmarshal(raw, &n); err != nil {
					return fmt.Errorf("ledger %s: %s: %w", s.cfg.Ledger.Path(), key, err)
				}
				out.jobs[job] = n
			case strings.HasPrefix(key, overNote):
				var o over
				if err := json.Unmarshal(raw, &o); err != nil {
					return fmt.Errorf("ledger %s: %s: %w", s.cfg.Ledger.Path(), key, err)
				}
				out.over = append(out.over, o)
			}
			return nil
		})
	})
	return out, err
}

// begin makes a job's entry, whose answer is awaited at wait, unless somebody is at it.
func (s *Service) begin(n note) (e *entry, first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e = s.jobs[n.Job]; e != nil && e.wait != nil {
		return e, false
	}
	s.trim()
	e = &entry{note: n, wait: make(chan struct{}), since: time.Now()}
	s.jobs[n.Job] = e
	return e, true
}

// put remembers what is known of a Prolog, and done that it is all. It says false if an
// Epilog has come meanwhile. What asks for nothing needs no disk.
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

// trim makes room by forgetting a job that asks for nothing; mu is held. Should it start
// another step, slurmctld is asked again.
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

// forget drops all that is known of a job here.
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

// known is what an entry says now.
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

// await waits for an entry's answer.
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

// root is whom the host role sees calling.
var root = rpc.Peer{PID: os.Getpid()}

// release returns what this node holds for a job, and remembers that it is over.
func (s *Service) release(ctx context.Context, job, reason string) (had bool) {
	key := s.key(job)
	if l, _, ok := s.cfg.Host.Held(key); ok {
		key, had = l.Request.Key, true
	} else {
		key.Incarnation = s.cfg.Host.Epoch()
	}
	if err := s.cfg.Host.Release(ctx, root, "", key, reason); err != nil {
		s.log.Error("release of a job", "job", job, "error", err)
	}
	return had
}

// may says whether the caller may see what is uid's.
func may(p rpc.Peer, uid uint32) bool { return p.UID == 0 || p.UID == uid }

func checkRun(run rpc.JobRun) error {
	if !slurm.IsJobID(run.Job) {
		return lease.Errorf(lease.Invalid, "%s is no job id of Slurm's", strconv.Quote(run.Job[:min(len(run.Job), 64)]))
	}
	return nil
}

func codeOf(err error) lease.Code {
	var e *lease.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return lease.Down
}
