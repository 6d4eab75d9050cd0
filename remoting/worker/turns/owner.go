package turns

// What the board's owner does to the pages.

import "time"

// openSeat gives a free seat to a lease. The word that makes it one comes last.
func (p *page) openSeat(i int, name leaseName, pol Policy) {
	old := p.seatPolicy(i)
	for w := 0; w < stSeat; w += 8 {
		if w != ssBell { // sessions of the lease before may still wait there
			p.seat(i, w).Store(0)
		}
	}
	copy(p.pol[poSeats+i*poSeat+psName:], name[:])
	if n := uint64(i + 1); p.polWord(poHigh).Load() < n {
		p.polWord(poHigh).Store(n)
	}
	p.polWord(poSeats + i*poSeat + psWord).Store(uint64(packPolicy(pol, old.gen()+1)))
}

// setPolicy changes a seat's policy. Its virtual time begins anew, so that neither a
// windfall nor a debt comes of it.
func (p *page) setPolicy(i int, pol Policy) {
	old := p.seatPolicy(i)
	w := packPolicy(pol, old.gen())
	if w == old {
		return
	}
	p.polWord(poSeats + i*poSeat + psWord).Store(uint64(w))
	if p.word(stClock).Load() != 0 { // else no session has begun
		p.seat(i, ssVT).Store(uint64(p.now()))
	}
	ring(p.seatBell(i))
}

// closeSeat takes a seat away, and its turn with it.
func (p *page) closeSeat(i int) {
	w := p.seatPolicy(i)
	if !w.present() {
		return
	}
	p.polWord(poSeats + i*poSeat + psWord).Store(uint64(w &^ pwPresent))
	if t := token(p.token().Load()); t.seat() == i {
		p.pass(t, p.now(), i)
	}
	ring(p.seatBell(i))
}

// gone frees the chairs of a process.
func (p *page) gone(pid int, start uint64) {
	for i := range p.chairs() {
		w := p.chair(i, scOwner).Load()
		if uint32(w) != uint32(pid) {
			continue
		}
		if began := p.chair(i, scStart).Load(); start == 0 || began == 0 || began == start {
			p.clearChair(i, w)
		}
	}
	p.settle()
}

// sweep frees the chairs of all dead processes.
func (p *page) sweep() {
	for i := range p.chairs() {
		p.bury(i, true)
	}
	p.settle()
}

// settle passes the token on if nobody is left to do it.
func (p *page) settle() {
	t := token(p.token().Load())
	seat := t.seat()
	if seat < 0 {
		return
	}
	for i := range p.chairs() {
		if p.chairSeat(i) == seat {
			if token(p.seat(seat, ssTook).Load()) == t && p.deserted(seat, t) {
				p.revoke(t, p.now())
			}
			return
		}
	}
	p.revoke(t, p.now())
}

func (p *page) read() []SeatCounters {
	now := p.now()
	var v view
	p.look(&v, now)
	t := token(p.token().Load())
	var all []SeatCounters
	for i := range v.n {
		pol := p.seatPolicy(i)
		if !pol.present() {
			continue
		}
		n := func(c int) uint64 { return p.count(i, c).Load() }
		d := func(c int) time.Duration { return time.Duration(min(n(c), 1<<62)) }
		c := SeatCounters{
			Seat: i, Lease: p.seatName(i).String(), Policy: pol.policy(),
			Share: uint32(v.places[i].share / (whole / Whole)), Wants: v.places[i].want,
			Counters: Counters{
				Held: d(cHeld), Busy: d(cBusy), Waited: d(cWaited), Throttled: d(cThrottled), Lent: d(cLent), Borrowed: d(cBorrowed),
				Turns: n(cTurns), Overruns: n(cOverruns), Longest: d(cLongest), Revoked: n(cRevoked),
			},
		}
		if t.seat() == i {
			c.Held += time.Duration(p.held(t, now))
		}
		for k := range p.chairs() {
			if p.chairSeat(k) != i {
				continue
			}
			c.Chairs++
			late := int64(p.chair(k, scLate).Load())
			if over := time.Duration(now - late); late > 0 && over > c.Overrun && v.others(i) {
				c.Overrun, c.OverrunPID = over, int(uint32(p.chair(k, scOwner).Load()))
			}
		}
		all = append(all, c)
	}
	return all
}
