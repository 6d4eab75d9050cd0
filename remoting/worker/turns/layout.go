package turns

// Where the words of a board's two files lie, and how they are packed. Whatever is
// read from the state file may have been written by a session gone mad: every number
// is bounded before it is used, and nothing loops for longer than the tables are long.

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	policyMagic = 0x4c4f50534e525554 // "TURNSPOL"
	stateMagic  = 0x4154535352554e54
	version     = 1

	seatNameSize = 64
	headerSize   = 4096

	// The policy file.
	poMagic   = 0
	poVersion = 8
	poQuantum = 16 // ns
	poGrace   = 24
	poFlags   = 32
	poHigh    = 40 // seats ever used
	poSeats   = headerSize
	poSeat    = 96
	psWord    = 0
	psName    = 16

	policySize = poSeats + MaxSeats*poSeat

	// The state file. What is written often has a cache line of its own.
	stMagicAt  = 0
	stVersion  = 8
	stHigh     = 16 // chairs ever used
	stClock    = 24 // the sessions' clock: unknown yet, the machine's, or a simulated one,
	stNow      = 32 // of which this is the newest time that a session has seen
	stToken    = 64
	stHurry    = 128
	stPool     = 192
	stSeats    = headerSize
	stSeat     = 256
	ssVT       = 0
	ssBVT      = 8
	ssBell     = 16 // 32 bits: a futex
	ssAlert    = 24
	ssClosing  = 32
	ssTook     = 40
	ssOut      = 48
	ssMisses   = 56
	ssCounters = 64
	ssDeaf     = 152 // since when it has not taken what it was given
	stChairs   = stSeats + MaxSeats*stSeat
	stChair    = 128
	scOwner    = 0
	scStart    = 8
	scSeat     = 16
	scWant     = 24
	scOpen     = 32
	scLate     = 40
	scBell     = 48 // 32 bits: a futex

	stateSize = stChairs + MaxChairs*stChair
)

// Places of counters.
const (
	cHeld = iota
	cBusy
	cWaited
	cThrottled
	cLent
	cBorrowed
	cTurns
	cOverruns
	cLongest
	cRevoked
)

const equalActive = 1 // in poFlags

const (
	clockMachine   = 1
	clockSimulated = 2
)

// page is a mapped board.
type page struct {
	pol, st []byte
}

func mapPages(policyFD, stateFD int, write bool) (*page, error) {
	for fd, n := range map[int]int64{policyFD: policySize, stateFD: stateSize} {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, fmt.Errorf("turns: board: %w", err)
		}
		if st.Size < n {
			return nil, fmt.Errorf("%w: %d bytes", ErrFile, st.Size)
		}
	}
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	p := &page{}
	var err error
	if p.pol, err = unix.Mmap(policyFD, 0, policySize, prot, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("turns: policy file: %w", err)
	}
	if p.st, err = unix.Mmap(stateFD, 0, stateSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		_ = unix.Munmap(p.pol)
		return nil, fmt.Errorf("turns: state file: %w", err)
	}
	return p, nil
}

func (p *page) unmap() {
	_ = unix.Munmap(p.pol)
	_ = unix.Munmap(p.st)
}

func (p *page) polWord(at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&p.pol[at])) }
func (p *page) word(at int) *atomic.Uint64    { return (*atomic.Uint64)(unsafe.Pointer(&p.st[at])) }
func (p *page) bell(at int) *atomic.Uint32    { return (*atomic.Uint32)(unsafe.Pointer(&p.st[at])) }

func (p *page) token() *atomic.Uint64 { return p.word(stToken) }
func (p *page) seat(i, what int) *atomic.Uint64 {
	return p.word(stSeats + i*stSeat + what)
}

func (p *page) count(i, what int) *atomic.Uint64 {
	return p.word(stSeats + i*stSeat + ssCounters + 8*what)
}
func (p *page) seatBell(i int) *atomic.Uint32 { return p.bell(stSeats + i*stSeat + ssBell) }
func (p *page) chair(i, what int) *atomic.Uint64 {
	return p.word(stChairs + i*stChair + what)
}
func (p *page) chairBell(i int) *atomic.Uint32 { return p.bell(stChairs + i*stChair + scBell) }

func (p *page) seats() int  { return int(min(p.polWord(poHigh).Load(), MaxSeats)) }
func (p *page) chairs() int { return int(min(p.word(stHigh).Load(), MaxChairs)) }

func (p *page) quantum() int64 { return bounded(p.polWord(poQuantum).Load(), DefaultQuantum) }
func (p *page) grace() int64   { return bounded(p.polWord(poGrace).Load(), DefaultGrace) }

func bounded(n uint64, def time.Duration) int64 {
	if n == 0 || n > uint64(10*time.Second) {
		return int64(def)
	}
	return int64(n)
}

func (p *page) valid() bool {
	return p.polWord(poMagic).Load() == policyMagic && p.polWord(poVersion).Load() == version &&
		p.word(stMagicAt).Load() == stateMagic && p.word(stVersion).Load() == version
}

// format makes an empty board. The magic comes last: one half made is made anew.
func (p *page) format() {
	p.polWord(poMagic).Store(0)
	p.word(stMagicAt).Store(0)
	clear(p.pol[8:])
	clear(p.st[8:])
	p.polWord(poVersion).Store(version)
	p.word(stVersion).Store(version)
	p.word(stMagicAt).Store(stateMagic)
	p.polWord(poMagic).Store(policyMagic)
}

func (p *page) setSite(s Site) {
	p.polWord(poQuantum).Store(ns(s.Quantum))
	p.polWord(poGrace).Store(ns(s.Grace))
	var f uint64
	if s.EqualActive {
		f |= equalActive
	}
	p.polWord(poFlags).Store(f)
}

// A policy word: kind, flags, weight, and the seat's generation, which tells one lease
// on a seat from the next.
type policyWord uint64

const (
	pwLend    = 1 << 8
	pwPresent = 1 << 9
)

func packPolicy(p Policy, gen uint32) policyWord {
	w := policyWord(p.Kind&0xff) | policyWord(min(max(p.Weight, 1), Whole))<<16 | policyWord(gen)<<32 | pwPresent
	if p.Lend {
		w |= pwLend
	}
	return w
}

func (w policyWord) present() bool  { return w&pwPresent != 0 }
func (w policyWord) gen() uint32    { return uint32(w >> 32) }
func (w policyWord) weight() uint32 { return min(max(uint32(w>>16)&0xffff, 1), Whole) }
func (w policyWord) policy() Policy {
	return Policy{Kind: min(Kind(w&0xff), Fixed), Weight: w.weight(), Lend: w&pwLend != 0}
}

func (p *page) seatPolicy(i int) policyWord {
	return policyWord(p.polWord(poSeats + i*poSeat + psWord).Load())
}

func (p *page) seatName(i int) leaseName {
	return leaseName(p.pol[poSeats+i*poSeat+psName : poSeats+i*poSeat+psName+seatNameSize])
}

// A token: the seat that has the turn, whether it is borrowed, and when it began, us.
type token uint64

const (
	tokenBorrowed = 1 << 55
	tokenBegin    = tokenBorrowed - 1
)

// nobody is the seat of a token that is free.
const nobody = -1

func packToken(seat int, borrowed bool, begin int64) token {
	t := token(seat+1)<<56 | token(begin)&tokenBegin
	if borrowed {
		t |= tokenBorrowed
	}
	return t
}

func (t token) seat() int {
	if i := int(t>>56) - 1; i < MaxSeats {
		return i
	}
	return nobody
}
func (t token) borrowed() bool { return t&tokenBorrowed != 0 }
func (t token) us() int64      { return int64(t & tokenBegin) }
func (t token) begin() int64   { return min(t.us(), 1<<53) * 1000 }

// after is when the next turn begins, us: now, and never when this one did. A begin that
// nobody believes (judge) is no reason to go on from there.
func (t token) after(now int64) int64 {
	us := now / 1000
	if t.us() >= us && t.begin() <= now+future {
		us = t.us() + 1
	}
	return us
}

// packSeat is a chair's word that says whose it is.
func packSeat(seat int, gen uint32) uint64 { return uint64(seat+1) | uint64(gen)<<32 }

// chairSeat gives the seat that a chair belongs to, or nobody.
func (p *page) chairSeat(i int) int {
	if p.chair(i, scOwner).Load() == 0 {
		return nobody
	}
	w := p.chair(i, scSeat).Load()
	s := int(uint32(w)) - 1
	if s < 0 || s >= MaxSeats {
		return nobody
	}
	if pol := p.seatPolicy(s); !pol.present() || pol.gen() != uint32(w>>32) {
		return nobody
	}
	return s
}

// now is the time for an owner, who knows only the machine's clock.
func (p *page) now() int64 {
	if p.word(stClock).Load() == clockSimulated {
		return int64(p.word(stNow).Load())
	}
	return monotonic()
}

// ptr is a futex word's address.
func ptr(w *atomic.Uint32) unsafe.Pointer { return unsafe.Pointer(w) }
