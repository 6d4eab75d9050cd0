package host

// What a controller's daemon asks owners and sends to them: the end of a job, its reports,
// and the list of all leases.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// maxEnds is the most ends of jobs that are kept for owners that are away, and endAge the
	// longest that one is kept: long before that, owners end what nobody renews.
	maxEnds = 1 << 16
	endAge  = 24 * time.Hour
	// endsTime bounds how long one round delivers ends that owners have missed.
	endsTime = 2 * time.Second
	// aheadWarn is how far another node's clock may be ahead before a warning is logged.
	aheadWarn = 2 * time.Second
	// endNote and epochNote begin the keys of the ledger's notes.
	endNote   = "end/"
	epochNote = "epoch"
)

// endName names an end. Ends of two runs are kept apart: the nodes on which the earlier run has
// ended say nothing about the later one.
type endName struct {
	cluster, job string
	upTo         uint64
}

// jobEnd is the end of a job that some owners have not been sent yet.
type jobEnd struct {
	Cluster string    `json:"cluster"`
	Job     string    `json:"job"`
	Nodes   []string  `json:"nodes,omitempty"` // none: all
	UpTo    uint64    `json:"up_to"`
	Reason  string    `json:"reason"`
	Pending []string  `json:"pending"` // owners
	At      time.Time `json:"at"`

	deliver longLock
}

func (e *jobEnd) name() endName { return endName{e.Cluster, e.Job, e.UpTo} }
func (e *jobEnd) note() string  { return fmt.Sprintf("%s%q/%q/%d", endNote, e.Cluster, e.Job, e.UpTo) }

// EndJob ends what a job has at any owner, in the runs up to an epoch, on the given nodes or,
// without any, on all. Late requests of these runs are refused. unreached are the owners that
// are sent the end later. The error names the owners that refuse it.
func (h *Host) EndJob(ctx context.Context, cluster, job string, nodes []string, upTo uint64, reason string) (unreached []string, err error) {
	if cluster == "" {
		cluster = h.cfg.Cluster
	}
	if job == "" || len(job) > form.MaxName || len(cluster) > form.MaxName || len(nodes) > maxNodes || slices.Contains(nodes, "") {
		return nil, lease.Errorf(lease.Invalid, "end of a job: want the job's name, of at most %d bytes", form.MaxName)
	}
	if reason = form.Name(reason); reason == "" {
		reason = "the job has ended"
	}
	h.endHere(ctx, cluster, job, nodes, upTo, reason)
	e := &jobEnd{Cluster: cluster, Job: job, Nodes: slices.Clone(nodes), UpTo: upTo, Reason: reason, At: time.Now().UTC()}
	if h.large() && h.controller.Load() {
		h.view.ended(cluster, job, nodes, upTo) // first: a lease that is seen from here on is late
	}
	owners, known := h.ownersOf(cluster, job)
	if known {
		owners = h.withRegistrars(owners, cluster, job, 2)
	}
	for _, p := range owners {
		e.Pending = append(e.Pending, p.name)
	}
	if len(e.Pending) == 0 {
		return nil, nil
	}
	e.deliver.Lock()
	defer e.deliver.Unlock()
	n := e.name()
	h.mu.Lock()
	if old := h.ends[n]; old != nil {
		if len(old.Nodes) == 0 {
			e.Nodes = nil
		} else if len(e.Nodes) > 0 {
			e.Nodes = append(e.Nodes, old.Nodes...)
			slices.Sort(e.Nodes)
			e.Nodes = slices.Compact(e.Nodes)
		}
	}
	keep := h.ends[n] != nil || len(h.ends) < maxEnds
	if keep {
		h.ends[n] = e
	}
	h.mu.Unlock()
	if keep {
		if err := h.noteEnd(e); err != nil {
			// The owners are sent it all the same.
			h.log.Error("end of a job cannot be written", "job", job, "error", err)
		}
	} else {
		h.log.Error("end of a job is sent once and not again: too many ends wait for owners that are away; take those owners out of the pools", "job", job, "waiting", maxEnds)
	}
	h.point("endjob-a-written")
	err = h.tellEnd(ctx, e)
	return slices.Clone(e.Pending), err
}

// endHere ends what this daemon itself holds, or is acquiring. A later run goes on. Which run an
// attachment in progress is for is known only when it is done.
func (h *Host) endHere(ctx context.Context, cluster, job string, nodes []string, upTo uint64, reason string) {
	of := func(n name) bool {
		return n.cluster == cluster && n.job == job && (len(nodes) == 0 || slices.Contains(nodes, n.node))
	}
	var flights []*flight
	h.mu.Lock()
	for n, fl := range h.flights {
		if of(n) && fl.incarnation <= upTo {
			flights = append(flights, fl)
		}
	}
	h.mu.Unlock()
	for _, fl := range flights {
		if fl.incarnation > 0 {
			fl.cancel(lease.Errorf(lease.Over, "job %s was ended meanwhile: %s", job, reason))
		}
		select {
		case <-fl.done:
		case <-ctx.Done():
		}
	}
	ours := make(map[*held]lease.Lease) // copies: mu guards the records
	h.mu.Lock()
	for n, hd := range h.keys {
		if of(n) && hd.rec.Lease.Request.Key.Incarnation <= upTo {
			ours[hd] = hd.rec.Lease
		}
	}
	h.mu.Unlock()
	for hd, l := range ours {
		if l.Host == h.cfg.Node {
			h.release(ctx, hd, reason, true)
		} else {
			h.view.granted(&l) // the loop below tells the owners
			h.entrust(hd)      // the owners end the lease with the job
		}
	}
}

// tellEnd sends the end to the owners that have not been sent it. e.deliver is held. The error
// is of those that refuse it for good.
func (h *Host) tellEnd(ctx context.Context, e *jobEnd) error {
	nodes := e.Nodes
	if len(nodes) == 0 {
		nodes = []string{""}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	told := make(map[string]bool)
	for _, o := range e.Pending {
		p := h.known(o)
		if p == nil {
			told[o] = true // no pool has this owner any more
			continue
		}
		if p.down() != nil {
			continue
		}
		wg.Go(func() {
			err := h.tellOwner(ctx, p, e, nodes)
			mu.Lock()
			defer mu.Unlock()
			switch lease.CodeOf(err) {
			case lease.Denied, lease.Invalid, lease.WrongPeer:
				errs = append(errs, fmt.Errorf("owner %s: %w", p.name, err))
				told[o] = true
			default:
				told[o] = err == nil
			}
		})
	}
	wg.Wait()
	h.point("endjob-b-told")
	left := slices.DeleteFunc(slices.Clone(e.Pending), func(o string) bool { return told[o] })
	h.mu.Lock()
	same := len(left) == len(e.Pending)
	e.Pending = left
	h.mu.Unlock()
	if !same {
		if err := h.noteEnd(e); err != nil {
			h.log.Error("end of a job stays in the ledger as it was, and is sent again", "job", e.Job, "error", err)
		}
	}
	h.point("endjob-c-forgotten")
	return errors.Join(errs...)
}

// noteEnd writes into the ledger which owners are yet to be sent a job's end, or deletes the
// note when none is, unless the job has ended once more meanwhile. e.deliver is held.
func (h *Host) noteEnd(e *jobEnd) error {
	n := e.name()
	h.noting.Lock() // one change of the note at a time
	defer h.noting.Unlock()
	h.mu.Lock()
	current := h.ends[n] == e
	if current && len(e.Pending) == 0 {
		delete(h.ends, n)
	}
	h.mu.Unlock()
	switch {
	case !current:
		return nil
	case len(e.Pending) == 0:
		return h.cfg.Ledger.Delete(ledger.Notes, e.note())
	}
	return h.cfg.Ledger.Put(ledger.Notes, e.note(), e)
}

func (h *Host) tellOwner(ctx context.Context, p *peer, e *jobEnd, nodes []string) error {
	for _, node := range nodes {
		err := h.order(ctx, p, releaseTime, func(ctx context.Context, o lease.Owner) error {
			return o.Release(ctx, h.cfg.Node, "", lease.Key{Cluster: e.Cluster, Job: e.Job, Node: node, Incarnation: e.UpTo}, e.Reason)
		})
		if err != nil {
			h.log.Warn("end of a job not delivered", "job", e.Job, "owner", p.name, "error", err)
			return err
		}
	}
	return nil
}

// endJobs sends owners that answer again the ends that they missed.
func (h *Host) endJobs(ctx context.Context) {
	var due []*jobEnd
	h.mu.Lock()
	for _, e := range h.ends {
		if time.Since(e.At) > endAge || slices.ContainsFunc(e.Pending, func(o string) bool { p := h.peers[o]; return p == nil || p.down() == nil }) {
			due = append(due, e)
		}
	}
	h.mu.Unlock()
	begun := time.Now()
	for _, e := range due {
		if ctx.Err() != nil || time.Since(begun) > endsTime {
			return // renewals wait; the rest goes with the next round
		}
		if !e.deliver.TryLock() {
			continue // another round delivers it
		}
		if time.Since(e.At) > endAge {
			h.log.Error("end of a job was never delivered", "job", e.Job, "owners", strings.Join(e.Pending, " "))
			h.mu.Lock()
			e.Pending = nil
			h.mu.Unlock()
			if err := h.noteEnd(e); err != nil {
				h.log.Error("end of a job stays in the ledger", "job", e.Job, "error", err)
			}
		} else if err := h.tellEnd(ctx, e); err != nil {
			h.log.Error("owner refuses the end of a job", "job", e.Job, "error", err)
		}
		e.deliver.Unlock()
	}
}

// Reports returns what a job's leases have used, as their owners report it. The error names the
// owners that did not answer; the reports of the others are good.
func (h *Host) Reports(ctx context.Context, cluster, job string) ([]lease.Report, error) {
	if cluster == "" {
		cluster = h.cfg.Cluster
	}
	owners, _ := h.ownersOf(cluster, job)
	if len(owners) == 0 {
		owners = h.owners() // those remember longer which leases they had
	}
	out, silent := h.reports(ctx, owners, cluster, job)
	out = slices.DeleteFunc(out, func(r lease.Report) bool { return r.Lease == "" })
	slices.SortStableFunc(out, func(a, b lease.Report) int { return a.Made.Compare(b.Made) })
	if len(silent) > 0 {
		return out, lease.Errorf(lease.Down, "not all owners answer: %s", strings.Join(silent, "; "))
	}
	return out, nil
}

// reports also returns reports that belong to no lease.
func (h *Host) reports(ctx context.Context, owners []*peer, cluster, job string) (out []lease.Report, silent []string) {
	for _, a := range askAll(ctx, h, owners, false, func(ctx context.Context, o lease.Owner) ([]lease.Report, error) {
		return o.Reports(ctx, h.cfg.Node, cluster, job)
	}) {
		if a.err != nil {
			silent = append(silent, a.peer.name+": "+a.err.Error())
		}
		out = append(out, a.v...)
	}
	return out, silent
}

// LastEpoch is the largest epoch that this daemon, or an owner that answers, has seen of a job,
// 0 for none. Daemons that give epochs have only their clocks in common: the epoch of the next
// run must be larger than one that another daemon gave, and the epoch of an end not smaller.
func (h *Host) LastEpoch(ctx context.Context, cluster, job string) (last uint64) {
	if cluster == "" {
		cluster = h.cfg.Cluster
	}
	owners, known := h.ownersOf(cluster, job)
	if known {
		owners = h.withRegistrars(owners, cluster, job, 1)
		_, last = h.view.whose(cluster, job)
	}
	all, _ := h.reports(ctx, owners, cluster, job)
	for _, r := range all {
		last = max(last, r.Key.Incarnation)
	}
	h.mu.Lock()
	for n, t := range h.tombs {
		if n.cluster == cluster && n.job == job {
			last = max(last, t.Key.Incarnation)
		}
	}
	h.mu.Unlock()
	if ahead := time.Until(time.UnixMilli(int64(min(last, math.MaxInt64)))); ahead > aheadWarn {
		h.log.Warn("an epoch of the job was given by a clock that is ahead of this node's; compare the clocks of the controllers", "job", job, "ahead", ahead)
	}
	return last
}

// All returns what every owner has, for a controller: leases by owner, and for each owner
// without an answer the error.
func (h *Host) All(ctx context.Context) (map[string][]lease.Brief, map[string]error) {
	leases, errs := make(map[string][]lease.Brief), make(map[string]error)
	list := func(ctx context.Context, o lease.Owner) ([]lease.Brief, error) {
		all, err := o.List(ctx, "")
		brief := make([]lease.Brief, len(all))
		for i := range all {
			brief[i] = all[i].Brief()
			if k := &brief[i].Key; k.Cluster == h.cfg.Cluster {
				k.Cluster = h.cfg.Cluster // one string for all
			}
		}
		return brief, err
	}
	for _, a := range askAll(ctx, h, h.owners(), false, list) {
		if a.err != nil {
			errs[a.peer.name] = a.err
		} else {
			leases[a.peer.name] = a.v
		}
	}
	return leases, errs
}

// clock gives epochs.
type clock struct {
	mu        sync.Mutex
	last, top uint64 // top is on the disk
}

// epochStep is how far ahead epochs are written to the disk, in milliseconds: there is at most
// one write in that time, and a restart skips at most that many epochs.
const epochStep = 1000

// Epoch returns the next epoch: milliseconds since 1970, but always larger than the one before,
// whatever the wall clock does.
func (h *Host) Epoch() uint64 {
	c := &h.clock
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = max(c.last+1, uint64(max(0, time.Now().UnixMilli())))
	if c.last > c.top {
		c.top = c.last + epochStep
		if err := h.cfg.Ledger.Put(ledger.Notes, epochNote, c.top); err != nil {
			h.log.Error("epoch cannot be written; it is right as long as the clock is", "error", err)
		}
	}
	return c.last
}

// loadNotes reads the epoch and the ends of jobs.
func (h *Host) loadNotes() error {
	if _, err := h.cfg.Ledger.Get(ledger.Notes, epochNote, &h.clock.top); err != nil {
		return err
	}
	h.clock.last = h.clock.top
	return h.cfg.Ledger.View(func(tx *ledger.Tx) error {
		return tx.All(ledger.Notes, func(key string, raw json.RawMessage) error {
			if !strings.HasPrefix(key, endNote) {
				return nil
			}
			e := new(jobEnd)
			if err := json.Unmarshal(raw, e); err != nil {
				return fmt.Errorf("ledger %s: %s: %w", h.cfg.Ledger.Path(), key, err)
			}
			h.ends[e.name()] = e
			return nil
		})
	})
}
