package lease

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Lend says what becomes of a lease's compute time while it has no work.
type Lend string

// The ways. A lease of best effort lends always.
const (
	LendSite Lend = ""    // as the owner's site says
	LendYes  Lend = "yes" // others may use it until it is asked back
	LendNo   Lend = "no"  // it passes unused
	// LendReset is LendSite in a Change, whose zero value leaves what is.
	LendReset Lend = "site"
)

const lending = "-lend"

// ParsePolicy reads one of form.Policies: "fixed-lend" is Fixed with LendYes. A name without
// -lend says nothing of lending.
func ParsePolicy(name string) (Policy, Lend, error) {
	if !slices.Contains(form.Policies, name) {
		return "", "", fmt.Errorf("policy %q is none of %s", name, strings.Join(form.Policies, ", "))
	}
	if p, ok := strings.CutSuffix(name, lending); ok {
		return Policy(p), LendYes, nil
	}
	return Policy(name), LendSite, nil
}

// PolicyName is what the request's policy is called, best-effort for one that says none.
func (r *Request) PolicyName() string {
	switch {
	case r.Policy == "" || r.Policy == BestEffort:
		return string(BestEffort)
	case r.Lend == LendYes:
		return string(r.Policy) + lending
	}
	return string(r.Policy)
}

// Paid is the percent that the grant was given at first: what `sluice set` may not go
// beyond unless root says so.
func (g Grant) Paid() uint32 {
	if g.First != 0 {
		return g.First
	}
	return g.Percent
}

// Change is what is to be different of a living lease; zero values leave what is.
type Change struct {
	Lease string `json:"lease"`
	// Shares are percent by the order of the lease's fractions; 0, and what is missing
	// at the end, leaves a fraction as it is.
	Shares []uint32 `json:"shares,omitempty"`
	Policy Policy   `json:"policy,omitempty"`
	Lend   Lend     `json:"lend,omitempty"`
	Beyond bool     `json:"beyond,omitempty"` // also to more than was granted at first
	By     uint32   `json:"by"`               // the user who wants it, for the audit log
}

// Share of the fraction of that order, 0 to leave it.
func (c *Change) Share(order int) uint32 {
	if order < 0 || order >= len(c.Shares) {
		return 0
	}
	return c.Shares[order]
}

func (c *Change) String() string {
	var s []string
	for i, p := range c.Shares {
		if p != 0 {
			s = append(s, fmt.Sprintf("share of fraction %d %d%%", i, p))
		}
	}
	if c.Policy != "" {
		s = append(s, "policy "+string(c.Policy))
	}
	if c.Lend != "" {
		s = append(s, "lend "+string(c.Lend))
	}
	return strings.Join(s, ", ")
}

// Share is what one grant had of its GPU's compute time over its life. What all leases on
// a GPU held adds up to at most the time that passed.
type Share struct {
	Due       uint32        `json:"due"`       // what its policy gives it now, in 1/100 percent
	Held      time.Duration `json:"held"`      // the GPU was the lease's own
	Busy      time.Duration `json:"busy"`      // and computed, by events on the GPU
	Waited    time.Duration `json:"waited"`    // it had work, and the turn was another's; its sessions add up
	Throttled time.Duration `json:"throttled"` // of that, for its own percent's sake
	Lent      time.Duration `json:"lent"`      // others had of what was its own
	Borrowed  time.Duration `json:"borrowed"`  // it had of what was others'
	Longest   time.Duration `json:"longest"`   // the longest overrun
	Turns     uint64        `json:"turns"`
	Overruns  uint64        `json:"overruns"` // turns whose work went on past their end
	Revoked   uint64        `json:"revoked"`  // turns that were taken away
}

// Add returns the sum of two shares.
func (s Share) Add(o Share) Share {
	s.Due += o.Due
	s.Held, s.Busy, s.Waited, s.Throttled = s.Held+o.Held, s.Busy+o.Busy, s.Waited+o.Waited, s.Throttled+o.Throttled
	s.Lent, s.Borrowed, s.Longest = s.Lent+o.Lent, s.Borrowed+o.Borrowed, max(s.Longest, o.Longest)
	s.Turns, s.Overruns, s.Revoked = s.Turns+o.Turns, s.Overruns+o.Overruns, s.Revoked+o.Revoked
	return s
}

// SumShares returns the sum of the shares of all grants of a lease.
func SumShares(all []Share) (sum Share) {
	for _, s := range all {
		sum = sum.Add(s)
	}
	return sum
}

// Validate refuses what makes no sense for any lease.
func (c *Change) Validate() error {
	nothing := c.Policy == "" && c.Lend == ""
	for _, p := range c.Shares {
		if p > 100 {
			return Errorf(Invalid, "share of %d%%: want 1 to 100 percent of one GPU", p)
		}
		nothing = nothing && p == 0
	}
	switch {
	case nothing:
		return Errorf(Invalid, "nothing to change of lease %.40q: give a share of 1 to 100 percent, a policy, or whether it lends", c.Lease)
	case c.Policy != "" && c.Policy != BestEffort && c.Policy != Equal && c.Policy != Fixed:
		return Errorf(Invalid, "policy %.40q: want %s, %s or %s", c.Policy, BestEffort, Equal, Fixed)
	case c.Lend != "" && c.Lend != LendYes && c.Lend != LendNo && c.Lend != LendReset:
		return Errorf(Invalid, "lend %.40q: want %s, %s or %s", c.Lend, LendYes, LendNo, LendReset)
	}
	return nil
}
