//go:build !race

// The race detector's memory says nothing: `make test` runs this without it, beside the owners' long history.

package host

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/identity"
	"github.com/sluice-hpc/sluice/daemon/internal/identity/mungetest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// controllerTask is what the process of TestControllerMemory is given.
type controllerTask struct {
	Dir, Munge string
	Owners     []Peer
	Jobs       int
}

// mostMemory is the limit on the memory of a controller's daemon, in KiB, without pages of files: 16 MiB, and 150 KiB for each owner. Most of these are
// its connection: gRPC's buffers and goroutines, and TLS.
func mostMemory(owners int) int { return 16<<10 + 150*owners }

// A controller's daemon watches owners of eight GPUs each over real connections, and gets leases for jobs meanwhile.
// SLUICE_OWNERS is the number of owners.
func TestControllerMemory(t *testing.T) {
	if task := os.Getenv("SLUICE_CONTROLLER"); task != "" {
		beController(t, task)
		return
	}
	owners, err := strconv.Atoi(os.Getenv("SLUICE_OWNERS"))
	if err != nil {
		owners = 200
	}
	task := controllerTask{Dir: t.TempDir(), Munge: mungetest.Start(t, "memory"), Jobs: 10 * owners}
	for i := range owners {
		task.Owners = append(task.Owners, serveOwner(t, task, fmt.Sprintf("gpu%04d", i)))
	}
	if kib, most := runController(t, task), mostMemory(owners); kib > most {
		t.Errorf("%d KiB, want at most %d", kib, most)
	}
}

// runController runs a daemon in a process of its own, and returns its memory in KiB.
func runController(t *testing.T, task controllerTask) int {
	b, err := json.Marshal(task)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(task.Dir, "task")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "SLUICE_CONTROLLER="+path)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := bytes.Cut(out, []byte("memory: "))
	kib, err := strconv.Atoi(strings.Fields(string(after) + " ?")[0])
	if err != nil {
		t.Fatal(err)
	}
	return kib
}

func serveOwner(t *testing.T, task controllerTask, name string) Peer {
	var gpus []lease.GPU
	for j := range 8 {
		gpus = append(gpus, lease.GPU{UUID: fmt.Sprintf("GPU-%s-%d", name, j), Index: j, Name: "NVIDIA H200", PCI: "00000000:01:00.0", Mem: fakeMem, Overhead: 512 << 20, Healthy: true})
	}
	book, err := ledger.Open(filepath.Join(task.Dir, name+".db"), name, ledger.Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	o, err := owner.New(owner.Config{Name: name, Ledger: book, Audit: nothing{}, Workers: noWorkers{}, Controllers: []string{"ctl"},
		Devices: func() ([]lease.GPU, time.Duration) { return gpus, 0 }, Log: Config{}.withDefaults().Log})
	if err != nil {
		t.Fatal(err)
	}
	id, err := identity.New(identity.Config{Node: name, Auth: identity.AuthMunge, MungeSocket: task.Munge, MungeUID: uint32(os.Getuid())})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := rpc.NewServer(id.Server(), "test")
	rpc.ServeOwner(srv, o)
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { srv.Stop(); o.Close(); book.Close() })
	return Peer{name, ln.Addr().String()}
}

// beController is the daemon whose memory counts.
func beController(t *testing.T, path string) {
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	debug.SetGCPercent(25) // as sluiced does
	var task controllerTask
	if err := json.Unmarshal(b, &task); err != nil {
		t.Fatal(err)
	}
	dial := func(name, _ string) (lease.Owner, error) {
		return &wireless{name: name, live: make(map[string]lease.Lease), changed: make(chan struct{})}, nil
	}
	if task.Munge != "" {
		id, err := identity.New(identity.Config{Node: "ctl", Auth: identity.AuthMunge, MungeSocket: task.Munge, MungeUID: uint32(os.Getuid())})
		if err != nil {
			t.Fatal(err)
		}
		dial = func(name, addr string) (lease.Owner, error) { return rpc.DialOwner(addr, name, id, "test") }
	}
	book, err := ledger.Open(filepath.Join(task.Dir, "ctl.db"), "ctl", ledger.Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer book.Close()
	h, err := New(Config{
		Node: "ctl", Cluster: "c", RunDir: filepath.Join(task.Dir, "run"), Ledger: book, Audit: nothing{}, Controller: true,
		Pools: map[string]Pool{"default": {Owners: task.Owners}}, DialOwner: dial,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	go func() { _ = h.Run(t.Context()) }()
	for begun := time.Now(); len(h.view.unknown(task.Owners)) > 0; time.Sleep(100 * time.Millisecond) {
		if time.Since(begun) > 2*time.Minute {
			t.Fatalf("after %v not all owners are known", time.Since(begun))
		}
	}
	fmt.Printf("all owners are known: %d KiB, and %d KiB of files\n", resident(t, "RssAnon:"), resident(t, "RssFile:"))
	var wg sync.WaitGroup
	turn := make(chan struct{}, 16)
	for i := range task.Jobs {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			id := strconv.Itoa(i)
			if _, err := h.Sponsor(context.Background(), job(id, 0, []string{fmt.Sprintf("n%05d", i%10_000)}, 25)); err != nil {
				t.Errorf("job %s: %v", id, err)
			}
			if i < len(task.Owners)*5 {
				return // it goes on
			}
			id = strconv.Itoa(i - len(task.Owners)*5)
			if _, err := h.EndJob(context.Background(), "c", id, nil, h.Epoch(), "over"); err != nil {
				t.Errorf("end of job %s: %v", id, err)
			}
		})
	}
	wg.Wait()
	fmt.Printf("memory: %d KiB, and %d KiB of files, after %d jobs, %d of them live\n", resident(t, "RssAnon:"), resident(t, "RssFile:"), task.Jobs, 5*len(task.Owners))
}

// wireless is an owner that is no daemon and has no connection: what a controller's daemon takes for itself remains.
type wireless struct {
	lease.Owner
	name    string
	mu      sync.Mutex
	seq     uint64
	live    map[string]lease.Lease
	changes []lease.Ref
	changed chan struct{}
}

func (w *wireless) note(r lease.Ref) {
	w.seq++
	w.changes = append(w.changes, r)
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *wireless) Inventory(context.Context) (lease.Inventory, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.inventory(), nil
}

func (w *wireless) inventory() lease.Inventory {
	inv := lease.Inventory{Owner: w.name, Version: "test", Time: time.Now()}
	for j := range 8 {
		inv.GPUs = append(inv.GPUs, lease.GPU{UUID: fmt.Sprintf("GPU-%s-%d", w.name, j), Index: j, Name: "NVIDIA H200", PCI: "00000000:01:00.0", Mem: fakeMem, Overhead: 512 << 20, Healthy: true, FreePercent: 100, FreeMem: fakeMem})
	}
	for _, l := range w.live {
		for _, g := range l.Grants {
			for j := range inv.GPUs {
				if p := &inv.GPUs[j]; p.UUID == g.GPU {
					p.FreePercent, p.FreeMem, p.Leases = p.FreePercent-g.Percent, p.FreeMem-g.Mem, p.Leases+1
				}
			}
		}
	}
	return inv
}

func (w *wireless) Watch(ctx context.Context, _ string, since lease.Mark, wait time.Duration) (lease.Changes, error) {
	w.mu.Lock()
	if next := w.changed; since.Seq == w.seq && since.Epoch == 1 {
		w.mu.Unlock()
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-next:
		case <-t.C:
		case <-ctx.Done():
			return lease.Changes{}, ctx.Err()
		}
		w.mu.Lock()
	}
	defer w.mu.Unlock()
	c := lease.Changes{Inventory: w.inventory(), At: lease.Mark{Epoch: 1, Seq: w.seq}, Leases: w.changes}
	w.changes = nil
	return c, nil
}

func (w *wireless) Reserve(_ context.Context, _ string, l lease.Lease, _ time.Duration) (lease.Lease, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l.State = lease.Granted
	w.live[l.ID] = l
	w.note(lease.Ref{ID: l.ID, Key: l.Request.Key})
	return l, nil
}

func (w *wireless) Release(_ context.Context, _, _ string, key lease.Key, _ string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, l := range w.live {
		if l.Request.Key.Job == key.Job {
			delete(w.live, id)
			w.note(lease.Ref{ID: id, Key: l.Request.Key, Over: true})
		}
	}
	return nil
}

func (w *wireless) Renew(_ context.Context, _ string, ids []string) ([]string, error) {
	return ids, nil
}
func (w *wireless) Claim(context.Context, string, string) error          { return nil }
func (w *wireless) List(context.Context, string) ([]lease.Status, error) { return nil, nil }
func (w *wireless) Reports(context.Context, string, string, string) ([]lease.Report, error) {
	return nil, nil
}
func (w *wireless) Register(context.Context, string, string, string, []lease.Whereabouts) error {
	return nil
}
func (w *wireless) Where(context.Context, string, string, string) ([]string, error) { return nil, nil }

// What a controller's daemon takes besides its connections: for a thousand owners of eight GPUs, and five
// thousand leases that live, with what stands for the owners.
func TestControllerState(t *testing.T) {
	if dir := os.Getenv("SLUICE_CONTROLLER"); dir != "" {
		beController(t, dir)
		return
	}
	task := controllerTask{Dir: t.TempDir(), Jobs: 10_000}
	for i := range 1000 {
		task.Owners = append(task.Owners, Peer{fmt.Sprintf("gpu%04d", i), "-:1"})
	}
	const most = 44 << 10 // 6 MiB of it are what stands for the owners
	if kib := runController(t, task); kib > most {
		t.Errorf("%d KiB, want at most %d", kib, most)
	}
}

// resident is this process's memory of a kind in KiB: its own, RssAnon, or pages of files, which are its program and its ledger.
func resident(t *testing.T, kind string) int {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, kind); ok {
			n, _ := strconv.Atoi(strings.Fields(v)[0])
			return n
		}
	}
	t.Fatal("no " + kind)
	return 0
}
