package turns

// Excuses: overdue work that is not charged, because another tenant's overdue work delays it.
//
// Any session can say in the state file that its work is overdue, or another's is, and excuse a thief by it. So overdue work of others excuses
// a lease for no more than an eighth of the site's limit at a time, and an eighth of all time in the long run. A turn that another's overdue
// work slows ends some milliseconds late; work that is overdue for longer has another cause.
//
// What a lease has been excused is kept where its debt is (DebtStore), in two words that all of its sessions share. One is the time
// of the clock at which nothing of it counts any more. The other is the latest span of time that the lease was excused for: several
// sessions have overdue work at the same time, and the lease is excused for that time once.

import (
	"sync/atomic"
	"time"
)

const (
	excusedPart = 8
	excusedRate = 8
)

// endTime is how much longer than the site's limit overdue work of a session that has to end may stay, ns.
const endTime = int64(time.Second)

// excused is what this process was excused, where the lease has no DebtStore.
type excused struct{ until, span atomic.Uint64 }

// excuses says whether overdue work of the tenant cause excuses that of another from one time to another.
func (p *pages) excuses(v *view, tenant, cause int, from, to int64) bool {
	limit := p.limit()
	if limit == 0 || !p.endsOverruns(v, cause) && v.owes(cause) > 0 { // it may stay for any time, and pays
		return true
	}
	ok := false
	f := func(until, span *atomic.Uint64) { ok = excuse(until, span, from, to, limit) }
	if st := p.stores[tenant]; st == nil || !st.Excused(f) {
		f(&p.excused.until, &p.excused.span)
	}
	return ok
}

// excuse takes the time from one time to another from what a lease may be excused, and says whether there was enough.
func excuse(until, span *atomic.Uint64, from, to, limit int64) bool {
	was := spanWord(span.Load())
	asked := (to - from - was.overlap(from, to)) * excusedRate
	if asked == 0 {
		return true
	}
	most := limit / excusedPart * excusedRate
	for range 1000 {
		old := until.Load()
		after := to + min(max(int64(old)-to, 0), most) + asked
		if after > to+most {
			return false
		}
		if until.CompareAndSwap(old, uint64(after)) {
			// If another session was faster, time that it was excused for as well counts twice.
			span.CompareAndSwap(uint64(was), uint64(was.with(from, to)))
			return true
		}
	}
	return false
}

// A spanWord has the end of a span of time, in us, and its length.
type spanWord uint64

const spanMost = 1<<16 - 1 // us

func (w spanWord) bounds() (from, to int64) {
	to = int64(w>>16) * 1000
	return to - int64(w&spanMost)*1000, to
}

// overlap returns how much of the time from one time to another is in the span, ns.
func (w spanWord) overlap(from, to int64) int64 {
	begin, end := w.bounds()
	return max(min(to, end)-max(from, begin), 0)
}

// with returns the span and a time that begins or ends in it. Of a time that does not touch the span it returns the later one.
func (w spanWord) with(from, to int64) spanWord {
	begin, end := w.bounds()
	switch {
	case from <= end+1000 && to >= begin: // ends are kept in us
		from, to = min(from, begin), max(to, end)
	case to < end:
		return w
	}
	us := uint64(to) / 1000
	return spanWord(us<<16 | min(us-min(uint64(max(from, 0)+999)/1000, us), spanMost))
}

// excusesStop says whether a tenant keeps its claim to a turn, given at a time, that it does not take.
func (p *pages) excusesStop(tenant int, begin, now int64) bool {
	cause, since := p.causeOf(tenant, nobody, begin, now)
	if cause == nobody {
		return false
	}
	limit := p.limit()
	if limit == 0 || now-since <= limit+endTime {
		return true
	}
	var v view
	p.load(&v, now)
	return !p.endsOverruns(&v, cause)
}
