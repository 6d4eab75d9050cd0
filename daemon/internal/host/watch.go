package host

// Large pools. With few owners a question about a job, or about what is free, goes to all of
// them. With many that would be thousands of messages for each job, so
//
//	a controller's daemon   watches all owners, and asks those that have leases of the job
//	                        (overview.go); it tells one of the job's two registrars, which are
//	                        owners too, where the leases are, and both that the job has ended
//	a node's daemon         asks a registrar where its job's lease is; for a lease of its
//	                        own it asks a few owners, and the others if those have no room
//
// A daemon that learns nothing in this way asks all owners, as in a small pool.

import (
	"context"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// few is the most owners that are simply all asked.
	few = 8
	// sampled is how many owners are asked first for a lease of this node's own.
	sampled = 6
	// refreshed is how many owners at most are asked again before a request is refused.
	refreshed = 16
	// watchWait is how long an owner may put off an answer that says nothing new, and watchGap
	// the least time between two answers, in which changes gather.
	watchWait = 20 * time.Second
	watchGap  = 500 * time.Millisecond
	// promiseWait is the same where an owner makes promises, which would run out before an answer after watchWait: see lease.Promiser.
	promiseWait = 2500 * time.Millisecond
	// unwatchable is the pause after an owner has refused to be watched.
	unwatchable = time.Minute
)

// SetController says whether this daemon is a controller's, which watches the owners of large pools.
func (h *Host) SetController(is bool) { h.controller.Store(is) }

// watching is the watches of a Run, by the owner's name.
type watching map[string]*watch

// watch is the watch of one owner.
type watch struct {
	peer *peer
	stop context.CancelFunc
}

// keep begins and ends watches, so that each owner of a large pool has one.
func (w watching) keep(ctx context.Context, h *Host, begin func(func())) {
	var owners []*peer
	if h.controller.Load() && h.large() {
		owners = h.owners()
	}
	wanted := make(map[*peer]bool, len(owners))
	for _, p := range owners {
		wanted[p] = true
	}
	for name, o := range w {
		if !wanted[o.peer] {
			o.stop()
			delete(w, name)
			h.view.watch(name, false)
		}
	}
	for _, p := range owners {
		if w[p.name] == nil {
			ctx, stop := context.WithCancel(ctx)
			w[p.name] = &watch{p, stop}
			h.view.watch(p.name, true)
			begin(func() { h.watchOwner(ctx, p) })
		}
	}
}

// watchOwner has the overview know what an owner has, until ctx ends.
func (h *Host) watchOwner(ctx context.Context, p *peer) {
	said := false
	w := &promised{holds: h.holds.begin(p.name)}
	defer h.holds.end(w.holds)
	for ctx.Err() == nil {
		if p.down() != nil { // a round of Run tries it again
			h.view.lost(p.name)
			pause(ctx, watchGap)
			continue
		}
		c, rested, err := h.askPromise(ctx, p, w)
		var late []lease.Ref
		if err == nil {
			for i := range c.Inventory.GPUs {
				c.Inventory.GPUs[i].Owner = p.name
			}
			c.Inventory.GPUs = p.same(c.Inventory.GPUs)
			late, err = h.view.learn(p.name, c)
		}
		switch code := lease.CodeOf(err); {
		case ctx.Err() != nil:
			return
		case err == nil:
			said = false
			p.heard(c.Inventory)
			for _, r := range late {
				h.endLate(ctx, p, r)
			}
			if !rested {
				pause(ctx, watchGap)
			}
		case code == lease.Down:
			pause(ctx, watchGap)
		default:
			if !said {
				said = true
				h.log.Warn("owner cannot be watched; it is asked for each job", "owner", p.name, "error", err)
			}
			h.view.unwatched(p.name)
			w.since = lease.Mark{}
			pause(ctx, unwatchable)
		}
	}
}

// ask waits for an owner's next answer.
func (h *Host) ask(ctx context.Context, p *peer) (lease.Changes, error) {
	w, ok := p.owner.(lease.Watchable)
	if !ok {
		return lease.Changes{}, lease.Errorf(lease.WrongPeer, "owner %s cannot be watched", p.name)
	}
	since, up := h.view.mark(p.name)
	wait := watchWait
	if !up {
		wait = 0 // that it answers is news
	}
	return poll(ctx, h, p, watchWait, func(ctx context.Context) (lease.Changes, error) { return w.Watch(ctx, h.cfg.Node, since, wait) })
}

// same returns the list that is kept already if it says the same: the overview and this peer then keep one.
func (p *peer) same(gpus []lease.GPU) []lease.GPU {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Equal(gpus, p.inv.GPUs) {
		return p.inv.GPUs
	}
	return gpus
}

// heard keeps an inventory that the owner has given without being asked for it.
func (p *peer) heard(inv lease.Inventory) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.inv, p.at, p.freed = inv, now, false
	p.heardClock(now, now, inv.Time) // it was on its way for milliseconds, and seconds count
}

// takeFreed says whether something was ended at the owner since it was last heard, and clears that.
func (p *peer) takeFreed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.freed && p.why == nil
	p.freed = false
	return was
}

// endLate ends a lease that was granted after its job's end.
func (h *Host) endLate(ctx context.Context, p *peer, r lease.Ref) {
	h.log.Warn("lease of a job that has ended is ended", "lease", r.ID, "job", r.Key.String(), "owner", p.name)
	err := h.order(ctx, p, releaseTime, func(ctx context.Context, o lease.Owner) error {
		return o.Release(ctx, h.cfg.Node, r.ID, r.Key, "the job has ended")
	})
	if err != nil {
		h.log.Error("lease of a job that has ended stays until nobody renews it", "lease", r.ID, "owner", p.name, "error", err)
	}
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// ownersOf returns the owners to ask about a job: those that are known to have leases of it or
// to have had some, and all if that is not known.
func (h *Host) ownersOf(cluster, job string) (peers []*peer, known bool) {
	if !h.large() {
		return h.owners(), false
	}
	var names []string
	if h.controller.Load() {
		missing := h.view.unknown(h.inPools())
		if known = len(missing) <= h.most(); known {
			names, _ = h.view.whose(cluster, job)
			names = append(names, missing...)
		}
	} else {
		h.mu.Lock()
		n := name{cluster, job, h.cfg.Node}
		if hd := h.keys[n]; hd != nil {
			names = lease.Owners(hd.rec.Lease.Grants)
		} else {
			names = h.tombs[n].Owners
		}
		h.mu.Unlock()
		known = len(names) > 0
	}
	if !known {
		return h.owners(), false
	}
	return h.named(names), true
}

// most is how many owners may be unknown: as few as are simply asked.
func (h *Host) most() int { return max(0, min(few, len(h.inPools())-1)) }

// withRegistrars adds a job's registrars to the owners to ask or tell about it. An owner remembers
// which runs of a job have ended when it is told so, whether it had a lease of it or not; of an
// owner that never had one nobody else would know.
func (h *Host) withRegistrars(peers []*peer, cluster, job string, most int) []*peer {
	for _, p := range h.registrars(cluster, job) {
		if most == 1 && p.down() != nil {
			continue
		}
		if !slices.Contains(peers, p) {
			peers = append(peers, p)
		}
		if most--; most == 0 {
			break
		}
	}
	return peers
}

// named returns peers by name. One that no pool has any more is left out.
func (h *Host) named(names []string) (peers []*peer) {
	for _, n := range names {
		if p, err := h.peer(n, ""); err == nil {
			peers = append(peers, p)
		}
	}
	return peers
}

// registrars are the two owners that may know where a job's leases are, the first one first.
// Every daemon finds the same ones, as far as its pools are the same.
func (h *Host) registrars(cluster, job string) []*peer {
	var best [2]string
	var most [2]uint64
	text := []byte(cluster + "\x00" + job + "\x00")
	for _, o := range h.inPools() {
		f := fnv.New64a()
		text = append(text[:len(cluster)+len(job)+2], o.Name...)
		_, _ = f.Write(text)
		switch n := mix(f.Sum64()); {
		case n > most[0]:
			best, most = [2]string{o.Name, best[0]}, [2]uint64{n, most[0]}
		case n > most[1]:
			best[1], most[1] = o.Name, n
		}
	}
	return h.named(slices.DeleteFunc(best[:], func(n string) bool { return n == "" }))
}

// mix spreads the bits of a sum: those of FNV's last bytes hardly reach its high ones. The constants are
// those of splitmix64.
func mix(n uint64) uint64 {
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// register tells a registrar where a job's leases are. If it cannot be told, the job's nodes ask all
// owners; nothing else is lost.
func (h *Host) register(ctx context.Context, leases []lease.Lease) {
	if !h.large() || len(leases) == 0 {
		return
	}
	key := leases[0].Request.Key
	at := make([]lease.Whereabouts, len(leases))
	for i := range leases {
		at[i] = lease.Whereabouts{Node: leases[i].Host, Owners: lease.Owners(leases[i].Grants)}
	}
	for _, p := range h.registrars(key.Cluster, key.Job) {
		if p.down() != nil {
			continue
		}
		if len(at) == 1 && slices.Equal(at[0].Owners, []string{p.name}) {
			return // it knows its own
		}
		_, err := question(ctx, h, p, func(ctx context.Context, o lease.Owner) (struct{}, error) {
			if w, ok := o.(lease.Watchable); ok {
				return struct{}{}, w.Register(ctx, h.cfg.Node, key.Cluster, key.Job, at)
			}
			return struct{}{}, nil
		})
		if err == nil {
			return
		}
		h.log.Info("an owner does not keep where a job's leases are", "owner", p.name, "job", key.String(), "error", err)
	}
}

// where returns the owners that have a lease of a job for this node, nil if nothing is known.
func (h *Host) where(ctx context.Context, key lease.Key) []*peer {
	if !h.large() {
		return nil
	}
	for _, p := range h.registrars(key.Cluster, key.Job) {
		if p.down() != nil {
			continue
		}
		names, err := question(ctx, h, p, func(ctx context.Context, o lease.Owner) ([]string, error) {
			if w, ok := o.(lease.Watchable); ok {
				return w.Where(ctx, h.cfg.Node, key.Cluster, key.Job)
			}
			return nil, nil
		})
		if slices.Sort(names); err == nil && len(names) > 0 {
			return h.named(slices.Compact(names[:min(len(names), form.MaxDevices+1)]))
		}
	}
	return nil
}

// sample returns some of the owners, by chance, of those that answer.
func (h *Host) sample(owners []Peer) []Peer {
	var some []Peer
	for _, i := range rand.Perm(len(owners)) {
		if p, err := h.peer(owners[i].Name, owners[i].Addr); err == nil && p.down() == nil {
			if some = append(some, owners[i]); len(some) == sampled {
				break
			}
		}
	}
	return some
}
