package owner

// Offer, Admit and Open: how a session begins.

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Offer prepares a session of a lease of host.
func (o *Owner) Offer(_ context.Context, host string, r lease.SessionRequest) (lease.Offer, error) {
	offer, err := o.offer(host, r)
	if err != nil {
		o.refused(host, r, err)
	}
	return offer, err
}

func (o *Owner) offer(host string, r lease.SessionRequest) (lease.Offer, error) {
	o.mu.RLock()
	e, err := o.usable(host, r)
	if err != nil {
		o.mu.RUnlock()
		return lease.Offer{}, err
	}
	tickets, uid := o.tickets, e.rec.Lease.Request.UID
	o.mu.RUnlock()
	if tickets == nil {
		return lease.Offer{}, lease.Errorf(lease.Down, "owner %s does not listen for data yet; ask again", o.cfg.Name)
	}
	if n, ok := ofSession(r.Kind); ok {
		a, can := o.cfg.Workers.(Attacher)
		if !can {
			return lease.Offer{}, lease.Errorf(lease.Invalid, "owner %s takes no further connections of a session", o.cfg.Name)
		}
		if err := a.Attachable(r.Lease, int(n), r.PID); err != nil {
			return lease.Offer{}, err
		}
	} else if _, ok := wire.Traces(r.Kind); !ok {
		if err := o.roomFor(r.Lease); err != nil {
			return lease.Offer{}, err
		}
	}
	// The ledger says for which user the session is, not the host.
	r.UID = uid
	offer, err := tickets.Offer(r)
	if err != nil {
		return lease.Offer{}, err
	}
	o.point("open-1-offered")
	return offer, nil
}

// ofSession gives the session for which its client asks for a further connection.
func ofSession(kind uint32) (n uint32, ok bool) {
	if n, ok = wire.Attaches(kind); !ok {
		n, ok = wire.Bulks(kind)
	}
	return n, ok
}

// usable returns the lease that r names, if host may have a session on it. mu is held.
func (o *Owner) usable(host string, r lease.SessionRequest) (*entry, error) {
	e := o.leases[r.Lease]
	switch {
	case !wire.SessionAsked(r.Kind):
		return nil, lease.Errorf(lease.Invalid, "session of kind %d: want %d or %d", r.Kind, wire.SessionCompute, wire.SessionObserve)
	case e == nil:
		return nil, lease.Errorf(lease.NotFound, "lease %.40q is not known to owner %s: it has ended, or never existed", r.Lease, o.cfg.Name)
	case host != "" && e.rec.Lease.Host != host:
		return nil, lease.Errorf(lease.Denied, "lease %s is not of node %s", r.Lease, host)
	case e.ending:
		return nil, lease.Errorf(lease.Over, "lease %s is ending: %s", r.Lease, e.rec.why())
	case e.rec.Lease.State != lease.Granted:
		return nil, lease.Errorf(lease.Conflict, "lease %s is not granted yet; ask again", r.Lease)
	case e.deadline != 0 && o.clock.Up() >= e.deadline:
		return nil, lease.Errorf(lease.Over, "lease %s: its life time of %v is over", r.Lease, e.rec.Lease.Request.Life)
	}
	return e, nil
}

// roomFor refuses a session beyond the limit. Sessions that are being started count.
func (o *Owner) roomFor(id string) error {
	live := len(o.cfg.Workers.Sessions(id))
	o.mu.RLock()
	defer o.mu.RUnlock()
	if e := o.leases[id]; e != nil && live+e.starting >= o.limits.Sessions {
		return lease.Errorf(lease.NoRoom, "lease %s has %d sessions, as many as it may; end a process, or raise session.max_per_lease on %s", id, live+e.starting, o.cfg.Name)
	}
	return nil
}

// Admit starts the session of a connection whose ticket was good. r is what the ticket was for.
// Admit closes conn; the worker has a descriptor of its own.
func (o *Owner) Admit(ctx context.Context, r lease.SessionRequest, conn *os.File) error {
	defer conn.Close()
	if n, ok := wire.Attaches(r.Kind); ok {
		return o.attach(r, int(n), conn)
	}
	if pid, ok := wire.Traces(r.Kind); ok {
		return o.trace(r, pid, conn)
	}
	if n, ok := wire.Bulks(r.Kind); ok {
		return o.bulk(r, int(n), conn)
	}
	s, err := o.admitSession(ctx, r, conn)
	if err != nil {
		o.refused("", r, err)
		return err
	}
	o.log.Info("session", "session", s.ID, "lease", r.Lease, "pid", s.Worker.PID, "client", r.Program, "client_pid", r.PID)
	o.point("open-3-audited")
	return nil
}

// attach passes a new connection to a session whose connection was lost. The session decides whether it is its client's.
func (o *Owner) attach(r lease.SessionRequest, n int, conn *os.File) error {
	o.mu.RLock()
	_, err := o.usable("", r)
	o.mu.RUnlock()
	if a, can := o.cfg.Workers.(Attacher); err == nil && can {
		err = a.Attach(r.Lease, n, conn)
	}
	if err != nil {
		o.refused("", r, err)
		return err
	}
	o.counts.attached.Add(1)
	o.log.Info("session goes on over a new connection", "lease", r.Lease, "number", n, "client", r.Program, "client_pid", r.PID)
	return nil
}

// trace passes a connection to the session that is to be traced. The session reads the request.
func (o *Owner) trace(r lease.SessionRequest, pid uint32, conn *os.File) error {
	o.mu.RLock()
	_, err := o.usable("", r)
	o.mu.RUnlock()
	if a, can := o.cfg.Workers.(Attacher); err == nil && can {
		err = a.Trace(r.Lease, pid, conn)
	}
	if err != nil {
		o.refused("", r, err)
		return err
	}
	o.log.Info("session traced", "lease", r.Lease, "client_pid", pid, "by", form.Name(r.Program), "by_pid", r.PID)
	return nil
}

// bulk passes a bulk connection to its session, which decides whether it is its client's.
func (o *Owner) bulk(r lease.SessionRequest, n int, conn *os.File) error {
	o.mu.RLock()
	_, err := o.usable("", r)
	o.mu.RUnlock()
	if a, can := o.cfg.Workers.(Attacher); err == nil && can {
		err = a.Bulk(r.Lease, n, conn)
	}
	if err != nil {
		o.refused("", r, err)
		return err
	}
	o.log.Debug("bulk connection", "lease", r.Lease, "number", n, "client", form.Name(r.Program), "client_pid", r.PID)
	return nil
}

// Gone implements lease.Mourner.
func (o *Owner) Gone(_ context.Context, host, id string, pid uint32) error {
	o.mu.RLock()
	e := o.leases[id]
	mine := e != nil && e.rec.Lease.Host == host
	o.mu.RUnlock()
	if !mine {
		return lease.Errorf(lease.NotFound, "lease %.40q of node %s is not known to owner %s", id, host, o.cfg.Name)
	}
	if a, can := o.cfg.Workers.(Attacher); can && pid != 0 {
		a.EndClient(id, pid)
	}
	return nil
}

func (o *Owner) admitSession(ctx context.Context, r lease.SessionRequest, conn *os.File) (lease.Session, error) {
	// A session that is being started counts from here, so it is registered before the others
	// are counted.
	o.mu.Lock()
	e, err := o.usable("", r)
	if err != nil {
		o.mu.Unlock()
		return lease.Session{}, err
	}
	begun := make(chan struct{})
	if e.starting++; e.begun == nil {
		e.begun = map[chan struct{}]bool{}
	}
	e.begun[begun] = true
	e.opens++
	l, limit := e.rec.Lease, o.limits.Sessions
	o.mu.Unlock()
	defer o.startedOne(e, begun)
	live := len(o.cfg.Workers.Sessions(l.ID))
	o.mu.RLock()
	n := live + e.starting
	o.mu.RUnlock()
	if n > limit {
		return lease.Session{}, lease.Errorf(lease.NoRoom, "lease %s has %d sessions, as many as it may; end a process, or raise session.max_per_lease on %s", l.ID, n-1, o.cfg.Name)
	}
	gpus, err := o.granted(&l)
	if err != nil {
		return lease.Session{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	s, err := o.cfg.Workers.Start(ctx, l, r, conn, gpus)
	if err != nil {
		return lease.Session{}, fmt.Errorf("session of lease %s: %w", l.ID, err)
	}
	o.counts.opened.Add(1)
	o.point("open-2-started")
	reason := ""
	if r.Part != nil {
		reason = r.Part.String()
	}
	ev := o.event(audit.SessionOpen, &l, reason)
	ev.GPUs, ev.Session, ev.PID, ev.Program = nil, s.ID, r.PID, r.Program
	_ = o.cfg.Audit.Write(ev)
	return s, nil
}

// startedOne removes a session from those that are being started.
func (o *Owner) startedOne(e *entry, begun chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(e.begun, begun)
	close(begun)
	if e.starting--; e.starting == 0 && e.ending {
		close(e.idle)
	}
}

// granted returns the GPUs of a lease's grants.
func (o *Owner) granted(l *lease.Lease) ([]lease.GPU, error) {
	known, _ := o.cfg.Devices()
	gpus := make([]lease.GPU, 0, len(l.Grants))
	for _, gr := range l.Grants {
		found := false
		for _, g := range known {
			if g.UUID != gr.GPU {
				continue
			}
			if !g.Healthy {
				return nil, lease.Errorf(lease.Down, "gpu %d of %s is not healthy: %s", g.Index, o.cfg.Name, g.Why)
			}
			g.Owner = o.cfg.Name
			gpus, found = append(gpus, g), true
		}
		if !found {
			return nil, lease.Errorf(lease.Down, "gpu %s of lease %s is gone from %s; see sluice health", gr.GPU, l.ID, o.cfg.Name)
		}
	}
	return gpus, nil
}

// Open starts a session on this node and returns the client's end of its socket.
func (o *Owner) Open(ctx context.Context, r lease.SessionRequest) (*os.File, error) {
	o.mu.RLock()
	_, err := o.usable(o.cfg.Name, r)
	o.mu.RUnlock()
	if err != nil {
		o.refused(o.cfg.Name, r, err)
		return nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, lease.Errorf(lease.Internal, "session of lease %s: socket pair: %v", r.Lease, err)
	}
	client := os.NewFile(uintptr(fds[0]), "session client")
	if err := o.Admit(ctx, r, os.NewFile(uintptr(fds[1]), "session worker")); err != nil {
		client.Close()
		return nil, err
	}
	return client, nil
}

func (o *Owner) refused(host string, r lease.SessionRequest, err error) {
	if _, ok := wire.Bulks(r.Kind); ok { // its session does not depend on it
		o.log.Debug("bulk connection refused", "lease", form.Name(r.Lease), "host", host, "client_pid", r.PID, "reason", err)
		return
	}
	o.counts.sessionsRefused.Add(1)
	skipped, ok := o.refusal(host, r.UID)
	if !ok {
		return
	}
	o.log.Warn("session refused", "lease", form.Name(r.Lease), "host", host, "uid", r.UID, "client_pid", r.PID, "reason", err, "skipped", skipped)
	_ = o.cfg.Audit.Write(audit.Event{Time: o.clock.Now(), Event: audit.SessionRefuse, Lease: form.Name(r.Lease), Host: host, Owner: o.cfg.Name, UID: audit.UID(r.UID), PID: r.PID, Program: r.Program, Reason: err.Error(), Skipped: skipped})
}

// refusal says whether a refusal to a host, for one of its users, is to be logged, and how many
// of theirs were left out before it. A user may cause as many as the host's daemon can send.
func (o *Owner) refusal(host string, uid uint32) (skipped uint64, ok bool) {
	return o.refusals.Pass(fmt.Sprintf("%d@%s", uid, form.Name(host)))
}

// sessionEnded is called by Workers, which keep the record of the session until it returns: if
// the daemon is killed before that, the next one calls it.
func (o *Owner) sessionEnded(s lease.Session, reason string) {
	ev := audit.Event{Time: o.clock.Now(), Event: audit.SessionEnd, Lease: s.Lease, Owner: o.cfg.Name, Session: s.ID, PID: s.Client, Program: s.Program, Reason: reason}
	var starting []chan struct{}
	o.mu.RLock()
	if e := o.leases[s.Lease]; e != nil {
		l := &e.rec.Lease
		ev.Key, ev.UID, ev.Host = l.Request.Key.String(), audit.UID(l.Request.UID), l.Host
		starting = slices.Collect(maps.Keys(e.begun))
	}
	o.mu.RUnlock()
	for _, begun := range starting {
		<-begun // the start of this very session may not be in the log yet
	}
	level := slog.LevelInfo
	if strings.HasPrefix(reason, "killed by") || strings.HasPrefix(reason, "exit ") {
		level = slog.LevelWarn // a worker never ends like this by itself
	}
	o.log.Log(o.ctx, level, "session ended", "session", s.ID, "lease", s.Lease, "reason", reason, "calls", s.Counts.Calls, "errors", s.Counts.Errors)
	_ = o.cfg.Audit.Write(ev)
}
