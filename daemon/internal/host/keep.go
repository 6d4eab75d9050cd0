package host

// Regular work: renewals, deliveries of releases, leases whose holder has ended or whose time
// is over, and owners that were away.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
)

// look is the time between two looks at what needs no owner.
const look = time.Second

// endLooks and endLook are how often, and after what time each, an owner is asked why it has ended a lease while it is still ending it.
const (
	endLooks = 10
	endLook  = 100 * time.Millisecond
)

// soonest bounds how often Run looks while a call to an owner that was away is in progress.
const soonest = 20 * time.Millisecond

// Run keeps leases until ctx ends.
func (h *Host) Run(ctx context.Context) error {
	var renewed time.Time
	var busy sync.WaitGroup
	defer busy.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()                   // watches end with this, whatever ended it
	turn := make(chan struct{}, 1) // one round with the owners at a time
	h.meetSoon()
	h.rewatch()
	watches := make(watching)
	for {
		watches.keep(ctx, h, busy.Go)
		h.sweep(ctx)
		select {
		case turn <- struct{}{}:
			renew := time.Since(renewed) >= h.cfg.Renew
			if renew {
				renewed = time.Now()
			}
			busy.Go(func() {
				defer func() { <-turn }()
				h.round(ctx, renew)
			})
		default: // the last round goes on: an owner is slow, and has a deadline
		}
		select {
		case <-ctx.Done():
			return nil
		case <-h.base.Done():
			return nil
		case <-h.wake: // an owner is away, and the first pauses before it is tried again are shorter than a look
		case <-time.After(h.nextLook()):
		}
	}
}

// sweep ends the leases whose time is over or whose holder has ended, and removes old
// tombstones.
func (h *Host) sweep(ctx context.Context) {
	now := time.Now()
	type end struct {
		hd  *held
		why string
	}
	var ends []end
	var without []lost
	var old []name
	h.mu.Lock()
	for _, hd := range h.leases {
		if hd.rec.Phase != granted || hd.rec.Lease.Host != h.cfg.Node {
			continue // leases of other nodes are ended by their owners
		}
		if h.lostSocket(hd) {
			without = append(without, lost{hd, hd.rec.Lease.ID, hd.lost})
		}
		switch p := hd.rec.Lease.Request.Holder; {
		case !hd.deadline.IsZero() && now.After(hd.deadline):
			ends = append(ends, end{hd, "its life time is over"})
		case p.PID > 0 && hd.stop == nil: // no pidfd to wait on
			if over, _ := ended(p); over {
				ends = append(ends, end{hd, "its holder has ended"})
			}
		}
	}
	for n, t := range h.tombs {
		if now.Sub(t.since) > h.cfg.Tombstone {
			old = append(old, n)
		}
	}
	for id, t := range h.gone {
		if now.Sub(t) > h.cfg.Tombstone {
			delete(h.gone, id)
		}
	}
	h.mu.Unlock()
	for _, l := range without {
		h.remakeSocket(l)
	}
	for _, e := range ends {
		h.wg.Go(func() { h.release(h.base, e.hd, e.why, true) })
	}
	if len(old) == 0 || ctx.Err() != nil {
		return
	}
	err := h.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		for _, n := range old {
			if err := tx.Delete(ledger.Tombstones, n.String()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		h.log.Warn("old tombstones stay", "error", err)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, n := range old {
		if t := h.tombs[n]; now.Sub(t.since) > h.cfg.Tombstone {
			delete(h.tombs, n)
		}
	}
}

// round renews, delivers and asks, at all owners at the same time.
func (h *Host) round(ctx context.Context, renew bool) {
	h.mu.Lock()
	peers := make([]*peer, 0, len(h.peers))
	for _, p := range h.peers {
		peers = append(peers, p)
	}
	h.mu.Unlock()
	var ids map[string][]string
	if renew {
		ids = h.used()
	}
	// Of thousands most have nothing to be told.
	now := time.Now()
	peers = slices.DeleteFunc(peers, func(p *peer) bool {
		if p.down() != nil {
			return !p.due(now)
		}
		return !h.meets(p) && len(ids[p.name]) == 0
	})
	groups(len(peers), func(i int) {
		p := peers[i]
		mine := ids[p.name]
		if p.down() != nil {
			if _, err := p.inventory(ctx, h, 0); err != nil {
				return
			}
		}
		if h.meets(p) {
			h.meet(ctx, p)
			if renew {
				mine = h.used()[p.name] // more may have been found
			}
		}
		h.renew(ctx, p, mine)
	})
	h.catchUp(ctx)
	h.endJobs(ctx)
}

// catchUp delivers the releases whose owners can be reached.
func (h *Host) catchUp(ctx context.Context) {
	var pending []*held
	h.mu.Lock()
	for _, hd := range h.leases {
		reach := len(hd.rec.Pending) == 0
		for _, o := range hd.rec.Pending {
			if p := h.peers[o]; p == nil || p.down() == nil {
				reach = true
			}
		}
		if hd.rec.Phase == releasing && reach {
			pending = append(pending, hd)
		}
	}
	h.mu.Unlock()
	var wg sync.WaitGroup
	for _, hd := range pending {
		wg.Go(func() { h.delivered(ctx, hd) })
	}
	wg.Wait()
}

// used returns the ids of the leases that are used, by owner.
func (h *Host) used() map[string][]string {
	ids := make(map[string][]string)
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, hd := range h.leases {
		if hd.rec.Phase != granted {
			continue
		}
		for _, o := range lease.Owners(hd.rec.Lease.Grants) {
			ids[o] = append(ids[o], id)
		}
	}
	return ids
}

// renew tells an owner which of its leases are used. The answer names those that it no longer
// has.
func (h *Host) renew(ctx context.Context, p *peer, ids []string) {
	if len(ids) == 0 {
		return
	}
	slices.Sort(ids)
	known, err := question(ctx, h, p, func(ctx context.Context, o lease.Owner) ([]string, error) { return o.Renew(ctx, h.cfg.Node, ids) })
	if err != nil || ctx.Err() != nil {
		return
	}
	h.point("renew-a-answered")
	has := make(map[string]bool, len(known))
	for _, id := range known {
		has[id] = true
	}
	for _, id := range ids {
		if has[id] {
			continue
		}
		h.mu.Lock()
		hd := h.leases[id]
		lost := hd != nil && hd.rec.Phase == granted
		over := lost && !hd.early
		var l lease.Lease // a copy: Set changes the record's
		if lost {
			l = hd.rec.Lease
		}
		h.mu.Unlock()
		if !lost {
			continue // released meanwhile
		}
		if l.Host != h.cfg.Node {
			h.entrust(hd)
			continue
		}
		why := "no longer has it"
		if reason := h.endedThere(ctx, p, &l); reason != "" {
			why = "has ended it: " + reason
			h.log.Info("lease ended at its owner", "lease", id, "owner", p.name, "job", l.Request.Key.String(), "reason", reason)
		} else {
			h.log.Error("lease lost: its owner no longer has it", "lease", id, "owner", p.name, "job", l.Request.Key.String())
		}
		e := audit.Of(audit.RenewLost, &l, "its owner "+why)
		e.Owner = p.name
		h.audit(e)
		h.release(ctx, hd, "owner "+p.name+" "+why, over)
	}
}

// endedThere is why an owner has ended a lease that it no longer has, as where the job ended while this daemon was away; "" if the owner
// does not know. A lease that its owner is still ending is asked about again.
func (h *Host) endedThere(ctx context.Context, p *peer, l *lease.Lease) string {
	key := l.Request.Key
	for range endLooks {
		all, err := question(ctx, h, p, func(ctx context.Context, o lease.Owner) ([]lease.Report, error) {
			return o.Reports(ctx, h.cfg.Node, key.Cluster, key.Job)
		})
		i := slices.IndexFunc(all, func(r lease.Report) bool { return r.Lease == l.ID })
		if err != nil || i < 0 {
			return ""
		}
		if !all[i].Ended.IsZero() {
			return all[i].Reason
		}
		pause(ctx, endLook)
	}
	return "it is about to end there"
}

// listOf asks an owner for the leases of a host, "" for all that it may list.
func (h *Host) listOf(ctx context.Context, p *peer, host string) ([]lease.Status, error) {
	return question(ctx, h, p, func(ctx context.Context, o lease.Owner) ([]lease.Status, error) { return o.List(ctx, host) })
}
