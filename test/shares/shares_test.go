// Package shares tests how tenants share a GPU, by counts: the simulated GPU has one engine, on which every kernel has
// its cost, and a clock that moves by what that engine runs. Its trace says who had it from when to when, so that
// shares, gaps and hand-overs are what was counted and no noise of the machine's. All else is what a user has: daemons on
// two nodes, sluice run, sluice set, and a program of the driver's interface. It needs root.
//
// The artefacts come from make: SLUICE_BUILD names its build folder (default: build/ of the repository).
package shares

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

const user = 2001

var build string

func TestMain(m *testing.M) {
	node.Main()
	build = os.Getenv("SLUICE_BUILD")
	if build == "" {
		build = "../../build"
	}
	abs, err := filepath.Abs(build)
	if err != nil {
		fmt.Fprintln(os.Stderr, "shares:", err)
		os.Exit(1)
	}
	build = abs
	for _, f := range []string{"test/tenant", "test/tenant-twins.so", "test/tenant-kind2.so"} {
		if _, err := os.Stat(filepath.Join(build, f)); err != nil {
			fmt.Fprintf(os.Stderr, "shares: %v; run make test-shares, which builds what these tests need\n", err)
			os.Exit(1)
		}
	}
	if err := hurry(); err != nil {
		fmt.Fprintln(os.Stderr, "shares: priority:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// hurry gives this process and its children a high priority. The simulated clock waits for whoever could run and does not
// get to, so on a machine with other things to do these tests would take long, and sometimes too long. Linux sets the
// priority of one thread; the others have it from there when the program starts anew.
func hurry() error {
	const nice = -10
	runtime.LockOSThread()
	if old, err := syscall.Getpriority(syscall.PRIO_PROCESS, 0); err != nil || 20-old <= nice {
		return err
	}
	if err := syscall.Setpriority(syscall.PRIO_PROCESS, 0, nice); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", os.Args, os.Environ())
}

const (
	// quantum is the length of a turn.
	quantum = turns.DefaultQuantum
	// change is what a switch between processes costs on an H200 (docs/shares.md).
	change = 150 * time.Microsecond
)

// world is a site of one host and one owner with one GPU, and that GPU's trace.
type world struct {
	t     *testing.T
	s     *site.Site
	owner *site.Daemon
	host  *site.Daemon
	trace *trace
	watch *watch
	names atomic.Uint64
}

// newWorld starts one.
func newWorld(t *testing.T) *world {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("nodes are made of namespaces, which needs root")
	}
	s, err := site.New(site.Options{Hosts: 1, Owners: 1, GPUs: 1, Mem: "16G", Build: build, Config: map[string]string{"shares.quantum": quantum.String()}})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, s: s, owner: s.Owners[0], host: s.Hosts[0]}
	t.Cleanup(func() {
		if t.Failed() {
			for _, d := range s.Daemons() {
				t.Logf("the end of %s's log:\n%s", d.Node.Name, site.Tail(d.Log, 12))
			}
		}
		s.Close()
	})
	for from, to := range map[string]string{"tenant": "tenant", "tenant-twins.so": "twins.so", "tenant-kind2.so": "kind2.so"} {
		b, err := os.ReadFile(filepath.Join(build, "test", from))
		if err == nil {
			err = os.WriteFile(s.Opt(to), b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	path, asks := filepath.Join(w.owner.Node.Dir, "trace"), filepath.Join(w.owner.Node.Dir, "watch")
	w.watch = newWatch(t, asks, w.owner.Node, w.host.Node)
	w.trace = &trace{path: path}
	if _, err := w.owner.Up(ctx, "SLUICE_SIM_COST=copy:50,inner:2", "SLUICE_SIM_IDLE=100000", "SLUICE_SIM_WATCH="+asks,
		fmt.Sprintf("SLUICE_SIM_SWITCH=%d", change.Microseconds()), "SLUICE_SIM_TRACE="+path); err != nil {
		t.Fatal(err)
	}
	if _, err := w.host.Up(ctx); err != nil {
		t.Fatal(err)
	}
	w.eventually("the GPU is there", func() error {
		c, err := w.host.Local()
		if err != nil {
			return err
		}
		pools, err := c.Pool(ctx, "default")
		if err != nil {
			return err
		}
		for _, p := range pools {
			for _, o := range p.Owners {
				if len(o.Inventory.GPUs) == 1 && o.Inventory.GPUs[0].Healthy {
					return nil
				}
			}
		}
		return fmt.Errorf("%+v", pools)
	})
	return w
}

// set changes the owner's configuration while it runs.
func (w *world) set(config map[string]string) {
	w.t.Helper()
	taken := func() int {
		b, err := os.ReadFile(w.owner.Log)
		if err != nil {
			w.t.Fatal(err)
		}
		return strings.Count(string(b), "configuration reloaded")
	}
	before := taken()
	if err := w.owner.Configure(config); err != nil {
		w.t.Fatal(err)
	}
	if err := w.owner.Process().Signal(syscall.SIGHUP); err != nil {
		w.t.Fatal(err)
	}
	w.eventually("the owner has the new configuration", func() error {
		if n := taken(); n == before {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
}

// audited says whether a line of the owner's audit log has all of these. The log is several files of one base name.
func (w *world) audited(parts ...string) bool {
	files, err := filepath.Glob(w.owner.Audit + "*")
	if err != nil || len(files) == 0 {
		w.t.Fatalf("no audit log at %s: %v", w.owner.Audit, err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			w.t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if !slices.ContainsFunc(parts, func(s string) bool { return !strings.Contains(line, s) }) {
				return true
			}
		}
	}
	return false
}

// share is what a tenant asks for.
type share struct {
	percent int
	policy  string
	load    string
}

// tenant is a program that works on the GPU.
type tenant struct {
	share
	w     *world
	tag   uint64
	proc  *node.Process
	in    *os.File
	out   string
	lease string
}

// launch starts a tenant and does not wait for it.
func (w *world) launch(sh share) *tenant {
	w.t.Helper()
	return w.launchBy(sh, func(program ...string) node.Command {
		// Each its own user: there are bounds on what one user asks for at a time.
		uid := user + int(w.names.Load())
		return w.host.Run(uid, append([]string{"--fraction", fmt.Sprint(sh.percent), "--policy", sh.policy, "--"}, program...)...)
	})
}

// launchBy starts a tenant by a command that runs its program.
func (w *world) launchBy(sh share, command func(program ...string) node.Command) *tenant {
	w.t.Helper()
	n := &tenant{share: sh, w: w, tag: w.names.Add(1)}
	base := filepath.Join(w.host.Node.Dir, fmt.Sprintf("tenant%d", n.tag))
	n.out = base + ".out"
	if err := syscall.Mkfifo(base+".in", 0o600); err != nil {
		w.t.Fatal(err)
	}
	var err error
	if n.in, err = os.OpenFile(base+".in", os.O_RDWR, 0); err != nil {
		w.t.Fatal(err)
	}
	c := command(w.s.Opt("tenant"), sh.load, fmt.Sprint(n.tag))
	c.Stdin, c.Stdout, c.Stderr = base+".in", n.out, n.out
	if n.proc, err = w.host.Node.Start(c); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// start starts tenants, all at once, and waits until they work.
func (w *world) start(shares ...share) []*tenant {
	w.t.Helper()
	var all []*tenant
	for _, sh := range shares {
		all = append(all, w.launch(sh))
	}
	for _, n := range all {
		n.begun()
	}
	return all
}

// begun waits until the tenant works.
func (n *tenant) begun() {
	n.w.t.Helper()
	n.expect("ready", 1)
	line := strings.Split(n.said(), "\n")[0]
	n.lease = filepath.Base(filepath.Dir(strings.TrimPrefix(line, "lease ")))
}

func (n *tenant) said() string {
	b, err := os.ReadFile(n.out)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// expect waits until the tenant has said a line so many times.
func (n *tenant) expect(line string, times int) {
	n.w.t.Helper()
	n.w.eventually(fmt.Sprintf("tenant %d says %q", n.tag, line), func() error {
		seen := 0
		for said := range strings.Lines(n.said()) {
			if said == line+"\n" {
				seen++
			}
		}
		if seen >= times {
			return nil
		}
		if n.proc.Ended() {
			n.w.t.Fatalf("tenant %d has ended: %v: %s", n.tag, n.proc.Err(), n.said())
		}
		return fmt.Errorf("it said %q", n.said())
	})
}

// tell gives the tenant a command.
func (n *tenant) tell(command string) {
	n.w.t.Helper()
	if _, err := n.in.WriteString(command + "\n"); err != nil {
		n.w.t.Fatal(err)
	}
}

// end ends the tenant with a signal and waits until it is gone.
func (n *tenant) end(sig syscall.Signal) {
	n.w.t.Helper()
	_ = n.proc.Signal(sig) // or it has ended
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_ = n.proc.Wait(ctx) // with the status of that signal
	n.in.Close()
	if !n.proc.Ended() {
		n.w.t.Fatalf("tenant %d does not end", n.tag)
	}
}

// endAll ends tenants and waits until their leases are free again.
func (w *world) endAll(all []*tenant) {
	w.t.Helper()
	for _, n := range all {
		_ = n.proc.Signal(syscall.SIGTERM)
	}
	for _, n := range all {
		n.end(syscall.SIGTERM)
	}
	w.eventually("no lease is left", func() error {
		if ls := w.leases(); len(ls) > 0 {
			return fmt.Errorf("%d leases", len(ls))
		}
		return nil
	})
}

// eventually asks until f is content.
func (w *world) eventually(what string, f func() error) {
	w.t.Helper()
	deadline := time.Now().Add(2 * time.Minute) // the simulated GPU computes as fast as the processors that others use too
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("not within two minutes: %s: %v", what, err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// sluice runs the command line on the host as root.
func (w *world) sluice(args ...string) string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := w.host.Node.Run(ctx, node.Command{Argv: append([]string{w.s.Opt("bin/sluice")}, args...), Env: w.host.Env(), Dir: "/"})
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// counters are a lease's, as sluice list tells them.
type counters struct {
	Held, Busy, Waited, Throttled, Lent, Borrowed, Longest time.Duration
	Turns, Overruns, Revoked                               uint64
}

type listed struct {
	ID     string     `json:"id"`
	Shares []counters `json:"shares"`
}

func (w *world) leases() []listed {
	w.t.Helper()
	var all []listed
	out := w.sluice("list", "--json")
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		w.t.Fatalf("sluice list --json: %v: %s", err, out)
	}
	return all
}

// run lets the simulated clock go on by d, and gives the times from and to.
func (w *world) run(d time.Duration) (from, to time.Duration) {
	w.t.Helper()
	w.eventually("the GPU works", func() error {
		if from = w.trace.now(); from == 0 {
			return fmt.Errorf("its trace is empty")
		}
		return nil
	})
	to = from + d
	w.eventually(fmt.Sprintf("the GPU's clock goes on by %v", d), func() error {
		if now := w.trace.now(); now < to {
			return fmt.Errorf("it has gone on by %v", now-from)
		}
		return nil
	})
	return from, to
}
