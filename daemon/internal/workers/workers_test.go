package workers

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
	"github.com/sluice-hpc/sluice/remoting/api"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

var (
	_ owner.Workers  = (*Pool)(nil)
	_ owner.Cutter   = (*Pool)(nil)
	_ owner.Attacher = (*Pool)(nil)
	_ owner.Adopted  = (*Pool)(nil)
)

const testUID = 65534

// TestMain runs as a daemon that opens one session and waits to be killed.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "daemon" {
		p, err := New(testLog(), testConfig(os.Args[2]))
		if err == nil {
			var s lease.Session
			s, err = p.Start(context.Background(), testLease("a", 0), request("a"), os.NewFile(3, "client"), gpus(0))
			fmt.Println(s.ID)
		}
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		select {}
	}
	if len(os.Args) == 7 && os.Args[1] == "takeover" {
		takenOver(os.Args[2:])
		return
	}
	if len(os.Args) == 4 && os.Args[1] == "hold" {
		hold(os.Args[2], os.Args[3])
		return
	}
	if len(os.Args) == 4 && os.Args[1] == "takeover-hold" {
		takenOverHolds(os.Args[2], os.Args[3])
		return
	}
	os.Exit(m.Run())
}

func testLog() *slog.Logger {
	level := slog.LevelError
	if os.Getenv("SLUICE_TEST_LOG") != "" {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}

func root() string {
	r, _ := filepath.Abs("../../..")
	return r
}

func testConfig(dir string) Config {
	sim := filepath.Join(root(), "build", "simgpu")
	return Config{
		Exe: filepath.Join(dir, "sluice-worker"), Args: []string{"--log", "error"}, Dir: filepath.Join(dir, "owner"), Store: filepath.Join(dir, "store"), StoreLimit: 1 << 30, StoreTotal: 4 << 30,
		LibCUDA: filepath.Join(sim, "libcuda.so.1"), LibNVML: filepath.Join(sim, "libnvidia-ml.so.1"),
		Shared: filepath.Join(dir, "shared"), Warm: 1, Keepalive: 2 * time.Second, Seccomp: true, ConfineDev: true, Sandbox: sandbox.On, Cgroup: "auto", MemoryMax: func(lease.Lease) uint64 { return 1 << 30 }, PidsMax: 200,
		Turns: filepath.Join(dir, "turns"), Sharing: Sharing{Quantum: 10 * time.Millisecond, Limit: time.Second},
	}
}

// needRoot ends the test where sessions of other users cannot be had.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("sessions of other users need root")
	}
}

// setup builds what a pool needs; two simulated GPUs.
func setup(t *testing.T) string {
	t.Helper()
	needRoot(t)
	cmd := exec.Command("make", "-s", "-f", "remoting/simgpu/build.mk", "simgpu")
	cmd.Dir = root()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	dir := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", dir, "../../../remoting/worker/cmd/sluice-worker").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	// Sessions in a sandbox may fill its directory, and no other.
	sim := filepath.Join(dir, "sim")
	if err := os.Mkdir(sim, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SLUICE_SIM_STATE", filepath.Join(sim, "gpu"))
	t.Setenv("SLUICE_SIM_DEVICES", "2")
	return dir
}

// simUUID is the name of a simulated GPU.
func simUUID(n int) string { return fmt.Sprintf("GPU-511ce51f-0000-4a00-8000-73696d6770%02x", n) }

func gpus(n ...int) (all []lease.GPU) {
	for _, i := range n {
		all = append(all, lease.GPU{UUID: simUUID(i), Index: i})
	}
	return all
}

func testLease(id string, n ...int) lease.Lease {
	l := lease.Lease{ID: strings.Repeat(id, 32), State: lease.Granted, Request: lease.Request{UID: testUID, GID: testUID}}
	for i, g := range gpus(n...) {
		l.Grants = append(l.Grants, lease.Grant{GPU: g.UUID, Percent: 50, Mem: uint64(256<<20 + i<<21), Order: i})
	}
	return l
}

func request(id string) lease.SessionRequest {
	return lease.SessionRequest{Lease: strings.Repeat(id, 32), Kind: wire.SessionCompute, PID: 4711, UID: testUID, Program: "prog"}
}

func newPool(t *testing.T, dir string, change func(*Config)) *Pool {
	t.Helper()
	cfg := testConfig(dir)
	if change != nil {
		change(&cfg)
	}
	p, err := New(testLog(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, id := range p.Leases() {
			if err := p.End(context.Background(), id); err != nil {
				t.Error(err)
			}
		}
		p.Close()
	})
	return p
}

// client is the far end of a session.
type client struct {
	t *testing.T
	net.Conn
	call uint32
	snap wire.Snapshot
}

func pair(t *testing.T) (*client, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[0]), "client")
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	w := os.NewFile(uintptr(fds[1]), "worker")
	t.Cleanup(func() { w.Close() })
	return &client{t: t, Conn: c}, w
}

// fingerprint is the API table's, as the shim has it.
func fingerprint(t *testing.T) (f [32]byte) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root(), "remoting/client/gen_fingerprint.c"))
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range regexp.MustCompile(`0x([0-9a-f]{2})`).FindAllStringSubmatch(string(b), 32) {
		v, _ := strconv.ParseUint(m[1], 16, 8)
		f[i] = byte(v)
	}
	return f
}

func (c *client) hello() error { return c.helloAs(wire.SessionCompute) }

func (c *client) helloAs(kind uint32) error {
	h := wire.Hello{Version: wire.Version, Kind: kind, Fingerprint: fingerprint(c.t), PID: 7, Program: "inner"}
	var b [wire.HelloSize]byte
	h.Encode(&b)
	if _, err := c.Write(b[:]); err != nil {
		return err
	}
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	p, err := wire.ReadWelcome(c)
	if err != nil {
		return err
	}
	return c.snap.Decode(p)
}

// activate makes the context of a device, or makes sure that it is there.
func (c *client) activate(dev uint32) error {
	return c.ask(wire.OpCtxActivate, binary.LittleEndian.AppendUint32(nil, dev))
}

// alloc allocates bytes in the context of the first device, which is active.
func (c *client) alloc(n uint64) error {
	rows, err := api.Rows()
	if err != nil {
		return err
	}
	i := slices.IndexFunc(rows, func(r api.Row) bool { return r.Symbol == "cuMemAlloc_v2" })
	return c.askIn(1, uint16(rows[i].Op), binary.LittleEndian.AppendUint64([]byte{1}, n))
}

// ask sends a call and waits for its reply.
func (c *client) ask(op uint16, payload []byte) error { return c.askIn(0, op, payload) }

func (c *client) askIn(ctx uint32, op uint16, payload []byte) error {
	c.call++
	h := wire.Request{Size: uint32(len(payload)), Op: op, Flags: wire.FlagWait, Call: c.call, Ctx: ctx}
	var b [wire.RequestSize]byte
	h.Encode(&b)
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write(append(b[:], payload...)); err != nil {
		return err
	}
	for {
		var rb [wire.ReplySize]byte
		if _, err := io.ReadFull(c, rb[:]); err != nil {
			return err
		}
		var r wire.Reply
		if err := r.Decode(&rb); err != nil {
			return err
		}
		if _, err := io.CopyN(io.Discard, c, int64(r.Size)); err != nil {
			return err
		}
		if r.Kind == wire.FrameReply && r.Call == c.call {
			if r.Result != 0 {
				return fmt.Errorf("result %d", r.Result)
			}
			return nil
		}
	}
}

func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); {
		if time.Now().After(end) {
			t.Fatal("not in 20 s: " + what)
		}
		time.Sleep(time.Millisecond)
	}
}

func status(t *testing.T, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := map[string]string{}
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(line, ":")
		f[k] = strings.Join(strings.Fields(v), " ")
	}
	return f
}

func (p *Pool) ready(uuid string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.warm[uuid]) > 0
}

func TestSession(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	type end struct{ id, reason string }
	ends := make(chan end, 10)
	p.OnEnd(func(s lease.Session, reason string) { ends <- end{s.ID, reason} })
	if err := p.Probe(t.Context(), gpus(0, 1)); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Overhead(simUUID(1)); err != nil || n != 64<<20 {
		t.Fatalf("overhead %d %v", n, err)
	}
	waitFor(t, "a warm worker", func() bool { return p.ready(simUUID(1)) })
	time.Sleep(100 * time.Millisecond) // for its driver
	c, w := pair(t)
	began := time.Now()
	s, err := p.Start(t.Context(), testLease("a", 1), request("a"), w, gpus(1))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	t.Logf("session open in %v", time.Since(began))
	if d := c.snap.Devices; len(d) != 1 || d[0].TotalMem != 256<<20 || fmt.Sprintf("%02x", d[0].UUID[15]) != "01" {
		t.Fatalf("devices %+v", d)
	}
	if err := c.activate(0); err != nil {
		t.Fatal(err)
	}
	st := status(t, s.Worker.PID)
	u := strconv.Itoa(testUID)
	if st["Uid"] != strings.Repeat(u+" ", 3)+u || st["Gid"] != strings.Repeat(u+" ", 3)+u || st["Groups"] != "" || st["NoNewPrivs"] != "1" || st["Seccomp"] != "2" ||
		strings.Trim(st["CapEff"]+st["CapPrm"]+st["CapAmb"]+st["CapInh"], "0") != "" {
		t.Errorf("process: %v", st)
	}
	// Every thread of it, not only the first.
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", s.Worker.PID))
	for _, f := range tasks {
		b, _ := os.ReadFile(f)
		if !strings.Contains(string(b), "Seccomp:\t2") || !strings.Contains(string(b), "Uid:\t"+u+"\t"+u+"\t"+u+"\t"+u) {
			t.Errorf("thread %s: %s", f, b)
		}
	}
	cg, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", s.Worker.PID))
	if len(p.cg.dirs) > 0 && strings.Count(string(cg), "/sluice/"+s.ID) != len(p.cg.dirs) {
		t.Errorf("cgroup: %s", cg)
	}
	live := p.Sessions(s.Lease)
	if len(live) != 1 || live[0].ID != s.ID || live[0].Program != "prog" || live[0].Client != 4711 || live[0].Counts.Calls != 1 || live[0].Counts.Waits != 1 ||
		live[0].Use[0] != (lease.Use{Granted: 256 << 20, Used: 66 << 20, Overhead: 64 << 20, Peak: 66 << 20}) && live[0].Use[0].Overhead != 64<<20 {
		t.Fatalf("%+v", live)
	}
	if use := p.Use(s.Lease); len(use) != 1 || use[0] != live[0].Use[0] {
		t.Errorf("use %+v", use)
	}
	if all := p.Processes(); all[simUUID(1)][s.Worker.PID] != live[0].Use[0].Used {
		t.Errorf("processes %v", all)
	}
	c.Close()
	if e := <-ends; e.id != s.ID || e.reason != "client closed" && e.reason != "peer is gone" {
		t.Errorf("%+v", e)
	}
	waitFor(t, "end", func() bool { return len(p.Sessions(s.Lease)) == 0 })
	if use := p.Use(s.Lease); use[0].Used != 0 {
		t.Errorf("%d bytes of drift", use[0].Used)
	}
	for _, d := range p.cg.dirs {
		if _, err := os.Stat(filepath.Join(d, s.ID)); err == nil {
			t.Errorf("%s/%s is left", d, s.ID)
		}
	}

	// Two GPUs; killed from outside; then by the end of the lease.
	for _, way := range []string{"crash", "end"} {
		c, w = pair(t)
		if s, err = p.Start(t.Context(), testLease("b", 1, 0), request("b"), w, gpus(1, 0)); err != nil {
			t.Fatal(err)
		}
		w.Close()
		if err := c.hello(); err != nil {
			t.Fatal(err)
		}
		if err := c.activate(1); err != nil {
			t.Fatal(err)
		}
		if u := p.Use(s.Lease); len(u) != 2 || u[0].Used != 0 || u[1].Overhead != 64<<20 || u[1].Granted != 258<<20 {
			t.Fatalf("use %+v", u)
		}
		want := "killed by signal 9 (killed)"
		if way == "end" {
			if err := p.End(t.Context(), s.Lease); err != nil {
				t.Fatal(err)
			}
			want = "the lease ended"
		} else if err := syscall.Kill(s.Worker.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if e := <-ends; e.id != s.ID || e.reason != want {
			t.Errorf("%+v", e)
		}
	}
	if err := p.Forget(s.Lease); err != nil {
		t.Error(err)
	}
	if p.Use(s.Lease) != nil || len(p.Leases()) != 1 {
		t.Errorf("left: %v", p.Leases())
	}
}

// The daemon is killed: the session goes on, and the next daemon finds it, ends it,
// and hears of those that ended meanwhile.
func TestKilledDaemon(t *testing.T) {
	dir := setup(t)
	daemon := func() (*client, *exec.Cmd, string) {
		c, w := pair(t)
		cmd := exec.Command("/proc/self/exe", "daemon", dir)
		cmd.ExtraFiles, cmd.Stderr = []*os.File{w}, os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		w.Close()
		line := bufio.NewScanner(out)
		if !line.Scan() || strings.HasPrefix(line.Text(), "error") {
			t.Fatal("daemon: ", line.Text())
		}
		if err := c.hello(); err != nil {
			t.Fatal(err)
		}
		return c, cmd, line.Text()
	}
	c, cmd, id := daemon()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err := c.activate(0); err != nil {
		t.Fatalf("the session died with the daemon: %v", err)
	}
	c2, cmd2, id2 := daemon() // adopts the first, and opens another on the lease
	_ = cmd2.Process.Kill()
	_ = cmd2.Wait()
	if err := c2.activate(0); err != nil {
		t.Fatal(err)
	}
	c.Close()
	l := strings.Repeat("a", 32)
	record := filepath.Join(testConfig(dir).Dir, l, "."+sessionPrefix+"7.0123456789abcdef.new") // being written when a daemon was killed
	if err := os.WriteFile(record, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(record, time.Time{}, time.Now().Add(-24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	p := newPool(t, dir, nil)
	if _, err := os.Lstat(record); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s stays: %v", record, err)
	}
	if d := time.Since(began); d > 5*time.Second { // it waits for no session, which may take bindTime
		t.Errorf("recovery took %v", d)
	}
	ends := make(chan string, 10)
	p.OnEnd(func(s lease.Session, reason string) { ends <- s.ID + " " + reason })
	if e := <-ends; e != id+" client closed" && e != id+" peer is gone" {
		t.Errorf("end of the first: %q", e)
	}
	waitFor(t, "one session", func() bool { return len(p.Sessions(l)) == 1 })
	if s := p.Sessions(l)[0]; s.ID != id2 || s.Use[0].Overhead != 64<<20 {
		t.Errorf("%+v", s)
	}
	if u := p.Use(l)[0]; u.Overhead != 64<<20 {
		t.Errorf("account after a kill: %+v", u)
	}
	if b := exchanges(t, p, l, 1); b != 0 {
		t.Errorf("a session that two daemons have left says %d to a token of zeros", b)
	}
	if err := c2.activate(0); err != nil {
		t.Fatal(err)
	}
	if err := p.End(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	if e := <-ends; e != id2+" the lease ended" {
		t.Errorf("end of the second: %q", e)
	}
	if err := c2.activate(0); err == nil {
		t.Error("a session outlives its lease")
	}
}

// A worker behind its private /dev, before it has a client.
func TestConfined(t *testing.T) {
	dir := setup(t)
	cfg := testConfig(dir)
	c := control.Command{Exe: cfg.Exe, LibCUDA: cfg.LibCUDA, LibNVML: cfg.LibNVML, Store: dir, Limit: 1 << 20, Devices: []string{simUUID(0)}, Confine: "/dev/tty,/dev/kmsg"}
	cmd := c.Cmd("session")
	w, err := control.Spawn(slog.New(slog.DiscardHandler), cmd, cmd.Start)
	if err != nil {
		t.Fatal(err)
	}
	defer w.End()
	pid := cmd.Process.Pid
	waitFor(t, "start", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		return len(b) > 0 && !strings.Contains(string(b), "--confine") || w.Ended()
	})
	fs, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "root", "dev"))
	var names []string
	for _, f := range fs {
		names = append(names, f.Name())
	}
	if got := strings.Join(names, " "); err != nil || got != "full kmsg null random shm shm-of-no-lease tty urandom zero" {
		t.Errorf("/dev: %s: %v", got, err)
	}
	if st := status(t, pid); st["NoNewPrivs"] != "1" || st["CapBnd"] != "00000000000000c0" {
		t.Errorf("%v", st)
	}
	// Without its starter it goes.
	w.Ctl.Close()
	waitFor(t, "end", w.Ended)
}

func TestDeviceFiles(t *testing.T) {
	r := t.TempDir()
	if got, err := deviceFiles(r, gpus(0)); got != "none" || err != nil {
		t.Errorf("%q %v", got, err)
	}
	for path, text := range map[string]string{
		"dev/nvidiactl": "", "dev/nvidia-uvm": "",
		"proc/driver/nvidia/gpus/0000:1b:00.0/information": "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-aa-01\nDevice Minor: \t 3\n",
		"proc/driver/nvidia/gpus/0000:2b:00.0/information": "GPU UUID: \t GPU-aa-02\nDevice Minor: \t 12\n",
	} {
		path = filepath.Join(r, path)
		_ = os.MkdirAll(filepath.Dir(path), 0o755)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := deviceFiles(r, []lease.GPU{{UUID: "GPU-AA-02"}, {UUID: "GPU-aa-01"}})
	if got != "/dev/nvidiactl,/dev/nvidia-uvm,/dev/nvidia12,/dev/nvidia3" || err != nil {
		t.Errorf("%q %v", got, err)
	}
	if _, err := deviceFiles(r, []lease.GPU{{UUID: "GPU-x"}}); err == nil || !strings.Contains(err.Error(), "confine_dev") {
		t.Error(err)
	}
}
