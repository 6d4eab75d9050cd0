// Package jobctld serves Slurm's jobs beside slurmctld: PrologSlurmctld and
// EpilogSlurmctld, and the controller's regular look at all leases and licences.
package jobctld

// Flow:
//
//	controller.go  PrologSlurmctld: the job's licences -> a lease for each node, or none
//	ends.go        EpilogSlurmctld: the end of them all, once Slurm is done with the job
//	comments.go    reports of what jobs have used, into their AdminComment
//	reconcile.go   a look at all leases and all of Slurm's jobs
//	capacity.go    licences that a pool cannot serve now are held back
//
// Locking: mu guards the maps and the reports that wait. No call is made while it is held.

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
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
	Pool(ctx context.Context, p rpc.Peer, name string) ([]rpc.Pool, error)
	Sponsor(ctx context.Context, reqs []lease.Request) ([]lease.Lease, error)
	Withdraw(ctx context.Context, id, reason string) bool
	Refused(k lease.Key, uid uint32, err error, times int)
	EndJob(ctx context.Context, cluster, job string, nodes []string, upTo uint64, reason string) (unreached []string, err error)
	Reports(ctx context.Context, cluster, job string) ([]lease.Report, error)
	All(ctx context.Context) (map[string][]lease.Brief, map[string]error)
	Epoch() uint64
	LastEpoch(ctx context.Context, cluster, job string) uint64
}

// Config is what the service needs. Zero times mean the defaults.
type Config struct {
	Cluster string
	User    uint32 // SlurmUser, who may call both methods besides root

	Host   Host
	Slurm  slurm.Controller
	Ledger *ledger.Ledger // the host's
	State  *jobs.State
	// Line is what AdminComment says of a job, "" for nothing.
	Line func([]lease.Report) string
	Log  *slog.Logger

	Reconcile time.Duration // 1 min
	Retry     time.Duration // between two attempts to get room; jobs.Retry
}

// Service implements rpc.ControllerJobs.
type Service struct {
	cfg  Config
	log  *slog.Logger
	base context.Context // of work that outlives its caller, until Close
	stop context.CancelFunc
	wg   sync.WaitGroup
	wake chan struct{} // ends has changed
	told chan struct{} // a report is to be written

	mu      sync.Mutex
	ends    map[string]jobEnd // by job
	pending []pendingReport   // reports to be written
	orphans map[string]string // leases without a job at the last look, by id
	doubled map[string]bool   // leases whose jobs had another one on the same node at the last look, by id
	idle    map[string]bool   // leases whose jobs' comments say that they are idle, by id
	absent  map[string]int    // owners by the number of looks at which they were silent
	mute    bool              // a warning that reports cannot be written was logged
}

var _ rpc.ControllerJobs = (*Service)(nil)

// New reads the ends of jobs that an earlier daemon did not finish. Run does the rest.
func New(cfg Config) (*Service, error) {
	cfg.Reconcile = cmp.Or(cfg.Reconcile, time.Minute)
	cfg.Retry = cmp.Or(cfg.Retry, jobs.Retry)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Service{
		cfg: cfg, log: cfg.Log, ends: map[string]jobEnd{}, wake: make(chan struct{}, 1), told: make(chan struct{}, 1),
		orphans: map[string]string{}, doubled: map[string]bool{}, idle: map[string]bool{}, absent: map[string]int{},
	}
	s.base, s.stop = context.WithCancel(context.Background())
	if err := s.load(); err != nil {
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

// Run ends jobs, writes reports and reconciles, until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { s.runEnds(ctx) })
	wg.Go(func() { s.runReports(ctx) })
	wg.Go(func() { s.runReconcile(ctx) })
	wg.Wait()
	return nil
}

// comment sets a job's AdminComment in the background: its script does not wait for it.
func (s *Service) comment(job, text string) {
	s.wg.Go(func() { jobs.Comment(s.base, s.cfg.Slurm, s.log, job, text) })
}

// mayControl refuses a caller who may not speak for slurmctld.
func mayControl(p rpc.Peer, slurmUser uint32) error {
	if p.UID != 0 && p.UID != slurmUser {
		return lease.Errorf(lease.Denied, "uid %d is neither root nor SlurmUser; see slurm.user in sluice.yaml", p.UID)
	}
	return nil
}

// Elsewhere implements rpc.ControllerJobs on a node without slurmctld: it refuses both calls.
type Elsewhere struct {
	Node string
	User uint32 // SlurmUser
}

var _ rpc.ControllerJobs = Elsewhere{}

// PrologController implements rpc.ControllerJobs.
func (e Elsewhere) PrologController(_ context.Context, p rpc.Peer, _ rpc.JobRun) (rpc.JobAnswer, error) {
	return rpc.JobAnswer{}, e.refuse(p)
}

// EpilogController implements rpc.ControllerJobs.
func (e Elsewhere) EpilogController(_ context.Context, p rpc.Peer, _ rpc.JobRun) ([]lease.Report, error) {
	return nil, e.refuse(p)
}

func (e Elsewhere) refuse(p rpc.Peer) error {
	if err := mayControl(p, e.User); err != nil {
		return err
	}
	return lease.Errorf(lease.Invalid, "this node, %s, runs no slurmctld, says slurm.controllers in sluice.yaml; if it does, add it there and restart sluiced", e.Node)
}
