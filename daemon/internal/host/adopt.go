package host

// Leases of this node that only their owners know, after this host's ledger was lost. An
// owner's ledger is the truth, so this host takes them over.

import (
	"context"
	"slices"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// meet asks an owner that answers, or answers again, for its leases of this node. It takes over
// those that this host does not know, and asks other owners for their parts of them.
func (h *Host) meet(ctx context.Context, p *peer) {
	list, err := h.listOf(ctx, p, h.cfg.Node)
	if err != nil {
		return
	}
	for _, s := range list {
		if !h.meetOne(ctx, p, s.Lease) {
			return // the next round tries again
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = true
}

// meets says whether the owner may have leases that this host does not know, or the other way
// round. In a large pool that is not asked of every owner: of those that were away, those of
// which the ledger had leases when this daemon began, and all where there was no ledger.
func (h *Host) meets(p *peer) bool {
	p.mu.Lock()
	known, was := p.known, p.was
	p.mu.Unlock()
	return !known && (was || !h.large() || h.cfg.Ledger.Epoch() <= 1 || h.began[p.name])
}

// meetSoon has the first round ask the owners that meets names.
func (h *Host) meetSoon() {
	for name := range h.began {
		_ = h.known(name)
	}
	if h.large() && h.cfg.Ledger.Epoch() <= 1 {
		h.owners()
	}
}

// meetOne takes over or ends one of them. It returns false if another of its owners cannot be
// asked.
func (h *Host) meetOne(ctx context.Context, p *peer, l lease.Lease) bool {
	unknown := func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.leases[l.ID] == nil && !h.isGone(l.ID) && l.Host == h.cfg.Node && l.State == lease.Granted
	}
	if !unknown() {
		return true
	}
	// The lease's Prolog may hold the turn; the round with the owners cannot wait for long.
	turn, cancel := context.WithTimeout(ctx, h.cfg.Ask)
	defer cancel()
	_, done, err := h.fly(turn, l.Request.Key)
	if err != nil {
		return false
	}
	defer done()
	if !unknown() {
		return true
	}
	whole, err := h.gather(ctx, l, h.cfg.Node)
	switch {
	case err != nil:
		h.log.Warn("lease found at its owner; another of its owners cannot be asked yet", "lease", l.ID, "owner", p.name, "error", err)
		return false
	case whole != nil && h.adopt(*whole) == nil:
	case h.another(l):
		// The owner did not answer when the Prolog looked for the lease.
		if whole != nil {
			l = *whole
		}
		h.log.Warn("lease found at its owner; the job has got another meanwhile, and it is ended", "lease", l.ID, "job", l.Request.Key.String())
		h.endParts(ctx, []lease.Lease{l}, lease.Key{}, "its job has another")
	case l.Sponsor != "":
		// Its sponsor renews it, or its owner ends it when nobody does.
	default:
		h.stranger(ctx, p, lease.Lease{ID: l.ID})
	}
	return true
}

// another says whether this host holds another lease for the same run of the job.
func (h *Host) another(l lease.Lease) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	hd := h.keys[nameOf(l.Request.Key)]
	return hd != nil && hd.rec.Phase == granted && hd.rec.Lease.ID != l.ID && hd.rec.Lease.Request.SameRun(l.Request)
}

// gather puts a lease together from the parts that all its owners have for host, "" for any
// host. It returns nil if a part is missing.
func (h *Host) gather(ctx context.Context, l lease.Lease, host string) (*lease.Lease, error) {
	if len(l.Grants) < len(l.Request.Fractions) {
		h.mu.Lock()
		peers := make([]*peer, 0, len(h.peers))
		for _, p := range h.peers {
			peers = append(peers, p)
		}
		h.mu.Unlock()
		l.Grants = nil
		for _, p := range peers {
			list, err := h.listOf(ctx, p, host)
			if err != nil {
				return nil, err
			}
			for _, s := range list {
				if s.ID == l.ID && s.State == lease.Granted {
					l.Grants = append(l.Grants, s.Grants...)
				}
			}
		}
	}
	if len(l.Grants) != len(l.Request.Fractions) {
		return nil, nil
	}
	slices.SortFunc(l.Grants, func(a, b lease.Grant) int { return a.Order - b.Order })
	return &l, nil
}

// stranger handles a lease that an owner has and this host does not know, of this node or of a
// job whose sponsor this host is. A whole lease is taken over, an incomplete one is ended.
func (h *Host) stranger(ctx context.Context, p *peer, have lease.Lease) *lease.Lease {
	h.mu.Lock()
	hd, gone := h.leases[have.ID], h.isGone(have.ID)
	h.mu.Unlock()
	if hd != nil {
		h.deliver(ctx, hd) // its release is under way; otherwise the key would have been found
		return nil
	}
	whole := &have
	if have.Host != h.cfg.Node && have.State == lease.Granted { // this host asked for it as the job's sponsor
		var err error
		if whole, err = h.gather(ctx, have, ""); err != nil {
			h.log.Warn("lease found at its owner; another of its owners cannot be asked yet", "lease", have.ID, "owner", p.name, "error", err)
			return nil
		}
	}
	if !gone && have.State == lease.Granted && whole != nil && len(whole.Grants) == len(have.Request.Fractions) {
		if err := h.adopt(*whole); err == nil {
			return whole
		}
	}
	err := h.order(ctx, p, reserveTime, func(ctx context.Context, o lease.Owner) error {
		return o.Release(ctx, h.cfg.Node, have.ID, lease.Key{}, "its host does not know it")
	})
	if err != nil {
		h.log.Warn("unknown lease could not be ended", "lease", have.ID, "owner", p.name, "error", err)
	}
	return nil
}

// adopt takes over a lease of this node that only its owners knew.
func (h *Host) adopt(l lease.Lease) error {
	hd, err := h.take(l)
	if err != nil {
		return err
	}
	h.mu.Lock()
	hd.early = l.Sponsor != ""
	h.mu.Unlock()
	h.log.Warn("lease found at its owner and taken over", "lease", l.ID, "job", l.Request.Key.String())
	if l.Host != h.cfg.Node {
		return nil
	}
	if err := h.openSocket(hd); err != nil {
		h.log.Error("lease without socket", "lease", l.ID, "error", err)
	}
	h.watchHolder(hd)
	return nil
}

// take writes a lease that its owners have into this host's ledger.
func (h *Host) take(l lease.Lease) (*held, error) {
	rec := record{Lease: l, Phase: granted, Addrs: make(map[string]string)}
	for _, o := range lease.Owners(l.Grants) {
		p, err := h.peer(o, "")
		if err != nil {
			return nil, err
		}
		rec.Addrs[o] = p.addr
	}
	hd := &held{rec: rec, deadline: lifeLeft(&l)}
	n := nameOf(l.Request.Key)
	h.mu.Lock()
	if h.leases[l.ID] != nil || h.keys[n] != nil {
		h.mu.Unlock()
		return nil, lease.Errorf(lease.Conflict, "lease %s: its job has another", l.ID)
	}
	h.leases[l.ID], h.keys[n] = hd, hd
	h.mu.Unlock()
	if err := h.put(&rec); err != nil {
		h.mu.Lock()
		delete(h.leases, l.ID)
		delete(h.keys, n)
		h.mu.Unlock()
		return nil, err
	}
	return hd, nil
}
