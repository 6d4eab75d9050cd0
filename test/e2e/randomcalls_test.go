package e2e

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// forms reads what randomcalls printed: for each form of call the results it had.
func forms(t *testing.T, text string) map[string][]string {
	t.Helper()
	all := make(map[string][]string)
	s := bufio.NewScanner(strings.NewReader(text))
	for s.Scan() {
		form, rest, ok := strings.Cut(s.Text(), " -> ")
		if !ok {
			continue
		}
		result, _, _ := strings.Cut(rest, " ")
		all[form] = append(all[form], result)
	}
	return all
}

// TestRandomCalls makes random calls on the simulated GPU, through the shim and without it. Memory holds what a model
// says after every wait, and each form of call is answered as an H100's driver was seen to answer it: the log of that
// is testdata/randomcalls-h100.txt, made by bench/gpu-calls.sh.
func TestRandomCalls(t *testing.T) {
	log, err := os.ReadFile(filepath.Join("testdata", "randomcalls-h100.txt"))
	if err != nil {
		t.Fatal(err)
	}
	native := forms(t, string(log))
	if len(native) < 2000 {
		t.Fatalf("the log of the H100 has %d forms of calls", len(native))
	}
	compare := func(t *testing.T, r result) {
		t.Helper()
		if r.status != 0 {
			t.Errorf("status %d: %s", r.status, tail(r.stderr, 20))
		}
		got := forms(t, r.stdout)
		if len(got) < 1000 {
			t.Errorf("%d forms of calls only", len(got))
		}
		for form, results := range got {
			want, known := native[form]
			for _, result := range results {
				if known && !slices.Contains(want, result) {
					t.Errorf("%s: %s, a real driver answers %s", form, result, strings.Join(want, " or "))
				}
			}
		}
	}
	t.Run("simulated driver", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, built("test/randomcalls"), "11", "20000")
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+built("simgpu"))
		compare(t, finish(t, ctx, cmd))
	})
	for _, o := range []workerOptions{{network: "tcp"}, {network: "unix"}} {
		t.Run(o.network, func(t *testing.T) {
			w := startWorker(t, o)
			compare(t, w.run(runOptions{mem: "512M"}, built("test/randomcalls"), "12", "12000"))
		})
	}
}
