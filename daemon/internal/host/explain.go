package host

// What became of a job, by this node's audit log and by what the owners tell. The log may have a
// gigabyte, and any user may ask. So few questions are answered at the same time, each within a
// time limit, and only the lines that may be about the job are decoded.
//
//	1  lines with the job's key -> the ids of its leases, since not every line has the key
//	2  lines with the key or one of these ids, in order
//	3  what the owners know of its leases and no line has: grants, ends, and what was used

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// maxEvents is the most lines of the audit log that one question gets: the last ones.
	maxEvents = 1000
	// explainTime bounds one question.
	explainTime = 20 * time.Second
)

// Explain implements rpc.LocalService. A user sees the lines about the user's own leases.
func (h *Host) Explain(ctx context.Context, p rpc.Peer, job string) ([]rpc.Event, error) {
	if job == "" || len(job) > form.MaxName {
		return nil, lease.Errorf(lease.Invalid, "explain: say the job")
	}
	if h.cfg.AuditFile == "" {
		return nil, lease.Errorf(lease.NotFound, "this daemon keeps no audit log")
	}
	if err := h.explains.enter(p.UID); err != nil {
		return nil, err
	}
	defer h.explains.leave(p.UID)
	ctx, cancel := context.WithTimeout(ctx, explainTime)
	defer cancel()
	events, err := h.explain(ctx, p, job)
	if err == nil {
		events = h.withReports(ctx, p, job, events)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, lease.Errorf(lease.Down, "job %s: the audit log could not be read within %v; ask when the node is less busy, or see %s", form.Name(job), explainTime, h.cfg.AuditFile)
	} else if err != nil {
		return nil, lease.Errorf(lease.Internal, "%v", err)
	}
	return events, nil
}

func (h *Host) explain(ctx context.Context, p rpc.Peer, job string) ([]rpc.Event, error) {
	theirs := func(e *audit.Event) bool { return p.UID == 0 || e.UID != nil && p.May(*e.UID) }
	key, err := json.Marshal("/" + job)
	if err != nil {
		return nil, err
	}
	key = key[1 : len(key)-1] // as it stands within a line's key
	ids := make(map[string]bool)
	err = audit.Select(ctx, h.cfg.AuditFile, func(line []byte) bool { return bytes.Contains(line, key) }, func(e *audit.Event) bool {
		if e.Lease != "" && theirs(e) && lease.ParseKey(e.Key, 0).Job == job {
			ids[e.Lease] = true
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	var events []rpc.Event
	about := func(line []byte) bool { return ids[audit.LeaseOf(line)] || bytes.Contains(line, key) }
	err = audit.Select(ctx, h.cfg.AuditFile, about, func(e *audit.Event) bool {
		k := lease.ParseKey(e.Key, e.Incarnation)
		if k.Job != job && !ids[e.Lease] || !theirs(e) {
			return true
		}
		ev := rpc.Event{Time: e.Time, Seq: e.Seq, Event: e.Event, Node: h.cfg.Node, Lease: e.Lease, Key: k, Host: e.Host, Owner: e.Owner, Reason: e.Reason, Grants: e.GPUs, Times: e.Times}
		if e.UID != nil {
			ev.UID = *e.UID
		}
		for _, g := range e.GPUs {
			ev.GPUs = append(ev.GPUs, g.GPU)
		}
		if len(events) == maxEvents {
			events = slices.Delete(events, 0, maxEvents/2)
		}
		events = append(events, ev)
		return true
	})
	return events, err
}

// Used is the event of a lease's use, which is in no audit log: its time is the lease's end, or now.
const Used = "used"

// withReports adds what the owners know of the job's leases. What a line tells already is not
// told again: the job's node, the controller and the owner each write their own of one grant and one end.
func (h *Host) withReports(ctx context.Context, p rpc.Peer, job string, events []rpc.Event) []rpc.Event {
	granted, ended := make(map[string]bool), make(map[string]bool)
	for _, e := range events {
		switch e.Event {
		case audit.Grant:
			granted[e.Lease] = true
		case audit.Release, audit.Reclaim:
			ended[e.Lease] = true
		}
	}
	owners, _ := h.ownersOf(h.cfg.Cluster, job)
	reports, silent := h.reports(ctx, owners, h.cfg.Cluster, job)
	for _, r := range reports {
		if r.Lease == "" || !p.May(r.UID) {
			continue
		}
		e := rpc.Event{Node: r.Owner, Lease: r.Lease, Key: r.Key, UID: r.UID, Host: r.Key.Node, Owner: r.Owner}
		if !granted[r.Lease] {
			g := e
			g.Event, g.Time, g.Grants = audit.Grant, r.Made, r.Grants
			for _, of := range r.Grants {
				g.GPUs = append(g.GPUs, of.GPU)
			}
			events = append(events, g)
		}
		u := e
		u.Event, u.Time, u.Reason = Used, time.Now().UTC(), used(&r)
		if !r.Ended.IsZero() {
			u.Time = r.Ended
			if !ended[r.Lease] {
				e.Event, e.Time, e.Reason = audit.Release, r.Ended, r.Reason
				events = append(events, e)
			}
		}
		events = append(events, u)
	}
	for _, s := range silent {
		if len(events) > 0 {
			events = append(events, rpc.Event{Time: time.Now().UTC(), Event: "silent", Node: h.cfg.Node, Reason: "not asked, what it knows is missing here: " + s})
		}
	}
	slices.SortStableFunc(events, func(a, b rpc.Event) int { return a.Time.Compare(b.Time) })
	return events[max(0, len(events)-maxEvents):]
}

// used says what a lease has used of what it has.
func used(r *lease.Report) string {
	since := ""
	switch {
	case r.Lost && r.Sessions == 0:
		return "not known: counts were lost with the reboot of " + r.Owner
	case r.Lost:
		since = "counts were lost with the reboot of " + r.Owner + "; since then "
	case r.Sessions == 0:
		if r.Ended.IsZero() {
			return "nothing so far: no program of the job has used the GPU yet"
		}
		return "nothing: no program of the job used the GPU"
	}
	var peak, mem uint64
	for _, u := range r.Use {
		peak += u.Peak
	}
	for _, g := range r.Grants {
		mem += g.Mem
	}
	failed := ""
	if r.Failed > 0 {
		failed = fmt.Sprintf("; %d of the sessions failed, the last one of %s", r.Failed, r.Failure)
	}
	return since + fmt.Sprintf("at most %d MiB of %d MiB, %v of GPU time, %d sessions, %d calls", form.MiB(peak), mem>>20, r.GPUTime.Round(100*time.Millisecond), r.Sessions, r.Counts.Calls) + failed
}
