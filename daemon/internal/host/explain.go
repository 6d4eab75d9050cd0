package host

// What became of a job, by the audit log. The log may have a gigabyte, and any user may ask. So
// few questions are answered at the same time, each within a time limit, and only the lines
// that may be about the job are decoded.
//
//	1  lines with the job's key -> the ids of its leases, since not every line has the key
//	2  lines with the key or one of these ids, in order

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
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
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, lease.Errorf(lease.Down, "job %s: the audit log could not be read within %v; ask when the node is less busy, or see %s", form.Name(job), explainTime, h.cfg.AuditFile)
	} else if err != nil {
		return nil, lease.Errorf(lease.Internal, "%v", err)
	}
	return events, nil
}

func (h *Host) explain(ctx context.Context, p rpc.Peer, job string) ([]rpc.Event, error) {
	theirs := func(e *audit.Event) bool { return p.UID == 0 || e.UID != nil && *e.UID == p.UID }
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
		ev := rpc.Event{Time: e.Time, Seq: e.Seq, Event: e.Event, Node: h.cfg.Node, Lease: e.Lease, Key: k, Host: e.Host, Owner: e.Owner, Reason: e.Reason}
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
