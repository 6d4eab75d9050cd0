package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// timeline is what sluice trace writes, as a viewer reads it.
type timeline struct {
	Events []struct {
		Name, Cat, Ph string
		TS, Dur       float64
		PID, TID      int
		Args          map[string]any
	} `json:"traceEvents"`
	Other map[string]float64 `json:"-"`
}

func readTimeline(t *testing.T, path string) (f timeline, counts map[string]int, tracks []string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatalf("%v: %.200s", err, b)
	}
	counts = map[string]int{}
	ends := map[[2]int]float64{}
	for _, e := range f.Events {
		switch e.Ph {
		case "M":
			if name, ok := e.Args["name"].(string); ok && e.Name == "thread_name" {
				tracks = append(tracks, name)
			}
			continue
		case "X":
			at := [2]int{e.PID, e.TID}
			if e.Dur < 0 || e.Cat != "hostfn" && e.TS+1e-3 < ends[at] {
				t.Errorf("%s at %.3f, for %.3f: the one before it in its track ends at %.3f", e.Name, e.TS, e.Dur, ends[at])
			}
			ends[at] = e.TS + e.Dur
		}
		counts[e.Name]++
	}
	return f, counts, tracks
}

// timed runs a program with --timeline.
func (w *worker) timed(o runOptions, out, prog string, args ...string) result {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.command(ctx, o, prog, args...)
	at := slices.Index(cmd.Args, "--")
	cmd.Args = slices.Insert(cmd.Args, at, "--timeline", out)
	return finish(w.t, ctx, cmd)
}

// sent is what a program's processes have sent, by SLUICE_STATS.
func sentBy(t *testing.T, path string) (calls, waits []int) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for in := bufio.NewScanner(f); in.Scan(); {
		var s struct{ Calls, Waits int }
		if err := json.Unmarshal(in.Bytes(), &s); err != nil {
			t.Fatal(err)
		}
		calls, waits = append(calls, s.Calls), append(waits, s.Waits)
	}
	return calls, waits
}

// TestTimeline counts a program's launches, copies and waits in its timeline. The program itself prints and calls the same with it as
// without, and without it nothing is written anywhere.
func TestTimeline(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			w := startWorker(t, workerOptions{network: network})
			dir, tmp := t.TempDir(), t.TempDir()
			out, stats := filepath.Join(dir, "t.json"), filepath.Join(dir, "stats")
			o := runOptions{mem: "512M", env: []string{"TMPDIR=" + tmp, "SLUICE_STATS=" + stats}}
			w.run(runOptions{mem: "512M"}, program("roundtrips"), "pinned") // uploads its image, which the others need not
			plain := w.run(o, program("roundtrips"), "pinned")
			if left, _ := os.ReadDir(tmp); plain.status != 0 || len(left) != 0 {
				t.Fatalf("status %d, files %v: %s", plain.status, left, plain.stderr)
			}
			r := w.timed(o, out, program("roundtrips"), "pinned")
			if r.status != 0 || r.stdout != plain.stdout || !strings.Contains(r.stderr, "timeline of 1 sessions") {
				t.Errorf("status %d\nstdout: %s\nstderr: %s", r.status, r.stdout, r.stderr)
			}
			if left, _ := os.ReadDir(tmp); len(left) != 0 {
				t.Errorf("files are left: %v", left)
			}
			f, counts, tracks := readTimeline(t, out)
			kernel := "_Z6vecaddPKfS0_Pfi"
			if counts[kernel] != 101 || counts["copy from the GPU"] != 100 || counts["fill"] != 1 || counts["cuStreamSynchronize"] != 100 || counts["cuCtxSynchronize"] != 1 {
				t.Errorf("%v", counts)
			}
			timed := 0
			for _, e := range f.Events {
				if e.Name == kernel && e.Args["given"] != nil {
					timed++
				}
				if e.Name == "copy from the GPU" && e.Args["bytes"] != 4.0 {
					t.Errorf("a copy of %v bytes", e.Args["bytes"])
				}
			}
			if timed < 90 || !slices.Contains(tracks, "GPU 0, stream 1") {
				t.Errorf("%d kernels have times of the GPU; tracks %q", timed, tracks)
			}
			calls, waits := sentBy(t, stats)
			if len(calls) != 2 || calls[0] != calls[1] || waits[0] != waits[1] {
				t.Errorf("without and with a timeline %v calls were sent, and %v waited", calls, waits)
			}
		})
	}
}

// TestTimelineOfSeveral: each process of a program has its own part, and one that is killed has what it did until shortly before.
func TestTimelineOfSeveral(t *testing.T) {
	w := startWorker(t, workerOptions{})
	out := filepath.Join(t.TempDir(), "t.json")
	r := w.timed(runOptions{mem: "512M"}, out, program("multi_process"))
	if r.status != 0 || !strings.Contains(r.stderr, "timeline of 5 sessions") {
		t.Errorf("status %d: %s", r.status, r.stderr)
	}
	f, counts, _ := readTimeline(t, out)
	names := map[int]bool{}
	for _, e := range f.Events {
		if e.Name == "process_name" {
			names[e.PID] = true
		}
	}
	if len(names) != 5 || counts["CTX_ACTIVATE"] != 5 {
		t.Errorf("%d processes, %v", len(names), slices.Sorted(maps.Keys(counts)))
	}
	r = w.timed(runOptions{mem: "512M"}, out, "sh", "-c", program("streams_events")+" & until [ -s $SLUICE_TIMELINE/*.trace ]; do sleep 0.01; done; kill -9 $!; wait $!")
	if r.status != 137 || !strings.Contains(r.stderr, "timeline of 1 sessions") {
		t.Errorf("status %d: %s", r.status, r.stderr)
	}
	if _, counts, _ = readTimeline(t, out); counts["IMAGE_LOAD"] == 0 {
		t.Errorf("%v", counts)
	}
}

// TestTimelineTurns: two programs share a GPU by turns; the timeline of one has its turns, and its graphs and host functions.
func TestTimelineTurns(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--turns", "best-effort"}})
	dir := t.TempDir()
	for prog, want := range map[string][]string{"graph": {"graph"}, "streams_events": {"host function", "spin"}} {
		out := filepath.Join(dir, prog+".json")
		if r := w.timed(runOptions{mem: "512M"}, out, program(prog)); r.status != 0 {
			t.Errorf("%s: status %d: %s", prog, r.status, r.stderr)
		}
		_, counts, tracks := readTimeline(t, out)
		for _, name := range append(want, "turn", "waits for a turn") {
			if counts[name] == 0 {
				t.Errorf("%s: no %s: %v", prog, name, counts)
			}
		}
		if !slices.Contains(tracks, "GPU 0, turns") {
			t.Errorf("%s: tracks %q", prog, tracks)
		}
	}
}

// TestTimelineRefused: what cannot be traced is said before the program runs, or after it.
func TestTimelineRefused(t *testing.T) {
	w := startWorker(t, workerOptions{})
	r := w.timed(runOptions{}, filepath.Join(t.TempDir(), "no", "t.json"), program("vecadd"))
	if r.status != 125 || r.stdout != "" || !strings.Contains(r.stderr, "give another file") {
		t.Errorf("status %d: %s%s", r.status, r.stdout, r.stderr)
	}
	out := filepath.Join(t.TempDir(), "t.json")
	r = w.timed(runOptions{}, out, "echo", "no GPU")
	if _, err := os.Stat(out); r.status != 0 || r.stdout != "no GPU\n" || !strings.Contains(r.stderr, "no timeline: no process of the program used a GPU") || err == nil {
		t.Errorf("status %d, %v: %s%s", r.status, err, r.stdout, r.stderr)
	}
}

// TestProfilerNamesTrace: who asks for a profiler is told once in the log what there is instead.
func TestProfilerNamesTrace(t *testing.T) {
	w := startWorker(t, workerOptions{})
	check(t, w.run(runOptions{}, program("profiler")), "profiler: started and stopped\nPASS\n")
	r := w.run(runOptions{env: []string{"SLUICE_LOG=warn"}}, program("profiler"))
	if r.status != 0 || strings.Count(r.stderr, "sluice trace writes a timeline") != 1 {
		t.Errorf("status %d: %s", r.status, r.stderr)
	}
}

// TestTimelineReleases: a shim whose worker has no traces says so, and the program runs as ever.
func TestTimelineReleases(t *testing.T) {
	w := startWorker(t, workerOptions{})
	shim := otherShim(t, func(s string) string {
		return regexp.MustCompile(`0x[0-9a-f]+, (\d+, "trace")`).ReplaceAllString(s, "0x00000001, $1")
	})
	out := filepath.Join(t.TempDir(), "t.json")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r := finish(t, ctx, exec.CommandContext(ctx, built("bin/sluice"), "run", "--worker", w.addr, "--mem", "512M", "--lib", shim, "--timeline", out, "--", program("vecadd")))
	if _, err := os.Stat(out); r.status != 0 || !strings.HasSuffix(r.stdout, "PASS\n") || err == nil ||
		!strings.Contains(r.stderr, "the worker is of a release that has no traces") || !strings.Contains(r.stderr, "no timeline: ") {
		t.Errorf("status %d, %v\nstdout: %s\nstderr: %s", r.status, err, r.stdout, r.stderr)
	}
}

// TestTraceProgram: sluice trace runs a program in the lease that its environment names. A cut of the connection is in the timeline.
func TestTraceProgram(t *testing.T) {
	w := startWorker(t, workerOptions{args: []string{"--grace", "30s"}})
	c := newCutter(t, w, 0, 0, 1, 0)
	out, tmp := filepath.Join(t.TempDir(), "t.json"), t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.direct(ctx, built("bin/sluice"), "trace", "-o", out, "--", program("paused"), "3", "1500")
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+c.addr(), "TMPDIR="+tmp)
	ended := make(chan result, 1)
	go func() { ended <- finish(t, ctx, cmd) }()
	waitFor(t, 30*time.Second, "the trace has begun", func() bool {
		traces, _ := filepath.Glob(filepath.Join(tmp, "*", "*.trace"))
		return len(traces) > 0
	})
	c.cutAll(true) // the program works for seconds
	waitFor(t, 30*time.Second, "the worker has noticed the cut", func() bool { return strings.Contains(w.log.String(), "connection to the client lost") })
	c.cutAll(false)
	r := <-ended
	if r.status != 0 || !strings.Contains(r.stderr, "timeline of 1 sessions") {
		t.Fatalf("status %d: %s%s", r.status, r.stdout, r.stderr)
	}
	_, counts, tracks := readTimeline(t, out)
	if counts["no connection"] == 0 || !slices.Contains(tracks, "connection") {
		t.Errorf("%v, %q", counts, tracks)
	}
	cmd = w.direct(ctx, built("bin/sluice"), "trace", "-o", out, "--", "sh", "-c", "exit 3")
	if r := finish(t, ctx, cmd); r.status != 3 || !strings.Contains(r.stderr, "no timeline") {
		t.Errorf("status %d: %s", r.status, r.stderr)
	}
}
