package node

import (
	"context"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
)

// lookEvery is the time between two quick looks of NVML while sessions live. What a process did
// between the last look and its end stays unknown.
const lookEvery = time.Second

func (n *Node) lookOften(ctx context.Context) error {
	t := time.NewTicker(lookEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
			if n.pool.Live() {
				n.watch.Look()
			}
		}
	}
}

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
