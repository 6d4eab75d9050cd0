package host

import (
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// A change reaches all owners of a lease, or none; users change what is theirs, up to
// what they were granted.
func TestSet(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	r := ask("run-1", 60, 50)
	r.UID, r.GID = 1000, 1000
	l := s.must(r)
	if len(lease.Owners(l.Grants)) != 2 {
		t.Fatalf("%+v", l.Grants)
	}
	mine, others := rpc.Peer{UID: 1000, PID: os.Getpid()}, rpc.Peer{UID: 1001, PID: os.Getpid()}
	refused := func(p rpc.Peer, c lease.Change, want lease.Code, text string) {
		t.Helper()
		if c.Lease == "" {
			c.Lease = l.ID
		}
		if _, err := s.Set(t.Context(), p, c); lease.CodeOf(err) != want || err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %s: %s", err, want, text)
		}
	}
	shows := func(policy string, percents ...uint32) {
		t.Helper()
		ls, err := s.List(t.Context(), mine)
		if err != nil || len(ls) != 1 || ls[0].Request.PolicyName() != policy {
			t.Fatalf("%+v, %v; want %s", ls, err, policy)
		}
		for i, p := range percents {
			if ls[0].Grants[i].Percent != p {
				t.Errorf("%+v, want %v", ls[0].Grants, percents)
			}
		}
	}
	refused(others, lease.Change{Shares: []uint32{10}}, lease.Denied, "not yours")
	refused(mine, lease.Change{}, lease.Invalid, "nothing to change")
	refused(mine, lease.Change{Shares: []uint32{1, 2, 3}}, lease.Invalid, "want at most 2")
	refused(mine, lease.Change{Lease: strings.Repeat("0", 32), Policy: lease.Fixed}, lease.NotFound, "not on this node")
	// What a user claims of himself counts for nothing.
	refused(mine, lease.Change{Shares: []uint32{70, 10}, Beyond: true}, lease.Denied, "only root")
	shows("best-effort", 60, 50)
	now, err := s.Set(t.Context(), mine, lease.Change{Lease: l.ID, Shares: []uint32{30}, Policy: lease.Fixed, Lend: lease.LendYes})
	if err != nil || now.Grants[0].Percent != 30 || now.Grants[1].Percent != 30 || now.Request.Policy != lease.Fixed {
		t.Fatalf("%+v, %v", now, err)
	}
	shows("fixed-lend", 30, 30)
	// One of two refuses: the other has it back.
	refused(mine, lease.Change{Shares: []uint32{10, 60}, Policy: lease.Equal}, lease.Denied, "want 1 to 50")
	shows("fixed-lend", 30, 30)
	b.set(func() { b.down = true })
	refused(mine, lease.Change{Shares: []uint32{20}}, lease.Down, "b is down")
	b.set(func() { b.down = false })
	shows("fixed-lend", 30, 30)
	// One makes it and cannot say so: it is taken back there too.
	b.set(func() { b.lost = true })
	refused(mine, lease.Change{Shares: []uint32{20}, Policy: lease.Equal}, lease.Down, "connection lost")
	shows("fixed-lend", 30, 30)
	// Of two at once, all owners have the one or the other.
	var wg sync.WaitGroup
	for _, p := range []uint32{11, 22} {
		wg.Go(func() {
			if _, err := s.Set(t.Context(), mine, lease.Change{Lease: l.ID, Shares: []uint32{p}}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if ls, err := s.List(t.Context(), mine); err != nil || ls[0].Grants[0].Percent != ls[0].Grants[1].Percent {
		t.Errorf("%+v, %v", ls, err)
	}
	if _, err := s.Set(t.Context(), root, lease.Change{Lease: l.ID, Shares: []uint32{90, 0}}); err != nil {
		t.Fatal(err)
	}
	s.restart()
	if got := s.leases[l.ID].rec.Lease; got.Grants[0].Percent != 90 || got.Grants[1].Percent != b.leases[l.ID].Grants[0].Percent || got.Request.Policy != lease.Fixed {
		t.Errorf("after a restart: %+v", got)
	}
	if err := s.Release(t.Context(), root, l.ID, lease.Key{}, ""); err != nil {
		t.Fatal(err)
	}
	refused(mine, lease.Change{Shares: []uint32{20}}, lease.NotFound, "has ended")
}
