package host

// One attempt to acquire the grants that placement chose:
//
//	record   the lease is in the ledger        before any owner hears of it
//	reserve  all owners have it, for a while   a single owner grants it at once
//	quota    no quota is exceeded with it      only where one holds for the request, see quota.go
//	confirm  all owners have granted it        only where there are several, or a quota
//	wanted   the caller is still there
//	grant    the ledger says so                before the caller hears of it
//	publish  it has its socket, or, for another node, its sponsor
//
// A step that fails is undone, with all steps before it. What remains of the attempt then is
// the releases that owners have not answered yet. Requests of Slurm jobs and of users arrive
// through grant in acquire.go, which places them again where that may help.

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// attempt is an attempt in progress. One goroutine uses it.
type attempt struct {
	h     *Host
	lease lease.Lease // as far as the steps have got
	rec   record
	held  *held // from record on
	parts []*part

	quotas []Quota // that the lease has to keep
}

// step is one of the steps above.
type step struct {
	name string
	do   func(*attempt, context.Context) error
	// undo takes back what this step and those before it have done. The step has failed with
	// the error. nil means that there is nothing to undo.
	undo func(*attempt, context.Context, error)
	// again says that another placement may succeed.
	again bool
	// instead returns a lease that the caller gets in place of the error, nil if there is none.
	instead func(*attempt, context.Context) *lease.Lease
}

var steps = []step{
	{name: "record", do: (*attempt).record},
	{name: "reserve", do: (*attempt).reserve, undo: (*attempt).unreserve, again: true, instead: (*attempt).settleConflict},
	{name: "quota", do: (*attempt).quota, undo: (*attempt).takeBack, again: true},
	{name: "confirm", do: (*attempt).confirm, undo: (*attempt).takeBack, again: true},
	{name: "wanted", do: (*attempt).wanted, undo: (*attempt).takeBack},
	{name: "grant", do: (*attempt).grant, undo: (*attempt).takeBack},
	{name: "publish", do: (*attempt).publish, undo: (*attempt).unpublish},
}

// attempt acquires these grants under a new id, since owners never grant an id again that was
// taken back. again says that another placement may succeed. For another node the lease has
// this node as its sponsor, and no socket here.
func (h *Host) attempt(ctx context.Context, r lease.Request, grants []lease.Grant, quotas []Quota) (_ lease.Lease, again bool, _ error) {
	a, err := h.newAttempt(r, grants)
	if err != nil {
		return lease.Lease{}, false, err
	}
	a.quotas = quotas
	for _, s := range steps {
		err := s.do(a, ctx)
		if err == nil {
			continue
		}
		h.log.Debug("attempt failed", "lease", a.lease.ID, "step", s.name, "error", err)
		if s.undo != nil {
			s.undo(a, ctx, err)
			if l := a.kept(); l != nil {
				return *l, false, nil
			}
		}
		if s.instead != nil {
			if known := s.instead(a, ctx); known != nil {
				return *known, false, nil
			}
		}
		return a.lease, s.again && retry(err), err
	}
	return a.lease, false, nil
}

func (h *Host) newAttempt(r lease.Request, grants []lease.Grant) (*attempt, error) {
	l := lease.Lease{ID: form.NewLeaseID(), Request: r, Grants: grants, State: lease.Reserved, Made: time.Now().UTC(), Host: r.Key.Node}
	if l.Host != h.cfg.Node {
		l.Sponsor = h.cfg.Node
	}
	a := &attempt{h: h, lease: l, rec: record{Lease: l, Phase: acquiring, Addrs: make(map[string]string)}}
	for _, name := range lease.Owners(grants) {
		p, err := h.peer(name, "")
		if err != nil {
			return nil, err
		}
		pt := &part{peer: p}
		for _, g := range grants {
			if g.Owner == name {
				pt.grants = append(pt.grants, g)
			}
		}
		a.rec.Addrs[name] = p.addr
		a.parts = append(a.parts, pt)
	}
	return a, nil
}

func (a *attempt) record(context.Context) error {
	if err := a.h.put(&a.rec); err != nil {
		a.h.erase(a.lease.ID) // a change that fails may have been made
		return err
	}
	a.held = &held{rec: a.rec}
	a.h.mu.Lock()
	a.h.leases[a.lease.ID] = a.held
	a.h.mu.Unlock()
	a.h.point("acquire-1-written")
	return nil
}

// single says that the lease is granted in one step: one owner has all grants, and nothing is to be seen to in between.
func (a *attempt) single() bool { return len(a.parts) == 1 && len(a.quotas) == 0 }

func (a *attempt) reserve(ctx context.Context) error {
	ttl := a.h.cfg.Reserve
	if a.single() {
		ttl = 0
	}
	each(a.parts, func(pt *part) {
		mine := a.lease
		mine.Grants = pt.grants
		pt.have, pt.err = call(ctx, a.h, pt.peer, reserveTime, true, func(ctx context.Context, o lease.Owner) (lease.Lease, error) {
			return o.Reserve(ctx, a.h.cfg.Node, mine, ttl)
		})
	})
	a.h.point("acquire-2-reserved")
	if err := worst(a.parts); err != nil {
		return err
	}
	for _, pt := range a.parts {
		if pt.have.Request.Life > 0 {
			a.lease.Request.Life = pt.have.Request.Life // which the owner may have shortened
		}
		if e := pt.have.Expires; a.single() && !e.IsZero() {
			a.lease.Expires = e
		}
	}
	return nil
}

// unreserve releases the lease at the owners that may have reserved it. An owner that refused
// has nothing to take back.
func (a *attempt) unreserve(_ context.Context, why error) {
	var pending []string
	for _, pt := range a.parts {
		if c := lease.CodeOf(pt.err); pt.err == nil || c == lease.Down || c == lease.Internal {
			pending = append(pending, pt.peer.name)
		}
	}
	a.h.takeBack(a.held, pending, why)
}

// settleConflict asks the owners that have another lease of the job. If it is a whole lease
// that this host has forgotten, the job gets that one.
func (a *attempt) settleConflict(ctx context.Context) *lease.Lease {
	for _, pt := range a.parts {
		if pt.err == nil || lease.CodeOf(pt.err) != lease.Conflict || pt.have.ID == "" {
			continue
		}
		if known := a.h.stranger(ctx, pt.peer, pt.have); known != nil {
			return known
		}
	}
	return nil
}

// quota checks the quotas again, now that the lease is reserved.
func (a *attempt) quota(ctx context.Context) error {
	if len(a.quotas) == 0 {
		return nil
	}
	_, err := a.h.withinQuotas(ctx, a.quotas, &a.lease.Request, a.lease.Grants, a.lease.ID)
	return err
}

func (a *attempt) confirm(ctx context.Context) error {
	if !a.single() {
		each(a.parts, func(pt *part) {
			pt.err = a.h.order(ctx, pt.peer, reserveTime, func(ctx context.Context, o lease.Owner) error {
				return o.Confirm(ctx, a.h.cfg.Node, a.lease.ID)
			})
			if lease.CodeOf(pt.err) == lease.Over && pt.err != nil { // a reservation that ran out; the job may still ask
				pt.err = lease.Errorf(lease.Conflict, "%v", pt.err)
			}
		})
		if err := worst(a.parts); err != nil {
			return err
		}
		if a.lease.Request.Life > 0 {
			a.lease.Expires = time.Now().Add(a.lease.Request.Life).UTC()
		}
	}
	a.h.point("acquire-3-confirmed")
	return nil
}

func (a *attempt) wanted(ctx context.Context) error {
	if ctx.Err() != nil {
		return lease.Errorf(lease.Down, "job %s: the request was given up", a.lease.Request.Key)
	}
	return nil
}

func (a *attempt) grant(context.Context) error {
	a.lease.State = lease.Granted
	a.rec.Lease, a.rec.Phase = a.lease, granted
	if err := a.h.put(&a.rec); err != nil {
		return err
	}
	a.h.point("acquire-4-granted")
	a.h.mu.Lock()
	defer a.h.mu.Unlock()
	a.held.rec = a.rec
	a.held.deadline = lifeLeft(&a.lease)
	a.h.keys[nameOf(a.lease.Request.Key)] = a.held
	return nil
}

func (a *attempt) publish(context.Context) error {
	h, l := a.h, &a.lease
	text := "lease granted"
	if l.Sponsor != "" {
		text = "lease granted for another node"
		h.point("sponsor-1-granted")
	} else {
		if err := h.openSocket(a.held); err != nil {
			return lease.Errorf(lease.Internal, "lease %s: %v", l.ID, err)
		}
		h.point("acquire-5-socket")
		h.watchHolder(a.held)
	}
	h.tell(audit.Grant, l, "")
	h.log.Info(text, "lease", l.ID, "job", l.Request.Key.String(), "uid", l.Request.UID, "owners", len(a.parts), "gpus", len(l.Grants))
	return nil
}

func (a *attempt) unpublish(ctx context.Context, why error) {
	a.h.release(ctx, a.held, why.Error(), false)
}

// takeBack releases the lease at all owners.
func (a *attempt) takeBack(_ context.Context, why error) {
	a.h.takeBack(a.held, lease.Owners(a.lease.Grants), why)
}

// kept returns the lease if it could not be taken back, because its node has attached it: an owner's answer that it had granted it was lost.
// It is the job's then.
func (a *attempt) kept() *lease.Lease {
	a.held.deliver.Lock()
	stays := a.held.stays
	a.held.deliver.Unlock()
	if !stays {
		return nil
	}
	l := a.lease
	l.State = lease.Granted
	if err := a.h.adopt(l); err != nil {
		a.h.log.Warn("lease that its node has attached cannot be taken over by its sponsor", "lease", l.ID, "error", err)
	}
	return &l
}

// part is an owner's share of an acquisition.
type part struct {
	peer   *peer
	grants []lease.Grant
	have   lease.Lease
	err    error
}

// each runs f for all parts at the same time.
func each(parts []*part, f func(*part)) {
	if len(parts) == 1 {
		f(parts[0])
		return
	}
	var wg sync.WaitGroup
	for _, pt := range parts {
		wg.Go(func() { f(pt) })
	}
	wg.Wait()
}

// worst returns the error that decides: one that no other placement can avoid comes before the
// others.
func worst(parts []*part) error {
	var err error
	for _, pt := range parts {
		if pt.err != nil && (err == nil || retry(err) && !retry(pt.err)) {
			err = pt.err
		}
	}
	var e *lease.Error
	if err != nil && !errors.As(err, &e) {
		err = lease.Errorf(lease.Down, "%v", err)
	}
	return err
}

func retry(err error) bool {
	switch lease.CodeOf(err) {
	case lease.Conflict, lease.Down, lease.NoRoom, lease.NotFound:
		return true
	}
	return false
}

// takeBack ends an attempt. The job may ask again for the same key, so the release does not end
// the key.
func (h *Host) takeBack(hd *held, pending []string, why error) {
	hd.deliver.Lock()
	h.mu.Lock()
	hd.rec.Phase, hd.rec.Pending, hd.rec.Reason = releasing, pending, "not all of it could be had: "+why.Error()
	rec := hd.rec
	h.mu.Unlock()
	if len(pending) == 0 {
		h.forget(hd)
		hd.deliver.Unlock()
		return
	}
	if err := h.put(&rec); err != nil {
		h.log.Error("attempt stays as it was in the ledger", "lease", rec.Lease.ID, "error", err)
	}
	hd.deliver.Unlock()
	h.point("acquire-6-undone")
	// The caller may be gone. The reservations have to go all the same.
	h.deliver(h.base, hd)
}
