package turns

import (
	"math/rand/v2"
	"testing"
	"time"
)

const ms = int64(time.Millisecond)

// A game plays a view by itself: who has work, and for how long a turn is kept.
type game struct {
	view
	held  []int64
	loans []int64
}

func newGame(seats ...place) *game {
	g := &game{held: make([]int64, len(seats)), loans: make([]int64, len(seats))}
	g.n, g.credit, g.now = len(seats), 10*ms, 1e12
	copy(g.places[:], seats)
	for i := range seats {
		g.places[i].present = true
		g.places[i].vt = g.now
		if g.places[i].kind == BestEffort {
			g.places[i].lend = true
		}
	}
	g.pool = g.now
	return g
}

func best(w int64) place  { return place{kind: BestEffort, weight: w, want: true} }
func fixed(w int64) place { return place{kind: Fixed, weight: w, want: true} }
func equal() place        { return place{kind: Equal, weight: 1, want: true} }
func lending(p place) place {
	p.lend = true
	return p
}

func idle(p place) place {
	p.want = false
	return p
}

// step lets one turn of so many ns pass, or the time until there is one.
func (g *game) step(held int64) {
	g.shares()
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

// play plays for a time and gives what each seat had of it, in percent.
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
		name  string
		seats []place
		want  []float64
	}{
		{"fixed 10/90", []place{fixed(1000), fixed(9000)}, []float64{10, 90}},
		{"fixed 25/75", []place{fixed(2500), fixed(7500)}, []float64{25, 75}},
		{"fixed 50/50", []place{fixed(5000), fixed(5000)}, []float64{50, 50}},
		{"fixed 50/30/20", []place{fixed(5000), fixed(3000), fixed(2000)}, []float64{50, 30, 20}},
		{"fixed alone", []place{fixed(3000)}, []float64{30}},
		{"fixed beside idle", []place{fixed(3000), idle(fixed(7000))}, []float64{30, 0}},
		{"best effort alone", []place{best(1000)}, []float64{100}},
		{"best effort by weight", []place{best(1000), best(3000), idle(best(6000))}, []float64{25, 75, 0}},
		{"best effort beside fixed", []place{fixed(3000), best(100)}, []float64{30, 70}},
		{"best effort beside idle fixed", []place{idle(fixed(3000)), best(100)}, []float64{0, 70}},
		{"best effort beside idle fixed that lends", []place{idle(lending(fixed(3000))), best(100)}, []float64{0, 100}},
		{"two beside idle fixed", []place{idle(fixed(4000)), best(100), best(200)}, []float64{0, 20, 40}},
		{"no borrowing between fixed", []place{idle(lending(fixed(5000))), fixed(5000)}, []float64{0, 50}},
		{"equal", []place{equal(), equal(), equal()}, []float64{33.3, 33.3, 33.3}},
		{"equal, one idle", []place{equal(), equal(), idle(equal())}, []float64{33.3, 33.3, 0}},
		{"equal, one idle that lends", []place{equal(), equal(), idle(lending(equal()))}, []float64{50, 50, 0}},
		{"equal and best effort", []place{equal(), best(5000)}, []float64{50, 50}},
		{"best effort where all is fixed", []place{fixed(10000), best(5000)}, []float64{100, 0}},
		{"best effort where all is lent", []place{idle(lending(fixed(10000))), best(5000)}, []float64{0, 100}},
	} {
		near(t, c.name, newGame(c.seats...).play(100e9), c.want...)
	}
}

// The example of the vGPU manual: a card of 16 GB, three tenants of 4 GB, one has work.
func TestOneOfThree(t *testing.T) {
	three := func(p place) []place { return []place{p, idle(p), idle(p)} }
	near(t, "best effort", newGame(three(best(2500))...).play(10e9), 100, 0, 0)
	near(t, "equal, present", newGame(three(equal())...).play(10e9), 33.3, 0, 0)
	near(t, "equal, lent", newGame(three(lending(equal()))...).play(10e9), 100, 0, 0)
	near(t, "fixed", newGame(three(fixed(2500))...).play(10e9), 25, 0, 0)
}

// Turns end a little early or late, some seats' always so, because their kernels are long. Who
// is next must not follow from that: with shares that go into turns evenly everybody has
// a turn as regularly as that allows, and with others nearly so.
func TestRegular(t *testing.T) {
	for _, c := range []struct {
		shares []int64 // percent
		most   []int64 // turns of others between two of one's own
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
			var seats []place
			var late, last []int64
			for _, s := range c.shares {
				seats = append(seats, fixed(s*100))
				late = append(late, r.Int64N(3)*ms/10)
				last = append(last, 0)
			}
			g := newGame(seats...)
			g.credit = 20 * ms
			g.shares()
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
				held := g.credit + g.fit(i) + late[i] + r.Int64N(ms/5) - ms/10
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

// Seats that come, go and overstay at random: nobody with work starves, nothing is given
// twice, and fixed seats have what is theirs and no more.
func TestRandomSteps(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		var seats []place
		left := int64(Whole)
		for range 1 + r.IntN(8) {
			switch w := 100 + r.Int64N(4000); {
			case r.IntN(3) == 0:
				seats = append(seats, best(w))
			case r.IntN(3) == 0:
				seats = append(seats, equal())
			case w <= left:
				left -= w
				seats = append(seats, fixed(w))
			default:
				seats = append(seats, best(w))
			}
			if r.IntN(3) == 0 {
				seats[len(seats)-1].lend = true
			}
		}
		g := newGame(seats...)
		g.shares()
		from, last := g.now, make([]int64, len(seats))
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
			for i := range seats {
				if s := &g.places[i]; g.held[i] > before[i] || !s.want || s.share == 0 {
					last[i] = g.now
				} else if wait := g.now - last[i]; wait > int64(time.Second)+60*ms*whole/s.share {
					t.Fatalf("seed %d: seat %d (%+v) has waited %v", seed, i, s, time.Duration(wait))
				}
			}
			if i := r.IntN(len(seats)); r.IntN(50) == 0 {
				s := &g.places[i]
				if s.want = !s.want; s.want {
					s.vt = max(s.vt, g.now-g.credit)
					s.bvt = max(s.bvt, g.leastLoan(i))
				}
			}
		}
		sum := int64(0)
		for i := range seats {
			sum += g.held[i]
			if s := &g.places[i]; s.kind == Fixed {
				if most := (g.now-from+maxCredit)*s.share/whole + 60*ms; g.held[i] > most {
					t.Errorf("seed %d: fixed seat of %d had %v in %v", seed, s.weight, time.Duration(g.held[i]), time.Duration(g.now-from))
				}
			}
		}
		if sum > g.now-from {
			t.Errorf("seed %d: %v given in %v", seed, time.Duration(sum), time.Duration(g.now-from))
		}
	}
}
