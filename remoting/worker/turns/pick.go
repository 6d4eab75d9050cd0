package turns

// Who is next.
//
// Every seat has a share of the GPU (shares), and a virtual time: the time by the clock
// that its own share would have taken for what it had. A seat that is not ahead of the
// clock has time of its own; the one furthest behind is next, fixed seats before others.
// Whoever has work therefore gets its share, however unevenly it asks.
//
// No turn ends to the microsecond. Seats that are level but for that would be next by
// chance, and one of them twice in a row now and then. So a turn of a seat's own is as much
// longer or shorter as brings its virtual time to a whole number of turns, and those of
// seats with equal shares are apart by as much as they can be (fit). What is about level
// all the same counts as level, and then who has the larger share comes first: it has less
// long to wait. Every seat then has its turns about as regularly as its share allows.
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

// level is by how much two virtual times may differ and still count as the same, ns.
func (v *view) level() int64 { return v.credit / 4 }

// due is when a seat has time of its own.
func (v *view) due(s *place) int64 { return v.bound(s.vt, s.share) - v.level() }

// own says whether a seat has time of its own.
func (v *view) own(i int) bool {
	s := &v.places[i]
	return s.share > 0 && v.due(s) <= v.now
}

// lends says whether there is borrowed time.
func (v *view) lends() bool {
	return v.rate >= whole || v.rate > 0 && v.pool <= v.now
}

// fit is by how much a turn that seat i has of its own is to be longer than a quantum, ns.
func (v *view) fit(i int) int64 {
	s := &v.places[i]
	if !s.present || s.share == 0 {
		return 0
	}
	var before, alike int64
	for k := range v.n {
		if o := &v.places[k]; o.present && o.share == s.share {
			alike++
			if k < i {
				before++
			}
		}
	}
	turn := v.credit * whole / s.share // of virtual time
	offset, vt := turn*before/alike, v.bound(s.vt, s.share)
	next := (vt-offset+turn+turn/2)/turn*turn + offset
	return min(max((next-vt)*s.share/whole-v.credit, -v.credit/8), v.credit/8)
}

// What a seat with work may have now; more comes first.
const (
	noTime   = iota
	borrows  // what others lend
	ownTime  // time of its own
	ownFixed // and it is fixed
)

func (v *view) rank(i int) int {
	s := &v.places[i]
	switch {
	case v.own(i) && s.kind == Fixed:
		return ownFixed
	case v.own(i):
		return ownTime
	case s.kind != Fixed && v.lends():
		return borrows
	}
	return noTime
}

// pick gives the next seat, or nobody and when to ask again; except is not chosen.
func (v *view) pick(except int) (seat int, borrowed bool, again int64) {
	again = v.now + int64(time.Second)
	best, least := noTime, int64(0)
	var ranks [MaxSeats]int
	for i := range v.n {
		s := &v.places[i]
		if !s.present || !s.want || i == except {
			continue
		}
		if s.out > v.now {
			again = min(again, s.out)
			continue
		}
		r := v.rank(i)
		if r == noTime {
			if s.share > 0 {
				again = min(again, v.due(s))
			}
			if s.kind != Fixed && v.rate > 0 {
				again = min(again, v.pool)
			}
			continue
		}
		ranks[i] = r
		if t := v.time(s, r); r > best || r == best && t < least {
			best, least = r, t
		}
	}
	if best == noTime {
		return nobody, false, max(again, v.now+1)
	}
	seat = nobody
	for i := range v.n {
		s := &v.places[i]
		if ranks[i] == best && v.time(s, best)-least <= v.level() && (seat == nobody || v.before(s, &v.places[seat], best)) {
			seat = i
		}
	}
	return seat, best == borrows, max(again, v.now+1)
}

// time is what seats of a rank are compared by.
func (v *view) time(s *place, rank int) int64 {
	if rank == borrows {
		return s.bvt
	}
	return v.bound(s.vt, s.share)
}

// before says which of two that are about level comes first.
func (v *view) before(s, o *place, rank int) bool {
	if s.share != o.share {
		return s.share > o.share
	}
	return v.time(s, rank) < v.time(o, rank)
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
