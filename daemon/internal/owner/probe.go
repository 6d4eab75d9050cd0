package owner

import (
	"context"
	"os"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// ProbeTickets is what Tickets may implement besides: connections of probes.
type ProbeTickets interface {
	OfferProbe(r lease.ProbeRequest, take func(conn, tcp *os.File) (free func(), err error)) ([]lease.Offer, error)
}

// Probe implements lease.Prober. Any node whose daemon this one knows may probe, as any may ask for the inventory.
func (o *Owner) Probe(ctx context.Context, host string, r lease.ProbeRequest) ([]lease.Offer, error) {
	o.probes.Await(ctx, host, r.UID)
	offers, err := o.probe(host, r)
	if err != nil {
		if skipped, ok := o.refusal(host, r.UID); ok {
			o.log.Info("probe refused", "host", host, "uid", r.UID, "reason", err, "skipped", skipped)
		}
		return nil, err
	}
	o.log.Info("probe", "host", host, "uid", r.UID, "connections", r.Connections, "encrypted", r.Encrypt)
	return offers, nil
}

func (o *Owner) probe(host string, r lease.ProbeRequest) ([]lease.Offer, error) {
	o.mu.RLock()
	tickets, ok := o.tickets.(ProbeTickets)
	o.mu.RUnlock()
	if !ok {
		return nil, lease.Errorf(lease.Down, "owner %s does not listen for data yet; ask again", o.cfg.Name)
	}
	slot, err := o.probes.Begin(o.ctx, host, r)
	if err != nil {
		return nil, err
	}
	offers, err := tickets.OfferProbe(r, slot.Take)
	if err != nil {
		slot.End()
	}
	return offers, err
}

var _ lease.Prober = (*Owner)(nil)
