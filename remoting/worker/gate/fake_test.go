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

// fake is a driver with a simulated GPU: a stream's work takes as long as the test says (work), and
// an event is reached when the work before it in its stream is done.
type fake struct {
	clock turns.Clock // nil: work takes no time

	mu      sync.Mutex
	events  []int64          // when each is reached, ns
	streams map[uint64]int64 // until when they are busy, ns
}

// work starts work of ns in a stream.
func (f *fake) work(stream uint64, ns int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.streams == nil {
		f.streams = make(map[uint64]int64)
	}
	f.streams[stream] = max(f.streams[stream], f.now()) + ns
}

// inFlight returns how much work a stream has left, ns.
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

// testSet returns a set without gates, of a session on driver d.
func testSet(d Driver) *Set {
	return &Set{Config: Config{
		Driver: d, Log: slog.New(slog.DiscardHandler), HostCalls: new(atomic.Int32),
		Prewake: func(time.Duration) {}, ContextLost: func() {}, Overran: func(_, _, _ time.Duration) {},
	}}
}

// testGate returns the gate of the only session on a GPU. Its executor's current context is 1.
func testGate(t testing.TB, d Driver, clock turns.Clock) *Gate {
	t.Helper()
	s, b := testSet(d), turnstest.Schedule(t, turns.Site{})
	tenant := turnstest.Tenant(t, b, "one", turns.Policy{Kind: turns.BestEffort, Weight: turns.FullWeight})
	g := s.Open(0, turnstest.Member(t, b, tenant, clock), clock, IdleTime)
	s.Use(0, 1)
	t.Cleanup(s.Quit)
	return g
}
