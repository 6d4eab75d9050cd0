package shares

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

// Windows of time in which shares are counted.
const (
	settle  = 500 * time.Millisecond
	window  = 2 * time.Second
	windows = 3
)

// wants is what tenants are to get of the GPU, in percent.
type wants map[*tenant]float64

// How far off a tenant may be in a window and in the mean, in points.
const (
	offWindow = 2.0
	offMean   = 1.0
)

// hold lets the GPU run and checks that every tenant has what it is to have.
func (w *world) hold(want wants) (from, to time.Duration) {
	w.t.Helper()
	w.run(settle)
	from, to = w.run(windows * window)
	return from, w.held(want, from, to)
}

// held checks that tenants had what they are to have, and returns until when. Where a time's ends fall into turns is worth up to 0.2 points of a
// mean: as long as somebody's is off, the GPU runs on, and what counts is a time up to four times as long.
func (w *world) held(want wants, from, to time.Duration) time.Duration {
	w.t.Helper()
	once := to - from
	for to < from+4*once && w.off(want, from, to) {
		to += once
		w.reach(to)
	}
	var said []string
	for n, percent := range want {
		worst := 0.0
		for at := from; at < to; at += window {
			worst = max(worst, math.Abs(w.trace.part(n.tag, at, min(at+window, to))-percent))
		}
		mean := w.trace.part(n.tag, from, to)
		if worst > offWindow || math.Abs(mean-percent) > offMean {
			w.t.Errorf("%s of %d %%, %s: %.2f %% instead of %.2f, in one window %.2f points off", n.load, n.percent, n.policy, mean, percent, worst)
		}
		said = append(said, fmt.Sprintf("%s %d %s: %.2f (%.2f off)", n.load, n.percent, n.policy, mean, worst))
	}
	if w.t.Failed() {
		for n := range want {
			w.t.Logf("tenant %d: %+v", n.tag, w.counters(n))
		}
	}
	w.t.Logf("%s; in all %.2f %%, %d switches", strings.Join(said, ", "), w.trace.part(0, from, to), w.trace.switches(from, to))
	return to
}

// off says whether a tenant's mean is off.
func (w *world) off(want wants, from, to time.Duration) bool {
	for n, percent := range want {
		if math.Abs(w.trace.part(n.tag, from, to)-percent) > offMean {
			return true
		}
	}
	return false
}

// TestFixed: every fixed share, over all loads.
func TestFixed(t *testing.T) {
	w := newWorld(t)
	for _, c := range [][]share{
		{{10, "fixed", "gemm"}, {90, "fixed", "gemm"}},
		{{25, "fixed", "copy"}, {75, "fixed", "mixed"}},
		{{30, "fixed", "small"}, {70, "fixed", "gemm"}},
		{{50, "fixed", "gemm"}, {50, "fixed", "sync"}},
		{{50, "fixed", "graph"}, {50, "fixed", "copy"}},
		{{25, "fixed", "gemm"}, {25, "fixed", "copy"}, {25, "fixed", "small"}, {25, "fixed", "graph"}},
		{{50, "fixed", "gemm"}, {30, "fixed", "copy"}, {20, "fixed", "mixed"}},
	} {
		name := ""
		for _, sh := range c {
			name += fmt.Sprintf(" %d %s", sh.percent, sh.load)
		}
		t.Run(name[1:], func(t *testing.T) {
			w.t = t
			all := w.start(c...)
			want := wants{}
			sum := 0.0
			for _, n := range all {
				want[n] = float64(n.percent)
				sum += want[n]
			}
			w.run(settle)
			from, to := w.run(windows * window)
			to = w.held(want, from, to)
			if got := w.trace.part(0, from, to); got < sum-3 {
				t.Errorf("the GPU worked for %.2f %% of the time", got)
			}
			w.endAll(all)
		})
	}
}

// TestPolicies: who gets what where policies meet, and where not everybody has work.
func TestPolicies(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		name   string
		shares []share
		want   []float64
	}{
		{"alone, best effort", []share{{10, "best-effort", "gemm"}}, []float64{100}},
		{"alone, fixed", []share{{25, "fixed", "gemm"}}, []float64{25}},
		{"best effort by weight", []share{{15, "best-effort", "gemm"}, {45, "best-effort", "copy"}}, []float64{25, 75}},
		{"best effort, other weights", []share{{20, "best-effort", "mixed"}, {40, "best-effort", "gemm"}}, []float64{33.33, 66.67}},
		{"equal", []share{{10, "equal", "gemm"}, {20, "equal", "copy"}, {30, "equal", "small"}}, []float64{33.33, 33.33, 33.33}},
		{"equal and best effort", []share{{10, "equal", "gemm"}, {60, "best-effort", "gemm"}}, []float64{50, 50}},
		{"fixed before best effort", []share{{40, "fixed", "gemm"}, {20, "best-effort", "gemm"}, {20, "best-effort", "copy"}}, []float64{40, 30, 30}},
		{"fixed keeps its idle time", []share{{40, "fixed", "none"}, {20, "best-effort", "gemm"}}, []float64{0, 60}},
		{"fixed lends its idle time", []share{{40, "fixed-lend", "none"}, {20, "best-effort", "gemm"}}, []float64{0, 100}},
		{"nobody fixed borrows", []share{{40, "fixed-lend", "none"}, {50, "fixed-lend", "gemm"}}, []float64{0, 50}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w.t = t
			all := w.start(c.shares...)
			want := wants{}
			for i, n := range all {
				want[n] = c.want[i]
			}
			w.hold(want)
			w.endAll(all)
		})
	}
}

// TestOneOfThree: the example of vGPU, a GPU of 16 GB with three tenants of 4 GB, one of which has work; under every policy,
// and with both meanings of equal.
func TestOneOfThree(t *testing.T) {
	w := newWorld(t)
	all := w.start(share{25, "best-effort", "gemm"}, share{25, "best-effort", "none"}, share{25, "best-effort", "none"})
	for _, c := range []struct {
		policy, equal string
		want          float64
	}{
		{"best-effort", "present", 100},
		{"equal", "present", 33.33},
		{"equal-lend", "present", 100},
		{"fixed", "present", 25},
		{"fixed", "active", 25},
		{"equal", "active", 100},
	} {
		w.set(map[string]string{"shares.equal": c.equal})
		for _, n := range all {
			w.sluice("set", n.lease, "--policy", c.policy)
			n.policy = c.policy
		}
		t.Logf("%s, equal: %s", c.policy, c.equal)
		w.hold(wants{all[0]: c.want, all[1]: 0, all[2]: 0})
	}
	w.endAll(all)
}
