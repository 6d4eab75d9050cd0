package node

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/metrics"
)

// NVML's figures and the accounts are read at different times, and a program may allocate and free a GiB in between, over
// and over. So a difference counts only if no such program explains it: the least that NVML has said of a
// process at its last looks is compared with the most that the process's account had at any time meanwhile, and
// the other way round.

const (
	// alarm is the difference between NVML and an account that is logged: what a driver takes
	// for itself at times is less.
	alarm = 32 * lease.Granule
	// looks is the number of NVML's samples in a row that a difference has to last.
	looks = 3
	// readings is how often the accounts are read between two samples.
	readings = 10
)

// span is the least and the most of some readings, in bytes.
type span struct {
	least, most uint64
	some        bool
}

func (s *span) add(b uint64) {
	if !s.some || b < s.least {
		s.least = b
	}
	if !s.some || b > s.most {
		s.most = b
	}
	s.some = true
}

// heldKey is a session's process on a GPU, and held what NVML and its account have said of it.
type heldKey struct {
	lease, gpu string
	pid        int
}

type held struct {
	nvml     []uint64 // the last samples
	accounts []span   // before each of them
	now      span     // since the last one
}

// comparison compares NVML's samples with accounts.
type comparison map[heldKey]*held

// account takes a reading of all accounts, and forgets the processes that have ended.
func (c comparison) account(list []lease.Status) {
	live := map[heldKey]bool{}
	for _, l := range list {
		for i, g := range l.Grants {
			for _, s := range l.Sessions {
				if i >= len(s.Use) {
					continue
				}
				k := heldKey{l.ID, g.GPU, s.Worker.PID}
				live[k] = true
				if c[k] == nil {
					c[k] = &held{}
				}
				c[k].now.add(s.Use[i].Used)
			}
		}
	}
	maps.DeleteFunc(c, func(k heldKey, _ *held) bool { return !live[k] })
}

// sample takes a sample, and answers by how much NVML's figures differ from the accounts of each lease. It leaves out
// processes whose memory NVML did not report at its last looks, and leases that have only such processes.
func (c comparison) sample(s *inventory.Sample) []metrics.Mismatch {
	says := map[heldKey]uint64{} // without lease
	for _, d := range s.GPUs {
		for _, p := range d.Processes {
			if p.Used != nil {
				says[heldKey{gpu: d.UUID, pid: p.PID}] = *p.Used
			}
		}
	}
	differ := map[[2]string]int64{}
	for k, h := range c {
		used, ok := says[heldKey{gpu: k.gpu, pid: k.pid}]
		if !ok {
			*h = held{now: h.now}
			continue
		}
		h.nvml, h.accounts, h.now = append(h.nvml, used), append(h.accounts, h.now), span{}
		if len(h.nvml) > looks {
			h.nvml, h.accounts = h.nvml[1:], h.accounts[1:]
		}
		if len(h.nvml) == looks {
			differ[[2]string{k.lease, k.gpu}] += h.difference()
		}
	}
	out := make([]metrics.Mismatch, 0, len(differ))
	for k, b := range differ {
		out = append(out, metrics.Mismatch{Lease: k[0], GPU: k[1], Bytes: b})
	}
	slices.SortFunc(out, func(a, b metrics.Mismatch) int { return strings.Compare(a.Lease+a.GPU, b.Lease+b.GPU) })
	return out
}

// difference is what NVML has more than the account, below 0 less, and 0 if the readings overlap.
func (h *held) difference() int64 {
	var all span
	for _, s := range h.accounts {
		if s.some {
			all.add(s.least)
			all.add(s.most)
		}
	}
	least, most := slices.Min(h.nvml), slices.Max(h.nvml)
	switch {
	case least > all.most:
		return int64(least - all.most)
	case most < all.least:
		return -int64(all.least - most)
	}
	return 0
}

// compare compares NVML's figure for each session process with its account.
func (n *Node) compare(ctx context.Context) error {
	var seen time.Time
	c, loud := comparison{}, map[[2]string]bool{}
	t := time.NewTicker(n.cfg.Load().Owner.Poll / readings)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		var list []lease.Status
		if n.pool.Live() {
			var err error
			if list, err = n.owner.List(ctx, ""); err != nil {
				continue
			}
		}
		c.account(list)
		s := n.watch.Last()
		if s == nil || !s.At.After(seen) {
			continue
		}
		seen = s.At
		all := c.sample(s)
		n.mismatch.Store(&all)
		now := map[[2]string]bool{}
		for _, m := range all {
			if k := [2]string{m.Lease, m.GPU}; m.Bytes > alarm {
				now[k] = true
				if !loud[k] {
					n.log.Error("NVML says that a lease holds more than its account", "lease", m.Lease, "gpu", m.GPU, "bytes", m.Bytes, "looks", looks)
				}
			}
		}
		loud = now
	}
}
