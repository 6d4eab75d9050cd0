package node

import (
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
)

// busy tells the workers how long their processes have kept the GPUs busy.
func (n *Node) busy(s *inventory.Sample) {
	by := map[string]map[int]time.Duration{}
	for _, d := range s.GPUs {
		for _, b := range d.Busy {
			if by[d.UUID] == nil {
				by[d.UUID] = map[int]time.Duration{}
			}
			by[d.UUID][b.PID] += b.Time
		}
	}
	n.pool.AddBusy(s.Asked, by)
}
