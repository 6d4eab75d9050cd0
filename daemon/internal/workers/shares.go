package workers

// Compute time. Every GPU has a schedule (package turns), every granted lease is a tenant of its
// GPUs' schedules, and sessions take turns by themselves. This file does the rest:
//
//	Share        makes a lease a tenant, or changes its policy. A lease is a tenant from its grant
//	             on, because policy equal counts leases whether they have sessions or not
//	Start        sends the lease's tenants, and the schedules' files, with the START message
//	clearMember  clears what a session that has ended left on the schedules
//	Forget       removes the tenants; until then they say how much time the lease has had
//	SetSharing   gives all tenants the policy of a reloaded configuration
//	WatchTurns   finds work that stays on a GPU far beyond its turn. Where the policy ends the
//	             sessions of such work, they end by themselves, whether a daemon runs or not.
//	             WatchTurns ends those that do not
//
// The schedules' files outlive the daemon. The next daemon finds tenants there by their leases'
// names; Leases lists those whose lease it does not know, for the owner to end.
//
// mu guards all of it, including the schedules.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// Sharing says how compute time is shared.
type Sharing struct {
	Quantum     time.Duration // of a turn
	EqualActive bool          // policy equal counts leases with work, not all
	Lend        bool          // leases lend their time unless they say otherwise
	Limit       time.Duration // how long work may outlast its turn, 0 for no limit
	Overrun     turns.Overrun // which sessions end when their work exceeds the limit
}

// Overrun describes work that has outlasted its turn for longer than the limit.
type Overrun struct {
	Lease  lease.Lease
	GPU    string
	PID    int           // the session's process, 0 if it is not known
	Time   time.Duration // 0 if the session ended itself; Reason then says how long
	Limit  time.Duration
	Ended  bool // its session was ended for it
	Reason string
}

const policySuffix = ".policy"

// tenancy says which tenant a lease is on each of its GPUs' schedules.
type tenancy struct {
	lease   lease.Lease               // it has no grants until Share was called for it
	tenants map[string]int            // by GPU
	parts   map[uint32]map[string]int // tenants of the lease's parts, by step and GPU
	excess  map[string]time.Duration  // by GPU, see noteExcess
	err     error                     // why it is not a tenant of all its GPUs
}

// openSchedules opens the schedules of an earlier daemon.
func (p *Pool) openSchedules() error {
	p.tenancies, p.schedules, p.overdue = map[string]*tenancy{}, map[string]*turns.Schedule{}, map[overrunKey]overdueWork{}
	p.readings = map[string]reading{}
	if p.cfg.Turns == "" {
		return nil
	}
	if err := os.MkdirAll(p.cfg.Turns, 0o700); err != nil {
		return fmt.Errorf("turns: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(p.cfg.Turns, "*"+policySuffix))
	if err != nil {
		return fmt.Errorf("turns: %w", err)
	}
	for _, f := range files {
		gpu := strings.TrimSuffix(filepath.Base(f), policySuffix)
		b, err := p.schedule(gpu)
		if err != nil {
			// Present sessions go on with it. New ones are refused until it can be used.
			p.log.Error("the schedule of a GPU's turns cannot be used", "gpu", gpu, "error", err)
			continue
		}
		for _, c := range b.Read() {
			s := p.tenancies[c.Lease]
			if s == nil {
				s = newTenancy(lease.Lease{ID: c.Lease})
				p.tenancies[c.Lease] = s
			}
			s.found(gpu, &c)
		}
	}
	return nil
}

func newTenancy(l lease.Lease) *tenancy {
	return &tenancy{lease: l, tenants: map[string]int{}, parts: map[uint32]map[string]int{}, excess: map[string]time.Duration{}}
}

// found notes a tenant that an earlier daemon has made.
func (t *tenancy) found(gpu string, c *turns.TenantCounters) {
	step, err := strconv.ParseUint(c.Part, 10, 32)
	if err != nil {
		t.tenants[gpu] = c.Tenant
		return
	}
	if t.parts[uint32(step)] == nil {
		t.parts[uint32(step)] = map[string]int{}
	}
	t.parts[uint32(step)][gpu] = c.Tenant
}

// all returns the tenants of the lease and its parts on a GPU.
func (t *tenancy) all(gpu string) (n []int) {
	if i, ok := t.tenants[gpu]; ok {
		n = append(n, i)
	}
	for _, at := range t.parts {
		if i, ok := at[gpu]; ok {
			n = append(n, i)
		}
	}
	return n
}

// schedule returns a GPU's schedule, and opens it if need be. mu is held, except at the start.
func (p *Pool) schedule(gpu string) (*turns.Schedule, error) {
	if b := p.schedules[gpu]; b != nil {
		return b, nil
	}
	b, err := turns.Create(p.cfg.Turns, gpu, p.site())
	if err != nil {
		return nil, fmt.Errorf("gpu %s: %w", gpu, err)
	}
	p.schedules[gpu] = b
	return b, nil
}

func (p *Pool) site() turns.Site {
	return turns.Site{Quantum: p.sharing.Quantum, EqualActive: p.sharing.EqualActive, Limit: p.sharing.Limit, Overrun: p.sharing.Overrun}
}

// policy returns a grant's policy in the form that schedules use.
func (p *Pool) policy(l *lease.Lease, g lease.Grant) turns.Policy {
	q := l.Request
	out := turns.Policy{Kind: turns.BestEffort, Weight: g.Percent * (turns.FullWeight / 100), Lend: q.Lend == lease.LendYes || q.Lend == lease.LendSite && p.sharing.Lend || p.idle[l.ID]}
	switch q.Policy {
	case lease.Fixed:
		out.Kind = turns.Fixed
	case lease.Equal:
		out.Kind = turns.Equal
	}
	return out
}

// Share implements owner.Workers.
func (p *Pool) Share(l lease.Lease) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cfg.Turns == "" {
		return nil
	}
	return p.share(l)
}

// share makes a lease a tenant of its GPUs' schedules. mu is held.
func (p *Pool) share(l lease.Lease) error {
	s := p.tenancies[l.ID]
	if s == nil {
		s = newTenancy(l)
		p.tenancies[l.ID] = s
	}
	s.lease = l
	clear(p.readings)
	var errs []error
	for _, g := range l.Grants {
		b, err := p.schedule(g.GPU)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		rest, parts := p.divide(&l, g)
		n, err := b.Add(l.ID, rest)
		if err != nil {
			errs = append(errs, fmt.Errorf("gpu %s: %w", g.GPU, err))
			continue
		}
		s.tenants[g.GPU] = n
		if err := p.shareParts(s, g.GPU, rest, parts); err != nil {
			errs = append(errs, err)
		}
	}
	s.err = errors.Join(errs...)
	p.keepDebts(l.ID)
	return s.err
}

// Lend implements owner.Lender. It lasts as long as this daemon.
func (p *Pool) Lend(id string, lend bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.tenancies[id]
	if s == nil || len(s.lease.Grants) == 0 || p.idle[id] == lend {
		return
	}
	if p.idle[id] = lend; !lend {
		delete(p.idle, id)
	}
	if err := p.share(s.lease); err != nil {
		p.log.Error("a lease's share of compute time cannot be kept", "lease", id, "error", err)
	}
}

// Unscheduled returns the leases that could not be made tenants of their GPUs' schedules, and why.
// No sessions are started for them.
func (p *Pool) Unscheduled() map[string]error {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]error{}
	for id, s := range p.tenancies {
		if s.err != nil {
			out[id] = s.err
		}
	}
	return out
}

// startTurns returns the tenants of a session's lease, or its part, for the START message, and duplicates of the schedules' files
// to send with it. The caller closes the duplicates; the schedules themselves may be closed meanwhile.
// Without turns there are no files, and the session may work at any time.
func (p *Pool) startTurns(session *session, l lease.Lease) (at []control.Turn, files []*os.File, _ error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.cfg.Turns == "":
		return control.NoTurns(len(l.Grants)), nil, nil
	case p.closed:
		return nil, nil, errors.New("the daemon is stopping")
	}
	s := p.tenancies[l.ID]
	if s != nil && len(s.lease.Grants) > 0 {
		l = s.lease // it may have been changed since the caller read it
	}
	if s == nil || s.err != nil || len(s.lease.Grants) == 0 || session.part != nil && s.parts[session.part.Step] == nil {
		if err := p.share(l); err != nil {
			return nil, nil, fmt.Errorf("its share of compute time cannot be kept: %w", err)
		}
	}
	p.keepDebts(l.ID)
	tenants := p.tenancies[l.ID].tenants
	if session.part != nil {
		tenants = p.tenancies[l.ID].parts[session.part.Step]
	}
	for _, g := range l.Grants {
		at = append(at, control.Turn{Tenant: tenants[g.GPU]})
		policy, state := p.schedules[g.GPU].Files()
		for _, f := range []*os.File{policy, state} {
			fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				for _, f := range files {
					f.Close()
				}
				return nil, nil, fmt.Errorf("schedule of GPU %s: %w", g.GPU, err)
			}
			files = append(files, os.NewFile(uintptr(fd), f.Name()))
		}
	}
	return at, files, nil
}

// keepDebts has the schedules keep the debts of a lease and its parts in their accounts, which no other lease's sessions can write. mu is held.
func (p *Pool) keepDebts(id string) {
	l, s := p.leases[id], p.tenancies[id]
	if l == nil || l.file == nil || s == nil {
		return
	}
	for dev, gpu := range l.gpus {
		n, tenant := s.tenants[gpu]
		b := p.schedules[gpu]
		if debts, ok := l.file.Debts(dev); ok && tenant && b != nil {
			b.Keep(n, debts)
		}
		for step, x := range l.parts {
			n, tenant := s.parts[step][gpu]
			if debts, ok := x.file.Debts(dev); ok && tenant && b != nil {
				b.Keep(n, debts)
			}
		}
	}
}

// clearMember clears what a session whose process has ended left on the schedules. mu is held.
func (p *Pool) clearMember(s *session) {
	if s.Worker.PID == 0 {
		return
	}
	clear(p.readings)
	for _, g := range s.l.gpus {
		if b := p.schedules[g]; b != nil {
			b.Gone(s.Worker.PID, s.Worker.Start)
		}
	}
}

// removeTenants takes a lease off the schedules. mu is held.
func (p *Pool) removeTenants(id string) {
	s := p.tenancies[id]
	if s == nil {
		return
	}
	clear(p.readings)
	for gpu, b := range p.schedules {
		for _, n := range s.all(gpu) {
			b.Remove(n)
		}
	}
	delete(p.tenancies, id)
	delete(p.idle, id)
}

// Shares implements owner.Workers.
func (p *Pool) Shares(id string) []lease.Share {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sharesOf(id)
}

func (p *Pool) sharesOf(id string) []lease.Share {
	s := p.tenancies[id]
	if s == nil || len(s.lease.Grants) == 0 {
		return nil
	}
	out := make([]lease.Share, len(s.lease.Grants))
	for i, g := range s.lease.Grants {
		out[i] = p.readingOf(g.GPU)[id]
	}
	return out
}

// readingAge is how old a reading of a schedule may be. A scrape of the metrics asks for one lease after the other, and all leases of a GPU
// share a reading then.
const readingAge = 20 * time.Millisecond

// reading is what the leases have had of a GPU's time.
type reading struct {
	at     time.Time
	shares map[string]lease.Share // by lease
}

// readingOf returns a reading of a GPU's schedule that is at most readingAge old. mu is held.
func (p *Pool) readingOf(gpu string) map[string]lease.Share {
	r, b := p.readings[gpu], p.schedules[gpu]
	if b == nil || time.Since(r.at) <= readingAge {
		return r.shares
	}
	all := b.Read()
	r = reading{time.Now(), make(map[string]lease.Share, len(all))}
	for i := range all {
		s := r.shares[all[i].Lease]
		addShare(&s, &all[i])
		r.shares[all[i].Lease] = s
	}
	p.readings[gpu] = r
	return r.shares
}

// addShare adds what a tenant has had to that of its lease.
func addShare(s *lease.Share, c *turns.TenantCounters) {
	s.Due += c.Share
	s.Held += c.Held
	s.Busy += c.Busy
	s.Waited += c.Waited
	s.Throttled += c.Throttled
	s.Lent += c.Lent
	s.Borrowed += c.Borrowed
	s.Longest = max(s.Longest, c.Longest)
	s.Turns += c.Turns
	s.Overruns += c.Overruns
	s.Revoked += c.Revoked
}

// SetSharing changes how time is shared, from the next turn on.
func (p *Pool) SetSharing(s Sharing) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sharing = s
	if p.cfg.Turns == "" {
		return
	}
	for _, b := range p.schedules {
		b.SetSite(p.site())
	}
	for id, at := range p.tenancies {
		if len(at.lease.Grants) == 0 {
			continue
		}
		if err := p.share(at.lease); err != nil {
			p.log.Error("a lease's share of compute time cannot be kept", "lease", id, "error", err)
		}
	}
}

// overrunKey names a session whose work stays on a GPU.
type overrunKey struct {
	gpu   string
	lease string
	pid   int
}

// overdueWork is what is known of work that stays on a GPU while others wait.
type overdueWork struct {
	seen      time.Time     // when it was last seen
	delayed   bool          // then other work delayed it
	undelayed time.Duration // for how long it has been seen that nothing delayed it
	excused   time.Duration // and for how long that other work did
	reported  bool
	ending    bool // it was reported, and its session is to end
}

// WatchTurns checks the schedules at intervals until ctx ends. It clears what was left by sessions whose end nobody
// noticed, and calls report once for work that exceeds the site's limit.
func (p *Pool) WatchTurns(ctx context.Context, report func(Overrun)) error {
	if p.cfg.Turns == "" {
		return nil
	}
	swept := time.Time{}
	for {
		if now := time.Now(); now.Sub(swept) >= time.Second {
			swept = now
			p.sweepSchedules()
		}
		limit := time.Second
		for _, o := range p.overruns(time.Now()) {
			report(o)
		}
		p.mu.Lock()
		if l := p.sharing.Limit; l > 0 {
			limit = l
		}
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(min(max(limit/4, 25*time.Millisecond), time.Second)):
		}
	}
}

func (p *Pool) sweepSchedules() {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := func(id string, pid int) bool {
		l := p.leases[id]
		if l == nil {
			return false
		}
		for s := range l.sessions {
			if s.Worker.PID == pid {
				return true
			}
		}
		return false
	}
	for _, b := range p.schedules {
		b.Sweep()
		b.FreeStrangers(time.Now(), known)
	}
}

// overruns returns the work that exceeds the limit at time now and was not returned before. It ends the work's
// sessions if the site is configured so. Only time during which the work was seen while others waited counts:
// before that it harmed nobody.
func (p *Pool) overruns(now time.Time) []Overrun {
	p.mu.Lock()
	defer p.mu.Unlock()
	found := p.overran
	p.overran = nil
	limit := p.sharing.Limit
	if limit <= 0 {
		clear(p.overdue)
		return found
	}
	still := map[overrunKey]overdueWork{}
	for gpu, b := range p.schedules {
		for _, c := range b.Read() {
			for _, s := range c.Overdue {
				found = append(found, p.judge(still, now, gpu, &c, s, false)...)
			}
			for _, s := range c.Delayed { // if that is true; it ends no session, but it cannot go on for ever
				c.Ends = false
				found = append(found, p.judge(still, now, gpu, &c, s, true)...)
			}
		}
	}
	p.overdue = still
	return found
}

// delayedLimits is how many times the limit overdue work may last before it is reported, if sessions say that work of others delayed it.
const delayedLimits = 3

// judge looks at overdue work, and notes in still what it has seen. Time in which other work delayed it counts apart from time in
// which nothing did: it never adds to what ends a session. mu is held.
func (p *Pool) judge(still map[overrunKey]overdueWork, now time.Time, gpu string, c *turns.TenantCounters, s turns.Overdue, delayed bool) (found []Overrun) {
	if p.deniesOverdue(c.Lease, gpu, s.PID) {
		return nil
	}
	k := overrunKey{gpu, c.Lease, s.PID}
	w, seen := still[k]
	if !seen {
		w, seen = p.overdue[k]
	}
	switch {
	case !seen:
	case w.delayed:
		w.excused += now.Sub(w.seen)
	default:
		w.undelayed += now.Sub(w.seen)
	}
	w.seen, w.delayed = now, delayed
	overdue, may := w.undelayed, p.sharing.Limit
	if delayed {
		overdue, may = w.excused, delayedLimits*may
	}
	// Between two checks one piece of overdue work may have ended and another one begun.
	overdue = min(overdue, s.Time)
	if overdue > may && (!w.reported || c.Ends && !w.ending) { // since the report the site may have chosen to end such sessions
		w.reported, w.ending = true, c.Ends
		o := p.overrun(c.Lease, gpu, s.PID, control.OverrunReason("GPU "+gpu, overdue, c.Owes, p.sharing.Limit))
		o.Time = overdue
		if c.Ends {
			o.Ended = p.endOverrun(c.Lease, s.PID, o.Reason)
		}
		found = append(found, o)
	}
	still[k] = w
	return found
}

// deniesOverdue says whether a session has no overdue work by its own word, which no other lease's session can write. What the schedule
// says then is a lie or out of date. mu is held.
func (p *Pool) deniesOverdue(id, gpu string, pid int) bool {
	l := p.leases[id]
	if l == nil || l.file == nil {
		return false
	}
	for s := range l.sessions {
		if s.Worker.PID == pid && pid != 0 {
			return l.file.DeniesOverdue(s.slot, slices.Index(l.gpus, gpu))
		}
	}
	return false
}

// overrun returns an Overrun that describes the work of a session. mu is held.
func (p *Pool) overrun(id, gpu string, pid int, reason string) Overrun {
	o := Overrun{Lease: lease.Lease{ID: id}, GPU: gpu, PID: pid, Limit: p.sharing.Limit, Reason: reason}
	if t := p.tenancies[id]; t != nil {
		o.Lease = t.lease
	}
	return o
}

// endedItself notes a session that ended itself because its work exceeded the limit. The next call of overruns
// returns it. mu is held.
func (p *Pool) endedItself(s *session, reason string) {
	if s.why != "" {
		return
	}
	// This daemon cannot learn the exit status of a session that an earlier daemon started. It has to believe the reason that the session wrote.
	if s.proc == nil {
		if !control.IsOverrun(reason) {
			return
		}
	} else if s.proc.Cmd.ProcessState == nil || s.proc.Cmd.ProcessState.ExitCode() != control.ExitOverrun {
		return
	}
	o := p.overrun(s.Lease, strings.Join(s.l.gpus, ", "), s.Worker.PID, reason)
	o.Ended = true
	p.overran = append(p.overran, o)
}

// endOverrun ends a session, or all sessions of the lease if pid is 0. It reports whether there was one.
// mu is held.
func (p *Pool) endOverrun(id string, pid int, reason string) (some bool) {
	l := p.leases[id]
	if l == nil {
		return false
	}
	for s := range l.sessions {
		if pid != 0 && s.Worker.PID != pid || s.Worker.PID == 0 { // one without a process is only being started
			continue
		}
		if s.why == "" {
			s.why = reason
		}
		s.kill()
		some = true
	}
	return some
}

// closeSchedules closes the schedules. Their files stay, and sessions go on using them.
func (p *Pool) closeSchedules() {
	for _, b := range p.schedules {
		b.Close()
	}
	p.schedules = map[string]*turns.Schedule{}
}
