package host

// What users see: leases, pools and health. What became of a job is in explain.go.

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// List implements rpc.LocalService: the leases of this node's jobs, with what their owners
// say of them, and for root the leases that other nodes have on this node's GPUs. Any other
// user sees the user's own.
func (h *Host) List(ctx context.Context, p rpc.Peer) ([]lease.Status, error) {
	all, owners := h.listOwn(p)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, pe := range owners {
		wg.Go(func() {
			list, err := h.listOf(ctx, pe, h.cfg.Node)
			if err != nil {
				return // the lease is shown without its sessions
			}
			mu.Lock()
			defer mu.Unlock()
			for _, s := range list {
				if st := all[s.ID]; st != nil {
					addPart(st, s)
				}
			}
		})
	}
	wg.Wait()
	if h.cfg.Local != nil && p.UID == 0 {
		list, err := h.cfg.Local.List(ctx, "")
		if err != nil {
			return nil, err
		}
		for _, s := range list {
			if all[s.ID] == nil {
				all[s.ID] = &s
			}
		}
	}
	out := make([]lease.Status, 0, len(all))
	for _, s := range all {
		out = append(out, *s)
	}
	slices.SortFunc(out, func(a, b lease.Status) int { return cmp.Or(a.Made.Compare(b.Made), cmp.Compare(a.ID, b.ID)) })
	return out, nil
}

// listOwn returns this node's leases that the caller may see, by id, as this daemon knows
// them, and their owners that are not known to be down.
func (h *Host) listOwn(p rpc.Peer) (map[string]*lease.Status, []*peer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := make(map[string]*lease.Status)
	names := make(map[string]bool)
	for id, hd := range h.leases {
		l := hd.rec.Lease
		if l.Host != h.cfg.Node || !p.May(l.Request.UID) {
			continue
		}
		switch hd.rec.Phase {
		case releasing:
			l.State = lease.Ended // though some owner may not have been sent the release yet
		case acquiring:
			l.State = lease.Reserved
		}
		all[id] = &lease.Status{Lease: l}
		for _, g := range l.Grants {
			names[g.Owner] = true
		}
	}
	var owners []*peer
	for n := range names {
		if pe := h.peers[n]; pe != nil && pe.down() == nil {
			owners = append(owners, pe)
		}
	}
	return all, owners
}

// addPart adds to a lease what one of its owners says of its part.
func addPart(st *lease.Status, part lease.Status) {
	// place gives the position in st of the part's grant i.
	place := func(i int) (at int, ok bool) {
		if i >= len(part.Grants) {
			return 0, false
		}
		at = part.Grants[i].Order
		return at, at >= 0 && at < len(st.Grants)
	}
	if len(st.Use) == 0 {
		st.Use = make([]lease.Use, len(st.Grants))
	}
	for i, u := range part.Use {
		if at, ok := place(i); ok {
			st.Use[at] = u
		}
	}
	// The owner decides which share the lease has: root there may have changed it.
	st.Grants = slices.Clone(st.Grants)
	overlay(st.Grants, part.Grants)
	st.Request.Policy, st.Request.Lend = part.Request.Policy, part.Request.Lend
	if len(st.Shares) == 0 && len(part.Shares) > 0 {
		st.Shares = make([]lease.Share, len(st.Grants))
	}
	for i, x := range part.Shares {
		if at, ok := place(i); ok {
			st.Shares[at] = x
		}
	}
	if st.Renewed.IsZero() || part.Idle < st.Idle { // it works if it works at one of its owners
		st.Idle = part.Idle
	}
	st.IdleNoted = st.IdleNoted || part.IdleNoted
	st.Sessions = append(st.Sessions, part.Sessions...)
	if part.Renewed.After(st.Renewed) {
		st.Renewed = part.Renewed
	}
}

// Pool implements rpc.LocalService.
func (h *Host) Pool(ctx context.Context, _ rpc.Peer, name string) ([]rpc.Pool, error) {
	h.mu.Lock()
	pools := maps.Clone(h.pools)
	h.mu.Unlock()
	if name != "" {
		p, ok := pools[name]
		if !ok {
			return nil, lease.Errorf(lease.NotFound, "pool %q is not in sluice.yaml", form.Name(name))
		}
		pools = map[string]Pool{name: p}
	}
	var out []rpc.Pool
	for _, n := range slices.Sorted(maps.Keys(pools)) {
		pool := rpc.Pool{Name: n, Place: pools[n].Place}
		if pool.Place == "" {
			pool.Place = lease.BestFit
		}
		for i, v := range h.survey(ctx, pools[n].Owners, fresh, false) {
			o := rpc.PoolOwner{Name: pools[n].Owners[i].Name, Inventory: v.inv}
			if v.err != nil {
				o.Inventory, o.Error = lease.Inventory{}, v.err.Error()
			}
			pool.Owners = append(pool.Owners, o)
		}
		out = append(out, pool)
	}
	return out, nil
}

// sizeAge is how old an answer may be for what leases do not change of an owner's GPUs.
const sizeAge = time.Minute

// GPUs returns a pool's GPUs by owner, for what leases do not change of them: those of the owners that answer. A controller's daemon knows
// them in a large pool. Other daemons ask, and may tell what they heard a minute ago, unless now says not to.
func (h *Host) GPUs(ctx context.Context, name string, now bool) ([][]lease.GPU, error) {
	h.mu.Lock()
	pool, ok := h.pools[name]
	h.mu.Unlock()
	if !ok {
		return nil, lease.Errorf(lease.NotFound, "pool %q is not in sluice.yaml", form.Name(name))
	}
	owners, age := pool.Owners, fresh
	var all [][]lease.GPU
	if len(owners) > h.cfg.few {
		if all, owners = h.view.gpus(owners); !now {
			age = sizeAge
		}
	}
	if len(all) > 0 { // else those that were away are asked too
		owners = slices.DeleteFunc(owners, func(o Peer) bool {
			p, err := h.peer(o.Name, o.Addr)
			return err != nil || p.down() != nil
		})
	}
	for _, v := range h.survey(ctx, owners, age, false) {
		if v.err == nil {
			all = append(all, v.inv.GPUs)
		}
	}
	return all, nil
}

// Health implements rpc.LocalService.
func (h *Host) Health(ctx context.Context, _ rpc.Peer) ([]rpc.Check, error) {
	checks := h.NodeHealth(ctx)
	h.mu.Lock()
	peers, pools := slices.Collect(maps.Values(h.peers)), len(h.pools)
	h.mu.Unlock()
	checks = append(checks, h.ownerChecks(ctx, peers)...)
	if pools == 0 {
		checks = append(checks, rpc.Check{Name: "pools", Level: rpc.Warn, Text: "no pool is configured", Remedy: "name the owners under pools in sluice.yaml"})
	}
	rpc.SortChecks(checks)
	return checks, nil
}

// Stats implements rpc.LocalService. A user sees all GPUs, and his own leases.
func (h *Host) Stats(ctx context.Context, p rpc.Peer) (rpc.Stats, error) {
	s := rpc.Stats{Node: h.cfg.Node, Version: h.cfg.Version, Time: time.Now()}
	var err error
	if s.Leases, err = h.List(ctx, p); err != nil {
		return s, err
	}
	if h.cfg.Stats != nil {
		s.GPUs = h.cfg.Stats(ctx)
	}
	return s, nil
}

func plural(n int, what string) string {
	s := strconv.Itoa(n) + " " + what
	if n != 1 {
		s += "s"
	}
	return s
}
