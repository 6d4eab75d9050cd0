// Package bench_test runs the GPU scripts on a machine without a GPU: the worker,
// the compiler and PyTorch are stand-ins (testdata/bin), sluice and the relay are
// real. What it shows is that the scripts judge rightly and leave nothing behind. Scripts mostly
// wait, so several run at a time.
package bench_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// build has the layout that the scripts expect, in a folder of its own.
var build string

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "sluice-worker" {
		grantAll(os.Args[1:])
		return
	}
	os.Exit(func() int {
		var err error
		if build, err = os.MkdirTemp("", "bench"); err != nil {
			panic(err)
		}
		defer os.RemoveAll(build)
		for _, dir := range []string{"bin", "shim"} {
			if err := os.Mkdir(filepath.Join(build, dir), 0o755); err != nil {
				panic(err)
			}
		}
		goBuild := exec.Command("go", "build", "-o", filepath.Join(build, "bin")+"/", "../daemon/cmd/sluice", "./relay")
		if out, err := goBuild.CombinedOutput(); err != nil {
			panic(fmt.Sprintf("%v: %s", err, out))
		}
		self, err := os.Executable()
		if err != nil {
			panic(err)
		}
		if err := os.Symlink(self, filepath.Join(build, "bin", "sluice-worker")); err != nil {
			panic(err)
		}
		if err := os.WriteFile(filepath.Join(build, "shim", "libcuda.so.1"), nil, 0o644); err != nil {
			panic(err)
		}
		return m.Run()
	}())
}

// grantAll is a worker that gives every lease and computes nothing.
func grantAll(args []string) {
	network, addr, _ := strings.Cut(args[1], ":") // --listen ADDR
	ln, err := net.Listen(network, addr)
	if err != nil {
		panic(err)
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			panic(err)
		}
		go func() {
			defer c.Close()
			if _, err := io.ReadFull(c, make([]byte, wire.HelloSize)); err != nil {
				return
			}
			_, _ = c.Write(wire.AppendWelcome(nil, wire.StatusOK, make([]byte, 16)))
			_, _ = io.Copy(io.Discard, c)
		}()
	}
}

// script runs one with the stand-ins, and sees that no process is left of it.
func script(t *testing.T, env []string, name string, args ...string) (out string, status int, logs string) {
	t.Helper()
	bin := filepath.Join(forUsers(t, "testdata/bin"), "bin")
	logs = t.TempDir()
	cmd := exec.Command("./"+name, args...)
	cmd.Env = append(os.Environ(),
		"PATH="+bin+":"+os.Getenv("PATH"), "PYTHON="+filepath.Join(bin, "python"),
		"SLUICE_BUILD="+build, "SLUICE_LOGS="+logs, "TMPDIR="+t.TempDir(), "NVCC=", "MEM=")
	cmd.Env = append(cmd.Env, env...)
	b, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	for _, p := range processes(t) {
		if strings.Contains(p, logs) {
			t.Errorf("%s left a process: %q", name, p)
		}
	}
	t.Logf("%s", b)
	return string(b), cmd.ProcessState.ExitCode(), logs
}

// forUsers gives a folder with a copy of a file or folder that users other than this one can reach.
func forUsers(t *testing.T, path string) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "users")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if b, err := exec.Command("sh", "-c", `cp -R "$1" "$0" && chmod -R a+rX "$0"`, dir, path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	return dir
}

// processes is the command lines of all processes of this machine.
func processes(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, f := range files {
		if pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f))); pid == os.Getpid() {
			continue
		}
		if b, err := os.ReadFile(f); err == nil { // it may have ended meanwhile
			all = append(all, string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
		}
	}
	return all
}

func want(t *testing.T, out string, lines ...string) {
	t.Helper()
	for _, s := range lines {
		if !strings.Contains(out, s) {
			t.Errorf("no %q in the output", s)
		}
	}
}

func TestGPUTest(t *testing.T) {
	t.Parallel()
	out, status, _ := script(t, []string{"FAKE_MOST=21474836480"}, "gpu-test.sh", "--only", "smi,cuda13,libs,pinned,train,mem,end")
	if status != 1 {
		t.Errorf("exit status %d, want 1: some checks have failed", status)
	}
	if !strings.HasPrefix(out, `{"commit": "`) {
		t.Errorf("the log begins with %.80q", out)
	}
	want(t, out, "PASS smi", "memory.total: 20480 MiB of 143771",
		"PASS cuda13-vecadd", "2 lines the same",
		"FAIL cuda13-reduce", "exit status 3", "| it broke",
		"FAIL cuda13-graph", "the outputs differ", "| < computed here",
		"PASS cuda13-errors-illegal", "PASS cuda13-bigcopy", "PASS cublas", "PASS cudnn", "PASS cufft",
		"PASS train-resnet50", "PASS mem-nvml", "9 samples", "0 over", "PASS nothing-left",
		"3 failed: cuda13-reduce cuda13-graph nvml") // the shim here is an empty file
}

func TestGPUTestJudges(t *testing.T) {
	t.Parallel()
	// One byte over what is allowed.
	out, status, _ := script(t, []string{"FAKE_MOST=" + strconv.Itoa(20<<30+64<<20+1)}, "gpu-test.sh", "--only=mem")
	if status != 1 {
		t.Errorf("exit status %d, want 1", status)
	}
	want(t, out, "PASS greedy-local", "FAIL mem-nvml", "8 passed, 1 failed")

	out, status, _ = script(t, []string{"FAKE_MOST=1", "SLUICE_BUDGET=0"}, "gpu-test.sh", "--only", "libs")
	if status != 1 {
		t.Errorf("out of time: exit status %d, want 1", status)
	}
	want(t, out, "FAIL cublas", "not run, 0 s are over")

	out, status, _ = script(t, nil, "gpu-test.sh", "--only", "cuda11.8")
	if status != 1 {
		t.Errorf("nothing prebuilt: exit status %d, want 1", status)
	}
	want(t, out, "bench/prebuild.sh")
}

func TestGPUBench(t *testing.T) {
	t.Parallel()
	out, status, logs := script(t, nil, "gpu-bench.sh")
	if status != 0 {
		t.Errorf("exit status %d", status)
	}
	want(t, out,
		"resnet32  loopback TCP    native   18.000 ms  remote   18.500 ms  ratio 0.973  spread 0.0% / 0.0%",
		"per step: waits 0.00, calls 742, out 148.4 kB, in 0 B  client CPU per launch 16.17 us (native 16.17)  meets 0.95",
		"1 Gb/s, 20 ms", "meets 0.85", "kernel launch, enqueue", "ratio 0.750", "gpu-bench: 0 runs failed")
	page, err := exec.Command("python3", "report.py", "gpu", filepath.Join(logs, "bench", "bench.jsonl")).Output()
	if err != nil {
		t.Fatal(err)
	}
	want(t, string(page), "a GPU, 143771 MiB, driver 580.0", "## ResNet-50 training step, batch 16", "## ResNet-50 training step, batch 32, its batch copied from the host", "| 10 Gb/s, 0.1 ms | 18.500 |",
		"| Unix socket | 18.500 | 0.973 | 0.0% | 0.00 | 742 | 148.4 kB | 0 B | 16.17 us (native 16.17) | 6.1 s |",
		"| kernel launch, enqueue | 3.00 (2.00) | 4.00 (2.00) |")
}

func TestGPULLM(t *testing.T) {
	t.Parallel()
	out, status, _ := script(t, []string{"SLUICE_LINKS=loopback unix"}, "gpu-llm.sh")
	if status != 1 {
		t.Errorf("exit status %d, want 1: llama.cpp's sources are not there", status)
	}
	want(t, out,
		"tokens empty, loopback TCP: DIFFERENT results; 60 waits", "tokens/s, cold                                   native      20.00  remote      19.00  0.950 of native speed",
		"tokens filled, Unix socket", "attention empty, loopback TCP: the same results",
		"FAIL llama", "SLUICE_LLAMA names no folder", "gpu-llm: 1 runs failed: llama")
}

func TestGPUSeveral(t *testing.T) {
	t.Parallel()
	out, status, logs := script(t, nil, "gpu-several.sh", "--only", "collectives,ddp,killed")
	if status != 1 {
		t.Errorf("exit status %d, want 1: the losses differ, and a case failed", status)
	}
	want(t, out,
		"all_reduce           1024  native   10.000 GB/s     100.0 us     100.0 waited for   remote    8.000 GB/s     125.0 us     125.0 waited for   0.80",
		"PASS collectives: the same wrong", "native 100.00 ms a step   remote 125.00 ms a step   0.800 of native speed",
		"FAIL ddp: process 1: losses natively ['0x1.8p+0'], remotely ['0x1.9p+0']",
		"FAIL killed-remote", "| rank 0: the process group is there", "| NCCL WARN what NCCL says", "FAIL killed: remote: rank 0 ran past its time",
		"PASS nothing-left")
	log, err := os.ReadFile(filepath.Join(logs, "several", "several.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(log, []byte("\n")); n != 7 || !bytes.HasPrefix(log, []byte(`{"commit"`)) {
		t.Errorf("a log of %d lines: %s", n, log)
	}
}

func TestGPUCuts(t *testing.T) {
	t.Parallel()
	train, err := filepath.Abs("testdata/cut_train")
	if err != nil {
		t.Fatal(err)
	}
	env := []string{"SLUICE_CUT_PROGRAM=" + train, "SLUICE_CUTS=3", "SLUICE_CUT_SECONDS=0.3", "SLUICE_TRAIN_SECONDS=1.5", "SLUICE_CUT_GRACE=1"}
	out, status, logs := script(t, env, "gpu-cuts.sh")
	want(t, out, "resnet50: ", " with 3 cuts of 0.3 to 0.", "transformer: ", "longer than the grace of 1 s: the program ended ", "PASS losses and weights the same to the bit", "gpu-cuts: 0 failed")
	if status != 0 {
		t.Errorf("exit status %d", status)
	}
	log, err := os.ReadFile(filepath.Join(logs, "cuts.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(log, []byte("\n")); n != 5 || !bytes.HasPrefix(log, []byte(`{"commit"`)) {
		t.Errorf("a log of %d lines: %s", n, log)
	}

	out, status, _ = script(t, append(env, "WRONG=transformer"), "gpu-cuts.sh", "--only", "train")
	want(t, out, "FAIL transformer, uncut: losses ", "FAIL transformer, cut: losses ", "gpu-cuts: 1 failed")
	if status != 1 {
		t.Errorf("exit status %d, want 1: losses differ", status)
	}
}

func TestGPUGrace(t *testing.T) {
	t.Parallel()
	launch, err := filepath.Abs("testdata/small_launch")
	if err != nil {
		t.Fatal(err)
	}
	out, status, logs := script(t, []string{"SLUICE_LAUNCH=" + launch, "SLUICE_ROUNDS=2", "SLUICE_PAIRS=4", "SLUICE_ONLY=launch,mlp,pair"}, "gpu-grace.sh")
	want(t, out, "| launch, us of the program's processors | 0.400 (0.400 to 0.400) | 0.400 ", "| mlp, of native | 0.973 (0.973 to 0.973) |",
		"| mlp, of its speed without a grace in the same process | 1 | 1.0000 ± 0.0000 (of 2 pairs of processes, 1.0000 to 1.0000) |", "PASS mlp, of native, by pairs (within 0.0000): a grace costs",
		"| launch, us of the program's processors, more than without a grace in the same process | 0 | 0.0000 ± 0.0000 (of 2 pairs of processes, 0.0000 to 0.0000) |",
		"PASS launch, us of the program's processors, by pairs (within 0.0000): a grace costs 0.0000, at most 0.02", "gpu-grace: 0 failed")
	if status != 0 {
		t.Errorf("exit status %d", status)
	}
	path := filepath.Join(logs, "grace.jsonl")
	log, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// A grace that costs one step in fifty, in all pairs and without any.
	slower := bytes.ReplaceAll(log, []byte(`"ms": [[0.5], [0.501]]`), []byte(`"ms": [[0.5], [0.51]]`))
	slower = regexp.MustCompile(`(?m)^(.*"order": \["kept", "zero"\].*"ms": )\[\[0.5\], \[0.51\]\]`).ReplaceAll(slower, []byte(`$1[[0.51], [0.5]]`))
	judge(t, "grace.py", path, slower, "FAIL mlp, of native, by pairs (within 0.0000): a grace costs 0.0191, at most 0.005")
	slower = regexp.MustCompile(`(?m)^(.*"order": \["kept", "zero"\].*"cpu_us": ).*$`).ReplaceAll(log, []byte(`$1[[0.48, 0.48], [0.41, 0.41]]}}`))
	judge(t, "grace.py", path, slower, "FAIL launch, us of the program's processors, by pairs (within 0.0000): a grace costs 0.0400, at most 0.02")
	alone := regexp.MustCompile(`(?m)^{"run": "pair.*\n`).ReplaceAll(log, nil)
	slower = regexp.MustCompile(`("mlp.kept.*?)"median_ms": 18.5`).ReplaceAll(alone, []byte(`$1"median_ms": 18.7`))
	judge(t, "grace.py", path, slower, "FAIL mlp, of native: a grace costs 0.0104, at most 0.005")
}

// The older build is the same one here.
func TestGPUCost(t *testing.T) {
	t.Parallel()
	launch, err := filepath.Abs("testdata/small_launch")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(build, "version"), []byte("0123456789ab\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	out, _, logs := script(t, []string{"SLUICE_LAUNCH=" + launch, "SLUICE_OPEN=/bin/pwd", "SLUICE_CYCLES=2"}, "gpu-cost.sh", build)
	want(t, out, "| ResNet-50, batch 32, ms a step | 18.500 (18.500 to 18.500) | 18.500 (18.500 to 18.500) | +0.00 % ± ", "PASS MLP, ms a step: worse by +0.00 % ± 0.00, at most 1 %",
		"PASS launch, us of the program's processors: worse by +0.00 % ± 0.00", "from start to the first answer of a session, ms")
	path := filepath.Join(logs, "cost.jsonl")
	log, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	slower := regexp.MustCompile(`("mlp.new.*?)"median_ms": 18.5`)
	judge(t, "cost.py", path, slower.ReplaceAll(log, []byte(`$1"median_ms": 18.7`)), "FAIL MLP, ms a step: worse by +1.08 % ± 0.00, at most 1 %")
	some := regexp.MustCompile(`("mlp.new.[12]".*?)"median_ms": 18.5`).ReplaceAll(log, []byte(`$1"median_ms": 18.4`))
	judge(t, "cost.py", path, regexp.MustCompile(`("mlp.new.[34]".*?)"median_ms": 18.5`).ReplaceAll(some, []byte(`$1"median_ms": 25`)), "OPEN MLP, ms a step: worse by ")
}

// judge has a changed log judged, which has to find that.
func judge(t *testing.T, program, path string, log []byte, finding string) {
	t.Helper()
	if err := os.WriteFile(path, log, 0o600); err != nil {
		t.Fatal(err)
	}
	b, err := exec.Command("python3", program, "report", path).CombinedOutput()
	if !strings.Contains(string(b), finding) || err == nil {
		t.Errorf("%v, %s, want %q", err, b, finding)
	}
}

func TestSmoke(t *testing.T) {
	t.Parallel()
	out, status, _ := script(t, nil, "gpu-smoke.sh")
	if status != 1 {
		t.Errorf("exit status %d, want 1: one program dies", status)
	}
	want(t, out, "PASS vecadd", "FAIL torch-tiny", "died of signal 11", "again with SLUICE_LOG=debug", "PASS resnet50",
		"1 failed: torch-tiny")
}

func TestParts(t *testing.T) {
	for _, name := range []string{"gpu-test.sh", "gpu-bench.sh", "gpu-llm.sh", "gpu-several.sh", "gpu-cuts.sh"} {
		out, status, _ := script(t, nil, name, "--only", "nothing")
		if status != 2 || !strings.Contains(out, "no part nothing; there are: ") {
			t.Errorf("%s: exit status %d, %q", name, status, out)
		}
		out, status, _ = script(t, nil, name, "--list")
		if status != 0 || strings.Contains(out, " ") {
			t.Errorf("%s: exit status %d, %q", name, status, out)
		}
	}
}
