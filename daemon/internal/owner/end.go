package owner

// Release, Evict and Sweep: how a lease ends.

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/form"
)

// maxUnknown is the most leases that never existed here whose release is remembered for one
// host.
const maxUnknown = 4096

// maxControl is the same for a controller, which ends every job at owners that never had it too.
const maxControl = 1 << 17

// purgeMost bounds one change that removes old tombstones.
const purgeMost = 1000

func (r *record) why() string {
	if r.Ending == nil {
		return "it is being released"
	}
	return r.Ending.Reason
}

// Release ends a lease of host. A late Reserve of the same id is refused. So is one of the same
// key, and of its earlier incarnations, if the key is given and the lease was granted, or if
// the key alone is given. A host that takes back a lease of which it got only a part gives the
// id without the key, and may ask again. A sponsor gets a Conflict for that once the lease's own
// node has claimed the lease, and for a lease that the node has got by itself.
func (o *Owner) Release(ctx context.Context, host, id string, key lease.Key, reason string) error {
	zero := key == (lease.Key{})
	if id == "" && zero {
		return lease.Errorf(lease.Invalid, "release: want a lease id or a job")
	}
	if _, err := form.ParseLeaseID(id); id != "" && err != nil {
		return lease.Errorf(lease.Invalid, "%v", err)
	}
	if !zero && (key.Node != host && !o.Controller(host) || key.Job == "" || len(key.Cluster) > form.MaxName || len(key.Job) > form.MaxName || len(key.Node) > form.MaxName) {
		return lease.Errorf(lease.Denied, "release: job %s is not of node %s", key, host)
	}
	if reason = form.Name(reason); reason == "" {
		reason = "released by its host"
	}
	if !zero && key.Node == "" {
		return o.endJob(ctx, host, key, reason)
	}
	e, err := o.release(host, id, key, reason)
	if err != nil || e == nil {
		return err
	}
	o.finish(e)
	if err := o.await(ctx, e); err != nil {
		return err
	}
	o.point("release-5-answer")
	return nil
}

// release marks what is to end. It returns nil when there is nothing.
func (o *Owner) release(host, id string, key lease.Key, reason string) (*entry, error) {
	o.write.Lock()
	defer o.write.Unlock()
	if err := o.sure(); err != nil {
		return nil, err
	}
	zero := key == (lease.Key{})
	e := o.leases[id]
	if id == "" {
		if e = o.keys[nameOf(key)]; e != nil && e.rec.Lease.Request.Key.Incarnation > key.Incarnation {
			e = nil // a later run of the job has the lease; the release is of an earlier run
		}
	}
	if e == nil {
		return nil, o.remember(host, id, key, reason)
	}
	if e.rec.Lease.Host != host && e.rec.Lease.Sponsor != host && !o.Controller(host) {
		return nil, lease.Errorf(lease.Denied, "lease %s is not of node %s", e.rec.Lease.ID, host)
	}
	if e.ending {
		return e, nil
	}
	if l := &e.rec.Lease; zero && l.Host != host && (e.rec.Claimed || l.Sponsor == "") { // its node has claimed it, or got it by itself
		return nil, lease.Errorf(lease.Conflict, "lease %s: its node %s has it", l.ID, l.Host)
	}
	over := id == "" || !zero && e.rec.Lease.State == lease.Granted
	o.point("release-0-checked")
	o.mark(e, ending{audit.Release, reason, over})
	return e, nil
}

// remember writes tombstones for a lease or key that is not here: its Reserve may still arrive.
// write is held.
func (o *Owner) remember(host, id string, key lease.Key, reason string) error {
	t := o.tombstone(reason)
	t.Lease, t.Host, t.Unknown = id, host, true
	name := idTomb(id)
	if id == "" {
		name, t.Key, t.Incarnation = keyTomb(key), key.String(), key.Incarnation
		if key.Node == "" {
			name = jobTomb(key)
		}
	}
	if old, ok := o.tombs[name]; ok && old.Incarnation >= t.Incarnation {
		return nil
	}
	most := maxUnknown
	if o.Controller(host) {
		most = maxControl
	}
	if o.unknown[host] >= most {
		o.log.Warn("host releases too many leases that never existed here; this one is not remembered", "host", host, "lease", id, "job", key.String())
		return nil
	}
	if err := o.cfg.Ledger.Put(ledger.Tombstones, name, t); err != nil {
		return lease.Errorf(lease.Internal, "release of %s cannot be remembered: %v", name, err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.bury(name, t)
	return nil
}

// mark starts the end of a lease: no session is started on it any more. write is held.
func (o *Owner) mark(e *entry, why ending) {
	rec := e.rec
	rec.Ending = &why
	if rec.Lease.State == lease.Granted {
		// A restarted daemon goes on with the end. If the mark cannot be written, the lease is
		// ended all the same: only a crash before that would make the host ask again.
		if err := o.cfg.Ledger.Put(ledger.Leases, rec.Lease.ID, rec); err != nil {
			o.log.Error("ending of lease cannot be written", "lease", rec.Lease.ID, "error", err)
		}
	}
	o.mu.Lock()
	e.rec, e.ending = rec, true
	e.cancel()
	if e.starting == 0 {
		close(e.idle)
	}
	o.mu.Unlock()
	o.point("release-1-marked")
}

// finish ends a marked lease in the background, unless another goroutine does already.
func (o *Owner) finish(e *entry) {
	o.mu.Lock()
	select {
	case <-e.ended:
		o.mu.Unlock()
		return
	default:
	}
	if e.trying {
		o.mu.Unlock()
		return
	}
	e.trying, e.tried = true, make(chan struct{})
	o.mu.Unlock()
	o.background(func() {
		err := o.end(e)
		if err != nil {
			o.log.Error("lease cannot be ended yet; its part of the GPUs stays taken", "lease", e.id, "error", err)
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		e.trying = false
		if err != nil {
			e.tryErr = err
			close(e.tried)
		}
	})
}

// end kills the sessions, waits for them, and then frees what the lease held.
func (o *Owner) end(e *entry) error {
	id := e.id
	ctx, cancel := context.WithTimeout(o.ctx, o.lim().End)
	defer cancel()
	select {
	case <-e.idle:
	case <-ctx.Done():
		return lease.Errorf(lease.Down, "lease %s: a session of it is still being started", id)
	}
	if err := o.cfg.Workers.End(ctx, id); err != nil {
		return lease.Errorf(lease.Down, "lease %s: its sessions have not ended: %v", id, err)
	}
	o.point("release-2-killed")
	return o.free(e)
}

// free takes an ended lease out of the ledger.
func (o *Owner) free(e *entry) error {
	o.write.Lock()
	defer o.write.Unlock()
	l, why := &e.rec.Lease, e.rec.Ending
	ev := o.event(why.Event, l, why.Reason)
	ev.Over = why.Over
	t := o.tombstone(why.Reason)
	t.Lease, t.Host = l.ID, l.Host
	kt := t
	if why.Over && l.State == lease.Granted {
		r := o.report(&e.rec)
		r.Ended, r.Reason = t.Ended, t.Reason
		t.Report = &r
	}
	kt.Key, kt.Incarnation = l.Request.Key.String(), l.Request.Key.Incarnation
	kname := keyTomb(l.Request.Key)
	over := why.Over
	if old, ok := o.tombs[kname]; ok && old.Incarnation > kt.Incarnation {
		over = false
	}
	var seq uint64
	err := o.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		var was record
		there, err := tx.Get(ledger.Leases, l.ID, &was)
		if err != nil || !there {
			return err // already deleted: the change that seemed to fail was made
		}
		if seq, err = tx.Enqueue(ev); err != nil {
			return err
		}
		if over {
			if err := tx.Put(ledger.Tombstones, kname, kt); err != nil {
				return err
			}
		}
		return errors.Join(tx.Put(ledger.Tombstones, idTomb(l.ID), t), tx.Delete(ledger.Leases, l.ID))
	})
	if err != nil {
		o.resync()
		return lease.Errorf(lease.Internal, "lease %s cannot be deleted from the ledger: %v", l.ID, err)
	}
	o.point("release-3-freed")
	if seq != 0 {
		o.queue = append(o.queue, line{seq: seq, event: ev})
	}
	if err := o.flush(); err != nil {
		// The line stays in the ledger; Sweep tries again. What ended has ended.
		o.log.Warn("end of lease is not in the audit log yet", "lease", l.ID, "error", err)
	}
	o.point("release-4-audited")
	if why.Event == audit.Reclaim {
		o.counts.reclaimed.Add(1)
	} else {
		o.counts.released.Add(1)
	}
	o.log.Info("lease ended", "lease", l.ID, "job", l.Request.Key.String(), "host", l.Host, "event", why.Event, "reason", why.Reason)
	o.mu.Lock()
	o.bury(idTomb(l.ID), t)
	if over {
		o.bury(kname, kt)
	}
	o.remove(e)
	o.mu.Unlock()
	// From here on the tombstone has its report.
	if err := o.cfg.Workers.Forget(l.ID); err != nil {
		o.log.Warn("account of an ended lease stays until the next start", "lease", l.ID, "error", err)
	}
	close(e.ended)
	return nil
}

// await waits until e is gone, or an attempt to end it failed.
func (o *Owner) await(ctx context.Context, e *entry) error {
	o.finish(e)
	o.mu.RLock()
	tried := e.tried
	o.mu.RUnlock()
	select {
	case <-e.ended:
		return nil
	default:
	}
	select {
	case <-e.ended:
		return nil
	case <-tried:
		o.mu.RLock()
		defer o.mu.RUnlock()
		return e.tryErr
	case <-o.ctx.Done():
		return lease.Errorf(lease.Down, "owner %s is stopping; ask again", o.cfg.Name)
	case <-ctx.Done():
		return lease.Errorf(lease.Down, "lease %s is still ending; ask again", e.id)
	}
}

// Run keeps the leases until ctx ends.
func (o *Owner) Run(ctx context.Context) error {
	o.endOrphans(ctx)
	t := time.NewTicker(time.Second)
	defer t.Stop()
	looked := o.clock.Up()
	for {
		for _, e := range o.sweep() {
			o.finish(e)
		}
		if now := o.clock.Up(); now-looked >= idleEvery {
			looked = now
			o.lookIdle(ctx)
			o.forgetPromises()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-o.ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// Sweep does once what Run does every second, and waits until it is done.
func (o *Owner) Sweep(ctx context.Context) error {
	var errs []error
	for _, e := range o.sweep() {
		errs = append(errs, o.await(ctx, e))
	}
	return errors.Join(errs...)
}

// endOrphans ends sessions of leases that the ledger does not have.
func (o *Owner) endOrphans(ctx context.Context) {
	a, ok := o.cfg.Workers.(Adopted)
	if !ok {
		return
	}
	for _, id := range a.Leases() {
		o.mu.RLock()
		known := o.leases[id] != nil
		o.mu.RUnlock()
		if known {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, o.lim().End)
		err := o.cfg.Workers.End(ctx, id)
		cancel()
		if err == nil {
			err = o.cfg.Workers.Forget(id)
		}
		o.log.Warn("sessions of a lease that is not in the ledger were ended", "lease", id, "error", err)
	}
}

// sweep marks leases whose time is over. It returns all leases that are to be ended.
func (o *Owner) sweep() []*entry {
	limits := o.lim()
	type due struct {
		e     *entry
		why   ending
		still func() bool // with mu
		quiet bool        // only while no session lives
	}
	var found []due
	var marked []*entry
	now := o.clock.Up()
	o.mu.RLock()
	for _, e := range o.leases {
		reserved := e.rec.Lease.State == lease.Reserved
		switch {
		case e.ending:
			marked = append(marked, e)
		case e.deadline != 0 && now >= e.deadline && reserved:
			found = append(found, due{e, ending{audit.Reclaim, "reserved and not confirmed in time", false}, func() bool { return e.rec.Lease.State == lease.Reserved }, false})
		case e.deadline != 0 && now >= e.deadline:
			found = append(found, due{e, ending{audit.Reclaim, "its life time of " + e.rec.Lease.Request.Life.String() + " is over", true}, func() bool { return true }, false})
		case !reserved && e.starting == 0 && now-e.renewed >= limits.Silence:
			opens := e.opens
			found = append(found, due{e, ending{audit.Reclaim, "its host " + e.rec.Lease.Host + " was silent for " + limits.Silence.String() + ", and no session lives", true},
				func() bool { return e.starting == 0 && e.opens == opens && now-e.renewed >= limits.Silence }, true})
		}
	}
	o.mu.RUnlock()
	for _, d := range found {
		if d.quiet && len(o.cfg.Workers.Sessions(d.e.id)) > 0 {
			continue
		}
		o.write.Lock()
		o.mu.RLock()
		still := !d.e.ending && o.leases[d.e.id] == d.e && d.still()
		o.mu.RUnlock()
		if still {
			o.point("reclaim-1-found")
			o.mark(d.e, d.why)
			marked = append(marked, d.e)
		}
		o.write.Unlock()
	}
	o.warnOfEnds(now)
	o.purge(now, limits.Tombstone)
	return marked
}

// warnTime is how long before the end of a life time, at most, its lease is warned of.
const warnTime = 10 * time.Minute

// warnOfEnds logs once that a lease's life time is nearly over: a tenth of it is left, or warnTime.
func (o *Owner) warnOfEnds(now time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range o.leases {
		l := &e.rec.Lease
		if e.warned || e.ending || e.deadline == 0 || l.State != lease.Granted || e.deadline-now > min(warnTime, l.Request.Life/10) {
			continue
		}
		e.warned = true
		o.log.Warn("the life time of a lease is nearly over", "lease", e.id, "job", l.Request.Key.String(), "uid", l.Request.UID, "host", l.Host, "left", max(0, e.deadline-now).Round(time.Second), "life", l.Request.Life)
	}
}

// purge removes old tombstones, and writes the lines that the audit log lacks.
func (o *Owner) purge(now, keep time.Duration) {
	o.mu.RLock()
	var old []string
	for name, t := range o.tombs {
		if now-t.since >= keep && len(old) < purgeMost {
			old = append(old, name)
		}
	}
	old = append(old, o.tooMany(now, purgeMost-len(old))...)
	o.mu.RUnlock()
	if err := o.settle(); err != nil {
		o.log.Warn("lines wait for the audit log", "error", err)
	}
	o.write.Lock()
	defer o.write.Unlock()
	if len(old) == 0 {
		if err := o.cfg.Ledger.Settle(); err != nil {
			o.log.Warn("outbox is not cleared", "error", err)
		}
		return
	}
	err := o.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		for _, name := range old {
			if err := tx.Delete(ledger.Tombstones, name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		o.log.Error("old tombstones cannot be removed", "error", err)
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, name := range old {
		if t := o.tombs[name]; t.Unknown {
			if o.unknown[t.Host]--; o.unknown[t.Host] <= 0 {
				delete(o.unknown, t.Host)
			}
		}
		delete(o.tombs, name)
	}
}
