// Package turns shares a GPU's time by turns: one lease at a time, the holder of the
// token, gives work to it.
//
// A board is two files for each GPU, which its owner makes and every session on the
// GPU maps. The policy file is written by the owner only; sessions map it read-only.
// The state file is written by all:
//
//	token   who has the turn and since when, in one word
//	seats   one a lease: how far it is (virtual time), and counters
//	chairs  one a session: its process, whether it wants the token, whether it works
//
// There are no locks. The token changes by compare-and-swap, every other word is
// written whole, and nobody counts up what another would have to count down: who
// wants, who works and who is there follows from the chairs, and a dead process's
// chair is freed by whoever finds it. Whoever lets go of the token, finds it unused
// or takes it from one that overstayed decides who is next (pick.go), so neither the
// owner nor any one session is needed for the others to go on.
package turns

import (
	"errors"
	"time"
)

// Sizes of a board.
const (
	MaxSeats  = 128
	MaxChairs = 1024
	// Whole is the weight of a whole GPU: weights are in hundredths of a percent.
	Whole = 10000
)

// Kind is a policy's kind.
type Kind uint32

// The kinds of policies.
const (
	BestEffort Kind = iota // whoever has work, by weight
	Equal                  // 1/n
	Fixed                  // the weight, no more and no less while there is work
)

// Policy is a seat's.
type Policy struct {
	Kind   Kind
	Weight uint32 // 1 to Whole; of Equal it does not matter
	// Lend lets others use this seat's time while it has no work. Of best effort
	// seats that is always so.
	Lend bool
}

// Site is what holds for all seats of a GPU.
type Site struct {
	Quantum time.Duration // length of a turn; 0: DefaultQuantum
	Grace   time.Duration // after it the token goes on; 0: DefaultGrace
	// EqualActive makes equal seats share by those with work: as if all would lend.
	// Otherwise each has 1/n of those present.
	EqualActive bool
}

// Defaults of a site.
const (
	DefaultQuantum = 20 * time.Millisecond
	DefaultGrace   = 20 * time.Millisecond
)

// Counters is what a seat has had so far. They begin with the seat.
type Counters struct {
	Held      time.Duration // had the token
	Busy      time.Duration // of that, the GPU worked for it, as far as events tell
	Waited    time.Duration // a session wanted the token and had it not; sessions add up
	Throttled time.Duration // of that, its own share was used up
	Lent      time.Duration // of its time, used by others
	Borrowed  time.Duration // of Held, beyond its own share
	Turns     uint64
	Overruns  uint64        // turns that ended later than the grace, or were taken away
	Longest   time.Duration // longest overrun, measured from the turn's end
	Revoked   uint64        // turns that were taken away
}

// SeatCounters is a seat as its board's owner sees it.
type SeatCounters struct {
	Seat   int
	Lease  string
	Policy Policy
	Share  uint32 // what its policy gives it of the GPU now, as weights are
	Chairs int    // sessions
	Wants  bool   // one of them has work or waits
	Counters
	// Overrun is how long work of an ended turn has been on the GPU beyond it; 0: none is.
	Overrun    time.Duration
	OverrunPID int // whose session that is
}

// Errors.
var (
	// ErrFile says that a file is no board of this version.
	ErrFile = errors.New("no turns board of this version")
	// ErrFull says that the board has no seat or chair left.
	ErrFull = errors.New("the GPU's board is full")
	// ErrEnded says that the seat is gone, or is another lease's now.
	ErrEnded = errors.New("the lease has ended")
)

// Clock is the time that turns are measured in, ns. The simulated GPU has its own.
type Clock interface {
	Now() int64
	// Wait sleeps until *word is not old any more, somebody wakes it or the time has
	// come; it may return early. blocked says that this process can give the GPU no
	// work before it returns. A nil word is a plain sleep.
	Wait(word *uint32, old uint32, until int64, blocked bool)
	// Spins says whether it is worth to spin instead of to sleep for a short while.
	Spins() bool
}
