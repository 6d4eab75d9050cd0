package lease

import (
	"context"
	"time"

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

// Held is what the leases of a Holding have of one owner's GPUs. A lease counts with what it was first granted:
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

// HeldPart is what a lease has of one owner's GPUs, and whose it is, as quotas count it.
type HeldPart struct {
	ID      string `json:"id"`
	UID     uint32 `json:"uid"`
	Cluster string `json:"cluster"`
	Account string `json:"account,omitempty"`
	Pool    string `json:"pool,omitempty"`
	Run     bool   `json:"run,omitempty"` // it is none of Slurm's jobs
	Held    Held   `json:"held"`
}

// HeldPartOf is what some of a lease's grants, which are one owner's, count as.
func HeldPartOf(l *Lease, grants []Grant) HeldPart {
	r := &l.Request
	return HeldPart{ID: l.ID, UID: r.UID, Cluster: r.Key.Cluster, Account: r.Account, Pool: r.Pool, Run: form.IsRunJob(r.Key.Job), Held: HeldBy(l, grants)}
}

// Counts says whether a lease's part is one of the holding's.
func (h *Holding) Counts(p *HeldPart) bool {
	switch {
	case p.ID == h.Except || h.Pool != "" && p.Pool != h.Pool:
		return false
	case h.Account != "":
		return !p.Run && p.Account == h.Account && p.Cluster == h.Cluster
	}
	return p.UID == h.UID && (p.Run || h.Jobs)
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

// In large pools a node does not ask all owners: a controller's daemon knows what most of them would say.
//
//	owner       promises the controller to answer no Reserve of a reservation before the controller has heard of it, or
//	            before the promise has run out; each answer to WatchHeld renews the promise
//	controller  adds up what it has heard from the owners whose promises hold, and names the others
//	node        asks the controller by way of any owner that it watches, and the others itself
//
// docs/design.md, "Quotas", says why a sum made so is as good as one that all owners were asked for.

// Promiser is an owner that makes such promises, and passes on the questions of nodes. Owners of earlier releases do not.
type Promiser interface {
	// WatchHeld is Watch with a promise. It is for controllers.
	WatchHeld(ctx context.Context, host string, q HeldWatch) (HeldChanges, error)
	// HeldEverywhere has a controller answer. NotFound says that none can at this moment.
	HeldEverywhere(ctx context.Context, host string, q HeldQuestion) (HeldSum, error)
}

// HeldWatch asks what has changed since then, and says by that that all until then is known.
type HeldWatch struct {
	Since   Mark
	Wait    time.Duration // of an answer that says nothing new
	Gap     time.Duration // the least time between two answers, in which changes gather; neither reservations nor questions wait for it
	Answers []HeldAnswer  // to questions of the last answer
}

// HeldChanges is the answer.
type HeldChanges struct {
	Changes
	Parts     []HeldPart    // of those of Leases that live
	Promise   time.Duration // how long it holds from the answer on; 0 for none
	Waited    time.Duration // how long the owner put the answer off
	Questions []HeldQuestion
}

// HeldQuestion asks what leases have at all owners.
type HeldQuestion struct {
	ID       uint64 // of the owner that passes it on
	Holdings []Holding
	Owners   uint64 // a checksum of the names of all owners in the pools, by which the controller finds out that its pools are the same
}

// HeldAnswer is a controller's answer to a question.
type HeldAnswer struct {
	ID  uint64
	Sum HeldSum
}

// HeldSum is what leases have at the owners that the controller can speak for.
type HeldSum struct {
	Known  bool     // by the controller; else nothing else is said
	Held   []Held   // one for each holding, without what Unsure have
	At     []string // the owners, but for Unsure, where some of it is
	Many   bool     // there are too many of them to name
	Unsure []string // owners that have to be asked
}

// MaxUnsure is the most owners that a sum leaves to be asked, and MaxAt the most that it names for having some of it.
const (
	MaxUnsure = 64
	MaxAt     = 16
)
