package probe

import (
	"cmp"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

const (
	// sampleTime is the time between two samples, unless there would be too many.
	sampleTime = 4 * time.Millisecond
	// begins is the part of a flow's time that is not counted, a 4th: TCP finds the link's rate, and a shaper lets a burst through.
	begins = 4
	// parts are those of a flow's time that are compared with each other.
	parts = 5
	// leastTime is the shortest time from which a rate is computed, and leastPart the shortest part.
	leastTime = 5 * time.Millisecond
	leastPart = 20 * time.Millisecond
	// mostRate is in bytes a second. No link is faster, and an owner may say anything.
	mostRate = 1e15
)

// sample says that so many bytes had arrived at a time, by a clock of the receiver's.
type sample struct {
	at    int64 // nanoseconds
	bytes uint64
}

// sampler keeps samples of a flow, at most maxSamples: when there are more it keeps every second.
type sampler struct {
	every int64 // nanoseconds
	list  []sample
}

func (s *sampler) due(t int64) bool {
	return len(s.list) == 0 || t-s.list[len(s.list)-1].at >= s.every
}

// add appends a sample. The last one is kept whenever it comes.
func (s *sampler) add(t int64, bytes uint64, last bool) {
	if !last && !s.due(t) {
		return
	}
	if len(s.list) >= maxSamples {
		n := 0
		for i := 0; i < len(s.list); i += 2 {
			s.list[n] = s.list[i]
			n++
		}
		s.list, s.every = s.list[:n], 2*s.every
	}
	if n := len(s.list); n > 0 { // the kernel's count is asked for after the time: never backwards
		t, bytes = max(t, s.list[n-1].at), max(bytes, s.list[n-1].bytes)
	}
	s.list = append(s.list, sample{t, bytes})
}

// settled leaves out the samples of a flow's end that say only that all had come, but not when: a receiver that waited for a processor takes
// them late. It keeps two.
func settled(list []sample) []sample {
	n := len(list)
	for n > 2 && list[n-1].bytes == list[len(list)-1].bytes {
		n--
	}
	return list[:n]
}

// at is how many bytes had arrived by a time, between two samples in proportion.
func at(list []sample, t int64) float64 {
	for i, s := range list {
		if s.at < t {
			continue
		}
		if i == 0 || s.at == t {
			return float64(s.bytes)
		}
		b := list[i-1]
		return float64(b.bytes) + float64(s.bytes-b.bytes)*float64(t-b.at)/float64(s.at-b.at)
	}
	return float64(list[len(list)-1].bytes)
}

// after is the first sample at a time or later, before is the last one at a time or earlier. The time is between the first and the last.
func after(list []sample, t int64) sample {
	i, _ := slices.BinarySearchFunc(list, t, func(s sample, t int64) int { return cmp.Compare(s.at, t) })
	return list[min(i, len(list)-1)]
}

func before(list []sample, t int64) sample {
	i, _ := slices.BinarySearchFunc(list, t+1, func(s sample, t int64) int { return cmp.Compare(s.at, t) })
	return list[max(i-1, 0)]
}

// perSecond is a rate in bytes a second.
func perSecond(bytes float64, ns int64) uint64 {
	return uint64(max(min(bytes/time.Duration(ns).Seconds(), mostRate), 0))
}

// rates fills in what connections had together while all of them were under way.
func rates(f *lease.ProbeFlow, all [][]sample) {
	var from, to int64
	for i, list := range all {
		if len(list) < 2 {
			return
		}
		if first := list[0].at; i == 0 || first > from {
			from = first
		}
		if last := list[len(list)-1].at; i == 0 || last < to {
			to = last
		}
	}
	if to <= from {
		return
	}
	f.Time = time.Duration(to - from)
	if f.Time < leastTime {
		return
	}
	// What may have arrived before the time is not counted, nor what may have come after it: so the rate is not above the link's, but for
	// what waits behind a lost segment when the time begins.
	first := from
	from = after(all[0], from+(to-from)/begins).at
	if to-from < (to-first)/2 { // few samples: the receiver had no processor
		from = first
	}
	var sum float64
	for _, list := range all {
		sum += float64(before(list, to).bytes) - float64(after(list, from).bytes)
	}
	f.Rate = perSecond(sum, to-from)
	between := func(a, b int64) (sum float64) {
		for _, list := range all {
			sum += at(list, b) - at(list, a)
		}
		return sum
	}
	if part := (to - from) / parts; part >= int64(leastPart) {
		for i := range int64(parts) {
			r := perSecond(between(from+i*part, from+(i+1)*part), part)
			if f.High = max(f.High, r); i == 0 || r < f.Low {
				f.Low = r
			}
		}
	}
}
