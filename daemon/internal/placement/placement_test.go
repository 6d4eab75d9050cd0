package placement

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

const gib = 1 << 30

// gpu makes a GPU of which percent and, in the same measure, memory is free.
func gpu(owner string, index int, mem uint64, free uint32) lease.GPU {
	g := lease.GPU{Owner: owner, UUID: fmt.Sprintf("GPU-%s-%d", owner, index), Index: index, Name: "NVIDIA H200", Mem: mem, Overhead: 512 << 20,
		Healthy: true, FreePercent: free, FreeMem: mem * uint64(free) / 100}
	if free < 100 {
		g.Leases = 1
	} else {
		g.FreeMem = mem
	}
	return g
}

func ask(fs ...uint32) lease.Request {
	var r lease.Request
	for _, f := range fs {
		r.Fractions = append(r.Fractions, lease.Fraction{Percent: f})
	}
	return r
}

func places(gs []lease.Grant) string {
	var s []string
	for _, g := range gs {
		s = append(s, strings.TrimPrefix(g.GPU, "GPU-"))
	}
	return strings.Join(s, " ")
}

func TestPlace(t *testing.T) {
	mixed := []lease.GPU{gpu("a", 0, 80*gib, 100), gpu("a", 1, 80*gib, 60), gpu("b", 0, 80*gib, 50), gpu("b", 1, 80*gib, 100), gpu("c", 0, 40*gib, 100), gpu("c", 1, 40*gib, 100)}
	typed := slices.Clone(mixed)
	typed[3].Name = "NVIDIA A100-SXM4-40GB"
	sick := slices.Clone(mixed)
	sick[2].Healthy = false
	same := ask(50, 50)
	same.SameOwner = true
	for _, c := range []struct {
		name  string
		gpus  []lease.GPU
		r     lease.Request
		place lease.Place
		want  string
	}{
		{"fullest that holds it", mixed, ask(50), "", "b-0"},
		{"not the fullest, it has no room", mixed, ask(55), "", "a-1"},
		{"an unhealthy one is passed over", sick, ask(50), "", "a-1"},
		{"the smaller of two whole ones", mixed, ask(70), "", "c-0"},
		{"spread", mixed, ask(10), lease.Spread, "a-0"},
		{"the request goes before the pool", mixed, func() lease.Request { r := ask(10); r.Place = lease.BestFit; return r }(), lease.Spread, "b-0"},
		{"type", typed, func() lease.Request { r := ask(10); r.Type = "a100"; return r }(), "", "b-1"},
		{"minimum memory", mixed, func() lease.Request { r := ask(100); r.MinMem = 50 * gib; return r }(), "", "a-0"},
		{"each another GPU, whole ones stay whole", mixed, ask(50, 50), "", "b-0 a-1"},
		{"whole GPUs at one owner", mixed, ask(100, 100), "", "c-0 c-1"},
		{"same owner", mixed, same, "", "b-0 b-1"},
		{"bytes alone", mixed, lease.Request{Fractions: []lease.Fraction{{Mem: 30 * gib}}}, "", "b-0"},
		{"order of the fractions is kept", mixed, ask(10, 60), "", "b-0 a-1"},
	} {
		gs, err := Place(c.gpus, c.r, c.place)
		if err != nil || places(gs) != c.want {
			t.Errorf("%s: %s %v, want %s", c.name, places(gs), err, c.want)
		}
		for i, g := range gs {
			if g.Order != i || g.Mem%lease.Granule != 0 || g.Percent == 0 {
				t.Errorf("%s: %+v", c.name, g)
			}
		}
	}
}

func TestShare(t *testing.T) {
	for _, c := range []struct {
		f       lease.Fraction
		mem     uint64
		percent uint32
		want    uint64
	}{
		{lease.Fraction{Percent: 50}, 100 << 20, 50, 50 << 20},
		{lease.Fraction{Percent: 33}, 100 << 20, 33, 32 << 20},                 // 16.5 granules: down
		{lease.Fraction{Percent: 50, Mem: 1}, 100 << 20, 50, 2 << 20},          // up
		{lease.Fraction{Mem: 33 << 20}, 100 << 20, 34, 34 << 20},               // up
		{lease.Fraction{Mem: 200 << 20}, 100 << 20, 101, 200 << 20},            // more than there is
		{lease.Fraction{Percent: 100}, 101 << 20, 100, 100 << 20},              // a broken granule is nobody's
		{lease.Fraction{Percent: 100}, 1 << 60, 100, 1 << 60},                  // no overflow
		{lease.Fraction{Percent: 1, Mem: 1 << 63}, 1 << 30, 1, form.MaxGPUMem}, // no overflow
	} {
		p, m := Share(c.f, c.mem)
		if p != c.percent || m != c.want {
			t.Errorf("%+v of %d: %d%% %d, want %d%% %d", c.f, c.mem, p, m, c.percent, c.want)
		}
	}
}

func TestRefusals(t *testing.T) {
	full := []lease.GPU{gpu("a", 0, 80*gib, 20), gpu("b", 0, 40*gib, 30)}
	two := []lease.GPU{gpu("a", 0, 80*gib, 100), gpu("b", 0, 80*gib, 100)}
	sick := []lease.GPU{gpu("a", 0, 80*gib, 100)}
	sick[0].Healthy, sick[0].Why = false, "Xid 79"
	typ := ask(10)
	typ.Type = "MI300"
	large := ask(10)
	large.MinMem = 100 * gib
	same := ask(50, 50)
	same.SameOwner = true
	sameNow := []lease.GPU{gpu("a", 0, 80*gib, 100), gpu("a", 1, 80*gib, 10), gpu("b", 0, 80*gib, 100)}
	for _, c := range []struct {
		name string
		gpus []lease.GPU
		r    lease.Request
		code lease.Code
		say  []string
	}{
		{"none", full, lease.Request{}, lease.Invalid, []string{"0 fractions"}},
		{"65", full, ask(make([]uint32, 65)...), lease.Invalid, []string{"65 fractions"}},
		{"zero", full, ask(0), lease.Invalid, []string{"0%"}},
		{"101", full, ask(101), lease.Invalid, []string{"101%"}},
		{"negative, as it arrives", full, ask(^uint32(0)), lease.Invalid, []string{"4294967295%"}},
		{"as many as a program sees", full, lease.Request{Fractions: slices.Repeat([]lease.Fraction{{Percent: 1}}, 16)}, lease.Never, nil},
		{"one more", full, lease.Request{Fractions: slices.Repeat([]lease.Fraction{{Percent: 1}}, 17)}, lease.Invalid, []string{"17 fractions", "1 to 16"}},
		{"absurd bytes", full, lease.Request{Fractions: []lease.Fraction{{Percent: 1, Mem: ^uint64(0)}}}, lease.Invalid, []string{"no GPU has as much"}},
		{"absurd minimum", full, lease.Request{Fractions: []lease.Fraction{{Percent: 1}}, MinMem: ^uint64(0)}, lease.Invalid, []string{"no GPU"}},
		{"placement", full, lease.Request{Fractions: []lease.Fraction{{Percent: 1}}, Place: "x"}, lease.Invalid, []string{`"x"`}},
		{"policy", full, lease.Request{Fractions: []lease.Fraction{{Percent: 1}}, Policy: "x"}, lease.Invalid, []string{`"x"`}},
		{"no room", full, ask(50), lease.NoRoom, []string{"fraction 50% with 20480 MiB", "gpu 0 of b", "12288 MiB free of 40960", "8192 MiB too little", "20% too little"}},
		{"type", full, typ, lease.Never, []string{`"MI300"`, "NVIDIA H200"}},
		{"minimum", full, large, lease.Never, []string{"102400 MiB", "81920 MiB"}},
		{"too large", full, lease.Request{Fractions: []lease.Fraction{{Percent: 50, Mem: 90 * gib}}}, lease.Never, []string{"gpu 0 of a", "10240 MiB too little"}},
		{"too large, bytes alone", full, lease.Request{Fractions: []lease.Fraction{{Mem: 90 * gib}}}, lease.Never, []string{"of 92160 MiB", "10240 MiB too little"}},
		{"smaller than a context", two, lease.Request{Fractions: []lease.Fraction{{Percent: 50, Mem: 100 << 20}}}, lease.Never, []string{"512 MiB", "514 MiB at least", "414 more"}},
		{"more than GPUs", two, ask(10, 10, 10), lease.Never, []string{"2 GPUs", "3 fractions"}},
		{"same owner", two, same, lease.Never, []string{"--same-owner"}},
		{"same owner now", sameNow, same, lease.NoRoom, []string{"--same-owner"}},
		{"for some", sameNow, ask(50, 50, 50), lease.NoRoom, []string{"first 2 of the 3"}},
		{"sick", sick, ask(10), lease.NoRoom, []string{"Xid 79"}},
		{"no GPU", nil, ask(10), lease.Never, []string{"no GPU"}},
	} {
		gs, err := Place(c.gpus, c.r, "")
		var e *lease.Error
		if gs != nil || !errors.As(err, &e) || e.Code != c.code {
			t.Errorf("%s: %v %v, want %s", c.name, gs, err, c.code)
			continue
		}
		for _, s := range c.say {
			if !strings.Contains(e.Reason, s) {
				t.Errorf("%s: %q does not say %q", c.name, e.Reason, s)
			}
		}
	}
}

// Against all ways to place: what can be placed is, and what is fits.
func TestComplete(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for n := range 5000 {
		var gpus []lease.GPU
		for i := range 1 + rng.IntN(5) {
			g := gpu(string(rune('a'+rng.IntN(2))), i, uint64(1+rng.IntN(4))*10*gib, uint32(rng.IntN(101)))
			g.FreeMem = g.Mem / 100 * uint64(rng.IntN(101))
			g.Healthy = rng.IntN(8) > 0
			gpus = append(gpus, g)
		}
		var r lease.Request
		for range 1 + rng.IntN(4) {
			f := lease.Fraction{Percent: uint32(rng.IntN(101))}
			if f.Percent == 0 || rng.IntN(2) == 0 {
				f.Mem = uint64(1 + rng.IntN(30*gib))
			}
			r.Fractions = append(r.Fractions, f)
		}
		r.SameOwner = rng.IntN(3) == 0
		place := []lease.Place{lease.BestFit, lease.Spread}[rng.IntN(2)]
		gs, err := Place(gpus, r, place)
		if possible := exists(gpus, r, 0, nil); (err == nil) != possible {
			t.Fatalf("%d: possible %v, said %v: %+v %+v", n, possible, err, gpus, r)
		}
		again, _ := Place(gpus, r, place)
		if places(again) != places(gs) {
			t.Fatal("not deterministic")
		}
		var used []*lease.GPU
		for i, gr := range gs {
			k := slices.IndexFunc(gpus, func(g lease.GPU) bool { return g.UUID == gr.GPU })
			g := &gpus[k]
			if slices.Contains(used, g) || !g.Healthy || gr.Percent > g.FreePercent || gr.Mem > g.FreeMem || gr.Mem <= g.Overhead || gr.Mem < r.Fractions[i].Mem {
				t.Fatalf("%d: %+v on %+v", n, gr, g)
			}
			used = append(used, g)
			if r.SameOwner && gr.Owner != gs[0].Owner {
				t.Fatal("two owners")
			}
		}
	}
}

func exists(gpus []lease.GPU, r lease.Request, i int, used []int) bool {
	if i == len(r.Fractions) {
		return true
	}
	for k := range gpus {
		g := &gpus[k]
		c := candidate{gpu: g, freePercent: g.FreePercent, freeMem: g.FreeMem}
		if slices.Contains(used, k) || !g.Healthy || !c.fits(r.Fractions[i]) || r.SameOwner && len(used) > 0 && gpus[used[0]].Owner != g.Owner {
			continue
		}
		if exists(gpus, r, i+1, append(used[:len(used):len(used)], k)) {
			return true
		}
	}
	return false
}

// Decisions against 1,000 GPUs: 125 owners of 8, filled at random.
func BenchmarkPlace(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	var gpus []lease.GPU
	for i := range 1000 {
		gpus = append(gpus, gpu(fmt.Sprintf("gpu%03d", i/8), i%8, uint64(40+40*(i%3))*gib, uint32(rng.IntN(101))))
	}
	typed := ask(25)
	typed.Type = "h200"
	same := ask(50, 50, 50, 50)
	same.SameOwner = true
	for _, c := range []struct {
		name string
		r    lease.Request
	}{{"one", ask(25)}, {"type", typed}, {"four", ask(10, 20, 30, 40)}, {"same-owner", same}, {"no-room", func() lease.Request {
		r := ask(25)
		r.Fractions[0].Mem = 119 * gib
		r.Fractions[0].Percent = 100
		return r
	}()}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				_, _ = Place(gpus, c.r, lease.BestFit)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "decisions/s")
		})
	}
}

// Least is the smallest fraction that Place grants.
func TestLeast(t *testing.T) {
	for _, mem := range []uint64{100 << 20, 8 << 30, 140<<30 + 5} {
		for _, overhead := range []uint64{1, 16 << 20, 501 << 20} {
			g := lease.GPU{UUID: "g", Mem: mem, FreeMem: mem, FreePercent: 100, Healthy: true, Overhead: overhead}
			bytes, percent, ok := Least(&g)
			if !ok {
				t.Fatalf("%+v: not known", g)
			}
			granted := func(f lease.Fraction) bool {
				_, err := Place([]lease.GPU{g}, lease.Request{Key: lease.Key{Cluster: "c", Job: "1", Node: "n"}, Fractions: []lease.Fraction{f}}, "")
				return err == nil
			}
			if bytes > mem {
				continue
			}
			if !granted(lease.Fraction{Mem: bytes}) || granted(lease.Fraction{Mem: bytes - lease.Granule}) {
				t.Errorf("%+v: %d bytes are not the least", g, bytes)
			}
			if !granted(lease.Fraction{Percent: percent}) || percent > 1 && granted(lease.Fraction{Percent: percent - 1}) {
				t.Errorf("%+v: %d percent are not the least", g, percent)
			}
		}
	}
	if _, _, ok := Least(&lease.GPU{Mem: 8 << 30}); ok {
		t.Error("the least of a GPU that was not measured")
	}
}
