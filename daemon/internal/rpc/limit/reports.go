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

// Sources keeps the reports of each source, a lease or a user, to a rate of their own.
// The zero value passes 10 a second for each.
type Sources struct {
	PerSecond int // for each source

	mu sync.Mutex
	of map[string]*Reports
}

// maxSources bounds the memory of Sources. Those beyond it share one rate.
const maxSources = 4096

// Pass is Reports.Pass for one source.
func (s *Sources) Pass(source string) (skipped uint64, ok bool) {
	s.mu.Lock()
	if s.of == nil {
		s.of = make(map[string]*Reports)
	}
	r := s.of[source]
	if r == nil && len(s.of) >= maxSources {
		s.forget()
		if len(s.of) >= maxSources {
			source = ""
			r = s.of[source]
		}
	}
	if r == nil {
		r = &Reports{PerSecond: s.PerSecond}
		s.of[source] = r
	}
	s.mu.Unlock()
	return r.Pass()
}

// forget drops the sources that have been quiet; mu is held.
func (s *Sources) forget() {
	for name, r := range s.of {
		r.mu.Lock()
		if time.Since(r.since) > time.Minute {
			delete(s.of, name)
		}
		r.mu.Unlock()
	}
}
