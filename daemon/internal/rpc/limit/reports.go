package limit

import (
	"sync"
	"time"
)

// Reports keeps what strangers can cause to be written down to a rate: each
// second the first few are passed on, the others counted, so that a flood fills no
// disk. The zero value passes 10 a second.
type Reports struct {
	PerSecond int

	mu      sync.Mutex
	since   time.Time
	n       int
	skipped uint64
}

// Pass says whether to report now, and how many have been left out since the last
// report.
func (r *Reports) Pass() (skipped uint64, ok bool) {
	most := r.PerSecond
	if most <= 0 {
		most = 10
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); now.Sub(r.since) >= time.Second {
		r.since, r.n = now, 0
	}
	if r.n >= most {
		r.skipped++
		return 0, false
	}
	r.n++
	skipped, r.skipped = r.skipped, 0
	return skipped, true
}
