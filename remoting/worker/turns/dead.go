package turns

// Chairs of processes that have ended.

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/process"
)

// A chair's owner word: the process, and whether it is only clearing the chair up.
const clearing = 1 << 32

// bury frees a chair whose process has ended; it says whether it had. A process that
// has ended and that nobody has reaped yet counts as living unless closely is asked for,
// which takes ten times as long.
func (p *page) bury(i int, closely bool) bool {
	w := p.chair(i, scOwner).Load()
	if w == 0 {
		return true
	}
	pid := int(int32(uint32(w)))
	if pid > 0 && !errors.Is(unix.Kill(pid, 0), unix.ESRCH) && (!closely || alive(pid, p.chair(i, scStart).Load())) {
		return false
	}
	p.clearChair(i, w)
	return true
}

// clearChair empties a chair that belongs to w and makes it free. A process that is
// killed meanwhile leaves a chair with a dead owner, which is where this begins.
func (p *page) clearChair(i int, w uint64) {
	me := uint64(os.Getpid()) | clearing
	if !p.chair(i, scOwner).CompareAndSwap(w, me) {
		return
	}
	for _, w := range [...]int{scWant, scOpen, scLate, scSeat} {
		at("clearing")
		p.chair(i, w).Store(0)
	}
	p.chair(i, scStart).Store(0)
	p.chair(i, scOwner).CompareAndSwap(me, 0)
}

// alive says whether a process is there that started then; 0: whenever. One that may not
// be looked at is.
func alive(pid int, start uint64) bool {
	s, err := process.Read(pid)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	return !s.Ended() && (start == 0 || s.Start == start)
}

// self gives this process's start time, 0 when it cannot be told.
func self() uint64 {
	start, err := process.Start(os.Getpid())
	if err != nil {
		return 0
	}
	return start
}
