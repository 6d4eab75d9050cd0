package turns

// How the token moves, and how it is taken from tenants that keep it too long.

import (
	"sync/atomic"
	"time"
)

const (
	// takeLimit is how long a tenant may wait before it takes the turn that it is given.
	takeLimit = int64(time.Millisecond)
	// A tenant that has not taken its turn is skipped for firstSkip, and for nextSkip from
	// the second time in a row on.
	firstSkip = int64(20 * time.Millisecond)
	nextSkip  = int64(time.Second)
	// future is how far ahead of the clock the begin of a turn may be and still be believed.
	future = int64(time.Second)
)

// onStep is where tests let a process die: between two steps of a change to a schedule.
var onStep func(name string)

func step(name string) {
	if onStep != nil {
		onStep(name)
	}
}

// pass ends the turn t, charges it and gives the token to the next tenant, but not to except.
// It returns false if t was over already: of several processes that pass t on at the same
// time, exactly one succeeds.
func (p *pages) pass(t token, now int64, except int) bool {
	for range 3 { // once is enough unless somebody requests a turn meanwhile
		var v view
		p.load(&v, now)
		tenant, held := t.tenant(), p.held(t, now)
		if tenant >= 0 {
			v.charge(tenant, held, t.borrowed())
		}
		next, borrowed := p.nextAlive(&v, except)
		n := packToken(next, borrowed, t.after(now))
		step("decided")
		if !p.state.token.CompareAndSwap(uint64(t), uint64(n)) {
			return false
		}
		step("passed")
		p.noteTime(now)
		if tenant >= 0 {
			p.charge(&v, tenant, t, held)
		}
		step("charged")
		if next >= 0 {
			p.count(next, cTurns).Add(1)
			wake(&p.tenant(next).wakeup)
			return true
		}
		// The token is free. A session that requested a turn after the view was loaded may
		// have seen the token as it was before, and rely on its holder.
		var again view
		p.load(&again, now)
		if next, _, _ := again.pick(except); next < 0 {
			return true
		}
		t = n
	}
	return true
}

// held returns how long a turn has lasted.
func (p *pages) held(t token, now int64) int64 {
	return min(max(now-t.begin(), 0), maxHeld)
}

// nextAlive picks the next tenant. It frees the members of dead sessions that it meets.
func (p *pages) nextAlive(v *view, except int) (int, bool) {
	for range MaxTenants {
		next, borrowed, _ := v.pick(except)
		if next < 0 || p.wanted(next) {
			return next, borrowed
		}
		v.tenants[next].want = false
	}
	return nobody, false
}

// wanted says whether a living session of a tenant wants the token. It frees those of dead
// processes.
func (p *pages) wanted(tenant int) bool {
	some := false
	for i := range p.members() {
		if p.member(i).want.Load() != 0 && p.tenantOf(i) == tenant && !p.freeIfDead(i, false) {
			some = true
		}
	}
	return some
}

// charge writes a turn that has ended to its tenant's account. The process that ended the turn
// does so; if it dies right here, one turn is not charged.
func (p *pages) charge(v *view, tenant int, t token, held int64) {
	s, rec := &v.tenants[tenant], p.tenant(tenant)
	p.count(tenant, cHeld).Add(uint64(held))
	// While no other tenant has work, a long turn harms nobody.
	if over := held - p.quantum(); over > p.grace() && v.othersWant(tenant) {
		p.count(tenant, cOverruns).Add(1)
		raise(p.count(tenant, cLongest), uint64(over))
	}
	if !s.present {
		return
	}
	// The view's numbers are of this turn; little has been added since.
	if t.borrowed() || s.share == 0 {
		rec.borrowedVT.Store(uint64(s.borrowedVT))
		p.count(tenant, cBorrowed).Add(uint64(held))
		p.countLent(v, tenant, held)
	} else {
		v.chargeOwn(s, rec, held)
	}
	if t.borrowed() || s.lend {
		p.state.pool.Store(uint64(v.pool))
	}
}

// chargeOwn adds what a tenant has held of its own time to its virtual time, to which others may
// have given time back meanwhile (credit).
func (v *view) chargeOwn(s *tenant, rec *tenantState, held int64) {
	for range 10 {
		old := rec.vt.Load()
		now := v.limitDebt(max(v.bound(int64(old), s.share), s.owed)+held*fullShare/s.share, s.share)
		if rec.vt.CompareAndSwap(old, uint64(now)) {
			return
		}
	}
	rec.vt.Store(uint64(s.vt))
}

// othersWant says whether a tenant other than i has work and waits for a turn.
func (v *view) othersWant(i int) bool {
	for k := range v.n {
		if k != i && v.tenants[k].waits() {
			return true
		}
	}
	return false
}

// waits says whether the tenant has work and takes the turns that it is given. The sessions of one that does not are stopped.
func (s *tenant) waits() bool { return s.present && s.want && !s.unresponsive }

// countLent divides borrowed time among the tenants that have lent it.
func (p *pages) countLent(v *view, borrower int, held int64) {
	sum := int64(0)
	lends := func(i int) bool {
		s := &v.tenants[i]
		return i != borrower && s.present && s.lend && !s.want && s.share > 0
	}
	for i := range v.n {
		if lends(i) {
			sum += v.tenants[i].share
		}
	}
	for i := range v.n {
		if lends(i) {
			p.count(i, cLent).Add(uint64(held * v.tenants[i].share / sum))
		}
	}
}

// raise sets a word to n if it is less.
func raise(w *atomic.Uint64, n uint64) {
	for range 10 {
		old := w.Load()
		if n <= old || w.CompareAndSwap(old, n) {
			return
		}
	}
}

// noteTime notes a simulated GPU's time for the owner, which cannot read that clock.
func (p *pages) noteTime(now int64) {
	if p.state.clock.Load() == clockSimulated {
		raise(&p.state.now, uint64(now))
	}
}

// police ends a turn that was not taken, that outlasts its grace, or whose tenant or sessions are
// gone. It returns until when the turn is to be left alone; 0: it is over.
func (p *pages) police(t token, now int64) int64 {
	tenant, begin := t.tenant(), t.begin()
	if tenant < 0 {
		p.pass(t, now, nobody)
		return 0
	}
	if begin > now+future || !p.policyOf(tenant).present() {
		p.revoke(t, now)
		return 0
	}
	end := begin + p.quantum() + p.grace()
	if now >= end {
		p.revoke(t, now)
		return 0
	}
	rec := p.tenant(tenant)
	if token(rec.taken.Load()) == t {
		if p.abandoned(tenant, t) {
			p.revoke(t, now)
			return 0
		}
		return end
	}
	if now < begin+takeLimit {
		return begin + takeLimit
	}
	// Its sessions are stopped, or slow to wake. It is charged for this moment only, but
	// skipped for a while: other tenants have work, and the next one may be unresponsive too.
	skip := firstSkip
	if rec.misses.Add(1) > 1 {
		skip = nextSkip
	}
	if rec.skipUntil.Swap(uint64(now+skip)) == 0 && !p.excusesStop(tenant, begin, now) {
		rec.unresponsive.Store(uint64(begin))
	}
	p.pass(t, now, tenant)
	return 0
}

// abandoned says whether no session is left that works in a tenant's turn t.
func (p *pages) abandoned(tenant int, t token) bool {
	for i := range p.members() {
		if p.member(i).open.Load() != 0 && p.tenantOf(i) == tenant && !p.freeIfDead(i, false) {
			return false
		}
	}
	// The session that has just closed it is about to pass it on.
	return token(p.tenant(tenant).closing.Load()) != t
}

// revoke takes the token away.
func (p *pages) revoke(t token, now int64) {
	if tenant := t.tenant(); p.pass(t, now, nobody) && tenant >= 0 {
		p.count(tenant, cRevoked).Add(1)
	}
}
