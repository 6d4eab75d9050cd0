package workers

// What a lease has used over its whole life.
//
// The account has what lives: a slot is free for the next session once its own has
// ended. So the counts of a session that ends are added to the file "totals" beside
// the account, which only the daemon can write. It also names the sessions that are
// in it and whose record may still be there: a daemon that is killed between the two
// leaves a session to the next one, which must not count it twice. The most memory
// that was used at a time is in the account's head and outlives the sessions anyway.
//
//	session ends    totals written with it -> record removed -> slot freed
//	a sample comes  GPU time added -> totals written
//	End             sessions ended, account closed, totals stay to be read
//	Forget          the lease's directory removed

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
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

// totals is the file of that name.
type totals struct {
	Sessions uint64        `json:"sessions"` // that have ended
	Counts   lease.Counts  `json:"counts"`   // theirs
	GPU      time.Duration `json:"gpu_time"` // of all
	Counted  []string      `json:"counted,omitempty"`
	Ended    bool          `json:"ended,omitempty"` // nothing lives; the account is gone
	Use      []lease.Use   `json:"use,omitempty"`   // as it was then
}

// ghostTime is how long a process that has ended can still be in a sample that comes.
const ghostTime = 10 * time.Second

func (t *totals) add(c lease.Counts) {
	t.Counts = sum(t.Counts, c)
	t.Sessions++
}

// sum adds two counts. Sessions write theirs themselves, so any value can come; a
// sum that would wrap stays at the largest.
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

// readTotals reads what an earlier daemon wrote of a lease; none is no error.
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

// writeTotals keeps them for the next daemon; mu is held. Failing costs a number in a
// report and no more.
func (p *Pool) writeTotals(l *leased) {
	if err := writeFile(p.totalsPath(l.id), l.totals); err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.log.Error("totals of a lease cannot be kept", "lease", l.id, "error", err)
	}
}

// count adds a session that has ended, unless an earlier daemon did.
func (p *Pool) count(s *session, c lease.Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Contains(s.l.totals.Counted, s.ID) {
		return
	}
	s.l.totals.add(c)
	s.l.totals.Counted = append(s.l.totals.Counted, s.ID)
	p.writeTotals(s.l)
	if s.Worker.PID != 0 {
		s.l.ghosts = append(s.l.ghosts, ghost{s.Worker.PID, time.Now()})
	}
}

// uncount forgets the name of a session whose record is gone; mu is held. The file
// may keep it until it is written the next time.
func (l *leased) uncount(id string) {
	l.totals.Counted = slices.DeleteFunc(l.totals.Counted, func(n string) bool { return n == id })
}

// Live says whether there is any session. NVML forgets a process with its end, so as long
// as there are some it should be asked often.
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

// ghost is the process of a session that has ended; a sample is about the past.
type ghost struct {
	pid  int
	gone time.Time
}

// AddBusy adds the time for which processes kept a GPU busy since the sample before,
// by process id. at is when the sample was asked for.
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

// has says whether a process is or was of a session of the lease; mu is held.
func (l *leased) has(pid int) bool {
	for s := range l.sessions {
		if s.Worker.PID == pid {
			return true
		}
	}
	return slices.ContainsFunc(l.ghosts, func(g ghost) bool { return g.pid == pid })
}

// Total is what a lease has used over its whole life, its live sessions included: the
// memory of each grant, whose Peak is of all the time, what all sessions did, how many
// there were, and for how long they kept the GPUs busy. It can be asked until Forget.
func (p *Pool) Total(id string) (use []lease.Use, counts lease.Counts, sessions uint64, gpu time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.leases[id]
	if l == nil {
		return nil, lease.Counts{}, 0, 0
	}
	t := l.totals
	counts, sessions, gpu = t.Counts, t.Sessions, t.GPU
	// Both are about the same time: samples see little of what is short, and events
	// nothing of what went past the turns.
	var busy time.Duration
	for _, s := range p.sharesOf(id) {
		busy += s.Busy
	}
	gpu = max(gpu, busy)
	if l.file == nil {
		return slices.Clone(t.Use), counts, sessions, gpu
	}
	use, _ = l.use()
	for s := range l.sessions {
		if !s.open || slices.Contains(t.Counted, s.ID) {
			continue
		}
		sessions++
		if slot, err := l.file.Slot(s.slot); err == nil {
			counts = sum(counts, countsOf(slot))
		}
	}
	return use, counts, sessions, gpu
}

// closeAccount takes what is to stay of a lease without sessions; mu is held.
func (p *Pool) closeAccount(l *leased) {
	// What a session has damaged is not known any more.
	l.totals.Use, _ = l.use()
	l.totals.Ended, l.totals.Counted = true, nil
	p.writeTotals(l)
	err := errors.Join(os.Remove(filepath.Join(p.cfg.Dir, l.id, accountName)), l.file.Close())
	l.file, l.ghosts = nil, nil
	p.removeShared(l.id)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.log.Warn("account of an ended lease", "lease", l.id, "error", err)
	}
}

// use is the memory of each GPU of the lease; mu is held.
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

// Forget removes what End has left of a lease, its tenants on the schedules too. It does nothing for a
// lease that has not been ended.
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
