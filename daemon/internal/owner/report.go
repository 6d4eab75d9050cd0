package owner

// Reports: what a job's leases have used. They are kept as long as the tombstones of ended
// leases.

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// report returns what a lease has used so far. It is also called for a lease that has just
// ended, before its account is forgotten.
func (o *Owner) report(rec *record) lease.Report {
	l := &rec.Lease
	q := &l.Request
	r := lease.Report{
		Lease: l.ID, Key: q.Key, Owner: o.cfg.Name, UID: q.UID, Account: q.Account, JobName: q.JobName,
		Asked: slices.Clone(q.Fractions), Grants: slices.Clone(l.Grants), Made: l.Made,
		Lost: rec.Began != "" && rec.Began != o.clock.Boot(), // a record of an earlier release has no boot
	}
	t := o.cfg.Workers.Total(l.ID)
	r.Use, r.Counts, r.Sessions, r.GPUTime, r.Failed, r.Failure = t.Use, t.Counts, t.Sessions, t.GPUTime, t.Failed, t.Failure
	r.Shares, r.Policy, r.Lend = o.cfg.Workers.Shares(l.ID), q.Policy, q.Lend
	for i := len(r.Use); i < len(r.Grants); i++ { // no session ever started
		r.Use = append(r.Use, lease.Use{Granted: r.Grants[i].Mem})
	}
	return r
}

// Reports implements lease.Owner.
func (o *Owner) Reports(_ context.Context, host, cluster, job string) ([]lease.Report, error) {
	if job == "" || len(job) > form.MaxName || len(cluster) > form.MaxName {
		return nil, lease.Errorf(lease.Invalid, "report: want the job's name, of at most %d bytes", form.MaxName)
	}
	of := func(k lease.Key) bool { return k.Cluster == cluster && k.Job == job }
	all := o.Controller(host)
	var live []record
	var out []lease.Report
	o.mu.RLock()
	for _, e := range o.leases {
		if l := &e.rec.Lease; of(l.Request.Key) && l.State == lease.Granted && (all || l.Host == host) {
			live = append(live, e.rec)
		}
	}
	for _, t := range o.tombs {
		if t.Report != nil && of(t.Report.Key) && (all || t.Host == host) {
			out = append(out, *t.Report)
		}
	}
	end := o.lastEnd(lease.Key{Cluster: cluster, Job: job, Node: host}, all)
	o.mu.RUnlock()
	if !slices.ContainsFunc(out, func(r lease.Report) bool { return r.Key.Incarnation >= end.Incarnation }) && end.Incarnation > 0 {
		out = append(out, lease.Report{Key: lease.Key{Cluster: cluster, Job: job, Incarnation: end.Incarnation}, Owner: o.cfg.Name, Ended: end.Ended, Reason: end.Reason})
	}
	for i := range live {
		// A lease that ended meanwhile is in the list twice; the report of the ended one is
		// kept.
		out = append(out, o.report(&live[i]))
	}
	slices.SortFunc(out, func(a, b lease.Report) int {
		return cmp.Or(a.Made.Compare(b.Made), cmp.Compare(a.Lease, b.Lease), b.Ended.Compare(a.Ended))
	})
	return slices.CompactFunc(out, func(a, b lease.Report) bool { return a.Lease == b.Lease }), nil
}

// lastEnd is the tombstone of the last run of a job that has ended here, on the key's node or, with all, on any. mu is held.
func (o *Owner) lastEnd(k lease.Key, all bool) tombstone {
	last := o.tombs[jobTomb(k)].tombstone
	if !all {
		if t := o.tombs[keyTomb(k)].tombstone; t.Incarnation > last.Incarnation {
			last = t
		}
		return last
	}
	nodes := strings.TrimSuffix(keyTomb(lease.Key{Cluster: k.Cluster, Job: k.Job}), `""`)
	for name, t := range o.tombs {
		if t.Incarnation > last.Incarnation && strings.HasPrefix(name, nodes) {
			last = t.tombstone
		}
	}
	return last
}
