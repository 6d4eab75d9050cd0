package owner

// Held: what users and accounts have of this owner's GPUs. Hosts add up the answers of all owners
// for the quotas of their site, see quota.go in package host.

import (
	"context"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// Held implements lease.Counter. Any node whose daemon this one knows may ask, since it says no more of a user than how much the user has.
// A lease counts from its reservation until its last session has ended.
func (o *Owner) Held(_ context.Context, _ string, of []lease.Holding) ([]lease.Held, error) {
	if len(of) > lease.MaxHoldings {
		return nil, lease.Errorf(lease.Invalid, "%d holdings in one question: at most %d", len(of), lease.MaxHoldings)
	}
	out := make([]lease.Held, len(of))
	o.mu.RLock()
	defer o.mu.RUnlock()
	for _, e := range o.leases {
		part := lease.HeldPartOf(&e.rec.Lease, e.rec.Lease.Grants)
		for i := range of {
			if of[i].Counts(&part) {
				out[i] = out[i].Add(part.Held)
			}
		}
	}
	return out, nil
}

var _ lease.Counter = (*Owner)(nil)
