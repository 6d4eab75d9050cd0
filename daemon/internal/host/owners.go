package host

// Calls to several owners at once.

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// inPools returns the owners of all pools, by name, in a list that nobody changes.
func (h *Host) inPools() []Peer {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.pooled
}

// large says whether there are too many owners to ask all of them for each job.
func (h *Host) large() bool { return len(h.inPools()) > h.cfg.few }

// known returns an owner that is in a pool or was asked something before, nil for another.
func (h *Host) known(name string) *peer {
	h.mu.Lock()
	p, in := h.peers[name], h.addrs[name] != ""
	h.mu.Unlock()
	if p == nil && in {
		p, _ = h.peer(name, "")
	}
	return p
}

// owners returns the owners of all pools, to ask them.
func (h *Host) owners() []*peer {
	names := h.inPools()
	peers := make([]*peer, 0, len(names))
	for _, o := range names {
		if p, err := h.peer(o.Name, o.Addr); err == nil {
			peers = append(peers, p)
		}
	}
	return peers
}

// heard is one owner's answer.
type heard[T any] struct {
	peer *peer
	v    T
	err  error
}

// Thousands of calls that begin together take memory for all of them, and more time than each of them has. So they begin in
// groups of groupSize, each when the one before has ended, or groupTime later at most: few that hang hold up nobody for long.
const (
	groupSize = 16
	groupTime = 125 * time.Millisecond
)

// groups calls f for 0 to n-1 on goroutines of their own, and waits for all.
func groups(n int, f func(int)) {
	var all sync.WaitGroup
	for first := 0; first < n; first += groupSize {
		last := min(first+groupSize, n)
		var left atomic.Int32
		left.Store(int32(last - first))
		ended := make(chan struct{})
		for i := first; i < last; i++ {
			all.Go(func() {
				f(i)
				if left.Add(-1) == 0 {
					close(ended)
				}
			})
		}
		if last == n {
			break
		}
		t := time.NewTimer(groupTime)
		select {
		case <-ended:
		case <-t.C:
		}
		t.Stop()
	}
	all.Wait()
}

// askAll asks owners at the same time. With all it also asks those that were away.
func askAll[T any](ctx context.Context, h *Host, peers []*peer, all bool, f func(context.Context, lease.Owner) (T, error)) []heard[T] {
	out := make([]heard[T], len(peers))
	asked := make([]int, 0, len(peers))
	for i, p := range peers {
		out[i].peer = p
		if out[i].err = p.down(); out[i].err == nil || all {
			asked = append(asked, i)
		}
	}
	groups(len(asked), func(n int) {
		a := &out[asked[n]]
		a.v, a.err = question(ctx, h, a.peer, f)
	})
	return out
}

// search asks owners for the leases that are wanted, of host or, with "", of every host. It puts
// each together from its parts. The latest comes first. silent are the owners that did not answer.
func (h *Host) search(ctx context.Context, owners []*peer, host string, all bool, wanted func(*lease.Lease) bool) (found []lease.Lease, silent []string) {
	byID := make(map[string]*lease.Lease)
	for _, a := range askAll(ctx, h, owners, all, func(ctx context.Context, o lease.Owner) ([]lease.Status, error) { return o.List(ctx, host) }) {
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

// endParts ends leases that this host does not hold. With a key, the key ends too. An owner
// that cannot be reached ends its part when the sponsor tells it, unless it is claimed, or when
// nobody renews it.
func (h *Host) endParts(ctx context.Context, leases []lease.Lease, key lease.Key, reason string) {
	silent := make(map[string]error)
	for _, l := range leases {
		for _, name := range lease.Owners(l.Grants) {
			p, err := h.peer(name, "")
			if err == nil && silent[name] != nil {
				err = silent[name] // one timeout for each owner is enough
			} else if err == nil {
				err = h.order(ctx, p, releaseTime, func(ctx context.Context, o lease.Owner) error {
					return o.Release(ctx, h.cfg.Node, l.ID, key, reason)
				})
			}
			if err != nil {
				if lease.CodeOf(err) == lease.Down {
					silent[name] = err
				}
				h.log.Warn("lease could not be ended", "lease", l.ID, "owner", name, "error", err)
			}
		}
	}
}
