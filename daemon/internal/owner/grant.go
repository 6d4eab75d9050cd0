package owner

// Reserve and Confirm: how a lease begins.

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/placement"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Reserve keeps room for l, or grants it at once when ttl is 0. A controller's daemon may ask
// for another node: l then names the controller as its sponsor.
func (o *Owner) Reserve(ctx context.Context, host string, l lease.Lease, ttl time.Duration) (lease.Lease, error) {
	if l.Sponsor == "" {
		l.Host = host
	}
	have, err := o.reserve(ctx, host, l, ttl)
	if err != nil && have.ID == "" {
		o.counts.refused.Add(1)
		if skipped, ok := o.refusal(host, l.Request.UID); ok {
			ev := o.event(audit.Refuse, &l, err.Error())
			ev.GPUs, ev.Lease, ev.Key, ev.Skipped = nil, form.Name(ev.Lease), form.Name(ev.Key), skipped
			o.log.Info("lease refused", "lease", ev.Lease, "job", ev.Key, "uid", l.Request.UID, "host", host, "reason", err, "skipped", skipped)
			_ = o.cfg.Audit.Write(ev) // the audit log counts the lines that it loses
		}
	}
	return have, err
}

func (o *Owner) reserve(ctx context.Context, from string, l lease.Lease, ttl time.Duration) (lease.Lease, error) {
	if err := o.maySponsor(from, &l); err != nil {
		return lease.Lease{}, err
	}
	if err := o.validate(&l, ttl); err != nil {
		return lease.Lease{}, err
	}
	for {
		have, wait, err := o.tryReserve(&l, ttl)
		switch {
		case wait == nil && err != nil:
			return have, err
		case wait == nil:
			if ttl > 0 {
				err = o.told(ctx)
			}
			o.point("reserve-3-answer")
			return have, err
		}
		if err := o.await(ctx, wait); err != nil {
			return lease.Lease{}, err
		}
	}
}

// validate checks what depends on the request alone.
func (o *Owner) validate(l *lease.Lease, ttl time.Duration) error {
	k := l.Request.Key
	if _, err := form.ParseLeaseID(l.ID); err != nil {
		return lease.Errorf(lease.Invalid, "%v", err)
	}
	if k.Job == "" || len(k.Cluster) > form.MaxName || len(k.Job) > form.MaxName || len(k.Node) > form.MaxName || len(l.Request.Account) > form.MaxName || len(l.Request.JobName) > 4*form.MaxName {
		return lease.Errorf(lease.Invalid, "lease %s: its job has no name, or one longer than %d bytes", l.ID, form.MaxName)
	}
	if k.Node != l.Host {
		return lease.Errorf(lease.Denied, "lease %s: node %q asks for a lease of node %q; set node in sluice.yaml to the name that the others know", l.ID, l.Host, k.Node)
	}
	if err := placement.Validate(l.Request); err != nil {
		return err
	}
	limits := o.lim()
	if l.Request.UID < limits.MinUID {
		return lease.Errorf(lease.Denied, "lease %s is of uid %d, and owner %s lends nothing to uids below %d; use an account of a user, or ask its site for worker.root_user in sluice.yaml", l.ID, l.Request.UID, o.cfg.Name, limits.MinUID)
	}
	if ttl < 0 || ttl > limits.Reserve {
		return lease.Errorf(lease.Invalid, "lease %s: reservation of %v: want at most %v", l.ID, ttl, limits.Reserve)
	}
	if l.Request.Life < 0 {
		return lease.Errorf(lease.Invalid, "lease %s: life time of %v", l.ID, l.Request.Life)
	}
	if limits.MaxLife > 0 && (l.Request.Life == 0 || l.Request.Life > limits.MaxLife) {
		l.Request.Life = limits.MaxLife
	}
	if form.IsRunJob(k.Job) && limits.RunLife > 0 && (l.Request.Life == 0 || l.Request.Life > limits.RunLife) {
		l.Request.Life = limits.RunLife
	}
	if len(l.Grants) == 0 || len(l.Grants) > len(l.Request.Fractions) {
		return lease.Errorf(lease.Invalid, "lease %s: %d grants for %d fractions", l.ID, len(l.Grants), len(l.Request.Fractions))
	}
	gpus, orders := make(map[string]bool), make(map[int]bool)
	for _, g := range l.Grants {
		switch {
		case g.Owner != o.cfg.Name:
			return lease.Errorf(lease.Invalid, "lease %s: it asks owner %[3]q for a grant of owner %[2]q", l.ID, g.Owner, o.cfg.Name)
		case !form.Percent(g.Percent).Valid():
			return lease.Errorf(lease.Invalid, "lease %s: grant of %d%% of a GPU", l.ID, g.Percent)
		case g.Mem == 0 || g.Mem%lease.Granule != 0:
			return lease.Errorf(lease.Invalid, "lease %s: grant of %d bytes: want whole granules of %d MiB", l.ID, g.Mem, lease.Granule>>20)
		case gpus[g.GPU]:
			return lease.Errorf(lease.Invalid, "lease %s: two grants on GPU %s: each is on another one", l.ID, g.GPU)
		case orders[g.Order] || g.Order < 0 || g.Order >= len(l.Request.Fractions):
			return lease.Errorf(lease.Invalid, "lease %s: grant for fraction %d of %d", l.ID, g.Order, len(l.Request.Fractions))
		}
		gpus[g.GPU], orders[g.Order] = true, true
	}
	return nil
}

// tryReserve decides. wait is an older lease of the key that has to end first.
func (o *Owner) tryReserve(l *lease.Lease, ttl time.Duration) (have lease.Lease, wait *entry, err error) {
	o.write.Lock()
	defer o.write.Unlock()
	if err := o.sure(); err != nil {
		return lease.Lease{}, nil, err
	}
	k := l.Request.Key
	if e := o.leases[l.ID]; e != nil {
		switch {
		case e.rec.Lease.Host != l.Host:
			return lease.Lease{}, nil, lease.Errorf(lease.Denied, "lease %s is not of node %s", l.ID, l.Host)
		case e.ending:
			return lease.Lease{}, nil, lease.Errorf(lease.Over, "lease %s of job %s is ending: %s", l.ID, k, e.rec.why())
		}
		return e.rec.Lease, nil, nil
	}
	if t, ok := o.tombs[idTomb(l.ID)]; ok {
		return lease.Lease{}, nil, lease.Errorf(lease.Over, "lease %s of job %s has ended: %s", l.ID, k, t.Reason)
	}
	if t, ok := o.ended(k); ok {
		return lease.Lease{}, nil, lease.Errorf(lease.Over, "job %s has ended here: %s", k, t.Reason)
	}
	if e := o.keys[nameOf(k)]; e != nil {
		old := e.rec.Lease.Request.Key.Incarnation
		switch {
		case k.Incarnation < old && !l.Request.SameRun(e.rec.Lease.Request):
			return lease.Lease{}, nil, lease.Errorf(lease.Over, "job %s: incarnation %d asks, and the later incarnation %d has the lease", k, k.Incarnation, old)
		case e.ending:
			return lease.Lease{}, e, nil
		case k.Incarnation == old && l.Request.Restart != e.rec.Lease.Request.Restart:
			return lease.Lease{}, nil, lease.Errorf(lease.Over, "job %s: restart %d asks, and restart %d has the lease in the same epoch", k, l.Request.Restart, e.rec.Lease.Request.Restart)
		case k.Incarnation == old || l.Request.SameRun(e.rec.Lease.Request):
			return e.rec.Lease, nil, lease.Errorf(lease.Conflict, "job %s has lease %s already", k, e.rec.Lease.ID)
		}
		o.mark(e, ending{audit.Release, "a later run of the job has begun", true})
		return lease.Lease{}, e, nil
	}
	if err := o.admit(l); err != nil {
		return lease.Lease{}, nil, err
	}
	rec := record{Lease: *l, Began: o.clock.Boot()}
	rec.Lease.Grants = slices.Clone(l.Grants)
	for i := range rec.Lease.Grants {
		rec.Lease.Grants[i].First = 0 // only Set sets it
	}
	rec.Lease.Made, rec.Lease.Epoch = o.clock.Now().UTC(), o.cfg.Ledger.Epoch()
	if ttl > 0 {
		rec.Lease.State = lease.Reserved
		rec.expire(o.clock, ttl)
	} else {
		rec.Lease.State = lease.Granted
		rec.expire(o.clock, l.Request.Life)
	}
	o.point("reserve-1-checked")
	if err := o.commit(nil, rec); err != nil {
		return lease.Lease{}, nil, err
	}
	return rec.Lease, nil, nil
}

// admit checks that there is room for l's grants, whatever placement assumed.
func (o *Owner) admit(l *lease.Lease) error {
	gpus, _ := o.gpus()
	limits := o.lim()
	for _, gr := range l.Grants {
		var g *lease.GPU
		for i := range gpus {
			if gpus[i].UUID == gr.GPU {
				g = &gpus[i]
			}
		}
		switch {
		case g == nil:
			return lease.Errorf(lease.Conflict, "owner %s has no GPU %s any more; see sluice gpus", o.cfg.Name, gr.GPU)
		case !g.Healthy:
			return lease.Errorf(lease.Conflict, "gpu %d of %s is not healthy: %s", g.Index, o.cfg.Name, g.Why)
		case !g.Drain.IsZero():
			return lease.Errorf(lease.Conflict, "gpu %d of %s is %s", g.Index, o.cfg.Name, g.Drain)
		case gr.Mem > g.Mem || gr.Mem < g.Overhead+lease.Granule:
			return lease.Errorf(lease.Invalid, "grant of %d MiB on gpu %d of %s: it has %d MiB, and a context takes %d MiB", gr.Mem>>20, g.Index, o.cfg.Name, g.Mem>>20, g.Overhead>>20)
		case g.Leases >= limits.MaxPerGPU:
			return lease.Errorf(lease.Conflict, "gpu %d of %s has %d leases already; raise lease.max_per_gpu there, or wait", g.Index, o.cfg.Name, g.Leases)
		case gr.Percent > g.FreePercent || gr.Mem > g.FreeMem:
			return lease.Errorf(lease.Conflict, "gpu %d of %s: %d%% and %d MiB asked, %d%% and %d MiB free; see sluice list", g.Index, o.cfg.Name, gr.Percent, gr.Mem>>20, g.FreePercent, g.FreeMem>>20)
		}
	}
	return nil
}

// commit makes rec the truth. e is its entry, nil for a new lease. A grant is valid only with
// its line in the audit log. write is held.
func (o *Owner) commit(e *entry, rec record) error {
	var audited *line
	err := o.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		audited = nil
		if rec.Lease.State == lease.Granted {
			l := line{event: o.event(audit.Grant, &rec.Lease, "")}
			var err error
			if l.seq, err = tx.Enqueue(l.event); err != nil {
				return err
			}
			audited = &l
		}
		return tx.Put(ledger.Leases, rec.Lease.ID, rec)
	})
	if err != nil {
		o.resync()
		return lease.Errorf(lease.Internal, "lease %s cannot be kept: %v", rec.Lease.ID, err)
	}
	reserved := e != nil
	o.mu.Lock()
	if e == nil {
		e = o.adopt(rec)
	} else {
		e.rec, e.deadline = rec, rec.deadline(o.clock)
		e.renewed, e.said = o.clock.Up(), o.clock.Now()
		e.activity.since = e.renewed
		o.journal.add(change{Ref: refOf(e, false), quiet: true})
	}
	o.mu.Unlock()
	if audited == nil {
		o.point("reserve-2-written")
		o.counts.reserved.Add(1)
		_ = o.cfg.Audit.Write(o.event(audit.Reserve, &rec.Lease, ""))
		return nil
	}
	o.point("grant-1-written")
	o.queue = append(o.queue, *audited)
	if err := o.flush(); err != nil {
		o.undo(e, audited.seq, reserved, err)
		return lease.Errorf(lease.Internal, "lease %s cannot be granted without a line in the audit log: %v", rec.Lease.ID, err)
	}
	o.point("grant-2-audited")
	o.shareTime(rec.Lease)
	o.counts.granted.Add(1)
	o.log.Info("lease granted", "lease", rec.Lease.ID, "job", rec.Lease.Request.Key.String(), "uid", rec.Lease.Request.UID, "host", rec.Lease.Host, "gpus", len(rec.Lease.Grants))
	return nil
}

// undo takes back a grant of which no host has heard. If even that cannot be written, the lease
// stays until its host releases it or falls silent.
func (o *Owner) undo(e *entry, seq uint64, reserved bool, why error) {
	id := e.id
	back := line{event: o.event(audit.Reclaim, &e.rec.Lease, "not granted: the audit log could not be written")}
	t := o.tombstone("not granted: " + why.Error())
	t.Lease, t.Host = id, e.rec.Lease.Host
	err := o.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		if reserved { // the log has a line of the reservation
			var err error
			if back.seq, err = tx.Enqueue(back.event); err != nil {
				return err
			}
		}
		return errors.Join(tx.Delete(ledger.Leases, id), tx.Dequeue(seq), tx.Put(ledger.Tombstones, idTomb(id), t))
	})
	if err != nil {
		o.log.Error("lease could not be taken back", "lease", id, "error", err)
		o.resync()
		return
	}
	// The line is the last one: lines are queued and flushed under write.
	o.queue = o.queue[:len(o.queue)-1]
	if reserved {
		o.queue = append(o.queue, back)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.bury(idTomb(id), t)
	o.drop(e)
}

// sure has on the disk what the ledger says, after a change that failed: an answer may only repeat it then. write is held.
func (o *Owner) sure() error {
	if err := o.cfg.Ledger.Sure(); err != nil {
		return lease.Errorf(lease.Internal, "owner %s does not know what it has granted: %v", o.cfg.Name, err)
	}
	return nil
}

// resync loads what the ledger says, after a change of which only the ledger knows whether it
// was made. write is held.
func (o *Owner) resync() {
	recs, err := ledger.All[record](o.cfg.Ledger, ledger.Leases)
	if err != nil {
		o.log.Error("ledger cannot be read back", "error", err)
		return
	}
	if err := o.loadQueue(); err != nil {
		o.log.Error("ledger cannot be read back", "error", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, e := range o.leases {
		if rec, ok := recs[id]; ok {
			if !e.ending { // an end in progress goes on
				e.rec, e.deadline = rec, rec.deadline(o.clock)
				o.journal.add(change{Ref: refOf(e, false)})
			}
		} else if !e.trying {
			o.drop(e)
		}
	}
	for id, rec := range recs {
		if o.leases[id] == nil {
			o.adopt(rec)
		}
	}
}

// Confirm makes a reserved lease a granted one.
func (o *Owner) Confirm(_ context.Context, host, id string) error {
	err := o.confirm(host, id)
	if err != nil {
		o.counts.refused.Add(1)
		e := audit.Event{Event: audit.Refuse, Time: o.clock.Now(), Lease: form.Name(id), Host: host, Owner: o.cfg.Name, Reason: "confirm: " + err.Error()}
		_ = o.cfg.Audit.Write(e)
	}
	return err
}

func (o *Owner) confirm(host, id string) error {
	o.write.Lock()
	defer o.write.Unlock()
	if err := o.sure(); err != nil {
		return err
	}
	e := o.leases[id]
	if e == nil {
		if t, ok := o.tombs[idTomb(id)]; ok && t.Host == host {
			return lease.Errorf(lease.Over, "lease %s has ended: %s", id, t.Reason)
		}
		return lease.Errorf(lease.NotFound, "lease %.40q is not known to owner %s", id, o.cfg.Name)
	}
	rec := e.rec
	switch {
	case rec.Lease.Host != host && rec.Lease.Sponsor != host:
		return lease.Errorf(lease.Denied, "lease %s is not of node %s", id, host)
	case e.ending:
		return lease.Errorf(lease.Over, "lease %s is ending: %s", id, rec.why())
	case rec.Lease.State == lease.Granted:
		return nil
	case o.clock.Up() >= e.deadline:
		return lease.Errorf(lease.Over, "lease %s was reserved until %s; ask again", id, rec.Lease.Expires.Format(time.RFC3339))
	}
	rec.Lease.State = lease.Granted
	rec.expire(o.clock, rec.Lease.Request.Life)
	o.point("confirm-1-checked")
	return o.commit(e, rec)
}
