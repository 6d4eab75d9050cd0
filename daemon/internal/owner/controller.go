package owner

// Controllers: nodes whose daemons speak for Slurm, which knows of a job's nodes before they do
// and outlives them. Such a daemon may
//
//	Reserve   for any node; it is then the lease's sponsor, and renews it until the
//	          node's own daemon does
//	Release   any lease, and a whole job: the key then names no node. A lease that its node has
//	          claimed, or got by itself, is not released by its id alone
//	List, Reports   all
//
// Every other daemon sees and ends the leases of its own node.

import (
	"context"
	"errors"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// SetControllers names the nodes whose daemons are controllers'.
func (o *Owner) SetControllers(nodes []string) {
	control := make(map[string]bool, len(nodes))
	for _, n := range nodes {
		control[n] = n != ""
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.control = control
}

// Controller says whether a node's daemon is a controller's.
func (o *Owner) Controller(node string) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.control[node]
}

// maySponsor checks whether the node may ask for l.
func (o *Owner) maySponsor(from string, l *lease.Lease) error {
	switch {
	case l.Sponsor == "":
		return nil
	case l.Sponsor != from || !o.Controller(from):
		return lease.Errorf(lease.Denied, "lease %.40q: node %.256s asks for a lease that %.256q sponsors: only a controller may, for itself; see slurm.controllers in sluice.yaml of %s", l.ID, from, l.Sponsor, o.cfg.Name)
	case l.Host == from:
		return lease.Errorf(lease.Invalid, "lease %.40q: node %s sponsors itself; a lease of its own needs no sponsor", l.ID, from)
	}
	return nil
}

// endJob ends the leases of a job on any node, in key's incarnation and earlier ones, and
// refuses late requests of these.
func (o *Owner) endJob(ctx context.Context, from string, key lease.Key, reason string) error {
	var found []*entry
	err := func() error {
		o.write.Lock()
		defer o.write.Unlock()
		if err := o.sure(); err != nil {
			return err
		}
		if err := o.remember(from, "", key, reason); err != nil {
			return err
		}
		o.point("endjob-1-remembered")
		for _, e := range o.leases {
			k := e.rec.Lease.Request.Key
			if k.Cluster != key.Cluster || k.Job != key.Job || k.Incarnation > key.Incarnation {
				continue
			}
			found = append(found, e)
			if !e.ending {
				o.mark(e, ending{audit.Release, reason, true})
			}
		}
		return nil
	}()
	if err != nil {
		return err
	}
	for _, e := range found {
		o.finish(e)
	}
	var errs []error
	for _, e := range found {
		errs = append(errs, o.await(ctx, e))
	}
	if err := errors.Join(errs...); err != nil {
		return lease.Errorf(lease.Down, "job %s: %v", key, err)
	}
	o.point("endjob-2-answer")
	return nil
}
