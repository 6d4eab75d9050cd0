package wire

import (
	"runtime"
	"time"
)

// How long a read looks for bytes before it sleeps, at least and at most, and after what gap a thread that looked was
// not running.
const (
	lookLeast = 50 * time.Microsecond
	lookMost  = time.Millisecond
	preempted = 200 * time.Microsecond
)

// spare says that there are processors to look with.
var spare = runtime.NumCPU() >= 4

// A lookout decides how long a reader looks before it sleeps. A thread that slept takes some 20 us to wake, and a program
// that waits for each of its steps sends the next one within that time of its answer or soon after. So a lookout looks
// for longer where bytes have come within lookMost, and for less where they have come later: a session that is idle
// sleeps, and one whose program computes for milliseconds between its calls looks for lookLeast. On machines with fewer
// than four processors it does not look at all. A lookout belongs to its reader.
type lookout struct {
	limit time.Duration // 0 is lookLeast
}

// look calls found until it says true, or as long as that pays. It gives when it began.
func (l *lookout) look(found func() bool) (begun time.Time, ok bool) {
	begun = time.Now()
	if !spare {
		return begun, found()
	}
	limit := max(l.limit, lookLeast)
	for last := begun; ; {
		if found() {
			return begun, true
		}
		now := time.Now()
		if now.Sub(last) > preempted {
			l.limit = lookLeast // others want the processor
			return begun, false
		}
		if last = now; now.Sub(begun) > limit {
			return begun, false
		}
	}
}

// slept notes that a reader has slept until bytes came, after it had looked.
func (l *lookout) slept(begun time.Time) {
	if limit := max(l.limit, lookLeast); time.Since(begun) <= lookMost {
		l.limit = min(2*limit, lookMost)
	} else {
		l.limit = max(limit/2, lookLeast)
	}
}
