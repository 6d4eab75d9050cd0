package shares

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestObserveTheft: a client that asks for a session of kind observe, which takes no turns, and computes in it gets nothing
// of the GPU, and the tenant beside it keeps its share.
func TestObserveTheft(t *testing.T) {
	w := newWorld(t)
	victim := w.start(share{90, "fixed", "gemm"})
	w.run(settle)

	const tag = 900
	out := filepath.Join(w.host.Node.Dir, "thief.out")
	c := w.host.Run(user+tag, "--fraction", "10", "--policy", "fixed", "--",
		"env", "LD_PRELOAD="+w.s.Opt("kind2.so"), w.s.Opt("tenant"), "gemm", fmt.Sprint(tag))
	c.Stdout, c.Stderr = out, out
	from := w.trace.now()
	thief, err := w.host.Node.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_ = thief.Wait(ctx) // with an error of the program's
	if !thief.Ended() {
		t.Fatal("the thief goes on")
	}
	said := (&tenant{out: out}).said()
	if !strings.Contains(said, "CTX_ACTIVATE: not allowed in a session of kind observe") {
		t.Errorf("the thief was told %q", said)
	}
	_, to := w.run(windows * window)
	w.held(wants{victim[0]: 90}, from, to)
	if got := w.trace.part(tag, from, to); got > 0 {
		t.Errorf("the thief had %.2f %% of the GPU", got)
	}
	w.endAll(victim)
}
