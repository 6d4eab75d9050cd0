package workers

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// probeTime is how long the driver may take to describe a GPU.
const probeTime = time.Minute

// Probe asks the driver about GPUs that are not known yet, all at the same time, and then
// starts workers ahead for them in the background. The error names the GPUs that the driver
// did not describe.
func (p *Pool) Probe(ctx context.Context, gpus []lease.GPU) error {
	errs := make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, g := range gpus {
		wg.Go(func() {
			_, errs[i] = p.factsOf(ctx, g.UUID)
		})
	}
	wg.Wait()
	for i, g := range gpus {
		if errs[i] == nil {
			go p.fill(g)
		}
	}
	return errors.Join(errs...)
}

// Overhead returns how much memory of a GPU one session's context takes, in bytes. The error says why no fraction of the GPU is granted.
func (p *Pool) Overhead(uuid string) (uint64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.facts[uuid]; f != nil {
		return f.Overhead[0], nil
	}
	if err := p.unlent[uuid]; err != nil {
		return 0, err
	}
	return 0, ErrUnmeasured
}

// ErrUnmeasured says that the driver has not been asked about a GPU yet, or has not answered.
var ErrUnmeasured = errors.New("what a context takes of it has not been measured yet")

func (p *Pool) factsOf(ctx context.Context, uuid string) (*control.Facts, error) {
	p.mu.Lock()
	f := p.facts[uuid]
	p.mu.Unlock()
	if f != nil {
		return f, nil
	}
	if k := p.recall(uuid); k != nil {
		if k.Mode.Files() && sandbox.Landlock() == 0 {
			p.notWhole(uuid, k.Mode, sandbox.ErrNoLandlock)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.facts[uuid] == nil {
			p.facts[uuid], p.sandbox[uuid] = &k.Facts, k.Mode
			p.kept = append(p.kept, uuid)
		}
		return p.facts[uuid], nil
	}
	f, mode, why, err := control.Choose(p.cfg.Sandbox, func(m sandbox.Mode) (*control.Facts, error) { return p.ask(ctx, uuid, m) })
	if err != nil {
		return nil, err
	}
	if why != nil {
		p.notWhole(uuid, mode, why)
	}
	var unlent error
	if f.Pageable() {
		mode, unlent = pageable(p.cfg.Pageable, mode, func(m sandbox.Mode) error { _, err := p.ask(ctx, uuid, m); return err })
	}
	if unlent == nil && (why == nil || errors.Is(why, sandbox.ErrNoLandlock)) { // after any other warning the next daemon asks again
		p.keep(uuid, f, mode)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unlent[uuid] = unlent
	if unlent != nil {
		return nil, fmt.Errorf("gpu %s: %w", uuid, unlent)
	}
	p.facts[uuid], p.sandbox[uuid] = f, mode
	return f, nil
}

func (p *Pool) notWhole(uuid string, mode sandbox.Mode, why error) {
	p.log.Warn("the sandbox of sessions is not whole", "gpu", uuid, "sandbox", mode, "error", why)
}

// pageable returns the sandbox of sessions on a GPU whose kernels reach all memory of their session, or an error if the GPU is not to be
// lent. lends is worker.pageable, and mode is the sandbox that sessions on another GPU would have. A sandbox that auto has found must
// be whole here, so it is tried once more, and demanded of each session.
func pageable(lends string, mode sandbox.Mode, try func(sandbox.Mode) error) (sandbox.Mode, error) {
	none := control.PageableReason + ", and sessions on it have no sandbox; " + control.PageableRemedy + ", see worker.sandbox, or set worker.pageable: allow"
	switch {
	case lends == "allow":
		return mode, nil
	case lends == "refuse":
		return mode, errors.New(control.PageableReason + ", and worker.pageable is refuse; " + control.PageableRemedy + ", or set worker.pageable: auto")
	case !mode.Files():
		return mode, errors.New(none)
	case mode == sandbox.On:
		return mode, nil
	}
	if err := try(sandbox.On); err != nil {
		return mode, fmt.Errorf("%s: %w", none, err)
	}
	return sandbox.On, nil
}

// ask asks the driver about a GPU, in a process of its own.
func (p *Pool) ask(ctx context.Context, uuid string, mode sandbox.Mode) (*control.Facts, error) {
	if err := ctx.Err(); err != nil { // otherwise a quick driver could still answer
		return nil, fmt.Errorf("gpu %s: the driver was not asked: %w", uuid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	cmd := p.command([]string{uuid}, "", mode).Cmd("probe")
	var out, msg bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &msg
	// If this daemon is killed, the kernel kills the process too, even if the driver hangs in it. The kernel does so
	// when the thread ends that started the process, so this goroutine keeps its thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // a process that the driver has started may keep the pipes open
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("gpu %s: probe: %w; worker.exe names the sluice-worker", uuid, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("gpu %s: the driver could not be asked: %w: %s", uuid, err, strings.TrimSpace(msg.String()))
	}
	f, err := control.ReadFacts(out.Bytes(), 1)
	if err != nil {
		return nil, fmt.Errorf("gpu %s: %w", uuid, err)
	}
	return f, nil
}

// sandboxOf returns the sandbox of a session on these GPUs, as their probes have determined it. What one GPU demands holds for all.
func (p *Pool) sandboxOf(gpus []lease.GPU) sandbox.Mode {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.cfg.Sandbox
	for _, g := range gpus {
		switch mode, known := p.sandbox[g.UUID]; {
		case !known || mode == p.cfg.Sandbox:
		case mode == sandbox.On:
			return mode
		default:
			of = mode
		}
	}
	return of
}

func (p *Pool) command(uuids []string, confine string, mode sandbox.Mode) *control.Command {
	c := p.cfg
	return &control.Command{
		Exe: c.Exe, Args: c.Args, LibCUDA: c.LibCUDA, LibNVML: c.LibNVML, Store: c.Store, Limit: c.StoreLimit, KeepFree: c.StoreKeepFree,
		Content: c.Content, ContentLimit: c.ContentLimit, ContentKeepFree: c.ContentKeepFree,
		Devices: uuids, Confine: confine, Sandbox: mode, Accounts: c.Dir, Shared: c.Shared,
	}
}

// worker is a session process; its id becomes the session's.
type worker struct {
	*control.Process
	id string
}

// spawn starts a session process for these GPUs and puts it into its control group. Moving a
// process takes the kernel milliseconds, so it is done here, before there is a client to wait for it.
func (p *Pool) spawn(gpus []lease.GPU) (*worker, error) {
	confine := control.NoDevices
	if p.cfg.ConfineDev {
		var err error
		if confine, err = deviceFiles("/", gpus); err != nil {
			return nil, err
		}
		confine = p.withVerbs("/", confine, p.sandboxOf(gpus))
	}
	var ids []string
	for _, g := range gpus {
		ids = append(ids, g.UUID)
	}
	cmd := p.command(ids, confine, p.sandboxOf(gpus)).Cmd("session")
	// Signals from the daemon's terminal are not meant for sessions.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	proc, err := control.Spawn(p.log, cmd, cmd.Start)
	if err != nil {
		return nil, err
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	w := &worker{proc, hex.EncodeToString(id[:])}
	if err := p.cg.put(w.id, proc.Cmd.Process.Pid); err != nil {
		p.discard(w)
		return nil, err
	}
	return w, nil
}

// discard ends a process that has no client.
func (p *Pool) discard(w *worker) {
	w.End()
	p.cg.remove(w.id)
}

// deviceFiles returns the device files of these GPUs, separated by commas. It returns
// control.NoDevices if the machine has none of NVIDIA's, and control.PlainDevices if its
// GPUs are simulated.
func deviceFiles(root string, gpus []lease.GPU) (string, error) {
	if _, err := os.Stat(filepath.Join(root, "dev/nvidiactl")); errors.Is(err, os.ErrNotExist) {
		if os.Getenv("SLUICE_SIM_DEVICES") != "" {
			return control.PlainDevices, nil
		}
		return control.NoDevices, nil
	}
	files := []string{"/dev/nvidiactl", "/dev/nvidia-uvm"}
	if _, err := os.Stat(filepath.Join(root, "dev/nvidia-uvm-tools")); err == nil {
		files = append(files, "/dev/nvidia-uvm-tools")
	}
	info, err := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/gpus/*/information"))
	if err != nil {
		return "", err
	}
	minors := map[string]string{}
	for _, path := range info {
		b, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("device files: %w", err)
		}
		f := map[string]string{}
		for line := range strings.Lines(string(b)) {
			if k, v, ok := strings.Cut(line, ":"); ok {
				f[strings.TrimSpace(k)] = strings.TrimSpace(v)
			}
		}
		minors[strings.ToLower(f["GPU UUID"])] = f["Device Minor"]
	}
	for _, g := range gpus {
		m := minors[strings.ToLower(g.UUID)]
		if m == "" {
			return "", fmt.Errorf("gpu %s: /proc/driver/nvidia/gpus does not name its device file; with worker.confine_dev: false it is not needed", g.UUID)
		}
		files = append(files, "/dev/nvidia"+m)
	}
	return strings.Join(files, ","), nil
}

// withVerbs adds the device files of RDMA to those of GPUs, where sessions may use it. In a sandbox they may not: a process that has such
// a file open can reach the whole fabric.
func (p *Pool) withVerbs(root, confine string, mode sandbox.Mode) string {
	if p.cfg.RDMA.Off() || mode != sandbox.Off || confine == control.NoDevices {
		return confine
	}
	found, _ := filepath.Glob(filepath.Join(root, control.VerbsDir, "uverbs*")) // the pattern is good
	for i := range found {
		found[i] = filepath.Join(control.VerbsDir, filepath.Base(found[i]))
	}
	switch {
	case len(found) == 0:
		return confine
	case confine == control.PlainDevices:
		return strings.Join(found, ",")
	}
	return confine + "," + strings.Join(found, ",")
}

// take returns a process that was started ahead, or a new one.
func (p *Pool) take(gpus []lease.GPU) (*worker, error) {
	if len(gpus) == 1 {
		g := gpus[0]
		defer func() { go p.fill(g) }()
		p.mu.Lock()
		for ps := p.warm[g.UUID]; len(ps) > 0; ps = p.warm[g.UUID] {
			w := ps[0]
			p.warm[g.UUID] = ps[1:]
			if !w.Ended() {
				p.mu.Unlock()
				return w, nil
			}
			go p.discard(w)
		}
		p.mu.Unlock()
	}
	return p.spawn(gpus)
}

// fill starts processes ahead until there are enough. A process that ends by itself is
// replaced after a delay, which doubles each time, so that a broken driver costs little.
func (p *Pool) fill(g lease.GPU) {
	for {
		p.mu.Lock()
		if p.closed || len(p.warm[g.UUID]) >= p.cfg.Warm {
			p.mu.Unlock()
			return
		}
		p.filling.Add(1) // mu is held: Close does not wait yet
		p.mu.Unlock()
		added := p.startAhead(g)
		p.filling.Done()
		if !added {
			return
		}
	}
}

// startAhead starts one process ahead. It returns false if that failed, or if the process is not wanted any more.
func (p *Pool) startAhead(g lease.GPU) bool {
	w, err := p.spawn([]lease.GPU{g})
	if err != nil {
		p.log.Error("no worker started ahead", "gpu", g.UUID, "error", err)
		p.later(g)
		return false
	}
	p.mu.Lock()
	if p.closed || len(p.warm[g.UUID]) >= p.cfg.Warm {
		p.mu.Unlock()
		p.discard(w)
		return false
	}
	p.warm[g.UUID] = append(p.warm[g.UUID], w)
	p.mu.Unlock()
	go p.watchWarm(g, w)
	return true
}

// watchWarm waits for the end of a process that was started ahead. If it ends before it has
// a client, watchWarm cleans up and has it replaced.
func (p *Pool) watchWarm(g lease.GPU, w *worker) {
	began := time.Now()
	<-w.Done
	p.mu.Lock()
	waiting := false
	for i, o := range p.warm[g.UUID] {
		if o == w {
			p.warm[g.UUID] = append(append([]*worker(nil), p.warm[g.UUID][:i]...), p.warm[g.UUID][i+1:]...)
			waiting = true
			break
		}
	}
	if time.Since(began) > time.Minute {
		p.fails[g.UUID] = 0
	}
	p.mu.Unlock()
	if !waiting {
		return
	}
	p.discard(w)
	p.log.Warn("a worker ended before it had a client", "gpu", g.UUID, "status", w.Cmd.ProcessState.String())
	p.later(g)
}

// later calls fill in 1 s to 64 s.
func (p *Pool) later(g lease.GPU) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// One timer is enough: every client that finds no process ready gets here too.
	if p.closed || p.soon[g.UUID] {
		return
	}
	p.soon[g.UUID] = true
	n := min(p.fails[g.UUID], 6)
	p.fails[g.UUID]++
	time.AfterFunc(time.Second<<n, func() {
		p.mu.Lock()
		delete(p.soon, g.UUID)
		p.mu.Unlock()
		p.fill(g)
	})
}
