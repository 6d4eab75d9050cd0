// Package owner is the role of a daemon whose node has GPUs. It alone decides which leases have
// them, writes that into its ledger before it answers, and ends leases that are no longer used.
package owner

// Flow of a lease; the points are those of package fault:
//
//	Reserve   check -> (reserve-1) ledger -> (reserve-2) controllers told, see promise.go
//	          -> (reserve-3) answer; granted at once, as Confirm from grant-1
//	Confirm   check -> (confirm-1) ledger: granted -> (grant-1) audit -> (grant-2)
//	          answer
//	Offer     check, ticket -> (open-1) answer
//	Admit     check, worker started -> (open-2) audit -> (open-3) answer
//	Renew     noted -> (renew-1) answer
//	Set       check -> (set-1) ledger -> (set-2) audit -> (set-3) schedules -> (set-4)
//	          answer
//	Drain     check -> ledger -> audit -> answer
//	Release   check -> (release-0) ledger: ending -> (release-1) sessions killed and
//	          waited for -> (release-2) ledger: gone, tombstones -> (release-3)
//	          audit -> (release-4) memory -> (release-5) answer
//	Sweep     found -> (reclaim-1) as Release from its release-0
//	End of a job by a controller: ledger: tombstone -> (endjob-1) all its leases
//	          as Release from its release-1, at once -> (endjob-2) answer
//
// A line of the audit log about a lease is in the ledger's outbox, with the change
// that it tells of, until it is written; so a crash neither loses nor doubles it.
//
// A lease holds its part of the GPUs from the first write to the last, sessions
// included: what is free has been left by everybody.
//
// Locking: write is taken by whoever changes leases and is held over the ledger's
// fsync and the audit's write, so that decisions, ledger and log have one order.
// mu guards what is in memory, is taken after write, and is never held over I/O.
// A record is read under either lock, and replaced under both. Nobody waits for a
// session or a worker with a lock held.
//
// Time: what ends a lease is counted on the clock since boot, which no one can
// set. The wall clock is for people, and for leases that a reboot cut off.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/fault"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/probe"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Devices returns the GPUs as they are now, without what is free of them, and how old that
// knowledge is. It must answer at once, from memory.
type Devices func() (gpus []lease.GPU, age time.Duration)

// Workers runs the session processes.
type Workers interface {
	// Start lends a worker to l and gives it conn, which stays the caller's to
	// close. gpus are those of l's grants, in their order.
	Start(ctx context.Context, l lease.Lease, r lease.SessionRequest, conn *os.File, gpus []lease.GPU) (lease.Session, error)
	// Sessions are the live sessions of a lease.
	Sessions(leaseID string) []lease.Session
	// Use is the lease's memory account, one for each grant.
	Use(leaseID string) []lease.Use
	// End kills the lease's sessions and waits until none lives. An error says
	// that one still lives. No sessions are no error.
	End(ctx context.Context, leaseID string) error
	// Total is what the lease has used over its whole life. It is known until Forget.
	Total(leaseID string) lease.Total
	// Share gives a granted lease its part of its GPUs' compute time, as its grants and
	// its policy say, or changes it. It is the lease's until Forget.
	Share(l lease.Lease) error
	// Shares is what a lease has had of it, one for each grant; none where time is not
	// shared.
	Shares(leaseID string) []lease.Share
	// Forget drops the account of a lease that End has ended.
	Forget(leaseID string) error
	// OnEnd has f called when a session has ended, before End returns for it.
	OnEnd(f func(s lease.Session, reason string))
}

// Adopted is what Workers may implement besides: leases with sessions or accounts that were
// found at the start, so that those without a lease can be ended.
type Adopted interface{ Leases() []string }

// Attacher is what Workers may implement besides: sessions that outlive their connections.
type Attacher interface {
	// Attachable refuses a further connection of a process of the lease's host to a session, unless the lease has one of that
	// number and the process is its client.
	Attachable(leaseID string, n int, client uint32) error
	// Attach passes the session a connection in place of the one that was lost. It stays the caller's to close.
	Attach(leaseID string, n int, conn *os.File) error
	// Bulk passes it a bulk connection, which stays the caller's to close.
	Bulk(leaseID string, n int, conn *os.File) error
	// Trace passes a connection over which a trace is wanted to the session of a process of the lease's host. It stays the caller's to close.
	Trace(leaseID string, pid uint32, conn *os.File) error
	// EndClient ends the sessions of a process of the lease's host, unless they end by themselves at once.
	EndClient(leaseID string, pid uint32)
}

// Tickets prepares the data connection of a session.
type Tickets interface {
	Offer(r lease.SessionRequest) (lease.Offer, error)
}

// Auditor is the audit log.
type Auditor interface {
	Write(audit.Event) error
	Has(event, leaseID, owner string, change uint64) (bool, error)
	Sync() error // the lines so far survive a crash of the machine
}

// Limits can be changed while the daemon runs.
type Limits struct {
	Reserve   time.Duration // the longest reservation; 0: lease.DefaultReserve
	Silence   time.Duration // how long a host may be silent before its leases without sessions end; 0: lease.DefaultSilence
	MaxLife   time.Duration // of any lease, 0 for no limit
	RunLife   time.Duration // of a lease outside of Slurm's jobs, 0 for no other limit
	Idle      Idles         // leases without work
	Tombstone time.Duration // how long an ended lease is remembered; 0: lease.DefaultTombstone
	MaxPerGPU int           // leases on one GPU; 0: lease.DefaultMaxPerGPU
	Sessions  int           // of one lease; 0: lease.DefaultMaxSessions
	End       time.Duration // one attempt to end a lease's sessions, 0 for 10 s
	MinUID    uint32        // of the users who may have leases, 0 for all
}

func (l Limits) withDefaults() Limits {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&l.Reserve, lease.DefaultReserve)
	def(&l.Silence, lease.DefaultSilence)
	def(&l.Tombstone, lease.DefaultTombstone)
	def(&l.End, 10*time.Second)
	if l.MaxPerGPU <= 0 {
		l.MaxPerGPU = lease.DefaultMaxPerGPU
	}
	if l.Sessions <= 0 {
		l.Sessions = lease.DefaultMaxSessions
	}
	return l
}

// Config is what an owner needs. Only Clock, Log and Limits may be left out.
type Config struct {
	Name    string // of this node
	Version string // Sluice's
	Ledger  *ledger.Ledger
	Devices Devices
	Workers Workers
	// Tickets may be nil until SetTickets, since the data listener in turn
	// needs Admit.
	Tickets Tickets
	Audit   Auditor
	Clock   Clock
	Log     *slog.Logger
	Limits  Limits
	// Notice is called once when a lease becomes idle and the site has a command for that; it must not wait. nil for none.
	Notice func(Notice)
	// Controllers are the nodes whose daemons speak for all nodes; see controller.go.
	Controllers []string
}

// Owner implements lease.LocalOwner. Close it before the ledger.
type Owner struct {
	cfg   Config
	clock Clock
	log   *slog.Logger
	hook  func(string) // a test's fault points

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	counts counts

	refusals limit.Sources // by host and uid
	probes   *probe.Admission

	write   sync.Mutex
	queue   []line   // lines that the audit log does not have yet, in order
	written []uint64 // lines of the outbox that the log has and has not synced yet

	mu       sync.RWMutex
	limits   Limits
	control  map[string]bool // nodes
	tickets  Tickets
	leases   map[string]*entry      // by id
	keys     map[keyName]*entry     // by key without incarnation
	tombs    map[string]tombSeen    // by name in the ledger
	drains   map[string]lease.Drain // by UUID, "" for all GPUs; replaced as a whole
	places   map[string]int         // by UUID, the index that a GPU had when it was drained
	life     uint64                 // of this process, for those who watch; by chance, and not 0
	unwatch  chan struct{}          // see StopWatches
	journal  journal
	where    whereabouts
	promises promises
	unknown  map[string]int // by host: its tombstones of leases that never existed
	closed   bool
}

// keyName is a key without its incarnation: it has one lease at a time.
type keyName struct{ cluster, job, node string }

func nameOf(k lease.Key) keyName { return keyName{k.Cluster, k.Job, k.Node} }

// entry is a lease in memory.
type entry struct {
	id       string
	rec      record
	deadline time.Duration // since boot, 0 for none
	renewed  time.Duration // since boot: when the host last renewed it, or when this process started
	said     time.Time     // the same on the wall clock, for people
	attached bool          // its host, not only its sponsor, has renewed it with this process
	ctx      context.Context
	cancel   context.CancelFunc // ends starts of sessions

	activity activity

	warned   bool // that its life time is nearly over
	ending   bool
	trying   bool          // a goroutine is ending it
	tried    chan struct{} // closed when an attempt to end it failed
	tryErr   error
	ended    chan struct{}          // closed when it is gone
	starting int                    // sessions being started
	opens    uint64                 // sessions ever started by this process
	idle     chan struct{}          // closed when ending and starting is 0
	begun    map[chan struct{}]bool // of sessions being started; each is closed when its session has been
}

// Counters of this process.
type Counters struct{ Reserved, Granted, Refused, Released, Reclaimed, Opened, SessionsRefused, Attached uint64 }

type counts struct {
	reserved, granted, refused, released, reclaimed, opened, sessionsRefused, attached atomic.Uint64
}

// Counters returns the counters of this process.
func (o *Owner) Counters() Counters {
	c := &o.counts
	return Counters{c.reserved.Load(), c.granted.Load(), c.refused.Load(), c.released.Load(), c.reclaimed.Load(), c.opened.Load(), c.sessionsRefused.Load(), c.attached.Load()}
}

// New loads the leases in the ledger. Run keeps them.
func New(cfg Config) (*Owner, error) {
	if cfg.Name == "" || cfg.Ledger == nil || cfg.Devices == nil || cfg.Workers == nil || cfg.Audit == nil {
		return nil, errors.New("owner: name, ledger, devices, workers and audit are all needed")
	}
	if cfg.Clock == nil {
		c, err := SystemClock()
		if err != nil {
			return nil, err
		}
		cfg.Clock = c
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	o := &Owner{cfg: cfg, clock: cfg.Clock, log: cfg.Log, limits: cfg.Limits.withDefaults(), tickets: cfg.Tickets, probes: probe.NewAdmission(cfg.Name, cfg.Log),
		leases: make(map[string]*entry), keys: make(map[keyName]*entry), tombs: make(map[string]tombSeen), unknown: make(map[string]int)}
	o.life, o.unwatch = rand.Uint64()|1, make(chan struct{})
	o.promises.last = rand.Uint64()
	o.ctx, o.cancel = context.WithCancel(context.Background())
	o.SetControllers(cfg.Controllers)
	if err := o.load(); err != nil {
		return nil, err
	}
	// The lines are written before any new one: the audit log has the order of the ledger.
	if err := o.flush(); err != nil {
		o.log.Warn("lines wait for the audit log", "lines", len(o.queue), "error", err)
	}
	cfg.Workers.OnEnd(o.sessionEnded)
	for _, e := range o.leases {
		if e.rec.Lease.State == lease.Granted { // a lease that is ending still gets its report
			o.shareTime(e.rec.Lease)
		}
	}
	return o, nil
}

// load reads the ledger.
func (o *Owner) load() error {
	recs, err := ledger.All[record](o.cfg.Ledger, ledger.Leases)
	if err != nil {
		return err
	}
	for id, rec := range recs {
		if o.keys[nameOf(rec.Lease.Request.Key)] != nil {
			return fmt.Errorf("ledger %s: lease %s: key %s has another lease too; %s", o.cfg.Ledger.Path(), id, rec.Lease.Request.Key, "release one of them")
		}
		o.adopt(rec)
	}
	tombs, err := ledger.All[tombstone](o.cfg.Ledger, ledger.Tombstones)
	if err != nil {
		return err
	}
	for name, t := range tombs {
		o.bury(name, t)
	}
	if err := o.loadDrains(); err != nil {
		return err
	}
	if err := o.loadPromises(); err != nil {
		return err
	}
	return o.loadQueue()
}

// loadQueue fills the queue from the outbox.
func (o *Owner) loadQueue() error {
	var queue []line
	err := o.cfg.Ledger.View(func(tx *ledger.Tx) error {
		return tx.Queued(func(seq uint64, raw json.RawMessage) error {
			l := line{seq: seq, doubt: true}
			if err := json.Unmarshal(raw, &l.event); err != nil {
				return fmt.Errorf("ledger %s: outbox %d: %w", o.cfg.Ledger.Path(), seq, err)
			}
			queue = append(queue, l)
			return nil
		})
	})
	if err == nil {
		o.queue = queue
	}
	return err
}

// adopt makes an entry of a record.
func (o *Owner) adopt(rec record) *entry {
	e := &entry{id: rec.Lease.ID, rec: rec, deadline: rec.deadline(o.clock), renewed: o.clock.Up(), said: o.clock.Now(), ending: rec.Ending != nil,
		tried: make(chan struct{}), ended: make(chan struct{}), idle: make(chan struct{})}
	e.activity.since = e.renewed
	e.ctx, e.cancel = context.WithCancel(o.ctx)
	if e.ending {
		e.cancel()
		close(e.idle)
	}
	o.leases[rec.Lease.ID] = e
	o.keys[nameOf(rec.Lease.Request.Key)] = e
	o.journal.add(change{Ref: refOf(e, false), by: rec.Lease.Sponsor})
	return e
}

// drop forgets an entry that is gone, and wakes those who wait for that.
func (o *Owner) drop(e *entry) {
	o.remove(e)
	close(e.ended)
}

func (o *Owner) remove(e *entry) {
	o.journal.add(change{Ref: refOf(e, true)})
	delete(o.leases, e.id)
	if k := nameOf(e.rec.Lease.Request.Key); o.keys[k] == e {
		delete(o.keys, k)
	}
	e.cancel()
}

// SetTickets gives the owner its data listener.
func (o *Owner) SetTickets(t Tickets) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tickets = t
}

// SetLimits changes the limits for later requests.
func (o *Owner) SetLimits(l Limits) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.limits = l.withDefaults()
	o.journal.add(change{})
}

func (o *Owner) lim() Limits {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.limits
}

// Close ends the work in the background. It ends no lease and no session.
func (o *Owner) Close() {
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.cancel()
	o.wg.Wait()
}

// background runs f on a goroutine that Close waits for. After Close it does not run f.
func (o *Owner) background(f func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return
	}
	o.wg.Add(1)
	go func() {
		defer o.wg.Done()
		f()
	}()
}

func (o *Owner) point(name string) {
	fault.Point(name)
	if o.hook != nil {
		o.hook(name)
	}
}

// Inventory returns the GPUs of this node and what is free of them.
func (o *Owner) Inventory(context.Context) (lease.Inventory, error) {
	gpus, age := o.gpus()
	return lease.Inventory{Owner: o.cfg.Name, Version: o.cfg.Version, GPUs: gpus, Age: age, Time: time.Now()}, nil
}

// gpus returns the GPUs with what is free of them.
func (o *Owner) gpus() ([]lease.GPU, time.Duration) {
	known, age := o.cfg.Devices()
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.whatIsFree(known), age
}

// whatIsFree adds to the GPUs what is free of them. mu is held.
func (o *Owner) whatIsFree(known []lease.GPU) []lease.GPU {
	gpus := append([]lease.GPU(nil), known...)
	index := make(map[string]int, len(gpus))
	for i := range gpus {
		g := &gpus[i]
		g.Owner, g.FreePercent, g.FreeMem, g.Leases = o.cfg.Name, 100, g.Mem, 0
		index[g.UUID] = i
	}
	for _, e := range o.leases {
		for _, gr := range e.rec.Lease.Grants {
			i, ok := index[gr.GPU]
			if !ok {
				continue
			}
			g := &gpus[i]
			g.FreePercent -= min(gr.Percent, g.FreePercent)
			g.FreeMem -= min(gr.Mem, g.FreeMem)
			g.Leases++
		}
	}
	for i := range gpus {
		gpus[i].Drain = o.drainOf(gpus[i].UUID)
		if gpus[i].Leases >= o.limits.MaxPerGPU {
			// No lease can have the rest.
			gpus[i].FreePercent, gpus[i].FreeMem = 0, 0
		}
	}
	return gpus
}

// List returns every lease whose host is host, "" for all.
func (o *Owner) List(_ context.Context, host string) ([]lease.Status, error) {
	now := o.clock.Up()
	o.mu.RLock()
	all := make([]lease.Status, 0, len(o.leases))
	for _, e := range o.leases {
		if host == "" || e.rec.Lease.Host == host {
			s := lease.Status{Lease: e.rec.Lease, Renewed: e.said}
			s.Idle, s.IdleNoted = o.idleOf(e, now)
			all = append(all, s)
			if e.ending {
				all[len(all)-1].State = lease.Ended // but its part of the GPUs is still taken
			}
		}
	}
	o.mu.RUnlock()
	for i := range all {
		all[i].Use = o.cfg.Workers.Use(all[i].ID)
		for j := len(all[i].Use); j < len(all[i].Grants); j++ { // no session yet; what is granted says that it is known
			all[i].Use = append(all[i].Use, lease.Use{Granted: all[i].Grants[j].Mem})
		}
		all[i].Sessions = o.cfg.Workers.Sessions(all[i].ID)
		all[i].Shares = o.cfg.Workers.Shares(all[i].ID)
	}
	return all, nil
}

// Renew notes that the host still uses these leases. A sponsor's renewals count until the
// lease's own host has renewed it: from then on the owner has to notice when that host falls
// silent.
func (o *Owner) Renew(_ context.Context, host string, ids []string) ([]string, error) {
	known := make([]string, 0, len(ids))
	now, wall := o.clock.Up(), o.clock.Now()
	o.mu.Lock()
	for _, id := range ids {
		e := o.leases[id]
		switch {
		case e == nil || e.ending:
			continue
		case e.rec.Lease.Host == host:
			e.attached = true
		case e.attached || e.rec.Lease.Sponsor != host:
			continue
		}
		e.renewed, e.said = now, wall
		known = append(known, id)
	}
	o.mu.Unlock()
	o.point("renew-1-noted")
	return known, nil
}

// Claim implements lease.Owner. It is written down: a sponsor's release may come after a restart, and before the host renews
// the lease again.
func (o *Owner) Claim(_ context.Context, host, id string) error {
	o.write.Lock()
	defer o.write.Unlock()
	if err := o.sure(); err != nil {
		return err
	}
	e := o.leases[id]
	if e == nil || e.ending || e.rec.Lease.Host != host || e.rec.Lease.State != lease.Granted {
		return lease.Errorf(lease.Over, "lease %s of node %s has ended, or never was", form.Name(id), form.Name(host))
	}
	rec := e.rec
	if !rec.Claimed {
		rec.Claimed = true
		if err := o.cfg.Ledger.Put(ledger.Leases, id, rec); err != nil {
			return lease.Errorf(lease.Internal, "claim of lease %s cannot be written: %v", id, err)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	e.rec, e.attached = rec, true
	e.renewed, e.said = o.clock.Up(), o.clock.Now()
	return nil
}

var _ lease.LocalOwner = (*Owner)(nil)
