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
//	notes.go       what is known of the node's jobs
//	request.go     what slurmctld has of a job -> what is asked of the pool
//	reconcile.go   the controller's look at all leases and all of Slurm's jobs
//	capacity.go    the licences that a pool cannot serve now are held back
//	comments.go    what Slurm is told of a job: refusals, and what it has used
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
	"github.com/sluice-hpc/sluice/internal/form"
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
	LastEpoch(ctx context.Context, cluster, job string) uint64
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
	Lend   lease.Lend
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
	// Containers are the changes for container engines; nil for none.
	Containers func(lease.Lease) []rpc.EnvOp
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

// Service implements rpc.JobService.
type Service struct {
	cfg  Config
	log  *slog.Logger
	base context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup
	ask  chan struct{} // bounds questions to slurmctld that anybody may cause
	wake chan struct{} // a job's end is to be waited for
	told chan struct{} // a report is to be written

	mu       sync.Mutex
	set      Settings
	jobs     map[string]*entry
	overs    map[string]over // jobs whose end is waited for
	tellings []telling       // reports to be written
	spool    string
	checks   map[string]rpc.Check
	suspects map[string]string // leases without a job at the last look, by id
	absent   map[string]int    // owners by the number of looks at which they were silent
	mute     bool              // that reports cannot be written was said
	counters Counters
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
		jobs: map[string]*entry{}, overs: map[string]over{}, wake: make(chan struct{}, 1), told: make(chan struct{}, 1),
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

// Counters are counted since the start.
type Counters struct {
	Granted, Refused, Requeued uint64 // Prologs of this node, and of slurmctld on the controller, by how they ended
	Stray                      uint64 // leases that were ended because Slurm, or the node, no longer has their job
}

// Counters are those of now.
func (s *Service) Counters() Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counters
}

func (s *Service) counted(o rpc.JobOutcome) {
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

func (s *Service) countStray() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counters.Stray++
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
	if !form.IsJobID(run.Job) {
		return lease.Errorf(lease.Invalid, "%s is no job id of Slurm's", strconv.Quote(run.Job[:min(len(run.Job), 64)]))
	}
	return nil
}

func codeOf(err error) lease.Code { return lease.CodeOf(err) }
