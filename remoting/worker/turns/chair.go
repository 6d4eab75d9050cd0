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

// A Turn names one turn of one seat; 0 is none.
type Turn uint64

// Chair is a session's place on a seat. Its methods may be called from any thread.
type Chair struct {
	p     *page
	i     int
	seat  int
	gen   uint32
	clock Clock
	left  atomic.Int64 // when it last had no work
	me    uint64       // its owner word
	soon  func()

	mu   sync.Mutex // keeps Quit from between the look at quit and a write to the chair
	quit bool       // the chair may be another process's by now
	plan Turn       // whose length is known:
	long int64      // ns
}

// OpenFDs takes a chair on a seat of the board behind two descriptors, which it closes.
func OpenFDs(policyFD, stateFD, seat int, clock Clock) (*Chair, error) {
	defer unix.Close(policyFD)
	defer unix.Close(stateFD)
	p, err := mapPages(policyFD, stateFD, false)
	if err != nil {
		return nil, err
	}
	if !p.valid() {
		p.unmap()
		return nil, ErrFile
	}
	c, err := p.sit(seat, clock)
	if err != nil {
		p.unmap()
	}
	return c, err
}

func (p *page) sit(seat int, clock Clock) (*Chair, error) {
	if seat < 0 || seat >= MaxSeats || !p.seatPolicy(seat).present() {
		return nil, fmt.Errorf("turns: seat %d: %w", seat, ErrEnded)
	}
	i, err := p.freeChair()
	if err != nil {
		return nil, err
	}
	at("claimed")
	c := &Chair{p: p, i: i, seat: seat, gen: p.seatPolicy(seat).gen(), clock: clock, me: uint64(os.Getpid())}
	p.chair(i, scStart).Store(self())
	at("named")
	p.chair(i, scSeat).Store(packSeat(seat, c.gen))
	at("seated")
	if _, real := clock.(Monotonic); real {
		p.word(stClock).Store(clockMachine)
	} else {
		p.word(stClock).Store(clockSimulated)
		p.word(stNow).Store(uint64(clock.Now()))
	}
	return c, nil
}

// freeChair claims a chair; those of dead processes count as free.
func (p *page) freeChair() (int, error) {
	me := uint64(os.Getpid())
	for range 2 {
		for i := range MaxChairs {
			if p.chair(i, scOwner).CompareAndSwap(0, me) {
				raise(p.word(stHigh), uint64(i+1))
				return i, nil
			}
		}
		for i := range MaxChairs {
			p.bury(i, true)
		}
	}
	return 0, fmt.Errorf("turns: %w: %d sessions", ErrFull, MaxChairs)
}

// Close frees the chair. The turn must be done.
func (c *Chair) Close() {
	c.Quit()
	c.p.unmap()
}

// Quit frees the chair of a process that is about to end, and passes its turn on. Once is
// enough: the chair may be another process's right afterwards, and nothing that threads of
// this one do later touches it, or a turn.
func (c *Chair) Quit() {
	c.mu.Lock()
	gone := c.quit
	c.quit = true
	c.mu.Unlock()
	if gone {
		return
	}
	t := c.Turn()
	c.p.clearChair(c.i, c.me)
	if t != 0 {
		c.passLast(token(t))
	}
}

// write changes a word of the chair as long as it is this one's. False: it is not.
func (c *Chair) write(what int, n uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.quit {
		c.p.chair(c.i, what).Store(n)
	}
	return !c.quit
}

// passLast passes a turn on unless another session of the seat works in it.
func (c *Chair) passLast(t token) {
	for i := range c.p.chairs() {
		if c.p.works(i, c.seat, t) {
			return
		}
	}
	c.p.pass(t, c.clock.Now(), nobody)
}

// Seat is the chair's seat.
func (c *Chair) Seat() int { return c.seat }

// Token is the word that is equal to the turn as long as that lasts.
func (c *Chair) Token() *atomic.Uint64 { return c.p.token() }

func (c *Chair) ended() bool {
	w := c.p.seatPolicy(c.seat)
	return !w.present() || w.gen() != c.gen
}

// Ask says that this session has work.
func (c *Chair) Ask() {
	p := c.p
	if p.chair(c.i, scWant).Load() != 0 {
		return
	}
	now := c.clock.Now()
	var v view
	p.look(&v, now)
	if s := &v.places[c.seat]; s.present && !s.want && now-c.left.Load() > v.credit {
		// Who comes back after more than a moment brings no more along than a turn's credit.
		raise(p.seat(c.seat, ssVT), uint64(max(now-v.credit, 0)))
		c.joinLoans(&v)
	}
	at("asking")
	if !c.write(scWant, 1) {
		return
	}
	at("asked")
	t := token(p.token().Load())
	holder := t.seat()
	if holder < 0 || holder == c.seat {
		return
	}
	if t.borrowed() && v.own(c.seat) {
		p.word(stHurry).Store(uint64(t))
	}
	// The holder may think itself alone, and idle at its ease.
	p.rouse(holder)
}

// rouse wakes those who keep a seat's turn.
func (p *page) rouse(seat int) {
	for i := range p.chairs() {
		if p.chair(i, scOpen).Load() != 0 && p.chairSeat(i) == seat {
			ring(p.chairBell(i))
		}
	}
}

// awake takes back that the seat has not taken its turn: on a busy machine all may be
// slow to wake. The time in which it could not have worked is not its own: who was stopped
// for seconds has no claim to them.
func (c *Chair) awake(now int64) {
	p := c.p
	if p.seat(c.seat, ssOut).Load() == 0 {
		return
	}
	p.seat(c.seat, ssOut).Store(0)
	since := int64(p.seat(c.seat, ssDeaf).Swap(0))
	if since <= 0 || since >= now {
		return
	}
	var v view
	p.look(&v, now)
	s := &v.places[c.seat]
	if !s.present {
		return
	}
	raise(p.seat(c.seat, ssVT), uint64(max(min(v.bound(s.vt, s.share)+now-since, now), 0)))
	c.joinLoans(&v)
}

// joinLoans brings the borrowed time of one who comes back up to that of the others.
func (c *Chair) joinLoans(v *view) {
	s := &v.places[c.seat]
	if least := v.leastLoan(c.seat); least > s.bvt {
		raise(c.p.seat(c.seat, ssBVT), uint64(max(least-v.credit*whole/s.loan(), 0)))
	}
}

// leastLoan is the least borrowed time among the others with work.
func (v *view) leastLoan(but int) int64 {
	least := int64(-1)
	for i := range v.n {
		if s := &v.places[i]; i != but && s.present && s.want && (least < 0 || s.bvt < least) {
			least = s.bvt
		}
	}
	return least
}

// Unask takes the wish back.
func (c *Chair) Unask() {
	c.left.Store(c.clock.Now())
	c.write(scWant, 0)
}

// Turn gives the seat's turn if it has one now, and 0 if not. The turns of whoever has
// the seat after this lease are not its own.
func (c *Chair) Turn() Turn {
	if t := token(c.p.token().Load()); t.seat() == c.seat && !c.ended() {
		return Turn(t)
	}
	return 0
}

// Enter joins a turn. False: it is over, or about to be.
func (c *Chair) Enter(t Turn) bool {
	p := c.p
	if !c.write(scOpen, uint64(t)) { // the turn in which it works
		return false
	}
	at("open")
	if closing := p.seat(c.seat, ssClosing).Load() == uint64(t); closing || c.Turn() != t {
		c.write(scOpen, 0)
		if closing { // and whoever closes it has left the rest to this one
			c.passLast(token(t))
		}
		return false
	}
	if p.seat(c.seat, ssTook).Load() != uint64(t) {
		p.seat(c.seat, ssTook).Store(uint64(t))
		p.seat(c.seat, ssMisses).Store(0)
		p.seat(c.seat, ssOut).Store(0)
	}
	at("entered")
	return true
}

// Follow goes on in the turn that another session of the seat, or this one, has made
// of the one before.
func (c *Chair) Follow(t Turn) bool {
	if c.Turn() != t || !c.write(scOpen, uint64(t)) {
		return false
	}
	c.p.seat(c.seat, ssTook).Store(uint64(t))
	return true
}

// Done leaves a turn: this session has nothing on the GPU any more, or gives up to wait
// for that. The last session of the seat passes the token on.
func (c *Chair) Done(t Turn) {
	if c.leave(t) {
		at("left")
		c.passLast(token(t))
	}
}

// leave closes a turn and notes that this session does not work in it. False: the chair
// has been given back.
func (c *Chair) leave(t Turn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.quit {
		return false
	}
	if c.Turn() == t { // not on a seat that is another lease's by now
		c.p.seat(c.seat, ssClosing).Store(uint64(t))
	}
	at("closing")
	c.p.chair(c.i, scOpen).Store(0)
	return true
}

// works says whether a chair has work in the turn t of its seat.
func (p *page) works(i, seat int, t token) bool {
	o := token(p.chair(i, scOpen).Load())
	if o == 0 || p.chairSeat(i) != seat {
		return false
	}
	// It follows its seat's turn within one; after that it is stopped, or dead.
	return o.begin() >= t.begin()-p.quantum()-p.grace() && !p.bury(i, false)
}

// Renew makes another turn of this one if this seat would be next anyway.
func (c *Chair) Renew(t Turn) (Turn, bool) {
	p, now := c.p, c.clock.Now()
	var v view
	p.look(&v, now)
	old := token(t)
	held := p.held(old, now)
	v.charge(c.seat, held, old.borrowed())
	next, borrowed, _ := v.pick(nobody)
	if next != c.seat || p.seat(c.seat, ssClosing).Load() == uint64(t) {
		return 0, false
	}
	if !c.write(scOpen, uint64(t)) { // it does not change that, but its chair may be gone
		return 0, false
	}
	n := packToken(next, borrowed, old.after(now))
	// Before the token shows it, or somebody would think it not taken.
	p.seat(c.seat, ssTook).Store(uint64(n))
	at("renewing")
	if !p.token().CompareAndSwap(uint64(t), uint64(n)) {
		if now := c.Turn(); now != 0 { // another session of the seat was sooner: its turn is taken
			p.seat(c.seat, ssTook).Store(uint64(now))
		}
		return 0, false
	}
	at("renewed")
	p.stamp(now)
	p.charge(&v, c.seat, old, held)
	p.count(c.seat, cTurns).Add(1)
	c.write(scOpen, uint64(n))
	return Turn(n), true
}

// Alert tells who is likely to be next that this turn ends in a moment. It says whether
// that is another seat.
func (c *Chair) Alert(t Turn) bool {
	p, now := c.p, c.clock.Now()
	var v view
	p.look(&v, now)
	// By what the turn is going to be charged, and a little more: to be told in vain costs
	// less than to be told nothing, and two equal seats are level after each turn.
	ends := max(now, c.Ends(t)) + int64(AlertLead)
	v.now = ends
	v.charge(c.seat, p.held(token(t), ends), token(t).borrowed())
	next, _, _ := v.pick(nobody)
	if next == c.seat {
		return false
	}
	if next >= 0 && p.seat(next, ssAlert).Swap(uint64(t)) != uint64(t) && c.clock.Spins() {
		ring(p.seatBell(next))
	}
	return true
}

// Contended says whether another seat has work.
func (c *Chair) Contended() bool {
	p := c.p
	for i := range p.chairs() {
		if p.chair(i, scWant).Load() != 0 {
			if s := p.chairSeat(i); s >= 0 && s != c.seat {
				return true
			}
		}
	}
	return false
}

// Capped says whether the seat may not use more than its own share even when nobody
// else has work.
func (c *Chair) Capped() bool {
	var v view
	c.p.look(&v, c.clock.Now())
	return v.places[c.seat].kind == Fixed || v.rate < whole
}

// Ends gives a turn's end; sooner than planned if it was borrowed and is wanted back.
func (c *Chair) Ends(t Turn) int64 {
	if c.p.word(stHurry).Load() == uint64(t) {
		return token(t).begin()
	}
	return token(t).begin() + c.length(t)
}

// length is how long a turn is planned to be.
func (c *Chair) length(t Turn) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.plan != t {
		c.plan, c.long = t, c.p.quantum()
		if !token(t).borrowed() {
			var v view
			c.p.look(&v, c.clock.Now())
			c.long += v.fit(c.seat)
		}
	}
	return c.long
}

// Overdue is when a turn is taken away.
func (c *Chair) Overdue(t Turn) int64 { return token(t).begin() + c.p.quantum() + c.p.grace() }

// Quantum is a turn's length.
func (c *Chair) Quantum() int64 { return c.p.quantum() }

// Nap waits until a time, or until somebody rouses the keeper of this chair. seen is
// what Bell gave before it was last looked whether there is anything to do.
func (c *Chair) Nap(seen uint32, until int64) {
	c.clock.Wait((*uint32)(ptr(c.p.chairBell(c.i))), seen, until, false)
}

// Bell is the keeper's.
func (c *Chair) Bell() uint32 { return c.p.chairBell(c.i).Load() }

// Rouse wakes this chair's keeper.
func (c *Chair) Rouse() { ring(c.p.chairBell(c.i)) }

// Wake makes Wait look again.
func (c *Chair) Wake() { ring(c.p.seatBell(c.seat)) }

// Busy counts time that the GPU worked for this session.
func (c *Chair) Busy(d time.Duration) {
	if !c.ended() {
		c.p.count(c.seat, cBusy).Add(ns(d))
	}
}

// Late notes since when work of an ended turn is on the GPU; 0: it is not any more.
func (c *Chair) Late(since int64) { c.write(scLate, uint64(max(since, 0))) }

// Owe charges time that such work took from others.
func (c *Chair) Owe(d time.Duration) {
	if d > 0 && !c.ended() {
		c.p.owe(c.seat, d, c.clock.Now())
	}
}
