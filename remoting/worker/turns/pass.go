package turns

// How the token moves, and what happens to those who do not let go of it.

import (
	"sync/atomic"
	"time"
)

const (
	// noTake is how long a seat may take to take the token that it is given.
	noTake = int64(time.Millisecond)
	// Who has not taken it is not asked again for a while, and for longer if that
	// was not the first time in a row.
	firstOut = int64(20 * time.Millisecond)
	thenOut  = int64(time.Second)
	// future is how far a turn's begin may lie ahead and still be believed.
	future = int64(time.Second)
)

// died is where tests let a process die: between two steps of those that change a board.
var died func(point string)

func at(point string) {
	if died != nil {
		died(point)
	}
}

// pass ends the turn t, charges it and gives the token to the next seat but except.
// False: t was over already. Of several who do so at once, one succeeds.
func (p *page) pass(t token, now int64, except int) bool {
	for range 3 { // once is enough unless somebody begins to want meanwhile
		var v view
		p.look(&v, now)
		seat, held := t.seat(), p.held(t, now)
		if seat >= 0 {
			v.charge(seat, held, t.borrowed())
		}
		next, borrowed := p.nextAlive(&v, except)
		n := packToken(next, borrowed, t.after(now))
		at("decided")
		if !p.token().CompareAndSwap(uint64(t), uint64(n)) {
			return false
		}
		at("passed")
		p.stamp(now)
		if seat >= 0 {
			p.charge(&v, seat, t, held)
		}
		at("charged")
		if next >= 0 {
			p.count(next, cTurns).Add(1)
			ring(p.seatBell(next))
			return true
		}
		// Free. Who began to want after the look above may have seen the turn as it was.
		var again view
		p.look(&again, now)
		if next, _, _ := again.pick(except); next < 0 {
			return true
		}
		t = n
	}
	return true
}

// held is how long a turn has lasted.
func (p *page) held(t token, now int64) int64 {
	return min(max(now-t.begin(), 0), maxHeld)
}

// nextAlive picks, and frees the chairs of dead sessions that it meets on the way.
func (p *page) nextAlive(v *view, except int) (int, bool) {
	for range MaxSeats {
		next, borrowed, _ := v.pick(except)
		if next < 0 || p.wanting(next) {
			return next, borrowed
		}
		v.places[next].want = false
	}
	return nobody, false
}

// wanting says whether a living session of a seat wants the token; dead ones are freed.
func (p *page) wanting(seat int) bool {
	some := false
	for i := range p.chairs() {
		if p.chair(i, scWant).Load() != 0 && p.chairSeat(i) == seat && !p.bury(i, false) {
			some = true
		}
	}
	return some
}

// charge puts a turn that has ended to its seat's account. Whoever has ended it does so;
// should that process die right here, one turn goes uncharged.
func (p *page) charge(v *view, seat int, t token, held int64) {
	s := &v.places[seat]
	p.count(seat, cHeld).Add(uint64(held))
	// Alone on the GPU nobody is harmed.
	if over := held - p.quantum(); over > p.grace() && v.others(seat) {
		p.count(seat, cOverruns).Add(1)
		raise(p.count(seat, cLongest), uint64(over))
	}
	if !s.present {
		return
	}
	// The view's numbers are this turn's; what others have added since is small.
	if t.borrowed() || s.share == 0 {
		p.seat(seat, ssBVT).Store(uint64(s.bvt))
		p.count(seat, cBorrowed).Add(uint64(held))
		p.lend(v, seat, held)
	} else {
		p.seat(seat, ssVT).Store(uint64(s.vt))
	}
	if t.borrowed() || s.lend {
		p.word(stPool).Store(uint64(v.pool))
	}
}

// others says whether another seat has work.
func (v *view) others(but int) bool {
	for i := range v.n {
		if s := &v.places[i]; i != but && s.present && s.want {
			return true
		}
	}
	return false
}

// lend divides borrowed time among the seats whose it would have been.
func (p *page) lend(v *view, borrower int, held int64) {
	sum := int64(0)
	lends := func(i int) bool {
		s := &v.places[i]
		return i != borrower && s.present && s.lend && !s.want && s.share > 0
	}
	for i := range v.n {
		if lends(i) {
			sum += v.places[i].share
		}
	}
	for i := range v.n {
		if lends(i) {
			p.count(i, cLent).Add(uint64(held * v.places[i].share / sum))
		}
	}
}

func raise(w *atomic.Uint64, n uint64) {
	for range 10 {
		old := w.Load()
		if n <= old || w.CompareAndSwap(old, n) {
			return
		}
	}
}

// owe charges a seat for work of its that was on the GPU beyond its turn.
func (p *page) owe(seat int, t time.Duration, now int64) {
	var v view
	p.look(&v, now)
	v.charge(seat, min(int64(t), maxDebt), false)
	p.seat(seat, ssVT).Store(uint64(v.places[seat].vt))
	raise(p.count(seat, cLongest), uint64(t))
}

// stamp notes the time for the owner, if it is a simulated one.
func (p *page) stamp(now int64) {
	if p.word(stClock).Load() == clockSimulated {
		raise(p.word(stNow), uint64(now))
	}
}

// judge ends a turn that is not kept: not taken, overstayed, or its seat gone. It says
// until when the turn is to be left alone; 0: it is over.
func (p *page) judge(t token, now int64) int64 {
	seat, begin := t.seat(), t.begin()
	if seat < 0 {
		p.pass(t, now, nobody)
		return 0
	}
	if begin > now+future || !p.seatPolicy(seat).present() {
		p.revoke(t, now)
		return 0
	}
	end := begin + p.quantum() + p.grace()
	if now >= end {
		p.revoke(t, now)
		return 0
	}
	if token(p.seat(seat, ssTook).Load()) == t {
		if p.deserted(seat, t) {
			p.revoke(t, now)
			return 0
		}
		return end
	}
	if now < begin+noTake {
		return begin + noTake
	}
	// Stopped, or slow to wake. Not charged for long, but out for a while: whoever is
	// next may be as deaf, and somebody here has work.
	out := firstOut
	if p.seat(seat, ssMisses).Add(1) > 1 {
		out = thenOut
	}
	if p.seat(seat, ssOut).Swap(uint64(now+out)) == 0 {
		p.seat(seat, ssDeaf).Store(uint64(begin))
	}
	p.pass(t, now, seat)
	return 0
}

// deserted says whether nobody is left who works in turn t of seat.
func (p *page) deserted(seat int, t token) bool {
	for i := range p.chairs() {
		if p.chair(i, scOpen).Load() != 0 && p.chairSeat(i) == seat && !p.bury(i, false) {
			return false
		}
	}
	// Who has just closed it is about to pass it on.
	return token(p.seat(seat, ssClosing).Load()) != t
}

// revoke takes the token away.
func (p *page) revoke(t token, now int64) {
	if seat := t.seat(); p.pass(t, now, nobody) && seat >= 0 {
		p.count(seat, cRevoked).Add(1)
	}
}
