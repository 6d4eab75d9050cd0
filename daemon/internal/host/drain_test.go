package host

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// A drain of one owner takes its GPUs from what comes next, and from nothing that is there.
func TestDrain(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	root, user := rpc.Peer{PID: os.Getpid()}, rpc.Peer{UID: 1000, PID: os.Getpid()}
	refused := func(p rpc.Peer, d lease.DrainOrder, want lease.Code, text string) {
		t.Helper()
		if _, err := s.Drain(t.Context(), p, d); lease.CodeOf(err) != want || err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %s: %s", err, want, text)
		}
	}
	refused(user, lease.DrainOrder{Owner: "a", Reason: "x"}, lease.Denied, "only root")
	refused(root, lease.DrainOrder{Owner: "a"}, lease.Invalid, "needs a reason")
	refused(root, lease.DrainOrder{Owner: "a", Reason: "two\nlines"}, lease.Invalid, "in one line")
	refused(root, lease.DrainOrder{Owner: "a", Resume: true, Reason: "x"}, lease.Invalid, "no reason")
	refused(root, lease.DrainOrder{Reason: "x"}, lease.Invalid, "name of an owner")
	refused(root, lease.DrainOrder{Owner: "c", Reason: "x"}, lease.NotFound, "their owners are a, b")

	first := s.must(ask("run-1", 60))
	other := map[string]string{"a": "b", "b": "a"}[first.Grants[0].Owner]
	gpus, err := s.Drain(t.Context(), root, lease.DrainOrder{Owner: other, Reason: "fans"})
	if err != nil || len(gpus) != 1 || gpus[0].Drain.Reason != "fans" {
		t.Fatalf("%+v, %v", gpus, err)
	}
	// 60 of one is held, the other is drained: there is room for 40, and no more.
	if _, _, err := s.Acquire(t.Context(), root, ask("run-2", 60)); lease.CodeOf(err) != lease.NoRoom {
		t.Errorf("%v, want no room", err)
	}
	if l := s.must(ask("run-3", 40)); l.Grants[0].Owner == other {
		t.Errorf("%+v is on the drained owner", l.Grants)
	}
	if _, _, err := s.Acquire(t.Context(), root, ask("run-4", 10)); lease.CodeOf(err) != lease.NoRoom {
		t.Errorf("%v, want no room", err)
	}
	if _, err := s.Drain(t.Context(), root, lease.DrainOrder{Owner: other, Resume: true}); err != nil {
		t.Fatal(err)
	}
	if l := s.must(ask("run-5", 60)); l.Grants[0].Owner != other {
		t.Errorf("%+v is not on the resumed owner", l.Grants)
	}
	b.mu.Lock()
	b.down = true
	b.mu.Unlock()
	refused(root, lease.DrainOrder{Owner: "b", Reason: "x"}, lease.Down, "b is down")
}
