package host

// Release: the record says so first, then the socket goes, then the owners are
// told until each has heard. The record goes last.

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

// releaseTime bounds one delivery: the owner ends the sessions first.
const releaseTime = 5 * time.Second

// Release implements rpc.LocalService. An owner that cannot be told now is told
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
		return lease.Errorf(lease.Invalid, "release: say the lease, or the job")
	case id == "" && key.Node != h.cfg.Node:
		return lease.Errorf(lease.Invalid, "release: job %s is not of this node, %s", form.Name(key.String()), h.cfg.Node)
	case len(key.Job) > form.MaxName || len(key.Cluster) > form.MaxName:
		return lease.Errorf(lease.Invalid, "release: names of at most %d bytes, please", form.MaxName)
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
		// Its acquisition may still be on its way, or the controller's daemon has got one
		// that was never attached. Then that is what ends: by this node's own clock alone
		// a run might be refused that is yet to come.
		if last := h.endUnheld(ctx, key, reason); last != 0 {
			key.Incarnation = last
		}
		return h.bury(key, reason)
	}
	return nil
}

// endUnheld ends a job's leases on this node that it does not hold, as far as owners
// answer, up to the key's incarnation; it answers the last of them, 0 for none.
func (h *Host) endUnheld(ctx context.Context, key lease.Key, reason string) (last uint64) {
	if key.Incarnation == 0 {
		return 0 // users' own: nobody gets those for others
	}
	found, _ := h.search(ctx, h.cfg.Node, false, func(l *lease.Lease) bool {
		return l.Host == h.cfg.Node && nameOf(l.Request.Key) == nameOf(key) && l.Request.Key.Incarnation <= key.Incarnation
	})
	for _, l := range found {
		last = max(last, l.Request.Key.Incarnation)
		h.endParts(ctx, []lease.Lease{l}, l.Request.Key, reason)
	}
	return last
}

func (h *Host) releaseAs(ctx context.Context, p rpc.Peer, hd *held, reason string) error {
	if l := &hd.rec.Lease; p.UID != 0 && p.UID != l.Request.UID {
		h.notTheirs(p, l, "release of another user's lease")
		return lease.Errorf(lease.Denied, "lease %s is not yours; see sluice list", l.ID)
	}
	h.release(ctx, hd, reason, true)
	return nil
}

// notTheirs writes that a user tried what is another user's to do.
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
	// Nobody delivers, and forgets the record, before it is written.
	hd.deliver.Lock()
	h.mu.Lock()
	if hd.rec.Phase != granted {
		again := hd.rec.Phase == releasing
		h.mu.Unlock()
		hd.deliver.Unlock()
		if again {
			h.deliver(ctx, hd)
		}
		return
	}
	hd.rec.Phase, hd.rec.Pending, hd.rec.Reason, hd.rec.Over = releasing, lease.Owners(hd.rec.Lease.Grants), reason, over
	rec := hd.rec
	k := rec.Lease.Request.Key
	t := tombstone{Key: k, Reason: reason, Ended: time.Now().UTC(), since: time.Now()}
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
		// A full disk keeps no GPU: the owners are told all the same.
		h.log.Error("release cannot be written", "lease", rec.Lease.ID, "error", err)
	}
	h.point("release-a-written")
	if stop != nil {
		stop()
	}
	h.removeSocket(rec.Lease.ID, sock)
	h.tell(audit.Release, &rec.Lease, reason)
	h.log.Info("lease released", "lease", rec.Lease.ID, "job", k.String(), "reason", reason)
	hd.deliver.Unlock()
	h.deliver(ctx, hd)
}

// deliver tells the owners that have not heard yet, all at once. What is left is
// tried again by keep.
func (h *Host) deliver(ctx context.Context, hd *held) {
	if !hd.deliver.TryLock() {
		return // somebody is at it
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
			if err := h.tellRelease(ctx, o, &rec, key); err != nil {
				h.log.Warn("release not delivered yet", "lease", rec.Lease.ID, "owner", o, "error", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
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
		h.forget(hd)
		h.point("release-c-forgotten")
	case len(left) < len(rec.Pending):
		if err := h.put(&now); err != nil {
			h.log.Error("release cannot be written", "lease", rec.Lease.ID, "error", err)
		}
	}
}

// tellRelease tells one owner. Nil means that there is nothing more to tell it.
func (h *Host) tellRelease(ctx context.Context, owner string, rec *record, key lease.Key) error {
	h.mu.Lock()
	p := h.peers[owner]
	h.mu.Unlock()
	var err error
	if p == nil { // no pool has it any more
		if p, err = h.peer(owner, rec.Addrs[owner]); err != nil {
			return err
		}
	}
	err = h.order(ctx, p, releaseTime, func(ctx context.Context, o lease.Owner) error {
		return o.Release(ctx, h.cfg.Node, rec.Lease.ID, key, rec.Reason)
	})
	switch lease.CodeOf(err) {
	case lease.Denied, lease.Invalid, lease.NotFound, lease.Over:
		if err != nil {
			h.log.Error("owner refuses a release for good", "lease", rec.Lease.ID, "owner", owner, "error", err)
		}
		return nil
	}
	return err
}

// forget drops a record that no owner has to hear of.
func (h *Host) forget(hd *held) {
	id := hd.rec.Lease.ID
	if err := h.cfg.Ledger.Update(func(tx *ledger.Tx) error { return tx.Delete(ledger.Leases, id) }); err != nil {
		// It is found again at the next start, and released again, without harm.
		h.log.Error("record of an ended lease stays in the ledger", "lease", id, "error", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gone[id] = time.Now()
	delete(h.leases, id)
	if n := nameOf(hd.rec.Lease.Request.Key); h.keys[n] == hd {
		delete(h.keys, n)
	}
}

// isGone says that an id has ended here; mu is held.
func (h *Host) isGone(id string) bool {
	_, ok := h.gone[id]
	return ok
}
