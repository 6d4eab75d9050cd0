package worker

// The stand-alone worker's schedules: one for each device, with each lease as a tenant.

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// Turns says how a stand-alone worker shares its devices' time.
type Turns struct {
	Site     turns.Site
	Kind     turns.Kind
	Lend     bool
	Percents []int // of the leases, in the order in which they come; the last one is for all that follow
}

type schedules struct {
	cfg  *Turns
	list []*turns.Schedule
	mu   sync.Mutex
	n    int // leases so far
}

func newSchedules(cfg *Turns, devices int) (*schedules, error) {
	b := &schedules{cfg: cfg}
	for range devices {
		sched, err := turns.CreateAnonymous(cfg.Site)
		if err != nil {
			return nil, err
		}
		b.list = append(b.list, sched)
	}
	return b, nil
}

// sweep clears what sessions leave while no other session waits, until ctx ends.
func (b *schedules) sweep(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, sched := range b.list {
			sched.Sweep()
		}
	}
}

// add makes a lease a tenant of every device, and returns its numbers. What it owes is kept in its account.
func (b *schedules) add(lease string, acct *account.Lease) ([]int, error) {
	if b == nil {
		return nil, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	p := turns.Policy{Kind: b.cfg.Kind, Lend: b.cfg.Lend, Weight: turns.FullWeight}
	if n := len(b.cfg.Percents); n > 0 {
		p.Weight = uint32(b.cfg.Percents[min(b.n, n-1)]) * turns.FullWeight / 100
	}
	b.n++
	var tenants []int
	for dev, sched := range b.list {
		n, err := sched.Add(fmt.Sprintf("%s-%d", lease, b.n), p)
		if err != nil {
			b.remove(tenants)
			return nil, err
		}
		if debts, ok := acct.Debts(dev); ok {
			sched.Keep(n, debts)
		}
		tenants = append(tenants, n)
	}
	return tenants, nil
}

func (b *schedules) remove(tenants []int) {
	for i, n := range tenants {
		b.list[i].Remove(n)
	}
}

// share says how a session shares each device, and adds the descriptors that it needs for that.
func (b *schedules) share(devices int, tenants, fds []int) ([]control.Turn, []int) {
	if b == nil {
		return control.NoTurns(devices), fds
	}
	var ts []control.Turn
	for i, n := range tenants {
		policy, state := b.list[i].Files()
		ts = append(ts, control.Turn{Tenant: n})
		fds = append(fds, int(policy.Fd()), int(state.Fd()))
	}
	return ts, fds
}

// gone clears what a session's process left.
func (b *schedules) gone(pid int) {
	if b == nil {
		return
	}
	for _, sched := range b.list {
		sched.Gone(pid, 0)
	}
}
