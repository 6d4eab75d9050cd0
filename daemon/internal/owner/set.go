package owner

// Set: how a granted lease changes.
//
// The ledger decides what is allowed: all leases on a GPU have at most 100 percent together,
// and only root may give a lease more than it was granted at first. Which user asks is what the
// host saw of the kernel; a host may ask for anything anyway. Memory does not change. The GPU's
// schedule is changed last, so that after a crash in between the next start only has to pass
// the change on to the schedule.

import (
	"context"
	"slices"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Set implements lease.Owner.
func (o *Owner) Set(_ context.Context, host string, c lease.Change) (lease.Lease, error) {
	l, err := o.set(host, &c)
	if err != nil {
		if skipped, ok := o.refusal(host, c.By); ok {
			o.log.Info("change of a lease refused", "lease", form.Name(c.Lease), "change", form.Name(c.String()), "uid", c.By, "host", host, "reason", err, "skipped", skipped)
			_ = o.cfg.Audit.Write(audit.Event{Event: audit.Refuse, Time: o.clock.Now(), Lease: form.Name(c.Lease), UID: audit.UID(c.By), Host: host, Owner: o.cfg.Name, Reason: "set: " + err.Error(), Skipped: skipped})
		}
		return lease.Lease{}, err
	}
	o.point("set-4-answer")
	return l, nil
}

func (o *Owner) set(host string, c *lease.Change) (lease.Lease, error) {
	if _, err := form.ParseLeaseID(c.Lease); err != nil {
		return lease.Lease{}, lease.Errorf(lease.Invalid, "%v", err)
	}
	if err := c.Validate(); err != nil {
		return lease.Lease{}, err
	}
	o.write.Lock()
	defer o.write.Unlock()
	e := o.leases[c.Lease]
	switch {
	case e == nil:
		return lease.Lease{}, lease.Errorf(lease.NotFound, "lease %s is not known to owner %s: it has ended, or never existed", c.Lease, o.cfg.Name)
	case e.rec.Lease.Host != host && host != o.cfg.Name:
		return lease.Lease{}, lease.Errorf(lease.Denied, "lease %s is not of node %s", c.Lease, host)
	case e.ending:
		return lease.Lease{}, lease.Errorf(lease.Over, "lease %s is ending: %s", c.Lease, e.rec.why())
	case e.rec.Lease.State != lease.Granted:
		return lease.Lease{}, lease.Errorf(lease.Conflict, "lease %s is not granted yet; ask again", c.Lease)
	}
	rec := e.rec
	l := &rec.Lease
	if len(c.Shares) > len(l.Request.Fractions) {
		return lease.Lease{}, lease.Errorf(lease.Invalid, "%d shares for lease %s: want at most %d, one for each fraction, or one for all", len(c.Shares), l.ID, len(l.Request.Fractions))
	}
	l.Grants = slices.Clone(l.Grants) // other goroutines read the old ones
	for i := range l.Grants {
		g := &l.Grants[i]
		p := c.Share(g.Order)
		if p == 0 || p == g.Percent {
			continue
		}
		if err := o.mayHave(l, g, p, c.Beyond); err != nil {
			return lease.Lease{}, err
		}
		if g.First = g.Paid(); g.First == p {
			g.First = 0
		}
		g.Percent = p
	}
	if c.Policy != "" {
		l.Request.Policy = c.Policy
	}
	switch c.Lend {
	case "":
	case lease.LendReset:
		l.Request.Lend = lease.LendSite
	default:
		l.Request.Lend = c.Lend
	}
	rec.Changes++
	o.point("set-1-checked")
	if err := o.commitSet(e, rec, c); err != nil {
		return lease.Lease{}, err
	}
	o.shareTime(*l)
	return *l, nil
}

// mayHave says whether the grant may have p percent of its GPU. write is held.
func (o *Owner) mayHave(l *lease.Lease, g *lease.Grant, p uint32, beyond bool) error {
	others := uint32(0)
	for _, e := range o.leases {
		if e.id == l.ID {
			continue
		}
		for _, x := range e.rec.Lease.Grants {
			if x.GPU == g.GPU {
				others += x.Percent
			}
		}
	}
	room := 100 - min(others, 100)
	switch {
	case p > room:
		most := room
		if !beyond {
			most = min(room, g.Paid())
		}
		return lease.Errorf(lease.NoRoom, "share of %d%%: want 1 to %d for fraction %d of lease %s; other leases have %d%% of GPU %s", p, most, g.Order, l.ID, others, g.GPU)
	case p > g.Paid() && !beyond:
		return lease.Errorf(lease.Denied, "share of %d%%: want 1 to %d for fraction %d of lease %s, as it was granted; only root gives more", p, min(room, g.Paid()), g.Order, l.ID)
	}
	return nil
}

// commitSet makes the changed record the truth. write is held.
func (o *Owner) commitSet(e *entry, rec record, c *lease.Change) error {
	ev := o.event(audit.Set, &rec.Lease, c.String())
	ev.UID, ev.Change = audit.UID(c.By), rec.Changes
	var seq uint64
	err := o.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		var err error
		if seq, err = tx.Enqueue(ev); err != nil {
			return err
		}
		return tx.Put(ledger.Leases, rec.Lease.ID, rec)
	})
	if err != nil {
		o.resync()
		return lease.Errorf(lease.Internal, "change of lease %s cannot be kept: %v", rec.Lease.ID, err)
	}
	o.mu.Lock()
	e.rec = rec
	o.journal.add(change{Ref: refOf(e, false)})
	o.mu.Unlock()
	o.point("set-2-written")
	o.queue = append(o.queue, line{seq: seq, event: ev})
	if err := o.flush(); err != nil {
		// The line stays in the ledger; Sweep tries again.
		o.log.Warn("change of lease is not in the audit log yet", "lease", rec.Lease.ID, "error", err)
	}
	o.point("set-3-audited")
	o.log.Info("lease changed", "lease", rec.Lease.ID, "job", rec.Lease.Request.Key.String(), "change", c.String(), "uid", c.By)
	return nil
}

// shareTime passes a granted lease's share of its GPUs' time to the workers. If that fails,
// they start no session of the lease until a later call succeeds.
func (o *Owner) shareTime(l lease.Lease) {
	if err := o.cfg.Workers.Share(l); err != nil {
		o.log.Error("a lease's share of compute time cannot be kept", "lease", l.ID, "error", err)
	}
}
