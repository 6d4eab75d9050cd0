package lease

import (
	"context"
	"time"
)

// Watchable is an owner that tells controllers what changes, and that keeps for the nodes of
// their jobs which owners have what. With it a pool may have thousands of owners: nobody has to
// ask them all. An owner of an earlier release, or the pool of a few owners, does without.
type Watchable interface {
	// Watch returns what has changed since then: at once if something has, else when something
	// does, and after wait at the latest. It is for controllers.
	Watch(ctx context.Context, host string, since Mark, wait time.Duration) (Changes, error)
	// Register keeps for a while which owners have a job's leases, so that Where can say it. It
	// is for controllers. It is advice: nothing of it survives the owner's daemon.
	Register(ctx context.Context, host, cluster, job string, leases []Whereabouts) error
	// Where returns the owners that have a lease of the job for host, as far as this owner
	// knows; none if it knows nothing.
	Where(ctx context.Context, host, cluster, job string) ([]string, error)
}

// Mark is a moment in the life of an owner's daemon. The zero Mark is before all of them.
type Mark struct {
	Epoch uint64 `json:"epoch"` // names the process
	Seq   uint64 `json:"seq"`   // changes since then
}

// Changes are an owner's GPUs as they are at a moment, and what has become of its leases.
type Changes struct {
	Inventory Inventory `json:"inventory"`
	At        Mark      `json:"at"`
	Whole     bool      `json:"whole"` // Leases are all that live, not what has changed
	Leases    []Ref     `json:"leases"`
}

// Ref names a lease.
type Ref struct {
	ID   string `json:"id"`
	Key  Key    `json:"key"`
	Over bool   `json:"over,omitempty"` // it has ended
}

// Whereabouts are the owners of a job's lease for one of its nodes.
type Whereabouts struct {
	Node   string   `json:"node"`
	Owners []string `json:"owners"`
}
