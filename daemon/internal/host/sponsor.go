package host

// Leases for other nodes. Slurm's controller hears of a job before its nodes do, and of
// all of them at once; so its daemon gets the leases, all or none:
//
//	Sponsor   at the controller: a lease for each node, as Acquire does
//	Attach    at the node: finds it at its owners, renews it, opens its socket
//
// The sponsor's record is as any other, but for its Host. It renews the lease until the
// owner says that the node does (by not knowing it any more), and then forgets it: a
// node that dies after that must fall silent.

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
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
			return nil, lease.Errorf(lease.Invalid, "job %s: want every node once, and no holder", cut(r.Key.String()))
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
		if codeOf(err) == lease.NoRoom && err != nil && !settled {
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
		h.audit(audit.Event{Event: audit.Refuse, Key: cut(reqs[i].Key.String()), Incarnation: reqs[i].Key.Incarnation, UID: audit.UID(reqs[i].UID), Reason: err.Error()})
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

// owners are those of all pools.
func (h *Host) owners() []*peer {
	h.mu.Lock()
	defer h.mu.Unlock()
	seen := make(map[string]bool)
	var peers []*peer
	for _, pool := range h.pools {
		for _, o := range pool.Owners {
			if p := h.peers[o.Name]; p != nil && !seen[o.Name] {
				seen[o.Name] = true
				peers = append(peers, p)
			}
		}
	}
	slices.SortFunc(peers, func(a, b *peer) int { return cmp.Compare(a.name, b.name) })
	return peers
}

// heard is what one owner answered.
type heard[T any] struct {
	peer *peer
	v    T
	err  error
}

// askAll asks owners all at once, those that were away too if all is set.
func askAll[T any](ctx context.Context, h *Host, peers []*peer, all bool, f func(context.Context, *peer) (T, error)) []heard[T] {
	out := make([]heard[T], len(peers))
	var wg sync.WaitGroup
	for i, p := range peers {
		out[i].peer = p
		if out[i].err = p.down(); out[i].err != nil && !all {
			continue
		}
		wg.Go(func() {
			out[i].v, out[i].err = within(ctx, h.cfg.Ask, func(ctx context.Context) (T, error) { return f(ctx, p) })
			if ctx.Err() == nil {
				p.note(h, out[i].err)
			}
		})
	}
	wg.Wait()
	return out
}

// Held is what this node holds for a job, whatever the key's incarnation.
func (h *Host) Held(key lease.Key) (l lease.Lease, socket string, ok bool) {
	key = h.full(key)
	h.mu.Lock()
	defer h.mu.Unlock()
	hd := h.keys[nameOf(key)]
	if hd == nil || hd.rec.Phase != granted || hd.rec.Lease.Host != h.cfg.Node {
		return lease.Lease{}, "", false
	}
	return hd.rec.Lease, h.Socket(hd.rec.Lease.ID), true
}

// full fills in what a key of this node need not say.
func (h *Host) full(k lease.Key) lease.Key {
	if k.Cluster == "" {
		k.Cluster = h.cfg.Cluster
	}
	if k.Node == "" {
		k.Node = h.cfg.Node
	}
	return k
}

// Attach takes the latest lease that was got for a job on this node, wherever it is, and
// opens its socket. Earlier ones of the job are ended, and so is one that is not whole.
// An error means that it is not known whether there is one (Down), that the job has
// ended here already (Over), or that this node's disk fails.
func (h *Host) Attach(ctx context.Context, key lease.Key) (l lease.Lease, found bool, err error) {
	key = h.full(key)
	if key.Node != h.cfg.Node || key.Job == "" || len(key.Job) > form.MaxName || len(key.Cluster) > form.MaxName {
		return l, false, lease.Errorf(lease.Invalid, "attach: job %s is not of this node, %s", cut(key.String()), h.cfg.Node)
	}
	fctx, done, err := h.fly(ctx, key)
	if err != nil {
		return l, false, err
	}
	defer done()
	l, found, err = h.attach(fctx, key)
	if cause := context.Cause(fctx); err != nil && cause != nil && ctx.Err() == nil {
		err = cause
	}
	return l, found, err
}

func (h *Host) attach(ctx context.Context, key lease.Key) (l lease.Lease, found bool, _ error) {
	n := nameOf(key)
	ours := func(l *lease.Lease) bool { return l.Host == h.cfg.Node && nameOf(l.Request.Key) == n }
	parts, silent := h.search(ctx, h.cfg.Node, false, ours)
	if len(silent) > 0 && !slices.ContainsFunc(parts, whole) {
		parts, silent = h.search(ctx, h.cfg.Node, true, ours) // what was away may be back
	}
	h.mu.Lock()
	hd := h.keys[n]
	t, over := h.tombs[n]
	h.mu.Unlock()
	if hd != nil {
		l = hd.rec.Lease
		if len(silent) == 0 && !slices.ContainsFunc(parts, func(p lease.Lease) bool { return p.ID == l.ID }) {
			h.release(ctx, hd, "its owners no longer have it", true)
			hd = nil
		}
	}
	if hd != nil && (len(parts) == 0 || parts[0].Request.Key.Incarnation <= l.Request.Key.Incarnation) {
		h.mu.Lock()
		hd.early = false
		h.mu.Unlock()
		return l, true, nil
	}
	if len(parts) == 0 {
		if len(silent) > 0 {
			return lease.Lease{}, false, lease.Errorf(lease.Down, "job %s: whether it has a lease is not known: %s; see sluice health", key, strings.Join(silent, "; "))
		}
		return lease.Lease{}, false, nil
	}
	best := parts[0]
	switch {
	case over && t.Key.Incarnation >= best.Request.Key.Incarnation:
		h.endParts(ctx, parts, lease.Key{}, "the job has ended on its node: "+t.Reason)
		return lease.Lease{}, false, lease.Errorf(lease.Over, "job %s has ended here: %s", key, t.Reason)
	case !whole(best) && len(silent) > 0:
		return lease.Lease{}, false, lease.Errorf(lease.Down, "job %s: lease %s is not all known: %s; see sluice health", key, best.ID, strings.Join(silent, "; "))
	case !whole(best):
		h.endParts(ctx, parts, lease.Key{}, "it is not whole")
		return lease.Lease{}, false, nil
	}
	h.point("attach-1-found")
	if hd != nil {
		h.release(ctx, hd, "the job has begun anew", true)
	}
	h.endParts(ctx, parts[1:], lease.Key{}, "the job has begun anew")
	if err := h.claim(ctx, best); err != nil {
		if codeOf(err) == lease.Over { // it has ended this moment
			h.endParts(ctx, parts[:1], lease.Key{}, "a part of it has ended")
			return lease.Lease{}, false, nil
		}
		return lease.Lease{}, false, err
	}
	h.point("attach-2-renewed")
	hd, err := h.take(best)
	if err != nil {
		return lease.Lease{}, false, err
	}
	h.point("attach-3-written")
	if err := h.openSocket(hd); err != nil {
		err = lease.Errorf(lease.Internal, "lease %s: %v", best.ID, err)
		h.release(ctx, hd, err.Error(), true)
		return lease.Lease{}, false, err
	}
	h.point("attach-4-socket")
	h.tell(audit.Attach, &best, "got by "+best.Sponsor)
	h.log.Info("lease attached", "lease", best.ID, "job", key.String(), "uid", best.Request.UID, "sponsor", best.Sponsor, "gpus", len(best.Grants))
	return best, true, nil
}

// search is what the owners have for host ("" for all) of the leases that are wanted,
// each put together, the latest first; and who did not answer.
func (h *Host) search(ctx context.Context, host string, all bool, wanted func(*lease.Lease) bool) (found []lease.Lease, silent []string) {
	byID := make(map[string]*lease.Lease)
	for _, a := range askAll(ctx, h, h.owners(), all, func(ctx context.Context, p *peer) ([]lease.Status, error) { return p.owner.List(ctx, host) }) {
		if a.err != nil {
			silent = append(silent, a.err.Error())
		}
		for i := range a.v {
			s := &a.v[i].Lease
			if s.State != lease.Granted || !wanted(s) {
				continue
			}
			if l := byID[s.ID]; l != nil {
				l.Grants = append(l.Grants, s.Grants...)
			} else {
				byID[s.ID] = s
			}
		}
	}
	for _, l := range byID {
		slices.SortFunc(l.Grants, func(a, b lease.Grant) int { return a.Order - b.Order })
		found = append(found, *l)
	}
	slices.SortFunc(found, func(a, b lease.Lease) int {
		return cmp.Or(cmp.Compare(b.Request.Key.Incarnation, a.Request.Key.Incarnation), b.Made.Compare(a.Made), cmp.Compare(a.ID, b.ID))
	})
	return found, silent
}

func whole(l lease.Lease) bool { return len(l.Grants) == len(l.Request.Fractions) }

// claim tells the owners of a lease that this node has it now. Over says that one of
// them has ended it.
func (h *Host) claim(ctx context.Context, l lease.Lease) error {
	var peers []*peer
	for _, o := range ownersOf(l.Grants) {
		p, err := h.peer(o, "")
		if err != nil {
			return err
		}
		peers = append(peers, p)
	}
	for _, a := range askAll(ctx, h, peers, true, func(ctx context.Context, p *peer) ([]string, error) {
		return p.owner.Renew(ctx, h.cfg.Node, []string{l.ID})
	}) {
		if a.err != nil {
			return a.err
		}
		if !slices.Contains(a.v, l.ID) {
			return lease.Errorf(lease.Over, "owner %s has ended lease %s", a.peer.name, l.ID)
		}
	}
	return nil
}

// endParts ends leases that this host does not hold; with a key, that is over too. What
// cannot be told now is ended by its sponsor, or by its silence.
func (h *Host) endParts(ctx context.Context, leases []lease.Lease, key lease.Key, reason string) {
	for _, l := range leases {
		for _, o := range ownersOf(l.Grants) {
			p, err := h.peer(o, "")
			if err == nil {
				_, err = within(ctx, releaseTime, func(ctx context.Context) (struct{}, error) {
					return struct{}{}, p.owner.Release(ctx, h.cfg.Node, l.ID, key, reason)
				})
				p.stale()
			}
			if err != nil {
				h.log.Warn("lease could not be ended", "lease", l.ID, "owner", o, "error", err)
			}
		}
	}
}
