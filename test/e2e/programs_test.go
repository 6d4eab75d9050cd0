package e2e

import (
	"context"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// programs are the CUDA programs and what each prints. None of it depends on the machine: the same
// lines come natively, from any GPU.
var programs = []struct {
	name string
	args []string
	want string
}{
	{name: "vecadd", want: "vecadd: n=1048576 sum=1337185854\n"},
	{name: "reduce", want: "reduce: int=5927692 double=1481923.00 wide=66600\n"},
	{name: "streams_events", want: "streams_events: overlap yes, order 1234, host calls 110\n"},
	{name: "pipeline", want: "pipeline: 600 items, each there when its event said so\n"},
	{name: "pipeline", args: []string{"fault"}, want: "pipeline: a wait tells of the wild address\n"},
	{name: "pipeline", args: []string{"shared"}, want: "pipeline: an event of two threads, 1500 records each\n"},
	{name: "pipeline", args: []string{"gone"}, want: "pipeline: 60 events gone under a wait\n"},
	{name: "printf", want: "printf: before\nprintf: device line 0 of 4, even 0.00\nprintf: device line 1 of 4, odd 0.25\nprintf: device line 2 of 4, even 0.50\nprintf: device line 3 of 4, odd 0.75\nprintf: after\n"},
	{name: "threads", want: "threads: 6 threads, sum 59016\n"},
	{name: "memcheck", args: []string{"512"}, want: "memcheck: what is reported free can be allocated\n"},
	{name: "pinned", want: "pinned: sum 4293918720\n"},
	{name: "zerocopy", want: "zerocopy: 1048576 words each way\n"},
	{name: "crowded", want: "crowded: 40000 blocks\n"},
	{name: "hostpool", args: []string{"captured"}, want: "hostpool: 262144 words each way\n"},
	{name: "shadow", want: "shadow: 65536 words each way\n"},
	{name: "pointers", want: "pointers: 3 tables\n"},
	{name: "packed", want: "packed: 3000\n"},
	{name: "arrive", want: "arrive: linear, all there\n"},
	{name: "arrive", args: []string{"rows"}, want: "arrive: rows, all there\n"},
	{name: "arrive", args: []string{"large"}, want: "arrive: large, all there\n"},
	{name: "engine", want: "engine: 7 sizes, 60 steps, asleep 3 times\n"},
	{name: "registered", want: "registered: 8 sizes\n"},
	{name: "flags", want: "flags: 50 rounds\n"},
	{name: "clash", args: []string{"managed", "neighbours"}, want: "clash: managed neighbours\n"},
	{name: "clash", args: []string{"managed", "same"}, want: "clash: managed same\n"},
	{name: "clash", args: []string{"variable", "neighbours"}, want: "clash: variable neighbours\n"},
	{name: "clash", args: []string{"variable", "same"}, want: "clash: variable same\n"},
	{name: "clash", args: []string{"mapped", "neighbours"}, want: "clash: mapped neighbours\n"},
	{name: "clash", args: []string{"mapped", "same"}, want: "clash: mapped same\n"},
	{name: "managedvar", want: "managedvar: 100\n"},
	{name: "managed", want: "managed: 3145728 words, 700 nodes\n"},
	{name: "blocking", want: "blocking: no launch waits\n"},
	{name: "longwait", want: "longwait: the copies arrive\n"},
	{name: "blocking", args: []string{"blocking"}, want: "blocking: each launch waits\n"},
	{name: "errors", args: []string{"plain"}, want: "errors: plain errors are refused and forgotten\n"},
	{name: "errors", args: []string{"illegal"}, want: "errors: an illegal address stays\n"},
	{name: "fork", want: "fork: sum 90, a late child gets cudaErrorInitializationError\n"},
	{name: "exit_live", args: []string{"return"}, want: "exit_live: leaving by return\n"},
	{name: "exit_live", args: []string{"exit"}, want: "exit_live: leaving by exit\n"},
	{name: "exit_live", args: []string{"quick"}, want: "exit_live: leaving by quick\n"},
	{name: "exit_live", args: []string{"thread"}, want: "exit_live: leaving by thread\n"},
	{name: "twolibs", want: "twolibs: 1231\n"},
	{name: "assertion", want: "assertion: 0 on stdout, 4 on stderr\n"},
	{name: "separate", want: separate},
	{name: "separate-ptx", want: separate},
	{name: "separate-part", want: separate},
	{name: "link", want: "link: sum 99712, count 256\n"},
	{name: "link", args: []string{"linked", "print"}, want: "link: print, cudaSuccess, said\n"},
	{name: "link", args: []string{"module", "print"}, want: "link: print, cudaSuccess, said\n"},
	{name: "link", args: []string{"library", "print"}, want: "link: print, cudaSuccess, said\n"},
	{name: "link", args: []string{"linked", "assert"}, want: "link: assert, cudaErrorAssert, named\n"},
	{name: "link", args: []string{"module", "assert"}, want: "link: assert, cudaErrorAssert, named\n"},
	{name: "link", args: []string{"library", "assert"}, want: "link: assert, cudaErrorAssert, named\n"},
	{name: "link", args: []string{"linked", "trap"}, want: "link: trap, cudaErrorLaunchFailure, nothing said\n"},
	{name: "link", args: []string{"module", "trap"}, want: "link: trap, cudaErrorLaunchFailure, nothing said\n"},
	{name: "link", args: []string{"library", "trap"}, want: "link: trap, cudaErrorLaunchFailure, nothing said\n"},
	{name: "legacy", want: "legacy: 4416, 264704, 17536\n"},
	{name: "nested", want: "nested: 3 added\nnested: 2 added\nnested: 1 added\nnested: 0 added\nnested: sum 384, a wrong launch is refused\n"},
	{name: "nocode", want: "nocode: the kernel is refused, 7\n"},
	{name: "graphnode", want: "graphnode: built, changed and updated\n"},
	{name: "graphhost", want: "graphhost: copies, functions, objects and captures\n"},
	{name: "graph", want: "graph: replayed 30, cloned 36\n"},
	{name: "graph_times", want: "graph_times: 4 launches, 80 kernels, each time is more than nothing\n"},
	{name: "graph_times", args: []string{"pinned"}, want: "graph_times: 4 launches, 80 kernels, each time is more than nothing\n"},
	{name: "multi_process", want: "multi_process: 5 processes, one total\n"},
	{name: "profiler", want: "profiler: started and stopped\n"},
}

const separate = "separate: sum 4514000, count 1000\nseparate: the device has 5 of 1000\nseparate: the device has 6 of 1000\n"

func TestPrograms(t *testing.T) {
	for _, o := range []workerOptions{{network: "tcp"}, {network: "unix"}, {network: "tcp", race: true}, {network: "unix", race: true}} {
		name := o.network
		if o.race {
			name += "-race"
		}
		t.Run(name, func(t *testing.T) {
			w := startWorker(t, o)
			for _, p := range programs {
				t.Run(strings.Join(append([]string{p.name}, p.args...), "-"), func(t *testing.T) {
					r := w.run(runOptions{mem: "512M"}, program(p.name), p.args...)
					check(t, r, p.want+"PASS\n")
				})
			}
			waitFor(t, time.Second, "all sessions have ended", func() bool { return len(w.sessions()) == 0 })
			if used := w.settled(time.Now().Add(time.Second)); used != 0 {
				t.Errorf("%d bytes are in use after all programs have ended", used)
			}
		})
	}
}

func check(t *testing.T, r result, want string) {
	t.Helper()
	if r.status != 0 || r.stdout != want {
		t.Errorf("status %d after %s\nstdout: %s\nwant:   %s\nstderr: %s", r.status, r.took.Round(time.Millisecond), r.stdout, want, tail(r.stderr, 20))
	}
	if r.status == 0 && r.stderr != "" {
		t.Errorf("a program that succeeded has this on stderr: %s", tail(r.stderr, 20))
	}
}

// stickyErrors are the driver's errors after which a context cannot be used any more.
var stickyErrors = map[string]int{
	"ECC_UNCORRECTABLE": 214, "NVLINK_UNCORRECTABLE": 220, "CONTAINED": 226, "ILLEGAL_ADDRESS": 700, "LAUNCH_TIMEOUT": 702,
	"ASSERT": 710, "HARDWARE_STACK_ERROR": 714, "ILLEGAL_INSTRUCTION": 715, "MISALIGNED_ADDRESS": 716, "INVALID_ADDRESS_SPACE": 717,
	"INVALID_PC": 718, "LAUNCH_FAILED": 719, "TENSOR_MEMORY_LEAK": 721,
}

// TestStickyErrors: once a call has returned a sticky error, every call that needs the context returns it, whichever error it
// is and whichever call returned it first.
func TestStickyErrors(t *testing.T) {
	w := startWorker(t, workerOptions{network: "unix"})
	for name, code := range stickyErrors {
		for how, first := range []string{"cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuEventQuery", "cuStreamQuery", "cuMemcpyDtoH"} {
			t.Run(name+" by "+first, func(t *testing.T) {
				r := w.run(runOptions{mem: "512M"}, program("errors"), "sticky", strconv.Itoa(code), strconv.Itoa(how))
				if want := "errors: every call returns it\nPASS\n"; r.status != 0 || r.stdout != want {
					t.Errorf("status %d\nstdout: %s\nstderr: %s", r.status, r.stdout, tail(r.stderr, 20))
				}
			})
		}
	}
}

// TestOlderEvents: a program that waits for old work while newer is under way is told of it by itself,
// and asks a few times only.
func TestOlderEvents(t *testing.T) {
	w := startWorker(t, workerOptions{})
	stats := filepath.Join(t.TempDir(), "stats")
	r := w.run(runOptions{mem: "512M", env: []string{"SLUICE_STATS=" + stats}}, program("pipeline"))
	check(t, r, "pipeline: 600 items, each there when its event said so\nPASS\n")
	var s struct {
		Waits map[string]int `json:"waits_by_function"`
	}
	readStats(t, stats, &s)
	if n := s.Waits["cuEventSynchronize"] + s.Waits["event_watch"]; n > 60 {
		t.Errorf("%d questions for the events of 600 items: %v", n, s.Waits)
	}
}

func TestBigCopy(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			w := startWorker(t, workerOptions{network: network, gpuMem: "8G", mem: "6G"})
			r := w.run(runOptions{timeout: 3 * time.Minute}, program("bigcopy"), "5120")
			if r.status != 0 || !strings.HasPrefix(r.stdout, "bigcopy: 5368709144 bytes each way, sum ") || !strings.HasSuffix(r.stdout, "\nPASS\n") {
				t.Errorf("status %d\nstdout: %s\nstderr: %s", r.status, r.stdout, r.stderr)
			}
			t.Logf("5 GiB each way over %s: %s", network, r.took.Round(100*time.Millisecond))
		})
	}
}

// TestSharedMemory: where shim and worker are on one node, the bytes of large copies do not pass through their connection.
func TestSharedMemory(t *testing.T) {
	for _, c := range []struct {
		network string
		shared  bool
	}{{"unix", true}, {"tcp", false}} {
		t.Run(c.network, func(t *testing.T) {
			w := startWorker(t, workerOptions{network: c.network, gpuMem: "1G", mem: "512M"})
			stats := filepath.Join(t.TempDir(), "stats")
			const n = 32 << 20
			args := []string{"--repeats", "2", "--sizes", "4096," + strconv.Itoa(n)}
			r := w.run(runOptions{env: []string{"SLUICE_STATS=" + stats}}, built("test/copies"), args...)
			if r.status != 0 || strings.Count(r.stdout, "\n") != 8 {
				t.Fatalf("status %d\nstdout: %s\nstderr: %s", r.status, r.stdout, r.stderr)
			}
			var s struct {
				In  int `json:"bytes_in"`
				Out int `json:"bytes_out"`
			}
			readStats(t, stats, &s)
			if c.shared != (s.In < n/2 && s.Out < n/2) {
				t.Errorf("%d bytes came and %d went for copies of %d", s.In, s.Out, n)
			}
		})
	}
}

// TestClash: the program and a kernel write different values to one word before a wait: a wait says so, and the log once.
func TestClash(t *testing.T) {
	w := startWorker(t, workerOptions{})
	for _, where := range []string{"managed", "variable", "mapped"} {
		r := w.run(runOptions{mem: "512M"}, program("clash"), where, "different")
		if want := "clash: " + where + " different\nPASS\n"; r.status != 0 || r.stdout != want {
			t.Errorf("%s: status %d\nstdout: %s\nstderr: %s", where, r.status, r.stdout, r.stderr)
		}
		if strings.Count(r.stderr, "have written different values to the same bytes") != 1 {
			t.Errorf("%s: the log says it not once: %s", where, r.stderr)
		}
	}
}

// TestNVML compares what NVML and CUDA say inside a lease.
func TestNVML(t *testing.T) {
	w := startWorker(t, workerOptions{devices: 2})
	r := w.run(runOptions{mem: "512M", env: []string{"NVML_TOTAL_MIB=512"}}, built("test/nvml"))
	check(t, r, "nvml: 2 device, NVML and CUDA agree\nPASS\n")
}

// TestLeaseMemory: a lease takes what it was granted from the worker's offer, gives it back when it
// ends, and a lease that does not fit is refused by name.
func TestLeaseMemory(t *testing.T) {
	w := startWorker(t, workerOptions{mem: "1G"})
	for range 3 {
		r := w.run(runOptions{mem: "1G"}, program("memcheck"), "1024")
		check(t, r, "memcheck: what is reported free can be allocated\nPASS\n")
	}
	r := w.run(runOptions{mem: "3G"}, program("vecadd"))
	if r.status != 125 || !strings.Contains(r.stderr, "refused") {
		t.Errorf("3 GiB of a worker that offers 1: status %d, %s%s", r.status, r.stdout, r.stderr)
	}
	w.healthy()
}

// TestRefused: what is not supported is refused with CUDA's code, and once in the log by name.
func TestRefused(t *testing.T) {
	w := startWorker(t, workerOptions{})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.direct(ctx, built("test/agent"))
	cmd.Env = append(cmd.Env, "SLUICE_LOG=warn")
	cmd.Stdin = strings.NewReader("mem 1048576\nluid\nluid\nmem 1048576\n")
	r := finish(t, ctx, cmd)
	lines := strings.Split(r.stdout, "\n")
	if r.status != 0 || len(lines) < 5 || !strings.HasPrefix(lines[2], "801 ") || !strings.HasPrefix(lines[3], "801 ") || !strings.HasPrefix(lines[4], "0 ") {
		t.Errorf("status %d: %q, %s", r.status, r.stdout, r.stderr)
	}
	if strings.Count(r.stderr, "cuDeviceGetLuid") != 1 {
		t.Errorf("the log names cuDeviceGetLuid not once: %s", r.stderr)
	}
}

// TestPoolsOfALocation: pools of a device and of the host are found by their location; those of managed memory and of NUMA nodes are refused.
func TestPoolsOfALocation(t *testing.T) {
	w := startWorker(t, workerOptions{})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.direct(ctx, built("test/agent"))
	cmd.Stdin = strings.NewReader("poolof 1 1\npoolof 1 2\npoolof 2 1\npoolof 3 1\n")
	r := finish(t, ctx, cmd)
	if want := "0\n0 1 0\n801 0 0\n0 0 0\n801 0 0\n"; r.status != 0 || r.stdout != want {
		t.Errorf("status %d: %q, not %q; %s", r.status, r.stdout, want, r.stderr)
	}
}

// TestStatus: sluice run passes on how the program ended.
func TestStatus(t *testing.T) {
	w := startWorker(t, workerOptions{})
	for _, c := range []struct {
		script string
		want   int
	}{{"exit 0", 0}, {"exit 7", 7}, {"kill -TERM $$", 128 + 15}} {
		r := w.run(runOptions{}, "/bin/sh", "-c", c.script)
		if r.status != c.want {
			t.Errorf("%q: status %d, not %d: %s", c.script, r.status, c.want, r.stderr)
		}
	}
	if r := w.run(runOptions{}, "/nonexistent/program"); r.status != 127 {
		t.Errorf("a program that is not there: status %d, not 127", r.status)
	}
}
