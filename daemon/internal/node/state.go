package node

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/metrics"
	"github.com/sluice-hpc/sluice/daemon/internal/notice"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/syslog"
	"github.com/sluice-hpc/sluice/remoting/version"
)

// The state of the node, put together from its parts for metrics, health and `sluice top`.
// Everything here is read from memory, but for what health asks of file systems and munge: see inspect.

// stale is the age of NVML's answer that health complains about, in polls.
const stale = 4

// devices returns the owner's GPUs and how old that knowledge is.
func (n *Node) devices() ([]lease.GPU, time.Duration) {
	age, _, _ := n.watch.Age()
	gpus := n.watch.Devices()
	for i := range gpus {
		gpus[i].Owner = n.cfg.Load().Node
	}
	return gpus, age
}

// measure has the contexts of all GPUs measured. Where that fails it tries again in the
// background.
func (n *Node) measure(ctx context.Context) {
	first, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	err := n.pool.Probe(first, n.watch.Devices())
	if err != nil {
		n.log.Error("a GPU cannot be measured; no fraction of it is granted until it can", "error", err)
	}
	n.run("probe", func(ctx context.Context) error {
		wait := 10 * time.Second
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(wait):
			}
			if err := n.pool.Recheck(ctx); err != nil {
				n.log.Error("a GPU does not answer any more; no fraction of it is granted until it does", "error", err)
			}
			var missing []lease.GPU
			for _, g := range n.watch.Devices() {
				if _, err := n.pool.Overhead(g.UUID); err != nil {
					missing = append(missing, g)
				}
			}
			wait = 10 * time.Second
			if len(missing) == 0 {
				continue
			}
			if err := n.pool.Probe(ctx, missing); err != nil {
				n.log.Error("a GPU still cannot be measured", "error", err)
				wait = time.Minute
			}
		}
	})
}

// source returns what is exported.
func (n *Node) source() metrics.Source {
	cfg := n.cfg.Load()
	s := metrics.Source{Node: cfg.Node, Version: version.Commit, Nameless: !cfg.Listen.MetricsNames, Counters: n.counters}
	if n.owner == nil {
		return s
	}
	s.GPUs = n.gpus
	s.Sample = n.watch.Last
	s.Age = n.watch.Age
	s.Leases = func() []lease.Status {
		l, _ := n.owner.List(context.Background(), "")
		return l
	}
	s.Total = n.pool.Total
	s.Mismatch = func() []metrics.Mismatch {
		if m := n.mismatch.Load(); m != nil {
			return *m
		}
		return nil
	}
	return s
}

func (n *Node) gpus() []lease.GPU {
	inv, err := n.owner.Inventory(context.Background())
	if err != nil {
		return nil
	}
	return inv.GPUs
}

func (n *Node) counters() []metrics.Counter {
	j, h := n.jobs.Counters(), n.host.Counters()
	var unread uint64
	if n.unread.Load() != nil {
		unread = 1
	}
	var f syslog.State
	if n.forward != nil {
		f = n.forward.State()
	}
	out := []metrics.Counter{
		{Name: "config_reload_failed", Help: "1 if the last reload failed and the older configuration is in force.", Value: unread, Gauge: true},
		{Name: "audit_lines_total", Help: "Lines written to the audit log.", Value: n.audit.Lines()},
		{Name: "audit_failed_total", Help: "Lines that could not be written to the audit log.", Value: n.audit.Failed()},
		{Name: "audit_forwarded_total", Help: "Lines of the audit log sent to the collector of audit.forward.", Value: f.Forwarded},
		{Name: "audit_forward_dropped_total", Help: "Lines of the audit log that the collector of audit.forward did not take in time, or that were too long for its socket.", Value: f.Dropped},
		{Name: "audit_forward_waiting", Help: "Lines of the audit log that wait for the collector of audit.forward.", Value: uint64(f.Waiting), Gauge: true},
		{Name: "host_sessions_attached_total", Help: "Connections made to owners for programs of this node that had lost theirs, before the session judges the program's key.", Value: h.Attached},
		{Name: "host_attaches_failed_total", Help: "Attempts to make such a connection that failed; the program tries again until its grace is over.", Value: h.AttachesFailed},
		{Name: "jobs_granted_total", Help: "Prologs that gave a Slurm job its fractions.", Value: j.Granted},
		{Name: "jobs_refused_total", Help: "Prologs that refused a Slurm job.", Value: j.Refused},
		{Name: "jobs_requeued_total", Help: "Prologs that had a Slurm job requeued for lack of room.", Value: j.Requeued},
		{Name: "jobs_stray_total", Help: "Leases ended because their Slurm job was gone without an Epilog.", Value: j.Orphans},
	}
	if n.owner == nil {
		return out
	}
	c := n.owner.Counters()
	return append(out,
		metrics.Counter{Name: "owner_reserved_total", Help: "Leases reserved.", Value: c.Reserved},
		metrics.Counter{Name: "owner_granted_total", Help: "Leases granted.", Value: c.Granted},
		metrics.Counter{Name: "owner_refused_total", Help: "Reservations refused.", Value: c.Refused},
		metrics.Counter{Name: "owner_released_total", Help: "Leases released by their host.", Value: c.Released},
		metrics.Counter{Name: "owner_reclaimed_total", Help: "Leases taken back by the owner.", Value: c.Reclaimed},
		metrics.Counter{Name: "owner_sessions_total", Help: "Sessions opened.", Value: c.Opened},
		metrics.Counter{Name: "owner_sessions_attached_total", Help: "Connections passed to sessions that had lost theirs, before the session judges the program's key.", Value: c.Attached},
		metrics.Counter{Name: "owner_sessions_refused_total", Help: "Sessions refused.", Value: c.SessionsRefused},
		metrics.Counter{Name: "data_dropped_total", Help: "Data connections closed to make room for others.", Value: n.data.Dropped()},
		metrics.Counter{Name: "owner_overruns_total", Help: "Times that a lease's work stayed on a GPU beyond shares.overrun.limit.", Value: n.overruns.Load()},
		metrics.Counter{Name: "nvml_misses_total", Help: "Samples of NVML that did not come in time.", Value: n.watch.Misses()},
		metrics.Counter{Name: "nvml_starts_total", Help: "Processes started to ask NVML.", Value: n.watch.Starts()},
	)
}

// stats returns this node's GPUs for `sluice top`.
func (n *Node) stats(ctx context.Context) []rpc.GPUStats {
	if n.owner == nil {
		return nil
	}
	used, granted := map[string]uint64{}, map[string]uint64{}
	list, _ := n.owner.List(ctx, "")
	for _, l := range list {
		if l.State == lease.Ended {
			continue
		}
		for i, g := range l.Grants {
			granted[g.GPU] += g.Mem
			if i < len(l.Use) {
				used[g.GPU] += l.Use[i].Used
			}
		}
	}
	s := n.watch.Last()
	var out []rpc.GPUStats
	for _, g := range n.gpus() {
		st := rpc.GPUStats{GPU: g, GrantedMem: granted[g.UUID], UsedMem: used[g.UUID]}
		if s != nil {
			for _, d := range s.GPUs {
				if d.UUID == g.UUID && d.Total > 0 {
					st.Known, st.MemUsed, st.MemTotal, st.Age = true, d.Used, d.Total, time.Since(s.At)
					if d.UtilGPU != nil {
						st.Utilisation = *d.UtilGPU
					}
				}
			}
		}
		out = append(out, st)
	}
	return out
}

// lender is the owner as other nodes call it: its node tells its health as well.
type lender struct {
	*owner.Owner
	node *Node
}

var _ rpc.NodeHealth = lender{}

// Health implements rpc.NodeHealth. Findings name paths, GPUs and causes, which is for controllers and not for every node.
func (l lender) Health(ctx context.Context, host string) ([]rpc.Check, error) {
	if me := l.node.cfg.Load().Node; host != me && !l.Controller(host) {
		return nil, lease.Errorf(lease.Denied, "%s asks for the health of %s: only a controller may; see slurm.controllers in sluice.yaml there", host, me)
	}
	if h := l.node.hostUp.Load(); h != nil {
		return h.NodeHealth(ctx), nil
	}
	return nil, lease.Errorf(lease.Down, "the daemon starts; ask again")
}

// health returns the findings of the parts beside the host, the worst first.
func (n *Node) health(ctx context.Context) []rpc.Check {
	var out []rpc.Check
	add := func(name string, level rpc.Level, remedy, format string, a ...any) {
		out = append(out, rpc.Check{Name: name, Level: level, Text: fmt.Sprintf(format, a...), Remedy: remedy})
	}
	if f := n.audit.Failed(); f > 0 {
		add("audit", rpc.Fail, "look at the disk of "+n.cfg.Load().Audit.File, "%d lines could not be written since the daemon started", f)
	} else {
		add("audit", rpc.OK, "", "%d lines written", n.audit.Lines())
	}
	if n.forward != nil {
		if f := n.forward.State(); f.Away != nil {
			add("audit", rpc.Warn, "see that the collector runs and can be reached, or correct audit.forward in sluice.yaml and restart sluiced",
				"the collector %s is away: %v; %d lines wait for it, %d were dropped", f.To, f.Away, f.Waiting, f.Dropped)
		} else if f.Dropped > 0 {
			add("audit", rpc.Warn, "see whether the collector reads; the files of audit.file have all lines", "%d lines were dropped that the collector %s should have got, since the daemon started", f.Dropped, f.To)
		}
	}
	if err := n.unread.Load(); err != nil {
		add("config", rpc.Fail, "correct the file, see sluiced --check, and reload; the daemon will not start with it", "%v", *err)
	}
	if n.owner == nil {
		add("owner", rpc.OK, "", "this node lends no GPUs")
	} else {
		out = append(out, n.faults()...)
	}
	out = append(out, n.looks.get(ctx, time.Now(), n.inspect)...)
	rpc.SortChecks(out)
	return out
}

// inspect returns the findings that ask file systems or other programs, and may not return while a file server is away.
func (n *Node) inspect(ctx context.Context) []rpc.Check {
	var out []rpc.Check
	if n.owner != nil {
		out = n.ownerHealth()
	}
	out = append(out, n.machine(ctx)...)
	out = append(out, n.jobs.Checks()...)
	return append(out, n.files().Checks()...)
}

const (
	// lookWait is how long a caller waits for a look. Other nodes wait for 8 s (healthTime in package host).
	lookWait = 7 * time.Second
	// lookHangs is when a look is taken to hang, which is a failure of the node. Until then the node's state is not known.
	lookHangs = 15 * time.Second
	// lookTime bounds the programs that a look asks. Nothing bounds a call to a file system.
	lookTime = 30 * time.Second
)

// singleLook allows one look at a time, so that one that hangs keeps one thread. Those who ask meanwhile wait for it.
type singleLook struct {
	mu  sync.Mutex
	now *oneLook // nil for none
}

type oneLook struct {
	since time.Time
	done  chan struct{} // closed once found is there
	found []rpc.Check
}

// get returns what look finds, or that it hangs.
func (l *singleLook) get(ctx context.Context, now time.Time, look func(context.Context) []rpc.Check) []rpc.Check {
	l.mu.Lock()
	one := l.now
	if one == nil {
		one = &oneLook{since: now, done: make(chan struct{})}
		l.now = one
		go func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTime)
			defer cancel()
			one.found = look(ctx)
			l.mu.Lock()
			l.now = nil
			l.mu.Unlock()
			close(one.done)
		}()
	}
	l.mu.Unlock()
	wait := time.NewTimer(lookWait)
	defer wait.Stop()
	select {
	case <-one.done:
		return slices.Clone(one.found)
	case <-wait.C:
	case <-ctx.Done():
	}
	return []rpc.Check{hangs(one.since, now)}
}

// hangs is the finding that a look has not returned that began at since.
func hangs(since, now time.Time) rpc.Check {
	return rpc.Check{Name: "health", Level: rpc.Fail, Unknown: true, Node: now.Sub(since) >= lookHangs,
		Text:   fmt.Sprintf("the check of this node's file systems and of munge hangs since %s", since.UTC().Format(time.RFC3339)),
		Remedy: "see dmesg and df for a disk or a file server that does not answer, and systemctl status munge"}
}

// faults returns the findings about the GPUs' own errors.
func (n *Node) faults() []rpc.Check {
	drained := map[string]bool{}
	for _, g := range n.gpus() {
		drained[g.UUID] = !g.Drain.IsZero()
	}
	var out []rpc.Check
	for _, d := range n.watch.Seen() { // none before NVML's first answer, which ownerHealth says
		out = append(out, gpuFaults(n.cfg.Load().Node, d, drained[d.UUID] || d.UUID == "" && n.owner.DrainedAt(d.Index))...)
	}
	return out
}

// nvmlCheck is the finding about NVML's last answer. While there is no fresh one, what it says of the GPUs' faults is not known.
func nvmlCheck(age time.Duration, known bool, why string, poll time.Duration, remedy string) rpc.Check {
	c := rpc.Check{Name: "nvml", Level: rpc.Fail, Remedy: remedy, Unknown: true}
	switch {
	case !known:
		c.Text = why
	case why != "":
		c.Text = fmt.Sprintf("%s; last answer %v ago", why, age.Round(time.Second))
	case age > stale*poll:
		c.Level, c.Text = rpc.Warn, fmt.Sprintf("last answer %v ago", age.Round(time.Second))
	default:
		c = rpc.Check{Name: "nvml", Level: rpc.OK, Text: fmt.Sprintf("answered %v ago", age.Round(time.Millisecond))}
	}
	return c
}

// ownerHealth returns the findings about the owner and its GPUs, but for their own errors.
func (n *Node) ownerHealth() (out []rpc.Check) {
	add := func(name string, level rpc.Level, remedy, format string, a ...any) {
		out = append(out, rpc.Check{Name: name, Level: level, Text: fmt.Sprintf(format, a...), Remedy: remedy})
	}
	cfg := n.cfg.Load()
	nvml, driver := "see dmesg and nvidia-smi", "see dmesg and nvidia-smi"
	if err := missing("owner.libnvml", cfg.Owner.LibNVML); err != nil {
		nvml = err.Error()
	}
	if err := missing("owner.libcuda", cfg.Owner.LibCUDA); err != nil {
		driver = err.Error()
	}
	age, known, why := n.watch.Age()
	out = append(out, nvmlCheck(age, known, why, cfg.Owner.Poll, nvml))
	for _, g := range n.watch.Missing() {
		add("gpu", rpc.Fail, "correct owner.gpus", "owner.gpus names %s, which is not here", g)
	}
	for _, command := range commands(cfg) {
		if err := notice.Check(command); err != nil {
			add("idle", rpc.Warn, "correct lease.idle.command or pools.NAME.idle in sluice.yaml, or install the program", "the command for idle leases cannot be run: %v", err)
		}
	}
	lost := map[string]bool{} // found already
	for _, d := range n.watch.Seen() {
		lost[d.UUID] = d.Lost || d.Unread
	}
	healthy := 0
	for _, g := range n.gpus() {
		if !g.Drain.IsZero() {
			add("drain", rpc.Warn, fmt.Sprintf("sluice resume %s:%d, or %[1]s alone if all its GPUs are drained, once the reason is gone", cfg.Node, g.Index), "%s (%d): %s", g.UUID, g.Index, g.Drain)
		}
		if g.Healthy {
			if g.Lends() {
				healthy++
			}
			continue
		}
		if lost[g.UUID] {
			continue
		}
		add("gpu", rpc.Fail, driver+"; it is used again once it is healthy", "%s (%d): %s", g.UUID, g.Index, g.Why)
	}
	add("owner", rpc.OK, "", "%d GPUs to lend", healthy)
	if m := n.pool.Unscheduled(); len(m) > 0 { // mostly all for the same reason
		id := slices.Min(slices.Collect(maps.Keys(m)))
		add("turns", rpc.Fail, "repair what is below "+cfg.TurnsDir()+"; the next session tries again", "%d leases have no share of compute time; %s: %v", len(m), id, m[id])
	}
	if m := n.mismatch.Load(); m != nil {
		for _, x := range *m {
			if x.Bytes > alarm {
				add("memory", rpc.Warn, "compare with nvidia-smi; if it stays, report it, and release the lease if others suffer",
					"lease %s held at least %d MiB more of %s than its account, at each of the last %d looks", x.Lease, x.Bytes>>20, x.GPU, looks)
			}
		}
	}
	return out
}

// syncAudit syncs the audit log every second. The owner's lines wait in its ledger until then,
// so a crash of the machine loses none of them. Of the host's lines it loses those of the last
// second.
func (n *Node) syncAudit(ctx context.Context) error {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	var said bool
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		err := n.audit.Sync()
		if err != nil && !said {
			n.log.Error("the audit log cannot be synced to its disk", "error", err)
		}
		said = err != nil
	}
}

// peerRefused logs a daemon that failed to authenticate, at a bounded rate.
func (n *Node) peerRefused(remote net.Addr, name, reason string) {
	if skipped, ok := n.refused.Pass(); ok {
		n.log.Warn("daemon refused", "peer", remote, "node", name, "reason", reason, "skipped", skipped)
		_ = n.audit.Write(audit.Event{Event: audit.PeerRefuse, Host: name, Owner: n.cfg.Load().Node, Peer: fmt.Sprint(remote), Reason: reason, Skipped: skipped})
	}
}

// ticketRefused logs a data connection that was refused. Package data logs it too, and bounds
// the rate: what strangers send must not rotate the grants out of the audit log.
func (n *Node) ticketRefused(remote net.Addr, r lease.SessionRequest, reason string) {
	if r.Lease == "" {
		if _, ok := n.nameless.Pass(); !ok {
			return
		}
	}
	e := audit.Event{Event: audit.TicketRefuse, Lease: r.Lease, Owner: n.cfg.Load().Node, Peer: fmt.Sprint(remote), Reason: reason}
	if r.Lease != "" {
		e.UID, e.PID, e.Program = audit.UID(r.UID), r.PID, r.Program
	}
	_ = n.audit.Write(e)
}
