package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// count is how often a test does what it does: a number in the environment for a long run by hand, else a few.
func count(t *testing.T, name string, few int) int {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		return few
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// TestIPCForged: of handles that are made up, altered, stale or another lease's none opens, and processes that share
// memory meanwhile are not disturbed. SLUICE_FORGED handles are tried, by eight processes in each of two leases.
func TestIPCForged(t *testing.T) {
	const forgers = 8
	n := count(t, "SLUICE_FORGED", 8000) / (2 * forgers)
	w := startWorker(t, workerOptions{network: "unix", mem: "2G", gpuMem: "8G", sandbox: "on"})
	// Leases of their own first: the default lease has all that they leave.
	stranger := startAgentAs(t, w.command(context.Background(), runOptions{mem: "256M"}, built("test/agent")))
	stranger.must("mem %d", 1<<20)
	strange := stranger.handle(0)
	forgeries := []*agent{}
	for range forgers {
		forgeries = append(forgeries, startAgentAs(t, w.command(context.Background(), runOptions{mem: "128M"}, built("test/agent"))))
	}
	maker, user := startAgent(t, w), startAgent(t, w)
	maker.must("mem %d", 1<<20)
	maker.must("mem %d", 1<<20)
	h, stale := maker.handle(0), maker.handle(1)
	maker.must("free 1")

	var opened, odd, tried atomic.Uint64
	var wg sync.WaitGroup
	for i := range 2 * forgers {
		from := h // of another lease
		if i >= forgers {
			forgeries = append(forgeries, startAgent(t, w))
			from = strange
		}
		forger := forgeries[i]
		wg.Add(1)
		go func() {
			defer wg.Done()
			for _, of := range [][]byte{from, stale} {
				rc, x, y := forger.ask("forge %d %d %x", n/2, i+1, of)
				if rc != 0 {
					t.Errorf("a forger cannot begin: CUresult %d", rc)
				}
				opened.Add(x)
				odd.Add(y)
				tried.Add(uint64(n / 2))
			}
			forger.must("mem %d", 1<<20) // the session is as good as before
		}()
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	var worst time.Duration
	shared := 0
	for more := true; more; shared++ {
		select {
		case <-done:
			more = false
		default:
		}
		start := time.Now()
		user.must("open %x", h)
		user.must("set %d %d", shared, shared)
		if x, _ := maker.must("get 0"); x != uint64(shared) {
			t.Fatalf("what the user wrote is %d there, not %d", x, shared)
		}
		user.must("free %d", shared)
		worst = max(worst, time.Since(start))
		time.Sleep(time.Millisecond)
	}
	t.Logf("%d handles tried, %d opened, %d with another result than a native driver's; %d times shared meanwhile, the slowest took %s",
		tried.Load(), opened.Load(), odd.Load(), shared, worst.Round(time.Millisecond))
	if opened.Load() != 0 || odd.Load() != 0 {
		t.Fail()
	}
	if worst > 5*time.Second {
		t.Errorf("sharing took %s beside forgers", worst)
	}
}

// shop is what several processes of a lease offer each other, and drive against each other at random.
type shop struct {
	mu     sync.Mutex
	offers []offer
}

// offer is an export: a handle, or a descriptor of a process.
type offer struct {
	by     int
	handle []byte
	pid    int
	fd     uint64
}

func (s *shop) add(o offer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offers = append(s.offers, o)
	if len(s.offers) > 64 {
		s.offers = s.offers[1:]
	}
}

func (s *shop) any(r *rand.Rand) (o offer, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.offers) == 0 {
		return o, false
	}
	return s.offers[r.IntN(len(s.offers))], true
}

// shopper is one process and what it holds.
type shopper struct {
	*agent
	made []int // indices of what it allocated by cuMemAlloc and cuMemCreate, and
	vmm  []int
	all  []int // of all that it has
	n    int   // allocations so far
}

// step does one thing at random. It says what came back that must not.
func (a *shopper) step(r *rand.Rand, s *shop, me int) string {
	note := func(rc int, lists ...*[]int) {
		if rc != 0 {
			return
		}
		for _, l := range append(lists, &a.all) {
			*l = append(*l, a.n)
		}
		a.n++
	}
	pick := func(l []int) int { return l[r.IntN(len(l))] }
	allowed := func(what string, rc int, also ...int) string {
		for _, k := range append(also, 0, outOf) {
			if rc == k {
				return ""
			}
		}
		return fmt.Sprintf("%s: CUresult %d", what, rc)
	}
	switch k := r.IntN(12); {
	case len(a.all) > 24, k < 3 && len(a.all) > 0:
		i := r.IntN(len(a.all))
		at := a.all[i]
		a.all = append(a.all[:i], a.all[i+1:]...)
		for _, l := range []*[]int{&a.made, &a.vmm} {
			for j, v := range *l {
				if v == at {
					*l = append((*l)[:j], (*l)[j+1:]...)
					break
				}
			}
		}
		rc, _, _ := a.ask("free %d", at)
		return allowed("free", rc)
	case k < 5:
		rc, _, _ := a.ask("mem %d", 1+r.IntN(24<<20))
		note(rc, &a.made)
		return allowed("cuMemAlloc", rc)
	case k < 6:
		rc, _, _ := a.ask("vmm %d", (1+r.IntN(12))*granule)
		note(rc, &a.vmm)
		return allowed("cuMemCreate", rc)
	case k < 8 && len(a.made) > 0:
		s.add(offer{by: me, handle: a.handle(pick(a.made))})
	case k < 9 && len(a.vmm) > 0:
		rc, fd, _ := a.ask("export %d", pick(a.vmm))
		if rc == 0 {
			s.add(offer{by: me, pid: a.cmd.Process.Pid, fd: fd})
		}
		return allowed("export", rc)
	default:
		o, ok := s.any(r)
		if !ok {
			return ""
		}
		if o.handle != nil {
			rc, _, _ := a.ask("open %x", o.handle)
			note(rc)
			return allowed("open", rc, invalidHandle, invalidContext)
		}
		rc, _, _ := a.ask("import %d %d", o.pid, o.fd)
		note(rc)
		// The descriptor may be closed, or its process gone.
		return allowed("import", rc, invalidHandle, invalidValue, unknown)
	}
	return ""
}

// TestIPCMany: eight processes of a lease allocate, share, open and free at random, and some are killed in the midst of it.
// The GPU never holds a byte more for them than the lease grants, nothing is missing at the end, and nothing is left.
// SLUICE_IPC_STEPS is the number of operations.
func TestIPCMany(t *testing.T) {
	const processes, capMiB = 8, 640
	steps := count(t, "SLUICE_IPC_STEPS", 4000) / processes
	w := startWorker(t, workerOptions{network: "unix", mem: fmt.Sprintf("%dM", capMiB), gpuMem: "4G", sandbox: "on"})
	watcher := startAgent(t, w)
	free0, _ := watcher.info()
	base := w.used()

	stop, watched := make(chan struct{}), make(chan struct{})
	var most uint64
	looks := 0
	go func() {
		defer close(watched)
		for ; ; looks++ {
			select {
			case <-stop:
				return
			default:
				most = max(most, w.used())
			}
		}
	}()
	var s shop
	var wg sync.WaitGroup
	var killed atomic.Int32
	for i := range processes {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r := rand.New(rand.NewPCG(17, uint64(i)))
			var a *shopper
			for n := range steps {
				if a == nil {
					a = &shopper{agent: startAgent(t, w)}
				}
				if n%97 == 90 && r.IntN(2) == 0 {
					killed.Add(1)
					_ = a.cmd.Process.Kill()
					_ = a.cmd.Wait()
					a = nil
					continue
				}
				bad := a.step(r, &s, i)
				if bad == "" {
					continue
				}
				t.Errorf("process %d, step %d: %s: %s", i, n, bad, a.stderr.String())
				return
			}
			if a != nil {
				a.in.Close()
				_ = a.cmd.Wait()
			}
		}()
	}
	wg.Wait()
	close(stop)
	<-watched
	if most > capMiB*mib {
		t.Errorf("the GPU held %d bytes for a lease of %d", most, capMiB*mib)
	}
	waitFor(t, 15*time.Second, "all memory is free again", func() bool { n, _ := watcher.info(); return n == free0 && w.used() == base })
	t.Logf("%d operations of %d processes, %d killed; the GPU held %d MiB of %d at most in %d looks",
		steps*processes, processes, killed.Load(), most>>20, capMiB, looks)
}
