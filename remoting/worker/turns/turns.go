// Package turns shares a GPU's time by turns: at any time one lease, the holder of the
// token, may start work on the GPU.
//
// Each GPU has a schedule: two files that the GPU's owner makes and that every session on
// the GPU maps. Only the owner writes the policy file; sessions map it read-only. Everybody
// writes the state file, which has
//
//	the token    who has the turn, and since when, in one word
//	tenants      one record for each lease: its virtual time and its counters
//	members      one record for each session: its process, whether it wants the token, and
//	             whether it works in a turn
//
// There are no locks. The token changes by compare-and-swap, and every other word is written
// whole. No counter is incremented by one process and decremented by another: the member records
// say which sessions exist, work and want the token, and any session that finds the record
// of a dead process frees it. A process that passes the token on, finds it unused, or takes it
// from a tenant that overstays its turn decides whose turn is next (pick.go). So neither the
// owner nor any one session is needed for the others to go on.
package turns

import (
	"errors"
	"time"
)

// Sizes of a schedule.
const (
	MaxTenants = 128
	MaxMembers = 1024
	// FullWeight is the weight of a whole GPU: weights are in hundredths of a percent.
	FullWeight = 10000
)

// Kind is a policy's kind.
type Kind uint32

// The kinds of policies.
const (
	BestEffort Kind = iota // shares what is free with other tenants that have work, by weight
	Equal                  // 1/n
	Fixed                  // the weight, no more and no less while there is work
)

// Policy says how much time a tenant gets.
type Policy struct {
	Kind   Kind
	Weight uint32 // 1 to FullWeight; Equal uses it between a lease and its parts only
	// Lend lets other tenants use this one's time while it has no work. Best-effort
	// tenants always lend.
	Lend bool
}

// Site is what holds for all tenants of a GPU.
type Site struct {
	Quantum time.Duration // length of a turn; 0: DefaultQuantum
	Grace   time.Duration // how long after its end a turn may still be kept; 0: DefaultGrace
	// EqualActive divides the time of equal tenants among those with work, as if all of
	// them lent. Otherwise each has 1/n of those present.
	EqualActive bool
	// Limit is how long work may stay on the GPU after its turn while others wait; 0: for any time.
	Limit   time.Duration
	Overrun Overrun
}

// Overrun says which sessions end whose work exceeds the site's limit.
type Overrun uint32

// The choices of Overrun.
const (
	OverrunGoesOn    Overrun = iota // none: only the owner learns of it
	OverrunEndsFixed                // those of fixed tenants, and those whose work delays a fixed tenant
	OverrunEnds                     // all
)

// Defaults of a site.
const (
	DefaultQuantum = 20 * time.Millisecond
	DefaultGrace   = 20 * time.Millisecond
)

// Counters says what a tenant has had since its lease was added to the schedule.
type Counters struct {
	Held      time.Duration // had the token
	Busy      time.Duration // part of Held: the GPU worked for it, as far as events tell
	Waited    time.Duration // sessions wanted the token and did not have it, added up
	Throttled time.Duration // part of Waited: its own share was used up
	Lent      time.Duration // its time, used by others
	Borrowed  time.Duration // part of Held: beyond its own share
	Turns     uint64
	Overruns  uint64        // turns that outlasted the grace
	Longest   time.Duration // longest overrun, measured from the turn's end
	Revoked   uint64        // turns that were taken away
}

// TenantCounters describes a tenant to the owner of its schedule.
type TenantCounters struct {
	Tenant  int
	Lease   string
	Part    string // of the lease; "" for the lease itself
	Policy  Policy
	Share   uint32 // what its policy gives it of the GPU now, in the unit of weights
	Most    uint32 // the most that the policies of all tenants can give it, whatever the others do, in the same unit
	Members int    // sessions
	Wants   bool   // one of them has work or waits
	Counters
	Owes time.Duration // what its work had of the GPU after its turns, as far as it is not paid for
	// Overdue are the sessions whose work of an ended turn is on the GPU while others wait, unless
	// another tenant's overdue work delays it.
	Overdue []Overdue
	// Delayed are those whose overdue work another tenant's overdue work delays, as the sessions say.
	Delayed []Overdue
	Ends    bool // such a session ends when it exceeds the site's limit
}

// Overdue is a session whose work of an ended turn is on the GPU.
type Overdue struct {
	PID  int           // the session's process
	Time time.Duration // how long it has been there beyond that turn, also while nobody waited
}

// Errors.
var (
	// ErrFile says that a file is no schedule of this version.
	ErrFile = errors.New("no turns schedule of this version")
	// ErrFull says that the schedule has no free record left.
	ErrFull = errors.New("the GPU's schedule is full")
	// ErrEnded says that the tenant is gone, or that its record belongs to another lease now.
	ErrEnded = errors.New("the lease has ended")
)

// Clock is the time that turns are measured by, in ns. The simulated GPU has its own.
type Clock interface {
	Now() int64
	// Wait sleeps until *word differs from old, somebody wakes it or the time has come; it
	// may return early. blocked says that this process cannot start work on the GPU before
	// Wait returns. With a nil word Wait is a plain sleep.
	Wait(word *uint32, old uint32, until int64, blocked bool)
	// Spins says whether short waits should spin rather than sleep.
	Spins() bool
}
