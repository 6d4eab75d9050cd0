package host

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/probe"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// probeRest is how long at least this node begins no user's probe after one, of any owner.
const probeRest = 2 * time.Second

// probeWait is how long a user's probe waits at most for that.
const probeWait = 15 * time.Second

// probeDial is how long the connections of a probe may take.
const probeDial = 10 * time.Second

// Probe implements rpc.LocalService: it measures the link to an owner. Of users one at a time may, and no two of them soon after each other.
func (h *Host) Probe(ctx context.Context, p rpc.Peer, owner string) (lease.Probe, error) {
	pe, err := h.ownerNamed(owner)
	if err != nil {
		return lease.Probe{}, err
	}
	if pe.local {
		return lease.Probe{Node: h.cfg.Node, Owner: owner, Local: true}, nil
	}
	if h.cfg.DialProbe == nil {
		return lease.Probe{}, lease.Errorf(lease.Internal, "this daemon cannot call the data ports of other nodes")
	}
	if err := h.probes.enter(p.UID); err != nil {
		return lease.Probe{}, err
	}
	defer h.probes.leave(p.UID)
	ctx, end := context.WithCancel(ctx)
	defer end()
	defer context.AfterFunc(h.base, end)()
	leave, err := h.probeTurn(ctx, p.UID)
	if err != nil {
		return lease.Probe{}, err
	}
	var moving time.Time
	defer func() {
		if moving.IsZero() { // nothing was sent
			leave(probe.Rests{})
			return
		}
		leave(probe.Rests{Users: max(probeRest, probe.Share*time.Since(moving))})
	}()
	ctx, cancel := context.WithTimeout(ctx, probe.Life)
	defer cancel()
	v, err := h.probe(ctx, pe, p.UID, func() { moving = time.Now() })
	v.Node, v.Owner = h.cfg.Node, owner
	var known *lease.Error
	if err != nil && !errors.As(err, &known) {
		err = lease.Errorf(lease.Down, "owner %s: %v", owner, err)
	}
	if err != nil {
		h.log.Info("probe failed", "owner", owner, "uid", p.UID, "reason", err)
	} else {
		h.log.Info("probe", "owner", owner, "uid", p.UID)
	}
	return v, err
}

// probeTurn waits until a user may probe. Root need not.
func (h *Host) probeTurn(ctx context.Context, uid uint32) (leave func(probe.Rests), err error) {
	if uid == 0 {
		return func(probe.Rests) {}, nil
	}
	for {
		leave, busy := h.userProbes.Enter("user "+strconv.FormatUint(uint64(uid), 10), uid, probe.Life)
		if busy == nil {
			return leave, nil
		}
		if busy.Who != "" {
			return nil, lease.Errorf(lease.Conflict, "%s probes from this node, which lets one user do so at a time; try again in some seconds", busy.Who)
		}
		if busy.Wait > probeWait {
			return nil, lease.Errorf(lease.Conflict, "a user has just probed from this node; try again in %v: users' probes leave a pause, so that they cannot fill a link", busy.Wait.Truncate(time.Second)+time.Second)
		}
		select {
		case <-time.After(busy.Wait):
		case <-ctx.Done():
			return nil, lease.Errorf(lease.Down, "the caller gave up")
		}
	}
}

// probe measures. moves is called when it begins to fill the link.
func (h *Host) probe(ctx context.Context, pe *peer, uid uint32, moves func()) (lease.Probe, error) {
	o, ok := pe.owner.(lease.Prober)
	if !ok {
		return lease.Probe{}, lease.Errorf(lease.WrongPeer, "owner %s cannot be probed from this daemon", pe.name)
	}
	dctx, cancel := context.WithTimeout(ctx, probeDial)
	defer cancel()
	conns, encrypted, err := h.cfg.DialProbe(dctx, o, pe.addr, h.cfg.Node, lease.ProbeRequest{UID: uid, Connections: probe.Connections})
	if err != nil {
		return lease.Probe{}, err
	}
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	plan := probe.PlanFor(uid)
	plan.Moves = moves
	v, err := probe.Measure(ctx, conns, plan)
	v.Encrypted = encrypted
	return v, err
}
