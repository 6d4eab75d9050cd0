package host

// Choosing GPUs for a request: by what the owners say when they are asked, or, in a large pool,
// by what a controller's daemon knows of them already.

import (
	"context"
	"strings"
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
	waited bool          // news of the owners were waited for
	silent []string      // why owners were not asked
	last   error         // why the last choice could not be had
}

// choice is GPUs for each fraction, and how they were found.
type choice struct {
	grants []lease.Grant
	claims []ownerClaim // where the overview was used
}

func (h *Host) newChooser(r lease.Request, pool Pool) *chooser {
	return &chooser{h: h, r: r, name: r.Pool, pool: pool, age: fresh, all: len(pool.Owners) <= few}
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
	if len(c.pool.Owners) > few {
		if grants, claims, ready, err := h.view.place(c.name, c.pool.Owners, c.r, c.pool.Place); ready {
			c.all = true
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

// more says whether another look may find what this one did not, and prepares it. Nothing is
// refused by what was heard a while ago, nor by what only some of the owners said.
func (c *chooser) more(ctx context.Context, err error) bool {
	known := c.h.view.knows(c.name)
	switch {
	case known && c.waited, !known && c.all && c.age == 0:
		return false
	case lease.CodeOf(err) == lease.Down && c.all:
		return false
	}
	if lease.CodeOf(err) == lease.NoRoom {
		c.h.catchUp(ctx) // releases of this host that are not delivered yet
	}
	if known {
		c.waited = true
		pause(ctx, 2*watchGap)
		return true
	}
	c.all, c.age = true, 0
	return true
}

// taken notes that the owners did not grant a choice, whose GPUs somebody else has got.
func (c *chooser) taken(ctx context.Context, got choice, err error) {
	c.last, c.age = err, 0
	if got.claims == nil {
		return
	}
	for _, p := range c.h.named(lease.Owners(got.grants)) {
		if inv, err := p.inventory(ctx, c.h, 0); err == nil {
			c.h.view.correct(p.name, inv.GPUs)
		}
	}
}
