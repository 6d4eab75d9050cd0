package page

import (
	"html/template"
	"strconv"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

const (
	// Every is the time between two samples of the history.
	Every = 30 * time.Second
	// points is how many samples are kept: an hour.
	points = int(time.Hour / Every)
	// most is the greatest number of histories.
	most = 8192
)

// ring is the last values of something, in percent.
type ring struct {
	values [points]uint8
	n      int // values so far
	seen   uint64
}

func (r *ring) add(percent float64) {
	r.values[r.n%points] = uint8(max(0, min(100, percent+0.5)))
	r.n++
}

const (
	lineHead = `<svg class="line" viewBox="0 0 119 100" preserveAspectRatio="none" role="img" aria-label="the last hour"><polyline points="`
	lineTail = `"/></svg>`
	noLine   = `<span class="none">no history yet</span>`
)

// line draws the ring as an SVG polyline in a box of points by 100, the newest at the right end, if there are two. What it writes is made
// of numbers alone.
func (r *ring) line() template.HTML {
	if r == nil || r.n < 2 {
		return noLine
	}
	n := min(r.n, points)
	b := make([]byte, 0, len(lineHead)+n*len("119,100 ")+len(lineTail))
	b = append(b, lineHead...)
	for i := range n {
		b = strconv.AppendInt(b, int64(points-n+i), 10)
		b = append(b, ',')
		b = strconv.AppendInt(b, 100-int64(r.values[(r.n-n+i)%points]), 10)
		b = append(b, ' ')
	}
	return template.HTML(append(b[:len(b)-1], lineTail...))
}

// history holds the values of the last hour. It begins with the daemon.
type history struct {
	mu     sync.Mutex
	round  uint64
	rings  map[string]*ring
	shares map[string]lease.Share // at the last sample, by lease
	at     time.Time              // of the last sample
}

// sample adds the present values, and drops the histories of what has ended.
func (h *history) sample(s *rpc.Stats) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.rings == nil {
		h.rings = map[string]*ring{}
	}
	h.round++
	add := func(key string, percent float64) {
		r := h.rings[key]
		if r == nil {
			if len(h.rings) >= most {
				return
			}
			r = &ring{}
			h.rings[key] = r
		}
		r.add(percent)
		r.seen = h.round
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		add("lent "+g.GPU.UUID, 100-float64(min(g.GPU.FreePercent, 100)))
		if g.Known {
			add("busy "+g.GPU.UUID, float64(g.Utilisation))
			add("mem "+g.GPU.UUID, percent(g.MemUsed, g.MemTotal))
		}
	}
	passed := s.Time.Sub(h.at)
	shares := make(map[string]lease.Share, len(s.Leases))
	for i := range s.Leases {
		l := &s.Leases[i]
		used, granted := memory(l)
		add("used "+l.ID, percent(used, granted))
		if len(l.Shares) == 0 {
			continue
		}
		now := lease.SumShares(l.Shares)
		if was, ok := h.shares[l.ID]; ok && passed > 0 && now.Held >= was.Held {
			add("held "+l.ID, 100*(now.Held-was.Held).Seconds()/passed.Seconds()/float64(len(l.Shares)))
		}
		shares[l.ID] = now
	}
	h.shares, h.at = shares, s.Time
	for key, r := range h.rings {
		if r.seen != h.round {
			delete(h.rings, key)
		}
	}
}

// line draws one of the histories.
func (h *history) line(key string) template.HTML {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rings[key].line()
}

func percent(part, whole uint64) float64 {
	if whole == 0 {
		return 0
	}
	return 100 * float64(part) / float64(whole)
}

// memory is what a lease's sessions use and what it was granted, in bytes.
func memory(l *lease.Status) (used, granted uint64) {
	for _, u := range l.Use {
		used += u.Used
	}
	for _, g := range l.Grants {
		granted += g.Mem
	}
	return used, granted
}
