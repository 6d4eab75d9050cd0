// Package jobnode serves Slurm's jobs on the node where they run: Prolog, Epilog, and what
// the SPANK plug-in and sluice report ask.
package jobnode

// Flow:
//
//	prolog.go  Prolog: the lease that the controller has reserved, or one of its own;
//	           Epilog: its release
//	env.go     SPANK: what the job's tasks need, or why they must not run
//	step.go    SPANK: the part of the job's fraction that a step has asked for
//	notes.go   what is known of the node's jobs
//	here.go    which jobs have steps on this node, by slurmd's spool directory
//
// A job that asks for nothing costs one entry in memory. A job that asks for a fraction has
// a note in the ledger, so that a restart forgets no refusal and a reboot no lease, and a
// mark, by which the plug-in knows without the daemon that the job cannot run without its
// lease.
//
// Locking: mu guards the jobs, their entries and spool. No call is made while it is held.

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// Host is the part of the daemon's host role that this package needs, *host.Host.
type Host interface {
	jobs.PoolSource
	Acquire(ctx context.Context, p rpc.Peer, r lease.Request) (lease.Lease, string, error)
	Refused(k lease.Key, uid uint32, err error, times int)
	Release(ctx context.Context, p rpc.Peer, id string, key lease.Key, reason string) error
	Attach(ctx context.Context, key lease.Key) (l lease.Lease, found bool, err error)
	Held(key lease.Key) (l lease.Lease, socket string, ok bool)
	GivePart(key lease.Key, part lease.Part, here func(step uint32) bool) (lease.Part, error)
	DropParts(key lease.Key, here func(step uint32) bool) error
	Reports(ctx context.Context, cluster, job string) ([]lease.Report, error)
	Epoch() uint64
	LastEpoch(ctx context.Context, cluster, job string) uint64
}

// Marks are files by which the plug-in knows, without the daemon, which jobs have
// something of ours: *jobsock.Notes.
type Marks interface {
	Put(job string) error
	Remove(job string)
	Keep(jobs map[string]bool)
}

// Config is what the service needs. Zero times mean the defaults.
type Config struct {
	Node    string
	Cluster string
	User    uint32 // SlurmUser, who may see every job's report
	Lib     string // directory of the shim, in a job's eyes
	Spool   string // SlurmdSpoolDir; "" asks Slurm
	Boot    string // this boot's id; "" asks the kernel

	Host   Host
	Slurm  slurm.Controller
	Ledger *ledger.Ledger // the host's
	Marks  Marks
	State  *jobs.State
	// Containers are the changes for container engines; nil for none.
	Containers func(lease.Lease) []rpc.EnvOp
	Log        *slog.Logger

	Look  time.Duration // between two looks at the node's own jobs; 10 s
	Gone  time.Duration // a job that had an extern step and has had no step for so long is over; 1 min
	Retry time.Duration // between two attempts to get room; jobs.Retry
}

// startTime bounds what a start waits for owners.
const startTime = 2 * time.Second

// atATime is how many questions of each kind slurmctld is asked at a time.
const atATime = 4

// Service implements rpc.NodeJobs.
type Service struct {
	cfg  Config
	log  *slog.Logger
	base context.Context // of work that outlives its caller, until Close
	stop context.CancelFunc
	wg   sync.WaitGroup

	// Each bounds the questions to slurmctld that are asked at a time: for steps of jobs that have a lease here, and for jobs
	// that this node knows nothing of, by users that Knows knows and by others. Those can be anybody, with any number of uids.
	askStep, askKnown, askOther chan struct{}

	sees atomic.Bool // the kernel shows which step a process belongs to; a change of that takes a restart of slurmd without jobs

	mu    sync.Mutex
	jobs  map[string]*entry
	spool string
}

var _ rpc.NodeJobs = (*Service)(nil)

// New reads the notes of the jobs, and ends what another boot left. Run does the rest.
func New(ctx context.Context, cfg Config) (*Service, error) {
	cfg.Look = cmp.Or(cfg.Look, 10*time.Second)
	cfg.Gone = cmp.Or(cfg.Gone, time.Minute)
	cfg.Retry = cmp.Or(cfg.Retry, jobs.Retry)
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
	s := &Service{cfg: cfg, log: cfg.Log, jobs: map[string]*entry{}}
	for _, ask := range []*chan struct{}{&s.askStep, &s.askKnown, &s.askOther} {
		*ask = make(chan struct{}, atATime)
	}
	s.base, s.stop = context.WithCancel(context.Background())
	if err := s.load(ctx); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

// Close ends the work that goes on in the background. Leases stay.
func (s *Service) Close() {
	s.stop()
	s.wg.Wait()
}

func (s *Service) key(job string) lease.Key {
	return lease.Key{Cluster: s.cfg.Cluster, Job: job, Node: s.cfg.Node}
}

// release returns what this node holds for a job, and remembers that it is over.
func (s *Service) release(ctx context.Context, job, reason string) (had bool) {
	key := s.key(job)
	if l, _, ok := s.cfg.Host.Held(key); ok {
		key, had = l.Request.Key, true
	} else {
		key.Incarnation = s.cfg.Host.Epoch()
	}
	if err := s.cfg.Host.Release(ctx, jobs.Root, "", key, reason); err != nil {
		s.log.Error("release of a job", "job", job, "error", err)
	}
	return had
}

// comment sets a job's AdminComment in the background: its Prolog does not wait for it.
func (s *Service) comment(job, text string) {
	s.wg.Go(func() { jobs.Comment(s.base, s.cfg.Slurm, s.log, job, text) })
}
