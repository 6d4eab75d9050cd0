package host

// Who may acquire now: so many at once, and one at a time for a job on a node.

import (
	"context"
	"sync"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// maxAcquires are under way at once, of which maxUser by one user.
const (
	maxAcquires = 64
	maxUser     = 4
)

// acquireLimit counts acquisitions under way.
type acquireLimit struct {
	mu   sync.Mutex
	all  int
	user map[uint32]int
}

func (a *acquireLimit) enter(uid uint32) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.all >= maxAcquires:
		return lease.Errorf(lease.Down, "%d leases are being acquired on this node already; ask again", a.all)
	case uid != 0 && a.user[uid] >= maxUser:
		return lease.Errorf(lease.Down, "user %d is acquiring %d leases already; ask again", uid, a.user[uid])
	}
	if a.user == nil {
		a.user = make(map[uint32]int)
	}
	a.all++
	a.user[uid]++
	return nil
}

func (a *acquireLimit) leave(uid uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all--
	if a.user[uid]--; a.user[uid] == 0 {
		delete(a.user, uid)
	}
}

// fly waits for its turn with a job's lease on a node: one acquisition or attachment
// at a time. A release of the key ends the turn's context, and so does the caller.
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
