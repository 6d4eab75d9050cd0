package workers

// GPU time beyond what a lease's policy allows.
//
// Sessions take turns by a file that all sessions on a GPU can write. A session that was taken over by an attacker can give itself
// turns, or start work outside of any. But no session can change the policies, or how long the driver says that its process kept the
// GPU busy. So the two are compared, and nothing else: time beyond the most that the policies allow a lease is added up. What the lease
// owes is not taken off, because its own sessions say that; a lease that owes for a long kernel may be found too, and it did have that
// time. Time in which the driver saw no other lease's programs harmed nobody and is not counted: long kernels may
// run then. The driver's percentages are rounded and averaged, so the comparison has a tolerance, and it ends no session.

import (
	"fmt"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

const (
	// excessSlack is the tolerance for the driver's figure of a lease, as a part of a GPU in the unit of weights.
	excessSlack = turns.FullWeight / 10
	// excessLimit is the excess, beyond the tolerance, that is reported.
	excessLimit = 10 * time.Second
)

// noteExcess compares the leases' policies with the time for which processes kept the GPUs busy since the previous sample. mu is held.
func (p *Pool) noteExcess(at time.Time, busy map[string]map[int]time.Duration) {
	gap := at.Sub(p.sampled)
	first := p.sampled.IsZero()
	p.sampled = at
	if first || gap <= 0 || gap > time.Minute {
		return
	}
	for gpu, b := range p.schedules {
		used, all := p.usedBy(busy[gpu])
		for _, c := range wholes(b.Read()) {
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

// wholes adds what the parts of leases may have, and owe, to what their leases may have.
func wholes(all []turns.TenantCounters) (leases []turns.TenantCounters) {
	at, share, lent := map[string]int{}, map[string]uint32{}, map[string]uint32{}
	for _, c := range all {
		i, ok := at[c.Lease]
		share[c.Lease] += c.Share
		lent[c.Lease] = max(lent[c.Lease], c.Most-min(c.Share, c.Most)) // the same time is lent to all of them
		if !ok {
			at[c.Lease] = len(leases)
			leases = append(leases, c)
			continue
		}
		leases[i].Most = share[c.Lease] + lent[c.Lease]
		leases[i].Owes += c.Owes
	}
	return leases
}

// usedBy adds up the times of processes for each lease and for all leases together. mu is held.
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

// overExcess describes a lease's excess as an Overrun. mu is held.
func (p *Pool) overExcess(c turns.TenantCounters, gpu string, excess time.Duration) Overrun {
	o := p.overrun(c.Lease, gpu, 0, fmt.Sprintf("the driver saw the lease's programs on GPU %s for %v longer than its policy allows while other leases' programs ran there, and by its own account it owes %v of that GPU's time: its programs may compute outside of their turns",
		gpu, excess.Round(time.Millisecond), c.Owes.Round(time.Millisecond)))
	o.Time = excess
	return o
}
