package turns

// Who is next.
//
// Every seat has a share of the GPU (shares), and a virtual time: the time by the clock
// that its own share would have taken for what it had. A seat that is not ahead of the
// clock has time of its own; the one furthest behind is next, fixed seats before others.
// Whoever has work therefore gets its share, however unevenly it asks.
//
// What is left when nobody with work has time of its own is borrowed time, for seats
// that are not fixed, by weight among themselves and apart from their virtual time: who
// borrows does not pay with time of its own. It is left only as far as it is lent: all
// time but that which seats without lend have of their own comes out of one pool, which
// has a clock too.

import "time"

const (
	// whole is a share of a whole GPU; ten thousand are a percent.
	whole = 1000000
	// maxDebt is the most GPU time that a seat can be behind by, ns.
	maxDebt = int64(time.Second)
	// maxCredit is how far behind the clock a seat can be, ns.
	maxCredit = int64(time.Second)
	// maxHeld bounds what one turn can be charged, ns.
	maxHeld = int64(60 * time.Second)
)

// A place is a seat as a decision sees it.
type place struct {
	kind    Kind
	weight  int64
	lend    bool
	present bool
	want    bool
	share   int64 // of whole
	vt, bvt int64 // ns
	out     int64 // not before then
}

// A view is a board as a decision sees it.
type view struct {
	places [MaxSeats]place
	n      int
	pool   int64 // the pool's virtual time
	rate   int64 // the pool's share
	credit int64
	now    int64
}

// shares works out what each seat has of the GPU.
func (v *view) shares() {
	var fixed, sum, nequal, nbest int64
	for i := range v.n {
		switch s := &v.places[i]; {
		case !s.present:
		case s.kind == Fixed:
			fixed += s.weight * (whole / Whole)
		case s.kind == Equal:
			nequal++
		default:
			nbest++
			sum += s.weight
		}
	}
	rest := max(whole-fixed, 0)
	kept := int64(0)
	for i := range v.n {
		s := &v.places[i]
		switch {
		case !s.present:
			continue
		case s.kind == Fixed:
			s.share = s.weight * (whole / Whole)
		case s.kind == Equal:
			s.share = rest / (nequal + nbest)
		default:
			s.share = rest * nbest / (nequal + nbest) * s.weight / sum
		}
		if !s.lend {
			kept += s.share
		}
	}
	if v.rate = max(whole-kept, 0); v.rate < whole/Whole {
		v.rate = 0 // what rounding leaves
	}
}

// bound gives a virtual time within its bounds. One that is further ahead than any debt
// is of another clock, or nonsense: it is the clock's.
func (v *view) bound(vt, share int64) int64 {
	if share > 0 && vt > v.now+maxDebt*whole/share {
		return v.now
	}
	return max(vt, v.now-maxCredit)
}

// owed is bound for a seat that has just been charged: it has no more debt than that.
func (v *view) owed(vt, share int64) int64 { return min(vt, v.now+maxDebt*whole/share) }

// charge notes in the view that a seat held the token.
func (v *view) charge(i int, held int64, borrowed bool) {
	s := &v.places[i]
	if !s.present {
		return
	}
	if borrowed || s.share == 0 {
		s.bvt += held * whole / s.loan()
	} else {
		s.vt = v.owed(v.bound(s.vt, s.share)+held*whole/s.share, s.share)
	}
	if (borrowed || s.lend) && v.rate > 0 {
		v.pool = min(v.pool+held*whole/v.rate, v.now+maxDebt)
	}
}

// loan is the weight of a seat among those that borrow.
func (s *place) loan() int64 {
	if s.share > 0 {
		return s.share
	}
	return s.weight
}

// own says whether a seat has time of its own.
func (v *view) own(i int) bool {
	s := &v.places[i]
	return s.share > 0 && v.bound(s.vt, s.share) <= v.now
}

// lends says whether there is borrowed time.
func (v *view) lends() bool {
	return v.rate >= whole || v.rate > 0 && v.pool <= v.now
}

// pick gives the next seat, or nobody and when to ask again; except is not chosen.
func (v *view) pick(except int) (seat int, borrowed bool, again int64) {
	seat, again = nobody, v.now+int64(time.Second)
	rank := 0 // 1 borrows, 2 has its own time, 3 and is fixed
	for i := range v.n {
		s := &v.places[i]
		if !s.present || !s.want || i == except {
			continue
		}
		if s.out > v.now {
			again = min(again, s.out)
			continue
		}
		r, time := 0, s.vt
		switch {
		case v.own(i) && s.kind == Fixed:
			r = 3
		case v.own(i):
			r = 2
		case s.kind != Fixed && v.lends():
			r, time = 1, s.bvt
		default:
			if s.share > 0 {
				again = min(again, v.bound(s.vt, s.share))
			}
			if s.kind != Fixed && v.rate > 0 {
				again = min(again, v.pool)
			}
			continue
		}
		if r > rank || r == rank && time < v.best(seat, rank) {
			seat, rank = i, r
		}
	}
	return seat, rank == 1, max(again, v.now+1)
}

// best is the time by which seats of a rank are compared.
func (v *view) best(seat, rank int) int64 {
	if rank == 1 {
		return v.places[seat].bvt
	}
	return v.places[seat].vt
}

// look reads the board into an empty view.
func (p *page) look(v *view, now int64) {
	v.now, v.n, v.credit = now, p.seats(), p.quantum()
	active := p.polWord(poFlags).Load()&equalActive != 0
	for i := range v.n {
		w := p.seatPolicy(i)
		if !w.present() {
			continue
		}
		pol := w.policy()
		s := &v.places[i]
		*s = place{
			kind: pol.Kind, weight: int64(pol.Weight), present: true,
			lend: pol.Lend || pol.Kind == BestEffort || pol.Kind == Equal && active,
			vt:   int64(p.seat(i, ssVT).Load()), bvt: int64(p.seat(i, ssBVT).Load()),
			out: int64(p.seat(i, ssOut).Load()),
		}
		if s.out > now+thenOut {
			s.out = 0
		}
		s.bvt &= 1<<60 - 1
	}
	for i := range p.chairs() {
		if p.chair(i, scWant).Load() == 0 {
			continue
		}
		if s := p.chairSeat(i); s >= 0 && s < v.n {
			v.places[s].want = true
		}
	}
	if v.pool = max(int64(p.word(stPool).Load()), now-v.credit); v.pool > now+maxDebt {
		v.pool = now
	}
	v.shares()
}
