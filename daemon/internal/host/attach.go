package host

// Attach takes over leases that the controller's daemon got for jobs of this node. They are
// found at their owners, renewed, written into the ledger, and given a socket.

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Held returns the lease that this node holds for a job, whatever the key's incarnation.
func (h *Host) Held(key lease.Key) (l lease.Lease, socket string, ok bool) {
	key = h.full(key)
	h.mu.Lock()
	defer h.mu.Unlock()
	hd := h.keys[nameOf(key)]
	if hd == nil || hd.rec.Phase != granted || hd.rec.Lease.Host != h.cfg.Node {
		return lease.Lease{}, "", false
	}
	return hd.rec.Lease, h.Socket(hd.rec.Lease.ID), true
}

// full fills in the fields that a key of this node may leave out.
func (h *Host) full(k lease.Key) lease.Key {
	if k.Cluster == "" {
		k.Cluster = h.cfg.Cluster
	}
	if k.Node == "" {
		k.Node = h.cfg.Node
	}
	return k
}

// Attach takes over the latest lease that was got for a job on this node, whichever owners have
// it, and opens its socket. It ends earlier leases of the job, and a latest one that lacks a
// part. An error means that it is not known whether there is a lease (Down), that the job has
// ended here already (Over), or that this node's disk fails.
func (h *Host) Attach(ctx context.Context, key lease.Key) (l lease.Lease, found bool, err error) {
	key = h.full(key)
	if key.Node != h.cfg.Node || key.Job == "" || len(key.Job) > form.MaxName || len(key.Cluster) > form.MaxName {
		return l, false, lease.Errorf(lease.Invalid, "attach: job %s is not of this node, %s", form.Name(key.String()), h.cfg.Node)
	}
	fctx, done, err := h.fly(ctx, key)
	if err != nil {
		return l, false, err
	}
	defer done()
	l, found, err = h.attach(fctx, key)
	if cause := context.Cause(fctx); err != nil && cause != nil && ctx.Err() == nil {
		err = cause
	}
	return l, found, err
}

func (h *Host) attach(ctx context.Context, key lease.Key) (l lease.Lease, found bool, _ error) {
	n := nameOf(key)
	ours := func(l *lease.Lease) bool { return l.Host == h.cfg.Node && nameOf(l.Request.Key) == n }
	parts, silent := h.searchFor(ctx, key, ours)
	h.mu.Lock()
	hd := h.keys[n]
	t, over := h.tombs[n]
	early := false
	if hd != nil {
		l, early = hd.rec.Lease, hd.early // a copy: Set changes the record's
	}
	h.mu.Unlock()
	if hd != nil {
		if len(silent) == 0 && !slices.ContainsFunc(parts, func(p lease.Lease) bool { return p.ID == l.ID }) {
			h.release(ctx, hd, "its owners no longer have it", !early)
			hd = nil
		}
	}
	if hd != nil && (len(parts) == 0 || parts[0].Request.Key.Incarnation <= l.Request.Key.Incarnation) {
		if !early {
			return l, true, nil
		}
		return h.claimEarly(ctx, hd, l)
	}
	if len(parts) == 0 {
		if len(silent) > 0 {
			return lease.Lease{}, false, lease.Errorf(lease.Down, "job %s: whether it has a lease is not known: %s; see sluice health", key, strings.Join(silent, "; "))
		}
		return lease.Lease{}, false, nil
	}
	best := parts[0]
	switch {
	case over && t.Key.Incarnation >= best.Request.Key.Incarnation:
		h.endParts(ctx, parts, lease.Key{}, "the job has ended on its node: "+t.Reason)
		return lease.Lease{}, false, lease.Errorf(lease.Over, "job %s has ended here: %s", key, t.Reason)
	case !whole(best) && len(silent) > 0:
		return lease.Lease{}, false, lease.Errorf(lease.Down, "job %s: parts of lease %s are not known: %s; see sluice health", key, best.ID, strings.Join(silent, "; "))
	case !whole(best):
		h.endParts(ctx, parts, lease.Key{}, "it is not whole")
		return lease.Lease{}, false, nil
	}
	h.point("attach-1-found")
	if hd != nil {
		h.release(ctx, hd, "a later run of the job has begun", true)
	}
	if err := h.claim(ctx, best); err != nil {
		if lease.CodeOf(err) == lease.Over { // an owner has ended it in this moment
			h.endParts(ctx, parts[:1], lease.Key{}, "a part of it has ended")
			return lease.Lease{}, false, nil
		}
		return lease.Lease{}, false, err
	}
	h.endParts(ctx, parts[1:], lease.Key{}, "a later run of the job has begun")
	h.point("attach-2-renewed")
	hd, err := h.take(best)
	if err != nil {
		return lease.Lease{}, false, err
	}
	h.point("attach-3-written")
	if err := h.openSocket(hd); errors.Is(err, errStopping) {
		return lease.Lease{}, false, lease.Errorf(lease.Down, "lease %s: %v", best.ID, err)
	} else if err != nil {
		err = lease.Errorf(lease.Internal, "lease %s: %v", best.ID, err)
		h.release(ctx, hd, err.Error(), true)
		return lease.Lease{}, false, err
	}
	h.point("attach-4-socket")
	h.tell(audit.Attach, &best, "got by "+best.Sponsor)
	h.log.Info("lease attached", "lease", best.ID, "job", key.String(), "uid", best.Request.UID, "sponsor", best.Sponsor, "gpus", len(best.Grants))
	return best, true, nil
}

// searchFor asks for the leases of a job on this node: those owners that are known to have one,
// and all if these have no whole one.
func (h *Host) searchFor(ctx context.Context, key lease.Key, ours func(*lease.Lease) bool) (parts []lease.Lease, silent []string) {
	if some := h.where(ctx, key); len(some) > 0 {
		h.mu.Lock()
		var mine []string
		if hd := h.keys[nameOf(key)]; hd != nil {
			mine = lease.Owners(hd.rec.Lease.Grants)
		}
		h.mu.Unlock()
		for _, p := range h.named(mine) {
			if !slices.Contains(some, p) {
				some = append(some, p)
			}
		}
		if parts, silent = h.search(ctx, some, h.cfg.Node, false, ours); len(silent) == 0 && slices.ContainsFunc(parts, whole) {
			return parts, nil
		}
	}
	parts, silent = h.search(ctx, h.owners(), h.cfg.Node, false, ours)
	if len(silent) > 0 && !slices.ContainsFunc(parts, whole) {
		parts, silent = h.search(ctx, h.owners(), h.cfg.Node, true, ours) // ask again those that were away
	}
	return parts, silent
}

// claimEarly claims a lease that was taken over before its Prolog. There is none if an owner has ended its part meanwhile.
func (h *Host) claimEarly(ctx context.Context, hd *held, l lease.Lease) (_ lease.Lease, found bool, _ error) {
	switch err := h.claim(ctx, l); {
	case err == nil:
		h.mu.Lock()
		defer h.mu.Unlock()
		hd.early = false
		return l, true, nil
	case lease.CodeOf(err) == lease.Over:
		h.release(ctx, hd, "a part of it has ended", false)
		return lease.Lease{}, false, nil
	default:
		return lease.Lease{}, false, err
	}
}

// claim tells the owners of a lease that this node holds it now. The error is Over if one of
// them has ended it.
func (h *Host) claim(ctx context.Context, l lease.Lease) error {
	var peers []*peer
	for _, o := range lease.Owners(l.Grants) {
		p, err := h.peer(o, "")
		if err != nil {
			return err
		}
		peers = append(peers, p)
	}
	var ended, unknown error
	for _, a := range askAll(ctx, h, peers, true, func(ctx context.Context, o lease.Owner) (struct{}, error) {
		return struct{}{}, o.Claim(ctx, h.cfg.Node, l.ID)
	}) {
		switch {
		case a.err == nil:
		case lease.CodeOf(a.err) == lease.Over:
			ended = a.err
		default:
			unknown = a.err
		}
	}
	if ended != nil { // whatever the others say
		return ended
	}
	return unknown
}
