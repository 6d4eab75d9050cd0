// Package host is the daemon's role on a node whose jobs use leases: it acquires
// them from the owners of a pool, renews and releases them, and opens sessions on
// them through a socket for each lease.
package host

// Flow:
//
//	acquire.go  request -> inventories -> placement -> attempt, until one succeeds
//	attempt.go  placement -> reserve -> confirm -> socket, step by step, each with its undo
//	quota.go    what a user may hold of all owners together
//	holdings.go what users hold, as a controller's daemon knows it, for quotas in large pools
//	sponsor.go  the same for other nodes, by the controller's daemon
//	attach.go   a node's daemon takes what was got for it
//	owners.go   several owners are asked at once; peers.go has one of them
//	endjob.go   the controller's daemon tells owners which jobs have ended
//	watch.go    in large pools it knows which owners that concerns, by overview.go
//	release.go  lease -> its owners, as often as it takes
//	keep.go     renewals, holders, life times, owners that come back
//	parts.go    what a step of the job may have of the lease
//	socket.go   a client process that package leasesock has let in -> owner -> its connected socket
//
// What must survive a crash is in the ledger: a record for every lease from
// before the first owner hears of it until the last has heard of its end. The
// ledger is the host's own file, not the owner's of the same node.
//
// Locking: mu guards the maps and what is in a held; it is never held over a
// call to an owner or a write to the disk. A held's deliver lock orders the
// deliveries of its release.

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/fault"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/leasesock"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/probe"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/internal/boottime"
)

// Peer is an owner: the name that it has to prove, and where it listens.
type Peer struct {
	Name string
	Addr string // HOST:PORT of its control listener
}

// Pool is a named list of owners that leases are placed on.
type Pool struct {
	Owners []Peer
	Place  lease.Place
	Grace  time.Duration // of leases that do not say: see lease.Request; 0: as each owner says
}

// Auditor is the audit log.
type Auditor interface{ Write(audit.Event) error }

// Files are what container engines read of a lease: *containers.Files.
type Files interface {
	Write(l lease.Lease) error // its directory exists already
	Remove(id string)          // the files outside of that directory
	Keep(live func(id string) bool)
}

type noFiles struct{}

func (noFiles) Write(lease.Lease) error { return nil }
func (noFiles) Remove(string)           {}
func (noFiles) Keep(func(string) bool)  {}

// Config is what the role needs. Zero times and limits mean the defaults.
type Config struct {
	Node    string // this node's name, by which the owners know it
	Cluster string
	Version string
	RunDir  string // the sockets are RunDir/leases/ID/sock

	Ledger    *ledger.Ledger // its own file
	Audit     Auditor
	AuditFile string // that Explain reads, "" for none
	Log       *slog.Logger

	Local lease.LocalOwner // the owner in this process, nil for none
	// DialOwner makes a client for another node's owner; it does not wait for
	// the connection.
	DialOwner func(name, addr string) (lease.Owner, error)
	// DialData opens the data connection of a session at another node:
	// data.Dialer's Open.
	DialData func(ctx context.Context, owner lease.Owner, addr, host string, r lease.SessionRequest) (*os.File, error)

	// DialProbe opens the connections of a probe, and says whether they are encrypted.
	DialProbe func(ctx context.Context, owner lease.Prober, addr, host string, r lease.ProbeRequest) (conns []*probe.Conn, encrypted bool, err error)

	Pools      map[string]Pool
	Users      bool // users may acquire leases of their own
	SlurmUser  uint32
	Controller bool // see SetController
	Quotas     []Quota
	// Who looks a user up for quotas. If it is nil, this node's directory is asked.
	Who func(ctx context.Context, uid uint32) (Who, error)

	Reserve   time.Duration // life of a reservation
	Renew     time.Duration // between two renewals
	Tombstone time.Duration // how long an ended key is refused
	MaxLife   time.Duration // longest life time of a lease; 0 any
	RunLife   time.Duration // longest life time of a lease outside of Slurm's jobs; 0 as MaxLife
	Ask       time.Duration // deadline of one question to an owner; 2 s
	BackOff   time.Duration // pause after an owner did not answer, from a 32nd of it up to 12 times it; 5 s

	// Files are for container engines; nil for none.
	Files Files

	// Health and Stats add what other parts of the daemon know; nil for nothing.
	Health func(context.Context) []rpc.Check
	Stats  func(context.Context) []rpc.GPUStats

	hook      func(string) // a test's fault points
	noSockets bool         // in a test of thousands of nodes, whose clock is not the machine's
	few       int          // a test's; see few
	// up is the time since boot, or a test's.
	up func() time.Duration
}

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&c.Reserve, lease.DefaultReserve)
	set(&c.Renew, lease.DefaultRenew)
	set(&c.Tombstone, lease.DefaultTombstone)
	set(&c.Ask, 2*time.Second)
	set(&c.BackOff, 5*time.Second)
	if c.few == 0 {
		c.few = few
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.up == nil {
		c.up = boottime.Now
	}
	if c.Who == nil {
		c.Who = newDirectory().who
	}
	if c.Files == nil {
		c.Files = noFiles{}
	}
	return c
}

// phase of a record.
type phase string

const (
	acquiring phase = "acquiring" // owners may know of it
	granted   phase = "granted"
	releasing phase = "releasing" // the owners in Pending have not heard yet
)

// record is a lease in the host's ledger.
type record struct {
	Lease   lease.Lease       `json:"lease"`
	Phase   phase             `json:"phase"`
	Addrs   map[string]string `json:"addrs"` // of its owners, which a pool may have lost meanwhile
	Pending []string          `json:"pending,omitempty"`
	Reason  string            `json:"reason,omitempty"`
	Over    bool              `json:"over,omitempty"` // the key has ended with it
	// Parts are what steps of the job may have of the lease that have asked for less. One with 0 percent may have nothing. It is replaced as a whole.
	Parts []lease.Part `json:"parts,omitempty"`
}

// held is a record and what belongs to it in this process.
type held struct {
	rec      record
	sock     *leasesock.Socket
	opening  sync.Mutex         // of sock, one after the other
	lost     int                // looks in a row that found no socket
	stop     context.CancelFunc // of the holder's watch
	deadline time.Time          // on the monotonic clock; zero: none
	deliver  longLock
	setting  longLock // one change after the other, or owners would keep parts of both; before deliver
	// early says that the lease was taken over before its Prolog. If it is lost then, its
	// sponsor could not get all that the job needs, and may try again for the same run.
	early bool
	// Of a release that takes the lease back for its sponsor, see deliver.
	quiet   bool // it has not been told of yet
	claimed int  // how many owners have said that the lease's node has claimed it
	stays   bool // all have, and the lease lives on
}

// name is a key without its incarnation.
type name struct{ cluster, job, node string }

func nameOf(k lease.Key) name { return name{k.Cluster, k.Job, k.Node} }

func (n name) String() string { return fmt.Sprintf("%q/%q/%q", n.cluster, n.job, n.node) }

// tombstone says that a key, and its earlier incarnations, have ended.
type tombstone struct {
	Key    lease.Key `json:"key"`
	Reason string    `json:"reason"`
	Ended  time.Time `json:"ended"`
	Owners []string  `json:"owners,omitempty"` // that had the lease
	since  time.Time // monotonic; after a restart it counts from the start, too long rather than too short
}

// flight is an acquisition in progress.
type flight struct {
	done        chan struct{}
	cancel      context.CancelCauseFunc
	incarnation uint64 // of the request, 0 if it takes any
}

// Host is the role.
type Host struct {
	cfg                Config
	log                *slog.Logger
	base               context.Context // of work that outlives its caller
	end                context.CancelFunc
	wg                 sync.WaitGroup
	socks              *leasesock.Set
	acquires, explains crew
	healthAll          sync.Mutex // held while all nodes are asked for their health
	probes             crew
	userProbes         probe.Gate
	wake               chan struct{} // makes Run compute its next wait at once

	mu      sync.Mutex
	pools   map[string]Pool
	users   bool
	quotas  []Quota       // replaced as a whole
	runLife time.Duration // see Config
	peers   map[string]*peer
	leases  map[string]*held
	keys    map[name]*held
	flights map[name]*flight
	tombs   map[name]tombstone
	gone    map[string]time.Time // ids that have ended recently
	clients map[watched]*os.File // processes with sessions at other nodes
	ends    map[endName]*jobEnd  // ends of jobs that some owners have not been sent yet
	closed  bool

	attaching map[string]*attachConn // by owner; guarded by mu

	clock     clock
	strangers limit.Reports // of strangers at leases' sockets
	refusals  limit.Sources // of users, by uid

	attached, attachesFailed atomic.Uint64 // see Counters

	controller atomic.Bool // see SetController
	view       *overview
	holds      *holdings
	began      map[string]bool   // owners of the leases that were in the ledger at the start
	pooled     []Peer            // the owners of all pools, by name; replaced as a whole, like addrs
	addrs      map[string]string // theirs

	noting sync.Mutex // changes of the ends' notes; before mu
}

var _ rpc.LocalService = (*Host)(nil)

// New reads the ledger and opens the sockets of the leases in it. Acquisitions that an earlier
// process did not finish are taken back. Run does the rest.
func New(cfg Config) (*Host, error) {
	cfg = cfg.withDefaults()
	h := &Host{
		cfg: cfg, log: cfg.Log, users: cfg.Users, quotas: cfg.Quotas, runLife: cfg.RunLife,
		peers: make(map[string]*peer), attaching: make(map[string]*attachConn), leases: make(map[string]*held), keys: make(map[name]*held),
		flights: make(map[name]*flight), tombs: make(map[name]tombstone), gone: make(map[string]time.Time), clients: make(map[watched]*os.File), ends: make(map[endName]*jobEnd),
		wake: make(chan struct{}, 1), view: newOverview(), holds: newHoldings(cfg.up),
		acquires: crew{doing: "acquiring leases", most: 64, each: 4},
		explains: crew{doing: "reading the audit log", most: 2, each: 1},
		probes:   crew{doing: "probing", most: 8, each: 1},
	}
	h.base, h.end = context.WithCancel(context.Background())
	h.controller.Store(cfg.Controller)
	if err := h.SetPools(cfg.Pools); err != nil {
		return nil, err
	}
	if err := h.newSockets(); err != nil {
		return nil, err
	}
	if err := h.load(); err != nil {
		return nil, err
	}
	return h, nil
}

// load reads the ledger.
func (h *Host) load() error {
	recs, err := ledger.All[record](h.cfg.Ledger, ledger.Leases)
	if err != nil {
		return err
	}
	if err := h.loadNotes(); err != nil {
		return err
	}
	now := time.Now()
	err = h.cfg.Ledger.View(func(tx *ledger.Tx) error {
		return tx.All(ledger.Tombstones, func(key string, raw json.RawMessage) error {
			var t tombstone
			if err := json.Unmarshal(raw, &t); err != nil {
				return fmt.Errorf("ledger %s: tombstone %s: %w", h.cfg.Ledger.Path(), key, err)
			}
			t.since = now
			h.tombs[nameOf(t.Key)] = t
			return nil
		})
	})
	if err != nil {
		return err
	}
	var live []*held
	h.began = make(map[string]bool)
	for id, rec := range recs {
		for _, o := range lease.Owners(rec.Lease.Grants) {
			h.began[o] = true
		}
		hd := &held{rec: rec}
		h.leases[id] = hd
		switch rec.Phase {
		case acquiring:
			// No caller has heard of this lease: it is taken back, and a caller that asks again
			// gets another.
			hd.rec.Phase, hd.rec.Pending, hd.rec.Reason = releasing, lease.Owners(rec.Lease.Grants), "its host's daemon was restarted while acquiring it"
		case granted:
			h.keys[nameOf(rec.Lease.Request.Key)] = hd
			hd.deadline = lifeLeft(&rec.Lease)
			if rec.Lease.Host != h.cfg.Node {
				continue
			}
			if err := h.openSocket(hd); err != nil {
				h.log.Error("lease without socket", "lease", id, "error", err)
			}
			live = append(live, hd)
		}
	}
	h.cleanDirs()
	h.log.Info("host role ready", "leases", len(h.keys), "unfinished", len(h.leases)-len(h.keys))
	for _, hd := range live { // last: from here on other goroutines change what was read above
		h.watchHolder(hd)
	}
	return nil
}

// lifeLeft is when a lease ends, zero for never. The wall clock is read once, and never makes
// the time left longer than the life time.
func lifeLeft(l *lease.Lease) time.Time {
	if l.Expires.IsZero() {
		return time.Time{}
	}
	left := time.Until(l.Expires)
	if l.Request.Life > 0 {
		left = min(left, l.Request.Life)
	}
	return time.Now().Add(max(0, left))
}

// SetPools replaces the pools. Leases stay where they are.
func (h *Host) SetPools(pools map[string]Pool) error {
	addrs := make(map[string]string)
	for pn, p := range pools {
		for _, o := range p.Owners {
			if a, ok := addrs[o.Name]; ok && a != o.Addr {
				return fmt.Errorf("pool %s: owner %s is at %s here and at %s in another pool", pn, o.Name, o.Addr, a)
			}
			addrs[o.Name] = o.Addr
		}
	}
	all := make([]Peer, 0, len(addrs))
	for n, a := range addrs {
		all = append(all, Peer{n, a})
		h.mu.Lock()
		now := len(addrs) <= h.cfg.few || h.peers[n] != nil // else when it is asked something
		h.mu.Unlock()
		if !now {
			continue
		}
		if _, err := h.peer(n, a); err != nil {
			return err
		}
	}
	slices.SortFunc(all, func(a, b Peer) int { return strings.Compare(a.Name, b.Name) })
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pools, h.pooled, h.addrs = pools, all, addrs
	return nil
}

// SetRunLife changes the longest life time of later leases outside of Slurm's jobs, 0 for the one of all leases.
func (h *Host) SetRunLife(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.runLife = d
}

// SetUsers says whether users may acquire leases.
func (h *Host) SetUsers(may bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.users = may
}

// Close stops answering. Leases, sockets' files and sessions stay, for the next process.
func (h *Host) Close() {
	h.mu.Lock()
	h.closed = true
	var socks []*leasesock.Socket
	for _, hd := range h.leases {
		if hd.sock != nil {
			socks = append(socks, hd.sock)
		}
		if hd.stop != nil {
			hd.stop()
		}
	}
	peers := h.peers
	h.peers = make(map[string]*peer)
	h.mu.Unlock()
	h.end()
	for _, s := range socks {
		s.Close()
	}
	h.socks.Wait()
	h.wg.Wait()
	for _, p := range peers {
		p.close()
	}
}

// put writes a record.
func (h *Host) put(rec *record) error {
	if err := h.cfg.Ledger.Put(ledger.Leases, rec.Lease.ID, rec); err != nil {
		return lease.Errorf(lease.Internal, "lease %s cannot be kept: %v", rec.Lease.ID, err)
	}
	return nil
}

// point marks a step at which a test may kill this daemon.
func (h *Host) point(name string) {
	fault.Point(name)
	if h.cfg.hook != nil {
		h.cfg.hook(name)
	}
}

// Socket is the path of a lease's socket.
func (h *Host) Socket(id string) string { return h.socks.Path(id) }

// refusal says whether a refusal to a user is to be logged, and how many of that user's were
// left out before it. A user may cause any number of refusals, and gets only so many lines a
// second in the daemon's log and in the audit log. Root gets any number.
func (h *Host) refusal(uid uint32) (skipped uint64, ok bool) {
	if uid == 0 {
		return 0, true
	}
	return h.refusals.Pass(strconv.FormatUint(uint64(uid), 10))
}

// audit writes a line. The audit log itself counts and reports the lines that it loses.
func (h *Host) audit(e audit.Event) {
	if e.Host == "" {
		e.Host = h.cfg.Node
	}
	_ = h.cfg.Audit.Write(e)
}
