package trace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/gate"
)

// fakeGPU is a driver on which work takes as long as the test says, one after the other, by the test's clock.
type fakeGPU struct {
	mu     sync.Mutex
	begin  time.Time
	busy   time.Duration            // until when, in the driver's time, which is shift ahead of the trace's
	events map[uint64]time.Duration // when each is reached
	made   uint64
	live   int // events and streams
	alone  map[uint64]bool
	late   time.Duration // that a base is seen, until lateTo
	lateTo time.Time
}

func newFake() *fakeGPU {
	return &fakeGPU{begin: time.Now(), events: map[uint64]time.Duration{}, alone: map[uint64]bool{}}
}

const shift = 5 * time.Hour

func (f *fakeGPU) now() time.Duration { return time.Since(f.begin) + shift }

func (f *fakeGPU) work(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.busy = max(f.busy, f.now()) + d
}

func (f *fakeGPU) SetContext(uint64) bool { return true }
func (f *fakeGPU) RelaxCapture()          {}
func (f *fakeGPU) DestroyEvent(ev uint64) { f.destroy(ev) }
func (f *fakeGPU) DestroyStream(s uint64) { f.destroy(s) }

func (f *fakeGPU) destroy(uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.live--
}

func (f *fakeGPU) NewEvent() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.made, f.live = f.made+1, f.live+1
	return f.made
}

func (f *fakeGPU) NewStream() uint64 {
	n := f.NewEvent()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.alone[n] = true
	return n
}

func (f *fakeGPU) Record(ev, stream uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events[ev] = f.now()
	if !f.alone[stream] {
		f.events[ev] = max(f.events[ev], f.busy)
	}
	return true
}

func (f *fakeGPU) Query(ev uint64) gate.State {
	if time.Now().Before(f.lateTo) {
		time.Sleep(f.late)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.now() < f.events[ev] {
		return gate.Pending
	}
	return gate.Reached
}

func (f *fakeGPU) Elapsed(from, to uint64) (int64, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return int64(f.events[to] - f.events[from]), true
}

// result is what a trace says.
type result struct {
	mu    sync.Mutex
	b     bytes.Buffer
	lasts int
}

func (o *result) write(p []byte, last bool) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b.Write(p)
	if last {
		o.lasts++
	}
	return nil
}

// parse gives the records, and the names by their numbers.
func (o *result) parse(t *testing.T) (list []wire.TraceRecord, names map[uint32]string) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	b := o.b.Bytes()
	var h wire.TraceHead
	h.Decode(wire.NewDecoder(b[:wire.TraceHeadSize]))
	if h.Magic != wire.TraceMagic || h.Version != wire.TraceVersion || time.Since(time.Unix(0, int64(h.Wall))).Abs() > time.Minute {
		t.Fatalf("head %+v", h)
	}
	names = map[uint32]string{}
	for b = b[wire.TraceHeadSize:]; len(b) > 0; {
		var m wire.TraceRecord
		m.Decode(wire.NewDecoder(b[:wire.TraceRecordSize]))
		if m.Size < wire.TraceRecordSize || m.Size%8 != 0 || int(m.Size) > len(b) {
			t.Fatalf("a record of %d bytes, %d are left", m.Size, len(b))
		}
		if m.Kind == wire.SpanName {
			n := binary.LittleEndian.Uint32(b[wire.TraceRecordSize:])
			names[m.Name] = string(b[wire.TraceRecordSize+4:][:n])
		} else {
			list = append(list, m)
		}
		b = b[m.Size:]
	}
	return list, names
}

func end(t *testing.T, r *Recorder) {
	t.Helper()
	r.Stop()
	select {
	case <-r.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the trace does not end")
	}
}

// The times of work are those of the GPU, on the trace's clock, although the GPU's clock is another. A busy machine may give work and look at
// it late: one try is exact.
func TestTimes(t *testing.T) {
	for begun := time.Now(); ; {
		late := times(t)
		if late == "" {
			return
		}
		if time.Since(begun) > 20*time.Second {
			t.Fatal(late)
		}
	}
}

// times says which record is not where it belongs.
func times(t *testing.T) (late string) {
	t.Helper()
	f, out := newFake(), &result{}
	r := Start(Config{Driver: f, Write: out.write})
	var given []uint64
	for range 3 {
		sp := r.Begin(1, 2, true)
		given = append(given, sp.given)
		f.work(20 * time.Millisecond)
		r.End(sp, wire.TraceRecord{Kind: wire.SpanKernel, Grid: [3]uint32{7, 1, 1}}, "k")
	}
	r.End(r.Begin(1, 2, false), wire.TraceRecord{Kind: wire.SpanKernel}, "in a capture")
	r.Cancel(r.Begin(1, 2, true))
	end(t, r)
	list, names := out.parse(t)
	if len(list) != 4 || out.lasts != 1 {
		t.Fatalf("%d records, %d last: %+v", len(list), out.lasts, list)
	}
	n := 0
	for _, m := range list {
		if m.Flags&wire.TraceGPU == 0 {
			if names[m.Name] != "in a capture" {
				t.Errorf("no times of the GPU: %+v", m)
			}
			continue
		}
		took := time.Duration(m.End - m.Begin)
		begin := time.Duration(m.Begin) - time.Duration(given[0]) - time.Duration(n)*20*time.Millisecond
		if names[m.Name] != "k" || m.Grid[0] != 7 {
			t.Errorf("record %d of %q: %+v", n, names[m.Name], m)
		}
		if took < 19*time.Millisecond || took > 60*time.Millisecond || begin.Abs() > 50*time.Millisecond {
			late = fmt.Sprintf("record %d took %v and began %v beside its time: %+v", n, took, begin, m)
		}
		n++
	}
	if n != 3 {
		t.Errorf("%d records have times of the GPU", n)
	}
	for start := time.Now(); ; time.Sleep(time.Millisecond) { // the collector gives back what it has after the last record
		f.mu.Lock()
		live := f.live
		f.mu.Unlock()
		if live == 0 {
			return late
		}
		if time.Since(start) > 5*time.Second {
			t.Fatalf("%d events and streams are left", live)
		}
	}
}

func TestPlace(t *testing.T) {
	for _, c := range []struct{ begin, took, given, wantBegin, wantEnd int64 }{
		{100, 50, 20, 100, 150}, // it waited in the stream
		{100, 50, 110, 110, 150},
		{100, 50, 160, 160, 210}, // the base is not exact
		{-5, 3, 0, 0, 3},
	} {
		if b, e := place(c.begin, c.took, c.given); int64(b) != c.wantBegin || int64(e) != c.wantEnd {
			t.Errorf("%+v: %d to %d", c, b, e)
		}
	}
}

// Where the machine is too busy to see the first base in time, later work is not placed before the end of earlier work in its stream.
func TestInexactBase(t *testing.T) {
	f, out := newFake(), &result{}
	f.late, f.lateTo = 3*time.Millisecond, time.Now().Add(200*time.Millisecond)
	r := Start(Config{Driver: f, Write: out.write})
	made := 0
	for begun := time.Now(); time.Since(begun) < baseEvery+300*time.Millisecond; made++ {
		sp := r.Begin(1, 7, true)
		f.work(200 * time.Microsecond)
		r.End(sp, wire.TraceRecord{Stream: 7}, "")
		time.Sleep(100 * time.Microsecond)
	}
	r.Stop()
	list, _ := out.parse(t)
	var ends uint64
	on := 0
	for _, rec := range list {
		if rec.Flags&wire.TraceGPU == 0 {
			continue
		}
		if on++; rec.Begin < ends || rec.End < rec.Begin {
			t.Fatalf("record %d is from %d to %d, and the one before it ends at %d", on, rec.Begin, rec.End, ends)
		}
		ends = rec.End
	}
	if on < made/2 {
		t.Errorf("%d of %d records have the GPU's times", on, made)
	}
}

// A reader who takes nothing costs memory within bounds, and the trace says how many records it lacks.
func TestOverflow(t *testing.T) {
	f, out := newFake(), &result{}
	hold := make(chan struct{})
	r := Start(Config{Driver: f, Write: func(p []byte, last bool) error {
		<-hold
		return out.write(p, last)
	}})
	const n = 200_000
	for i := range uint32(n) {
		r.CallBegins(i, "call")
		r.CallEnds(i)
		if i%1000 == 0 {
			r.mu.Lock()
			if len(r.buf) > bufferMost {
				t.Fatalf("%d bytes wait", len(r.buf))
			}
			r.mu.Unlock()
		}
	}
	close(hold)
	end(t, r)
	list, _ := out.parse(t)
	kept, lost := 0, uint64(0)
	for _, m := range list {
		switch m.Kind {
		case wire.SpanWait:
			kept++
		case wire.SpanLost:
			lost += m.Amount
		}
	}
	if lost == 0 || uint64(kept)+lost != n {
		t.Errorf("%d records are there and %d are said to be lost, of %d", kept, lost, n)
	}
	t.Logf("%d kept, %d lost, %d bytes", kept, lost, out.b.Len())
}

// No trace is larger than its limit, and the last record says what is missing.
func TestLimit(t *testing.T) {
	f, out := newFake(), &result{}
	r := Start(Config{Driver: f, Write: out.write, Limit: 10_000})
	for i := range uint32(1000) {
		r.CallBegins(i, fmt.Sprint("call ", i))
		r.CallEnds(i)
	}
	end(t, r)
	list, _ := out.parse(t)
	if last := list[len(list)-1]; out.b.Len() > 10_000 || last.Kind != wire.SpanLost || int(last.Amount)+len(list)-1 != 1000 {
		t.Errorf("%d bytes, %d records, the last is %+v", out.b.Len(), len(list), list[len(list)-1])
	}
}

// Names are told once each, long ones are cut, and only so many are kept.
func TestNames(t *testing.T) {
	f, out := newFake(), &result{}
	r := Start(Config{Driver: f, Write: out.write})
	long := string(bytes.Repeat([]byte{'x'}, 5000))
	for range 2 {
		for i, name := range []string{"a", "\x00\"\xff\n", long, ""} {
			r.CallBegins(uint32(i), name)
			r.CallEnds(uint32(i))
		}
	}
	for i := range uint32(2 * maxNames) {
		r.CallBegins(i, fmt.Sprint(i))
		r.CallEnds(i)
	}
	end(t, r)
	_, names := out.parse(t)
	if len(names) != maxNames || names[1] != "a" || names[2] != "\x00\"\xff\n" || names[3] != long[:wire.MaxTraceName] {
		t.Errorf("%d names: %.50q, %.50q, %.50q", len(names), names[1], names[2], names[3])
	}
}

// What lasts when a trace begins has begun with it, and what lasts when it ends ends with it.
func TestStates(t *testing.T) {
	f, out := newFake(), &result{}
	r := Start(Config{Driver: f, Write: out.write})
	r.Turn(3, gate.InTurn, false)
	r.Turn(1, gate.AwaitsTurn, true)
	r.Turn(1, gate.AwaitsTurn, false)
	r.Cut(true)
	r.HostFnBegins(9)
	r.HostFnBegins(9)
	r.HostFnEnds(9)
	r.HostFnEnds(9)
	r.HostFnEnds(9)
	end(t, r)
	list, _ := out.parse(t)
	var kinds []uint16
	for _, m := range list {
		kinds = append(kinds, m.Kind)
	}
	if fmt.Sprint(kinds) != fmt.Sprint([]uint16{wire.SpanTurn, wire.SpanTurnWait, wire.SpanHostFn, wire.SpanHostFn, wire.SpanCut}) || list[0].Begin != 0 || list[0].Device != 3 {
		t.Errorf("%v: %+v", kinds, list)
	}
}

// What has begun when a trace is stopped has a record up to the stop, which says that it had not ended. What ends later has no other.
func TestOpen(t *testing.T) {
	f, out := newFake(), &result{}
	r := Start(Config{Driver: f, Write: out.write})
	r.CallBegins(1, "ended")
	r.CallEnds(1)
	r.CallBegins(2, "long")
	r.HostFnBegins(9)
	r.HostFnBegins(9)
	r.Turn(1, gate.InTurn, true)
	begun := r.now()
	for r.now() == begun {
	}
	r.Stop()
	r.CallEnds(2)
	r.HostFnEnds(9)
	r.Turn(1, gate.InTurn, false)
	end(t, r)
	list, names := out.parse(t)
	got := map[string]int{}
	for _, m := range list {
		got[fmt.Sprintf("%d %s %d", m.Kind, names[m.Name], m.Flags)]++
		if m.Flags == wire.TraceOpen && (m.Begin > begun || m.End <= begun || m.Given != m.Begin) {
			t.Errorf("%+v: it had begun by %d and not ended", m, begun)
		}
	}
	want := map[string]int{
		fmt.Sprintf("%d ended 0", wire.SpanWait):                 1,
		fmt.Sprintf("%d long %d", wire.SpanWait, wire.TraceOpen): 1,
		fmt.Sprintf("%d  %d", wire.SpanHostFn, wire.TraceOpen):   2,
		fmt.Sprintf("%d  %d", wire.SpanTurn, wire.TraceOpen):     1,
	}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A context that goes takes its events along; what it had is in the trace, and nothing asks for it afterwards.
func TestForget(t *testing.T) {
	f, out := newFake(), &result{}
	r := Start(Config{Driver: f, Write: out.write})
	for _, ctx := range []uint64{1, 2} {
		sp := r.Begin(ctx, 5, true)
		r.End(sp, wire.TraceRecord{Kind: wire.SpanKernel, Device: uint32(ctx)}, "k")
	}
	r.Forget(1)
	r.mu.Lock()
	if len(r.events[1]) > 0 {
		t.Error("its events are kept")
	}
	r.mu.Unlock()
	end(t, r)
	if list, _ := out.parse(t); len(list) != 2 {
		t.Errorf("%+v", list)
	}
}

// Many threads, and a reader whose connection breaks.
func TestConcurrent(t *testing.T) {
	f, out := newFake(), &result{}
	for range 20 {
		n := 0
		r := Start(Config{Driver: f, Write: func(p []byte, last bool) error {
			if n++; n > 3 {
				return fmt.Errorf("gone")
			}
			return out.write(p, last)
		}})
		var all sync.WaitGroup
		for i := range uint64(4) {
			all.Go(func() {
				for k := range uint32(300) {
					sp := r.Begin(i%2, i, true)
					f.work(time.Microsecond)
					r.End(sp, wire.TraceRecord{Kind: wire.SpanKernel}, fmt.Sprint(k%5))
					r.CallBegins(k, "c")
					r.CallEnds(k)
					r.Turn(int(i), gate.InTurn, k%2 == 0)
					if k == 150 {
						r.Forget(i % 2)
					}
				}
			})
		}
		all.Wait()
		end(t, r)
	}
}
