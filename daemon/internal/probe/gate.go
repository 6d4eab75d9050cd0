package probe

import (
	"context"
	"sync"
	"time"
)

// Gate lets one probe in at a time, and keeps a pause after each.
type Gate struct {
	mu     sync.Mutex
	who    string // whose probe is in; "": none is
	until  time.Time
	over   chan struct{}   // closed when that probe has left
	ending <-chan struct{} // closed when it begins to leave, which takes a moment; nil: it does not say so
	rest   Rests
	ended  time.Time
}

// Rests are the pauses after a probe.
type Rests struct {
	All   time.Duration // for every probe
	Users time.Duration // for users' probes
}

// Busy says why a probe is not let in.
type Busy struct {
	Who  string        // "" nobody: it is too soon after the last one
	Wait time.Duration // how long that lasts at most

	over, ending <-chan struct{} // as Gate has them
}

// Enter lets a probe of who in, for at most life. leave ends it and sets the pauses after it; only its first call counts.
func (g *Gate) Enter(who string, uid uint32, life time.Duration) (leave func(Rests), busy *Busy) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if busy := g.busy(uid); busy != nil {
		return nil, busy
	}
	over := make(chan struct{})
	g.who, g.until, g.over, g.ending = who, time.Now().Add(life), over, nil
	var once sync.Once
	return func(r Rests) {
		once.Do(func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.who, g.rest, g.ended = "", r, time.Now()
			close(over)
		})
	}, nil
}

// busy says what is in the way. g.mu is held.
func (g *Gate) busy(uid uint32) *Busy {
	now := time.Now()
	if g.who != "" {
		return &Busy{Who: g.who, Wait: max(g.until.Sub(now), 0), over: g.over, ending: g.ending}
	}
	rest := g.rest.All
	if uid != 0 {
		rest = max(rest, g.rest.Users)
	}
	if wait := g.ended.Add(rest).Sub(now); !g.ended.IsZero() && wait > 0 {
		return &Busy{Wait: wait}
	}
	return nil
}

// leaves sets what is closed when the holder's probe begins to end.
func (g *Gate) leaves(ending <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ending = ending
}

// Await waits until who may begin a probe, but returns at once where that seems to take longer than patience. It waits for a probe that is
// ending already, for who's own last probe, whose end may be under way, and for the pause between two probes.
func (g *Gate) Await(ctx context.Context, who string, uid uint32, patience time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	end, _ := ctx.Deadline()
	for ctx.Err() == nil {
		g.mu.Lock()
		b := g.busy(uid)
		g.mu.Unlock()
		if b == nil || b.Who == "" && time.Now().Add(b.Wait).After(end) || b.Who != "" && b.Who != who && !closed(b.ending) {
			return
		}
		var pause <-chan time.Time
		if b.Who == "" {
			pause = time.After(b.Wait)
		}
		select {
		case <-b.over:
		case <-pause:
		case <-ctx.Done():
		}
	}
}

// closed says that ch is; nil is not.
func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
