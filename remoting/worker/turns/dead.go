package turns

// Members whose processes have ended.

import (
	"errors"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/process"
)

// clearing, in a member's owner word, says that the process is not a session there but clears
// the record.
const clearing = 1 << 32

// freeIfDead frees a member's record if its process has ended, and says whether it had. A
// process that has ended but has not been reaped counts as alive, unless closely is set, which
// takes ten times as long.
func (p *pages) freeIfDead(i int, closely bool) bool {
	m := p.member(i)
	w := m.owner.Load()
	if w == 0 {
		return true
	}
	pid := int(int32(uint32(w)))
	if pid > 0 && !errors.Is(unix.Kill(pid, 0), unix.ESRCH) && (!closely || alive(pid, m.start.Load())) {
		return false
	}
	p.free(i, w)
	return true
}

// free clears and frees a member's record whose owner word is w. A process that is killed
// meanwhile leaves a record with a dead owner, which the next one frees.
func (p *pages) free(i int, w uint64) {
	m, me := p.member(i), uint64(os.Getpid())|clearing
	if !m.owner.CompareAndSwap(w, me) {
		return
	}
	m.clear()
	m.owner.CompareAndSwap(me, 0)
}

// clear erases what a record says of a session. A session that claims a record clears it again: the previous owner checks the owner
// word only before it writes, so it may have written after the record was freed.
func (m *memberState) clear() {
	for _, w := range [...]*atomic.Uint64{&m.want, &m.open, &m.overdue, &m.seen, &m.tenant, &m.start} {
		step("clearing")
		w.Store(0)
	}
}

// alive says whether a process exists that started at start; 0: at any time. A process that
// may not be looked at is alive.
func alive(pid int, start uint64) bool {
	s, err := process.Read(pid)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	return !s.Ended() && (start == 0 || s.Start == start)
}

// selfStart returns this process's start time, or 0 when it cannot be found.
func selfStart() uint64 {
	start, err := process.Start(os.Getpid())
	if err != nil {
		return 0
	}
	return start
}
