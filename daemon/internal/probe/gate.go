package probe

import (
	"sync"
	"time"
)

// Gate lets one probe through at a time. Users' probes wait for some time after the last one, so that together they cannot fill a link.
type Gate struct {
	Rest time.Duration // after any probe, before one of a user

	mu    sync.Mutex
	who   string // has it, "" nobody
	until time.Time
	ended time.Time
}

// Busy is why a probe is not let through.
type Busy struct {
	Who  string        // "" nobody: it is a user's, and too soon
	Wait time.Duration // how long that lasts at most
}

// Enter lets who through, for at most life. leave may be called several times.
func (g *Gate) Enter(who string, uid uint32, life time.Duration) (leave func(), busy *Busy) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if g.who != "" {
		return nil, &Busy{Who: g.who, Wait: max(g.until.Sub(now), 0)}
	}
	if rest := g.ended.Add(g.Rest).Sub(now); uid != 0 && !g.ended.IsZero() && rest > 0 {
		return nil, &Busy{Wait: rest}
	}
	g.who, g.until = who, now.Add(life)
	return sync.OnceFunc(func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.who, g.ended = "", time.Now()
	}), nil
}
