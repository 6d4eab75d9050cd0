package worker

// A session's gates.

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// openGates takes the chairs that START brought; fds are the boards' descriptors.
func (s *session) openGates(st *control.Start, fds []int) error {
	for dev, t := range st.Turns {
		if t.Seat < 0 {
			continue
		}
		if s.gates == nil {
			s.gates = make([]*gate, len(st.Snapshot.Devices))
		}
		clock := gateClock(dev)
		chair, err := turns.OpenFDs(fds[0], fds[1], t.Seat, clock)
		if err != nil {
			return fmt.Errorf("device %d: %w", dev, err)
		}
		fds = fds[2:]
		s.gates[dev] = newGate(s, chair, clock)
		s.gates[dev].idle = idleOf(s.stream.FD())
	}
	return nil
}

// idleOf is how long a turn without work is kept for a client: its answer to a result
// takes a round trip.
func idleOf(fd int) int64 {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return idleTime
	}
	return min(max(2*int64(info.Rtt)*int64(time.Microsecond), idleTime), maxIdle)
}

// setGate makes the current context's gate the current one.
func (s *session) setGate() {
	s.gate = nil
	if s.gates == nil {
		return
	}
	if c := s.context(); c != nil && c.dev < len(s.gates) {
		s.gate = s.gates[c.dev]
	}
}

// flushGates marks all work that is not marked yet: what comes next may make it
// impossible.
func (s *session) flushGates() {
	for _, g := range s.gates {
		if g != nil {
			g.flush()
		}
	}
}

// forget lets go of a context that is about to be destroyed; it is idle.
func (g *gate) forget(ctx uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open.Store(0)
	g.collect(g.clock.Now())
	g.flight.forget(ctx)
	if g.keepCtx == ctx {
		g.keepCtx = 0
	}
	g.strays = slices.DeleteFunc(g.strays, func(m stray) bool { return m.ctx == ctx })
	g.tellLate()
}

// gridSize is the number of blocks of a LAUNCH payload.
func gridSize(p []byte) uint64 {
	x := binary.LittleEndian.Uint32(p[launchHead:])
	y := binary.LittleEndian.Uint32(p[launchHead+4:])
	z := binary.LittleEndian.Uint32(p[launchHead+8:])
	return uint64(x) * uint64(y) * uint64(z)
}

// quitGates gives turns back at once: to end a process takes the driver a while. Nothing
// is waited for, so that it may be called from anywhere.
func (s *session) quitGates() {
	for _, g := range s.gates {
		if g != nil {
			g.stop.Store(true)
			g.chair.Quit()
			g.chair.Rouse() // both its threads look at stop
			g.chair.Wake()
			g.report()
		}
	}
}

// report logs where a session's turns went, unless somebody is at the gate.
func (g *gate) report() {
	if !g.mu.TryLock() {
		return
	}
	defer g.mu.Unlock()
	if st := &g.stats; st.turns > 0 {
		d := func(ns int64) time.Duration { return time.Duration(ns).Round(time.Microsecond) }
		g.s.log.Info("turns", "seat", g.chair.Seat(), "joined", st.turns, "idle", st.idle, "rests", st.rests, "rest", d(g.rest), "held", d(st.held), "busy", d(st.busy),
			"first", d(st.first), "last", d(st.last), "marks", st.marks, "dry", st.dry,
			"crowded", st.crowds, "crowded_for", d(st.crowded), "held_back", st.holds)
	}
}
