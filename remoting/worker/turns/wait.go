package turns

// How a session waits for a turn.

import (
	"sync/atomic"
	"time"
)

const (
	// AlertLead is how long before a turn the next one is told. Its session has to wake,
	// then its client's receiver, then the thread that waits there, each of which takes up
	// to half a millisecond after a long sleep.
	AlertLead = 800 * time.Microsecond
	// alertTime is how long that one spins.
	alertTime = int64(AlertLead) * 3 / 2
)

// Soon sets what Wait calls when a turn of the seat is likely to begin within AlertLead.
func (c *Chair) Soon(f func()) { c.soon = f }

// Wait waits for a turn of the seat, taking part in what waiting sessions do for each
// other: they pass on what is free, and take away what is kept too long. It may return 0
// without reason after a while; stop makes it return.
func (c *Chair) Wait(stop *atomic.Bool) (Turn, error) {
	p := c.p
	bell := p.seatBell(c.seat)
	last := c.clock.Now()
	for range 100 {
		old := bell.Load()
		if c.ended() || p.chair(c.i, scOwner).Load() != c.me {
			return 0, ErrEnded
		}
		if stop.Load() {
			return 0, nil
		}
		c.Ask() // it has, unless somebody has written where he may not
		t, now := token(p.token().Load()), c.clock.Now()
		c.awake(now)
		if t.seat() == c.seat && p.seat(c.seat, ssClosing).Load() != uint64(t) && t.begin() <= now+future {
			return Turn(t), nil
		}
		p.stamp(now)
		until, own, throttled := c.until(t, now)
		switch lead := int64(AlertLead); {
		case until == 0: // something has changed
			continue
		case !c.clock.Spins():
			c.clock.Wait((*uint32)(ptr(bell)), old, until, true)
		case p.seat(c.seat, ssAlert).Load() == uint64(t):
			c.spin(t, now+alertTime)
			p.seat(c.seat, ssAlert).CompareAndSwap(uint64(t), 0)
		case own && until-now <= lead:
			c.spin(t, until)
		case own:
			c.clock.Wait((*uint32)(ptr(bell)), old, until-lead, true)
		default:
			c.clock.Wait((*uint32)(ptr(bell)), old, until, true)
		}
		last = c.waited(last, throttled)
	}
	return 0, nil
}

// until says how long a waiter may sleep, whether it is for time of its own seat, and
// whether that has none now.
func (c *Chair) until(t token, now int64) (until int64, own, throttled bool) {
	p := c.p
	var v view
	p.look(&v, now)
	throttled = !v.own(c.seat)
	if t.seat() >= 0 {
		return p.judge(t, now), false, throttled
	}
	next, _, again := v.pick(nobody)
	if next >= 0 {
		p.pass(t, now, nobody)
		return 0, false, throttled
	}
	s := &v.places[c.seat]
	own = s.share > 0 && s.out <= now && v.due(s) <= again
	return min(again, now+int64(100*time.Millisecond)), own, true
}

// spin waits for a turn by looking.
func (c *Chair) spin(t token, until int64) {
	if c.soon != nil {
		c.soon()
	}
	w := c.p.token()
	for token(w.Load()) == t && c.clock.Now() < until {
	}
}

// waited counts the time since last.
func (c *Chair) waited(last int64, throttled bool) int64 {
	now := c.clock.Now()
	if d := now - last; d > 0 {
		c.p.count(c.seat, cWaited).Add(uint64(d))
		if throttled {
			c.p.count(c.seat, cThrottled).Add(uint64(d))
		}
	}
	return now
}
