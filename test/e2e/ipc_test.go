package e2e

import (
	"context"
	"encoding/hex"
	"fmt"
	"testing"
	"time"
)

const (
	invalidValue   = 1   // CUDA_ERROR_INVALID_VALUE
	invalidContext = 201 // CUDA_ERROR_INVALID_CONTEXT
	invalidHandle  = 400 // CUDA_ERROR_INVALID_HANDLE
	notSupported   = 801 // CUDA_ERROR_NOT_SUPPORTED
	unknown        = 999 // CUDA_ERROR_UNKNOWN
)

// must asks for what has to succeed.
func (a *agent) must(format string, args ...any) (x, y uint64) {
	a.t.Helper()
	rc, x, y := a.ask(format, args...)
	if rc != 0 {
		a.t.Fatalf("%s: CUresult %d", fmt.Sprintf(format, args...), rc)
	}
	return x, y
}

// refused asks for what has to fail with one of these results.
func (a *agent) refused(what string, want int, format string, args ...any) {
	a.t.Helper()
	if rc, _, _ := a.ask(format, args...); rc != want {
		a.t.Errorf("%s: CUresult %d, not %d", what, rc, want)
	}
}

// handle is the agent's handle of its i-th allocation.
func (a *agent) handle(i int) []byte { return a.token("ipc", i) }

func (a *agent) token(what string, i int) []byte {
	a.t.Helper()
	if _, err := fmt.Fprintf(a.in, "%s %d\n", what, i); err != nil {
		a.t.Fatal(err)
	}
	line, err := a.out.ReadString('\n')
	if err != nil {
		a.t.Fatalf("an agent died: %v: %s", err, a.stderr.String())
	}
	var rc int
	var text string
	if n, _ := fmt.Sscan(line, &rc, &text); n != 2 || rc != 0 {
		a.t.Fatalf("%s: %q", what, line)
	}
	h, err := hex.DecodeString(text)
	if err != nil || len(h) != 64 {
		a.t.Fatalf("a handle of %q", text)
	}
	return h
}

// TestIPC runs two processes that share all that can be shared.
func TestIPC(t *testing.T) {
	for _, o := range []workerOptions{{network: "tcp", sandbox: "on"}, {network: "unix", sandbox: "off", race: true}} {
		t.Run(o.network, func(t *testing.T) {
			w := startWorker(t, o)
			check(t, w.run(runOptions{mem: "512M"}, program("ipc")), "ipc: memory, 40 turns by events, a descriptor, a pool\nPASS\n")
			waitFor(t, time.Second, "all sessions have ended", func() bool { return len(w.sessions()) == 0 })
			if used := w.settled(time.Now().Add(time.Second)); used != 0 {
				t.Errorf("%d bytes are in use after both have ended", used)
			}
		})
	}
}

// inAndOut runs a test with the worker's sessions in a sandbox and without.
func inAndOut(t *testing.T, o workerOptions, f func(*testing.T, *worker)) {
	for _, o.sandbox = range []string{"on", "off"} {
		t.Run("sandbox "+o.sandbox, func(t *testing.T) { f(t, startWorker(t, o)) })
	}
}

// TestIPCHandles: a handle opens what it is of, for the processes of its lease, as long as that is there; no
// other handle opens anything.
func TestIPCHandles(t *testing.T) {
	inAndOut(t, workerOptions{network: "unix", mem: "1G"}, ipcHandles)
}

func ipcHandles(t *testing.T, w *worker) {
	stranger := startAgentAs(t, w.command(context.Background(), runOptions{mem: "256M"}, built("test/agent")))
	maker, user := startAgent(t, w), startAgent(t, w)
	maker.must("mem %d", 4<<20)
	maker.must("mem %d", 1000)
	maker.must("mem %d", 1000)
	for i := range 3 {
		maker.must("set %d %d", i, 100+i)
	}
	for i := range 3 {
		user.must("open %x", maker.handle(i))
		if x, _ := user.must("get %d", i); x != uint64(100+i) {
			t.Errorf("allocation %d holds %d there", i, x)
		}
		user.must("set %d %d", i, 200+i)
		if x, _ := maker.must("get %d", i); x != uint64(200+i) {
			t.Errorf("allocation %d holds %d here", i, x)
		}
	}
	h := maker.handle(1)
	if again := maker.handle(1); string(again) != string(h) {
		t.Error("one allocation has two handles")
	}
	maker.refused("its own handle", invalidContext, "open %x", h)
	stranger.refused("another lease's handle", invalidHandle, "open %x", h)
	for i := range h {
		forged := append([]byte(nil), h...)
		forged[i] ^= 1 << (i % 8)
		want := invalidHandle
		if i >= 20 && i < 24 { // its kind
			want = invalidValue
		}
		user.refused(fmt.Sprintf("a handle with byte %d changed", i), want, "open %x", forged)
		maker.refused(fmt.Sprintf("its own handle with byte %d changed", i), want, "open %x", forged)
	}
	user.refused("a handle of zeros", invalidValue, "open %x", make([]byte, 64))

	maker.must("free 1")
	third := startAgent(t, w)
	third.refused("the handle of freed memory", invalidHandle, "open %x", h)
	maker.must("mem %d", 1000) // as like as not at the same address
	third.refused("the handle of freed memory, when other memory is there", invalidHandle, "open %x", h)

	h = maker.handle(2)
	_ = maker.cmd.Process.Kill()
	_ = maker.cmd.Wait()
	waitFor(t, 10*time.Second, "its session has ended", func() bool { return len(w.sessions()) == 3 })
	third.refused("the handle of a process that has ended", invalidHandle, "open %x", h)
	if x, _ := user.must("get 0"); x != 200 {
		t.Errorf("what was open when its maker ended holds %d", x)
	}
	for i := range 3 {
		user.must("free %d", i)
	}
}

// TestIPCDescriptors: the same for memory of cuMemCreate, whose handle is a file descriptor.
func TestIPCDescriptors(t *testing.T) {
	inAndOut(t, workerOptions{network: "unix", mem: "1G"}, ipcDescriptors)
}

func ipcDescriptors(t *testing.T, w *worker) {
	stranger := startAgentAs(t, w.command(context.Background(), runOptions{mem: "256M"}, built("test/agent")))
	maker, user := startAgent(t, w), startAgent(t, w)
	pid := maker.cmd.Process.Pid
	maker.must("vmm %d", 64<<20)
	fd, _ := maker.must("export 0")
	user.must("import %d %d", pid, fd)
	user.must("import %d %d", pid, fd)
	maker.must("import %d %d", pid, fd) // its own too
	stranger.refused("another lease's memory", invalidHandle, "import %d %d", pid, fd)
	user.refused("a descriptor of something else", unknown, "import %d 0", pid)
	user.refused("no descriptor", unknown, "import %d 999", pid)

	free := func() uint64 {
		n, _ := user.must("info")
		return n
	}
	before := free()
	maker.must("free 0")
	if n := free(); n != before {
		t.Errorf("%d bytes are free and were %d: the maker has another handle of that memory", n, before)
	}
	maker.must("free 1")
	if n := free(); n != before {
		t.Errorf("%d bytes are free and were %d: another process has the memory", n, before)
	}
	user.refused("memory that its maker has released", invalidHandle, "import %d %d", pid, fd)
	user.must("free 0")
	if n := free(); n != before {
		t.Errorf("%d bytes are free and were %d: another handle is there", n, before)
	}
	user.must("free 1")
	waitFor(t, 5*time.Second, "the maker is charged no longer", func() bool { return free() == before+64<<20 })
}

// TestIPCAccount: shared memory is charged once, and as long as anybody has it.
func TestIPCAccount(t *testing.T) {
	inAndOut(t, workerOptions{network: "unix", mem: "1G", gpuMem: "4G"}, ipcAccount)
}

func ipcAccount(t *testing.T, w *worker) {
	const most = 1 << 30
	maker, user, other := startAgent(t, w), startAgent(t, w), startAgent(t, w)
	for _, a := range []*agent{maker, user, other} {
		a.must("info")
	}
	free := func() uint64 {
		n, _ := other.must("info")
		return n
	}
	empty := free()
	maker.must("mem %d", 600<<20)
	taken := empty - 600<<20
	h := maker.handle(0)
	user.must("open %x", h)
	if n := free(); n != taken {
		t.Errorf("%d MiB are free, not %d: opening costs nothing", n>>20, taken>>20)
	}
	maker.must("free 0")
	if n := free(); n != taken {
		t.Errorf("%d MiB are free, not %d: the memory is there as long as it is open", n>>20, taken>>20)
	}
	other.refused("memory that another process still has", outOf, "mem %d", 600<<20)
	user.must("free 0")
	waitFor(t, 5*time.Second, "the maker is charged no longer", func() bool { return free() == empty })

	// The maker ends first: who has it open is charged.
	maker.must("mem %d", 600<<20)
	user.must("open %x", maker.handle(1))
	context0 := (most - empty) / 3 // what each session's context takes, about: the maker's is free then
	_ = maker.cmd.Process.Kill()
	_ = maker.cmd.Wait()
	waitFor(t, 10*time.Second, "its session has ended", func() bool { return len(w.sessions()) == 2 })
	waitFor(t, 10*time.Second, "the user is charged", func() bool { n := free(); return n > taken && n <= taken+context0+granule })
	other.refused("memory that outlives its maker", outOf, "mem %d", 600<<20)
	user.must("free 1")
	waitFor(t, 5*time.Second, "nobody is charged", func() bool { return free() >= empty })
	other.must("mem %d", 600<<20)
}

// TestIPCPools: pools and their allocations are shared; the maker is charged as long as they are.
func TestIPCPools(t *testing.T) {
	inAndOut(t, workerOptions{network: "unix", mem: "1G", gpuMem: "4G"}, ipcPools)
}

func ipcPools(t *testing.T, w *worker) {
	stranger := startAgentAs(t, w.command(context.Background(), runOptions{mem: "256M"}, built("test/agent")))
	maker, user := startAgent(t, w), startAgent(t, w)
	pid := maker.cmd.Process.Pid
	free := func() uint64 {
		n, _ := user.must("info")
		return n
	}
	maker.must("info")
	empty := free()
	fd, _ := maker.must("xpool %d", 200<<20)
	taken := free()
	if taken > empty-200<<20 {
		t.Errorf("%d MiB are free of %d with 200 in a pool", taken>>20, empty>>20)
	}
	maker.must("set 0 7")
	data := maker.token("xptr", 0)
	stranger.refused("another lease's pool", invalidHandle, "ipool %d %d", pid, fd)
	user.refused("a descriptor of something else", unknown, "ipool %d 0", pid)
	user.must("ipool %d %d", pid, fd)
	for i := range data {
		forged := append([]byte(nil), data...)
		forged[i] ^= 1 << (i % 8)
		user.refused(fmt.Sprintf("a pointer with byte %d changed", i), invalidValue, "iptr %x", forged)
	}
	user.must("iptr %x", data)
	if x, _ := user.must("get 0"); x != 7 {
		t.Errorf("it holds %d", x)
	}
	if n := free(); n != taken {
		t.Errorf("%d MiB are free, not %d: importing costs nothing", n>>20, taken>>20)
	}
	maker.must("free 0")
	maker.must("trim")
	if n := free(); n != taken {
		t.Errorf("%d MiB are free, not %d: another process has the memory", n>>20, taken>>20)
	}
	user.refused("a pointer that its maker has freed", invalidValue, "iptr %x", data)
	maker.must("xpool %d", 200<<20) // other memory: the first is there still
	if n := free(); n > taken-200<<20 {
		t.Errorf("%d MiB are free after %d: memory that is shared serves twice", n>>20, taken>>20)
	}
	maker.refused("more than there is", outOf, "xpool %d", 300<<20)
	user.must("free 0")

	// The maker ends: who has a pointer is charged.
	fd2, _ := maker.must("xpool %d", 100<<20)
	user.must("ipool %d %d", pid, fd2)
	user.must("iptr %x", maker.token("xptr", 2))
	_ = maker.cmd.Process.Kill()
	_ = maker.cmd.Wait()
	waitFor(t, 10*time.Second, "its session has ended", func() bool { return len(w.sessions()) == 2 })
	// What the user has of the first pool is charged too: it has not destroyed that.
	waitFor(t, 10*time.Second, "the user is charged", func() bool { n := free(); return n+(300<<20) <= empty+(128<<20) && n+(300<<20) >= empty })
}
