package host

import (
	"context"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Drain implements rpc.LocalService: root here drains this node's GPUs, and on a controller
// those of any owner of its pools. The owner decides whether this node may.
func (h *Host) Drain(ctx context.Context, p rpc.Peer, d lease.DrainOrder) ([]lease.GPU, error) {
	if p.UID != 0 {
		return nil, lease.Errorf(lease.Denied, "only root drains and resumes GPUs")
	}
	d.By = p.UID
	if err := d.Validate(); err != nil {
		return nil, err
	}
	if h.cfg.Local != nil && d.Owner == h.cfg.Node {
		gpus, err := h.cfg.Local.Drain(ctx, h.cfg.Node, d)
		for _, pe := range h.owners() {
			if pe.name == d.Owner {
				pe.stale()
			}
		}
		return gpus, err
	}
	pe, err := h.ownerNamed(d.Owner)
	if err != nil {
		return nil, err
	}
	return call(ctx, h, pe, reserveTime, true, func(ctx context.Context, o lease.Owner) ([]lease.GPU, error) {
		return o.Drain(ctx, h.cfg.Node, d)
	})
}

// ownerNamed finds an owner of this node's pools.
func (h *Host) ownerNamed(name string) (*peer, error) {
	owners := h.owners()
	if i := slices.IndexFunc(owners, func(pe *peer) bool { return pe.name == name }); i >= 0 {
		return owners[i], nil
	}
	names := make([]string, len(owners))
	for i, pe := range owners {
		names[i] = pe.name
	}
	if len(names) == 0 {
		return nil, lease.Errorf(lease.NotFound, "%s is not an owner: this node has no pools; name the owners under pools in sluice.yaml", form.Name(name))
	}
	return nil, lease.Errorf(lease.NotFound, "%s is not an owner of this node's pools; their owners are %s", form.Name(name), strings.Join(names, ", "))
}
