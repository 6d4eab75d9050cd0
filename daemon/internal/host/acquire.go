package host

// Acquire: from a request to a lease with a socket. The record is on the disk before the first
// owner hears of the lease, so that a restart can take back what a crash left behind. It says
// that the lease is granted before the caller hears of it.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/placement"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// tries is how often a request is placed again because what the owners have free has
	// changed.
	tries = 20
	// reserveTime bounds one Reserve or Confirm, which write to the owner's disk.
	reserveTime = 5 * time.Second
)

// Acquire implements rpc.LocalService.
func (h *Host) Acquire(ctx context.Context, p rpc.Peer, r lease.Request) (lease.Lease, string, error) {
	l, err := h.acquire(ctx, p, &r)
	if err != nil && audit.IsLater(ctx) {
		return lease.Lease{}, "", err
	}
	if err != nil {
		if skipped, ok := h.refusal(p.UID); ok {
			h.log.Info("lease refused", "job", form.Name(r.Key.String()), "uid", p.UID, "pid", p.PID, "reason", err, "skipped", skipped)
			h.audit(audit.Event{Event: audit.Refuse, Key: form.Name(r.Key.String()), Incarnation: r.Key.Incarnation, UID: audit.UID(p.UID), PID: uint32(max(0, p.PID)), Reason: err.Error(), Skipped: skipped})
		}
		return lease.Lease{}, "", err
	}
	return l, h.Socket(l.ID), nil
}

// Refused records in the audit log that a request of root's was given up: after how many tries, and the error of the last
// one. The tries must have had a context of audit.Later.
func (h *Host) Refused(k lease.Key, uid uint32, err error, times int) {
	if k.Cluster == "" {
		k.Cluster = h.cfg.Cluster
	}
	key := form.Name(k.String())
	h.log.Info("lease refused", "job", key, "uid", uid, "reason", err, "times", times)
	h.audit(audit.Event{Event: audit.Refuse, Key: key, Incarnation: k.Incarnation, UID: audit.UID(uid), Reason: err.Error(), Times: uint64(max(1, times))})
}

func (h *Host) acquire(ctx context.Context, p rpc.Peer, r *lease.Request) (lease.Lease, error) {
	if err := h.check(p, r); err != nil {
		return lease.Lease{}, err
	}
	if err := h.acquires.enter(p.UID); err != nil {
		return lease.Lease{}, err
	}
	defer h.acquires.leave(p.UID)
	return h.obtain(ctx, p, *r)
}

// obtain gives a checked request its lease.
func (h *Host) obtain(ctx context.Context, p rpc.Peer, r lease.Request) (lease.Lease, error) {
	n := nameOf(r.Key)
	for {
		fctx, done, err := h.fly(ctx, r.Key)
		if err != nil {
			return lease.Lease{}, err
		}
		h.mu.Lock()
		t, over := h.tombs[n]
		hd := h.keys[n]
		var have lease.Lease
		if hd != nil {
			have = hd.rec.Lease
		}
		h.mu.Unlock()
		old := have.Request.Key.Incarnation
		switch {
		case over && t.Key.Incarnation >= r.Key.Incarnation:
			err = lease.Errorf(lease.Over, "job %s has ended: %s", r.Key, t.Reason)
		case hd == nil:
			l, err := h.grant(fctx, r)
			if cause := context.Cause(fctx); err != nil && cause != nil && ctx.Err() == nil {
				err = cause
			}
			done()
			return l, err
		case have.Request.UID != r.UID && (p.UID != 0 || old >= r.Key.Incarnation):
			err = lease.Errorf(lease.Denied, "job %s has a lease of uid %d", r.Key, have.Request.UID)
		case old > r.Key.Incarnation && !have.Request.SameRun(r):
			err = lease.Errorf(lease.Over, "job %s: incarnation %d asks, and the later incarnation %d has the lease", r.Key, r.Key.Incarnation, old)
		case old == r.Key.Incarnation && have.Request.Restart != r.Restart: // two daemons with different clocks gave the same epoch
			err = lease.Errorf(lease.Over, "job %s: restart %d asks, and restart %d has the lease in the same epoch", r.Key, r.Restart, have.Request.Restart)
		case old < r.Key.Incarnation && !have.Request.SameRun(r):
			h.release(ctx, hd, "a later run of the job has begun", true)
			done()
			continue
		}
		done()
		return have, err
	}
}

// check refuses a request that is malformed or that the caller may not make, and fills in the
// fields that the caller may leave out or may not set.
func (h *Host) check(p rpc.Peer, r *lease.Request) error {
	k := &r.Key
	if k.Cluster == "" {
		k.Cluster = h.cfg.Cluster
	}
	if k.Node == "" {
		k.Node = h.cfg.Node
	}
	if k.Node != h.cfg.Node {
		return lease.Errorf(lease.Invalid, "job %s: this is node %s, and only the node that uses a lease may ask for it; compare node in sluice.yaml with Slurm's NodeName", form.Name(k.String()), h.cfg.Node)
	}
	if err := h.checkRequest(r); err != nil {
		return err
	}
	if p.UID == 0 {
		if r.Holder.PID > 0 && r.Holder.Start == 0 {
			r.Holder.Start = startOf(r.Holder.PID)
		}
		return checkHolder(r.Holder)
	}
	h.mu.Lock()
	may := h.users
	h.mu.Unlock()
	if !may {
		return lease.Errorf(lease.Denied, "users may not acquire leases on this node; submit a job with --gres=rgpu:N, or ask the site for users.run in sluice.yaml")
	}
	if !form.IsRunJob(k.Job) {
		return lease.Errorf(lease.Denied, "job %s: only root may ask for a lease of a Slurm job; use sluice run", k)
	}
	if r.UID != 0 && r.UID != p.UID {
		return lease.Errorf(lease.Denied, "job %s: a lease for uid %d is asked for by uid %d; only root may ask for others", k, r.UID, p.UID)
	}
	r.UID, r.GID = p.UID, p.GID // 0 means that the request names no user
	r.Nodes = 0
	// A user's own lease ends with a process of the user's: by default the one that asks.
	if r.Holder.PID == 0 {
		r.Holder = lease.Process{PID: p.PID}
	}
	start := startOf(r.Holder.PID)
	if r.Holder.Start == 0 {
		r.Holder.Start = start
	}
	if uid, ok := uidOf(r.Holder.PID); r.Holder.PID != p.PID && (!ok || uid != p.UID) {
		return lease.Errorf(lease.Denied, "holder %d is no process of uid %d", r.Holder.PID, p.UID)
	}
	if start == 0 {
		return lease.Errorf(lease.Invalid, "holder %d: no such process in this node's PID namespace", r.Holder.PID)
	}
	return checkHolder(r.Holder)
}

// checkRequest checks the fields that do not depend on the caller.
func (h *Host) checkRequest(r *lease.Request) error {
	k := &r.Key
	for what, s := range map[string]string{"job": k.Job, "cluster": k.Cluster, "account": r.Account, "job name": r.JobName, "type": r.Type, "pool": r.Pool, "node": k.Node} {
		if !form.IsLine(s, form.MaxName) {
			return lease.Errorf(lease.Invalid, "%s: want at most %d bytes on one line that can be printed", what, form.MaxName)
		}
	}
	if k.Job == "" || strings.ContainsAny(k.Job, "/@") {
		return lease.Errorf(lease.Invalid, "job %q: want Slurm's job id, or run-NAME", form.Name(k.Job))
	}
	if r.Life < 0 || h.cfg.MaxLife > 0 && r.Life > h.cfg.MaxLife {
		return lease.Errorf(lease.Invalid, "life time %v: want none below 0, nor above lease.max_life of sluice.yaml (%v, 0s is any)", r.Life, h.cfg.MaxLife)
	}
	if r.Nodes > maxNodes {
		return lease.Errorf(lease.Invalid, "job on %d nodes: want at most %d", r.Nodes, maxNodes)
	}
	if form.IsRunJob(k.Job) {
		h.mu.Lock()
		most := h.runLife
		h.mu.Unlock()
		if most > 0 && r.Life > most {
			return lease.Errorf(lease.Invalid, "life time %v: want at most %v outside of Slurm's jobs, users.max_life of sluice.yaml", r.Life, most)
		}
	}
	if err := placement.Validate(*r); err != nil {
		return err
	}
	if r.Holder.PID < 0 {
		return lease.Errorf(lease.Invalid, "holder %d is no process", r.Holder.PID)
	}
	return nil
}

func checkHolder(p lease.Process) error {
	if p.PID > 0 && !alive(p) {
		return lease.Errorf(lease.Over, "holder %d has ended", p.PID)
	}
	return nil
}

// grant places the request until owners and placement agree.
func (h *Host) grant(ctx context.Context, r lease.Request) (lease.Lease, error) {
	if r.Pool == "" {
		r.Pool = "default"
	}
	h.mu.Lock()
	pool, ok := h.pools[r.Pool]
	h.mu.Unlock()
	if !ok {
		return lease.Lease{}, lease.Errorf(lease.NotFound, "pool %q is not in sluice.yaml; see sluice gpus", form.Name(r.Pool))
	}
	if r.Place == "" {
		r.Place = pool.Place
	}
	if r.Grace == 0 {
		r.Grace = pool.Grace
	}
	quotas := h.quotasOf(ctx, &r)
	if err := never(quotas, asked(&r)); err != nil {
		return lease.Lease{}, err
	}
	caught := false
	c := h.newChooser(r, pool)
	for try := range tries {
		got, err := c.choose(ctx)
		if err != nil {
			return lease.Lease{}, err
		}
		again, err := h.withinQuotas(ctx, quotas, &r, got.grants, "")
		if lease.CodeOf(err) == lease.NoRoom && err != nil && !caught && (!again || try >= quotaTries) {
			caught = true
			h.catchUp(ctx) // releases of this host that are not delivered yet
			again, err = h.withinQuotas(ctx, quotas, &r, got.grants, "")
		}
		if err != nil {
			h.view.settle(got.claims, "", false)
			if again && try < quotaTries {
				quotaRest(ctx, try)
				continue
			}
			return lease.Lease{}, err
		}
		l, again, err := h.attempt(ctx, r, got.grants, quotas)
		h.view.settle(got.claims, l.ID, err == nil && slices.Equal(l.Grants, got.grants))
		if err == nil {
			return l, nil
		}
		if !again {
			return lease.Lease{}, err
		}
		c.taken(ctx, got, err)
		// Hosts that compete for a GPU try again at different times.
		pause(ctx, rand.N(time.Duration(try+1)*2*time.Millisecond))
	}
	return lease.Lease{}, withSilent(c.last, nil, nil)
}

// withSilent adds to a refusal which owners were silent when it was made.
func withSilent(err error, silent []string, last error) error {
	var e *lease.Error
	if !errors.As(err, &e) {
		return lease.Errorf(lease.Down, "what the pool's owners have free changed %d times while the request was placed; ask again", tries)
	}
	out := *e
	if len(silent) > 0 {
		if out.Code == lease.Never {
			out.Code = lease.NoRoom // a silent owner may have room
		}
		out.Reason += fmt.Sprintf("; not asked: %s", strings.Join(silent, "; "))
	}
	if last != nil {
		out.Reason += fmt.Sprintf("; before that: %v", last)
	}
	return &out
}

// tell writes the host's audit line about a lease. It writes none for a lease whose grants are
// all of this node's owner, which has written its own.
func (h *Host) tell(event string, l *lease.Lease, reason string) {
	for _, g := range l.Grants {
		if g.Owner != h.cfg.Node {
			h.audit(audit.Of(event, l, reason))
			return
		}
	}
}
