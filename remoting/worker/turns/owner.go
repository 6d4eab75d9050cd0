package turns

// What the owner of a schedule does to its pages.

import (
	"sync/atomic"
	"time"
)

// addTenant gives a free record to a lease, or to a part of the tenant of unless that is nobody. The word that makes it a tenant comes last.
func (p *pages) addTenant(i int, name leaseName, of int, pol Policy) {
	old, t := p.policyOf(i), p.tenant(i)
	p.stores[i] = nil
	// The wakeup stays: sessions of the lease before may still wait there.
	for _, w := range [...]*atomic.Uint64{
		&t.vt, &t.borrowedVT, &t.prewake, &t.closing, &t.taken, &t.skipUntil, &t.misses, &t.unresponsive, &t.debt, &t.debited,
	} {
		w.Store(0)
	}
	for k := range t.counters {
		t.counters[k].Store(0)
	}
	p.policy.tenants[i].name = name
	p.policy.tenants[i].of.Store(0)
	if of != nobody {
		p.policy.tenants[i].of.Store(packTenant(of, p.policyOf(of).gen()))
	}
	raise(&p.policy.high, uint64(i+1))
	p.setWord(i, packPolicy(pol, old.gen()+1))
}

// setWord changes the word that makes a lease a tenant and has its policy. That changes the shares of
// other tenants too, but not the GPU time that any of them owes. A debt is rescaled before its tenant's
// share grows, or after the share has shrunk: meanwhile its session finds a debt that is too small, and
// does not end for one that is too large.
func (p *pages) setWord(i int, w policyWord) {
	var before view
	p.load(&before, p.now())
	after, pol := before, w.policy()
	s := &after.tenants[i]
	s.present, s.kind, s.weight, s.lease = w.present(), pol.Kind, int64(pol.Weight), p.leaseOf(i)
	after.setShares()
	p.rescaleDebts(&before, &after, true)
	p.policy.tenants[i].word.Store(uint64(w))
	p.rescaleDebts(&before, &after, false)
}

// ahead is the GPU time that a tenant has had beyond its share, ns.
func (v *view) ahead(i int) int64 {
	s := &v.tenants[i]
	return int64(float64(max(v.bound(s.vt, s.share)-v.now, 0)) * float64(s.share) / float64(fullShare))
}

// setAhead has a tenant's virtual time say how much GPU time it has had beyond its share, and that it has no credit.
func (p *pages) setAhead(v *view, i int, had int64) {
	p.tenant(i).vt.Store(uint64(v.now + int64(float64(had)*float64(fullShare)/float64(max(v.tenants[i].share, 1)))))
}

// moveAhead has another tenant have had a part of what one has had beyond its share: num of den. That is not kept with the debts, because it
// is a turn or two.
func (p *pages) moveAhead(from, to int, num, den int64) {
	var v view
	p.load(&v, p.now())
	had := v.ahead(from)
	moved := int64(float64(had) * float64(num) / float64(den))
	if moved <= 0 || p.state.clock.Load() == 0 {
		return
	}
	p.setAhead(&v, from, had-moved)
	p.setAhead(&v, to, v.ahead(to)+moved)
}

// setPolicy changes a tenant's policy. Its virtual time is set to the clock, so that the change
// brings neither credit nor debt; keep: but for what the tenant has had beyond its share. A debt that the tenant has stays.
func (p *pages) setPolicy(i int, pol Policy, keep bool) {
	old := p.policyOf(i)
	w := packPolicy(pol, old.gen())
	if w == old {
		return
	}
	begun := p.state.clock.Load() != 0
	var v view
	p.load(&v, p.now())
	had := v.ahead(i)
	if p.setWord(i, w); !begun { // by no session
		return
	}
	if !keep {
		had = 0
	}
	p.load(&v, p.now())
	p.setAhead(&v, i, had)
	wake(&p.tenant(i).wakeup)
}

// removeTenant takes a tenant off the schedule, and its turn with it.
func (p *pages) removeTenant(i int) {
	w := p.policyOf(i)
	if !w.present() {
		return
	}
	p.setWord(i, w&^pwPresent)
	p.policy.tenants[i].of.Store(0)
	p.stores[i] = nil
	if t := p.token(); t.tenant() == i {
		p.pass(t, p.now(), i)
	}
	wake(&p.tenant(i).wakeup)
}

// addCounters adds what a part has had to what its lease has had.
func (p *pages) addCounters(lease, part int) {
	for k := range p.tenant(part).counters {
		n := p.count(part, k).Load()
		if k == cLongest {
			raise(p.count(lease, k), n)
			continue
		}
		p.count(lease, k).Add(n)
	}
}

// processEnded frees the members of a process.
func (p *pages) processEnded(pid int, start uint64) {
	for i := range p.members() {
		m := p.member(i)
		w := m.owner.Load()
		if uint32(w) != uint32(pid) {
			continue
		}
		if began := m.start.Load(); start == 0 || began == 0 || began == start {
			p.free(i, w)
		}
	}
	p.passIfAbandoned()
}

// sweep frees the members of all dead processes. It restores what a faulty session may have written where nobody writes otherwise,
// or where it hides members.
func (p *pages) sweep() {
	p.state.magic.Store(stateMagic)
	p.state.version.Store(version)
	for i := range MaxMembers {
		if p.member(i).owner.Load() != 0 && !p.freeIfDead(i, true) {
			raise(&p.state.high, uint64(i+1))
		}
	}
	p.passIfAbandoned()
}

// stranger is a member that is no session that the owner knows.
type stranger struct {
	owner uint64
	since time.Time
}

// strangerTime is how long a stranger stays. The daemon knows a session before it becomes a member.
const strangerTime = 10 * time.Second

// freeStrangers frees the members that known has not known for strangerTime. Of members with one process number each may be false: all of
// them are freed, and the true one comes back (Member.hold).
func (p *pages) freeStrangers(old map[int]stranger, at time.Time, known func(lease string, pid int) bool) map[int]stranger {
	of := map[uint32]int{}
	for i := range MaxMembers {
		of[uint32(p.member(i).owner.Load())]++
	}
	still := map[int]stranger{}
	for i := range MaxMembers {
		w := p.member(i).owner.Load()
		pid, tenant := uint32(w), p.tenantOf(i)
		if w == 0 || of[pid] == 1 && tenant != nobody && known(p.nameOf(p.leaseOf(tenant)).String(), int(int32(pid))) {
			continue
		}
		s, seen := old[i]
		if !seen || s.owner != w {
			s = stranger{w, at}
		}
		if at.Sub(s.since) < strangerTime {
			still[i] = s
			continue
		}
		p.free(i, w)
	}
	return still
}

// passIfAbandoned passes the token on if the sessions that should do it have ended.
func (p *pages) passIfAbandoned() {
	t := p.token()
	tenant := t.tenant()
	if tenant < 0 {
		return
	}
	for i := range p.members() {
		if p.tenantOf(i) == tenant {
			if token(p.tenant(tenant).taken.Load()) == t && p.abandoned(tenant, t) {
				p.revoke(t, p.now())
			}
			return
		}
	}
	p.revoke(t, p.now())
}

// read describes the tenants that are present.
func (p *pages) read() []TenantCounters {
	now := p.now()
	var v view
	p.load(&v, now)
	t := p.token()
	var all []TenantCounters
	for i := range v.n {
		pol := p.policyOf(i)
		if !pol.present() {
			continue
		}
		n := func(c int) uint64 { return p.count(i, c).Load() }
		d := func(c int) time.Duration { return time.Duration(min(n(c), 1<<62)) }
		lease, part := p.nameOf(i).split()
		c := TenantCounters{
			Tenant: i, Lease: lease, Part: part, Policy: pol.policy(),
			Share: uint32(v.tenants[i].share / (fullShare / FullWeight)), Most: uint32(v.most(i) / (fullShare / FullWeight)), Wants: v.tenants[i].want,
			Owes: time.Duration(v.owes(i)), Ends: p.endsOverruns(&v, i),
			Counters: Counters{
				Held: d(cHeld), Busy: d(cBusy), Waited: d(cWaited), Throttled: d(cThrottled), Lent: d(cLent), Borrowed: d(cBorrowed),
				Turns: n(cTurns), Overruns: n(cOverruns), Longest: d(cLongest), Revoked: n(cRevoked),
			},
		}
		if t.tenant() == i {
			c.Held += time.Duration(p.held(t, now))
		}
		for k := range p.members() {
			if p.tenantOf(k) != i {
				continue
			}
			c.Members++
			since := int64(p.member(k).overdue.Load())
			if since <= 0 || since >= now || !v.othersWant(i) {
				continue
			}
			work := Overdue{int(uint32(p.member(k).owner.Load())), time.Duration(now - since)}
			if cause, _ := p.causeOf(i, t.tenant(), since, now); cause == nobody {
				c.Overdue = append(c.Overdue, work)
			} else {
				c.Delayed = append(c.Delayed, work)
			}
		}
		all = append(all, c)
	}
	return all
}
