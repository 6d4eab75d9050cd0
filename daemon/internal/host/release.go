package host

// Release: the record says so first, then the socket is removed, then the release is delivered
// until every owner has answered. The record is deleted last.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// releaseTime bounds one delivery, in which the owner ends the sessions.
const releaseTime = 5 * time.Second

// Release implements rpc.LocalService. A release that cannot be delivered now is delivered
// later, which is no error.
func (h *Host) Release(ctx context.Context, p rpc.Peer, id string, key lease.Key, reason string) error {
	if key != (lease.Key{}) {
		if key.Cluster == "" {
			key.Cluster = h.cfg.Cluster
		}
		if key.Node == "" {
			key.Node = h.cfg.Node
		}
	}
	switch {
	case id == "" && key.Job == "":
		return lease.Errorf(lease.Invalid, "release: want a lease id or a job")
	case id == "" && key.Node != h.cfg.Node:
		return lease.Errorf(lease.Invalid, "release: job %s is not of this node, %s", form.Name(key.String()), h.cfg.Node)
	case len(key.Job) > form.MaxName || len(key.Cluster) > form.MaxName:
		return lease.Errorf(lease.Invalid, "release: want names of at most %d bytes", form.MaxName)
	}
	if reason == "" {
		reason = "released"
	}
	reason = form.Name(reason)
	if id != "" {
		h.mu.Lock()
		hd := h.leases[id]
		h.mu.Unlock()
		if hd == nil {
			return nil // it has ended, or never was
		}
		return h.releaseAs(ctx, p, hd, reason)
	}
	n := nameOf(key)
	h.mu.Lock()
	fl, hd := h.flights[n], h.keys[n]
	h.mu.Unlock()
	if fl != nil && p.UID == 0 {
		fl.cancel(lease.Errorf(lease.Over, "job %s was released meanwhile: %s", key, reason))
		select {
		case <-fl.done:
		case <-ctx.Done():
			return lease.Errorf(lease.Down, "release of job %s: the caller gave up", key)
		}
		h.mu.Lock()
		hd = h.keys[n]
		h.mu.Unlock()
	}
	if hd != nil && hd.rec.Lease.Request.Key.Incarnation <= key.Incarnation {
		return h.releaseAs(ctx, p, hd, reason)
	}
	if hd == nil && p.UID == 0 {
		// Its acquisition may still be in progress, or the controller's daemon has got a lease
		// that was never attached, which is ended then. The tombstone gets that lease's
		// incarnation: one by this node's own clock might refuse a run that is yet to come.
		if last := h.endUnheld(ctx, key, reason); last != 0 {
			key.Incarnation = last
		}
		return h.bury(key, reason)
	}
	return nil
}

// endUnheld ends the leases of a job on this node that this host does not hold, up to the key's
// incarnation, at the owners that answer. It returns the last one's incarnation, 0 for none.
func (h *Host) endUnheld(ctx context.Context, key lease.Key, reason string) (last uint64) {
	if key.Incarnation == 0 {
		return 0 // leases of sluice run: no other node gets those
	}
	owners := h.where(ctx, key)
	if len(owners) == 0 {
		owners = h.owners()
	}
	found, _ := h.search(ctx, owners, h.cfg.Node, false, func(l *lease.Lease) bool {
		return l.Host == h.cfg.Node && nameOf(l.Request.Key) == nameOf(key) && l.Request.Key.Incarnation <= key.Incarnation
	})
	for _, l := range found {
		last = max(last, l.Request.Key.Incarnation)
		h.endParts(ctx, []lease.Lease{l}, l.Request.Key, reason)
	}
	return last
}

func (h *Host) releaseAs(ctx context.Context, p rpc.Peer, hd *held, reason string) error {
	if l := &hd.rec.Lease; !p.May(l.Request.UID) { // what is read of it never changes
		h.notTheirs(p, l, "release of another user's lease")
		return lease.Errorf(lease.Denied, "lease %s is not yours; see sluice list", l.ID)
	}
	h.release(ctx, hd, reason, true)
	return nil
}

// notTheirs logs that a user tried to change or end another user's lease.
func (h *Host) notTheirs(p rpc.Peer, l *lease.Lease, what string) {
	if skipped, ok := h.refusal(p.UID); ok {
		h.audit(audit.Event{Event: audit.PeerRefuse, Lease: l.ID, Key: l.Request.Key.String(), UID: audit.UID(p.UID), PID: uint32(max(0, p.PID)), Reason: what, Skipped: skipped})
	}
}

// bury remembers that a key has ended.
func (h *Host) bury(k lease.Key, reason string) error {
	t := tombstone{Key: k, Reason: reason, Ended: time.Now().UTC(), since: time.Now()}
	if err := h.cfg.Ledger.Put(ledger.Tombstones, nameOf(k).String(), t); err != nil {
		return lease.Errorf(lease.Internal, "release of job %s cannot be remembered: %v", k, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tombs[nameOf(k)] = t
	return nil
}

// release ends a lease. over says that its key has ended too.
func (h *Host) release(ctx context.Context, hd *held, reason string, over bool) {
	// With this lock no other goroutine delivers the release, and forgets the record, before it
	// is written.
	hd.deliver.Lock()
	h.mu.Lock()
	if hd.rec.Phase != granted {
		again := hd.rec.Phase == releasing
		h.mu.Unlock()
		hd.deliver.Unlock()
		if again {
			h.delivered(ctx, hd)
		}
		return
	}
	hd.rec.Phase, hd.rec.Pending, hd.rec.Reason, hd.rec.Over = releasing, lease.Owners(hd.rec.Lease.Grants), reason, over
	rec := hd.rec
	k := rec.Lease.Request.Key
	t := tombstone{Key: k, Reason: reason, Ended: time.Now().UTC(), Owners: lease.Owners(rec.Lease.Grants), since: time.Now()}
	if over {
		h.tombs[nameOf(k)] = t
	}
	if h.keys[nameOf(k)] == hd {
		delete(h.keys, nameOf(k))
	}
	sock, stop := hd.sock, hd.stop
	hd.sock = nil
	h.mu.Unlock()
	err := h.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		if over {
			if err := tx.Put(ledger.Tombstones, nameOf(k).String(), t); err != nil {
				return err
			}
		}
		return tx.Put(ledger.Leases, rec.Lease.ID, rec)
	})
	if err != nil {
		// A full disk must not keep a GPU: the release is delivered all the same.
		h.log.Error("release cannot be written", "lease", rec.Lease.ID, "error", err)
	}
	h.point("release-a-written")
	if stop != nil {
		stop()
	}
	h.removeSocket(rec.Lease.ID, sock)
	if !over && rec.Lease.Host != h.cfg.Node {
		hd.quiet = true // its node may have it
	} else {
		h.tellReleased(&rec)
	}
	hd.deliver.Unlock()
	h.delivered(ctx, hd)
}

func (h *Host) tellReleased(rec *record) {
	h.tell(audit.Release, &rec.Lease, rec.Reason)
	h.log.Info("lease released", "lease", rec.Lease.ID, "job", rec.Lease.Request.Key.String(), "reason", rec.Reason)
}

// delivered delivers a release, or waits while another goroutine does.
func (h *Host) delivered(ctx context.Context, hd *held) {
	h.deliver(ctx, hd)
	hd.deliver.Lock()
	defer hd.deliver.Unlock()
}

// deliver sends a release to the owners that have not been sent it, all at once. Run tries the
// rest again.
func (h *Host) deliver(ctx context.Context, hd *held) {
	if !hd.deliver.TryLock() {
		return // another goroutine delivers it
	}
	defer hd.deliver.Unlock()
	h.mu.Lock()
	rec := hd.rec
	left := slices.Clone(rec.Pending)
	here := h.leases[rec.Lease.ID] == hd
	h.mu.Unlock()
	if !here || rec.Phase != releasing {
		return
	}
	var key lease.Key
	if rec.Over {
		key = rec.Lease.Request.Key
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, o := range slices.Clone(left) {
		wg.Go(func() {
			claimed, err := h.tellRelease(ctx, o, &rec, key)
			if err != nil {
				h.log.Warn("release not delivered yet", "lease", rec.Lease.ID, "owner", o, "error", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if claimed {
				hd.claimed++
			}
			left = slices.DeleteFunc(left, func(x string) bool { return x == o })
		})
	}
	wg.Wait()
	h.point("release-b-delivered")
	h.mu.Lock()
	hd.rec.Pending = left
	now := hd.rec
	h.mu.Unlock()
	switch {
	case len(left) == 0:
		h.endDelivery(hd, &now)
		h.point("release-c-forgotten")
	case len(left) < len(rec.Pending):
		if err := h.put(&now); err != nil {
			h.log.Error("release cannot be written", "lease", rec.Lease.ID, "error", err)
		}
	}
}

// endDelivery forgets a release that all owners have been sent. hd.deliver is held.
func (h *Host) endDelivery(hd *held, rec *record) {
	h.forget(hd)
	switch all := len(lease.Owners(rec.Lease.Grants)); {
	case hd.claimed == all:
		hd.stays = true
		h.mayReturn(hd)
		h.log.Info("lease stays, its node has attached it", "lease", rec.Lease.ID, "job", rec.Lease.Request.Key.String(), "node", rec.Lease.Host)
		return
	case hd.claimed > 0:
		h.log.Warn("lease was claimed by its node at some owners and ended at others; the node ends the rest, or its silence does", "lease", rec.Lease.ID, "job", rec.Lease.Request.Key.String(), "node", rec.Lease.Host)
	}
	if hd.quiet {
		h.tellReleased(rec)
	}
}

// tellRelease delivers a release to one owner. No error means that there is nothing more to deliver
// to it. claimed says that this host is the lease's sponsor, the lease's own node has claimed it
// meanwhile, and the owner leaves it to that node.
func (h *Host) tellRelease(ctx context.Context, owner string, rec *record, key lease.Key) (claimed bool, err error) {
	h.mu.Lock()
	p := h.peers[owner]
	h.mu.Unlock()
	if p == nil { // no pool has this owner any more
		if p, err = h.peer(owner, rec.Addrs[owner]); err != nil {
			return false, err
		}
	}
	err = h.order(ctx, p, releaseTime, func(ctx context.Context, o lease.Owner) error {
		return o.Release(ctx, h.cfg.Node, rec.Lease.ID, key, rec.Reason)
	})
	switch lease.CodeOf(err) {
	case lease.Conflict:
		return true, nil
	case lease.Denied, lease.Invalid, lease.NotFound, lease.Over:
		if err != nil {
			h.log.Error("owner refuses a release for good", "lease", rec.Lease.ID, "owner", owner, "error", err)
		}
		return false, nil
	}
	return false, err
}

// erase deletes a record from the ledger. If it cannot, the next start finds the record again and releases the lease once more, which
// does no harm.
func (h *Host) erase(id string) {
	if err := h.cfg.Ledger.Delete(ledger.Leases, id); err != nil {
		h.log.Error("record of an ended lease stays in the ledger", "lease", id, "error", err)
	}
}

// forget deletes a record whose release every owner has.
func (h *Host) forget(hd *held) {
	id := hd.rec.Lease.ID
	h.erase(id)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gone[id] = time.Now()
	delete(h.leases, id)
	if n := nameOf(hd.rec.Lease.Request.Key); h.keys[n] == hd {
		delete(h.keys, n)
	}
}

// mayReturn lets this host take up again a lease that it has forgotten and that lives on.
func (h *Host) mayReturn(hd *held) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.gone, hd.rec.Lease.ID)
}

// isGone says whether an id has ended here. mu is held.
func (h *Host) isGone(id string) bool {
	_, ok := h.gone[id]
	return ok
}
