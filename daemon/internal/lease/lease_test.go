package lease

import (
	"testing"
	"time"
)

func TestSameRun(t *testing.T) {
	first := Request{Key: Key{"c", "7", "n1", 1}, Restart: 1, UID: 1000, Type: "h200", Fractions: []Fraction{{Percent: 50}}}
	for what, c := range map[string]struct {
		change func(*Request)
		same   bool
	}{
		"nothing":             {func(*Request) {}, true},
		"another daemon asks": {func(r *Request) { r.Key.Incarnation, r.Nodes, r.Grace = 2, 2, time.Minute }, true},
		"cluster":             {func(r *Request) { r.Key.Cluster = "d" }, false},
		"job":                 {func(r *Request) { r.Key.Job = "8" }, false},
		"node":                {func(r *Request) { r.Key.Node = "n2" }, false},
		"restart":             {func(r *Request) { r.Restart = 2 }, false},
		"user":                {func(r *Request) { r.UID = 1001 }, false},
		"type":                {func(r *Request) { r.Type = "" }, false},
		"percent":             {func(r *Request) { r.Fractions = []Fraction{{Percent: 70}} }, false},
		"memory":              {func(r *Request) { r.Fractions = []Fraction{{Percent: 50, Mem: 1 << 30}} }, false},
		"fractions":           {func(r *Request) { r.Fractions = append(r.Fractions, Fraction{Percent: 50}) }, false},
	} {
		r := first
		if c.change(&r); first.SameRun(r) != c.same || r.SameRun(first) != c.same {
			t.Errorf("%s: one run: %v", what, !c.same)
		}
	}
}
