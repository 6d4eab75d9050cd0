package lease

import (
	"context"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Holding says which of an owner's leases are counted together, for a quota.
type Holding struct {
	UID     uint32 `json:"uid"`               // those of this user, unless Account is given
	Account string `json:"account,omitempty"` // those of this account's jobs in Cluster
	Cluster string `json:"cluster,omitempty"`
	Pool    string `json:"pool,omitempty"`   // those of this pool; "" of all
	Jobs    bool   `json:"jobs,omitempty"`   // those of Slurm's jobs too
	Except  string `json:"except,omitempty"` // id of a lease that does not count
}

// Held is what the leases of a Holding have of one owner's GPUs. What has been granted counts as it was at first:
// what `sluice set` has taken from it can be given back.
type Held struct {
	Percent  uint64 `json:"percent"`            // of GPUs, added up
	Mem      uint64 `json:"mem"`                // bytes
	Leases   int    `json:"leases"`             // those whose first fraction is here, so that each counts at one owner
	Reserved int    `json:"reserved,omitempty"` // parts of leases that are reserved and not granted yet
}

// Add returns the sum of what two owners say.
func (h Held) Add(o Held) Held {
	return Held{h.Percent + o.Percent, h.Mem + o.Mem, h.Leases + o.Leases, h.Reserved + o.Reserved}
}

// Counts says whether a lease is one of the holding's.
func (h *Holding) Counts(l *Lease) bool {
	q := &l.Request
	run := form.IsRunJob(q.Key.Job)
	switch {
	case l.ID == h.Except || h.Pool != "" && q.Pool != h.Pool:
		return false
	case h.Account != "":
		return !run && q.Account == h.Account && q.Key.Cluster == h.Cluster
	}
	return q.UID == h.UID && (run || h.Jobs)
}

// HeldBy is what some of a lease's grants are.
func HeldBy(l *Lease, grants []Grant) (h Held) {
	for _, g := range grants {
		h.Percent += uint64(max(g.Percent, g.Paid()))
		h.Mem += g.Mem
		if g.Order == 0 {
			h.Leases++
		}
	}
	if l.State == Reserved {
		h.Reserved = 1
	}
	return h
}

// Counter is an owner that says what users and accounts hold. Owners of earlier releases do not.
type Counter interface {
	// Held answers one Held for each holding.
	Held(ctx context.Context, host string, of []Holding) ([]Held, error)
}

// EachAccount is the account of a quota for each account that has no quota of its own.
const EachAccount = "*"

// MaxHoldings is the most holdings in one question.
const MaxHoldings = 64
