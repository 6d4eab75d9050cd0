package turns

// Debts: GPU time that a tenant's work took from other tenants after its turns.
//
// A kernel cannot be interrupted, so work may run on beside the next turns. How the driver divides
// the GPU then depends on what runs. The tenant owes all of that time, as if it still had the turn,
// however many of its sessions have such work; the tenant that has the turn is not charged for it.
// If several tenants have such work, the one whose work has been overdue longest is charged.
// A debt is kept as the time of the clock until which the tenant's share pays for it. Until then
// the tenant has no time of its own, and borrows none that others want. There is no bound, and
// neither the end of a session nor a change of the policy clears a debt.
//
// Every session on the GPU can write the state file, and a debt lasts and ends sessions. So a debt is kept
// where only the lease's own sessions and the schedule's owner can write it (DebtStore), and the state file has a copy
// for the other tenants. Those who can read the original restore the copy whenever they look at the schedule.
//
// Where the site wants that (Site.Overrun), a session whose work takes too much ends itself. The
// owner ends those that do not.

import (
	"sync/atomic"
	"time"
)

// maxDebit is the most that is charged at once, ns. Sessions charge what they take every millisecond
// or so.
const maxDebit = int64(time.Hour)

// A debtWord has the time until which a debt lasts, in us, and a sum that tells it from what a
// faulty session may have written there.
type debtWord uint64

const debtTime = 1<<48 - 1

func packDebt(until int64, tenant int, gen uint32) debtWord {
	us := min(uint64(until+999)/1000, debtTime)
	return debtWord(us<<16 | debtSum(us, tenant, gen))
}

func debtSum(us uint64, tenant int, gen uint32) uint64 {
	return (us ^ uint64(tenant+1)<<56 ^ uint64(gen)<<24) * 0x9e3779b97f4a7c15 >> 48
}

// until returns the time until which the debt lasts, ns; 0: there is none.
func (w debtWord) until(tenant int, gen uint32) int64 {
	us := uint64(w >> 16)
	if uint64(w&0xffff) != debtSum(us, tenant, gen) {
		return 0
	}
	return int64(us) * 1000
}

// A DebtStore keeps a lease's debt where no other lease's session can write it.
type DebtStore interface {
	// Debts calls f with two words that are zero at first and outlive every session of the lease. It returns
	// false, and may not have called f, if they cannot be used any more.
	Debts(f func(debt, debited *atomic.Uint64)) bool
	// SetOverdue notes whether work of this session is on the GPU after its turn. A session without overdue work by that word is
	// not ended for overdue work, whatever the state file says.
	SetOverdue(is bool)
	// Excused is like Debts, with the two words of what the lease's overdue work has been excused (excuse.go).
	Excused(f func(until, span *atomic.Uint64)) bool
}

// debts calls f with a tenant's debt and the time until which its overdue work has been charged. These are the originals
// if this process can reach them; then the state file has a copy of the debt afterwards.
func (p *pages) debts(i int, f func(debt, debited *atomic.Uint64)) {
	rec := p.tenant(i)
	if st := p.stores[i]; st != nil && st.Debts(func(debt, debited *atomic.Uint64) {
		f(debt, debited)
		for range 10 { // another session of the lease may change it meanwhile
			d := debt.Load()
			if rec.debt.Load() != d {
				rec.debt.Store(d)
			}
			if debt.Load() == d {
				break
			}
		}
	}) {
		return
	}
	f(&rec.debt, &rec.debited)
}

// debt returns a tenant's debt. It restores the copy in the state file if this process can.
func (p *pages) debt(i int) (w debtWord) {
	if p.stores[i] == nil {
		return debtWord(p.tenant(i).debt.Load())
	}
	p.debts(i, func(debt, _ *atomic.Uint64) { w = debtWord(debt.Load()) })
	return w
}

// debit charges a tenant for the time from one time to another, in which work of one of its sessions
// was on the GPU outside of the tenant's turns. It says whether that was at the cost of others;
// otherwise nothing is owed.
func (p *pages) debit(tenant int, from, to, now int64) bool {
	p.noteTime(now)
	var v view
	p.load(&v, now)
	s := &v.tenants[tenant]
	if !s.present || !v.othersWant(tenant) {
		return false
	}
	t := p.token()
	holder := t.tenant()
	if holder == tenant {
		return false // in its turn, that is charged
	}
	if cause, _ := p.causeOf(tenant, holder, from, now); cause != nobody && p.excuses(&v, tenant, cause, from, to) {
		return false
	}
	gen, bound, took := p.policyOf(tenant).gen(), v.bound(s.vt, s.share), int64(0)
	p.debts(tenant, func(debt, debited *atomic.Uint64) {
		took = min(notCharged(debited, from, to, now), maxDebit)
		lengthen(debt, tenant, gen, bound, took*fullShare/s.debtShare())
	})
	if holder >= 0 {
		p.credit(&v, t, took)
	}
	return true
}

// lengthen adds to the time until which a tenant's debt lasts, which is not before least.
func lengthen(debt *atomic.Uint64, tenant int, gen uint32, least, more int64) {
	for range 1000 {
		old := debt.Load()
		until := max(least, debtWord(old).until(tenant, gen)) + more
		if debt.CompareAndSwap(old, uint64(packDebt(max(until, 0), tenant, gen))) {
			return
		}
	}
}

// moveDebt has tenant to owe num of den parts of what tenant from owes.
func (p *pages) moveDebt(from, to int, num, den int64) {
	now := p.now()
	var v view
	p.load(&v, now)
	moved := min(int64(float64(v.owes(from))*float64(num)/float64(den)), maxDebit)
	if moved <= 0 {
		return
	}
	for i, n := range map[int]int64{from: -moved, to: moved} {
		s := &v.tenants[i]
		p.debts(i, func(debt, _ *atomic.Uint64) { lengthen(debt, i, p.policyOf(i).gen(), now, n*fullShare/s.debtShare()) })
	}
}

// notCharged returns how much of the time from one time to another is after the time in a word,
// which it sets to the end: of several sessions of a tenant one charges that time.
func notCharged(w *atomic.Uint64, from, to, now int64) int64 {
	for range 1000 {
		old := w.Load()
		if int64(old) > from && int64(old) <= now { // a time in the future is not believed
			from = int64(old)
		}
		if from >= to {
			return 0
		}
		if w.CompareAndSwap(old, uint64(to)) {
			break
		}
	}
	return to - from
}

// debtShare is the part of the GPU that pays a debt.
func (s *tenant) debtShare() int64 {
	if s.share > 0 {
		return s.share
	}
	return max(s.weight*(fullShare/FullWeight), 1)
}

// credit gives the holder of a turn the time back that was taken from the turn. The holder will be
// charged for the whole turn.
func (p *pages) credit(v *view, t token, took int64) {
	s, rec := &v.tenants[t.tenant()], p.tenant(t.tenant())
	if !s.present {
		return
	}
	if t.borrowed() || s.share == 0 {
		lower(&rec.borrowedVT, took*fullShare/s.borrowWeight(), 0)
	} else {
		lower(&rec.vt, took*fullShare/s.share, max(v.now-maxCredit, 0))
	}
}

// lower subtracts n from a word, down to least.
func lower(w *atomic.Uint64, n, least int64) {
	for range 10 {
		old := w.Load()
		if int64(old) <= least || w.CompareAndSwap(old, uint64(max(int64(old)-n, least))) {
			return
		}
	}
}

// causeOf returns another tenant than i and the holder of the token whose work has been overdue for longer; nobody: there is none. Such
// work slows everything else on the GPU: what becomes overdue meanwhile is not charged, and a tenant that
// does not take its turn keeps its claim to that time. Work that its session has not looked at for a while does not count:
// the session is stopped, and its work may have ended long ago.
// since is when it became overdue.
func (p *pages) causeOf(i, holder int, from, now int64) (cause int, since int64) {
	mine := int64(1 << 62)
	cause, since = nobody, mine
	for k := range p.members() {
		at := int64(p.member(k).overdue.Load())
		switch t := p.tenantOf(k); {
		case at <= 0 || t < 0 || t == holder:
		case t == i:
			mine = min(mine, at)
		case p.unwatched(k, now) || at >= since:
		default:
			cause, since = t, at
		}
	}
	if mine == 1<<62 { // it has ended, or waits
		mine = from
	}
	if since >= mine {
		return nobody, 0
	}
	return cause, since
}

// unwatchedTime is how long a session may leave its overdue work alone and still be believed to have some. One that runs
// looks every millisecond, however busy its machine is.
const unwatchedTime = int64(time.Second)

// unwatched says whether a member has not looked at its overdue work for a while. A time in the future is not believed.
func (p *pages) unwatched(member int, now int64) bool {
	seen := p.member(member).seen.Load()
	return seen != 0 && (int64(seen) < now-unwatchedTime || int64(seen) > now+future)
}

// owes returns how much GPU time tenant i owes, ns.
func (v *view) owes(i int) int64 {
	s := &v.tenants[i]
	if !s.present || s.owed <= v.now {
		return 0
	}
	return (s.owed - v.now) / fullShare * s.debtShare()
}

// rescaleDebts keeps the tenants' debts of GPU time when their shares change from those of one view to
// those of another. It rescales the debts of tenants whose shares grow, or those of the others.
func (p *pages) rescaleDebts(before, after *view, grow bool) {
	for i := range before.n {
		s, o := &before.tenants[i], &after.tenants[i]
		from, to := s.debtShare(), o.debtShare()
		if !s.present || !o.present || from == to || grow != (to > from) {
			continue
		}
		gen := p.policyOf(i).gen()
		p.debts(i, func(word, _ *atomic.Uint64) {
			for range 1000 {
				old := word.Load()
				left := debtWord(old).until(i, gen) - before.now
				if left <= 0 {
					break
				}
				until := float64(before.now) + float64(left)*float64(from)/float64(to)
				if word.CompareAndSwap(old, uint64(packDebt(int64(min(until, 1<<62)), i, gen))) {
					break
				}
			}
		})
	}
}

// endsOverruns says whether sessions of tenant i end whose work exceeds the site's limit.
func (p *pages) endsOverruns(v *view, i int) bool {
	switch Overrun(p.policy.overrun.Load()) {
	case OverrunEnds:
		return true
	case OverrunEndsFixed:
		if v.tenants[i].kind == Fixed {
			return true
		}
		for k := range v.n {
			if s := &v.tenants[k]; k != i && s.waits() && s.kind == Fixed {
				return true
			}
		}
	}
	return false
}

// limit is how long work may outlast its turn, ns; 0: for any time.
func (p *pages) limit() int64 { return int64(min(p.policy.limit.Load(), uint64(24*time.Hour))) }

// Debit charges the lease for the time from one time to another, ns, in which work of this session
// was on the GPU outside of the lease's turns. It says whether that was at the cost of others.
func (m *Member) Debit(from, to int64) bool {
	m.look(int64(m.rec().overdue.Load()))
	if from >= to || m.ended() || !m.p.debit(m.tenant, from, to, max(to, m.clock.Now())) {
		return false
	}
	if since := int64(m.rec().overdue.Load()); since > 0 {
		from = min(from, since)
	}
	raise(m.p.count(m.tenant, cLongest), uint64(to-from))
	return true
}

// Indebted returns the time of the clock, ns, until which the lease's share pays for time that it owes; 0 if it owes none.
func (m *Member) Indebted() int64 {
	if m.ended() {
		return 0
	}
	var v view
	m.p.load(&v, m.clock.Now())
	if v.owes(m.tenant) == 0 {
		return 0
	}
	return v.tenants[m.tenant].owed
}

// Exceeds says whether this session has to end because of its work on the GPU outside of turns. It
// also returns what the lease owes, and the site's limit. overdue is for how long there has been such
// work of this session while others waited. The lease may owe as much, and a turn.
func (m *Member) Exceeds(overdue time.Duration) (owes, limit time.Duration, exceeds bool) {
	p := m.p
	n := p.limit()
	if n == 0 || m.ended() {
		return 0, 0, false
	}
	var v view
	p.load(&v, m.clock.Now())
	o := v.owes(m.tenant)
	exceeds = (int64(overdue) >= n || o >= n+p.quantum()+p.grace()) && p.endsOverruns(&v, m.tenant)
	return time.Duration(o), time.Duration(n), exceeds
}
