package host

// Bounds on requests that take long: so many at the same time, and one acquisition at a time
// for a job on a node.

import (
	"context"
	"sync"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// crew bounds how many requests of a kind run at the same time. The zero value admits none.
type crew struct {
	doing string // "acquiring leases"
	most  int    // of all users
	each  int    // of one user; root may use all places

	mu   sync.Mutex
	all  int
	user map[uint32]int
}

// enter takes a place for a user. leave gives it back.
func (c *crew) enter(uid uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.all >= c.most:
		return lease.Errorf(lease.Down, "%d requests are %s on this node already; ask again", c.all, c.doing)
	case uid != 0 && c.user[uid] >= c.each:
		return lease.Errorf(lease.Down, "%d requests of user %d are %s already; ask again", c.user[uid], uid, c.doing)
	}
	if c.user == nil {
		c.user = make(map[uint32]int)
	}
	c.all++
	c.user[uid]++
	return nil
}

func (c *crew) leave(uid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.user[uid]--; c.user[uid] == 0 {
		delete(c.user, uid)
	}
}

// longLock is a lock that is held over calls to owners. It is a sync.Mutex but for that: who
// waits for it waits as for an owner's answer, which a test's clock knows of.
type longLock struct {
	mu   sync.Mutex
	free *sync.Cond // made by the first who waits
	held bool
}

func (l *longLock) Lock() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.held {
		if l.free == nil {
			l.free = sync.NewCond(&l.mu)
		}
		l.free.Wait()
	}
	l.held = true
}

func (l *longLock) TryLock() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held {
		return false
	}
	l.held = true
	return true
}

func (l *longLock) Unlock() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = false
	if l.free != nil {
		l.free.Signal()
	}
}

// fly waits until no other acquisition or attachment of the job's lease on the node is in
// progress. A release of the key ends the context that it returns, and so does the caller.
func (h *Host) fly(ctx context.Context, k lease.Key) (context.Context, func(), error) {
	n := nameOf(k)
	for {
		h.mu.Lock()
		if h.closed {
			h.mu.Unlock()
			return nil, nil, lease.Errorf(lease.Down, "the daemon is stopping")
		}
		fl := h.flights[n]
		if fl == nil {
			fctx, cancel := context.WithCancelCause(ctx)
			fl = &flight{done: make(chan struct{}), cancel: cancel, incarnation: k.Incarnation}
			h.flights[n] = fl
			h.mu.Unlock()
			return fctx, func() {
				h.mu.Lock()
				delete(h.flights, n)
				h.mu.Unlock()
				close(fl.done)
				cancel(nil)
			}, nil
		}
		h.mu.Unlock()
		select {
		case <-fl.done:
		case <-ctx.Done():
			return nil, nil, lease.Errorf(lease.Down, "job %s: the caller gave up", k)
		}
	}
}
