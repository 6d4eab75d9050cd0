package turns

// How a session waits for a turn.

import (
	"errors"
	"sync/atomic"
	"time"
)

const (
	// PrewakeLead is how long before a turn the next tenant is woken. Three threads have to
	// wake one after the other: the session's, its client's receiver, and the thread of the
	// program that waits there. Each takes up to half a millisecond after a long sleep.
	PrewakeLead = 800 * time.Microsecond
	// spinTime is how long a session that has been woken early spins for the token.
	spinTime = int64(PrewakeLead) * 3 / 2
)

// OnPrewake sets what Wait calls when a turn of the tenant is likely to begin within PrewakeLead.
func (m *Member) OnPrewake(f func()) { m.onPrewake = f }

// Wait waits for a turn of the tenant. Sessions that wait also look after each other: they
// pass a free token on, and take it from a tenant that keeps it too long. Wait may return 0
// without a reason after a while; stop makes it return.
func (m *Member) Wait(stop *atomic.Bool) (Turn, error) {
	p, rec := m.p, m.p.tenant(m.tenant)
	last := m.clock.Now()
	for range 100 {
		old := rec.wakeup.Load()
		err := m.hold()
		if m.ended() || errors.Is(err, ErrEnded) {
			return 0, ErrEnded
		}
		if stop.Load() {
			return 0, nil
		}
		if err != nil { // its record was lost, and there is no other
			m.clock.Wait(nil, 0, m.clock.Now()+int64(10*time.Millisecond), true)
			continue
		}
		m.Request() // a faulty session may have erased the request
		t, now := p.token(), m.clock.Now()
		m.responds(now)
		if t.tenant() == m.tenant && rec.closing.Load() != uint64(t) && t.begin() <= now+future {
			if m.refuses(now) {
				p.pass(t, now, m.tenant)
				continue
			}
			return Turn(t), nil
		}
		p.noteTime(now)
		until, own, throttled := m.until(t, now)
		switch lead := int64(PrewakeLead); {
		case until == 0: // something has changed
			continue
		case !m.clock.Spins():
			m.clock.Wait(ptr(&rec.wakeup), old, until, true)
		case rec.prewake.Load() == uint64(t):
			m.spin(t, now+spinTime)
			rec.prewake.CompareAndSwap(uint64(t), 0)
		case own && until-now <= lead:
			m.spin(t, until)
		case own:
			m.clock.Wait(ptr(&rec.wakeup), old, until-lead, true)
		default:
			m.clock.Wait(ptr(&rec.wakeup), old, until, true)
		}
		last = m.countWait(last, throttled)
	}
	return 0, nil
}

// refuses says whether this session leaves a turn to others, because its lease owes time. The session that passed the turn on may
// have read the schedule when the debt was erased there.
func (m *Member) refuses(now int64) bool {
	if m.p.debt(m.tenant).until(m.tenant, m.gen) <= now {
		return false
	}
	var v view
	m.p.load(&v, now)
	return v.rank(m.tenant) == rankNone && v.othersWant(m.tenant)
}

// until returns until when a waiting session may sleep, whether its tenant has time of its own
// then, and whether it has none now.
func (m *Member) until(t token, now int64) (until int64, own, throttled bool) {
	p := m.p
	var v view
	p.load(&v, now)
	throttled = !v.own(m.tenant)
	if t.tenant() >= 0 {
		return p.police(t, now), false, throttled
	}
	next, _, again := v.pick(nobody)
	if next >= 0 {
		p.pass(t, now, nobody)
		return 0, false, throttled
	}
	s := &v.tenants[m.tenant]
	own = s.share > 0 && s.skipUntil <= now && v.due(s) <= again
	return min(again, now+int64(100*time.Millisecond)), own, true
}

// spin polls the token until it changes or the time has come.
func (m *Member) spin(t token, until int64) {
	if m.onPrewake != nil {
		m.onPrewake()
	}
	for m.p.token() == t && m.clock.Now() < until {
	}
}

// countWait counts the time since last as waited. It returns the present time.
func (m *Member) countWait(last int64, throttled bool) int64 {
	now := m.clock.Now()
	if d := now - last; d > 0 {
		m.p.count(m.tenant, cWaited).Add(uint64(d))
		if throttled {
			m.p.count(m.tenant, cThrottled).Add(uint64(d))
		}
	}
	return now
}
