package turns

import (
	"math/rand/v2"
	"testing"
	"time"
)

const ms = int64(time.Millisecond)

// A game simulates a view: which tenants have work, and how long turns last.
type game struct {
	view
	held  []int64
	loans []int64
}

func newGame(tenants ...tenant) *game {
	g := &game{held: make([]int64, len(tenants)), loans: make([]int64, len(tenants))}
	g.n, g.credit, g.now = len(tenants), 10*ms, 1e12
	copy(g.tenants[:], tenants)
	for i := range tenants {
		g.tenants[i].present = true
		g.tenants[i].vt = g.now
		if g.tenants[i].lease == 0 { // no part
			g.tenants[i].lease = i
		}
		if g.tenants[i].kind == BestEffort {
			g.tenants[i].lend = true
		}
	}
	g.pool = g.now
	return g
}

func best(w int64) tenant  { return tenant{kind: BestEffort, weight: w, want: true} }
func fixed(w int64) tenant { return tenant{kind: Fixed, weight: w, want: true} }
func equal() tenant        { return tenant{kind: Equal, weight: 1, want: true} }

// of makes a tenant a part of a lease, which is not tenant 0.
func of(lease int, weight int64, p tenant) tenant {
	p.lease, p.weight = lease, weight
	return p
}

func lending(p tenant) tenant {
	p.lend = true
	return p
}

func idle(p tenant) tenant {
	p.want = false
	return p
}

// step simulates one turn of held ns, or the time until one begins.
func (g *game) step(held int64) {
	g.setShares()
	g.levelLoans(0)
	g.pool = max(g.pool, g.now-g.credit)
	i, borrowed, again := g.pick(nobody)
	if i < 0 {
		g.now = again
		return
	}
	g.now += held
	g.charge(i, held, borrowed)
	g.held[i] += held
	if borrowed {
		g.loans[i] += held
	}
}

// play simulates a time and returns what each tenant had of it, in percent.
func (g *game) play(d int64) []float64 {
	clear(g.held)
	from := g.now
	for g.now < from+d {
		g.step(10 * ms)
	}
	var out []float64
	for _, h := range g.held {
		out = append(out, 100*float64(h)/float64(g.now-from))
	}
	return out
}

func near(t *testing.T, name string, got []float64, want ...float64) {
	t.Helper()
	for i := range want {
		if d := got[i] - want[i]; d > 0.4 || d < -0.4 {
			t.Errorf("%s: got %.2f, want %v", name, got, want)
			return
		}
	}
}

func TestShares(t *testing.T) {
	for _, c := range []struct {
		name    string
		tenants []tenant
		want    []float64
	}{
		{"fixed 10/90", []tenant{fixed(1000), fixed(9000)}, []float64{10, 90}},
		{"fixed 25/75", []tenant{fixed(2500), fixed(7500)}, []float64{25, 75}},
		{"fixed 50/50", []tenant{fixed(5000), fixed(5000)}, []float64{50, 50}},
		{"fixed 50/30/20", []tenant{fixed(5000), fixed(3000), fixed(2000)}, []float64{50, 30, 20}},
		{"fixed alone", []tenant{fixed(3000)}, []float64{30}},
		{"fixed beside idle", []tenant{fixed(3000), idle(fixed(7000))}, []float64{30, 0}},
		{"best effort alone", []tenant{best(1000)}, []float64{100}},
		{"best effort by weight", []tenant{best(1000), best(3000), idle(best(6000))}, []float64{25, 75, 0}},
		{"best effort beside fixed", []tenant{fixed(3000), best(100)}, []float64{30, 70}},
		{"best effort beside idle fixed", []tenant{idle(fixed(3000)), best(100)}, []float64{0, 70}},
		{"best effort beside idle fixed that lends", []tenant{idle(lending(fixed(3000))), best(100)}, []float64{0, 100}},
		{"two beside idle fixed", []tenant{idle(fixed(4000)), best(100), best(200)}, []float64{0, 20, 40}},
		{"no borrowing between fixed", []tenant{idle(lending(fixed(5000))), fixed(5000)}, []float64{0, 50}},
		{"equal", []tenant{equal(), equal(), equal()}, []float64{33.3, 33.3, 33.3}},
		{"equal, one idle", []tenant{equal(), equal(), idle(equal())}, []float64{33.3, 33.3, 0}},
		{"equal, one idle that lends", []tenant{equal(), equal(), idle(lending(equal()))}, []float64{50, 50, 0}},
		{"equal and best effort", []tenant{equal(), best(5000)}, []float64{50, 50}},
		{"best effort where all is fixed", []tenant{fixed(10000), best(5000)}, []float64{100, 0}},
		{"parts of 10 and 30 of 50, fixed", []tenant{fixed(5000), fixed(1000), of(1, 1000, fixed(0)), of(1, 3000, fixed(0))}, []float64{50, 10, 10, 30}},
		{"parts, fixed, the lease idle", []tenant{idle(fixed(5000)), idle(fixed(1000)), of(1, 1000, fixed(0)), of(1, 3000, fixed(0))}, []float64{0, 0, 10, 30}},
		{"parts of equal leases", []tenant{equal(), {kind: Equal, weight: 1000, want: true}, of(1, 1000, equal()), of(1, 3000, equal())}, []float64{50, 10, 10, 30}},
		{"parts of an equal lease beside best effort", []tenant{best(100), {kind: Equal, weight: 2000, want: true}, of(1, 3000, equal())}, []float64{50, 20, 30}},
		{"parts of best effort beside an equal lease", []tenant{equal(), best(2000), of(1, 3000, best(0))}, []float64{50, 20, 30}},
		{"parts of best effort", []tenant{best(5000), best(1000), of(1, 1000, best(0)), of(1, 3000, best(0))}, []float64{50, 10, 10, 30}},
		{"best effort where all is lent", []tenant{idle(lending(fixed(10000))), best(5000)}, []float64{0, 100}},
	} {
		near(t, c.name, newGame(c.tenants...).play(100e9), c.want...)
	}
}

// A tenant that has borrowed nothing for a while, because it had no work or because others were not there, has no claim to what was
// lent meanwhile: from the moment that both want it lent time is divided by weight.
func TestBorrowAfterPause(t *testing.T) {
	for _, c := range []struct {
		name    string
		tenants []tenant
		pauses  int
		want    []float64 // when all are there again
	}{
		{"beside a fixed tenant with work", []tenant{fixed(4000), idle(lending(fixed(4000))), best(100), best(100)}, 2, []float64{40, 0, 30, 30}},
		{"by weight", []tenant{fixed(4000), idle(lending(fixed(4000))), best(100), best(300)}, 3, []float64{40, 0, 15, 45}},
		{"of equal tenants", []tenant{equal(), equal(), idle(lending(equal()))}, 0, []float64{50, 50, 0}},
	} {
		g := newGame(c.tenants...)
		g.play(5e9)
		g.tenants[c.pauses].want = false
		g.play(20e9)
		g.tenants[c.pauses].want = true
		g.play(2e9) // time of its own it has saved, for a second
		near(t, c.name, g.play(10e9), c.want...)
	}
}

// The example of the vGPU manual: a card of 16 GB, three tenants of 4 GB, one has work.
func TestOneOfThree(t *testing.T) {
	three := func(p tenant) []tenant { return []tenant{p, idle(p), idle(p)} }
	near(t, "best effort", newGame(three(best(2500))...).play(10e9), 100, 0, 0)
	near(t, "equal, present", newGame(three(equal())...).play(10e9), 33.3, 0, 0)
	near(t, "equal, lent", newGame(three(lending(equal()))...).play(10e9), 100, 0, 0)
	near(t, "fixed", newGame(three(fixed(2500))...).play(10e9), 25, 0, 0)
}

// Turns end a little early or late; those of tenants with long kernels always do. That must not
// decide who is next: every tenant has its turns as regularly as the shares allow, or nearly
// so where the shares are no whole number of turns.
func TestRegular(t *testing.T) {
	for _, c := range []struct {
		shares []int64 // percent
		most   []int64 // turns of others between two of the tenant's own
	}{
		{[]int64{50, 50}, []int64{1, 1}},
		{[]int64{25, 25, 25, 25}, []int64{3, 3, 3, 3}},
		{[]int64{25, 25, 50}, []int64{3, 3, 1}},
		{[]int64{25, 75}, []int64{3, 1}},
		{[]int64{10, 90}, []int64{9, 1}},
		{[]int64{30, 70}, []int64{3, 1}},
		{[]int64{50, 30, 20}, []int64{2, 3, 5}},
		{[]int64{10, 20, 30, 40}, []int64{9, 4, 3, 3}},
	} {
		for seed := range uint64(20) {
			r := rand.New(rand.NewPCG(seed, 2))
			var tenants []tenant
			var late, last []int64
			for _, s := range c.shares {
				tenants = append(tenants, fixed(s*100))
				late = append(late, r.Int64N(3)*ms/10)
				last = append(last, 0)
			}
			g := newGame(tenants...)
			g.credit = 20 * ms
			g.setShares()
			begin := g.now
			for turn := int64(1); turn <= 20000; turn++ {
				i, _, again := g.pick(nobody)
				if i < 0 {
					g.now, turn = again, turn-1
					continue
				}
				if waited := turn - last[i] - 1; turn > 100 && waited > c.most[i] {
					t.Fatalf("%v, seed %d: the one of %d %% has waited for %d turns of others", c.shares, seed, c.shares[i], waited)
				}
				held := g.credit + g.adjust(i) + late[i] + r.Int64N(ms/5) - ms/10
				last[i] = turn
				g.now += held
				g.charge(i, held, false)
				g.held[i] += held
			}
			for i, s := range c.shares {
				if d := float64(g.held[i]) - float64(s)/100*float64(g.now-begin); d > 3*float64(g.credit) || d < -3*float64(g.credit) {
					t.Errorf("%v, seed %d: the one of %d %% has had %.1f ms too much", c.shares, seed, s, d/float64(ms))
				}
			}
		}
	}
}

// Tenants come, go and overstay at random: no tenant with work starves, no time is given twice,
// and fixed tenants have their share and no more.
func TestRandomSteps(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		var tenants []tenant
		left := int64(FullWeight)
		for range 1 + r.IntN(8) {
			switch w := 100 + r.Int64N(4000); {
			case r.IntN(3) == 0:
				tenants = append(tenants, best(w))
			case r.IntN(3) == 0:
				tenants = append(tenants, equal())
			case w <= left:
				left -= w
				tenants = append(tenants, fixed(w))
			default:
				tenants = append(tenants, best(w))
			}
			if r.IntN(3) == 0 {
				tenants[len(tenants)-1].lend = true
			}
		}
		g := newGame(tenants...)
		g.setShares()
		from, last := g.now, make([]int64, len(tenants))
		for i := range last {
			last[i] = g.now
		}
		for range 20000 {
			before := append([]int64(nil), g.held...)
			held := r.Int64N(10*ms) + 1
			if r.IntN(200) == 0 {
				held = r.Int64N(50 * ms)
			}
			g.step(held)
			for i := range tenants {
				if s := &g.tenants[i]; g.held[i] > before[i] || !s.want || s.share == 0 {
					last[i] = g.now
				} else if wait := g.now - last[i]; wait > int64(time.Second)+60*ms*fullShare/s.share {
					t.Fatalf("seed %d: tenant %d (%+v) has waited %v", seed, i, s, time.Duration(wait))
				}
			}
			if i := r.IntN(len(tenants)); r.IntN(50) == 0 {
				s := &g.tenants[i]
				if s.want = !s.want; s.want {
					s.vt = max(s.vt, g.now-g.credit)
					s.borrowedVT = max(s.borrowedVT, g.leastBorrowed(i))
				}
			}
		}
		sum := int64(0)
		for i := range tenants {
			sum += g.held[i]
			if s := &g.tenants[i]; s.kind == Fixed {
				if most := (g.now-from+maxCredit)*s.share/fullShare + 60*ms; g.held[i] > most {
					t.Errorf("seed %d: fixed tenant of %d had %v in %v", seed, s.weight, time.Duration(g.held[i]), time.Duration(g.now-from))
				}
			}
		}
		for i := range tenants {
			if most := float64(g.now-from+maxCredit)*float64(g.most(i))/fullShare + float64(60*ms); float64(g.held[i]) > most {
				t.Errorf("seed %d: tenant %d (%+v) had %v in %v, more than the policies can give it", seed, i, g.tenants[i], time.Duration(g.held[i]), time.Duration(g.now-from))
			}
		}
		if sum > g.now-from {
			t.Errorf("seed %d: %v given in %v", seed, time.Duration(sum), time.Duration(g.now-from))
		}
	}
}
