package host

// Leases for other nodes. Slurm's controller hears of a job before its nodes do, and of
// all of them at once; so its daemon gets the leases, all or none:
//
// Sponsor gets a lease for each node, as Acquire does, at the controller. Attach, in
// attach.go, takes it over at the node.
//
// The sponsor's record is as any other, but for its Host. It renews the lease until the
// owner says that the node does (by not knowing it any more), and then forgets it: a
// node that dies after that must fall silent.

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

// maxNodes is how many nodes one job may have leases for.
const maxNodes = 4096

// Sponsor gets a lease for each of the requests, which name their nodes, or none. They
// are one run of a job: without an incarnation all are given the next epoch. Asked
// again for the same run it answers with what is there.
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
	}
	if err := h.acquires.enter(0); err != nil {
		return nil, err
	}
	defer h.acquires.leave(0)
	var all []lease.Lease
	// slurmctld repeats its Prolog when it is restarted; by then this daemon has forgotten
	// what the nodes have taken over, and at another owner there would be room for more.
	if h.lives(ctx, reqs) {
		h.settle(ctx, reqs)
	}
	settled := false
	for i := 0; i < len(reqs); i++ {
		l, err := h.obtain(ctx, rpc.Peer{}, reqs[i])
		if lease.CodeOf(err) == lease.NoRoom && err != nil && !settled {
			// Perhaps for what the job itself has, of which this daemon does not know.
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
		h.log.Info("leases refused", "job", reqs[i].Key.String(), "nodes", len(reqs), "reason", err)
		h.audit(audit.Event{Event: audit.Refuse, Key: form.Name(reqs[i].Key.String()), Incarnation: reqs[i].Key.Incarnation, UID: audit.UID(reqs[i].UID), Reason: err.Error()})
		h.giveUp(all, err)
		return nil, err
	}
	h.point("sponsor-2-all")
	return all, nil
}

// at says for which node it was that err came.
func at(node string, err error) error {
	var e *lease.Error
	if !errors.As(err, &e) {
		return lease.Errorf(lease.Internal, "node %s: %v", node, err)
	}
	return lease.Errorf(e.Code, "node %s: %s", node, e.Reason)
}

// giveUp returns what was got for some of a job's nodes, by an earlier process too. The
// keys stay good: the job may ask again.
func (h *Host) giveUp(leases []lease.Lease, why error) {
	var wg sync.WaitGroup
	for _, l := range leases {
		h.mu.Lock()
		hd := h.leases[l.ID]
		h.mu.Unlock()
		if hd != nil { // the caller may be gone, but this has to be done
			wg.Go(func() { h.release(h.base, hd, "not all of the job's nodes could have one: "+why.Error(), false) })
		}
	}
	wg.Wait()
	h.point("sponsor-3-undone")
}

// lives says that some owner has a lease of this job of which this daemon does not know.
func (h *Host) lives(ctx context.Context, reqs []lease.Request) bool {
	reports, _ := h.Reports(ctx, reqs[0].Key.Cluster, reqs[0].Key.Job) // of those that answer
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.ContainsFunc(reports, func(r lease.Report) bool { return r.Ended.IsZero() && h.leases[r.Lease] == nil })
}

// settle looks at what the owners have for a job already: leases of this run are taken
// up again, those of earlier ones ended.
func (h *Host) settle(ctx context.Context, reqs []lease.Request) {
	byNode := make(map[name]*lease.Request, len(reqs))
	for i := range reqs {
		byNode[nameOf(reqs[i].Key)] = &reqs[i]
	}
	found, _ := h.search(ctx, "", false, func(l *lease.Lease) bool { return byNode[nameOf(l.Request.Key)] != nil })
	for _, l := range found {
		r := byNode[nameOf(l.Request.Key)]
		if r.SameRun(l.Request) {
			if whole(l) {
				_ = h.adopt(l) // or it is held already
			}
		} else if l.Request.Key.Incarnation < r.Key.Incarnation {
			h.endParts(ctx, []lease.Lease{l}, l.Request.Key, "the job has begun anew")
		}
	}
}

// entrust forgets a lease that its node has now, or that has ended.
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
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.gone, hd.rec.Lease.ID) // it may live on: whoever asks for it again is given it
}
