package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const (
	mib     = 1 << 20
	granule = 2 * mib
	outOf   = 2 // CUDA_ERROR_OUT_OF_MEMORY
)

func granules(n uint64) uint64 { return (n + granule - 1) / granule * granule }

// agent is a process with a session of its own that allocates as told, see test/cuda/agent.c.
type agent struct {
	t      *testing.T
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr lockedBuffer
	next   int
	held   []holding
}

type holding struct {
	index int
	kind  string
	atom  uint64 // bytes that it takes at least
	most  uint64 // bytes that it takes at most
}

func startAgent(t *testing.T, w *worker) *agent {
	t.Helper()
	return startAgentAs(t, w.direct(context.Background(), built("test/agent")))
}

// startAgentAs starts an agent by a command of the caller's.
func startAgentAs(t *testing.T, cmd *exec.Cmd) *agent {
	t.Helper()
	a := &agent{t: t, cmd: cmd}
	var err error
	if a.in, err = a.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := a.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	a.out = bufio.NewReader(out)
	a.cmd.Stderr = &a.stderr
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = a.cmd.Process.Kill()
		_ = a.cmd.Wait()
	})
	if rc, _, _ := a.answer(); rc != 0 {
		t.Fatalf("an agent cannot begin: CUresult %d: %s", rc, a.stderr.String())
	}
	return a
}

func (a *agent) answer() (rc int, x, y uint64) {
	a.t.Helper()
	line, err := a.out.ReadString('\n')
	if err != nil {
		a.t.Fatalf("an agent died: %v: %s", err, a.stderr.String())
	}
	_, _ = fmt.Sscan(line, &rc, &x, &y)
	return rc, x, y
}

func (a *agent) ask(format string, args ...any) (rc int, x, y uint64) {
	a.t.Helper()
	if _, err := fmt.Fprintf(a.in, format+"\n", args...); err != nil {
		a.t.Fatalf("an agent died: %v: %s", err, a.stderr.String())
	}
	return a.answer()
}

func (a *agent) info() (free, total uint64) {
	a.t.Helper()
	rc, free, total := a.ask("info")
	if rc != 0 {
		a.t.Fatalf("cuMemGetInfo: CUresult %d", rc)
	}
	return free, total
}

// TestMemoryModel drives random allocations of every kind over several sessions of one lease
// against a model: nothing that does not fit is granted, nothing that fits is refused, all sessions
// hear the same story, the GPU's own account stays within the grant, and when everything is freed
// not a byte is missing.
func TestMemoryModel(t *testing.T) {
	const agents, steps, capMiB = 4, 3000, 1024
	w := startWorker(t, workerOptions{network: "unix", mem: fmt.Sprintf("%dM", capMiB), gpuMem: "4G"})
	all := make([]*agent, agents)
	for i := range all {
		all[i] = startAgent(t, w)
	}
	for _, a := range all {
		a.info() // from here on each has its context
	}
	r := rand.New(rand.NewPCG(7, 11))
	free0, total := all[0].info()
	if total != capMiB*mib || free0 >= total {
		t.Fatalf("%d of %d bytes are free in a lease of %d MiB with %d contexts", free0, total, capMiB, agents)
	}
	t.Logf("%d contexts take %d MiB of %d", agents, (total-free0)/mib, capMiB)

	bounds := func() (least, most uint64) {
		for _, a := range all {
			for _, h := range a.held {
				least += h.atom
				most += h.most
			}
		}
		return least, most
	}
	var granted, refused int
	start := time.Now()
	for step := range steps {
		a := all[r.IntN(agents)]
		if r.IntN(100) < 40 && len(a.held) > 0 {
			i := r.IntN(len(a.held))
			h := a.held[i]
			if rc, _, _ := a.ask("free %d", h.index); rc != 0 {
				t.Fatalf("step %d: freeing a %s: CUresult %d", step, h.kind, rc)
			}
			a.held = append(a.held[:i], a.held[i+1:]...)
			continue
		}
		free, _ := all[r.IntN(agents)].info()
		kind := []string{"mem", "mem", "mem", "pitch", "array", "pool", "vmm"}[r.IntN(7)]
		var n uint64
		switch r.IntN(4) {
		case 0:
			n = 1 + r.Uint64N(mib)
		case 1:
			n = 1 + r.Uint64N(8*mib)
		case 2:
			n = 1 + r.Uint64N(64*mib)
		default: // around what is free
			n = max(granule, free+r.Uint64N(4*granule)) - granule + 1
		}
		var rc int
		var pitch uint64
		switch kind {
		case "pitch":
			rows := 1 + r.Uint64N(512)
			width := n/rows + 1
			rc, pitch, _ = a.ask("pitch %d %d", width, rows)
			if n = width * rows; rc == 0 {
				n = pitch * rows
			}
		case "array":
			height := 1 + r.Uint64N(256)
			width := min(n/4/height+1, 16384)
			n = width * height * 4
			rc, _, _ = a.ask("array %d %d", width, height)
		case "vmm":
			n = granules(n)
			fallthrough
		default:
			rc, _, _ = a.ask("%s %d", kind, n)
		}
		switch rc {
		case 0:
			granted++
			// a session may have a granule in hand that it sub-divides
			if n > free+granule {
				t.Fatalf("step %d: %s of %d bytes granted with %d free", step, kind, n, free)
			}
			a.held = append(a.held, holding{index: a.next, kind: kind, atom: n, most: granules(n) + granule})
			a.next++
		case outOf:
			refused++
			// pitch may round each row up to half a kilobyte
			if kind != "pitch" && granules(n)+granule <= free {
				t.Fatalf("step %d: %s of %d bytes refused with %d free", step, kind, n, free)
			}
		default:
			t.Fatalf("step %d: %s of %d bytes: CUresult %d", step, kind, n, rc)
		}
		least, most := bounds()
		free, total := all[r.IntN(agents)].info()
		if total != capMiB*mib || free+least > free0 || free+most+agents*2*granule < free0 {
			t.Fatalf("step %d: %d bytes free of %d, after %d at the start and between %d and %d held", step, free, total, free0, least, most)
		}
		if step%200 == 0 {
			if used := w.used(); used > capMiB*mib {
				t.Fatalf("step %d: the GPU says %d bytes are used; the lease has %d", step, used, capMiB*mib)
			}
		}
	}
	t.Logf("%d granted, %d refused in %s", granted, refused, time.Since(start).Round(time.Millisecond))
	if granted < steps/10 || refused < steps/100 {
		t.Errorf("%d granted and %d refused of %d: the test tests little", granted, refused, steps)
	}
	for _, a := range all {
		for _, h := range a.held {
			if rc, _, _ := a.ask("free %d", h.index); rc != 0 {
				t.Errorf("freeing a %s: CUresult %d", h.kind, rc)
			}
		}
		if rc, _, _ := a.ask("trim"); rc != 0 {
			t.Errorf("trimming the pool: CUresult %d", rc)
		}
	}
	if free, _ := all[0].info(); free != free0 {
		t.Errorf("%d bytes were free at the start, %d are after everything was freed", free0, free)
	}
	// A session's end gives back what it held, context and all.
	before, _ := all[0].info()
	if rc, _, _ := all[1].ask("mem %d", 100*mib); rc != 0 {
		t.Fatalf("100 MiB: CUresult %d", rc)
	}
	_ = all[1].cmd.Process.Kill()
	waitFor(t, time.Second, "a killed session's memory is free", func() bool {
		free, _ := all[0].info()
		return free >= before
	})
}

// An image beyond the wire's limit is refused by name at the call, and the session goes on.
func TestImageBeyondTheLimit(t *testing.T) {
	const notSupported = 801
	w := startWorker(t, workerOptions{network: "unix", mem: "1G", gpuMem: "4G"})
	a := startAgent(t, w)
	if rc, _, _ := a.ask("image %d", wire.MaxImage+1); rc != notSupported {
		t.Errorf("CUresult %d, want %d", rc, notSupported)
	}
	if rc, _, _ := a.ask("mem %d", mib); rc != 0 {
		t.Errorf("an allocation after it: CUresult %d", rc)
	}
	a.in.Close()
	if err := a.cmd.Wait(); err != nil {
		t.Error(err)
	}
	if said := a.stderr.String(); !strings.Contains(said, "image of 2147483649 bytes") {
		t.Errorf("stderr says %q, want the size of the image", said)
	}
}

// TestManagedCap: managed memory counts as device memory, in small blocks too, and comes back whole.
func TestManagedCap(t *testing.T) {
	w := startWorker(t, workerOptions{})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	const big = 300 << 20
	cmd := exec.CommandContext(ctx, built("bin/sluice"), "run", "--worker", w.addr, "--lib", built("shim"), "--mem", "512M", "--", built("test/agent"))
	cmd.Env = append(os.Environ(), w.env...)
	in := fmt.Sprintf("info\nmanaged %d\nmanaged %d\nfree 0\nmanaged %d\nfree 1\n", big, big, big)
	for range 1000 {
		in += "managed 100\n"
	}
	in += "info\n"
	for i := range 1000 {
		in += fmt.Sprintf("free %d\n", i+2)
	}
	cmd.Stdin = strings.NewReader(in + "info\n")
	r := finish(t, ctx, cmd)
	var got []string
	for line := range strings.Lines(r.stdout) {
		got = append(got, strings.TrimSpace(line))
	}
	if r.status != 0 || len(got) != 1+6+1000+1+1000+1 {
		t.Fatalf("status %d, %d lines: %s%s", r.status, len(got), strings.Join(got[:min(len(got), 12)], "; "), r.stderr)
	}
	before, blocks, after := got[1], got[1007], got[len(got)-1]
	if want := []string{"0", "2", "0", "0", "0"}; !slices.Equal(codes(got[2:7]), want) {
		t.Errorf("results %v, want %v", got[2:7], want)
	}
	if after != before {
		t.Errorf("memory before: %q, after: %q", before, after)
	}
	var was, is, total uint64
	fmt.Sscanf(before, "0 %d %d", &was, &total)
	fmt.Sscanf(blocks, "0 %d %d", &is, &total)
	if used := was - is; used < 1000*4096 || used > 8<<20 {
		t.Errorf("1000 blocks of 100 bytes take %d bytes", used)
	}
}

// codes are the results of lines that begin with them.
func codes(lines []string) []string {
	var c []string
	for _, l := range lines {
		code, _, _ := strings.Cut(l, " ")
		c = append(c, code)
	}
	return c
}
