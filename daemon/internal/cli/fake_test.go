package cli

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// fakeDaemon is a daemon behind a real local socket: what it was told survives
// its restarts, as a ledger does, and it ends leases whose holder has ended.
type fakeDaemon struct {
	looks            []lease.GPU // what Pool says of gpu01, one after the other, and Drain first
	rpc.LocalService             // what a test does not set is not asked
	t                *testing.T
	dir, socket      string
	server           *grpc.Server

	mu       sync.Mutex
	refuse   error
	life     time.Duration // the longest of a lease; 0: any
	changes  []lease.Change
	requests []lease.Request
	peers    []rpc.Peer
	leases   map[string]lease.Lease
	released map[string]string // id: reason
	checks   []rpc.Check
	all      rpc.HealthAll
	events   []rpc.Event
	pools    []rpc.Pool
	stats    rpc.Stats
	probes   map[string]lease.Probe
}

func startDaemon(t *testing.T) *fakeDaemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "slu") // short: it holds sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &fakeDaemon{t: t, dir: dir, socket: filepath.Join(dir, "sluiced.sock"), leases: map[string]lease.Lease{}, released: map[string]string{}}
	d.start()
	t.Cleanup(func() { d.server.Stop() })
	return d
}

func (d *fakeDaemon) start() {
	d.t.Helper()
	l, err := rpc.ListenLocal(d.socket, slog.New(slog.DiscardHandler))
	if err != nil {
		d.t.Fatal(err)
	}
	s := rpc.NewServer(rpc.LocalCreds(), "test")
	rpc.ServeLocal(s, d)
	d.server = s
	go func(l net.Listener) { _ = s.Serve(l) }(l)
}

// sync orders what the test has set before what the daemon reads, and the other
// way round: the race detector does not see through a process.
func (d *fakeDaemon) sync() {
	d.mu.Lock()
	defer d.mu.Unlock()
}

// kill is the daemon's kill -9: connections break, the socket's file stays.
func (d *fakeDaemon) kill() { d.server.Stop() }

func (d *fakeDaemon) Acquire(_ context.Context, p rpc.Peer, r lease.Request) (lease.Lease, string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.requests, d.peers = append(d.requests, r), append(d.peers, p)
	if d.refuse != nil {
		return lease.Lease{}, "", d.refuse
	}
	for _, l := range d.leases {
		if l.Request.Key == r.Key {
			return l, filepath.Join(d.dir, l.ID, "sock"), nil
		}
	}
	l := lease.Lease{ID: form.NewLeaseID(), Request: r, State: lease.Granted, Made: time.Now(), Host: "node1"}
	if d.life > 0 && (r.Life == 0 || r.Life > d.life) {
		l.Request.Life = d.life
	}
	if l.Request.Life > 0 {
		l.Expires = l.Made.Add(l.Request.Life)
	}
	for i, f := range r.Fractions {
		l.Grants = append(l.Grants, lease.Grant{Owner: "gpu01", GPU: "GPU-1", Percent: f.Percent, Mem: f.Mem, Order: i})
	}
	if err := os.Mkdir(filepath.Join(d.dir, l.ID), 0o700); err != nil {
		return lease.Lease{}, "", err
	}
	d.leases[l.ID] = l
	go d.hold(l.ID, r.Holder)
	return l, filepath.Join(d.dir, l.ID, "sock"), nil
}

// hold ends the lease with its holder, whichever daemon is alive then.
func (d *fakeDaemon) hold(id string, p lease.Process) {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err == nil {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			if n, err := unix.Poll(fds, 60_000); err != unix.EINTR || n > 0 {
				break
			}
		}
		unix.Close(fd)
	}
	d.end(id, "the holder has ended")
}

func (d *fakeDaemon) end(id, reason string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.leases[id]; ok {
		delete(d.leases, id)
		d.released[id] = reason
		os.RemoveAll(filepath.Join(d.dir, id))
	}
}

func (d *fakeDaemon) Release(_ context.Context, _ rpc.Peer, id string, _ lease.Key, reason string) error {
	d.mu.Lock()
	refuse := d.refuse
	d.mu.Unlock()
	if refuse != nil {
		return refuse
	}
	d.end(id, reason)
	return nil
}

func (d *fakeDaemon) List(context.Context, rpc.Peer) ([]lease.Status, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []lease.Status
	for _, l := range d.leases {
		out = append(out, lease.Status{Lease: l, Idle: 3*time.Hour + 5*time.Second, Use: []lease.Use{{Granted: 20 << 30, Used: 3 << 30, Peak: 4 << 30}},
			Sessions: []lease.Session{{ID: "s1", Lease: l.ID, Client: 42, Program: "py\x1b[2Jthon", Started: time.Now().Add(-time.Minute),
				Use: []lease.Use{{Used: 3 << 30}}, Counts: lease.Counts{Calls: 7, BytesIn: 5 << 20, Cuts: 2, CutTime: 41500 * time.Millisecond}}}})
	}
	return out, nil
}

func (d *fakeDaemon) Pool(_ context.Context, _ rpc.Peer, name string) ([]rpc.Pool, error) {
	d.sync()
	if name != "" && name != "default" {
		return nil, lease.Errorf(lease.NotFound, "pool %q is not in the configuration", name)
	}
	if len(d.looks) > 1 {
		d.looks = d.looks[1:]
		return []rpc.Pool{{Name: "default", Owners: []rpc.PoolOwner{{Name: "gpu01", Inventory: lease.Inventory{GPUs: d.looks[:1]}}}}}, nil
	}
	return d.pools, nil
}

func (d *fakeDaemon) Health(context.Context, rpc.Peer) ([]rpc.Check, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.checks, nil
}

func (d *fakeDaemon) HealthAll(context.Context, rpc.Peer) (rpc.HealthAll, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.all, d.refuse
}

func (d *fakeDaemon) Explain(_ context.Context, _ rpc.Peer, job string) ([]rpc.Event, error) {
	d.sync()
	if job != "4711" {
		return nil, nil
	}
	return d.events, nil
}

func (d *fakeDaemon) Stats(context.Context, rpc.Peer) (rpc.Stats, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stats, nil
}

func (d *fakeDaemon) Set(_ context.Context, _ rpc.Peer, c lease.Change) (lease.Lease, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.changes = append(d.changes, c)
	if d.refuse != nil {
		return lease.Lease{}, d.refuse
	}
	l := d.leases[c.Lease]
	l.Grants[0].Percent, l.Request.Policy, l.Request.Lend = c.Share(0), c.Policy, c.Lend
	return l, nil
}

// Drain says what was asked, as a GPU's drain.
func (d *fakeDaemon) Drain(_ context.Context, _ rpc.Peer, o lease.DrainOrder) ([]lease.GPU, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refuse != nil {
		return nil, d.refuse
	}
	g := lease.GPU{UUID: "GPU-1", Name: o.Owner + " " + o.GPU, Healthy: true, FreePercent: 100}
	if len(d.looks) > 0 {
		g.Leases = d.looks[0].Leases
	}
	if !o.Resume {
		g.Drain = lease.Drain{By: "0@" + o.Owner, Since: time.Unix(1.8e9, 0), Reason: o.Reason}
	}
	return []lease.GPU{g}, nil
}

func (d *fakeDaemon) Probe(_ context.Context, _ rpc.Peer, owner string) (lease.Probe, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p, ok := d.probes[owner]
	if !ok {
		return lease.Probe{}, lease.Errorf(lease.NotFound, "%s is not an owner", owner)
	}
	return p, nil
}

// add is a lease that somebody has.
func (d *fakeDaemon) add(id, job string) {
	d.leases[id] = lease.Lease{ID: id, State: lease.Granted, Made: time.Now().Add(-time.Hour), Host: "node1",
		Request: lease.Request{Key: lease.Key{Cluster: "c", Job: job, Node: "node1"}},
		Grants:  []lease.Grant{{Owner: "gpu01", GPU: "GPU-1", Percent: 50, Mem: 20 << 30}}}
}

// one is the only lease that there is, once there is one.
func (d *fakeDaemon) one() (l lease.Lease) {
	d.t.Helper()
	eventually(d.t, "a lease is granted", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, l = range d.leases {
		}
		return len(d.leases) == 1
	})
	return l
}

func (d *fakeDaemon) why(id string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.released[id]
}
