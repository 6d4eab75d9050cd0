package workers

// What a lease has used over its whole life.
//
// The account counts live sessions only: the slot of a session that has ended is free
// for the next one. So when a session ends, its counts are added to the file "totals"
// next to the account, which only the daemon can write. That file also names the
// sessions that it includes and whose records may still exist: a daemon that is killed
// in between leaves the session to the next daemon, which must not count it again. The
// peak of the memory is in the head of the account, which outlives sessions anyway.
//
//	a session ends    its counts are added, totals are written, the record is removed,
//	                  the slot is freed
//	a sample arrives  its GPU time is added, totals are written
//	End               sessions end, the account is closed; totals can still be read
//	Forget            the lease's directory is removed

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

// totals is the contents of the file "totals".
type totals struct {
	Sessions uint64        `json:"sessions"`          // how many have ended
	Failed   uint64        `json:"failed,omitempty"`  // how many of these have failed
	Failure  string        `json:"failure,omitempty"` // the last one: its program and why
	Counts   lease.Counts  `json:"counts"`            // of the sessions that have ended
	GPU      time.Duration `json:"gpu_time"`          // of all sessions
	Counted  []string      `json:"counted,omitempty"`
	Ended    bool          `json:"ended,omitempty"` // no session is left, and the account is gone
	Use      []lease.Use   `json:"use,omitempty"`   // set together with Ended
}

// ghostTime is how long after its end a process may still appear in a sample.
const ghostTime = 10 * time.Second

func (t *totals) add(c lease.Counts) {
	t.Counts = sum(t.Counts, c)
	t.Sessions++
}

// sum adds two counts. Sessions write their counts themselves, so any value is possible;
// a sum that would overflow saturates.
func sum(a, b lease.Counts) lease.Counts {
	return lease.Counts{
		Calls: plus(a.Calls, b.Calls), Waits: plus(a.Waits, b.Waits), BytesIn: plus(a.BytesIn, b.BytesIn), BytesOut: plus(a.BytesOut, b.BytesOut),
		Launches: plus(a.Launches, b.Launches), Errors: plus(a.Errors, b.Errors),
		Throttle: long(a.Throttle, b.Throttle), Cuts: plus(a.Cuts, b.Cuts), CutTime: long(a.CutTime, b.CutTime), Saved: plus(a.Saved, b.Saved),
	}
}

func long(a, b time.Duration) time.Duration {
	return time.Duration(min(plus(uint64(max(a, 0)), uint64(max(b, 0))), 1<<62))
}

func plus(a, b uint64) uint64 {
	if a > ^uint64(0)-b {
		return ^uint64(0)
	}
	return a + b
}

func (p *Pool) totalsPath(id string) string { return filepath.Join(p.cfg.Dir, id, "totals") }

// readTotals reads the totals of a lease that an earlier daemon wrote, if there are any.
func (p *Pool) readTotals(id string) (t totals) {
	b, err := os.ReadFile(p.totalsPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return totals{}
	}
	if err == nil {
		err = json.Unmarshal(b, &t)
	}
	if err != nil {
		p.log.Error("totals of a lease cannot be read; its report counts from now", "lease", id, "error", err)
		return totals{}
	}
	return t
}

// writeTotals writes the totals for the next daemon. A failure is only logged: it makes the
// lease's report wrong, and nothing else. mu is held.
func (p *Pool) writeTotals(l *leased) {
	if err := writeFile(p.totalsPath(l.id), l.totals); err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.log.Error("totals of a lease cannot be kept", "lease", l.id, "error", err)
	}
}

// count adds a session that has ended to the totals, unless an earlier daemon did so.
func (p *Pool) count(e *ended) {
	s := e.session
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Contains(s.l.totals.Counted, s.ID) {
		return
	}
	s.l.totals.add(e.out.Counts)
	if e.failed {
		s.l.totals.Failed++
		s.l.totals.Failure = fmt.Sprintf("%s (process %d): %s", form.Name(s.Program), s.Client, form.Name(e.reason))
	}
	s.l.totals.Counted = append(s.l.totals.Counted, s.ID)
	p.writeTotals(s.l)
	if s.Worker.PID != 0 {
		s.l.ghosts = append(s.l.ghosts, ghost{s.Worker.PID, time.Now()})
	}
}

// uncount removes the name of a session whose record is gone. The file keeps the name until it
// is next written. mu is held.
func (l *leased) uncount(id string) {
	l.totals.Counted = slices.DeleteFunc(l.totals.Counted, func(n string) bool { return n == id })
}

// Live reports whether there is any session. NVML forgets a process when it ends, so while
// there are sessions it should be asked often.
func (p *Pool) Live() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.leases {
		if len(l.sessions) > 0 {
			return true
		}
	}
	return false
}

// ghost is the process of a session that has ended. Samples are about the past, so one may still name it.
type ghost struct {
	pid  int
	gone time.Time
}

// AddBusy adds the time for which each process kept a GPU busy since the previous sample,
// by GPU and process id. at is when the sample was requested.
func (p *Pool) AddBusy(at time.Time, busy map[string]map[int]time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.noteExcess(at, busy)
	for _, l := range p.leases {
		var d time.Duration
		for _, g := range l.gpus {
			for pid, t := range busy[g] {
				if t > 0 && l.has(pid) {
					d += t
				}
			}
		}
		l.ghosts = slices.DeleteFunc(l.ghosts, func(g ghost) bool { return at.Sub(g.gone) > ghostTime })
		if d > 0 && l.file != nil {
			l.totals.GPU += d
			p.writeTotals(l)
		}
	}
}

// has reports whether a process is, or was, a session of the lease. mu is held.
func (l *leased) has(pid int) bool {
	for s := range l.sessions {
		if s.Worker.PID == pid {
			return true
		}
	}
	return slices.ContainsFunc(l.ghosts, func(g ghost) bool { return g.pid == pid })
}

// Total returns what a lease has used over its whole life, including its live sessions: the
// memory of each grant (Peak is that of the whole life), the counts of all sessions, the number
// of sessions, and for how long they kept the GPUs busy. It can be called until Forget.
func (p *Pool) Total(id string) lease.Total {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.leases[id]
	if l == nil {
		return lease.Total{}
	}
	t := l.totals
	out := lease.Total{Counts: t.Counts, Sessions: t.Sessions, GPUTime: t.GPU, Failed: t.Failed, Failure: t.Failure}
	// Both measure the same time. Samples miss short work, and the turns' events miss work
	// outside of turns. So the larger one counts.
	var busy time.Duration
	for _, s := range p.sharesOf(id) {
		busy += s.Busy
	}
	out.GPUTime = max(out.GPUTime, busy)
	if l.file == nil {
		out.Use = slices.Clone(t.Use)
		return out
	}
	out.Use, _ = l.use()
	for s := range l.sessions {
		if !s.open || slices.Contains(t.Counted, s.ID) {
			continue
		}
		out.Sessions++
		if slot, err := l.file.Slot(s.slot); err == nil {
			out.Counts = sum(out.Counts, countsOf(slot))
		}
	}
	return out
}

// closeAccount closes the account of a lease that has no sessions left, and writes its final totals. mu is held.
func (p *Pool) closeAccount(l *leased) {
	l.totals.Use, _ = l.use() // none if a session has damaged the account
	l.totals.Ended, l.totals.Counted = true, nil
	p.writeTotals(l)
	err := errors.Join(os.Remove(filepath.Join(p.cfg.Dir, l.id, accountName)), l.file.Close())
	l.file, l.ghosts = nil, nil
	p.removeShared(l.id)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.log.Warn("account of an ended lease", "lease", l.id, "error", err)
	}
}

// use returns the memory of each GPU of the lease. mu is held.
func (l *leased) use() (all []lease.Use, err error) {
	for d := range l.gpus {
		u, err := l.file.Use(d)
		if err != nil {
			return nil, err
		}
		all = append(all, lease.Use{Granted: u.Granted, Used: u.Used, Overhead: u.Overhead, Peak: u.Peak})
	}
	return all, nil
}

func countsOf(s account.Slot) lease.Counts {
	c := s.Counts
	return lease.Counts{
		Calls: c.Calls, Waits: c.Waits, BytesIn: c.BytesIn, BytesOut: c.BytesOut, Launches: c.Launches, Errors: c.Errors, Throttle: time.Duration(min(c.Throttle, 1<<62)),
		Cuts: s.Cuts, CutTime: s.CutTime, Saved: s.Compress.Saved(),
	}
}

// Forget removes what End has left of a lease, including its tenants on the schedules. It does nothing if
// the lease has not been ended.
func (p *Pool) Forget(id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.leases[id]
	if l != nil && l.file != nil {
		return nil
	}
	p.removeTenants(id)
	if l == nil {
		return nil
	}
	if err := os.RemoveAll(filepath.Join(p.cfg.Dir, id)); err != nil {
		return fmt.Errorf("lease %s: %w", id, err)
	}
	delete(p.leases, id)
	return nil
}
