package host

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// fakeOwner is an owner in memory: admission as the real one's, and faults.
type fakeOwner struct {
	name string
	gpus int

	mu       sync.Mutex
	leases   map[string]lease.Lease
	over     map[string]bool // ids that were released
	down     bool
	forgot   bool // Renew knows no lease
	lost     bool // Set does what it is told to, and its answer is lost
	refuse   int  // Reserves that are answered with Conflict
	drain    lease.Drain
	calls    map[string]int
	confirms error
	told     []lease.Report // of its jobs
}

func newFake(name string, gpus int) *fakeOwner {
	return &fakeOwner{name: name, gpus: gpus, leases: make(map[string]lease.Lease), over: make(map[string]bool), calls: make(map[string]int)}
}

func (f *fakeOwner) enter(call string) (func(), error) {
	f.mu.Lock()
	f.calls[call]++
	if f.down {
		f.mu.Unlock()
		return nil, lease.Errorf(lease.Down, "%s is down", f.name)
	}
	return f.mu.Unlock, nil
}

const fakeMem = 80 << 30

func (f *fakeOwner) inventory() []lease.GPU {
	var gpus []lease.GPU
	for i := range f.gpus {
		g := lease.GPU{Owner: f.name, UUID: f.name + "-" + string(rune('0'+i)), Index: i, Name: "NVIDIA H200", Mem: fakeMem, Overhead: 512 << 20, Healthy: true, FreePercent: 100, FreeMem: fakeMem, Drain: f.drain}
		for _, l := range f.leases {
			for _, gr := range l.Grants {
				if gr.GPU == g.UUID {
					g.FreePercent -= gr.Percent
					g.FreeMem -= gr.Mem
					g.Leases++
				}
			}
		}
		gpus = append(gpus, g)
	}
	return gpus
}

func (f *fakeOwner) Inventory(context.Context) (lease.Inventory, error) {
	leave, err := f.enter("inventory")
	if err != nil {
		return lease.Inventory{}, err
	}
	defer leave()
	return lease.Inventory{Owner: f.name, GPUs: f.inventory()}, nil
}

func (f *fakeOwner) Reserve(_ context.Context, host string, l lease.Lease, ttl time.Duration) (lease.Lease, error) {
	leave, err := f.enter("reserve")
	if err != nil {
		return lease.Lease{}, err
	}
	defer leave()
	if f.over[l.ID] {
		return lease.Lease{}, lease.Errorf(lease.Over, "lease %s has ended", l.ID)
	}
	if f.refuse > 0 {
		f.refuse--
		return lease.Lease{}, lease.Errorf(lease.Conflict, "somebody was faster")
	}
	for _, have := range f.leases {
		if have.ID == l.ID {
			return have, nil
		}
		if have.Request.Key == l.Request.Key {
			return have, lease.Errorf(lease.Conflict, "job has lease %s", have.ID)
		}
	}
	for _, gr := range l.Grants {
		i := slices.IndexFunc(f.inventory(), func(g lease.GPU) bool { return g.UUID == gr.GPU })
		if g := f.inventory()[i]; gr.Percent > g.FreePercent || gr.Mem > g.FreeMem {
			return lease.Lease{}, lease.Errorf(lease.Conflict, "full")
		}
	}
	l.Host, l.State = host, lease.Reserved
	if ttl == 0 {
		l.State = lease.Granted
	}
	f.leases[l.ID] = l
	return l, nil
}

func (f *fakeOwner) Confirm(_ context.Context, _, id string) error {
	leave, err := f.enter("confirm")
	if err != nil {
		return err
	}
	defer leave()
	if f.confirms != nil {
		return f.confirms
	}
	l, ok := f.leases[id]
	if !ok {
		return lease.Errorf(lease.NotFound, "no lease %s", id)
	}
	l.State = lease.Granted
	f.leases[id] = l
	return nil
}

// Drain drains all GPUs at once.
func (f *fakeOwner) Drain(_ context.Context, host string, d lease.DrainOrder) ([]lease.GPU, error) {
	leave, err := f.enter("drain")
	if err != nil {
		return nil, err
	}
	defer leave()
	f.drain = lease.Drain{By: host, Since: time.Unix(1, 0), Reason: d.Reason}
	if d.Resume {
		f.drain = lease.Drain{}
	}
	return f.inventory(), nil
}

// Set changes as it is told to, up to what is free.
func (f *fakeOwner) Set(_ context.Context, _ string, c lease.Change) (lease.Lease, error) {
	leave, err := f.enter("set")
	if err != nil {
		return lease.Lease{}, err
	}
	defer leave()
	l, ok := f.leases[c.Lease]
	if !ok {
		return lease.Lease{}, lease.Errorf(lease.NotFound, "no lease %s", c.Lease)
	}
	l.Grants = slices.Clone(l.Grants)
	for i := range l.Grants {
		g := &l.Grants[i]
		p := c.Share(g.Order)
		if p == 0 {
			continue
		}
		for _, gpu := range f.inventory() {
			if gpu.UUID == g.GPU && p > gpu.FreePercent+g.Percent {
				return lease.Lease{}, lease.Errorf(lease.NoRoom, "share of %d%%: want 1 to %d", p, gpu.FreePercent+g.Percent)
			}
		}
		if g.First = g.Paid(); p > g.First && !c.Beyond {
			return lease.Lease{}, lease.Errorf(lease.Denied, "share of %d%%: want 1 to %d; only root gives more", p, g.First)
		}
		g.Percent = p
	}
	if c.Policy != "" {
		l.Request.Policy = c.Policy
	}
	if c.Lend != "" {
		l.Request.Lend = c.Lend
	}
	f.leases[c.Lease] = l
	if f.lost {
		f.lost = false
		return lease.Lease{}, lease.Errorf(lease.Down, "%s: connection lost", f.name)
	}
	return l, nil
}

func (f *fakeOwner) Claim(_ context.Context, _, id string) error {
	leave, err := f.enter("claim")
	if err != nil {
		return err
	}
	defer leave()
	if _, ok := f.leases[id]; !ok || f.forgot {
		return lease.Errorf(lease.Over, "lease %s has ended", id)
	}
	return nil
}

func (f *fakeOwner) Renew(_ context.Context, _ string, ids []string) ([]string, error) {
	leave, err := f.enter("renew")
	if err != nil {
		return nil, err
	}
	defer leave()
	var known []string
	for _, id := range ids {
		if _, ok := f.leases[id]; ok && !f.forgot {
			known = append(known, id)
		}
	}
	return known, nil
}

func (f *fakeOwner) Release(_ context.Context, _, id string, _ lease.Key, _ string) error {
	leave, err := f.enter("release")
	if err != nil {
		return err
	}
	defer leave()
	delete(f.leases, id)
	f.over[id] = true
	return nil
}

func (f *fakeOwner) List(_ context.Context, host string) ([]lease.Status, error) {
	leave, err := f.enter("list")
	if err != nil {
		return nil, err
	}
	defer leave()
	var all []lease.Status
	for _, l := range f.leases {
		if host == "" || l.Host == host {
			all = append(all, lease.Status{Lease: l, Use: make([]lease.Use, len(l.Grants))})
		}
	}
	return all, nil
}

func (f *fakeOwner) Reports(_ context.Context, host, cluster, job string) ([]lease.Report, error) {
	leave, err := f.enter("reports")
	if err != nil {
		return nil, err
	}
	defer leave()
	return append([]lease.Report{{Owner: f.name, Key: lease.Key{Cluster: cluster, Job: job, Node: host}}}, f.told...), nil
}

// Gone implements lease.Mourner.
func (f *fakeOwner) Gone(context.Context, string, string, uint32) error {
	leave, err := f.enter("gone")
	if err != nil {
		return err
	}
	leave()
	return nil
}

func (f *fakeOwner) Offer(context.Context, string, lease.SessionRequest) (lease.Offer, error) {
	return lease.Offer{}, nil
}

// Open gives a socket pair whose far end says the owner's name.
func (f *fakeOwner) Open(_ context.Context, r lease.SessionRequest) (*os.File, error) {
	leave, err := f.enter("open")
	if err != nil {
		return nil, err
	}
	defer leave()
	if _, ok := f.leases[r.Lease]; !ok {
		return nil, lease.Errorf(lease.NotFound, "lease %s has ended", r.Lease)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	far := os.NewFile(uintptr(fds[1]), "far")
	_, _ = far.WriteString("I am " + f.name + "\n")
	_ = far.Close()
	return os.NewFile(uintptr(fds[0]), "near"), nil
}

func (f *fakeOwner) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeOwner) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.leases)
}

// site is a host with fake owners.
type site struct {
	*Host
	t      *testing.T
	dir    string
	cfg    Config
	owners map[string]*fakeOwner
	book   *ledger.Ledger
	log    *audit.Log
	stop   func()
	noRun  bool // what goes on by itself does not
	syncs  bool // the ledger, after the next start
}

func newSite(t *testing.T, owners ...*fakeOwner) *site {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-host")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &site{t: t, dir: dir, owners: make(map[string]*fakeOwner)}
	pool := Pool{}
	for _, o := range owners {
		s.owners[o.name] = o
		pool.Owners = append(pool.Owners, Peer{o.name, o.name + ":7071"})
	}
	s.cfg = Config{
		Node: "node1", Cluster: "c", RunDir: filepath.Join(dir, "run"), AuditFile: filepath.Join(dir, "audit.log"),
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Pools: map[string]Pool{"default": pool}, Users: true,
		Renew: 50 * time.Millisecond, Ask: 200 * time.Millisecond, BackOff: 50 * time.Millisecond,
		DialOwner: func(name, _ string) (lease.Owner, error) { return s.owners[name], nil },
		DialData: func(ctx context.Context, o lease.Owner, _, _ string, r lease.SessionRequest) (*os.File, error) {
			return o.(*fakeOwner).Open(ctx, r)
		},
	}
	s.start()
	t.Cleanup(s.end)
	return s
}

func (s *site) start() {
	s.t.Helper()
	var err error
	if s.book, err = ledger.Open(filepath.Join(s.dir, "host.db"), "node1", ledger.Options{NoSync: !s.syncs}); err != nil {
		s.t.Fatal(err)
	}
	if s.log, err = audit.Open(s.cfg.AuditFile, audit.Options{}); err != nil {
		s.t.Fatal(err)
	}
	s.cfg.Ledger, s.cfg.Audit = s.book, s.log
	if s.Host, err = New(s.cfg); err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	run := !s.noRun
	go func() {
		defer close(done)
		if run {
			_ = s.Run(ctx)
		}
	}()
	s.stop = func() { cancel(); <-done; s.Close(); s.book.Close(); s.log.Close() }
}

func (s *site) end() {
	if s.stop != nil {
		s.stop()
		s.stop = nil
	}
}

func (s *site) restart() { s.end(); s.start() }

func (s *site) total() (n int) {
	for _, o := range s.owners {
		n += o.count()
	}
	return n
}

func (s *site) wait(what string, f func() bool) {
	s.t.Helper()
	for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("not within 10 s: %s", what)
		}
	}
}

var root = rpc.Peer{}

func ask(job string, percents ...uint32) lease.Request {
	r := lease.Request{Key: lease.Key{Job: job}, UID: 1000, GID: 1000}
	for _, p := range percents {
		r.Fractions = append(r.Fractions, lease.Fraction{Percent: p})
	}
	return r
}

func (s *site) must(r lease.Request) lease.Lease {
	s.t.Helper()
	l, _, err := s.Acquire(context.Background(), root, r)
	if err != nil {
		s.t.Fatal(err)
	}
	return l
}
