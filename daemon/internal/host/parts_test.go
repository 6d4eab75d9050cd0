package host

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// What steps may have of a lease is added up, kept over restarts, and given to the sessions of their processes.
func TestParts(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	l := s.must(ask("1", 50))
	g := l.Grants[0]
	steps := map[uint32]bool{0: true, 1: true, 2: true, 3: true}
	here := func(n uint32) bool { return steps[n] }
	give := func(step, percent uint32, mem uint64) error {
		_, err := s.GivePart(l.Request.Key, lease.Part{Step: step, Percent: percent, Mem: mem}, here)
		return err
	}
	of := func(step string, kind uint32) (*lease.Part, error) {
		return s.partOf(&lease.SessionRequest{Lease: l.ID, Kind: kind, Step: step})
	}
	if p, err := of("", wire.SessionCompute); p != nil || err != nil {
		t.Errorf("before there is any part: %v, %v", p, err)
	}
	for _, err := range []error{give(0, 10, g.Mem/5), give(1, 40, g.Mem/5), give(2, 0, 0), give(1, 40, g.Mem/5)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := give(3, 1, lease.Granule); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "0% and") || !strings.Contains(err.Error(), "step 0: 10%") {
		t.Errorf("more than there is: %v", err)
	}
	steps[1] = false
	if err := give(3, 20, g.Mem/5*4+lease.Granule); lease.CodeOf(err) != lease.NoRoom {
		t.Errorf("more memory than there is: %v", err)
	}
	if err := give(3, 40, g.Mem/2); err != nil {
		t.Errorf("when another has ended: %v", err)
	}
	for range 2 {
		for step, want := range map[string]uint32{"0": 10, "3": 40, "1": 0, "4": 0, "batch": 0, "extern": 0} {
			p, err := of(step, wire.SessionCompute)
			if err != nil || (p == nil) != (want == 0) || p != nil && p.Percent != want {
				t.Errorf("step %s: %v, %v; want %d%%", step, p, err, want)
			}
		}
		if _, err := of("2", wire.SessionObserve); lease.CodeOf(err) != lease.Denied || !strings.Contains(err.Error(), "--gres=none") {
			t.Errorf("a step without any: %v", err)
		}
		if _, err := of("", wire.SessionCompute); lease.CodeOf(err) != lease.Denied || !strings.Contains(err.Error(), "does not show to which step") {
			t.Errorf("a process of no step that can be seen: %v", err)
		}
		if p, err := of("", wire.SessionObserve); p != nil || err != nil {
			t.Errorf("one that only looks: %v, %v", p, err)
		}
		s.restart()
	}
	clear(steps)
	if err := s.DropParts(l.Request.Key, here); err != nil {
		t.Fatal(err)
	}
	if p, err := of("", wire.SessionCompute); p != nil || err != nil {
		t.Errorf("when all have ended: %v, %v", p, err)
	}
	if _, err := s.GivePart(lease.Key{Job: "9"}, lease.Part{}, here); lease.CodeOf(err) != lease.Over {
		t.Errorf("a job without a lease: %v", err)
	}
}

// Steps of a lease of several GPUs have whole ones of them: steps that begin at the same time different ones, also after a restart. Programs of no
// step that can be seen are not refused for that, unless a step has none.
func TestPartsOfSeveral(t *testing.T) {
	s := newSite(t, newFake("a", 4))
	l := s.must(ask("1", 100, 100, 100, 100))
	var mu sync.Mutex
	gone := map[uint32]bool{}
	here := func(n uint32) bool {
		mu.Lock()
		defer mu.Unlock()
		return !gone[n]
	}
	give := func(step, percent uint32) (lease.Part, error) {
		return s.GivePart(l.Request.Key, lease.Part{Step: step, Percent: percent}, here)
	}
	of := func(step string) (*lease.Part, error) {
		return s.partOf(&lease.SessionRequest{Lease: l.ID, Kind: wire.SessionCompute, Step: step})
	}
	var begins sync.WaitGroup
	got := make([]lease.Part, 3)
	for i := range got {
		begins.Go(func() {
			var err error
			if got[i], err = give(uint32(i), 100); err != nil {
				t.Error(err)
			}
		})
	}
	begins.Wait()
	if all := got[0].GPUs | got[1].GPUs | got[2].GPUs; all != 7 || got[0].GPUs+got[1].GPUs+got[2].GPUs != 7 {
		t.Fatalf("%v", got)
	}
	for range 2 {
		if _, err := give(3, 200); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "leave GPU 3 (") {
			t.Errorf("more than is free: %v", err)
		}
		for i, want := range got {
			if p, err := of(fmt.Sprint(i)); err != nil || p == nil || *p != want {
				t.Errorf("step %d: %v, %v; want %v", i, p, err, want)
			}
			if p, err := give(uint32(i), 100); err != nil || p != want {
				t.Errorf("step %d again: %v, %v; want %v", i, p, err, want)
			}
		}
		for _, step := range []string{"", "3", "batch"} {
			if p, err := of(step); p != nil || err != nil {
				t.Errorf("a process of step %q: %v, %v", step, p, err)
			}
		}
		s.restart()
	}
	mu.Lock()
	gone[1] = true
	mu.Unlock()
	if p, err := give(3, 200); err != nil || p.GPUs != got[1].GPUs|8 {
		t.Errorf("when another has ended: %v, %v", p, err)
	}
	if p, err := give(4, 0); err != nil || p.GPUs != 0 {
		t.Errorf("a step without any: %v, %v", p, err)
	}
	if _, err := of(""); lease.CodeOf(err) != lease.Denied {
		t.Errorf("a process that may be of it: %v", err)
	}
	if err := s.DropParts(l.Request.Key, func(uint32) bool { return false }); err != nil {
		t.Fatal(err)
	}
	if p, err := give(5, 400); err != nil || p.GPUs != 15 {
		t.Errorf("when all have ended: %v, %v", p, err)
	}
}
