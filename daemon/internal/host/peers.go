package host

// Owners as this host sees them. They are asked all at once with a deadline. An owner that does
// not answer is left out for a while, and tried again in the background.

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// fresh is how old an inventory may be for a first placement. It is only advice: the owner
// checks.
const fresh = 200 * time.Millisecond

// peer is an owner.
type peer struct {
	name, addr string
	owner      lease.Owner
	local      bool

	mu    sync.Mutex
	fails int
	until time.Time // when it may be asked again, unless no other owner is left
	why   error
	inv   lease.Inventory
	at    time.Time
	// ahead is how far the owner's clock is ahead of this node's, as of clockAt; see heardClock.
	ahead   time.Duration
	clockAt time.Time
	known   bool // meet has been through its leases since it was last away
	was     bool // it has been away
	freed   bool // this daemon has ended something there since it was last heard
}

// peer returns an owner, and registers it if it is new. A new address replaces the old one; ""
// is the one that is known.
func (h *Host) peer(name, addr string) (*peer, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.peers[name]; p == nil && addr == "" {
		addr = h.addrs[name]
	} else if p != nil {
		if addr == "" || p.addr == addr || p.local {
			return p, nil
		}
		defer p.close()
	}
	p := &peer{name: name, addr: addr}
	switch {
	case h.closed:
		return nil, lease.Errorf(lease.Down, "the daemon is stopping")
	case name == h.cfg.Node && h.cfg.Local != nil:
		p.owner, p.local = h.cfg.Local, true
	case h.cfg.DialOwner == nil:
		return nil, fmt.Errorf("owner %s: this daemon cannot call other nodes", name)
	default:
		o, err := h.cfg.DialOwner(name, addr)
		if err != nil {
			return nil, fmt.Errorf("owner %s: %w", name, err)
		}
		p.owner = o
	}
	h.peers[name] = p
	return p, nil
}

func (p *peer) close() {
	if c, ok := p.owner.(io.Closer); ok && !p.local {
		_ = c.Close()
	}
}

// note records the outcome of a call: only silence counts against an owner.
func (p *peer) note(h *Host, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil || lease.CodeOf(err) != lease.Down {
		if p.fails > 0 {
			h.log.Info("owner answers again", "owner", p.name)
		}
		p.fails, p.until, p.why = 0, time.Time{}, nil
		return
	}
	if p.fails == 0 {
		h.log.Warn("owner does not answer; it is left out for a while", "owner", p.name, "error", err)
	}
	p.known, p.was, p.why = false, true, err
	now := time.Now()
	if now.Before(p.until) {
		return // several calls met the same silence
	}
	p.fails++
	// Most owners that do not answer are being restarted: the first pauses are short.
	p.until = now.Add(min(h.cfg.BackOff>>5<<min(p.fails-1, 9), 12*h.cfg.BackOff))
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// down returns why the owner is not to be asked, nil if it is.
func (p *peer) down() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.why
}

// due says whether an owner that was away should be tried again.
func (p *peer) due(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.why != nil && !now.Before(p.until)
}

// nextLook is how long Run may wait: until an owner that is away is due, and at most look.
func (h *Host) nextLook() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	wait := min(look, h.cfg.Renew)
	now := time.Now()
	for _, p := range h.peers {
		p.mu.Lock()
		if p.why != nil {
			wait = min(wait, max(p.until.Sub(now), soonest))
		}
		p.mu.Unlock()
	}
	return wait
}

// inventory asks the owner, or returns its last answer if that is no older than age.
func (p *peer) inventory(ctx context.Context, h *Host, age time.Duration) (lease.Inventory, error) {
	p.mu.Lock()
	if age > 0 && !p.at.IsZero() && time.Since(p.at) <= age {
		defer p.mu.Unlock()
		return p.inv, nil
	}
	p.mu.Unlock()
	asked := time.Now()
	inv, err := question(ctx, h, p, func(ctx context.Context, o lease.Owner) (lease.Inventory, error) { return o.Inventory(ctx) })
	if err != nil {
		return inv, err
	}
	for i := range inv.GPUs {
		inv.GPUs[i].Owner = p.name // whatever name the answer has
	}
	inv.GPUs = p.same(inv.GPUs)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inv, p.at = inv, asked
	p.heardClock(asked, time.Now(), inv.Time)
	return inv, nil
}

// stale makes the next call of inventory ask the owner: something that was free has been taken.
func (p *peer) stale() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at = time.Time{}
}

// call calls an owner. Every call goes through it but watches, health checks and those about lost clients: it has a deadline,
// is noted as an answer or as silence, and, if it changes what the owner has free, makes the last inventory stale. The end of
// ctx, which is the caller's own, says nothing about the owner.
func call[T any](ctx context.Context, h *Host, p *peer, d time.Duration, changes bool, f func(context.Context, lease.Owner) (T, error)) (T, error) {
	v, err := within(ctx, d, func(ctx context.Context) (T, error) { return f(ctx, p.owner) })
	if changes {
		p.stale()
	}
	if ctx.Err() == nil {
		p.note(h, err)
	}
	return v, err
}

// question is a call that changes nothing.
func question[T any](ctx context.Context, h *Host, p *peer, f func(context.Context, lease.Owner) (T, error)) (T, error) {
	return call(ctx, h, p, h.cfg.Ask, false, f)
}

// order is a call that changes what the owner has free, and that returns nothing but an error.
func (h *Host) order(ctx context.Context, p *peer, d time.Duration, f func(context.Context, lease.Owner) error) error {
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.freed = true
	}()
	_, err := call(ctx, h, p, d, true, func(ctx context.Context, o lease.Owner) (struct{}, error) { return struct{}{}, f(ctx, o) })
	return err
}

// within calls f with a deadline, and does not wait for an f that ignores it. If caller ends first,
// the error says so and not that d was over.
func within[T any](caller context.Context, d time.Duration, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(caller, d)
	defer cancel()
	type answer struct {
		v   T
		err error
	}
	ch := make(chan answer, 1)
	go func() {
		v, err := f(ctx)
		ch <- answer{v, err}
	}()
	select {
	case a := <-ch:
		return a.v, a.err
	case <-ctx.Done():
		var zero T
		if caller.Err() != nil {
			return zero, lease.Errorf(lease.Down, "no answer: %v", context.Cause(caller))
		}
		return zero, lease.Errorf(lease.Down, "no answer within %v", d)
	}
}

// view is an owner's answer, or why there is none.
type view struct {
	peer *peer
	inv  lease.Inventory
	err  error
}

// survey asks the owners at the same time. It leaves out those that were away last time, unless
// all were.
func (h *Host) survey(ctx context.Context, owners []Peer, age time.Duration, all bool) []view {
	views := make([]view, len(owners))
	up := 0
	for i, o := range owners {
		p, err := h.peer(o.Name, o.Addr)
		if err == nil {
			views[i].peer = p
			err = p.down()
		}
		if views[i].err = err; err == nil {
			up++
		}
	}
	asked := make([]*view, 0, len(views))
	for i := range views {
		if v := &views[i]; v.peer != nil && (v.err == nil || all || up == 0) {
			asked = append(asked, v)
		}
	}
	groups(len(asked), func(n int) {
		v := asked[n]
		v.inv, v.err = v.peer.inventory(ctx, h, age)
	})
	return views
}
