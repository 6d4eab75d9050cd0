package owner

// Idle leases: those whose sessions have had no work for the GPU for longer than the site says, and those without sessions.
//
// Each look compares what a lease has done so far with what it had done when it last worked:
//
//	launches     any more of them is work
//	GPU time     by events on the GPU and NVML's samples
//	waiting      work that waits for its turn
//	bytes        copies, if they have come to `copied` bytes since the last work: a program that only queries moves fewer
//
// A program whose connection is lost cannot work, so the time of a cut does not count. The time of all cuts since the last work is
// bounded by the lease's grace.
//
// Except for NVML's samples, the numbers come from the sessions themselves, so a program that wants to look busy can. A new daemon
// counts from its own start. So after a restart a lease is found idle later than without one, never earlier.

import (
	"context"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// What is done about an idle lease, besides a line in both logs and the site's command.
const (
	IdleNote = "note" // nothing
	IdleLend = "lend" // others may use its time until it works again
	IdleEnd  = "end"  // it ends
)

const (
	// idleEvery is the time between two looks.
	idleEvery = 5 * time.Second
	// copied is how many bytes to or from the client count as work.
	copied = 1 << 20
	// cutMargin is what cuts may last beyond the grace: a session learns of the end of its grace late if its node is busy.
	cutMargin = 10 * time.Second
)

// Idle says what becomes of leases without work.
type Idle struct {
	After   time.Duration // 0: nothing
	Action  string
	Command string // "" none
}

// Idles has an Idle for each pool that differs from the others.
type Idles struct {
	Default Idle
	Pools   map[string]Idle // not changed once it is here
}

func (i *Idles) of(pool string) Idle {
	if p, ok := i.Pools[pool]; ok {
		return p
	}
	return i.Default
}

// Notice is that a lease is idle, for a program of the site's.
type Notice struct {
	Command string
	Lease   lease.Lease
	Idle    time.Duration
	Action  string
}

// Lender is what Workers may implement besides: leases that lend their time whatever their policy says.
type Lender interface {
	// Lend begins or ends that for a lease.
	Lend(leaseID string, lend bool)
}

// Cutter is what Workers may implement besides: sessions that outlive their connections.
type Cutter interface {
	// Cut says since when a lease has had a session without a connection, by the time since boot, and for how long it waits for one.
	// 0 is that it has none. What a session says is not checked.
	Cut(l lease.Lease) (since, grace time.Duration)
}

// work is what a lease has done so far.
type work struct {
	launches, bytes uint64
	gpu, waited     time.Duration
}

// activity is what is known of a lease's work. The owner's mu guards it.
type activity struct {
	last  work          // when it last worked
	since time.Duration // since boot: when that was, and later by the time of cuts
	seen  time.Duration // since boot: the last look
	cut   time.Duration // by how much since is later
	done  string        // the action that was taken since, "" for none
	lends bool
}

func (w *work) more(than *work) bool {
	return w.launches > than.launches || w.gpu > than.gpu || w.waited > than.waited || w.bytes >= than.bytes+copied
}

// workOf asks the workers.
func (o *Owner) workOf(id string) work {
	t := o.cfg.Workers.Total(id)
	return work{t.Counts.Launches, t.Counts.BytesIn + t.Counts.BytesOut, t.GPUTime, lease.SumShares(o.cfg.Workers.Shares(id)).Waited}
}

// cutOf asks the workers since when a session of the lease is cut, and for how long it may be.
func (o *Owner) cutOf(l lease.Lease) (since, grace time.Duration) {
	if c, ok := o.cfg.Workers.(Cutter); ok {
		return c.Cut(l)
	}
	return 0, 0
}

// pause leaves out the time since the last look in which a session was cut.
func (a *activity) pause(now, cut, grace time.Duration) {
	from := max(cut, a.seen, a.since)
	a.seen = now
	if cut <= 0 {
		return
	}
	d := max(0, min(now-from, grace+cutMargin-a.cut))
	a.since, a.cut = a.since+d, a.cut+d
}

// idleOf returns for how long a lease has had no work, and whether that has been noted. mu is held.
func (o *Owner) idleOf(e *entry, now time.Duration) (idle time.Duration, noted bool) {
	if e.ending || e.rec.Lease.State != lease.Granted {
		return 0, false
	}
	return max(0, now-e.activity.since), e.activity.done != ""
}

// turn is what a look has found to do.
type turn struct {
	e      *entry
	l      lease.Lease
	act    Idle // Action "" if nothing is to be done
	idle   time.Duration
	opens  uint64 // sessions ever started at that time
	lend   bool
	change bool // of lend
}

// lookIdle looks at all leases, and does what the site says about those without work.
func (o *Owner) lookIdle(ctx context.Context) {
	type granted struct {
		e *entry
		l lease.Lease
	}
	var all []granted
	o.mu.RLock()
	for _, e := range o.leases {
		if !e.ending && e.rec.Lease.State == lease.Granted {
			all = append(all, granted{e, e.rec.Lease})
		}
	}
	o.mu.RUnlock()
	for _, g := range all {
		done := o.workOf(g.l.ID)
		cut, grace := o.cutOf(g.l)
		o.mu.Lock()
		g.e.activity.pause(o.clock.Up(), cut, grace)
		t, ok := o.judgeIdle(g.e, &done)
		o.mu.Unlock()
		if ok && ctx.Err() == nil {
			o.actIdle(t)
		}
	}
}

// judgeIdle notes what a lease has done, and says what is to be done about it. mu is held.
func (o *Owner) judgeIdle(e *entry, done *work) (turn, bool) {
	if e.ending || e.rec.Lease.State != lease.Granted || o.leases[e.id] != e {
		return turn{}, false
	}
	now, a := o.clock.Up(), &e.activity
	t := turn{e: e, l: e.rec.Lease, opens: e.opens}
	if done.more(&a.last) {
		if t.idle = now - a.since; a.done != "" {
			o.log.Info("an idle lease works again", "lease", e.id, "job", t.l.Request.Key.String(), "idle", t.idle.Round(time.Second))
		}
		a.last, a.since, a.cut, a.done = *done, now, 0, ""
	}
	t.idle = now - a.since
	site := o.limits.Idle.of(t.l.Request.Pool)
	over := site.After > 0 && t.idle >= site.After
	if over && a.done != site.Action {
		a.done, t.act = site.Action, site
	} else if !over {
		a.done = "" // the site may have changed its mind
	}
	t.lend = over && site.Action == IdleLend
	t.change, a.lends = t.lend != a.lends, t.lend
	return t, t.change || t.act.Action != ""
}

// actIdle does what judgeIdle said.
func (o *Owner) actIdle(t turn) {
	if lender, ok := o.cfg.Workers.(Lender); ok && t.change {
		lender.Lend(t.e.id, t.lend)
	}
	if t.act.Action == "" {
		return
	}
	idle := t.idle.Round(time.Second)
	reason := "idle: no work for " + idle.String() + ", lease.idle in sluice.yaml of " + o.cfg.Name + ": " + t.act.Action
	ends := t.act.Action == IdleEnd
	if ends && !o.markIdle(&t, reason) {
		return
	}
	o.log.Warn("lease is idle", "lease", t.e.id, "job", t.l.Request.Key.String(), "uid", t.l.Request.UID, "host", t.l.Host, "idle", idle, "action", t.act.Action)
	_ = o.cfg.Audit.Write(o.event(audit.Idle, &t.l, reason)) // the audit log counts the lines that it loses
	if ends {
		o.finish(t.e) // after the line that says why: the ends of its sessions are lines of that log too
	}
	if t.act.Command != "" && o.cfg.Notice != nil {
		o.cfg.Notice(Notice{Command: t.act.Command, Lease: t.l, Idle: t.idle, Action: t.act.Action})
	}
}

// markIdle writes down that a lease ends, unless it has got a session meanwhile.
func (o *Owner) markIdle(t *turn, reason string) bool {
	o.write.Lock()
	defer o.write.Unlock()
	o.mu.Lock()
	still := !t.e.ending && o.leases[t.e.id] == t.e && t.e.starting == 0 && t.e.opens == t.opens
	if !still {
		t.e.activity.done = "" // the next look sees
	}
	o.mu.Unlock()
	if still {
		o.point("reclaim-1-found")
		o.mark(t.e, ending{audit.Reclaim, reason, true})
	}
	return still
}
