package owner

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/audit/audittest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

const gib = 1 << 30

// clock is a clock that a test sets.
type clock struct {
	mu   sync.Mutex
	up   time.Duration
	wall time.Time
	boot string
}

func newClock() *clock { return &clock{up: time.Hour, wall: time.Unix(1.8e9, 0), boot: "boot-1"} }

func (c *clock) Now() time.Time    { c.mu.Lock(); defer c.mu.Unlock(); return c.wall }
func (c *clock) Up() time.Duration { c.mu.Lock(); defer c.mu.Unlock(); return c.up }
func (c *clock) Boot() string      { c.mu.Lock(); defer c.mu.Unlock(); return c.boot }
func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.up, c.wall = c.up+d, c.wall.Add(d)
}
func (c *clock) set(t time.Time) { c.mu.Lock(); defer c.mu.Unlock(); c.wall = t }
func (c *clock) reboot() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.boot, c.up = c.boot+"x", time.Minute
}

// workers are session processes without processes: they outlive the daemon.
type workers struct {
	mu         sync.Mutex
	n          int
	live       map[string][]lease.Session
	made       map[string]uint64 // sessions of a lease that ever were, until it is forgotten
	onEnd      func(lease.Session, string)
	unreported []lease.Session // ended while no daemon was there
	down       bool            // the daemon is
	endErr     error
	shares     map[string]lease.Lease // as they were told last
	did        map[string]lease.Counts
	busy       map[string]time.Duration
	lends      map[string]bool
	cut, grace time.Duration // what Cut says
	gate       chan struct{} // Start waits for it, if there is one
	started    chan struct{}
}

func newWorkers() *workers {
	return &workers{live: make(map[string][]lease.Session), made: make(map[string]uint64), shares: make(map[string]lease.Lease),
		did: make(map[string]lease.Counts), busy: make(map[string]time.Duration), lends: make(map[string]bool), started: make(chan struct{}, 100)}
}

func (w *workers) Start(ctx context.Context, l lease.Lease, r lease.SessionRequest, conn *os.File, gpus []lease.GPU) (lease.Session, error) {
	w.started <- struct{}{}
	if w.gate != nil {
		select {
		case <-w.gate:
		case <-ctx.Done():
			return lease.Session{}, ctx.Err()
		}
	}
	if len(gpus) != len(l.Grants) {
		return lease.Session{}, fmt.Errorf("%d gpus for %d grants", len(gpus), len(l.Grants))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	<-w.started
	w.n++
	s := lease.Session{ID: fmt.Sprintf("s%d", w.n), Lease: l.ID, Client: r.PID, Program: r.Program, Kind: r.Kind}
	w.live[l.ID] = append(w.live[l.ID], s)
	w.made[l.ID]++
	return s, nil
}

func (w *workers) Sessions(id string) []lease.Session {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.live[id])
}

func (w *workers) Use(string) []lease.Use { return nil }

// Total counts the sessions that were told to the test; Forget ends that.
func (w *workers) Total(id string) lease.Total {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.made[id]
	c := w.did[id]
	if n == 0 {
		return lease.Total{Counts: c, GPUTime: w.busy[id]}
	}
	c.Calls += 10 * n
	return lease.Total{Use: []lease.Use{{Granted: gib, Peak: n << 20}}, Counts: c, Sessions: n, GPUTime: time.Duration(n)*time.Second + w.busy[id]}
}

// works has a lease's sessions do more.
func (w *workers) works(id string, f func(c *lease.Counts, busy *time.Duration)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c, busy := w.did[id], w.busy[id]
	f(&c, &busy)
	w.did[id], w.busy[id] = c, busy
}

func (w *workers) Cut(lease.Lease) (since, grace time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cut, w.grace
}

func (w *workers) Lend(id string, lend bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lends[id] = lend
}

func (w *workers) Share(l lease.Lease) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shares[l.ID] = l
	return nil
}

// Shares has as many seconds as percent.
func (w *workers) Shares(id string) (all []lease.Share) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.shares[id].Grants {
		all = append(all, lease.Share{Held: time.Duration(g.Percent) * time.Second})
	}
	return all
}

func (w *workers) Forget(id string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.made, id)
	delete(w.shares, id)
	return nil
}

func (w *workers) Leases() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var ids []string
	for id := range w.live {
		ids = append(ids, id)
	}
	return ids
}

func (w *workers) End(_ context.Context, id string) error {
	w.mu.Lock()
	err, live := w.endErr, w.live[id]
	if err == nil {
		delete(w.live, id)
	}
	w.mu.Unlock()
	if err != nil {
		return err
	}
	for _, s := range live {
		w.tell(s, "killed with its lease")
	}
	return nil
}

func (w *workers) tell(s lease.Session, reason string) {
	w.mu.Lock()
	f := w.onEnd
	if f == nil || w.down {
		f = nil
		w.unreported = append(w.unreported, s)
	}
	w.mu.Unlock()
	if f != nil {
		f(s, reason)
	}
}

func (w *workers) OnEnd(f func(lease.Session, string)) {
	w.mu.Lock()
	unreported := w.unreported
	w.unreported, w.onEnd, w.down = nil, f, false
	w.mu.Unlock()
	for _, s := range unreported {
		f(s, "ended while the daemon was down")
	}
}

// exit ends one session, the i-th of the lease.
func (w *workers) exit(id string, i int) {
	w.mu.Lock()
	s := w.live[id][i]
	w.live[id] = slices.Delete(w.live[id], i, i+1)
	w.mu.Unlock()
	w.tell(s, "exit 0")
}

// auditor is the audit log, which a test can fail, and which a dead daemon does
// not write to.
type auditor struct {
	*audit.Log
	mu   sync.Mutex
	err  error
	dead bool
	lost func(audit.Event) // lines that a dead daemon would have written
}

func (a *auditor) Write(e audit.Event) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.dead {
		a.lost(e)
		return nil
	}
	if a.err != nil {
		return a.err
	}
	return a.Log.Write(e)
}

func (a *auditor) fail(err error) { a.mu.Lock(); defer a.mu.Unlock(); a.err = err }
func (a *auditor) die()           { a.mu.Lock(); defer a.mu.Unlock(); a.dead = true }

type tickets struct{}

func (tickets) Offer(lease.SessionRequest) (lease.Offer, error) {
	return lease.Offer{Addr: ":7072"}, nil
}

// node is an owner that can be killed and started again.
type node struct {
	*Owner
	t       testing.TB
	name    string
	dir     string
	clock   *clock
	workers *workers
	ledger  *ledger.Ledger
	audit   *auditor
	devices []lease.GPU
	limits  Limits
	control []string
	log     *slog.Logger
	notices []Notice
	syncs   bool // the ledger, after the next start

	crashAt  string     // point
	crashIn  int        // its pass, from 1
	counting sync.Mutex // of passes
	crashed  chan struct{}
}

func newNode(t testing.TB, name string, gpus int) *node {
	n := &node{t: t, name: name, dir: t.TempDir(), clock: newClock(), workers: newWorkers(), limits: Limits{Reserve: 2 * time.Minute, Silence: 5 * time.Minute, Tombstone: time.Hour},
		log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	for i := range gpus {
		n.devices = append(n.devices, lease.GPU{UUID: fmt.Sprintf("GPU-%s-%d", name, i), Index: i, Name: "NVIDIA H200", Mem: uint64(40+40*(i%2)) * gib, Overhead: 512 << 20, Healthy: true})
	}
	n.start()
	t.Cleanup(n.stop)
	return n
}

func (n *node) start() {
	n.t.Helper()
	var err error
	if n.ledger, err = ledger.Open(filepath.Join(n.dir, "ledger.db"), n.name, ledger.Options{NoSync: !n.syncs}); err != nil {
		n.t.Fatal(err)
	}
	l, err := audit.Open(n.auditPath(), audit.Options{MaxSize: 8 << 20, Keep: 1000})
	if err != nil {
		n.t.Fatal(err)
	}
	// A session whose end nobody wrote down is found to have ended by the next daemon.
	n.audit = &auditor{Log: l, lost: func(e audit.Event) {
		if e.Event == audit.SessionEnd {
			n.workers.mu.Lock()
			defer n.workers.mu.Unlock()
			n.workers.unreported = append(n.workers.unreported, lease.Session{ID: e.Session, Lease: e.Lease, Client: e.PID, Program: e.Program})
		}
	}}
	n.Owner, err = New(Config{Name: n.name, Version: "test", Ledger: n.ledger, Devices: func() ([]lease.GPU, time.Duration) { return n.devices, 0 },
		Workers: n.workers, Tickets: tickets{}, Audit: n.audit, Clock: n.clock, Log: n.log, Limits: n.limits, Controllers: n.control,
		Notice: func(x Notice) { n.notices = append(n.notices, x) }})
	if err != nil {
		n.t.Fatal(err)
	}
	n.crashed = make(chan struct{})
	o, a, crashed := n.Owner, n.audit, n.crashed
	var once sync.Once
	o.hook = func(p string) {
		select {
		case <-crashed:
			runtime.Goexit()
		default:
		}
		if !n.crashes(p) {
			return
		}
		once.Do(func() {
			// From here on nothing that this owner does is seen.
			a.die()
			n.workers.mu.Lock()
			n.workers.down = true
			n.workers.mu.Unlock()
			close(crashed)
			o.cancel()
		})
		runtime.Goexit()
	}
}

// crashes counts passes of p; leases of one job end at the same time.
func (n *node) crashes(p string) bool {
	n.counting.Lock()
	defer n.counting.Unlock()
	if n.crashIn == 0 || n.crashAt != "" && n.crashAt != p && n.crashAt != "any" {
		return false
	}
	n.crashIn--
	return n.crashIn == 0
}

func (n *node) auditPath() string { return filepath.Join(n.dir, "audit.log") }

func (n *node) stop() {
	n.Owner.Close()
	_ = n.ledger.Close()
	_ = n.audit.Close()
}

// kill ends the daemon without a word, and starts it again.
func (n *node) kill() {
	n.audit.die()
	n.workers.mu.Lock()
	n.workers.down = true
	n.workers.mu.Unlock()
	n.stop()
	n.start()
}

// do runs f, during which the owner may crash; it says whether it did.
func (n *node) do(f func()) (crashed bool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
	select {
	case <-n.crashed:
		n.kill()
		return true
	default:
		return false
	}
}

func (n *node) history() []audit.Event {
	n.t.Helper()
	var all []audit.Event
	if err := audit.Read(n.auditPath(), func(e *audit.Event) bool { all = append(all, *e); return true }); err != nil {
		n.t.Fatal(err)
	}
	return all
}

// check holds the log against the rules.
func (n *node) check(final bool) {
	n.t.Helper()
	r := audittest.Rules{Owner: n.name, Mem: make(map[string]uint64), Final: final}
	for _, g := range n.devices {
		r.Mem[g.UUID] = g.Mem
	}
	for _, err := range audittest.History(n.history(), r) {
		n.t.Errorf("owner %s: %v", n.name, err)
	}
}

// want makes a lease of percents, the i-th on GPU i.
func (n *node) want(host, job string, percents ...uint32) lease.Lease {
	l := lease.Lease{ID: form.NewLeaseID(), Host: host, Request: lease.Request{Key: lease.Key{Cluster: "c", Job: job, Node: host}, UID: 1000}}
	for i, p := range percents {
		l.Request.Fractions = append(l.Request.Fractions, lease.Fraction{Percent: p})
		g := n.devices[i]
		l.Grants = append(l.Grants, lease.Grant{Owner: n.name, GPU: g.UUID, Percent: p, Mem: g.Mem / lease.Granule * uint64(p) / 100 * lease.Granule, Order: i})
	}
	return l
}

func request(id string) lease.SessionRequest {
	return lease.SessionRequest{Lease: id, Kind: wire.SessionCompute, PID: 42, UID: 1000, Program: "python"}
}

// admit opens a session as the data listener does.
func (n *node) admitOne(id string) error {
	f, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	return n.Owner.Admit(context.Background(), request(id), f)
}
