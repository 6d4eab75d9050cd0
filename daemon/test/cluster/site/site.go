// Package site installs Sluice on a network of test nodes (package node): hosts without GPUs, owners with
// simulated ones, munge on each, one configuration. Daemons are started, killed and asked as an
// administrator's systemd would do it.
package site

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
)

// Options of a site.
type Options struct {
	Hosts, Owners int
	GPUs          int    // of each owner
	Mem           string // of each GPU, as "2G"
	Build         string // make's build folder
	CUDA          string // the compiler's version whose programs are run
	Faults        bool   // sluiced with its fault points
	// Config is put into the configuration of every daemon, after what stands below.
	Config map[string]string
	// NoMunge leaves munged away, for auth: tls.
	NoMunge bool
}

// Ports of every daemon.
const (
	Control = 7071
	Data    = 7072
	Metrics = 7073
	Socket  = "/run/sluice/sluiced.sock"
)

// Site is a network with Sluice on it.
type Site struct {
	Dir     string
	Net     *node.Network
	Hosts   []*Daemon
	Owners  []*Daemon
	Options Options
}

// Daemon is sluiced on a node.
type Daemon struct {
	Node   *node.Node
	Config string // path
	Log    string
	Audit  string
	site   *Site
	owner  bool

	mu     sync.Mutex
	proc   *node.Process
	local  *rpc.LocalClient
	notify *net.UnixConn
	ready  chan struct{} // closed by READY=1 of the present process
}

// Installed is what a site takes from make's build folder.
func installed(cuda string, faults bool) map[string]string {
	m := map[string]string{
		"bin/sluice": "bin/sluice", "bin/sluiced": "bin/sluiced", "bin/sluice-worker": "bin/sluice-worker",
		"shim": "shim", "simgpu/libcuda.so.1": "simgpu/libcuda.so.1", "simgpu/libnvidia-ml.so.1": "simgpu/libnvidia-ml.so.1",
		"twins.so": "test/twins.so", "cuda": "test/cuda-" + cuda, "bulk": "test/bulk",
	}
	if faults {
		m["bin/sluiced"] = "test/faults/sluiced"
	}
	return m
}

// New makes the nodes and starts munged on each; daemons are not started yet. Close removes all of it.
func New(o Options) (s *Site, err error) {
	if o.CUDA == "" {
		o.CUDA = "11.8"
	}
	if o.Mem == "" {
		o.Mem = "2G"
	}
	// Not t.TempDir: the path of a Unix socket has 107 bytes.
	dir, err := os.MkdirTemp("", "site")
	if err != nil {
		return nil, err
	}
	made := &Site{Dir: dir, Options: o}
	s = made
	defer func() {
		if err != nil {
			made.Close() // s is nil then
		}
	}()
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	if err := s.install(); err != nil {
		return nil, err
	}
	if s.Net, err = node.NewNetwork(filepath.Join(dir, "n")); err != nil {
		return nil, err
	}
	s.Net.Exe = s.Opt("bin/self")
	for i := range o.Owners {
		d, err := s.add(fmt.Sprintf("gpu%02d", i), true)
		if err != nil {
			return nil, err
		}
		s.Owners = append(s.Owners, d)
	}
	for i := range o.Hosts {
		d, err := s.add(fmt.Sprintf("host%02d", i), false)
		if err != nil {
			return nil, err
		}
		s.Hosts = append(s.Hosts, d)
	}
	return s, nil
}

func (s *Site) install() error {
	opt := filepath.Join(s.Dir, "opt")
	self, err := os.Executable()
	if err != nil {
		return err
	}
	from := installed(s.Options.CUDA, s.Options.Faults)
	from["bin/self"] = self
	for to, src := range from {
		if !filepath.IsAbs(src) {
			src = filepath.Join(s.Options.Build, src)
		}
		if _, err := os.Stat(src); err != nil {
			return fmt.Errorf("%w; run make test-cluster, which builds what these tests need", err)
		}
		dst := filepath.Join(opt, to)
		if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
			return err
		}
		if out, err := exec.Command("cp", "-a", "--reflink=auto", src, dst).CombinedOutput(); err != nil {
			return fmt.Errorf("cp: %w: %s", err, out)
		}
	}
	return nil
}

// Opt is the path of something installed, the same in every node.
func (s *Site) Opt(name string) string { return filepath.Join(s.Dir, "opt", name) }

// Daemons are all of them, owners first.
func (s *Site) Daemons() []*Daemon { return append(append([]*Daemon(nil), s.Owners...), s.Hosts...) }

func (s *Site) add(name string, owner bool) (*Daemon, error) {
	n, err := s.Net.Add(name, "/run")
	if err != nil {
		return nil, err
	}
	d := &Daemon{Node: n, site: s, owner: owner, Config: filepath.Join(n.Dir, "sluice.yaml"), Log: filepath.Join(n.Dir, "sluiced.log"), Audit: filepath.Join(n.Dir, "log/audit.log")}
	for _, p := range []string{"log", "state"} {
		if err := os.MkdirAll(filepath.Join(n.Dir, p), 0o700); err != nil {
			return nil, err
		}
	}
	if err := d.listen(); err != nil {
		return nil, err
	}
	if !s.Options.NoMunge {
		if err := d.munge(); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// munge starts munged at its usual socket, with the key of all nodes.
func (d *Daemon) munge() error {
	n := d.Node
	dir := n.Path("/run/munge")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	key := filepath.Join(n.Dir, "munge.key")
	if err := os.WriteFile(key, bytes.Repeat([]byte("the key of this site "), 16), 0o600); err != nil {
		return err
	}
	munged, err := exec.LookPath("munged")
	if err != nil {
		munged = "/usr/sbin/munged"
	}
	p, err := n.Start(node.Command{
		Argv: []string{munged, "--foreground", "--force", "--num-threads=2", "--socket=/run/munge/munge.socket.2", "--key-file=" + key,
			"--pid-file=/run/munge/pid", "--log-file=" + filepath.Join(n.Dir, "munged.log"), "--seed-file=" + filepath.Join(n.Dir, "munge.seed")},
		Stderr: filepath.Join(n.Dir, "munged.err"),
	})
	if err != nil {
		return fmt.Errorf("%w; install the package munge", err)
	}
	for deadline := time.Now().Add(20 * time.Second); ; {
		c, err := net.Dial("unix", n.Path("/run/munge/munge.socket.2"))
		if err == nil {
			return c.Close()
		}
		if p.Ended() || time.Now().After(deadline) {
			said, _ := os.ReadFile(filepath.Join(n.Dir, "munged.err"))
			return fmt.Errorf("node %s: munged does not answer: %w: %s", n.Name, err, said)
		}
		time.Sleep(5 * time.Millisecond) // munged tells nobody when it is ready
	}
}

// listen takes what the daemon tells its service manager.
func (d *Daemon) listen() error {
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(d.Node.Dir, "notify"), Net: "unixgram"})
	if err != nil {
		return err
	}
	d.notify = c
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			for line := range strings.SplitSeq(string(b[:n]), "\n") {
				if line == "READY=1" {
					d.mu.Lock()
					if d.ready != nil {
						close(d.ready)
						d.ready = nil
					}
					d.mu.Unlock()
				}
			}
		}
	}()
	return nil
}

// Configure writes the configuration of a daemon; more comes after the site's own, and replaces it.
func (d *Daemon) Configure(more map[string]string) error {
	s, n := d.site, d.Node
	var owners []string
	for _, o := range s.Owners {
		owners = append(owners, fmt.Sprintf("%q", fmt.Sprintf("%s=%s:%d", o.Node.Name, o.Node.Addr, Control)))
	}
	keys := map[string]string{
		"node": n.Name, "cluster": "test", "state_dir": filepath.Join(n.Dir, "state"), "advertise": n.Addr,
		"audit.file": d.Audit, "log.level": "debug", "log.format": "json",
		"owner.enabled": map[bool]string{true: "yes", false: "no"}[d.owner], "owner.keep_mem": "0",
		"pools.default.owners": "[" + strings.Join(owners, ", ") + "]",
		"worker.exe":           s.Opt("bin/sluice-worker"), "worker.cgroup": "off",
		"owner.libcuda": s.Opt("simgpu/libcuda.so.1"), "owner.libnvml": s.Opt("simgpu/libnvidia-ml.so.1"),
	}
	for k, v := range s.Options.Config {
		keys[k] = v
	}
	for k, v := range more {
		keys[k] = v
	}
	return os.WriteFile(d.Config, []byte(YAML(keys)), 0o644)
}

// Env is the environment of daemons and programs on a node. GPUs are the simulated machine's.
func (d *Daemon) Env(more ...string) []string {
	o := d.site.Options
	gpus := 0
	if d.owner {
		gpus = o.GPUs
	}
	env := []string{
		"PATH=" + d.site.Opt("bin") + ":/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "LANG=C.UTF-8", "GOTRACEBACK=all",
		"SLUICE_SIM_STATE=" + filepath.Join(d.Node.Dir, "sim"), "SLUICE_SIM_MEM=" + o.Mem, "SLUICE_SIM_DEVICES=" + strconv.Itoa(gpus),
		"SLUICE_SIM_KERNELS=" + d.site.Opt("twins.so"), "SLUICE_SIM_CTX_MEM=16M", "SLUICE_SIM_SHM=1",
	}
	return append(env, more...)
}

// Start starts sluiced; env is added to its environment.
func (d *Daemon) Start(env ...string) (*node.Process, <-chan struct{}, error) {
	if _, err := os.Stat(d.Config); err != nil {
		if err := d.Configure(nil); err != nil {
			return nil, nil, err
		}
	}
	ready := make(chan struct{})
	d.mu.Lock()
	d.ready = ready
	d.mu.Unlock()
	p, err := d.Node.Start(node.Command{
		Argv: []string{d.site.Opt("bin/sluiced"), "--config", d.Config},
		Env:  append(d.Env(env...), "NOTIFY_SOCKET="+filepath.Join(d.Node.Dir, "notify")),
		Dir:  "/", Stdout: d.Log, Stderr: d.Log,
	})
	if err != nil {
		return nil, nil, err
	}
	d.mu.Lock()
	d.proc = p
	d.mu.Unlock()
	return p, ready, nil
}

// Process is the daemon's latest process.
func (d *Daemon) Process() *node.Process {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.proc
}

// Up starts sluiced and waits until it says that it is ready. It answers how long that took.
func (d *Daemon) Up(ctx context.Context, env ...string) (time.Duration, error) {
	p, ready, err := d.Start(env...)
	if err != nil {
		return 0, err
	}
	select {
	case <-ready:
		return time.Since(p.Started), nil
	case <-p.Done():
		return 0, fmt.Errorf("node %s: sluiced: %w:\n%s", d.Node.Name, ended(p.Err()), Tail(d.Log, 20))
	case <-ctx.Done():
		return 0, fmt.Errorf("node %s: sluiced is not ready: %w:\n%s", d.Node.Name, ctx.Err(), Tail(d.Log, 20))
	}
}

// Waited is how long the threads of the daemon's latest process have waited for a processor so far, all together. A test that
// measures how long the daemon took for something subtracts it: what other tests do at the same time is not the daemon's.
func (d *Daemon) Waited() time.Duration {
	threads, _ := filepath.Glob(d.Node.Path(fmt.Sprintf("/proc/%d/task/*/schedstat", d.Process().PID)))
	var sum time.Duration
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		var ran, waited int64 // in nanoseconds; sched-stats.rst
		if _, err := fmt.Sscan(string(b), &ran, &waited); err == nil {
			sum += time.Duration(waited)
		}
	}
	return sum
}

func ended(err error) error {
	if err == nil {
		return errors.New("ended with status 0")
	}
	return err
}

// Kill kills sluiced, and it alone, by signal 9.
func (d *Daemon) Kill() error {
	p := d.Process()
	if p == nil {
		return nil
	}
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.Done()
	return nil
}

// Up starts every daemon that does not run, all at once.
func (s *Site) Up(ctx context.Context) error {
	var wg sync.WaitGroup
	all := s.Daemons()
	errs := make([]error, len(all))
	for i, d := range all {
		if p := d.Process(); p != nil && !p.Ended() {
			continue
		}
		wg.Go(func() { _, errs[i] = d.Up(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Local is a connection to the daemon's local socket, as root. It lives as long as the site.
func (d *Daemon) Local() (*rpc.LocalClient, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.local == nil {
		c, err := rpc.DialLocal(d.Node.Path(Socket), "test")
		if err != nil {
			return nil, err
		}
		d.local = c
	}
	return d.local, nil
}

// Acquire gets a lease for a job of Slurm's number, as root: for uid, of one fraction with that policy.
func (d *Daemon) Acquire(ctx context.Context, job string, uid, percent uint32, policy string) (socket string, release func() error, _ error) {
	c, err := d.Local()
	if err != nil {
		return "", nil, err
	}
	key := lease.Key{Cluster: "test", Job: job, Node: d.Node.Name}
	l, socket, err := c.Acquire(ctx, lease.Request{Key: key, Fractions: []lease.Fraction{{Percent: percent}}, UID: uid, GID: uid, Policy: lease.Policy(policy)})
	if err != nil {
		return "", nil, err
	}
	return socket, func() error { return c.Release(context.Background(), l.ID, key, "the test is done with it") }, nil
}

// Run is the command that has sluice run start a program on this node. uid 0 is root.
func (d *Daemon) Run(uid int, args ...string) node.Command {
	return node.Command{Argv: append([]string{d.site.Opt("bin/sluice"), "run"}, args...), Env: d.Env(), UID: uid, GID: uid, Dir: "/"}
}

// Program is an installed CUDA program.
func (s *Site) Program(name string) string { return s.Opt(filepath.Join("cuda", name)) }

// Close ends everything and removes every trace.
func (s *Site) Close() {
	for _, d := range s.Daemons() {
		d.mu.Lock()
		if d.local != nil {
			_ = d.local.Close()
		}
		d.mu.Unlock()
		if d.notify != nil {
			_ = d.notify.Close()
		}
	}
	if s.Net != nil {
		s.Net.Close()
	}
	_ = os.RemoveAll(s.Dir)
}

// Tail is the last lines of a file.
func Tail(path string, lines int) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	l := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(l[max(0, len(l)-lines):], "\n")
}
