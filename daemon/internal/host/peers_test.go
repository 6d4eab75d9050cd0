package host

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// watchable is a fake owner that can be watched.
type watchable struct {
	*fakeOwner
	lease.Watchable
	lease.Promiser
}

func (w watchable) Watch(context.Context, string, lease.Mark, time.Duration) (lease.Changes, error) {
	leave, err := w.enter("watch")
	if err == nil {
		leave()
	}
	return lease.Changes{}, err
}

func (w watchable) WatchHeld(context.Context, string, lease.HeldWatch) (lease.HeldChanges, error) {
	leave, err := w.enter("watch held")
	if err == nil {
		leave()
	}
	return lease.HeldChanges{}, err
}

// The host remembers that an owner did not answer, whatever the question was, so that the
// next call does not wait for it again; after a change it asks for the owner's inventory.
func TestSilenceIsNoted(t *testing.T) {
	a := newFake("a", 1)
	s := newSite(t, a)
	s.noRun = true
	s.restart()
	p, err := s.peer("a", "")
	if err != nil {
		t.Fatal(err)
	}
	p.owner = watchable{fakeOwner: a}
	s.quotas = []Quota{{}} // so that owners are asked for promises
	parts := []lease.Lease{
		{ID: form.NewLeaseID(), Grants: []lease.Grant{{Owner: "a"}}},
		{ID: form.NewLeaseID(), Grants: []lease.Grant{{Owner: "a"}}},
	}
	for _, c := range []struct {
		what    string
		call    string // of the owner
		changes bool   // what the owner has free
		f       func()
	}{
		{"leases that are not whole", "release", true, func() { s.endParts(t.Context(), parts, lease.Key{}, "it is not whole") }},
		{"a lease that is not known", "release", true, func() { s.stranger(t.Context(), p, parts[0]) }},
		{"a delivery", "release", true, func() { _, _ = s.tellRelease(t.Context(), "a", &record{Lease: parts[0]}, lease.Key{}) }},
		{"the end of a job", "release", true, func() { _ = s.tellOwner(t.Context(), p, &jobEnd{Job: "7"}, []string{""}) }},
		{"a change", "set", true, func() { _, _ = s.setAt(t.Context(), p, lease.Change{Lease: parts[0].ID}) }},
		{"the end of a process", "gone", false, func() { s.tellGone(watched{"a", parts[0].ID, 7}) }},
		{"the sessions from before a restart", "list", false, func() { s.askSessions("a") }},
		{"a watch", "watch", false, func() { _, _ = s.ask(t.Context(), p) }},
		{"a watch with a promise", "watch held", false, func() { _, _, _ = s.askPromise(t.Context(), p, &promised{}) }},
	} {
		a.set(func() { a.down = false; a.calls = map[string]int{} })
		if _, err := p.inventory(t.Context(), s.Host, 0); err != nil || p.down() != nil {
			t.Fatal(err, p.down())
		}
		a.set(func() { a.down = true })
		c.f()
		if p.down() == nil {
			t.Errorf("%s: the owner's silence is not noted", c.what)
		}
		p.mu.Lock()
		if p.at.IsZero() != c.changes {
			t.Errorf("%s: the inventory from before it counts: %v", c.what, c.changes)
		}
		p.mu.Unlock()
		if n := a.calls[c.call]; n != 1 || len(a.calls) != 2 { // the other is for the inventory
			t.Errorf("%s: a silent owner is asked %v", c.what, a.calls)
		}
	}
}

// An owner says that it no longer has a lease, while its user changes the lease. The race
// detector judges.
func TestRenewalBesideSet(t *testing.T) {
	a := newFake("a", 1)
	s := newSite(t, a)
	s.noRun = true
	s.restart()
	p, err := s.peer("a", "")
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		l := s.must(ask("1", 50))
		var wg sync.WaitGroup
		ended := make(chan struct{})
		for range 2 {
			wg.Go(func() {
				for percent := uint32(1); ; percent = percent%50 + 1 {
					select {
					case <-ended:
						return
					default:
						_, _ = s.Set(t.Context(), root, lease.Change{Lease: l.ID, Shares: []uint32{percent}})
					}
				}
			})
		}
		a.set(func() { a.calls["set"] = 0; a.forgot = false })
		s.wait("the lease is being changed", func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			return a.calls["set"] > 0
		})
		a.set(func() { a.forgot = true }) // and what was on its way to it still changes the lease
		s.renew(t.Context(), p, s.used()[p.name])
		close(ended)
		wg.Wait()
		a.set(func() { clear(a.leases) })
		s.mu.Lock()
		delete(s.tombs, nameOf(l.Request.Key)) // so that the job may have another
		s.mu.Unlock()
	}
}

// A call that its caller's end cuts short does not say that its own time was over.
func TestWithin(t *testing.T) {
	hang := func(context.Context) (int, error) { select {} }
	over, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the 24s for all nodes are over"))
	if _, err := within(over, time.Hour, hang); lease.CodeOf(err) != lease.Down || err.Error() != "no answer: the 24s for all nodes are over" {
		t.Error(err)
	}
	if _, err := within(t.Context(), time.Millisecond, hang); lease.CodeOf(err) != lease.Down || !strings.Contains(err.Error(), "no answer within 1ms") {
		t.Error(err)
	}
}
