package shares

import (
	"encoding/binary"
	"io"
	"os"
	"slices"
	"time"
)

// A span is what one process did on the engine without a pause (struct sim_span in remoting/simgpu/state.h). Spans do not
// overlap, and come in order.
type span struct {
	dev              uint32
	pid              int32
	start, end, busy time.Duration // of the simulated clock
	items            uint64
	real             time.Duration // CLOCK_MONOTONIC at its end
	tag              uint64
}

const spanSize = 56

// trace is the trace of one engine, read as far as it is written.
type trace struct {
	path  string
	spans []span
	at    int64
}

func (t *trace) read() {
	f, err := os.Open(t.path)
	if err != nil {
		return // nothing has run yet
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, t.at, 1<<40))
	if err != nil {
		return
	}
	for ; len(b) >= spanSize; b = b[spanSize:] {
		u := func(at int) uint64 { return binary.NativeEndian.Uint64(b[at:]) }
		d := func(at int) time.Duration { return time.Duration(u(at)) }
		t.spans = append(t.spans, span{
			dev: binary.NativeEndian.Uint32(b), pid: int32(binary.NativeEndian.Uint32(b[4:])),
			start: d(8), end: d(16), busy: d(24), items: u(32), real: d(40), tag: u(48),
		})
		t.at += spanSize
	}
}

// now is the end of what the engine did last.
func (t *trace) now() time.Duration {
	t.read()
	if len(t.spans) == 0 {
		return 0
	}
	return t.spans[len(t.spans)-1].end
}

// within gives the spans that touch a stretch of time.
func (t *trace) within(from, to time.Duration) []span {
	first, _ := slices.BinarySearchFunc(t.spans, from, func(s span, at time.Duration) int {
		if s.end <= at {
			return -1
		}
		return 1
	})
	last := first
	for last < len(t.spans) && t.spans[last].start < to {
		last++
	}
	return t.spans[first:last]
}

// busy is how long the engine worked for a tenant between two times; 0 is for all of them.
func (t *trace) busy(tag uint64, from, to time.Duration) time.Duration {
	var sum time.Duration
	for _, s := range t.within(from, to) {
		if tag != 0 && s.tag != tag {
			continue
		}
		in := min(s.end, to) - max(s.start, from)
		sum += time.Duration(float64(s.busy) * float64(in) / float64(s.end-s.start))
	}
	return sum
}

// part is the same as a part of that time, in percent.
func (t *trace) part(tag uint64, from, to time.Duration) float64 {
	return 100 * float64(t.busy(tag, from, to)) / float64(to-from)
}

// gap is the longest time in which the engine did nothing for a tenant, and when it began.
func (t *trace) gap(tag uint64, from, to time.Duration) (longest, at time.Duration) {
	last := from
	for _, s := range t.within(from, to) {
		if s.tag != tag {
			continue
		}
		if s.start-last > longest {
			longest, at = s.start-last, last
		}
		last = s.end
	}
	if to-last > longest {
		longest, at = to-last, last
	}
	return longest, at
}

// switches is how often another process had the engine than before.
func (t *trace) switches(from, to time.Duration) int {
	n := 0
	all := t.within(from, to)
	for i := range all {
		if i > 0 && all[i].pid != all[i-1].pid {
			n++
		}
	}
	return n
}
