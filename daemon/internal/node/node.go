// Package node is sluiced: it puts the roles of a node together, tells the service
// manager how it fares, and takes them apart again.
package node

// Flow of a start, in this order because each step needs the one before:
//
//	run_dir     -> its lock and the ledgers that it names, see rundir.go
//	directories -> audit log -> identity
//	inventory   -> the first look of NVML says whether there are GPUs
//	ledgers     -> opened before anything of run_dir is looked at
//	owner role  -> workers found again, data listener, control listener
//	host role   -> lease sockets
//	jobs        -> what Slurm's scripts and plug-in ask: local socket, job socket
//	metrics     -> READY, once the GPUs' contexts have been measured
//
// Everything started is stopped in the reverse order; sessions stay. There is no
// lock here but around the configuration, which a reload replaces.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/data"
	"github.com/sluice-hpc/sluice/daemon/internal/host"
	"github.com/sluice-hpc/sluice/daemon/internal/identity"
	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/metrics"
	"github.com/sluice-hpc/sluice/daemon/internal/notice"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
	"github.com/sluice-hpc/sluice/daemon/internal/page"
	"github.com/sluice-hpc/sluice/daemon/internal/probe"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/daemon/internal/syslog"
	"github.com/sluice-hpc/sluice/daemon/internal/workers"
	"github.com/sluice-hpc/sluice/remoting/version"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// firstLook is how long a start waits for NVML. A driver without persistence mode
// takes seconds to wake up.
const firstLook = 10 * time.Second

// Node is a running daemon.
type Node struct {
	cfg   atomic.Pointer[config.Config]
	log   *slog.Logger
	level *slog.LevelVar

	audit    *audit.Log
	forward  *syslog.Sender // of the audit log's lines, nil for none
	id       *identity.Identity
	watch    *inventory.Watch // nil where there are no GPUs to lend
	pool     *workers.Pool
	owner    *owner.Owner
	data     *data.Server
	host     *host.Host
	hostUp   atomic.Pointer[host.Host] // host, for calls of other nodes, which may come before it is there
	jobs     *jobs.State
	mismatch atomic.Pointer[[]metrics.Mismatch]
	looks    singleLook            // of health
	unread   atomic.Pointer[error] // why the last reload failed, nil if it did not
	overruns atomic.Uint64         // beyond the site's limit
	refused  limit.Reports
	nameless limit.Reports // tickets refused that name no lease

	stops []func() // in the order of the start
	fatal chan error
}

// Start brings the daemon up. ctx ends the start, not the daemon: Stop does.
func Start(ctx context.Context, cfg *config.Config, log *slog.Logger, level *slog.LevelVar) (_ *Node, err error) {
	n := &Node{log: log, level: level, jobs: jobs.NewState(settings(cfg)), fatal: make(chan error, 1), nameless: limit.Reports{PerSecond: 1}}
	n.cfg.Store(cfg)
	defer func() {
		if err != nil {
			n.Stop()
		}
	}()
	lock, err := lockRunDir(cfg, lockWait)
	if err != nil {
		return nil, err
	}
	n.onStop(func() { lock.Close() })
	if err := ledgersThere(cfg); err != nil {
		return nil, err
	}
	if err := Prepare(cfg); err != nil {
		return nil, err
	}
	if err := n.startAudit(); err != nil {
		return nil, err
	}
	n.id, err = identity.New(identity.Config{
		Node: cfg.Node, Auth: cfg.Auth, MungeSocket: cfg.Munge.Socket, MungeUID: uint32(cfg.Munge.UID),
		CA: cfg.TLS.CA, Cert: cfg.TLS.Cert, Key: cfg.TLS.Key, Refused: n.peerRefused,
	})
	if err != nil {
		return nil, err
	}
	lend, err := n.look(ctx)
	if err != nil {
		return nil, err
	}
	hostLed, err := n.ledger(hostLedger)
	if err != nil {
		return nil, err
	}
	if lend {
		led, err := n.ledger(ownerLedger)
		if err != nil {
			return nil, err
		}
		if err := n.startOwner(ctx, led); err != nil {
			return nil, err
		}
	}
	if err := n.startHost(ctx, hostLed); err != nil {
		return nil, err
	}
	if err := n.startMetrics(ctx); err != nil {
		return nil, err
	}
	if err := n.startPage(ctx); err != nil {
		return nil, err
	}
	if n.pool != nil {
		n.measure(ctx)
	}
	return n, nil
}

// startAudit opens the audit log. Its collector, where there is one, is stopped after it, and so gets its last lines.
func (n *Node) startAudit() error {
	cfg := n.cfg.Load()
	if to, ok := cfg.Audit.Collector(); ok {
		n.forward = syslog.New(to, cfg.Node, n.log.With("part", "audit"))
		n.run("audit.forward", n.forward.Run)
	}
	var err error
	n.audit, err = audit.Open(cfg.Audit.File, audit.Options{MaxSize: int64(cfg.Audit.MaxSize), Keep: cfg.Audit.Keep, Log: n.log, Forward: n.forward})
	if err != nil {
		return err
	}
	n.onStop(func() { n.closed("audit log", n.audit.Close()) })
	n.run("audit log", n.syncAudit)
	return nil
}

// ledger opens one of the node's ledgers, until Stop.
func (n *Node) ledger(name string) (*ledger.Ledger, error) {
	led, err := openLedger(n.cfg.Load(), name)
	if err != nil {
		return nil, err
	}
	n.onStop(func() { n.closed("ledger "+name, led.Close()) })
	return led, nil
}

// onStop has f called by Stop.
func (n *Node) onStop(f func()) { n.stops = append(n.stops, f) }

func (n *Node) closed(what string, err error) {
	if err != nil {
		n.log.Error("closing the "+what, "error", err)
	}
}

// run runs f until Stop; that it ends before, with an error, ends the daemon.
func (n *Node) run(what string, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := f(ctx); err != nil && ctx.Err() == nil {
			select {
			case n.fatal <- fmt.Errorf("%s: %w", what, err):
			default:
			}
		}
	}()
	n.onStop(func() {
		cancel()
		<-done
	})
}

// Stop takes the daemon apart. Leases, their sockets' files and sessions stay.
func (n *Node) Stop() {
	for i := len(n.stops) - 1; i >= 0; i-- {
		n.stops[i]()
	}
	n.stops = nil
}

// look starts the inventory and says whether this node is to be an owner.
func (n *Node) look(ctx context.Context) (bool, error) {
	cfg := n.cfg.Load()
	if cfg.Owner.Enabled == "no" {
		return false, nil
	}
	exe, err := os.Executable()
	if err != nil {
		return false, err
	}
	w := inventory.New(inventory.Config{
		Command: []string{exe, "nvml", "--lib", cfg.Owner.LibNVML},
		Poll:    cfg.Owner.Poll, GPUs: cfg.Owner.GPUs, KeepMem: uint64(cfg.Owner.KeepMem),
		Overhead: n.overhead,
	}, n.log)
	n.run("inventory", func(ctx context.Context) error { w.Run(ctx); return nil })
	look, cancel := context.WithTimeout(ctx, firstLook)
	defer cancel()
	s, err := w.First(look)
	_, earlier := os.Stat(ledgerPath(cfg, ownerLedger))
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err()
	case err != nil:
		// The library is there and hangs: earlier leases stay, and requests are refused with
		// the reason that the GPUs cannot be seen.
		n.log.Error("GPUs cannot be seen; the owner role starts without", "error", err)
	case cfg.Owner.Enabled == "auto" && len(s.GPUs) == 0 && earlier != nil:
		n.log.Info("no GPU here to lend; see owner.enabled", "nvml", s.Error)
		n.stops[len(n.stops)-1]()
		n.stops = n.stops[:len(n.stops)-1]
		return false, nil
	case len(s.GPUs) == 0:
		n.log.Error("no GPU found; the owner role starts without", "nvml", s.Error)
	}
	if m := w.Missing(); err == nil && len(m) > 0 {
		n.log.Error("owner.gpus names GPUs that are not here", "gpus", m)
	}
	n.watch = w
	return true, nil
}

// overhead is what one context takes of a GPU, as the workers have measured it.
func (n *Node) overhead(uuid string) (uint64, error) {
	if n.pool != nil {
		return n.pool.Overhead(uuid)
	}
	return 0, workers.ErrUnmeasured
}

func (n *Node) startOwner(ctx context.Context, led *ledger.Ledger) error {
	cfg := n.cfg.Load()
	exe, err := workerExe(cfg)
	if err != nil {
		return err
	}
	rootUID, rootGID, err := rootUser(cfg)
	if err != nil {
		return err
	}
	mode, without := sandboxMode(cfg)
	if without != "" {
		n.log.Warn("sessions run without a sandbox", "worker.sandbox", cfg.Worker.Sandbox, "reason", without)
	}
	n.pool, err = workers.New(n.log.With("part", "workers"), workers.Config{
		Exe: exe, Args: []string{"--log", cfg.Log.Level, "--log-format", cfg.Log.Format},
		Dir:     filepath.Join(cfg.RunDir, "owner"),
		Shared:  filepath.Join(cfg.RunDir, "shared"),
		LibCUDA: cfg.Owner.LibCUDA, LibNVML: cfg.Owner.LibNVML,
		Store: cfg.StoreDir(), StoreLimit: int64(cfg.Owner.StoreLimit), StoreTotal: int64(cfg.Owner.StoreTotal), StoreKeepFree: int64(cfg.Owner.StoreKeepFree),
		Content: cfg.ContentDir(), ContentLimit: int64(cfg.Owner.ContentLimit), ContentTotal: int64(cfg.Owner.ContentTotal), ContentKeepFree: int64(cfg.Owner.ContentKeepFree),
		Warm: cfg.Owner.Warm, Keepalive: cfg.Session.Keepalive, Grace: cfg.Session.Grace, Compress: cfg.Session.Compress, Bulk: cfg.Session.Bulk, RDMA: control.RDMA(cfg.Session.RDMA),
		Seccomp: cfg.Worker.Seccomp, ConfineDev: cfg.Worker.ConfineDev, Sandbox: mode, Pageable: cfg.Worker.Pageable,
		MinUID: uint32(cfg.Users.UIDMin), RootUID: rootUID, RootGID: rootGID,
		Cgroup: cfg.Worker.Cgroup, MemoryMax: memoryMax(cfg), PidsMax: cfg.Worker.PidsMax, CPUs: cfg.Worker.CPUs,
		Turns: cfg.TurnsDir(), Sharing: sharing(cfg),
	})
	if err != nil {
		return err
	}
	n.watch.OnSample(n.busy)
	n.run("busy time", n.lookOften)
	n.onStop(n.pool.Close)
	clock, err := owner.SystemClock()
	if err != nil {
		return err
	}
	notices := notice.New(n.log.With("part", "notices"))
	n.run("notices", notices.Run)
	n.owner, err = owner.New(owner.Config{
		Name: cfg.Node, Version: version.Commit, Ledger: led, Devices: n.devices, Workers: n.pool,
		Audit: n.audit, Clock: clock, Log: n.log.With("part", "owner"), Limits: limits(cfg), Controllers: cfg.Slurm.Controllers,
		Notice: func(x owner.Notice) {
			notices.Send(notice.Notice{Command: x.Command, Event: audit.Idle, Action: x.Action, Owner: cfg.Node, Lease: x.Lease, Idle: x.Idle})
		},
	})
	if err != nil {
		return err
	}
	n.onStop(n.owner.Close)
	n.data = data.NewServer(data.Config{
		Addr: cfg.DataAddr(), TicketLife: cfg.Session.Ticket, PerLease: cfg.Session.MaxPerLease,
		KeepAlive: cfg.Session.Keepalive, Admit: n.owner.Admit, Refused: n.ticketRefused, Log: n.log.With("part", "data"),
		Encrypt: func() bool { return n.cfg.Load().Encrypt },
	})
	n.owner.SetTickets(n.data)
	n.run("owner", n.owner.Run)
	n.run("mismatch", n.compare)
	n.run("turns", func(ctx context.Context) error { return n.pool.WatchTurns(ctx, n.overrun) })

	dl, err := listen(ctx, "listen.data", cfg.Listen.Data)
	if err != nil {
		return err
	}
	n.run("data listener", func(ctx context.Context) error { return n.data.Serve(ctx, dl) })
	cl, err := listen(ctx, "listen.control", cfg.Listen.Control)
	if err != nil {
		return err
	}
	srv := rpc.NewServer(n.id.Server(), version.Commit)
	rpc.ServeOwner(srv, lender{n.owner, n})
	n.serve("control listener", srv, rpc.Limit(cl, limit.New(limit.Bounds{TrustedKey: 8})), n.owner.StopWatches) // a node needs one or two
	return nil
}

func (n *Node) startHost(ctx context.Context, led *ledger.Ledger) error {
	cfg := n.cfg.Load()
	hc := host.Config{
		Node: cfg.Node, Cluster: cfg.Cluster, Version: version.Commit, RunDir: cfg.RunDir,
		Ledger: led, Audit: n.audit, AuditFile: cfg.Audit.File, Log: n.log.With("part", "host"),
		DialOwner: func(name, addr string) (lease.Owner, error) { return rpc.DialOwner(addr, name, n.id, version.Commit) },
		DialData: func(ctx context.Context, o lease.Owner, addr, host string, r lease.SessionRequest) (*os.File, error) {
			return n.dialer().Open(ctx, o, addr, host, r)
		},
		DialProbe: n.dialProbe,
		Pools:     pools(cfg), Users: cfg.Users.Run, Controller: cfg.IsController(), SlurmUser: n.slurmUser(),
		Quotas: quotas(cfg), RunLife: cfg.Users.MaxLife,
		Reserve: cfg.Lease.Reserve, Renew: cfg.Lease.Renew, Tombstone: cfg.Lease.Tombstone, MaxLife: cfg.Lease.MaxLife,
		Health: n.health, Stats: n.stats, Files: n.files(),
	}
	if n.owner != nil { // an interface that holds a nil pointer would not be nil
		hc.Local = n.owner
	}
	var err error
	if n.host, err = host.New(hc); err != nil {
		return err
	}
	n.onStop(n.host.Close)
	n.hostUp.Store(n.host)
	js, err := n.startJobs(ctx, led)
	if err != nil {
		return err
	}
	n.run("host", func(ctx context.Context) error { n.host.Run(ctx); return nil })
	l, err := rpc.ListenLocal(cfg.Socket(), n.log)
	if err != nil {
		return err
	}
	srv := rpc.NewServer(rpc.LocalCreds(), version.Commit)
	rpc.ServeLocal(srv, n.host)
	rpc.ServeJobs(srv, js)
	n.serve("local socket", srv, l, func() {})
	return nil
}

// dialer opens connections to owners as the configuration has it now.
func (n *Node) dialer() *data.Dialer {
	c := n.cfg.Load()
	return &data.Dialer{Encrypt: c.Encrypt, KeepAlive: c.Session.Keepalive, Log: n.log}
}

// An owner gives probes the tickets of its data port.
var _ owner.ProbeTickets = (*data.Server)(nil)

// dialProbe opens the connections of a probe as those of sessions are.
func (n *Node) dialProbe(ctx context.Context, o lease.Prober, addr, host string, r lease.ProbeRequest) (conns []*probe.Conn, encrypted bool, err error) {
	d := n.dialer()
	files, err := d.Probe(ctx, o, addr, host, r)
	for _, f := range files {
		c, cerr := probe.NewConn(f.Conn, f.TCP)
		if cerr != nil {
			err = errors.Join(err, cerr)
			continue
		}
		conns = append(conns, c)
	}
	if err != nil {
		for _, c := range conns {
			_ = c.Close()
		}
		return nil, false, err
	}
	return conns, d.Encrypt, nil
}

func (n *Node) startMetrics(ctx context.Context) error {
	cfg := n.cfg.Load()
	if cfg.Listen.Metrics == "off" {
		return nil
	}
	l, err := listen(ctx, "listen.metrics", cfg.Listen.Metrics)
	if err != nil {
		return err
	}
	r := metrics.Registry(n.source())
	n.run("metrics listener", func(ctx context.Context) error { return metrics.Serve(ctx, l, r, n.log) })
	return nil
}

// startPage serves the pages for browsers.
func (n *Node) startPage(ctx context.Context) error {
	cfg := n.cfg.Load()
	if cfg.Listen.Page == "off" {
		return nil
	}
	pc := page.Config{Node: cfg.Node, Nameless: !cfg.Listen.MetricsNames, Log: n.log.With("part", "page")}
	if path := cfg.Listen.PageToken; path != "" {
		var err error
		if pc.Token, err = page.ReadToken(path); err != nil {
			return fmt.Errorf("listen.page_token: %w", err)
		}
		pc.Nameless = false
	}
	root := rpc.Peer{Node: cfg.Node} // the pages show everything
	pc.Stats = func(ctx context.Context) (rpc.Stats, error) { return n.host.Stats(ctx, root) }
	pc.Pools = func(ctx context.Context) ([]rpc.Pool, error) { return n.host.Pool(ctx, root, "") }
	l, err := listen(ctx, "listen.page", cfg.Listen.Page)
	if err != nil {
		return err
	}
	s := page.New(pc)
	n.run("page", s.Run)
	n.run("page listener", func(ctx context.Context) error { return s.Serve(ctx, l) })
	return nil
}

func listen(ctx context.Context, key, addr string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("%s %s: %w; ss -ltnp says who has it: end that one, or set another port", key, addr, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", key, addr, err)
	}
	return l, nil
}

// workerExe is the program of session processes.
func workerExe(cfg *config.Config) (string, error) {
	exe := cfg.Worker.Exe
	if exe == "" {
		self, err := os.Executable()
		if err != nil {
			return "", err
		}
		exe = filepath.Join(filepath.Dir(self), "sluice-worker")
	}
	if fi, err := os.Stat(exe); err != nil || !fi.Mode().IsRegular() || fi.Mode().Perm()&0o111 == 0 {
		return "", fmt.Errorf("worker.exe: %s is not a program; install sluice-worker beside sluiced, or set worker.exe", exe)
	}
	return exe, nil
}

// rootUser is as whom leases of root and of the system's users run, 0 where they are refused.
func rootUser(cfg *config.Config) (uid, gid uint32, err error) {
	name := cfg.Worker.RootUser
	if name == "" {
		return 0, 0, nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		if _, number := strconv.ParseUint(name, 10, 32); number == nil {
			u, err = user.LookupId(name)
		}
		if err != nil {
			return 0, 0, fmt.Errorf("worker.root_user: %w; name a user of this node who owns nothing, or say \"\" to refuse leases of root and of uids below %d", err, cfg.Users.UIDMin)
		}
	}
	id, errU := strconv.ParseUint(u.Uid, 10, 32)
	group, errG := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(errU, errG); err != nil || id == 0 || group == 0 {
		return 0, 0, fmt.Errorf("worker.root_user: %s has uid %s and gid %s; name a user who is not root", name, u.Uid, u.Gid)
	}
	return uint32(id), uint32(group), nil
}

// memoryMax is the limit of a session's host memory by its lease.
func memoryMax(cfg *config.Config) func(lease.Lease) uint64 {
	if m := cfg.Worker.MemoryMax; m != config.ByLease {
		return func(lease.Lease) uint64 { return uint64(m) }
	}
	return workers.MemoryByLease
}

// sandboxMode is the sandbox of sessions, and why they have none although the configuration does not say off. A sandbox needs the filter
// of system calls. Auto is the default, so it takes nothing that works without a sandbox and that the site's other keys provide.
func sandboxMode(cfg *config.Config) (mode sandbox.Mode, without string) {
	mode = sandbox.Mode(cfg.Worker.Sandbox)
	switch {
	case mode == sandbox.Off:
		return mode, ""
	case !cfg.Worker.Seccomp:
		return sandbox.Off, "worker.seccomp is false"
	case mode == sandbox.Auto && !control.RDMA(cfg.Session.RDMA).Off():
		return sandbox.Off, "session.rdma is " + cfg.Session.RDMA + ", and a sandbox allows no RDMA"
	case mode == sandbox.Auto && !cfg.Worker.ConfineDev:
		return sandbox.Off, "worker.confine_dev is false, and a sandbox lets no events be shared in the machine's /dev/shm"
	}
	return mode, ""
}

// limits are what the configuration bounds an owner by.
func limits(cfg *config.Config) owner.Limits {
	var least uint32
	if cfg.Worker.RootUser == "" {
		least = uint32(cfg.Users.UIDMin)
	}
	return owner.Limits{
		MinUID:  least,
		Reserve: cfg.Lease.Reserve, Silence: cfg.Lease.Silence, MaxLife: cfg.Lease.MaxLife,
		Tombstone: cfg.Lease.Tombstone, MaxPerGPU: cfg.Lease.MaxPerGPU, Sessions: cfg.Session.MaxPerLease,
		RunLife: cfg.Users.MaxLife, Idle: idles(cfg),
	}
}

// pools are the configuration's, as the host wants them.
func pools(cfg *config.Config) map[string]host.Pool {
	out := map[string]host.Pool{}
	for name, p := range cfg.Pools {
		hp := host.Pool{Place: lease.Place(p.Place)}
		if p.Grace != nil {
			hp.Grace = lease.GraceOf(*p.Grace)
		}
		for _, o := range p.Owners {
			hp.Owners = append(hp.Owners, host.Peer{Name: o.Name, Addr: o.Addr})
		}
		out[name] = hp
	}
	return out
}
