package account

import (
	"path/filepath"
	"sync/atomic"
	"testing"
)

// A lease's sessions and their starter share its debts, by device, and they outlive the sessions. Whose work is overdue is said by session.
func TestDebts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "account")
	a, err := Create(path, []uint64{Granule, Granule})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	set := func(d Debts, n uint64) {
		if !d.Debts(func(debt, debited *atomic.Uint64) { debt.Add(n); debited.Add(10 * n) }) ||
			!d.Excused(func(until, span *atomic.Uint64) { until.Add(100 * n); span.Add(1000 * n) }) {
			t.Error("no debts")
		}
	}
	get := func(d Debts) (n [4]uint64) {
		d.Debts(func(debt, debited *atomic.Uint64) { n[0], n[1] = debt.Load(), debited.Load() })
		d.Excused(func(until, span *atomic.Uint64) { n[2], n[3] = until.Load(), span.Load() })
		return n
	}
	var sessions [2]*Session
	for i := range sessions {
		slot, err := a.Claim(Client{PID: 1, Name: "one"}, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if sessions[i], err = a.again(slot); err != nil {
			t.Fatal(err)
		}
		for dev := range 2 {
			d, kept := sessions[i].Debts(dev)
			if !kept {
				t.Fatal("no debts")
			}
			set(d, uint64(1+dev))
			if !a.DeniesOverdue(slot, dev) {
				t.Errorf("session %d has overdue work on device %d", i, dev)
			}
		}
	}
	first, _ := sessions[0].Debts(0)
	second, _ := sessions[0].Debts(1)
	other, _ := sessions[1].Debts(1)
	first.SetOverdue(true)
	second.SetOverdue(true)
	other.SetOverdue(true)
	second.SetOverdue(false)
	for i, want := range [2][2]bool{{true, false}, {false, true}} {
		for dev := range 2 {
			if got := !a.DeniesOverdue(sessions[i].slot, dev); got != want[dev] {
				t.Errorf("session %d, device %d: overdue %v", i, dev, got)
			}
		}
	}
	sessions[0].Close()
	if err := a.Free(0); err != nil {
		t.Fatal(err)
	}
	if slot, err := a.Claim(Client{PID: 2, Name: "two"}, 0, 0); err != nil || slot != 0 || !a.DeniesOverdue(0, 0) {
		t.Errorf("the next session, of slot %d, has overdue work (%v)", slot, err)
	}
	again, err := Open(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for dev := range 2 {
		d, kept := again.Debts(dev)
		if got, want := get(d), [4]uint64{uint64(2 + 2*dev), uint64(20 + 20*dev), uint64(200 + 200*dev), uint64(2000 + 2000*dev)}; !kept || got != want {
			t.Errorf("device %d: %v, want %v", dev, got, want)
		}
		d.SetOverdue(true) // says nothing of any session
	}
	for _, dev := range []int{-1, 2} {
		if _, kept := again.Debts(dev); kept || again.DeniesOverdue(0, -1) {
			t.Errorf("there is a device %d", dev)
		}
	}
	d, _ := again.Debts(0)
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if d.Debts(func(_, _ *atomic.Uint64) { t.Error("called") }) || d.Excused(func(_, _ *atomic.Uint64) { t.Error("called") }) {
		t.Error("a closed account has debts")
	}
	// An account of a release before this one.
	a.layout().keepsDebts.Store(0)
	if _, kept := a.Debts(0); kept || a.DeniesOverdue(1, 0) {
		t.Error("an account without debts has some")
	}
}
