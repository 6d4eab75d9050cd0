// Bench measures the daemons on a test site of this machine: three owners and a host, each a node of its
// own made of namespaces, with simulated GPUs. It writes a raw log, from which
// bench/report.py makes a part of docs/benchmarks.md. It needs root, and a quiet machine.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/bench/figures"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
	"github.com/sluice-hpc/sluice/remoting/api"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

func init() {
	node.Role("open", open)
	node.Role("scrape", scrape)
}

func main() {
	node.Main()
	build := flag.String("build", "build", "make's build folder")
	out := flag.String("out", "bench/logs/daemon", "folder for the raw log, daemon.jsonl, and placement.txt")
	times := flag.Int("times", 300, "how often each thing is done")
	idle := flag.Duration("idle", 30*time.Second, "how long the idle daemon is watched")
	flag.Parse()
	b := &bench{out: *out, times: *times, idle: *idle}
	var err error
	if b.build, err = filepath.Abs(*build); err == nil {
		err = b.run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type bench struct {
	build, out string
	times      int
	idle       time.Duration
	log        *figures.Log
}

func (b *bench) run() error {
	under, err := fileSystem()
	if err != nil {
		return err
	}
	b.log, err = figures.Create(".", filepath.Join(b.out, "daemon.jsonl"), "gpu=simulated", "driver=none",
		"note=nodes made of namespaces on one bridge, ledgers on "+under)
	if err != nil {
		return err
	}
	defer b.log.Close()
	if err := b.placement(); err != nil {
		return err
	}
	if err := b.leases(); err != nil {
		return err
	}
	return b.full()
}

func (b *bench) write(f figures.Figure) error {
	fmt.Printf("%-14s %d samples, %s\n", f.Name, len(f.Samples), f.How)
	return b.log.Write(f)
}

// fileSystem is that of the ledgers.
func fileSystem() (string, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(os.TempDir(), &fs); err != nil {
		return "", err
	}
	known := map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.TMPFS_MAGIC: "tmpfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs"}
	if name := known[fs.Type]; name != "" {
		return name, nil
	}
	return fmt.Sprintf("a file system of type %#x", fs.Type), nil
}

// placement runs the package's own benchmark and keeps what it printed.
func (b *bench) placement() error {
	out, err := exec.Command("go", "test", "-run", "^$", "-bench", "Place", "-count", "5", "./daemon/internal/placement").CombinedOutput()
	if err != nil {
		return fmt.Errorf("go test -bench: %w: %s", err, out)
	}
	if err := os.WriteFile(filepath.Join(b.out, "placement.txt"), append(b.log.Header(), out...), 0o644); err != nil {
		return err
	}
	byName := make(map[string][]float64)
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		for i := 2; i+1 < len(f); i++ {
			if ns, err := strconv.ParseFloat(f[i], 64); err == nil && f[i+1] == "ns/op" {
				byName[strings.TrimPrefix(f[0], "Benchmark")] = append(byName[strings.TrimPrefix(f[0], "Benchmark")], 1e9/ns)
			}
		}
	}
	// The slowest of its cases counts.
	var worst string
	for name, s := range byName {
		if worst == "" || s[0] < byName[worst][0] {
			worst = name
		}
	}
	if worst == "" {
		return fmt.Errorf("package placement has no benchmark: %s", out)
	}
	return b.write(figures.Figure{Name: "placement", Unit: "decisions/s", Wanted: "median >= 2000", How: "the slowest case of the package's benchmark, " + worst + "; placement.txt has all", Samples: byName[worst]})
}

// leases measures how long leases and sessions take to begin.
func (b *bench) leases() error {
	s, err := site.New(site.Options{Hosts: 1, Owners: 3, GPUs: 4, Build: b.build, Config: map[string]string{"log.level": "info"}})
	if err != nil {
		return err
	}
	defer s.Close()
	h := s.Hosts[0]
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if err := s.Up(ctx); err != nil {
		return err
	}
	if err := settle(ctx, h); err != nil {
		return err
	}
	shapes := []struct {
		name, how string
		fractions int
	}{
		{"acquire3", "Acquire of 12 fractions on 12 GPUs of 3 owners, by the local socket, until the answer", 12},
		{"acquire1", "Acquire of one fraction out of 3 owners, by the local socket, until the answer", 1},
	}
	c, err := h.Local()
	if err != nil {
		return err
	}
	for _, shape := range shapes {
		f := figures.Figure{Name: shape.name, Unit: "ms", Wanted: "median < 20", How: shape.how}
		for i := range b.times {
			r := request(h, fmt.Sprintf("%s-%d", shape.name, i), shape.fractions, 20)
			began := time.Now()
			l, _, err := c.Acquire(ctx, r)
			took := time.Since(began)
			if err != nil {
				return err
			}
			f.Samples = append(f.Samples, took.Seconds()*1e3)
			if err := c.Release(ctx, l.ID, l.Request.Key, "measured"); err != nil {
				return err
			}
		}
		if err := b.write(f); err != nil {
			return err
		}
	}
	_, socket, err := c.Acquire(ctx, request(h, "sessions", 1, 20))
	if err != nil {
		return err
	}
	out, err := h.Node.Run(ctx, h.Node.Role("open", socket, strconv.Itoa(b.times)))
	if err != nil {
		return err
	}
	f := figures.Figure{Name: "open", Unit: "ms", Wanted: "median < 10", How: "from connecting to the lease's socket to the worker's WELCOME, a warm worker waiting, the owner another node"}
	if err := json.Unmarshal([]byte(out), &f.Samples); err != nil {
		return err
	}
	return b.write(f)
}

// full measures a daemon with all that it may have: 8 GPUs, 192 fractions.
func (b *bench) full() error {
	s, err := site.New(site.Options{Hosts: 1, Owners: 1, GPUs: 8, Build: b.build, Config: map[string]string{"log.level": "info"}})
	if err != nil {
		return err
	}
	defer s.Close()
	h, o := s.Hosts[0], s.Owners[0]
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if err := s.Up(ctx); err != nil {
		return err
	}
	if err := settle(ctx, h); err != nil {
		return err
	}
	c, err := h.Local()
	if err != nil {
		return err
	}
	for i := range 192 {
		if _, _, err := c.Acquire(ctx, request(h, fmt.Sprintf("full-%d", i), 1, 4)); err != nil {
			return fmt.Errorf("fraction %d: %w", i, err)
		}
	}
	time.Sleep(5 * time.Second) // what starting and granting left behind goes back
	mem := figures.Figure{Name: "memory", Unit: "MiB", Wanted: "max < 30", How: "resident memory of the owner's sluiced with 8 GPUs and 192 fractions, once a second"}
	hostMem := figures.Figure{Name: "memory-host", Unit: "MiB", Wanted: "max < 30", How: "resident memory of the host's sluiced with the same 192 leases, once a second"}
	began, first, firstHost := time.Now(), busy(o), busy(h)
	for end := time.Now().Add(b.idle); time.Now().Before(end); {
		time.Sleep(time.Second)
		mem.Samples = append(mem.Samples, resident(o))
		hostMem.Samples = append(hostMem.Samples, resident(h))
	}
	took := time.Since(began).Seconds()
	cpu := figures.Figure{Name: "idle", Unit: "% of a core", Wanted: "median < 1", How: fmt.Sprintf("processor time of the owner's sluiced and its children, 192 leases and nobody asking, over %.0f s", took), Samples: []float64{100 * (busy(o) - first) / took}}
	hostCPU := figures.Figure{Name: "idle-host", Unit: "% of a core", Wanted: "median < 1", How: fmt.Sprintf("the same of the host's sluiced, which renews them, over %.0f s", took), Samples: []float64{100 * (busy(h) - firstHost) / took}}
	out, err := o.Node.Run(ctx, o.Node.Role("scrape", fmt.Sprintf("http://127.0.0.1:%d/metrics", site.Metrics), strconv.Itoa(b.times)))
	if err != nil {
		return err
	}
	scrapes := figures.Figure{Name: "scrape", Unit: "ms", Wanted: "p99 < 10", How: "GET /metrics of that owner, until the last byte"}
	if err := json.Unmarshal([]byte(out), &scrapes.Samples); err != nil {
		return err
	}
	for _, f := range []figures.Figure{mem, hostMem, cpu, hostCPU, scrapes} {
		if err := b.write(f); err != nil {
			return err
		}
	}
	return nil
}

// request is for n fractions of so many percent each.
func request(h *site.Daemon, job string, n int, percent uint32) lease.Request {
	r := lease.Request{Key: lease.Key{Cluster: "test", Job: job, Node: h.Node.Name}, UID: 2001, GID: 2001}
	for range n {
		r.Fractions = append(r.Fractions, lease.Fraction{Percent: percent})
	}
	return r
}

// settle waits until the host sees all owners.
func settle(ctx context.Context, h *site.Daemon) error {
	c, err := h.Local()
	if err != nil {
		return err
	}
	for {
		pools, err := c.Pool(ctx, "default")
		if err == nil {
			seen := 0
			for _, o := range pools[0].Owners {
				if o.Error == "" && len(o.Inventory.GPUs) > 0 && o.Inventory.GPUs[0].Healthy {
					seen++
				}
			}
			if seen == len(pools[0].Owners) {
				break
			}
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the pool does not come up: %w", err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	time.Sleep(2 * time.Second) // the workers that are kept warm start
	return nil
}

// resident is the resident memory in MiB.
func resident(d *site.Daemon) float64 {
	text, err := os.ReadFile(d.Node.Path(fmt.Sprintf("/proc/%d/status", d.Process().PID)))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kb, _ := strconv.ParseFloat(f[1], 64)
			return kb / 1024
		}
	}
	return 0
}

// busy is the processor time of sluiced and its children, in seconds. It counts nanoseconds, by schedstat:
// the clock ticks of /proc/PID/stat do not see what is shorter.
func busy(d *site.Daemon) float64 {
	var ns float64
	entries, _ := os.ReadDir(d.Node.Path("/proc"))
	for _, e := range entries {
		text, err := os.ReadFile(d.Node.Path("/proc/" + e.Name() + "/stat"))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(text), ") ")
		f := strings.Fields(rest)
		if len(f) < 2 {
			continue
		}
		parent, _ := strconv.Atoi(f[1])
		if me := d.Process().PID; e.Name() != strconv.Itoa(me) && parent != me {
			continue
		}
		tasks, _ := filepath.Glob(d.Node.Path("/proc/" + e.Name() + "/task/*/schedstat"))
		for _, t := range tasks {
			text, _ := os.ReadFile(t)
			if f := strings.Fields(string(text)); len(f) > 0 {
				n, _ := strconv.ParseFloat(f[0], 64)
				ns += n
			}
		}
	}
	return ns / 1e9
}

// open SOCKET TIMES opens sessions one after the other and prints how long each took, in milliseconds.
func open(args []string) error {
	times, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	samples := make([]float64, 0, times)
	for range times {
		began := time.Now()
		f, err := site.Knock(args[0], wire.SessionCompute, 0)
		if err != nil {
			return err
		}
		var hello [wire.HelloSize]byte
		(&wire.Hello{Version: wire.Version, Kind: wire.SessionCompute, Fingerprint: api.Fingerprint(), PID: uint32(os.Getpid()), Program: "bench"}).Encode(&hello)
		if _, err := f.Write(hello[:]); err != nil {
			return err
		}
		if _, err := wire.ReadWelcome(f); err != nil {
			return err
		}
		samples = append(samples, time.Since(began).Seconds()*1e3)
		if err := f.Close(); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond) // until the next worker is warm
	}
	return json.NewEncoder(os.Stdout).Encode(samples)
}

// scrape URL TIMES fetches it and prints how long each took, in milliseconds.
func scrape(args []string) error {
	times, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	samples := make([]float64, 0, times)
	for range times {
		began := time.Now()
		r, err := http.Get(args[0])
		if err != nil {
			return err
		}
		n, err := io.Copy(io.Discard, r.Body)
		_ = r.Body.Close()
		if err != nil || n == 0 || r.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s, %d bytes, %w", args[0], r.Status, n, err)
		}
		samples = append(samples, time.Since(began).Seconds()*1e3)
		time.Sleep(20 * time.Millisecond)
	}
	return json.NewEncoder(os.Stdout).Encode(samples)
}
