package host

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
	"github.com/sluice-hpc/sluice/daemon/internal/placement"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// A large cluster on a virtual network and a virtual clock: a controller's daemon, those of the
// nodes and of the owners are real, each with its ledger, and so is all that they say to each
// other but for its bytes. What is left out are the leases' sockets, sessions, and the audit log's file.

// metropolis is such a cluster.
type metropolis struct {
	t      *testing.T
	dir    string
	owners map[string]*owner.Owner
	pool   Pool
	ctl    *Host
	nodes  []*Host
	gpus   int     // of an owner
	clock  virtual // the owners'
	quotas []Quota // of all hosts

	// dial is a test's way from a host to an owner, nil for a road.
	dial func(from, owner string) lease.Owner

	said sync.Map // method: *atomic.Int64

	mu     sync.Mutex // of old and dead
	closes []func()
	old    map[string]bool // owners of an earlier release
	dead   map[string]bool // owners that do not answer
}

// nothing is an audit log that keeps nothing.
type nothing struct{}

func (nothing) Write(audit.Event) error                          { return nil }
func (nothing) Has(string, string, string, uint64) (bool, error) { return false, nil }
func (nothing) Sync() error                                      { return nil }

// virtual is the bubble's clock.
type virtual struct{ since time.Time }

func (v virtual) Now() time.Time    { return time.Now() }
func (v virtual) Up() time.Duration { return time.Since(v.since) }
func (virtual) Boot() string        { return "boot" }

// road is the way from a host to an owner: 0.1 to 0.6 ms in each direction, one in a hundred 3 ms.
type road struct {
	*owner.Owner
	m    *metropolis
	name string
}

func (r road) travel(what string) {
	r.m.count(what)
	d := 100*time.Microsecond + rand.N(500*time.Microsecond)
	if rand.IntN(100) == 0 {
		d = 3 * time.Millisecond
	}
	time.Sleep(d)
}

// count counts a message.
func (m *metropolis) count(what string) {
	if what != "" {
		n, _ := m.said.LoadOrStore(what, new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
	}
}

func over[T any](r road, what string, f func() (T, error)) (v T, err error) {
	r.travel(what)
	if r.m.isDead(r.name) {
		return v, lease.Errorf(lease.Down, "owner %s is dead", r.name)
	}
	v, err = f()
	r.travel("")
	if r.m.isDead(r.name) {
		return v, lease.Errorf(lease.Down, "owner %s has died", r.name)
	}
	return v, err
}

func (m *metropolis) isDead(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dead[name]
}

func (m *metropolis) kill(name string, dead bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead == nil {
		m.dead = make(map[string]bool)
	}
	m.dead[name] = dead
}

func (r road) Inventory(ctx context.Context) (lease.Inventory, error) {
	return over(r, "Inventory", func() (lease.Inventory, error) { return r.Owner.Inventory(ctx) })
}
func (r road) Reserve(ctx context.Context, host string, l lease.Lease, ttl time.Duration) (lease.Lease, error) {
	return over(r, "Reserve", func() (lease.Lease, error) { return r.Owner.Reserve(ctx, host, l, ttl) })
}
func (r road) Confirm(ctx context.Context, host, id string) error {
	_, err := over(r, "Confirm", func() (int, error) { return 0, r.Owner.Confirm(ctx, host, id) })
	return err
}
func (r road) Renew(ctx context.Context, host string, ids []string) ([]string, error) {
	return over(r, "Renew", func() ([]string, error) { return r.Owner.Renew(ctx, host, ids) })
}
func (r road) Claim(ctx context.Context, host, id string) error {
	_, err := over(r, "Claim", func() (int, error) { return 0, r.Owner.Claim(ctx, host, id) })
	return err
}
func (r road) Release(ctx context.Context, host, id string, key lease.Key, reason string) error {
	_, err := over(r, "Release", func() (int, error) { return 0, r.Owner.Release(ctx, host, id, key, reason) })
	return err
}
func (r road) List(ctx context.Context, host string) ([]lease.Status, error) {
	return over(r, "List", func() ([]lease.Status, error) { return r.Owner.List(ctx, host) })
}
func (r road) Reports(ctx context.Context, host, cluster, job string) ([]lease.Report, error) {
	return over(r, "Reports", func() ([]lease.Report, error) { return r.Owner.Reports(ctx, host, cluster, job) })
}
func (r road) Held(ctx context.Context, host string, of []lease.Holding) ([]lease.Held, error) {
	return over(r, "Held", func() ([]lease.Held, error) { return r.Owner.Held(ctx, host, of) })
}

// renewed is a WatchHeld whose answer renews the promise and nothing else.
const renewed = "WatchHeld without news"

func (r road) HeldEverywhere(ctx context.Context, host string, q lease.HeldQuestion) (lease.HeldSum, error) {
	return over(r, "HeldEverywhere", func() (lease.HeldSum, error) { return r.Owner.HeldEverywhere(ctx, host, q) })
}
func (r road) WatchHeld(ctx context.Context, host string, q lease.HeldWatch) (lease.HeldChanges, error) {
	ctx, cancel := r.alive(ctx)
	defer cancel()
	c, err := over(r, "", func() (lease.HeldChanges, error) { return r.Owner.WatchHeld(ctx, host, q) })
	if len(c.Leases)+len(c.Questions) > 0 {
		r.m.count("WatchHeld")
	} else {
		r.m.count(renewed)
	}
	return c, err
}
func (r road) Watch(ctx context.Context, host string, since lease.Mark, wait time.Duration) (lease.Changes, error) {
	ctx, cancel := r.alive(ctx)
	defer cancel()
	return over(r, "Watch", func() (lease.Changes, error) { return r.Owner.Watch(ctx, host, since, wait) })
}

// alive ends a long call when the owner dies in the middle of it, as the keep-alive of the connection does.
func (r road) alive(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		for ctx.Err() == nil {
			if r.m.isDead(r.name) {
				cancel()
			}
			pause(ctx, time.Second)
		}
	}()
	return ctx, cancel
}
func (r road) Register(ctx context.Context, host, cluster, job string, at []lease.Whereabouts) error {
	_, err := over(r, "Register", func() (int, error) { return 0, r.Owner.Register(ctx, host, cluster, job, at) })
	return err
}
func (r road) Where(ctx context.Context, host, cluster, job string) ([]string, error) {
	return over(r, "Where", func() ([]string, error) { return r.Owner.Where(ctx, host, cluster, job) })
}

// book opens a ledger that has been opened before: nobody looks for what it may have lost.
func (m *metropolis) book(name string) *ledger.Ledger {
	path := filepath.Join(m.dir, name+".db")
	for {
		b, err := ledger.Open(path, name, ledger.Options{NoSync: true})
		if err != nil {
			m.t.Fatal(err)
		}
		if b.Epoch() > 1 {
			return b
		}
		b.Close()
	}
}

func newMetropolis(t *testing.T, owners, gpus, nodes int) *metropolis {
	m := emptyMetropolis(t, owners, gpus)
	m.ctl = m.host("ctl", true)
	for i := range nodes {
		m.nodes = append(m.nodes, m.host(fmt.Sprintf("n%05d", i), false))
	}
	return m
}

// emptyMetropolis has owners only.
func emptyMetropolis(t *testing.T, owners, gpus int) *metropolis {
	dir, err := os.MkdirTemp("", "sluice-metropolis")
	if err != nil {
		t.Fatal(err)
	}
	m := &metropolis{t: t, dir: dir, owners: make(map[string]*owner.Owner), gpus: gpus, clock: virtual{time.Now().Add(-time.Hour)}}
	m.closes = append(m.closes, func() { os.RemoveAll(dir) })
	for i := range owners {
		name := fmt.Sprintf("gpu%04d", i)
		o, end := m.owner(name)
		m.owners[name] = o
		m.pool.Owners = append(m.pool.Owners, Peer{name, name + ":7071"})
		m.closes = append(m.closes, end)
	}
	return m
}

// owner starts an owner's daemon. end ends it.
func (m *metropolis) owner(name string) (_ *owner.Owner, end func()) {
	var has []lease.GPU
	for j := range m.gpus {
		has = append(has, lease.GPU{UUID: fmt.Sprintf("GPU-%s-%d", name, j), Index: j, Name: "NVIDIA H200", Mem: fakeMem, Overhead: 512 << 20, Healthy: true})
	}
	book := m.book(name)
	o, err := owner.New(owner.Config{Name: name, Ledger: book, Audit: nothing{}, Workers: noWorkers{}, Clock: m.clock, Controllers: []string{"ctl"},
		Devices: func() ([]lease.GPU, time.Duration) { return has, 0 }, Log: Config{}.withDefaults().Log, Limits: owner.Limits{Silence: time.Minute}})
	if err != nil {
		m.t.Fatal(err)
	}
	return o, running(o.Run, func() { o.Close(); book.Close() })
}

// running runs a daemon. What it returns ends it.
func running(f func(context.Context) error, end func()) func() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = f(ctx) }()
	return func() { cancel(); <-done; end() }
}

func (m *metropolis) end() {
	for _, f := range slices.Backward(m.closes) {
		f()
	}
	time.Sleep(time.Minute) // answers that nobody waits for any more arrive
}

func (m *metropolis) host(name string, controller bool) *Host {
	h, end := m.start(name, controller, 0)
	m.closes = append(m.closes, end)
	return h
}

// start starts a host's daemon. end ends it.
func (m *metropolis) start(name string, controller bool, few int) (_ *Host, end func()) {
	book := m.book(name + ".host")
	h, err := New(Config{
		Node: name, Cluster: "c", RunDir: filepath.Join(m.dir, "run-"+name), Ledger: book, Audit: nothing{},
		Pools: map[string]Pool{"default": m.pool}, Controller: controller, noSockets: true, Quotas: m.quotas, few: few, up: m.clock.Up,
		Who: func(context.Context, uint32) (Who, error) { return Who{}, nil },
		DialOwner: func(owner, _ string) (lease.Owner, error) {
			if m.dial != nil {
				return m.dial(name, owner), nil
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.old[owner] {
				return struct{ lease.Owner }{road{m.owners[owner], m, owner}}, nil
			}
			return road{m.owners[owner], m, owner}, nil
		},
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return h, running(h.Run, func() { h.Close(); book.Close() })
}

// heard waits until a controller's daemon has heard of all owners but some.
func (m *metropolis) heard(h *Host, but ...string) {
	m.t.Helper()
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		got := h.view.unknown(m.pool.Owners)
		if slices.Equal(got, but) {
			return
		}
		if time.Since(begun) > time.Minute {
			m.t.Fatalf("not heard of: %q, want %q", got, but)
		}
	}
}

// sent is the number of messages of each kind.
func (m *metropolis) sent() map[string]int64 {
	out := make(map[string]int64)
	m.said.Range(func(k, v any) bool { out[k.(string)] = v.(*atomic.Int64).Load(); return true })
	return out
}

// check fails the test if a GPU is granted beyond what it has, or a job has two leases on a node.
func (m *metropolis) check() (gpus, percent int) {
	m.t.Helper()
	keys := make(map[name]string)
	for n, o := range m.owners {
		of, mem := make(map[string]uint32), make(map[string]uint64)
		list, err := o.List(context.Background(), "")
		if err != nil {
			m.t.Fatal(err)
		}
		for _, s := range list {
			k := nameOf(s.Request.Key)
			if id := keys[k]; id != "" && id != s.ID {
				m.t.Fatalf("job %s has the leases %s and %s", s.Request.Key, id, s.ID)
			}
			keys[k] = s.ID
			for _, g := range s.Grants {
				of[g.GPU] += g.Percent
				mem[g.GPU] += g.Mem
			}
		}
		for u, p := range of {
			if p > 100 || mem[u] > fakeMem {
				m.t.Fatalf("%s: %d %% and %d bytes of %s are granted", n, p, mem[u], u)
			}
			gpus++
			percent += int(p)
		}
	}
	return gpus, percent
}

// empty waits until no GPU is granted any more, for so long at most.
func (m *metropolis) empty(most time.Duration) {
	m.t.Helper()
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		gpus, _ := m.check()
		if gpus == 0 {
			return
		}
		if time.Since(begun) >= most {
			m.t.Errorf("after %v %d GPUs are granted", most, gpus)
			return
		}
	}
}

// oracle is a pool of which all is known at once.
type oracle struct {
	mu      sync.Mutex
	gpus    []lease.GPU
	at      map[string]int
	refused int
}

func newOracle(m *metropolis) *oracle {
	o := &oracle{at: make(map[string]int)}
	for _, p := range m.pool.Owners {
		inv, _ := m.owners[p.Name].Inventory(context.Background())
		for _, g := range inv.GPUs {
			o.at[g.UUID] = len(o.gpus)
			o.gpus = append(o.gpus, g)
		}
	}
	return o
}

// place gives a job what it asks for, at once or not at all, and takes it back after a while.
func (o *oracle) place(reqs []lease.Request, d time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var all []lease.Grant
	give := func(grants []lease.Grant, sign int) {
		for _, g := range grants {
			p := &o.gpus[o.at[g.GPU]]
			p.FreePercent -= uint32(sign) * g.Percent
			p.FreeMem -= uint64(sign) * g.Mem
			p.Leases += sign
		}
	}
	for _, r := range reqs {
		grants, err := placement.Place(o.gpus, r, lease.BestFit)
		if err != nil {
			give(all, -1)
			o.refused++
			return
		}
		give(grants, 1)
		all = append(all, grants...)
	}
	time.AfterFunc(d, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		give(all, -1)
	})
}

func (o *oracle) busy() (gpus, percent int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range o.gpus {
		if o.gpus[i].Leases > 0 {
			gpus++
			percent += 100 - int(o.gpus[i].FreePercent)
		}
	}
	return gpus, percent
}

// day is what is measured of jobs.
type day struct {
	mu             sync.Mutex
	grants, starts []time.Duration // until the lease is granted, and until all nodes have it
	refused        int
	ended          int
}

// asks is what a job asks for: small parts mostly, whole GPUs, some several, some on several nodes.
func (m *metropolis) asks(id string) []lease.Request {
	var f []uint32
	switch n := rand.IntN(100); {
	case n < 20:
		f = []uint32{10}
	case n < 50:
		f = []uint32{25}
	case n < 80:
		f = []uint32{50}
	case n < 97:
		f = []uint32{100}
	default:
		f = slices.Repeat([]uint32{100}, 2+rand.IntN(3))
	}
	nodes := 1
	if rand.IntN(20) == 0 {
		nodes = 2 + rand.IntN(3)
	}
	var names []string
	for _, i := range rand.Perm(len(m.nodes))[:nodes] {
		names = append(names, m.nodes[i].cfg.Node)
	}
	return job(id, 0, names, f...)
}

func (m *metropolis) node(name string) *Host {
	i, _ := strconv.Atoi(strings.TrimPrefix(name, "n"))
	return m.nodes[i]
}

// job is a job from PrologSlurmctld to EpilogSlurmctld, with the calls that packages jobctld and jobnode make.
func (m *metropolis) job(d *day, id string, reqs []lease.Request, lasts time.Duration) {
	ctx := context.Background()
	begun := time.Now()
	epoch := max(m.ctl.Epoch(), m.ctl.LastEpoch(ctx, "c", id)+1)
	for i := range reqs {
		reqs[i].Key.Incarnation = epoch
	}
	if _, err := m.ctl.Sponsor(ctx, reqs); err != nil {
		if lease.CodeOf(err) != lease.NoRoom {
			m.t.Errorf("job %s: %v", id, err)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.refused++
		return
	}
	granted := time.Since(begun)
	var wg sync.WaitGroup
	for _, r := range reqs {
		wg.Go(func() {
			l, found, err := m.node(r.Key.Node).Attach(ctx, lease.Key{Job: id})
			if err != nil || !found || l.Request.Key.Incarnation != epoch {
				m.t.Errorf("job %s on %s: %v, %v, %v", id, r.Key.Node, l.Request.Key, found, err)
			}
		})
	}
	wg.Wait()
	started := time.Since(begun)
	time.Sleep(lasts)
	for _, r := range reqs {
		wg.Go(func() {
			h := m.node(r.Key.Node)
			if err := h.Release(ctx, rpc.Peer{}, "", r.Key, "the job has ended"); err != nil {
				m.t.Errorf("job %s on %s: %v", id, r.Key.Node, err)
			}
			if _, err := h.Reports(ctx, "c", id); err != nil {
				m.t.Errorf("job %s on %s: %v", id, r.Key.Node, err)
			}
		})
	}
	wg.Wait()
	upTo := max(m.ctl.Epoch(), m.ctl.LastEpoch(ctx, "c", id))
	if away, err := m.ctl.EndJob(ctx, "c", id, nil, upTo, "the job has ended"); err != nil || len(away) > 0 {
		m.t.Errorf("end of job %s: %v, %v", id, away, err)
	}
	reports, err := m.ctl.Reports(ctx, "c", id)
	if err != nil || len(reports) < len(reqs) {
		m.t.Errorf("reports of job %s: %d of %d, %v", id, len(reports), len(reqs), err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.grants, d.starts, d.ended = append(d.grants, granted), append(d.starts, started), d.ended+1
}

func centile(d []time.Duration, p int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(d))
	return s[min(len(s)-1, len(s)*p/100)]
}

// TestMetropolis is a small one; SLUICE_NODES=10000 SLUICE_OWNERS=1000 SLUICE_JOBS=500 SLUICE_SECONDS=600 is
// the size that docs/design.md tells of. Jobs are by second.
func TestMetropolis(t *testing.T) {
	size := func(key string, otherwise int) int {
		if n, err := strconv.Atoi(os.Getenv(key)); err == nil {
			return n
		}
		return otherwise
	}
	nodes, owners, rate, seconds := size("SLUICE_NODES", 100), size("SLUICE_OWNERS", 20), size("SLUICE_JOBS", 10), size("SLUICE_SECONDS", 60)
	const gpus, meanPercent, load = 8, 61.0, 0.92
	lasts := time.Duration(load * float64(owners*gpus) * 100 / meanPercent / float64(rate) * float64(time.Second))
	began := time.Now()
	synctest.Test(t, func(t *testing.T) {
		m := newMetropolis(t, owners, gpus, nodes)
		defer m.end()
		m.heard(m.ctl)
		before := m.sent()
		o, d := newOracle(m), new(day)
		var wg sync.WaitGroup
		var real, ideal, n float64
		end := time.Now().Add(time.Duration(seconds) * time.Second)
		look := time.Now().Add(lasts)
		jobs := 0
		for time.Now().Before(end) {
			time.Sleep(time.Duration(rand.ExpFloat64() / float64(rate) * float64(time.Second)))
			jobs++
			id := strconv.Itoa(1000 + jobs)
			reqs, last := m.asks(id), time.Duration(rand.ExpFloat64()*float64(lasts))
			o.place(reqs, last)
			wg.Go(func() { m.job(d, id, reqs, last) })
			if time.Now().After(look) {
				look = time.Now().Add(max(time.Second, time.Duration(seconds)*time.Second/60))
				if jobs > 10_000 {
					fmt.Fprintf(os.Stderr, "%d jobs, %v to go\n", jobs, time.Until(end).Round(time.Second))
				}
				g, p := m.check()
				og, op := o.busy()
				if g > 0 && og > 0 {
					real, ideal, n = real+float64(p)/float64(100*g), ideal+float64(op)/float64(100*og), n+1
				}
			}
		}
		wg.Wait()
		after := m.sent()
		var total int64
		var each []string
		for _, what := range slices.Sorted(maps.Keys(after)) {
			k := after[what] - before[what]
			total += k
			each = append(each, fmt.Sprintf("%s %.2f", what, float64(k)/float64(jobs)))
		}
		per := float64(total) / float64(jobs)
		t.Logf("%d nodes, %d owners, %d GPUs; %d jobs in %d s, %d refused (%d by one who knows all); lasting %v", nodes, owners, owners*gpus, jobs, seconds, d.refused, o.refused, lasts)
		t.Logf("messages for a job, from its begin to its report: %.2f: %s", per, strings.Join(each, ", "))
		t.Logf("granted within p50 %v p99 %v; on the nodes within p50 %v p99 %v", centile(d.grants, 50), centile(d.grants, 99), centile(d.starts, 50), centile(d.starts, 99))
		t.Logf("GPUs that are in use are used to %.4f, by one who knows all to %.4f", real/n, ideal/n)
		if gpus, _ := m.check(); gpus != 0 {
			t.Errorf("%d GPUs are still taken", gpus)
		}
		// The controller's daemon asks once for the job's last epoch, by Reports; a node lists its lease, and renews it once to take
		// it over. What else is renewed is kept, not acquired.
		acquire := int64(jobs) + after["List"] - before["List"]
		for _, what := range []string{"Inventory", "Reserve", "Confirm", "Register", "Where", "List", "Watch"} {
			acquire += after[what] - before[what]
		}
		a := float64(acquire) / float64(jobs)
		t.Logf("messages for an acquire: %.2f", a)
		if a > 8 {
			t.Errorf("%.2f messages for an acquire, want at most 8", a)
		}
		if p := centile(d.grants, 99); p > 50*time.Millisecond {
			t.Errorf("99 of 100 leases are granted within %v, want 50 ms", p)
		}
		if real < 0.98*ideal {
			t.Errorf("packed to %.4f, one who knows all to %.4f", real/n, ideal/n)
		}
	})
	t.Logf("took %v", time.Since(began).Round(time.Second))
}
