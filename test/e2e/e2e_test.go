// Package e2e tests shim, worker, simulated GPU and command line end to end, through the doors that a
// user takes: unmodified CUDA programs, started by sluice run, on a worker started by hand.
//
// The artefacts come from make: SLUICE_BUILD names its build folder (default: build/ of the
// repository), SLUICE_CUDA the compiler's version whose programs are run (default 11.8).
package e2e

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
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// marker is in the environment of every process of this run, so that one left behind is found.
const marker = "SLUICE_E2E_RUN"

var (
	buildDir string
	cudaDir  string // the test programs
	markerOf atomic.Int64
)

func TestMain(m *testing.M) {
	buildDir = os.Getenv("SLUICE_BUILD")
	if buildDir == "" {
		buildDir = filepath.Join("..", "..", "build")
	}
	abs, err := filepath.Abs(buildDir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
	buildDir = abs
	if err := useRDMA(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
	version := os.Getenv("SLUICE_CUDA")
	if version == "" {
		version = "11.8"
	}
	cudaDir = filepath.Join(buildDir, "test", "cuda-"+version)
	for _, f := range []string{built("shim/libcuda.so.1"), built("simgpu/libcuda.so.1"), built("bin/sluice"), built("bin/sluice-worker"), filepath.Join(cudaDir, "vecadd")} {
		if _, err := os.Stat(f); err != nil {
			fmt.Fprintf(os.Stderr, "e2e: %v; run make test-e2e, which builds what these tests need\n", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

func built(name string) string   { return filepath.Join(buildDir, name) }
func program(name string) string { return filepath.Join(cudaDir, name) }

// workerOptions is how a worker is started; zero values take the defaults below.
type workerOptions struct {
	network   string        // "tcp" or "unix"
	host      string        // where it listens with tcp; "": where all do
	gpuMem    string        // of each simulated GPU
	devices   int           // simulated GPUs; all are offered
	mem       string        // what the worker offers, and its default lease has
	keepalive time.Duration // how long silence may last
	sandbox   string        // of the sessions; "": on
	race      bool          // the worker under the race detector
	exe       string        // of the worker; "": this tree's
	args      []string
	env       []string
}

// worker is a running sluice-worker with simulated GPUs of its own.
type worker struct {
	t     testing.TB
	cmd   *exec.Cmd
	addr  string
	dir   string
	mark  string
	env   []string // of whoever uses the simulated GPU directly
	keep  time.Duration
	log   *lockedBuffer
	ended chan struct{}
}

// lockedBuffer is a buffer that a process writes and a test reads.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// startWorker starts a worker and waits until it answers. When the test ends the worker is ended
// too, and nothing of it may be left.
func startWorker(t testing.TB, o workerOptions) *worker {
	t.Helper()
	w := newWorker(t, o)
	t.Cleanup(w.stop)
	return w
}

// newWorker is startWorker for those who call stop themselves.
func newWorker(t testing.TB, o workerOptions) *worker {
	t.Helper()
	if o.network == "" {
		o.network = "tcp"
	}
	if o.gpuMem == "" {
		o.gpuMem = "2G"
	}
	if o.mem == "" {
		o.mem = "1G"
	}
	if o.devices == 0 {
		o.devices = 1
	}
	if o.keepalive == 0 {
		o.keepalive = 10 * time.Second
	}
	if o.sandbox == "" {
		o.sandbox = "on"
		if rdma != "" {
			o.sandbox = "off" // it allows no calls of RDMA
		}
	}
	// Not t.TempDir: a socket's path must be short.
	dir, err := os.MkdirTemp("", "e2e")
	if err != nil {
		t.Fatal(err)
	}
	w := &worker{t: t, dir: dir, keep: o.keepalive, log: &lockedBuffer{}, ended: make(chan struct{})}
	w.mark = fmt.Sprintf("%d.%d", os.Getpid(), markerOf.Add(1))
	switch o.network {
	case "unix":
		w.addr = "unix:" + filepath.Join(dir, "w.sock")
	default:
		w.addr = "tcp:" + workerAddress(t, &o)
	}
	w.env = append([]string{
		marker + "=" + w.mark,
		"SLUICE_SIM_STATE=" + filepath.Join(dir, "sim"),
		"SLUICE_SIM_MEM=" + o.gpuMem,
		"SLUICE_SIM_DEVICES=" + strconv.Itoa(o.devices),
		"SLUICE_SIM_KERNELS=" + built("test/twins.so"),
	}, o.env...)
	devices := make([]string, o.devices)
	for i := range devices {
		devices[i] = strconv.Itoa(i)
	}
	exe := built("bin/sluice-worker")
	if o.race {
		exe = built("test/race/sluice-worker")
	}
	if o.exe != "" {
		exe = o.exe
	}
	w.cmd = exec.Command(exe,
		"--listen", w.addr, "--device", strings.Join(devices, ","), "--mem", o.mem, "--store", filepath.Join(dir, "store"),
		"--libcuda", built("simgpu/libcuda.so.1"), "--libnvml", built("simgpu/libnvidia-ml.so.1"), "--keepalive", o.keepalive.String(), "--sandbox", o.sandbox)
	w.cmd.Args = append(append(w.cmd.Args, rdmaArgs()...), o.args...)
	w.cmd.Env = append(os.Environ(), w.env...)
	w.cmd.Stdout, w.cmd.Stderr = w.log, w.log
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = w.cmd.Wait()
		close(w.ended)
	}()
	deadline := time.After(20 * time.Second)
	for {
		if c, err := w.dial(); err == nil {
			_ = c.Close()
			// A port that nobody listens on yet may have been given to this very connection, which is then one with itself.
			if c.LocalAddr().String() != c.RemoteAddr().String() {
				return w
			}
		}
		select {
		case <-w.ended:
			t.Fatalf("the worker ended at once:\n%s", w.log)
		case <-deadline:
			_ = w.cmd.Process.Kill()
			t.Fatalf("the worker does not answer at %s:\n%s", w.addr, w.log)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// dial connects to the worker as a client would.
func (w *worker) dial() (net.Conn, error) {
	network, address, _ := strings.Cut(w.addr, ":")
	return net.DialTimeout(network, address, 5*time.Second)
}

func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// stop ends the worker as an administrator would, and looks for what it left behind.
func (w *worker) stop() {
	t := w.t
	t.Helper()
	select {
	case <-w.ended:
	default:
		_ = w.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-w.ended:
		case <-time.After(5 * time.Second):
			t.Errorf("the worker did not end within 5 s of SIGTERM")
			_ = w.cmd.Process.Kill()
			<-w.ended
		}
	}
	deadline := time.Now().Add(2 * time.Second)
	for left := marked(w.mark); len(left) > 0; left = marked(w.mark) {
		if time.Now().After(deadline) {
			t.Errorf("processes left behind: %v", left)
			for _, p := range left {
				_ = syscall.Kill(p.pid, syscall.SIGKILL)
			}
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if used := w.settled(deadline); used != 0 {
		t.Errorf("%d bytes of the simulated GPU are still in use", used)
	}
	if strings.Contains(w.log.String(), "DATA RACE") {
		t.Errorf("the race detector found something:\n%s", w.log)
	}
	if t.Failed() {
		t.Logf("the worker's log:\n%s", tail(w.log.String(), 60))
	}
	_ = os.RemoveAll(w.dir)
}

// proc is a live process.
type proc struct {
	pid, ppid int
	name      string
}

func (p proc) String() string { return fmt.Sprintf("%d %s", p.pid, p.name) }

// marked lists the live processes that carry a mark.
func marked(mark string) []proc {
	var out []proc
	for _, pid := range processes() {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil || !bytes.Contains(append([]byte{0}, env...), []byte("\x00"+marker+"="+mark+"\x00")) {
			continue
		}
		if s, ok := readStat(pid); ok && s.state != 'Z' {
			out = append(out, proc{pid, s.ppid, s.name})
		}
	}
	return out
}

func processes() []int {
	d, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	var out []int
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

type stat struct {
	name  string
	state byte
	ppid  int
}

func readStat(pid int) (stat, bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, false
	}
	open, closing := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	f := strings.Fields(string(b[closing+1:]))
	ppid, _ := strconv.Atoi(f[1])
	return stat{string(b[open+1 : closing]), f[0][0], ppid}, true
}

// sessions are the processes of the worker's sessions. One more child is always started ahead; it
// has no client's socket yet, only the one to its parent. While that one is being made it still has
// its parent's arguments, or for an instant its parent's sockets: hence the second look.
func (w *worker) sessions() []int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", w.cmd.Process.Pid, w.cmd.Process.Pid))
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", w.cmd.Process.Pid))
	for _, th := range threads {
		if th.Name() == strconv.Itoa(w.cmd.Process.Pid) {
			continue
		}
		more, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", w.cmd.Process.Pid, th.Name()))
		b = append(append(b, ' '), more...)
	}
	var out []int
	for _, f := range strings.Fields(string(b)) {
		pid, _ := strconv.Atoi(f)
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if bytes.Contains(args, []byte("\x00session\x00")) && sockets(pid) >= 2 && sockets(pid) >= 2 {
			out = append(out, pid)
		}
	}
	return out
}

// sockets is the number of sockets that a process holds.
func sockets(pid int) int {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	d, err := os.Open(dir)
	if err != nil {
		return 0
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	n := 0
	for _, name := range names {
		if to, err := os.Readlink(filepath.Join(dir, name)); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// used is the number of bytes in use on all simulated GPUs, as their NVML tells it.
func (w *worker) used() uint64 {
	w.t.Helper()
	cmd := exec.Command(built("test/nvml"), "used")
	cmd.Env = append(os.Environ(), w.env...)
	cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+built("simgpu"))
	out, err := cmd.Output()
	if err != nil {
		w.t.Fatalf("nvml used: %v", err)
	}
	var sum uint64
	for line := range strings.Lines(string(out)) {
		var used uint64
		var procs int
		if _, err := fmt.Sscan(line, &used, &procs); err != nil {
			w.t.Fatalf("nvml used printed %q", out)
		}
		sum += used
	}
	return sum
}

// settled is used once it is 0, or what it is at the deadline: a process that dies gives its memory
// back a moment after it can no longer be seen by its environment.
func (w *worker) settled(deadline time.Time) uint64 {
	w.t.Helper()
	for {
		used := w.used()
		if used == 0 || time.Now().After(deadline) {
			return used
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// result is what became of a program.
type result struct {
	stdout, stderr string
	status         int // 128+N when a signal ended it
	took           time.Duration
}

// runOptions is how a program is run.
type runOptions struct {
	mem     string // asked with --mem
	env     []string
	timeout time.Duration
}

// command is "sluice run" of a program on this worker.
func (w *worker) command(ctx context.Context, o runOptions, prog string, args ...string) *exec.Cmd {
	run := []string{"run", "--worker", w.addr, "--lib", built("shim")}
	if o.mem != "" {
		run = append(run, "--mem", o.mem)
	}
	run = append(append(run, "--", prog), args...)
	cmd := exec.CommandContext(ctx, built("bin/sluice"), run...)
	cmd.Env = append(os.Environ(), marker+"="+w.mark)
	cmd.Env = append(cmd.Env, o.env...)
	return cmd
}

// direct is a program with the shim's environment but without sluice run: it is in the worker's
// default lease.
func (w *worker) direct(ctx context.Context, prog string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, prog, args...)
	cmd.Env = append(os.Environ(), marker+"="+w.mark, "SLUICE_WORKER="+w.addr, "LD_LIBRARY_PATH="+rdmaPath(built("shim")))
	return cmd
}

// run runs a program to its end.
func (w *worker) run(o runOptions, prog string, args ...string) result {
	w.t.Helper()
	if o.timeout == 0 {
		o.timeout = 60 * time.Second
	}
	ctx, cancel := context.WithTimeout(context.Background(), o.timeout)
	defer cancel()
	return finish(w.t, ctx, w.command(ctx, o, prog, args...))
}

func finish(t testing.TB, ctx context.Context, cmd *exec.Cmd) result {
	t.Helper()
	var stdout, stderr lockedBuffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 2 * time.Second
	start := time.Now()
	err := cmd.Run()
	r := result{stdout.String(), stderr.String(), 0, time.Since(start)}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		t.Errorf("%s did not end within %s\nstdout: %s\nstderr: %s", strings.Join(cmd.Args, " "), r.took.Round(time.Second), tail(r.stdout, 20), tail(r.stderr, 20))
		r.status = -1
	case errors.As(err, &exit):
		r.status = exit.ExitCode()
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			r.status = 128 + int(ws.Signal())
		}
	case err != nil:
		t.Errorf("%s: %v", strings.Join(cmd.Args, " "), err)
		r.status = -1
	}
	return r
}

// healthy checks that the worker still serves others well, in its default lease: that one may be in
// use, and then has all the worker offers.
func (w *worker) healthy() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	r := finish(w.t, ctx, w.direct(ctx, program("vecadd")))
	if r.status != 0 || !strings.HasSuffix(r.stdout, "PASS\n") {
		w.t.Errorf("the worker serves no one else any more: status %d\n%s%s\nits log:\n%s", r.status, r.stdout, r.stderr, tail(w.log.String(), 30))
	}
}

// waitFor waits for a fact, and fails the test when it does not come true in time.
func waitFor(t testing.TB, limit time.Duration, what string, fact func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !fact() {
		if time.Since(start) > limit {
			t.Fatalf("not true after %s: %s", limit, what)
		}
		time.Sleep(2 * time.Millisecond)
	}
	return time.Since(start)
}

func tail(s string, lines int) string {
	l := strings.Split(strings.TrimRight(s, "\n"), "\n")
	if len(l) > lines {
		l = l[len(l)-lines:]
	}
	return strings.Join(l, "\n")
}
