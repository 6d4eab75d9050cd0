package turns

// Who is next.
//
// Every tenant has a share of the GPU (setShares) and a virtual time: the clock time in which its
// share alone would have given it what it has held. A tenant whose virtual time is not ahead of
// the clock has time of its own. Of those the one furthest behind is next, fixed tenants
// before others. So every tenant with work gets its share, however unevenly it asks for it.
//
// Turns do not end to the microsecond. Between tenants that are level but for that, chance would
// decide, and now and then one of them would have two turns in a row. So a turn of a tenant's own
// time is made a little longer or shorter, to bring its virtual time to a whole number of turns;
// tenants with equal shares are kept as far apart as possible (adjust). Virtual times that still
// differ by little count as equal, and then the larger share comes first: its next turn is due
// sooner. Thus every tenant's turns come about as regularly as its share allows.
//
// What is left when no tenant with work has time of its own is borrowed time. Tenants that
// are not fixed get it, by weight, and with a virtual time of its own: a tenant does not pay for
// borrowed time with its own time. Nobody collects a claim to borrowed time (levelLoans). Only lent
// time can be borrowed: all time but that of tenants that do not lend comes from one pool, which has
// a virtual time too.

import "time"

const (
	// fullShare is the share of a whole GPU: shares are in parts per million.
	fullShare = 1000000
	// maxDebt is the most GPU time by which turns can bring a tenant ahead of its share, ns. What
	// work takes after its turn is a debt of its own, which has no bound (debt.go).
	maxDebt = int64(time.Second)
	// maxCredit is how far a virtual time can be behind the clock, ns.
	maxCredit = int64(time.Second)
	// maxHeld is the most that one turn is charged, ns.
	maxHeld = int64(60 * time.Second)
)

// A tenant is a tenant's record as a decision sees it.
type tenant struct {
	lease          int // the tenant that it is a part of, or itself
	kind           Kind
	weight         int64
	lend           bool
	present        bool
	want           bool
	share          int64 // of fullShare
	vt, borrowedVT int64 // ns
	skipUntil      int64
	owed           int64 // the time until which its debt lasts, ns
	unresponsive   bool  // it has not taken several turns in a row, and is skipped
}

// A view is a schedule as a decision sees it.
type view struct {
	tenants [MaxTenants]tenant
	n       int
	pool    int64 // the pool's virtual time
	rate    int64 // the pool's share
	credit  int64 // a turn's length, ns
	now     int64
}

// load reads the schedule into an empty view.
func (p *pages) load(v *view, now int64) {
	v.now, v.n, v.credit = now, p.tenants(), p.quantum()
	active := p.policy.flags.Load()&equalActive != 0
	for i := range v.n {
		w := p.policyOf(i)
		if !w.present() {
			continue
		}
		pol, rec, s := w.policy(), p.tenant(i), &v.tenants[i]
		*s = tenant{
			lease: p.leaseOf(i), kind: pol.Kind, weight: int64(pol.Weight), present: true,
			lend: pol.Lend || pol.Kind == BestEffort || pol.Kind == Equal && active,
			vt:   int64(rec.vt.Load()), borrowedVT: int64(rec.borrowedVT.Load()),
			skipUntil: int64(rec.skipUntil.Load()),
			owed:      p.debt(i).until(i, w.gen()),
		}
		if s.skipUntil > now+nextSkip {
			s.skipUntil = 0
		}
		s.unresponsive = s.skipUntil > now && rec.misses.Load() > 1
		s.borrowedVT &= 1<<60 - 1
	}
	for i := range p.members() {
		if p.member(i).want.Load() == 0 {
			continue
		}
		if s := p.tenantOf(i); s >= 0 && s < v.n {
			v.tenants[s].want = true
		}
	}
	if v.pool = max(int64(p.state.pool.Load()), now-v.credit); v.pool > now+maxDebt {
		v.pool = now
	}
	v.setShares()
	v.levelLoans(p.grace())
}

// levelLoans raises the virtual times of borrowed time that lag behind another tenant's by more than a turn of that
// tenant, with its grace, explains. Without it a tenant that paused would have all that is lent until it had caught up,
// and one that was alone would have nothing until the others had.
func (v *view) levelLoans(grace int64) {
	var first, second int64 // the two highest to which tenants raise others, and who raises to the first
	ahead := nobody
	borrows := func(s *tenant) bool { return s.present && s.kind != Fixed }
	for i := range v.n {
		s := &v.tenants[i]
		if !borrows(s) {
			continue
		}
		switch least := s.borrowedVT - (v.credit+grace)*fullShare/s.borrowWeight() - v.tolerance(); {
		case least > first:
			first, second, ahead = least, first, i
		case least > second:
			second = least
		}
	}
	for i := range v.n {
		switch s := &v.tenants[i]; {
		case !borrows(s):
		case i == ahead:
			s.borrowedVT = max(s.borrowedVT, second)
		default:
			s.borrowedVT = max(s.borrowedVT, first)
		}
	}
}

// setShares works out what each tenant has of the GPU. A lease and its parts count as one lease, and divide what it has by their weights.
func (v *view) setShares() {
	var fixed, sum, nequal, nbest int64
	var equal, best [MaxTenants]int64 // weights of a lease and its parts together
	for i := range v.n {
		switch s := &v.tenants[i]; {
		case !s.present:
		case s.kind == Fixed:
			fixed += s.weight * (fullShare / FullWeight)
		case s.kind == Equal:
			if equal[s.lease] == 0 {
				nequal++
			}
			equal[s.lease] += s.weight
		default:
			if best[s.lease] == 0 {
				nbest++
			}
			best[s.lease] += s.weight
			sum += s.weight
		}
	}
	rest := max(fullShare-fixed, 0)
	kept := int64(0)
	for i := range v.n {
		s := &v.tenants[i]
		switch {
		case !s.present:
			continue
		case s.kind == Fixed:
			s.share = s.weight * (fullShare / FullWeight)
		case s.kind == Equal:
			s.share = rest / (nequal + nbest) * s.weight / equal[s.lease]
		default:
			s.share = rest * nbest / (nequal + nbest) * s.weight / sum
		}
		if !s.lend {
			kept += s.share
		}
	}
	if v.rate = max(fullShare-kept, 0); v.rate < fullShare/FullWeight {
		v.rate = 0 // a rounding error
	}
}

// most returns the largest part of the GPU that tenant i can have. It follows from the policies alone, which sessions cannot write.
func (v *view) most(i int) int64 {
	s := &v.tenants[i]
	switch {
	case s.kind == Fixed:
		return s.share
	case s.lend:
		return max(s.share, v.rate) // its own time is part of what is lent
	}
	return min(s.share+v.rate, fullShare)
}

// bound returns a virtual time within its limits. A virtual time beyond the debt limit is
// corrupt, or from another clock; it is set to now.
func (v *view) bound(vt, share int64) int64 {
	if share > 0 && vt > v.now+maxDebt*fullShare/share {
		return v.now
	}
	return max(vt, v.now-maxCredit)
}

// vt returns a tenant's virtual time: no less than the time until which its debt lasts.
func (v *view) vt(s *tenant) int64 { return max(v.bound(s.vt, s.share), s.owed) }

// limitDebt returns the virtual time of a tenant that has just been charged, at most at the
// debt limit.
func (v *view) limitDebt(vt, share int64) int64 { return min(vt, v.now+maxDebt*fullShare/share) }

// charge notes in the view that a tenant held the token.
func (v *view) charge(i int, held int64, borrowed bool) {
	s := &v.tenants[i]
	if !s.present {
		return
	}
	if borrowed || s.share == 0 {
		s.borrowedVT += held * fullShare / s.borrowWeight()
	} else {
		s.vt = v.limitDebt(v.vt(s)+held*fullShare/s.share, s.share)
	}
	if (borrowed || s.lend) && v.rate > 0 {
		v.pool = min(v.pool+held*fullShare/v.rate, v.now+maxDebt)
	}
}

// borrowWeight is the weight of a tenant among those that borrow.
func (s *tenant) borrowWeight() int64 {
	if s.share > 0 {
		return s.share
	}
	return s.weight
}

// tolerance is by how much two virtual times may differ and still count as equal, ns.
func (v *view) tolerance() int64 { return v.credit / 4 }

// due returns when a tenant has time of its own.
func (v *view) due(s *tenant) int64 { return v.vt(s) - v.tolerance() }

// own says whether a tenant has time of its own.
func (v *view) own(i int) bool {
	s := &v.tenants[i]
	return s.share > 0 && v.due(s) <= v.now
}

// lends says whether there is time to borrow.
func (v *view) lends() bool {
	return v.rate >= fullShare || v.rate > 0 && v.pool <= v.now
}

// adjust returns how much longer than a quantum a turn of tenant i's own time is to be, ns; it may
// be negative. The turn is to bring the tenant's virtual time to a multiple of a turn's virtual time,
// shifted so that tenants with equal shares are evenly apart.
func (v *view) adjust(i int) int64 {
	s := &v.tenants[i]
	if !s.present || s.share == 0 {
		return 0
	}
	var before, alike int64
	for k := range v.n {
		if o := &v.tenants[k]; o.present && o.share == s.share {
			alike++
			if k < i {
				before++
			}
		}
	}
	turn := v.credit * fullShare / s.share // in virtual time
	offset, vt := turn*before/alike, v.vt(s)
	next := (vt-offset+turn+turn/2)/turn*turn + offset
	return min(max((next-vt)*s.share/fullShare-v.credit, -v.credit/8), v.credit/8)
}

// The ranks of tenants with work; a higher rank comes first.
const (
	rankNone     = iota
	rankBorrows  // it may borrow time
	rankOwn      // it has time of its own
	rankOwnFixed // and its share is fixed
)

func (v *view) rank(i int) int {
	s := &v.tenants[i]
	switch {
	case v.own(i) && s.kind == Fixed:
		return rankOwnFixed
	case v.own(i):
		return rankOwn
	case s.kind != Fixed && v.lends() && (s.owed <= v.now || !v.othersWant(i)):
		return rankBorrows
	}
	return rankNone
}

// pick returns the next tenant, or nobody and when to pick again. It does not choose except.
func (v *view) pick(except int) (next int, borrowed bool, again int64) {
	again = v.now + int64(time.Second)
	best, least := rankNone, int64(0)
	var ranks [MaxTenants]int
	for i := range v.n {
		s := &v.tenants[i]
		if !s.present || !s.want || i == except {
			continue
		}
		if s.skipUntil > v.now {
			again = min(again, s.skipUntil)
			continue
		}
		r := v.rank(i)
		if r == rankNone {
			if s.share > 0 {
				again = min(again, v.due(s))
			}
			if s.kind != Fixed && v.rate > 0 && s.owed <= v.now {
				again = min(again, v.pool)
			}
			continue
		}
		ranks[i] = r
		if t := v.virtualTime(s, r); r > best || r == best && t < least {
			best, least = r, t
		}
	}
	if best == rankNone {
		return nobody, false, max(again, v.now+1)
	}
	next = nobody
	for i := range v.n {
		s := &v.tenants[i]
		if ranks[i] == best && v.virtualTime(s, best)-least <= v.tolerance() && (next == nobody || v.before(s, &v.tenants[next], best)) {
			next = i
		}
	}
	return next, best == rankBorrows, max(again, v.now+1)
}

// virtualTime returns the virtual time by which tenants of a rank are compared.
func (v *view) virtualTime(s *tenant, rank int) int64 {
	if rank == rankBorrows {
		return s.borrowedVT
	}
	return v.vt(s)
}

// before says whether s comes before o; their virtual times are about equal.
func (v *view) before(s, o *tenant, rank int) bool {
	if s.share != o.share {
		return s.share > o.share
	}
	return v.virtualTime(s, rank) < v.virtualTime(o, rank)
}
