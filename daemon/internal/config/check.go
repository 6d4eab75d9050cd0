package config

import (
	"net"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

func isPort(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n > 0 && n < 1<<16 && strconv.Itoa(n) == s
}

// sunPath is the room for a Unix socket's path, in bytes, unix(7).
const sunPath = 107

// leaseSocket is the longest path below the run directory.
const leaseSocket = len("/leases/") + 32 + len("/sock")

// finish fills in what the file leaves open, then looks at what belongs together.
func (p *parser) finish() {
	c := &p.cfg
	if c.Node == "" {
		if h, err := os.Hostname(); err == nil {
			c.Node, _, _ = strings.Cut(h, ".")
		}
	}
	if !form.IsPlainName(c.Node) {
		p.fail("node", "%q is not a node's name: want %s", c.Node, form.PlainNameWant)
	}
	if !form.IsPlainName(c.Cluster) {
		p.fail("cluster", "%q is not a cluster's name: want %s", c.Cluster, form.PlainNameWant)
	}
	// Where Slurm schedules the GPUs, nobody takes them past its queue unless the site says so.
	if !p.given("users.run") {
		c.Users.Run = len(c.Slurm.Controllers) == 0
	}
	p.paths()
	p.addresses()
	p.ranges()
	p.audit()
	p.content()
	p.slurm()
	p.readPools()
	p.readPartitions()
	p.readQuotas()
}

func (p *parser) paths() {
	c := &p.cfg
	for _, d := range []struct {
		key, path string
		empty     bool
	}{
		{"state_dir", c.StateDir, false}, {"run_dir", c.RunDir, false}, {"audit.file", c.Audit.File, false},
		{"munge.socket", c.Munge.Socket, true}, {"owner.store", c.Owner.Store, true}, {"owner.content", c.Owner.Content, true}, {"worker.exe", c.Worker.Exe, true},
		{"slurm.bin", c.Slurm.Bin, true}, {"slurm.conf", c.Slurm.Conf, true}, {"slurm.lib", c.Slurm.Lib, false}, {"slurm.spool", c.Slurm.Spool, true},
		{"containers.hook", c.Containers.Hook, false}, {"containers.lib", c.Containers.Lib, false}, {"containers.cdi_dir", c.Containers.CDIDir, false},
		{"tls.ca", c.TLS.CA, c.Auth != "tls"}, {"tls.cert", c.TLS.Cert, c.Auth != "tls"}, {"tls.key", c.TLS.Key, c.Auth != "tls"},
		{"listen.page_token", c.Listen.PageToken, true},
	} {
		switch {
		case d.path == "" && d.empty:
		case d.key == "containers.cdi_dir" && d.path == "off":
		case d.path == "" && strings.HasPrefix(d.key, "tls."):
			p.fail(d.key, "is empty; auth: tls needs it, sluice ca makes it")
		case !filepath.IsAbs(d.path) || filepath.Clean(d.path) != d.path || d.path == "/":
			p.fail(d.key, "%q is no absolute, plain path", d.path)
		}
	}
	for _, d := range []struct{ key, path string }{{"run_dir", c.RunDir}, {"slurm.lib", c.Slurm.Lib}} {
		if strings.ContainsAny(d.path, ":,\n") {
			p.fail(d.key, "%q has a colon or a comma; it stands in lists that are separated by those", d.path)
		}
	}
	if n := len(c.RunDir) + leaseSocket; n > sunPath {
		p.fail("run_dir", "%q is too long: sockets below it would have paths of %d bytes, and %d is the most", c.RunDir, n, sunPath)
	}
	if c.StateDir == c.RunDir {
		p.fail("run_dir", "is the same as state_dir; the one is emptied by a reboot, the other must not be")
	}
}

// maxGrace is the longest that a session may wait for its program.
const maxGrace = 24 * time.Hour

func (p *parser) addresses() {
	c := &p.cfg
	ports := map[string]string{}
	for _, l := range []struct{ key, addr string }{
		{"listen.control", c.Listen.Control}, {"listen.data", c.Listen.Data}, {"listen.metrics", c.Listen.Metrics}, {"listen.page", c.Listen.Page},
	} {
		if (l.key == "listen.metrics" || l.key == "listen.page") && l.addr == "off" {
			continue
		}
		host, port, err := net.SplitHostPort(l.addr)
		switch {
		case err != nil || !isPort(port):
			p.fail(l.key, "%q is not an address; write it as :7071 or 10.0.0.1:7071", l.addr)
		case host != "" && net.ParseIP(host) == nil && host != "localhost":
			p.fail(l.key, "%q: listen on an IP address, or on all by :%s", l.addr, port)
		case ports[port] != "":
			p.fail(l.key, "has port %s as %s does", port, ports[port])
		}
		ports[port] = l.key
	}
	if host, _, err := net.SplitHostPort(c.Listen.Page); err == nil && host != "localhost" && !net.ParseIP(host).IsLoopback() && c.Listen.PageToken == "" {
		p.fail("listen.page", "%q can be reached from other machines; set listen.page_token, or listen on 127.0.0.1 behind the site's own proxy", c.Listen.Page)
	}
	if a := c.Advertise; a != "" && !form.IsPlainName(a) && net.ParseIP(a) == nil {
		p.fail("advertise", "%q is neither a host name nor an IP address (the ports are those of listen)", a)
	}
}

// size refuses a size that is not between two others.
func (p *parser) size(key string, v, lo, hi Size) {
	if v < lo || v > hi {
		p.fail(key, "%v is not between %v and %v", v, lo, hi)
	}
}

// content checks where content of copies is kept, and how much of it.
func (p *parser) content() {
	c := &p.cfg
	if c.Owner.ContentLimit != 0 {
		p.size("owner.content_limit", c.Owner.ContentLimit, 64<<20, 1<<50)
	}
	p.size("owner.content_total", c.Owner.ContentTotal, 64<<20, 1<<50)
	p.size("owner.content_keep_free", c.Owner.ContentKeepFree, 0, 1<<50)
	if c.ContentDir() == c.StoreDir() {
		p.fail("owner.content", "is the same as owner.store; content would take the place of module images")
	}
}

func (p *parser) ranges() {
	c := &p.cfg
	times := func(key string, v, lo, hi time.Duration) {
		if v < lo || v > hi {
			p.fail(key, "%v is not between %v and %v", v, lo, hi)
		}
	}
	times("lease.reserve", c.Lease.Reserve, time.Second, 10*time.Minute)
	times("lease.renew", c.Lease.Renew, 100*time.Millisecond, 10*time.Minute)
	times("lease.silence", c.Lease.Silence, time.Second, 7*24*time.Hour)
	times("lease.max_life", c.Lease.MaxLife, 0, 10*365*24*time.Hour)
	times("users.max_life", c.Users.MaxLife, 0, 10*365*24*time.Hour)
	if l, u := c.Lease.MaxLife, c.Users.MaxLife; l > 0 && u > l {
		p.fail("users.max_life", "%v is more than lease.max_life (%v), which holds for all leases", u, l)
	}
	if what, why := c.Lease.Idle.wrong(); what != "" {
		p.fail("lease.idle."+what, "%s", why)
	}
	times("lease.tombstone", c.Lease.Tombstone, time.Minute, 30*24*time.Hour)
	times("session.ticket", c.Session.Ticket, time.Second, time.Minute)
	times("session.grace", c.Session.Grace, 0, maxGrace)
	times("session.keepalive", c.Session.Keepalive, 100*time.Millisecond, time.Hour)
	times("slurm.room_wait", c.Slurm.RoomWait, 0, 5*time.Minute)
	times("slurm.reconcile", c.Slurm.Reconcile, time.Second, time.Hour)
	times("shares.quantum", c.Shares.Quantum, time.Millisecond, 100*time.Millisecond)
	times("shares.overrun.limit", c.Shares.Overrun.Limit, 100*time.Millisecond, time.Hour)
	times("owner.poll", c.Owner.Poll, 500*time.Millisecond, time.Minute)
	if c.Lease.Silence < 3*c.Lease.Renew {
		p.fail("lease.silence", "%v is less than three times lease.renew (%v): one lost message would end a lease", c.Lease.Silence, c.Lease.Renew)
	}
	count := func(key string, v, lo, hi int) {
		if v < lo || v > hi {
			p.fail(key, "%d is not between %d and %d", v, lo, hi)
		}
	}
	count("lease.max_per_gpu", c.Lease.MaxPerGPU, 1, 100)
	count("session.max_per_lease", c.Session.MaxPerLease, 1, 240)
	count("session.bulk_connections", c.Session.Bulk, 0, wire.MaxBulk)
	if !form.IsPlainName(c.Session.RDMA) {
		p.fail("session.rdma", "%q is not off, on, or the name of a device as in /sys/class/infiniband", c.Session.RDMA)
	}
	count("owner.warm", c.Owner.Warm, 0, 16)
	count("worker.pids_max", c.Worker.PidsMax, 64, 1<<16)
	count("worker.cpus", c.Worker.CPUs, 0, 1<<12)
	count("audit.keep", c.Audit.Keep, 0, 1000)
	count("munge.uid", c.Munge.UID, 0, 1<<31-1)
	count("users.uid_min", c.Users.UIDMin, 1, 1<<31-1)
	size := p.size
	size("audit.max_size", c.Audit.MaxSize, 64<<10, 1<<40)
	size("owner.keep_mem", c.Owner.KeepMem, 0, 1<<40)
	size("owner.store_limit", c.Owner.StoreLimit, 256<<20, 1<<50)
	size("owner.store_total", c.Owner.StoreTotal, 256<<20, 1<<50)
	size("owner.store_keep_free", c.Owner.StoreKeepFree, 0, 1<<50)
	if m := c.Worker.MemoryMax; m != 0 && m != ByLease {
		size("worker.memory_max", Size(m), 256<<20, 1<<50)
	}
	seen := map[string]bool{}
	for _, g := range c.Owner.GPUs {
		_, err := strconv.ParseUint(g, 10, 16)
		switch {
		case err != nil && !strings.HasPrefix(g, "GPU-"):
			p.fail("owner.gpus", "%q is neither a number nor a UUID (GPU-...)", g)
		case seen[g]:
			p.fail("owner.gpus", "%s is there twice", g)
		}
		seen[g] = true
	}
	for _, l := range []struct{ key, v string }{{"owner.libnvml", c.Owner.LibNVML}, {"owner.libcuda", c.Owner.LibCUDA}} {
		if l.v == "" || strings.Contains(l.v, "/") && !filepath.IsAbs(l.v) {
			p.fail(l.key, "%q is neither a library's name nor an absolute path", l.v)
		}
	}
	if c.Worker.Sandbox == "on" && !c.Worker.Seccomp {
		p.fail("worker.sandbox", "on needs worker.seccomp: true")
	}
}

// PoolNames are the pools' names, sorted.
func (c *Config) PoolNames() []string {
	out := make([]string, 0, len(c.Pools))
	for n := range c.Pools {
		out = append(out, n)
	}
	sort.Strings(out)
	return out
}

// Self is this node as a peer.
func (c *Config) Self() Peer {
	_, port, _ := net.SplitHostPort(c.Listen.Control)
	host := c.Advertise
	if host == "" {
		host = c.Node
	}
	return Peer{c.Node, net.JoinHostPort(host, port)}
}

// Restart lists the keys that differ between two configurations and that only a
// restart takes over.
func Restart(old, now *Config) []string {
	var out []string
	for _, k := range Keys() {
		if !k.Live && k.Value(old) != k.Value(now) {
			out = append(out, k.Name)
		}
	}
	return out
}
