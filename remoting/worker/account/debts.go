package account

import (
	"sync/atomic"
	"unsafe"
)

// Debts is what a lease owes of a device's time, or a part of it, and what it was excused: four words that its sessions and their starter share, and that
// no other lease's session can write. They are zero at first and outlive the sessions. Package turns says what is in them.
type Debts struct {
	words         *mapping
	debt, excused int // their places in the file; the other word of a pair is pairSize behind
	file          *File
	dev           int
	slot          int // -1: the starter's
}

// Debts returns the debts of a device. There are none in an account that a release before this one has made.
func (a *File) Debts(dev int) (d Debts, kept bool) { return a.debts(dev, -1) }

func (a *File) debts(dev, slot int) (d Debts, kept bool) {
	err := a.guard(func() { kept = dev >= 0 && dev < len(a.caps) && a.layout().keepsDebts.Load() == 1 })
	return Debts{words: &a.mapping, debt: int(unsafe.Offsetof(accountFile{}.debt)) + 8*dev, excused: int(unsafe.Offsetof(accountFile{}.excused)) + 8*dev, file: a, dev: dev, slot: slot}, kept && err == nil
}

// Debts calls f with the two words of the debt. It returns false if they cannot be used any more.
func (d Debts) Debts(f func(debt, debited *atomic.Uint64)) bool {
	return d.words.guard(func() { f(d.words.word(d.debt), d.words.word(d.debt+pairSize)) }) == nil
}

// Excused calls f with the two words of what the lease was excused, as Debts does.
func (d Debts) Excused(f func(until, span *atomic.Uint64)) bool {
	return d.words.guard(func() { f(d.words.word(d.excused), d.words.word(d.excused+pairSize)) }) == nil
}

// SetOverdue notes whether this session has overdue work on the device.
func (d Debts) SetOverdue(is bool) {
	if d.slot < 0 {
		return
	}
	_ = d.file.guard(func() {
		if w := &d.file.layout().overdue[d.slot]; is {
			w.Or(1 << d.dev)
		} else {
			w.And(^(uint64(1) << d.dev))
		}
	})
}

// DeniesOverdue says whether the session of a slot, by its own word, has no overdue work on a device. In an account that a release before
// this one has made sessions say nothing about that.
func (a *File) DeniesOverdue(slot, dev int) (denies bool) {
	_ = a.guard(func() {
		denies = slot >= 0 && slot < MaxSlots && dev >= 0 && a.layout().keepsDebts.Load() == 1 && a.layout().overdue[slot].Load()>>dev&1 == 0
	})
	return denies
}

// Debts is File.Debts for a session. One of a part owes for the part.
func (s *Session) Debts(dev int) (d Debts, kept bool) {
	d, kept = s.file.debts(dev, s.slot)
	if s.part != nil {
		of, ok := s.part.Debts(dev)
		d.words, d.debt, d.excused, kept = of.words, of.debt, of.excused, kept && ok
	}
	return d, kept
}

// Debts is File.Debts for the starter of a lease's sessions.
func (l *Lease) Debts(dev int) (Debts, bool) { return l.file.Debts(dev) }
