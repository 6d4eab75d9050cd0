package account

import (
	"path/filepath"
	"sync/atomic"
	"testing"
)

// partRig is a lease's account with sessions, of parts or of none.
type partRig struct {
	t     *testing.T
	f     *File
	dir   string
	parts map[string]*Part
}

func newPartRig(t *testing.T, mib uint64) *partRig {
	t.Helper()
	f, err := CreateAnonymous([]uint64{mib << 20})
	if err != nil {
		t.Fatal(err)
	}
	return &partRig{t: t, f: f, dir: t.TempDir(), parts: map[string]*Part{}}
}

func (r *partRig) part(name string, mib uint64) {
	r.t.Helper()
	p, err := CreatePart(filepath.Join(r.dir, name), []uint64{mib << 20})
	if err != nil {
		r.t.Fatal(err)
	}
	r.parts[name] = p
}

// session opens a session of a part, "" for none.
func (r *partRig) session(part string) *Session {
	r.t.Helper()
	var caps []uint64
	if p := r.parts[part]; p != nil {
		caps = p.caps
	}
	slot, err := r.f.Claim(Client{PID: 1}, 0, int64(r.f.high()+1))
	if err != nil {
		r.t.Fatal(err)
	}
	p := r.parts[part]
	if p != nil {
		if err := p.Add(r.f, slot); err != nil {
			r.t.Fatal(err)
		}
	}
	s, err := r.f.again(slot)
	if err == nil && p != nil {
		var own *Part // as another process opens it
		if own, err = OpenPart(filepath.Join(r.dir, part), caps); err == nil {
			err = s.Join(own)
		}
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// The sessions of a part have its cap together, and the lease's bounds all.
func TestPartCaps(t *testing.T) {
	r := newPartRig(t, 100)
	r.part("a", 20)
	r.part("b", 70)
	r.parts["a"].layout().cap[0].Store(1 << 40) // any session of the part can write that
	a1, a2, b, all := r.session("a"), r.session("a"), r.session("b"), r.session("")
	if !a1.Reserve(0, 12<<20) || a2.Reserve(0, 10<<20) || !a2.Reserve(0, 8<<20) || a1.Reserve(0, Granule) {
		t.Error("the part has 20 MiB, not more and not less")
	}
	if i := a1.Info(0); i.Total != 20<<20 || i.Free() != 0 || i.Used != 20<<20 {
		t.Errorf("%+v", i)
	}
	if n := len(a1.Processes(0)); n != 2 {
		t.Errorf("the part sees %d processes", n)
	}
	if !b.Reserve(0, 30<<20) || !all.Reserve(0, 40<<20) || len(all.Processes(0)) != 4 {
		t.Error("there is room in the lease")
	}
	// The part has 40 MiB left, the lease 10.
	if i := b.Info(0); i.Total != 70<<20 || i.Free() != 10<<20 {
		t.Errorf("%+v, free %d", i, i.Free())
	}
	if b.Reserve(0, 12<<20) || !b.Reserve(0, 10<<20) || all.Reserve(0, Granule) {
		t.Error("all together have 100 MiB")
	}
	a1.Release(0, 4<<20)
	if a2.Overhead(0, 6<<20, false) || !a2.Overhead(0, 4<<20, false) || b.Reserve(0, Granule) {
		t.Error("overhead counts in the part")
	}
	// What a dead session held is free for its part again, and its slot is of no part with its next session.
	all.Release(0, 40<<20)
	a1.Close()
	if !a2.Reserve(0, 8<<20) || a2.Reserve(0, Granule) {
		t.Error("the part has 8 MiB again")
	}
	if err := r.f.Free(a1.slot); err != nil {
		t.Fatal(err)
	}
	next := r.session("")
	if next.slot != a1.slot || !next.Reserve(0, 20<<20) || a2.Info(0).Used != 20<<20 {
		t.Errorf("slot %d after %d, the part uses %d", next.slot, a1.slot, a2.Info(0).Used)
	}
}

// Memory that one session lent to another is charged to the heir's part, where that has room.
func TestPartInherits(t *testing.T) {
	r := newPartRig(t, 100)
	r.part("a", 40)
	r.part("b", 20)
	from, same, other := r.session("a"), r.session("a"), r.session("b")
	if !from.Reserve(0, 30<<20) {
		t.Fatal("no room")
	}
	life := same.Life(from.slot)
	for _, s := range []*Session{same, other} {
		s.Borrow(1)
	}
	from.Lend(0, 30<<20)
	from.Close()
	if other.Inherit(0, from.slot, life, 30<<20) {
		t.Error("30 MiB are too much for a part of 20")
	}
	if !same.Reserve(0, 10<<20) || same.Reserve(0, Granule) {
		t.Error("what is lent is charged to the part until it is inherited")
	}
	if !same.Inherit(0, from.slot, life, 30<<20) || same.Info(0).Used != 40<<20 {
		t.Errorf("the part has room for what was its own: %+v", same.Info(0))
	}
}

// A part owes for itself, where only the lease's sessions and the starter write.
func TestPartDebts(t *testing.T) {
	r := newPartRig(t, 100)
	r.part("a", 20)
	a, all := r.session("a"), r.session("")
	store := func(d Debts, kept bool, n uint64) {
		t.Helper()
		if !kept || !d.Debts(func(debt, debited *atomic.Uint64) { debt.Store(n); debited.Store(n + 1) }) ||
			!d.Excused(func(until, span *atomic.Uint64) { until.Store(n + 2); span.Store(n + 3) }) {
			t.Fatal("no debts")
		}
	}
	d, kept := a.Debts(0)
	store(d, kept, 10)
	d, kept = all.Debts(0)
	store(d, kept, 20)
	for _, c := range []struct {
		get  func(int) (Debts, bool)
		want uint64
	}{{r.parts["a"].Debts, 10}, {r.f.Debts, 20}} {
		d, ok := c.get(0)
		var got []uint64
		d.Debts(func(debt, debited *atomic.Uint64) { got = append(got, debt.Load(), debited.Load()) })
		d.Excused(func(until, span *atomic.Uint64) { got = append(got, until.Load(), span.Load()) })
		if !ok || len(got) != 4 || got[0] != c.want || got[1] != c.want+1 || got[2] != c.want+2 || got[3] != c.want+3 {
			t.Errorf("%v, want from %d", got, c.want)
		}
	}
	d, _ = a.Debts(0)
	d.SetOverdue(true)
	if r.f.DeniesOverdue(a.slot, 0) || !r.f.DeniesOverdue(all.slot, 0) {
		t.Error("a session says in the lease's account that it has overdue work")
	}
}
