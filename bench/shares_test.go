package bench_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// cell is a line of the raw log: tenants that did so many items in each 0.1 s.
func cell(kind, name string, tenants []any, items [][]int, more map[string]any) map[string]any {
	results := make([]any, len(items))
	for i, n := range items {
		gaps := make([]int, len(n))
		for k := range gaps {
			gaps[k] = 11000 // us
		}
		load := tenants[i].([]any)[0]
		results[i] = map[string]any{"load": load, "items": n, "gap_us": gaps}
	}
	c := map[string]any{"kind": kind, "cell": name, "gpu": 0, "how": "turns", "policy": "fixed", "tenants": tenants, "window": 1,
		"measure": 0, "results": results}
	for k, v := range more {
		c[k] = v
	}
	return c
}

func each(slots, items int) []int {
	n := make([]int, slots)
	for i := range n {
		n[i] = items
	}
	return n
}

// summary judges cells, and answers what it said.
func summary(t *testing.T, cells ...map[string]any) (out string, status int) {
	t.Helper()
	var lines bytes.Buffer
	for _, c := range cells {
		if err := json.NewEncoder(&lines).Encode(c); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "raw.jsonl")
	if err := os.WriteFile(path, append(lines.Bytes(), `{"kind": "fixed", "cut of`...), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("python3", "shares/summary.py", path)
	b, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	t.Logf("%s", b)
	return string(b), cmd.ProcessState.ExitCode()
}

func TestSharesJudged(t *testing.T) {
	one, two := []any{"gemm", 30}, []any{"gemm", 70}
	lone := func(turns, off float64) map[string]any {
		speeds := map[string]any{"turns": []float64{turns - 500, turns + 500}, "off": []float64{off, off}}
		return map[string]any{"kind": "lone", "cell": "gemm", "gpu": 0, "load": "gemm", "speeds": speeds}
	}
	pair := []any{one, two}
	out, status := summary(t, lone(9000, 9010), lone(11000, 11010),
		cell("fixed", "good", pair, [][]int{each(20, 297), each(20, 691)}, nil),
		cell("kill", "client.1", pair, [][]int{each(20, 300), each(20, 300)}, map[string]any{"victim": map[string]any{"at": 500000000}}),
		cell("floors", "best-effort", pair, [][]int{each(40, 295), each(40, 690)}, map[string]any{"policy": "best-effort"}))
	if status != 0 {
		t.Errorf("all bars are held: exit status %d", status)
	}
	want(t, out, "PASS lone.gemm", "0.9990 of no turns", "by runs 0.9989, 0.9991", "PASS fixed.good", "29.70, 69.10: off 0.90 in the mean, 0.90 in a window; in all 0.988",
		"PASS kill.client.1", "PASS floor.best-effort", "4 of 4 bars held")

	late := each(20, 297)
	for i := range 10 {
		late[i] = 270 // a second too little, made good for by the next
		late[i+10] = 324
	}
	starved := each(40, 300)
	for i := 10; i < 22; i++ {
		starved[i] = 250
	}
	slow := cell("kill", "worker.1", pair, [][]int{each(20, 300), each(20, 300)}, map[string]any{"victim": map[string]any{"at": 500000000}})
	slow["results"].([]any)[1].(map[string]any)["gap_us"].([]int)[6] = 100000
	out, status = summary(t, lone(10000, 10120),
		cell("fixed", "mean", pair, [][]int{each(20, 285), each(20, 700)}, nil),
		cell("fixed", "window", pair, [][]int{late, each(20, 700)}, nil),
		cell("fixed", "all", []any{one}, [][]int{each(20, 284)}, nil),
		slow, cell("floors", "best-effort", pair, [][]int{starved, each(40, 690)}, map[string]any{"policy": "best-effort"}),
		map[string]any{"kind": "vgg", "cell": "2.halves", "gpu": 0, "error": "it broke", "times": 5})
	if status != 1 {
		t.Errorf("no bar is held: exit status %d", status)
	}
	want(t, out, "FAIL lone.gemm", "FAIL fixed.mean", "off 1.50 in the mean", "FAIL fixed.window", "off 0.30 in the mean, 3.00 in a window",
		"FAIL fixed.all", "in all 0.947", "FAIL kill.worker.1", "FAIL floor.best-effort", "below the floor for 1.2, 0.0 s", "FAIL vgg.2.halves", "it broke", "0 of 7 bars held")
}

// A round in which nothing was done, as on a machine that is busy otherwise, is no reason to print nothing.
func TestSharesOfNothing(t *testing.T) {
	lone := func(turns, off []float64) map[string]any {
		return map[string]any{"kind": "lone", "cell": "gemm", "gpu": 0, "load": "gemm", "speeds": map[string]any{"turns": turns, "off": off}}
	}
	out, status := summary(t, lone([]float64{900, 1000}, []float64{0, 1000}))
	if status != 0 {
		t.Errorf("what ran was as fast: exit status %d", status)
	}
	want(t, out, "PASS lone.gemm", "1 of 1 bars held")
	out, status = summary(t, lone([]float64{900, 1000}, []float64{0, 0}))
	if status != 1 {
		t.Errorf("nothing to compare with: exit status %d", status)
	}
	want(t, out, "FAIL lone.gemm", "nan of no turns")
}

// Thieves are judged by what their neighbour lost by them, and that by its share.
func TestSharesTheft(t *testing.T) {
	theft := func(beside, robbed float64) map[string]any {
		return map[string]any{"kind": "theft", "cell": "endless.8", "gpu": 0, "policy": "fixed", "tenants": []any{[]any{"gemm", 90}, []any{"gemm", 10}},
			"load": "endless", "programs": 8, "alone": 1000, "beside": beside, "robbed": robbed}
	}
	out, status := summary(t, theft(893, 888))
	if status != 0 {
		t.Errorf("half a point was stolen: exit status %d", status)
	}
	want(t, out, "PASS theft.endless.8", "88.80 % delivered beside thieves", "10.50", "1 of 1 bars held")
	for _, robbed := range []float64{880, 850, 0} {
		out, status = summary(t, theft(893, robbed))
		if status != 1 {
			t.Errorf("%v of 893 are left: exit status %d", robbed, status)
		}
		want(t, out, "FAIL theft.endless.8")
	}
}

// Beside lies the thief has to have overrun, and the tenant's session to go on; afterwards the tenant has its share again.
func TestSharesLiar(t *testing.T) {
	liar := func(robbed, after float64, overruns int, wentOn bool) map[string]any {
		of := []any{map[string]any{"shares": nil}, map[string]any{"shares": nil}, map[string]any{"shares": []any{map[string]any{"overruns": overruns}}}}
		return map[string]any{"kind": "theft", "cell": "liar.1", "gpu": 0, "policy": "fixed", "tenants": []any{[]any{"gemm", 85}, []any{"gemm", 10}, []any{"gemm", 5}},
			"load": "endless", "programs": 1, "told": []string{"a lie", "another"}, "alone": 1000, "beside": 850, "robbed": robbed, "after": after, "went_on": wentOn,
			"shares": []any{map[string]any{"of": of}}}
	}
	out, status := summary(t, liar(845, 849, 1, true))
	if status != 0 {
		t.Errorf("half a point was stolen: exit status %d", status)
	}
	want(t, out, "PASS theft.liar.1", "84.50 % delivered beside thieves", "84.90 % after the liar; 1 overruns; its session goes on", "a lie; another", "1 of 1 bars held")
	for _, c := range []map[string]any{liar(835, 849, 1, true), liar(845, 700, 1, true), liar(845, 849, 0, true), liar(845, 849, 1, false)} {
		if out, status = summary(t, c); status != 1 {
			t.Errorf("exit status %d", status)
		}
		want(t, out, "FAIL theft.liar.1")
	}
}

// Every program in a session of kind observe has to be refused.
func TestSharesObserve(t *testing.T) {
	observe := func(robbed float64, tries []string, refused, computed int) map[string]any {
		return map[string]any{"kind": "theft", "cell": "kind", "gpu": 0, "policy": "fixed", "tenants": []any{[]any{"gemm", 90}, []any{"gemm", 10}},
			"load": "kind", "refusal": "not allowed", "alone": 1000, "robbed": robbed, "tries": tries, "refused": refused, "computed": computed}
	}
	out, status := summary(t, observe(893, []string{"3", "3"}, 2, 0))
	if status != 0 {
		t.Errorf("all are refused: exit status %d", status)
	}
	want(t, out, "PASS theft.kind", `2 programs, 2 times "not allowed", 0 of them computed; 89.30 % delivered`, "1 of 1 bars held")
	for _, c := range []map[string]any{observe(850, []string{"3"}, 1, 0), observe(893, []string{}, 0, 0), observe(893, []string{"3"}, 0, 0), observe(893, []string{"3", "0"}, 2, 0), observe(893, []string{"3"}, 1, 1)} {
		if out, status = summary(t, c); status != 1 {
			t.Errorf("exit status %d", status)
		}
		want(t, out, "FAIL theft.kind")
	}
}

// What is bound by launches is judged by what was measured in turn with it, in the same processes.
func TestSharesInTurn(t *testing.T) {
	lone := map[string]any{"kind": "lone", "cell": "small", "gpu": 0, "load": "small",
		"speeds": map[string]any{"turns": []float64{900, 900}, "off": []float64{1000, 1000}}}
	turned := func(on, off []float64) map[string]any {
		return map[string]any{"kind": "switch", "cell": "small", "gpu": 0, "load": "small", "on": on, "off": off}
	}
	both := func(alone, shared [][]float64) map[string]any {
		return map[string]any{"kind": "together", "cell": "25-75.small", "gpu": 0, "policy": "best-effort",
			"tenants": []any{[]any{"small", 25}, []any{"small", 75}}, "alone": alone, "shared": shared}
	}
	// The second round ran on a processor of half the speed, which is nobody's fault.
	out, status := summary(t, lone, turned([]float64{992, 496}, []float64{1000, 500}),
		both([][]float64{{1000, 500}, {800, 400}}, [][]float64{{240, 120}, {584, 292}}))
	if status != 0 {
		t.Errorf("all bars are held: exit status %d", status)
	}
	want(t, out, "PASS switch.small", "0.9920 of no turns, +- 0.0000", "PASS together.25-75.small", "24.00, 73.00: in all 0.970 +- 0.000", "2 of 2 bars held")
	out, status = summary(t, turned([]float64{985, 985}, []float64{1000, 1000}),
		both([][]float64{{1000, 1000}, {800, 800}}, [][]float64{{200, 250}, {560, 576}}))
	if status != 1 {
		t.Errorf("no bar is held: exit status %d", status)
	}
	want(t, out, "FAIL switch.small", "FAIL together.25-75.small", "in all 0.935 +- 0.035", "0 of 2 bars held")
}

// The script with all of Sluice real and the simulated GPU: what it measures there means nothing, but
// daemons, tenants, a death and what is printed of them are those of a real one.
func TestSharesScript(t *testing.T) {
	t.Parallel()
	made, nvcc := built(t)
	state := t.TempDir()
	twins := filepath.Join(state, "twins.so")
	compileTwins(t, twins, "shares/twins.c")
	out, _, logs := script(t, []string{
		"SLUICE_BUILD=" + made, "TMPDIR=/tmp", "NVCC=" + nvcc, "SHARE_COPY_MIB=2",
		"SLUICE_OWNER_LIBCUDA=" + filepath.Join(made, "simgpu/libcuda.so.1"), "SLUICE_OWNER_LIBNVML=" + filepath.Join(made, "simgpu/libnvidia-ml.so.1"),
		"SLUICE_OWNER_KEEP_MEM=0", "SLUICE_SIM_STATE=" + filepath.Join(state, "sim"), "SLUICE_SIM_KERNELS=" + twins,
	}, "gpu-shares.sh", "--part", "try", "--gpus", "0")
	want(t, out, "gpu 0 lone gemm: ", " of no turns", "gpu 0 fixed 30-70.gemm: ", "gpu 0 kill client.1: ", "gemm 30, gemm 70", "bars held")
	raw, err := os.ReadFile(filepath.Join(logs, "shares", "try.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	header, cells, _ := bytes.Cut(raw, []byte("\n"))
	if !bytes.HasPrefix(header, []byte(`{"commit": "`)) {
		t.Errorf("the log begins with %.200s", header)
	}
	if n := bytes.Count(cells, []byte("\n")); n != 3 || bytes.Contains(cells, []byte(`"error"`)) {
		t.Errorf("%d cells, want 3 without an error: %.2000s", n, cells)
	}
	if !bytes.Contains(raw, []byte(`"held": `)) {
		t.Errorf("no time that the daemon counted")
	}
}

// built is the real build, with its simulated GPU, and a compiler for CUDA. The test needs root.
func built(t *testing.T) (made, nvcc string) {
	t.Helper()
	made = os.Getenv("SLUICE_BUILD")
	if made == "" {
		made, _ = filepath.Abs("../build")
	}
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		cache = filepath.Join(made, "cache")
	}
	nvcc = filepath.Join(cache, "cuda-11.8/bin/nvcc")
	for _, f := range []string{filepath.Join(made, "bin/sluiced"), filepath.Join(made, "simgpu/libcuda.so.1"), nvcc} {
		if _, err := os.Stat(f); err != nil {
			t.Fatalf("%v; run make all cuda-programs", err)
		}
	}
	if os.Getuid() != 0 {
		t.Fatal("daemons and their workers need root")
	}
	return made, nvcc
}

// compileTwins makes a library of kernels for the simulated GPU.
func compileTwins(t *testing.T, lib, source string) {
	t.Helper()
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-I../remoting/simgpu", "-o", lib, source).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", source, err, out)
	}
}
