package gate

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

// fake is a driver whose GPU is arithmetic: a stream's work takes as long as a test says
// (work), and an event is reached when the work before it in its stream is done.
type fake struct {
	clock turns.Clock // nil: work takes no time

	mu      sync.Mutex
	events  []int64          // when each is reached, ns
	streams map[uint64]int64 // until when they are busy, ns
}

// work gives a stream something to do for ns.
func (f *fake) work(stream uint64, ns int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.streams == nil {
		f.streams = make(map[uint64]int64)
	}
	f.streams[stream] = max(f.streams[stream], f.now()) + ns
}

// inFlight is what a stream has yet to do, ns.
func (f *fake) inFlight(stream uint64) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return max(f.streams[stream]-f.now(), 0)
}

func (f *fake) now() int64 {
	if f.clock == nil {
		return 0
	}
	return f.clock.Now()
}

func (f *fake) SetContext(uint64) bool { return true }
func (f *fake) RelaxCapture()          {}

func (f *fake) NewEvent() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, 0)
	return uint64(len(f.events))
}

func (f *fake) Record(event, stream uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events[event-1] = max(f.streams[stream], f.now())
	return true
}

func (f *fake) Query(event uint64) State {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.events[event-1] > f.now() {
		return Pending
	}
	return Reached
}

func (f *fake) Elapsed(from, to uint64) (int64, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[to-1] - f.events[from-1], true
}

// testSet is a set without gates, of a session on driver d.
func testSet(d Driver) *Set {
	return &Set{Config: Config{
		Driver: d, Log: slog.New(slog.DiscardHandler), HostCalls: new(atomic.Int32),
		Wake: func(time.Duration) {}, ContextLost: func() {},
	}}
}

// testGate is the gate of the only session on a GPU, whose executor has context 1 current.
func testGate(t testing.TB, d Driver, clock turns.Clock) *Gate {
	t.Helper()
	s, b := testSet(d), turnstest.Board(t, turns.Site{})
	seat := turnstest.Seat(t, b, "one", turns.Policy{Kind: turns.BestEffort, Weight: turns.Whole})
	g := s.Open(0, turnstest.Chair(t, b, seat, clock), clock, IdleTime)
	s.Use(0, 1)
	t.Cleanup(s.Quit)
	return g
}
