package host

// Set: the owners of a lease change their parts of it, one after the other, and this host's
// record follows. Owners do not know each other: if one refuses, this host asks those before it
// to undo the change.

import (
	"context"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// Set implements rpc.LocalService. A user may change the user's own leases, root also leases
// that other nodes have on this node's GPUs.
func (h *Host) Set(ctx context.Context, p rpc.Peer, c lease.Change) (lease.Lease, error) {
	c.By, c.Beyond = p.UID, p.UID == 0
	if err := c.Validate(); err != nil {
		return lease.Lease{}, err
	}
	h.mu.Lock()
	hd := h.leases[c.Lease]
	var l lease.Lease
	live := hd != nil && hd.rec.Phase == granted && hd.rec.Lease.Host == h.cfg.Node
	if live {
		l = hd.rec.Lease
	}
	h.mu.Unlock()
	switch {
	case !live && p.UID == 0 && h.cfg.Local != nil:
		return h.cfg.Local.Set(ctx, h.cfg.Node, c)
	case !live:
		return lease.Lease{}, lease.Errorf(lease.NotFound, "lease %.40q is not on this node, or has ended", c.Lease)
	case !p.May(l.Request.UID):
		h.notTheirs(p, &l, "change of another user's lease")
		return lease.Lease{}, lease.Errorf(lease.Denied, "lease %s is not yours; see sluice list", l.ID)
	}
	if c.Shares = spread(c.Shares, len(l.Request.Fractions)); len(c.Shares) > len(l.Request.Fractions) {
		return lease.Lease{}, lease.Errorf(lease.Invalid, "%d shares for lease %s: want at most %d, one for each fraction, or one for all", len(c.Shares), l.ID, len(l.Request.Fractions))
	}
	hd.setting.Lock()
	defer hd.setting.Unlock()
	h.mu.Lock()
	l = hd.rec.Lease // another change may have come first
	h.mu.Unlock()
	now := l
	now.Grants = slices.Clone(l.Grants)
	var done []*peer
	for _, name := range lease.Owners(l.Grants) {
		pe, err := h.peer(name, "")
		if err != nil {
			return lease.Lease{}, h.setBack(ctx, done, l, c, err)
		}
		part, err := h.setAt(ctx, pe, c)
		if err != nil {
			if len(done) > 0 && lease.CodeOf(err) == lease.Down {
				done = append(done, pe) // it may have made the change all the same
			}
			return lease.Lease{}, h.setBack(ctx, done, l, c, err)
		}
		done = append(done, pe)
		now.Request.Policy, now.Request.Lend = part.Request.Policy, part.Request.Lend
		overlay(now.Grants, part.Grants)
	}
	h.mu.Lock()
	keep := h.leases[c.Lease] == hd && hd.rec.Phase == granted
	if keep {
		hd.rec.Lease.Grants, hd.rec.Lease.Request.Policy, hd.rec.Lease.Request.Lend = now.Grants, now.Request.Policy, now.Request.Lend
	}
	h.mu.Unlock()
	// The record is written under the delivery's lock, as a release's is: the later write has
	// the phase of its time.
	if keep {
		hd.deliver.Lock()
		h.mu.Lock()
		rec, here := hd.rec, h.leases[c.Lease] == hd
		h.mu.Unlock()
		if here {
			if err := h.put(&rec); err != nil {
				h.log.Error("change of a lease is not in this host's ledger; its owners have it", "lease", l.ID, "error", err)
			}
		}
		hd.deliver.Unlock()
	}
	h.tell(audit.Set, &now, c.String())
	return now, nil
}

// spread repeats a single share for all n fractions.
func spread(shares []uint32, n int) []uint32 {
	if len(shares) != 1 {
		return shares
	}
	return slices.Repeat(shares, n)
}

// overlay copies what an owner says of its grants into a lease's.
func overlay(all, part []lease.Grant) {
	for _, g := range part {
		for i := range all {
			if all[i].Owner == g.Owner && all[i].Order == g.Order {
				all[i].Percent, all[i].First = g.Percent, g.First
			}
		}
	}
}

func (h *Host) setAt(ctx context.Context, p *peer, c lease.Change) (lease.Lease, error) {
	return call(ctx, h, p, reserveTime, true, func(ctx context.Context, o lease.Owner) (lease.Lease, error) { return o.Set(ctx, h.cfg.Node, c) })
}

// setBack undoes a change at the owners that made it, even if the caller has gone meanwhile. It
// returns why the change was refused.
func (h *Host) setBack(ctx context.Context, done []*peer, was lease.Lease, c lease.Change, why error) error {
	ctx = context.WithoutCancel(ctx)
	old := lease.Change{Lease: was.ID, Beyond: true, By: c.By}
	for _, g := range was.Grants {
		for len(old.Shares) <= g.Order {
			old.Shares = append(old.Shares, 0)
		}
		old.Shares[g.Order] = g.Percent
	}
	if old.Policy = was.Request.Policy; old.Policy == "" {
		old.Policy = lease.BestEffort
	}
	if old.Lend = was.Request.Lend; old.Lend == lease.LendSite {
		old.Lend = lease.LendReset
	}
	var left []string
	for _, p := range done {
		if _, err := h.setAt(ctx, p, old); err != nil {
			h.log.Error("change of a lease could not be taken back", "lease", was.ID, "owner", p.name, "error", err)
			left = append(left, p.name)
		}
	}
	if len(left) == 0 {
		return why
	}
	return lease.Errorf(lease.CodeOf(why), "%v; the change may remain at %s: see sluice list, and ask again", why, strings.Join(left, ", "))
}
