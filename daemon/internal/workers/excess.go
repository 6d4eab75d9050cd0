package workers

// GPU time that a lease should not have had.
//
// Sessions keep their turns by themselves, in a file that all sessions on a GPU can write. One that was taken over can give itself
// turns, or start work without any. What cannot be changed by a session is how long the driver says that its process kept the
// GPU busy, and the policies. So the two are compared, and nothing else is: time beyond the most that the policies can give a lease
// is added up. What the lease owes is not taken off, because its own sessions say that. A lease that owes for a long kernel may be
// found too; it did have that time. Time in which the driver saw no other lease's programs harmed nobody, and is not counted:
// long kernels may run then. The driver's percentages are rounded and averaged, so the comparison has
// room for errors, and it ends no session.

import (
	"fmt"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

const (
	// excessSlack is the part of a GPU by which the driver's figure for a lease may be too large, in the unit of weights.
	excessSlack = turns.FullWeight / 10
	// excessLimit is how much time beyond that is reported.
	excessLimit = 10 * time.Second
)

// noteExcess compares the time for which processes kept GPUs busy since the sample before with the leases' policies. mu is held.
func (p *Pool) noteExcess(at time.Time, busy map[string]map[int]time.Duration) {
	gap := at.Sub(p.sampled)
	first := p.sampled.IsZero()
	p.sampled = at
	if first || gap <= 0 || gap > time.Minute {
		return
	}
	for gpu, b := range p.schedules {
		used, all := p.usedBy(busy[gpu])
		for _, c := range b.Read() {
			t := p.tenancies[c.Lease]
			if t == nil {
				continue
			}
			most := gap * time.Duration(min(c.Most+excessSlack, turns.FullWeight)) / turns.FullWeight
			e := t.excess[gpu] - most
			if mine := used[c.Lease]; all > mine {
				e += min(mine, gap)
			}
			e = max(e, 0)
			if e > excessLimit {
				p.overran = append(p.overran, p.overExcess(c, gpu, e))
				e = 0
			}
			t.excess[gpu] = e
		}
	}
}

// usedBy adds up the times of processes by lease, and of all leases. mu is held.
func (p *Pool) usedBy(busy map[int]time.Duration) (used map[string]time.Duration, all time.Duration) {
	used = map[string]time.Duration{}
	for id, l := range p.leases {
		for pid, d := range busy {
			if d > 0 && l.has(pid) {
				used[id] += d
				all += d
			}
		}
	}
	return used, all
}

// overExcess describes time that a lease should not have had. mu is held.
func (p *Pool) overExcess(c turns.TenantCounters, gpu string, excess time.Duration) Overrun {
	o := p.overrun(c.Lease, gpu, 0, fmt.Sprintf("the driver saw its programs on GPU %s for %v longer than its policy can give it, while others' ran there, and by its own account it owes %v of that GPU's time: they may compute outside of their turns",
		gpu, excess.Round(time.Millisecond), c.Owes.Round(time.Millisecond)))
	o.Time = excess
	return o
}
