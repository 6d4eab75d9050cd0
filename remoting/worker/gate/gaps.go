package gate

// What a gate does while the client waits for its own work.
//
// A program that waits for all it has started leaves the GPU idle until it starts more. Either
// the turn is kept for it, and that time is lost, or the turn is passed on at once, to a tenant
// that has to be woken for it and to whose context the driver has to switch. It is passed on if
// this session's idle gaps are longer than that takes, or if the turn is almost over anyway.

import "time"

const (
	// minGap is what it costs to pass a turn on to a tenant that does not expect it: 170 us for
	// the driver's change of contexts, the rest for threads that have slept for long (H200).
	minGap = int64(500 * time.Microsecond)
	maxGap = int64(20 * time.Millisecond)
	// Measure the first firstGaps idle gaps, then sample one in sampleGaps: a measurement takes a
	// fence, to know when the work ends.
	firstGaps  = 8
	sampleGaps = 64
)

// WaitBegins is for the executor when the client begins to wait for its work. It puts a fence
// behind that work if the gap that follows matters, and then returns the gate whose WaitEnds must
// follow; otherwise nil.
func (s *Set) WaitBegins() *Gate {
	g := s.Here()
	if g == nil || !g.clock.Spins() {
		return nil // a simulated GPU's time says nothing of how long a client thinks
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.turn == 0 || !g.contended || g.closing {
		return nil
	}
	yields := g.yields(g.clock.Now())
	if g.gaps++; g.gaps > firstGaps && g.gaps%sampleGaps != 0 && !yields {
		return nil
	}
	g.open.Store(0)
	g.fenceBatch()
	if yields && !g.prewoken {
		g.yielding = true
		g.member.WakeKeeper() // which wakes the next tenant
	}
	return g
}

// yields says whether a gap that begins now should be another tenant's time.
func (g *Gate) yields(now int64) bool {
	ending := g.prewoken && g.member.Ends(g.turn)-now <= prewakeLead/4
	return (ending || g.gap >= minGap) && g.member.Contended()
}

// WaitEnds is for the end of such a wait, on any thread; g may be nil.
func (g *Gate) WaitEnds() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.turn == 0 || g.closing || g.waiting > 0 || !g.follow() {
		return
	}
	now := g.clock.Now()
	g.reap(now)
	seq := g.seq.Load()
	if seq&1 != 0 || g.flight.busy() {
		return
	}
	g.gapSince = now
	if !g.contended || !g.yields(now) {
		return
	}
	g.open.Store(0)
	if g.seq.Load() != seq || g.flight.unfenced() {
		return
	}
	g.stats.yields++
	g.endTurn(false)
}

// endGap is for the first work after a gap.
func (g *Gate) endGap(now int64) {
	if g.gapSince != 0 {
		g.gap += (min(now-g.gapSince, maxGap) - g.gap) / 4
		g.gapSince = 0
	}
}

// prewakeClient tells the client that a turn is about to begin. It runs on the executor's thread,
// within Member.Wait.
func (g *Gate) prewakeClient() {
	now := g.clock.Now()
	if now-g.exec.prewokenAt < prewakeEvery {
		return
	}
	g.exec.prewokenAt = now
	g.set.Prewake(awakeTime)
}
