package workers

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
	"github.com/sluice-hpc/sluice/remoting/worker/turns/turnstest"
)

// A lease is reported if the driver saw its programs on a GPU for longer than its policy allows, whatever the schedule
// says and whatever its own sessions say that it owes. A lease within its policy is not.
func TestExcess(t *testing.T) {
	dir := setup(t)
	for _, c := range []struct {
		name    string
		policy  lease.Policy
		percent float64 // that the driver sees of it
		others  float64 // and of another lease
		owes    bool    // it says that it owes a day of the clock
		told    int     // times in 100 s, which are looked at ten times
	}{
		{"its share", lease.Fixed, 10, 40, false, 0},
		{"the driver is not exact", lease.Fixed, 19, 81, false, 0},
		{"half of the GPU", lease.Fixed, 47, 40, false, 2},
		{"half of the GPU, and it says that it owes for that", lease.Fixed, 47, 40, true, 2},
		{"all of it", lease.Fixed, 100, 10, false, 5},
		{"a long kernel, while no other lease has work", lease.Fixed, 100, 0, false, 0},
		{"time that others lend", lease.BestEffort, 90, 10, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPool(t, dir, nil)
			l := testLease("a", 0)
			l.Request.Policy, l.Grants[0].Percent = c.policy, 10
			if err := p.Share(l); err != nil {
				t.Fatal(err)
			}
			other := testLease("b", 0)
			if err := p.Share(other); err != nil {
				t.Fatal(err)
			}
			mine, its := startIdle(t, p, l), startIdle(t, p, other)
			part := func(percent float64) time.Duration { return time.Duration(percent * float64(time.Second) / 10) }
			at, told := time.Now(), 0
			for range 11 {
				if c.owes {
					writeDebt(t, p, l.ID, 24*time.Hour)
				}
				p.AddBusy(at, map[string]map[int]time.Duration{simUUID(0): {mine: part(c.percent), its: part(c.others), 1: time.Second}})
				at = at.Add(10 * time.Second)
				for _, o := range p.overruns(at) {
					told++
					if o.Lease.ID != l.ID || o.GPU != simUUID(0) || o.Ended || o.Time < excessLimit || !strings.Contains(o.Reason, "outside of their turns") {
						t.Errorf("%+v", o)
					}
				}
			}
			if told != c.told {
				t.Errorf("told %d times, want %d", told, c.told)
			}
			for _, id := range []string{l.ID, other.ID} {
				if err := p.End(t.Context(), id); err != nil {
					t.Error(err)
				}
				if err := p.Forget(id); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// writeDebt writes into the schedule of GPU 0 and into its own lease's account, as a session that was taken over can, that its lease owes
// time for so long.
func writeDebt(t *testing.T, p *Pool, id string, d time.Duration) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	liar := turnstest.NewLiar(t, p.schedules[simUUID(0)])
	n := liar.TenantOf(id)
	w := liar.Debt(n, turns.Monotonic{}.Now()+int64(d))
	liar.Tenant(n, turnstest.TenantDebt).Store(w)
	debts, kept := p.leases[id].file.Debts(0)
	if !kept || !debts.Debts(func(debt, _ *atomic.Uint64) { debt.Store(w) }) {
		t.Error("the account has no debts")
	}
}

// startIdle starts a session of a lease that does nothing, and returns its process.
func startIdle(t *testing.T, p *Pool, l lease.Lease) int {
	t.Helper()
	c, w := pair(t)
	s, err := p.Start(t.Context(), l, lease.SessionRequest{Lease: l.ID, Kind: wire.SessionCompute, PID: 1, UID: testUID, Program: "idle"}, w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	return s.Worker.PID
}
