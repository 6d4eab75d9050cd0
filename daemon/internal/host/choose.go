package host

// Choosing GPUs for a request: by what the owners say when they are asked, or, in a large pool,
// by what a controller's daemon knows of them already.

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/placement"
)

// chooser chooses GPUs for one request, again if the first choice was taken meanwhile.
type chooser struct {
	h    *Host
	r    lease.Request
	name string
	pool Pool

	age    time.Duration // how old an answer may be
	all    bool          // ask all owners
	known  bool          // the last choice was by what is known
	some   bool          // a few owners have not been heard of
	again  bool          // it is the second look at what is known
	silent []string      // why owners were not asked
	last   error         // why the last choice could not be had
}

// choice is GPUs for each fraction, and how they were found.
type choice struct {
	grants []lease.Grant
	claims []ownerClaim // where the overview was used
}

func (h *Host) newChooser(r lease.Request, pool Pool) *chooser {
	return &chooser{h: h, r: r, name: r.Pool, pool: pool, age: fresh, all: len(pool.Owners) <= h.cfg.few}
}

// choose makes a choice. An error is final.
func (c *chooser) choose(ctx context.Context) (choice, error) {
	for {
		got, err := c.once(ctx)
		if ctx.Err() != nil {
			c.h.view.settle(got.claims, "", false)
			return choice{}, lease.Errorf(lease.Down, "job %s: the request was given up", c.r.Key)
		}
		if err == nil {
			return got, nil
		}
		if !c.more(ctx, err) {
			return choice{}, withSilent(err, c.silent, c.last)
		}
	}
}

// once makes a choice by what is known, or asks.
func (c *chooser) once(ctx context.Context) (choice, error) {
	h := c.h
	if len(c.pool.Owners) > h.cfg.few {
		grants, claims, ready, some, err := h.view.place(c.name, c.pool.Owners, c.r, c.pool.Place)
		if c.known = ready && !(c.again && some && err != nil); c.known {
			c.all, c.some = true, some
			return choice{grants, claims}, err
		}
	}
	owners := c.pool.Owners
	if !c.all {
		owners = h.sample(owners)
	}
	views := h.survey(ctx, owners, c.age, false)
	var gpus []lease.GPU
	c.silent = nil
	for _, v := range views {
		if v.err != nil {
			c.silent = append(c.silent, v.err.Error())
			continue
		}
		gpus = append(gpus, v.inv.GPUs...)
	}
	if len(c.silent) == len(views) {
		return choice{}, lease.Errorf(lease.Down, "pool %s: no owner answers: %s; see sluice health", c.name, strings.Join(c.silent, "; "))
	}
	grants, err := placement.Place(gpus, c.r, c.pool.Place)
	return choice{grants: grants}, err
}

// more says whether another look may find what this one did not, and prepares it. A request is never
// refused on old answers, nor on those of only some owners.
func (c *chooser) more(ctx context.Context, err error) bool {
	switch {
	case c.known && c.again, !c.known && c.all && c.age == 0:
		return false
	case lease.CodeOf(err) == lease.Down && c.all:
		return false
	}
	if lease.CodeOf(err) == lease.NoRoom {
		c.h.catchUp(ctx) // releases of this host that are not delivered yet
	}
	if c.known {
		c.again = true
		if c.some { // they have to be asked
			c.age = 0
			return true
		}
		return c.h.refresh(ctx)
	}
	c.all, c.age = true, 0
	return true
}

// refresh asks the owners at which this daemon has ended something since they said what they
// have free. It returns false if there is none.
func (h *Host) refresh(ctx context.Context) bool {
	var wg sync.WaitGroup
	asked := 0
	h.mu.Lock()
	peers := slices.Collect(maps.Values(h.peers))
	h.mu.Unlock()
	for _, p := range peers {
		if asked == refreshed || !p.takeFreed() {
			continue
		}
		asked++
		wg.Go(func() {
			h.askAgain(ctx, p)
		})
	}
	wg.Wait()
	return asked > 0
}

// taken notes that the owners did not grant a choice, whose GPUs somebody else has got.
func (c *chooser) taken(ctx context.Context, got choice, err error) {
	c.last, c.age = err, 0
	if got.claims == nil {
		return
	}
	for _, p := range c.h.named(lease.Owners(got.grants)) {
		if p.down() != nil {
			c.h.view.lost(p.name)
		} else {
			c.h.askAgain(ctx, p)
		}
	}
}

// askAgain has the overview know what an owner has free now.
func (h *Host) askAgain(ctx context.Context, p *peer) {
	asked := time.Now()
	if inv, err := p.inventory(ctx, h, 0); err == nil {
		h.view.correct(p.name, inv.GPUs, asked)
	}
}
