package owner

import (
	"fmt"
	"slices"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// run is one run of a job on one node, as its controller knows it.
type run struct {
	h *modelHost
	r lease.Request
}

// sponsor has the controller ask for a job's lease on h: a new job, a run that it asked
// for before, or the next run of such a job.
func (w *world) sponsor(h *modelHost) {
	w.epoch++
	switch p := w.rng.IntN(100); {
	case p < 70 || len(w.runs) == 0:
		w.jobs++
		r := w.request(lease.Key{Cluster: "c", Job: fmt.Sprint("s", w.jobs), Node: h.name, Incarnation: w.epoch})
		w.runs = append(w.runs, &run{h, r})
	case p < 85:
		r := w.runs[w.rng.IntN(len(w.runs))]
		r.r.Key.Incarnation = w.epoch
	default:
		r := w.runs[w.rng.IntN(len(w.runs))]
		r.r.Key.Incarnation = w.epoch
		r.r.Restart++
	}
	for _, r := range w.runs {
		if r.r.Key.Incarnation == w.epoch {
			w.get(w.ctl, r.r)
		}
	}
}

// attach has a job's node look for what was got for it.
func (w *world) attach() {
	if len(w.runs) == 0 {
		return
	}
	r := w.runs[w.rng.IntN(len(w.runs))]
	h, found := r.h, make(map[string]*hostLease)
	var best *hostLease
	parts := 0
	for _, n := range w.nodes {
		var list []lease.Status
		if w.call(h, n, func() { list, _ = n.List(ctx, h.name) }) != nil {
			return // it is not known
		}
		for _, s := range list {
			if s.Request.Key.Job != r.r.Key.Job || s.State != lease.Granted {
				continue
			}
			l := found[s.ID]
			if l == nil {
				l = &hostLease{id: s.ID, key: s.Request.Key, grants: make(map[*node][]lease.Grant)}
				found[s.ID] = l
			}
			l.grants[n] = s.Grants
			if best == nil || l.key.Incarnation > best.key.Incarnation {
				best, parts = l, 0
			}
			if l == best {
				parts += len(s.Grants)
			}
		}
	}
	if best == nil || parts < len(r.r.Fractions) || slices.ContainsFunc(h.held, func(l *hostLease) bool { return l.id == best.id }) {
		return
	}
	for n := range best.grants {
		var err error
		if w.call(h, n, func() { err = n.Claim(ctx, h.name, best.id) }) != nil || err != nil {
			return
		}
	}
	w.stats["attached"]++
	h.held = append(h.held, best)
}

// endJob has the controller tell everybody that a job has ended.
func (w *world) endJob(i int) {
	r := w.runs[i]
	w.runs = slices.Delete(w.runs, i, i+1)
	w.epoch++
	w.ctl.held = slices.DeleteFunc(w.ctl.held, func(l *hostLease) bool { return l.key.Job == r.r.Key.Job })
	for _, n := range w.nodes {
		w.ctl.owed = append(w.ctl.owed, owed{n, "", lease.Key{Cluster: "c", Job: r.r.Key.Job, Incarnation: w.epoch}})
	}
	w.stats["ended"]++
	w.deliver(w.ctl)
}
