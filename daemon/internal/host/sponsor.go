package host

// Leases for other nodes. Slurm's controller hears of a job before its nodes do, and of all
// nodes at once. So its daemon gets the leases, all or none:
//
// Sponsor gets a lease for each node, as Acquire does, at the controller. Attach, in attach.go,
// takes it over at the node. slurmd's Prolog may call it before Sponsor has all leases: one that
// its node has claimed by then stays the job's if Sponsor fails or dies, and ends with the
// Epilog; a repeated Sponsor finds it.
//
// The sponsor's record differs from others only in its Host. The sponsor renews the lease until
// the owner no longer accepts that, which means that the node renews it, and then forgets it.
// From then on the owner notices when the node falls silent.

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// maxNodes is the most nodes for which one job may have leases.
const maxNodes = 4096

// Sponsor gets a lease for each of the requests, which name their nodes, or none. The requests
// are one run of a job: without an incarnation all get the next epoch. A repeated call for the
// same run returns the leases that exist.
func (h *Host) Sponsor(ctx context.Context, reqs []lease.Request) ([]lease.Lease, error) {
	if len(reqs) == 0 || len(reqs) > maxNodes {
		return nil, lease.Errorf(lease.Invalid, "leases for %d nodes: want 1 to %d", len(reqs), maxNodes)
	}
	reqs = slices.Clone(reqs)
	var epoch uint64
	nodes := make(map[string]bool, len(reqs))
	for i := range reqs {
		r := &reqs[i]
		if r.Key.Cluster == "" {
			r.Key.Cluster = h.cfg.Cluster
		}
		if r.Key.Incarnation == 0 {
			if epoch == 0 {
				epoch = h.Epoch()
			}
			r.Key.Incarnation = epoch
		}
		if err := h.checkRequest(r); err != nil {
			return nil, err
		}
		if r.Key.Node == "" || nodes[r.Key.Node] || r.Holder != (lease.Process{}) {
			return nil, lease.Errorf(lease.Invalid, "job %s: want every node once, and no holder", form.Name(r.Key.String()))
		}
		nodes[r.Key.Node] = true
		r.Nodes = uint32(len(reqs))
	}
	if err := h.acquires.enter(0); err != nil {
		return nil, err
	}
	defer h.acquires.leave(0)
	var all []lease.Lease
	// slurmctld repeats its Prolog when it is restarted. By then this daemon has forgotten the
	// leases that nodes have attached, and would get more at another owner.
	if h.lives(ctx, reqs) {
		h.settle(ctx, reqs)
	}
	settled := false
	for i := 0; i < len(reqs); i++ {
		l, err := h.obtain(ctx, rpc.Peer{}, reqs[i])
		if lease.CodeOf(err) == lease.NoRoom && err != nil && !settled {
			// The room may be taken by leases of the job itself that this daemon does not know.
			settled = true
			h.settle(ctx, reqs)
			i--
			continue
		}
		if err == nil {
			all = append(all, l)
			continue
		}
		err = at(reqs[i].Key.Node, err)
		if !audit.IsLater(ctx) {
			h.Refused(reqs[i].Key, reqs[i].UID, err, 1)
		}
		h.giveUp(all, err)
		return nil, err
	}
	for i := range all {
		h.view.granted(&all[i])
	}
	h.register(ctx, all)
	h.point("sponsor-2-all")
	return all, nil
}

// at adds to an error the node for which it came.
func at(node string, err error) error {
	var e *lease.Error
	if !errors.As(err, &e) {
		return lease.Errorf(lease.Internal, "node %s: %v", node, err)
	}
	return lease.Errorf(e.Code, "node %s: %s", node, e.Reason)
}

// giveUp releases the leases of some of a job's nodes, an earlier process's too. Their keys do
// not end: the job may ask again.
func (h *Host) giveUp(leases []lease.Lease, why error) {
	var wg sync.WaitGroup
	for _, l := range leases {
		h.mu.Lock()
		hd := h.leases[l.ID]
		h.mu.Unlock()
		if hd != nil { // not ctx: the caller may be gone
			wg.Go(func() { h.release(h.base, hd, "not all nodes of the job could get a lease: "+why.Error(), false) })
		}
	}
	wg.Wait()
	h.point("sponsor-3-undone")
}

// lives says whether some owner has a lease of this job that this daemon does not know.
func (h *Host) lives(ctx context.Context, reqs []lease.Request) bool {
	key := reqs[0].Key
	owners, _ := h.ownersOf(key.Cluster, key.Job)
	reports, _ := h.reports(ctx, owners, key.Cluster, key.Job) // by the owners that answer
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.ContainsFunc(reports, func(r lease.Report) bool { return r.Ended.IsZero() && h.leases[r.Lease] == nil })
}

// settle asks what the owners have for a job already: it takes over leases of this run, and
// ends leases of earlier ones.
func (h *Host) settle(ctx context.Context, reqs []lease.Request) {
	byNode := make(map[name]*lease.Request, len(reqs))
	for i := range reqs {
		byNode[nameOf(reqs[i].Key)] = &reqs[i]
	}
	owners, _ := h.ownersOf(reqs[0].Key.Cluster, reqs[0].Key.Job)
	found, _ := h.search(ctx, owners, "", false, func(l *lease.Lease) bool { return byNode[nameOf(l.Request.Key)] != nil })
	for _, l := range found {
		r := byNode[nameOf(l.Request.Key)]
		if r.SameRun(l.Request) {
			if whole(l) {
				_ = h.adopt(l) // fails if it is held already
			}
		} else if l.Request.Key.Incarnation < r.Key.Incarnation {
			h.endParts(ctx, []lease.Lease{l}, l.Request.Key, "a later run of the job has begun")
		}
	}
}

// Withdraw gives back a lease that this daemon has got for another node, because the job has another lease there. The
// job does not end by it, and a lease that its node has attached stays. It returns false if this daemon is not
// the sponsor of such a lease.
func (h *Host) Withdraw(ctx context.Context, id, reason string) bool {
	h.mu.Lock()
	hd := h.leases[id]
	ours := hd != nil && hd.rec.Phase == granted && hd.rec.Lease.Host != h.cfg.Node
	h.mu.Unlock()
	if ours {
		h.release(ctx, hd, reason, false)
	}
	return ours
}

// entrust forgets a lease that its node has attached, or that has ended.
func (h *Host) entrust(hd *held) {
	hd.deliver.Lock()
	defer hd.deliver.Unlock()
	h.mu.Lock()
	ours := hd.rec.Phase == granted && h.leases[hd.rec.Lease.ID] == hd
	h.mu.Unlock()
	if !ours {
		return
	}
	h.forget(hd)
	h.mayReturn(hd)
}
