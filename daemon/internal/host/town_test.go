package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
)

// noWorkers are sessions of which there are none.
type noWorkers struct{}

func (noWorkers) Start(context.Context, lease.Lease, lease.SessionRequest, *os.File, []lease.GPU) (lease.Session, error) {
	return lease.Session{}, errors.New("no sessions in this test")
}
func (noWorkers) Sessions(string) []lease.Session   { return nil }
func (noWorkers) Use(string) []lease.Use            { return nil }
func (noWorkers) End(context.Context, string) error { return nil }
func (noWorkers) OnEnd(func(lease.Session, string)) {}
func (noWorkers) Forget(string) error               { return nil }
func (noWorkers) Share(lease.Lease) error           { return nil }
func (noWorkers) Shares(string) []lease.Share       { return nil }
func (noWorkers) Total(string) lease.Total          { return lease.Total{} }

// skewed is the system's clock, moved on by a test.
type skewed struct {
	owner.Clock
	mu sync.Mutex
	by time.Duration
}

func (c *skewed) Up() time.Duration { c.mu.Lock(); defer c.mu.Unlock(); return c.Clock.Up() + c.by }
func (c *skewed) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.by += d
}

// way is the way from one host to an owner: it proves the host's name, can be cut,
// and can have the owner do a call whose answer is lost.
type way struct {
	*owner.Owner
	t *town
	h string // the host at its end
	l *life
}

func (w way) up(host string) error {
	w.t.mu.Lock()
	defer w.t.mu.Unlock()
	if host != "" && host != w.h {
		panic("host " + w.h + " calls itself " + host)
	}
	if w.l.over() {
		return lease.Errorf(lease.Down, "%s is dead", w.h)
	}
	if w.t.cut[[2]string{w.h, w.name()}] || w.t.cut[[2]string{"", w.name()}] {
		return lease.Errorf(lease.Down, "owner %s is cut off", w.name())
	}
	return nil
}

func (w way) name() string { v, _ := w.Owner.Inventory(context.Background()); return v.Owner }

func (w way) Inventory(ctx context.Context) (lease.Inventory, error) {
	if err := w.up(""); err != nil {
		return lease.Inventory{}, err
	}
	return w.Owner.Inventory(ctx)
}
func (w way) Reserve(ctx context.Context, host string, l lease.Lease, ttl time.Duration) (lease.Lease, error) {
	if err := w.up(host); err != nil {
		return lease.Lease{}, err
	}
	have, err := w.Owner.Reserve(ctx, host, l, ttl)
	w.t.mu.Lock()
	f := w.t.reserved
	w.t.mu.Unlock()
	if f != nil && err == nil && f(have) {
		return lease.Lease{}, lease.Errorf(lease.Down, "the answer of %s is lost", w.name())
	}
	return have, err
}
func (w way) Confirm(ctx context.Context, host, id string) error {
	if err := w.up(host); err != nil {
		return err
	}
	return w.Owner.Confirm(ctx, host, id)
}
func (w way) Renew(ctx context.Context, host string, ids []string) ([]string, error) {
	if err := w.up(host); err != nil {
		return nil, err
	}
	known, err := w.Owner.Renew(ctx, host, ids)
	w.t.mu.Lock()
	defer w.t.mu.Unlock()
	w.t.renewals[w.h]++
	return known, err
}
func (w way) Claim(ctx context.Context, host, id string) error {
	if err := w.up(host); err != nil {
		return err
	}
	return w.Owner.Claim(ctx, host, id)
}
func (w way) Release(ctx context.Context, host, id string, key lease.Key, reason string) error {
	if err := w.up(host); err != nil {
		return err
	}
	return w.Owner.Release(ctx, host, id, key, reason)
}
func (w way) Watch(ctx context.Context, host string, since lease.Mark, wait time.Duration) (lease.Changes, error) {
	if err := w.up(host); err != nil {
		return lease.Changes{}, err
	}
	ctx, cancel := w.uncut(ctx, host)
	defer cancel()
	c, err := w.Owner.Watch(ctx, host, since, wait)
	if down := w.up(host); down != nil {
		return lease.Changes{}, down
	}
	return c, err
}
func (w way) WatchHeld(ctx context.Context, host string, q lease.HeldWatch) (lease.HeldChanges, error) {
	if err := w.up(host); err != nil {
		return lease.HeldChanges{}, err
	}
	ctx, cancel := w.uncut(ctx, host)
	defer cancel()
	c, err := w.Owner.WatchHeld(ctx, host, q)
	if down := w.up(host); down != nil {
		return lease.HeldChanges{}, down
	}
	return c, err
}
func (w way) HeldEverywhere(ctx context.Context, host string, q lease.HeldQuestion) (lease.HeldSum, error) {
	if err := w.up(host); err != nil {
		return lease.HeldSum{}, err
	}
	return w.Owner.HeldEverywhere(ctx, host, q)
}

// uncut ends a long call when the way is cut in the middle of it, as the keep-alive of the connection does.
func (w way) uncut(ctx context.Context, host string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		for t := time.NewTicker(20 * time.Millisecond); ctx.Err() == nil; <-t.C {
			if w.up(host) != nil {
				cancel()
			}
		}
	}()
	return ctx, cancel
}
func (w way) Register(ctx context.Context, host, cluster, job string, at []lease.Whereabouts) error {
	if err := w.up(host); err != nil {
		return err
	}
	return w.Owner.Register(ctx, host, cluster, job, at)
}
func (w way) Where(ctx context.Context, host, cluster, job string) ([]string, error) {
	if err := w.up(host); err != nil {
		return nil, err
	}
	return w.Owner.Where(ctx, host, cluster, job)
}
func (w way) List(ctx context.Context, host string) ([]lease.Status, error) {
	if err := w.up(host); err != nil {
		return nil, err
	}
	if host == "" && !w.Controller(w.h) {
		return nil, lease.Errorf(lease.Denied, "%s is no controller", w.h)
	}
	return w.Owner.List(ctx, host)
}
func (w way) Held(ctx context.Context, host string, of []lease.Holding) ([]lease.Held, error) {
	if err := w.up(host); err != nil {
		return nil, err
	}
	return w.Owner.Held(ctx, host, of)
}
func (w way) Reports(ctx context.Context, host, cluster, job string) ([]lease.Report, error) {
	if err := w.up(host); err != nil {
		return nil, err
	}
	return w.Owner.Reports(ctx, host, cluster, job)
}

// townFew is how many owners of a town are simply all asked: 0 for the default.
func townFew() int {
	n, _ := strconv.Atoi(os.Getenv("SLUICE_FEW"))
	return n
}

// town is a controller ("ctl"), nodes and real owners with two GPUs each.
type town struct {
	t      *testing.T
	dir    string
	owners map[string]*owner.Owner
	clock  *skewed
	hosts  map[string]*Host
	stops  map[string]func()
	lives  map[string]*life

	mu       sync.Mutex
	cut      map[[2]string]bool // host and owner; host "" is all
	renewals map[string]int     // that owners have answered a host
	crashAt  string             // point at which a host dies
	crashIn  int                // its pass
	crashes  int
	reserved func(lease.Lease) (lost bool) // what comes after a Reserve, nil nothing; the answer may be lost
}

// life is one process of a host's daemon.
type life struct {
	dead chan struct{} // closed when it was killed
	once sync.Once
}

func (l *life) over() bool {
	select {
	case <-l.dead:
		return true
	default:
		return false
	}
}

// kill ends the daemon at once: nothing more of it reaches an owner or its disk.
func (w *town) kill(l *life, book *ledger.Ledger) {
	l.once.Do(func() {
		close(l.dead)
		go book.Close() // after the change that is being made, if any
		w.mu.Lock()
		defer w.mu.Unlock()
		w.crashes++
	})
}

func newTown(t *testing.T, owners []string, hosts ...string) *town {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-town")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	sys, err := owner.SystemClock()
	if err != nil {
		t.Fatal(err)
	}
	w := &town{t: t, dir: dir, owners: make(map[string]*owner.Owner), clock: &skewed{Clock: sys}, hosts: make(map[string]*Host), stops: make(map[string]func()), lives: make(map[string]*life), cut: make(map[[2]string]bool), renewals: make(map[string]int)}
	for _, n := range owners {
		book, err := ledger.Open(filepath.Join(dir, n+".db"), n, ledger.Options{NoSync: true})
		if err != nil {
			t.Fatal(err)
		}
		log, err := audit.Open(filepath.Join(dir, n+".log"), audit.Options{})
		if err != nil {
			t.Fatal(err)
		}
		var gpus []lease.GPU
		for i := range 2 {
			gpus = append(gpus, lease.GPU{UUID: fmt.Sprint("GPU-", n, i), Index: i, Name: "NVIDIA H200", Mem: fakeMem, Overhead: 512 << 20, Healthy: true})
		}
		o, err := owner.New(owner.Config{Name: n, Ledger: book, Audit: log, Workers: noWorkers{}, Clock: w.clock, Controllers: []string{"ctl", "ctl2"},
			Devices: func() ([]lease.GPU, time.Duration) { return gpus, 0 }, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Limits: owner.Limits{Silence: time.Minute}})
		if err != nil {
			t.Fatal(err)
		}
		w.owners[n] = o
		t.Cleanup(func() { o.Close(); book.Close(); log.Close() })
	}
	for _, n := range hosts {
		w.start(n)
		t.Cleanup(func() { w.stop(n) })
	}
	return w
}

func (w *town) start(n string) {
	w.t.Helper()
	book, err := ledger.Open(filepath.Join(w.dir, n+".host.db"), n, ledger.Options{NoSync: true})
	if err != nil {
		w.t.Fatal(err)
	}
	log, err := audit.Open(filepath.Join(w.dir, n+".host.log"), audit.Options{})
	if err != nil {
		w.t.Fatal(err)
	}
	l := &life{dead: make(chan struct{})}
	pool := Pool{}
	for _, o := range slices.Sorted(maps.Keys(w.owners)) {
		pool.Owners = append(pool.Owners, Peer{o, o + ":7071"})
	}
	cfg := Config{
		Node: n, Cluster: "c", RunDir: filepath.Join(w.dir, "run-"+n), Ledger: book, Audit: log,
		Log: slog.New(slog.NewTextHandler(w.t.Output(), nil)), Pools: map[string]Pool{"default": pool},
		few: townFew(), Controller: strings.HasPrefix(n, "ctl"),
		Renew: 50 * time.Millisecond, Ask: 500 * time.Millisecond, BackOff: 50 * time.Millisecond,
		DialOwner: func(name, _ string) (lease.Owner, error) { return way{w.owners[name], w, n, l}, nil },
		hook: func(p string) {
			w.mu.Lock()
			die := false
			if w.crashAt == p && w.crashIn > 0 {
				w.crashIn--
				die = w.crashIn == 0
			}
			w.mu.Unlock()
			if die {
				w.kill(l, book)
			}
			if l.over() {
				runtime.Goexit()
			}
		},
	}
	h, err := New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = h.Run(ctx) }()
	w.hosts[n], w.lives[n] = h, l
	w.stops[n] = func() {
		end := func() { <-done; h.Close(); book.Close(); log.Close() }
		cancel()
		if l.over() {
			go end() // what it was killed at may hold it for ever
			return
		}
		end()
	}
}

func (w *town) stop(n string) {
	if f := w.stops[n]; f != nil {
		delete(w.stops, n)
		f()
	}
}

// again does f at a host until its daemon lives through it.
func (w *town) again(n string, f func(h *Host) error) {
	w.t.Helper()
	for {
		done := make(chan struct{})
		var err error
		go func() {
			defer close(done)
			err = lease.Errorf(lease.Down, "killed")
			err = f(w.hosts[n])
		}()
		<-done
		if w.lives[n].over() {
			w.restart(n)
			continue
		}
		if err != nil {
			w.t.Fatalf("%s: %v; there is %q", n, err, w.have())
		}
		return
	}
}

func (w *town) restart(n string) { w.t.Helper(); w.stop(n); w.start(n) }

// lose takes a host's ledger away.
func (w *town) lose(n string) {
	w.t.Helper()
	w.stop(n)
	if err := os.Remove(filepath.Join(w.dir, n+".host.db")); err != nil {
		w.t.Fatal(err)
	}
	w.start(n)
}

func (w *town) sever(host, owner string, cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[[2]string{host, owner}] = cut
}

// have is what owners have: job@node:owner:percent, sorted.
func (w *town) have() string {
	var all []string
	for n, o := range w.owners {
		list, _ := o.List(context.Background(), "")
		for _, s := range list {
			for _, g := range s.Grants {
				all = append(all, fmt.Sprintf("%s@%s:%s:%d", s.Request.Key.Job, s.Request.Key.Node, n, g.Percent))
			}
		}
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

func (w *town) wait(what string, f func() bool) {
	w.t.Helper()
	for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("not within 10 s: %s; there is %q", what, w.have())
		}
	}
}

// renewed waits until a host has renewed its leases some times more.
func (w *town) renewed(n string, times int) {
	w.t.Helper()
	count := func() int { w.mu.Lock(); defer w.mu.Unlock(); return w.renewals[n] }
	until := count() + times
	w.wait(n+" renews", func() bool { return count() >= until })
}

// met waits until hosts have asked all owners for leases that they do not know.
func (w *town) met(hosts ...string) {
	w.t.Helper()
	for _, n := range hosts {
		h := w.hosts[n]
		w.wait(n+" has asked the owners", func() bool {
			for _, p := range h.owners() {
				p.mu.Lock()
				known := p.known
				p.mu.Unlock()
				if !known {
					return false
				}
			}
			return true
		})
	}
}

func (w *town) records(n string) int {
	h := w.hosts[n]
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.leases)
}

// job is a run of a job with the same fractions on each node.
func job(id string, restart uint32, nodes []string, percents ...uint32) (reqs []lease.Request) {
	for _, n := range nodes {
		r := ask(id, percents...)
		r.Key.Node, r.Restart = n, restart
		reqs = append(reqs, r)
	}
	return reqs
}

func (w *town) sponsor(reqs []lease.Request) []lease.Lease {
	w.t.Helper()
	all, err := w.hosts["ctl"].Sponsor(context.Background(), reqs)
	if err != nil {
		w.t.Fatal(err)
	}
	return all
}

func (w *town) attach(n, id string) lease.Lease {
	w.t.Helper()
	l, found, err := w.hosts[n].Attach(context.Background(), lease.Key{Job: id})
	if err != nil || !found {
		w.t.Fatalf("attach of %s on %s: %v, %v; there is %q", id, n, found, err, w.have())
	}
	return l
}

var both = []string{"n1", "n2"}
