package owner

// Leases outside of Slurm's jobs. Any user can take and return them as fast as the network
// allows, so fewer of them are remembered than the tombstone time says.

import (
	"cmp"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// runsKept is how many ended leases are remembered for each user.
	runsKept = 1000
	// runsLate is longer than a message about a lease can be delayed.
	runsLate = 5 * time.Minute
)

// tooMany returns tombstones of the oldest such leases, at most most. mu is held.
func (o *Owner) tooMany(now time.Duration, most int) []string {
	ended := map[uint32]int{}
	for _, t := range o.tombs {
		if t.run() {
			ended[t.Report.UID]++
		}
	}
	var names []string
	for uid, n := range ended {
		if n <= runsKept || len(names) >= most {
			continue
		}
		var all []tombSeen
		for _, t := range o.tombs {
			if t.run() && t.Report.UID == uid {
				all = append(all, t)
			}
		}
		slices.SortFunc(all, func(a, b tombSeen) int { return cmp.Compare(a.since, b.since) })
		for _, t := range all[:n-runsKept] {
			if now-t.since < runsLate || len(names) >= most {
				break
			}
			names = append(names, idTomb(t.Lease))
			if k := keyTomb(t.Report.Key); o.tombs[k].Lease == t.Lease {
				names = append(names, k)
			}
		}
	}
	return names
}

// run says whether the tombstone is of a granted lease outside of Slurm's jobs.
func (t *tombSeen) run() bool {
	return t.Report != nil && form.IsRunJob(t.Report.Key.Job)
}
