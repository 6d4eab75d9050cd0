package turns

import (
	"testing"
	"time"
)

// A part of a lease takes its share of what the lease owes, and gives back to the lease what it owes itself when it ends, with its counters.
func TestParts(t *testing.T) {
	b, clock, thieves, victim := overdueThieves(t, Site{})
	thief := thieves[0].tenant
	overrun(clock, thieves, 10*time.Second)
	for _, m := range thieves {
		m.SetOverdue(0)
	}
	before := owes(t, b, "thief")
	set := func(p Policy) {
		t.Helper()
		if err := b.Set(thief, p); err != nil {
			t.Fatal(err)
		}
	}
	set(fixedShare(6))
	part, err := b.AddPart(thief, "3", fixedShare(4))
	if err != nil {
		t.Fatal(err)
	}
	b.MoveDebt(thief, part, 4, 10)
	if again, err := b.AddPart(thief, "3", fixedShare(4)); again != part || err != nil {
		t.Errorf("added again: %d, %v; it was %d", again, err, part)
	}
	find := func(name string) TenantCounters {
		t.Helper()
		for _, c := range b.Read() {
			if c.Lease == "thief" && c.Part == name {
				return c
			}
		}
		t.Fatalf("no part %q of the lease: %+v", name, b.Read())
		return TenantCounters{}
	}
	if l, p := find(""), find("3"); !about(p.Owes, before*4/10) || !about(l.Owes, before*6/10) || l.Share != 600 || p.Share != 400 || p.Tenant != part {
		t.Errorf("of %v the lease owes %v and its part %v; shares %d, %d", before, l.Owes, p.Owes, l.Share, p.Share)
	}
	// The debt is paid by each of them.
	victim.Done(victim.Turn())
	victim.Withdraw()
	m := join(t, b, part, clock)
	take(t, m)
	clock.now += 5 * ms
	m.Done(m.Turn())
	m.Withdraw()
	if find("3").Turns != 1 {
		t.Errorf("%+v", find("3"))
	}
	owe := find("").Owes + find("3").Owes
	b.RemovePart(part, thief)
	set(fixedShare(10))
	if l := find(""); !about(l.Owes, owe) || l.Turns != 1 || l.Share != 1000 {
		t.Errorf("it owes %v of %v, and has had %d turns; share %d", l.Owes, owe, l.Turns, l.Share)
	}
	for _, c := range b.Read() {
		if c.Part != "" {
			t.Errorf("still there: %+v", c)
		}
	}
	if _, err := b.AddPart(99, "1", fixedShare(1)); err == nil {
		t.Error("a part of no lease")
	}
}

// What a lease or a part has had beyond its share stays with the lease, however often parts begin and end.
func TestPartsAhead(t *testing.T) {
	b, clock, thieves, _ := overdueThieves(t, Site{})
	lease := thieves[0].tenant
	add := func(rest uint32) {
		t.Helper()
		if n, err := b.Add("thief", fixedShare(rest)); n != lease || err != nil {
			t.Fatal(n, err)
		}
	}
	ahead := func(i int) time.Duration {
		var v view
		b.p.load(&v, b.p.now())
		return time.Duration(v.ahead(i))
	}
	clock.now += 5 * ms
	var had time.Duration
	for range 20 {
		add(6)
		part, err := b.AddPart(lease, "3", fixedShare(4))
		if err != nil {
			t.Fatal(err)
		}
		b.MoveDebt(lease, part, 4, 10)
		if sum := ahead(lease) + ahead(part); !about(sum, had) || !about(ahead(part), had*4/10) {
			t.Fatalf("a part begins with %v of %v, and its lease has %v", ahead(part), had, ahead(lease))
		}
		// It takes a turn.
		var v view
		b.p.load(&v, b.p.now())
		b.p.setAhead(&v, part, v.ahead(part)+20*ms)
		had += 20 * time.Millisecond
		b.RemovePart(part, lease)
		add(10)
		if !about(ahead(lease), had) {
			t.Fatalf("the lease has had %v of %v too much", ahead(lease), had)
		}
	}
}
