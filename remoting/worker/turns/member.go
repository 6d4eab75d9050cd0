package turns

// A session's part.

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A Turn names one turn of one tenant; 0 is none.
type Turn uint64

// Member is a session on a schedule, as one of its tenant's members. Its methods may be called
// from any thread.
type Member struct {
	p         *pages
	at        atomic.Pointer[place] // its record; changes if that is lost (hold)
	tenant    int
	gen       uint32
	clock     Clock
	idleAt    atomic.Int64 // when it last withdrew
	overdue   atomic.Bool  // what its DebtStore has been told
	me, start uint64       // its owner word, and its process's start time
	onPrewake func()

	mu     sync.Mutex // no write to the record may come between a look at quit and Quit itself
	quit   bool       // the record may belong to another process by now
	plan   Turn       // the turn whose length is known,
	length int64      // ns
}

// place is where a member's record is.
type place struct {
	i   int
	rec *memberState
}

func (m *Member) rec() *memberState { return m.at.Load().rec }

// OpenFDs makes a member of a tenant, on the schedule behind two descriptors, which it closes.
func OpenFDs(policyFD, stateFD, tenant int, clock Clock) (*Member, error) {
	defer unix.Close(policyFD)
	defer unix.Close(stateFD)
	p, err := mapPages(policyFD, stateFD, false)
	if err != nil {
		return nil, err
	}
	if !p.policyValid() { // the owner makes both files, and others may have written into the other one
		p.unmap()
		return nil, ErrFile
	}
	m, err := p.join(tenant, clock)
	if err != nil {
		p.unmap()
	}
	return m, err
}

// Keep says where the tenant's debt is kept. It comes before any other call. Without it the debt is kept in the state file.
func (m *Member) Keep(debts DebtStore) {
	m.p.stores[m.tenant] = debts
	m.p.debt(m.tenant)
}

func (p *pages) join(tenant int, clock Clock) (*Member, error) {
	if tenant < 0 || tenant >= MaxTenants || !p.policyOf(tenant).present() {
		return nil, fmt.Errorf("turns: tenant %d: %w", tenant, ErrEnded)
	}
	i, err := p.claim()
	if err != nil {
		return nil, err
	}
	step("claimed")
	m := &Member{p: p, tenant: tenant, gen: p.policyOf(tenant).gen(), clock: clock, me: uint64(os.Getpid()), start: selfStart()}
	m.at.Store(&place{i, p.member(i)})
	m.rec().start.Store(m.start)
	step("named")
	m.rec().tenant.Store(packTenant(tenant, m.gen))
	step("joined")
	m.noteClock()
	if p.state.clock.Load() == clockSimulated {
		p.state.now.Store(uint64(clock.Now()))
	}
	return m, nil
}

// noteClock notes which clock turns are measured by.
func (m *Member) noteClock() {
	kind := uint64(clockSimulated)
	if _, real := m.clock.(Monotonic); real {
		kind = clockMachine
	}
	if w := &m.p.state.clock; w.Load() != kind {
		w.Store(kind)
	}
}

// claim claims a free member record; those of dead processes count as free.
func (p *pages) claim() (int, error) {
	me := uint64(os.Getpid())
	for range 2 {
		for i := range MaxMembers {
			if rec := p.member(i); rec.owner.CompareAndSwap(0, me) {
				rec.clear()
				raise(&p.state.high, uint64(i+1))
				return i, nil
			}
		}
		for i := range MaxMembers {
			p.freeIfDead(i, true)
		}
	}
	return 0, fmt.Errorf("turns: %w: %d sessions", ErrFull, MaxMembers)
}

// hold makes sure that the session has a record with its name. Any session on the GPU can erase the record, or write another process's
// number into it; that ends no session.
func (m *Member) hold() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.quit {
		return ErrEnded
	}
	at, name := m.at.Load(), packTenant(m.tenant, m.gen)
	switch {
	case at.rec.owner.Load() == m.me:
	case at.rec.owner.CompareAndSwap(0, m.me):
		if at.rec.tenant.Load() != name || at.rec.start.Load() != m.start { // otherwise nobody else had it, and what it says is this session's
			at.rec.clear()
		}
	default:
		i, err := m.p.claim()
		if err != nil {
			return err
		}
		lost := at
		at = &place{i, m.p.member(i)}
		m.at.Store(at)
		wake(&lost.rec.wakeup) // the keeper may sleep on the old record, and later wakes go to the new one
	}
	raise(&m.p.state.high, uint64(at.i+1))
	m.noteClock()
	if at.rec.tenant.Load() != name {
		at.rec.start.Store(m.start)
		at.rec.tenant.Store(name)
	}
	return nil
}

// Close frees the record and unmaps the schedule. The turn must be done.
func (m *Member) Close() {
	m.Quit()
	m.p.unmap()
}

// Quit frees the record of a process that is about to end, and passes its turn on. More calls
// do nothing: the record may belong to another process right afterwards, and no other thread
// of this one touches it, or a turn, from then on.
func (m *Member) Quit() {
	m.mu.Lock()
	gone := m.quit
	m.quit = true
	m.mu.Unlock()
	if gone {
		return
	}
	t := m.Turn()
	m.p.free(m.at.Load().i, m.me)
	if t != 0 {
		m.passIfLast(token(t))
	}
}

// write changes a word of the record, unless that has been lost; false: the session has quit.
func (m *Member) write(w func(*memberState) *atomic.Uint64, n uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if rec := m.rec(); !m.quit && rec.owner.Load() == m.me {
		w(rec).Store(n)
	}
	return !m.quit
}

func want(r *memberState) *atomic.Uint64    { return &r.want }
func open(r *memberState) *atomic.Uint64    { return &r.open }
func overdue(r *memberState) *atomic.Uint64 { return &r.overdue }
func seen(r *memberState) *atomic.Uint64    { return &r.seen }

// passIfLast passes a turn on unless another member of the tenant works in it.
func (m *Member) passIfLast(t token) {
	for i := range m.p.members() {
		if m.p.works(i, m.tenant, t) {
			return
		}
	}
	m.p.pass(t, m.clock.Now(), nobody)
}

// Tenant is the number of the member's tenant.
func (m *Member) Tenant() int { return m.tenant }

// Token is the word that equals the turn as long as that lasts.
func (m *Member) Token() *atomic.Uint64 { return &m.p.state.token }

func (m *Member) ended() bool {
	w := m.p.policyOf(m.tenant)
	return !w.present() || w.gen() != m.gen
}

// Request says that this session has work.
func (m *Member) Request() {
	p := m.p
	if m.rec().want.Load() != 0 {
		return
	}
	now := m.clock.Now()
	var v view
	p.load(&v, now)
	if s := &v.tenants[m.tenant]; s.present && !s.want && now-m.idleAt.Load() > v.credit {
		// A tenant that comes back after a pause has a turn's credit at most.
		raise(&p.tenant(m.tenant).vt, uint64(max(now-v.credit, 0)))
		m.limitBorrowCredit(&v)
	}
	step("asking")
	if !m.write(want, 1) {
		return
	}
	step("asked")
	t := p.token()
	holder := t.tenant()
	if holder < 0 || holder == m.tenant {
		return
	}
	if t.borrowed() && v.own(m.tenant) {
		p.state.recalled.Store(uint64(t))
	}
	// The holder may believe that it is alone, and keep an idle turn for longer.
	p.wakeKeepers(holder)
}

// wakeKeepers wakes the keepers of the sessions that work in a tenant's turn.
func (p *pages) wakeKeepers(tenant int) {
	for i := range p.members() {
		if m := p.member(i); m.open.Load() != 0 && p.tenantOf(i) == tenant {
			wake(&m.wakeup)
		}
	}
}

// responds ends the time for which the tenant is skipped, because this session is here to take
// a turn: on a busy machine every session may be slow to wake. The tenant has no claim to the time
// since it became unresponsive: it could not have worked then.
func (m *Member) responds(now int64) {
	p, rec := m.p, m.p.tenant(m.tenant)
	if rec.skipUntil.Load() == 0 {
		return
	}
	rec.skipUntil.Store(0)
	since := int64(rec.unresponsive.Swap(0))
	if since <= 0 || since >= now {
		return
	}
	var v view
	p.load(&v, now)
	s := &v.tenants[m.tenant]
	if !s.present {
		return
	}
	raise(&rec.vt, uint64(max(min(v.bound(s.vt, s.share)+now-since, now), 0)))
	m.limitBorrowCredit(&v)
}

// limitBorrowCredit brings the borrowed time of a tenant that comes back up to that of the
// others.
func (m *Member) limitBorrowCredit(v *view) {
	s := &v.tenants[m.tenant]
	if least := v.leastBorrowed(m.tenant); least > s.borrowedVT {
		raise(&m.p.tenant(m.tenant).borrowedVT, uint64(max(least-v.credit*fullShare/s.borrowWeight(), 0)))
	}
}

// leastBorrowed is the least virtual time of borrowed time among the tenants with work but i; -1:
// there are none.
func (v *view) leastBorrowed(i int) int64 {
	least := int64(-1)
	for k := range v.n {
		if s := &v.tenants[k]; k != i && s.present && s.want && (least < 0 || s.borrowedVT < least) {
			least = s.borrowedVT
		}
	}
	return least
}

// Withdraw says that this session has no work.
func (m *Member) Withdraw() {
	m.idleAt.Store(m.clock.Now())
	m.write(want, 0)
}

// Turn returns the tenant's turn, or 0 if it has none now. Turns of a later lease that has the
// same record do not count.
func (m *Member) Turn() Turn {
	if t := m.p.token(); t.tenant() == m.tenant && !m.ended() {
		return Turn(t)
	}
	return 0
}

// Enter joins a turn; false: it is over, or about to be.
func (m *Member) Enter(t Turn) bool {
	rec := m.p.tenant(m.tenant)
	if m.hold() != nil || !m.write(open, uint64(t)) {
		return false
	}
	step("open")
	if closing := rec.closing.Load() == uint64(t); closing || m.Turn() != t {
		m.write(open, 0)
		if closing { // the member that closes the turn has seen this one work, and left it to pass the turn on
			m.passIfLast(token(t))
		}
		return false
	}
	if rec.taken.Load() != uint64(t) {
		rec.taken.Store(uint64(t))
		rec.misses.Store(0)
		rec.skipUntil.Store(0)
	}
	step("entered")
	return true
}

// Follow goes on in turn t, which a member of the tenant has made of the one before (Renew).
func (m *Member) Follow(t Turn) bool {
	if m.Turn() != t || !m.write(open, uint64(t)) {
		return false
	}
	m.p.tenant(m.tenant).taken.Store(uint64(t))
	return true
}

// Done leaves a turn: this session has no work on the GPU any more, or does not wait for it any
// longer. The last member of the tenant passes the token on.
func (m *Member) Done(t Turn) {
	if m.leave(t) {
		step("left")
		m.passIfLast(token(t))
	}
}

// leave closes a turn and notes that this session does not work in it; false: the session has
// quit.
func (m *Member) leave(t Turn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.quit {
		return false
	}
	if m.Turn() == t { // the record may be another lease's by now
		m.p.tenant(m.tenant).closing.Store(uint64(t))
	}
	step("closing")
	if rec := m.rec(); rec.owner.Load() == m.me {
		rec.open.Store(0)
	}
	return true
}

// works says whether member i works in the turn t of a tenant.
func (p *pages) works(i, tenant int, t token) bool {
	o := token(p.member(i).open.Load())
	if o == 0 || p.tenantOf(i) != tenant {
		return false
	}
	// A session follows its tenant's turn within one turn; if it has not, it is stopped, or dead.
	return o.begin() >= t.begin()-p.quantum()-p.grace() && !p.freeIfDead(i, false)
}

// Renew makes another turn of t if the tenant would be next anyway.
func (m *Member) Renew(t Turn) (Turn, bool) {
	p, rec, now := m.p, m.p.tenant(m.tenant), m.clock.Now()
	var v view
	p.load(&v, now)
	old := token(t)
	held := p.held(old, now)
	v.charge(m.tenant, held, old.borrowed())
	next, borrowed, _ := v.pick(nobody)
	if next != m.tenant || rec.closing.Load() == uint64(t) {
		return 0, false
	}
	if !m.write(open, uint64(t)) { // which changes nothing, unless the session has quit
		return 0, false
	}
	n := packToken(next, borrowed, old.after(now))
	// Before the token changes: otherwise the new turn would look as if nobody had taken it.
	rec.taken.Store(uint64(n))
	step("renewing")
	if !p.state.token.CompareAndSwap(uint64(t), uint64(n)) {
		if now := m.Turn(); now != 0 { // another member was faster: its turn is taken
			rec.taken.Store(uint64(now))
		}
		return 0, false
	}
	step("renewed")
	p.noteTime(now)
	p.charge(&v, m.tenant, old, held)
	p.count(m.tenant, cTurns).Add(1)
	m.write(open, uint64(n))
	return Turn(n), true
}

// Prewake wakes the sessions of the tenant that is likely to be next, because turn t ends in a
// moment. It says whether that is another tenant.
func (m *Member) Prewake(t Turn) bool {
	p, now := m.p, m.clock.Now()
	var v view
	p.load(&v, now)
	// Assume what the turn will be charged, and a little more: two equal tenants are level after
	// each turn, and waking a tenant in vain costs less than waking none.
	ends := max(now, m.Ends(t)) + int64(PrewakeLead)
	v.now = ends
	v.charge(m.tenant, p.held(token(t), ends), token(t).borrowed())
	next, _, _ := v.pick(nobody)
	if next == m.tenant {
		return false
	}
	if next >= 0 && p.tenant(next).prewake.Swap(uint64(t)) != uint64(t) && m.clock.Spins() {
		wake(&p.tenant(next).wakeup)
	}
	return true
}

// Contended says whether another tenant has work.
func (m *Member) Contended() bool {
	p := m.p
	for i := range p.members() {
		if p.member(i).want.Load() != 0 {
			if s := p.tenantOf(i); s >= 0 && s != m.tenant {
				return true
			}
		}
	}
	return false
}

// Capped says whether the tenant may not use more than its own share even when no other tenant has
// work.
func (m *Member) Capped() bool {
	var v view
	m.p.load(&v, m.clock.Now())
	return v.tenants[m.tenant].kind == Fixed || v.rate < fullShare
}

// Ends returns a turn's end. A borrowed turn that is recalled ends at once.
func (m *Member) Ends(t Turn) int64 {
	if m.p.state.recalled.Load() == uint64(t) {
		return token(t).begin()
	}
	return token(t).begin() + m.lengthOf(t)
}

// lengthOf returns how long a turn is planned to be.
func (m *Member) lengthOf(t Turn) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.plan != t {
		m.plan, m.length = t, m.p.quantum()
		if !token(t).borrowed() {
			var v view
			m.p.load(&v, m.clock.Now())
			m.length += v.adjust(m.tenant)
		}
	}
	return m.length
}

// Deadline returns when a turn is taken away.
func (m *Member) Deadline(t Turn) int64 { return token(t).begin() + m.p.quantum() + m.p.grace() }

// Quantum is a turn's length, ns.
func (m *Member) Quantum() int64 { return m.p.quantum() }

// Wakeups is how often the keeper has been woken in a record. It changes with each wake, and when the session has another record.
type Wakeups struct {
	rec *memberState
	n   uint32
}

// Wakeups returns what WakeKeeper changes; it is for Sleep.
func (m *Member) Wakeups() Wakeups {
	rec := m.rec()
	return Wakeups{rec, rec.wakeup.Load()}
}

// Sleep waits until a time, or until somebody wakes this session's keeper. seen is what Wakeups
// returned before the keeper last looked for work.
func (m *Member) Sleep(seen Wakeups, until int64) {
	if m.rec() == seen.rec { // otherwise the session has another record since
		m.clock.Wait(ptr(&seen.rec.wakeup), seen.n, until, false)
	}
}

// WakeKeeper ends Sleep.
func (m *Member) WakeKeeper() { wake(&m.rec().wakeup) }

// WakeWaiters makes Wait look again, in all sessions of the tenant.
func (m *Member) WakeWaiters() { wake(&m.p.tenant(m.tenant).wakeup) }

// Busy counts time that the GPU worked for this session.
func (m *Member) Busy(d time.Duration) {
	if !m.ended() {
		m.p.count(m.tenant, cBusy).Add(ns(d))
	}
}

// SetOverdue notes since when work of an ended turn is on the GPU; 0: there is none any more. A session with such work calls it
// or Debit every millisecond or so.
func (m *Member) SetOverdue(since int64) {
	_ = m.hold() // or it has quit, or there is no room for it: then nobody sees its work
	if st := m.p.stores[m.tenant]; st != nil && m.overdue.Swap(since > 0) != (since > 0) {
		st.SetOverdue(since > 0)
	}
	m.look(since)
	m.write(overdue, uint64(max(since, 0)))
}

// look notes that this session looks at its overdue work.
func (m *Member) look(since int64) {
	now := int64(0)
	if since > 0 {
		now = m.clock.Now()
	}
	m.write(seen, uint64(now))
}
