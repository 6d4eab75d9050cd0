package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func TestExplainAmongOthers(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	id := func(n int) string { return fmt.Sprintf("%032x", n) }
	write := func(e audit.Event) {
		t.Helper()
		if err := s.log.Write(e); err != nil {
			t.Fatal(err)
		}
	}
	const job = "run-<&>" // which JSON escapes
	for n := range 300 {
		name, uid := fmt.Sprint(n), uint32(1000+n%3)
		if n == 100 || n == 200 {
			name, uid = job, 1000+uint32(n/200) // two users have chosen the same name
		}
		key := lease.Key{Cluster: "c", Job: name, Node: "node1"}.String()
		write(audit.Event{Event: audit.Grant, Lease: id(n), Key: key, UID: audit.UID(uid)})
		write(audit.Event{Event: audit.SessionOpen, Lease: id(n), UID: audit.UID(uid), Session: fmt.Sprint(n)})
		write(audit.Event{Event: audit.SessionRefuse, Lease: id(n), UID: audit.UID(uid), Reason: "of " + job})
		write(audit.Event{Event: audit.Release, Lease: id(n), Key: key, UID: audit.UID(uid)})
	}
	for uid, want := range map[uint32]int{0: 8, 1000: 4, 1001: 4, 1002: 0} {
		events, err := s.Explain(t.Context(), rpc.Peer{UID: uid}, job)
		if err != nil || len(events) != want {
			t.Errorf("uid %d: %d lines of %d: %v", uid, len(events), want, err)
		}
		for i, e := range events {
			if order := []string{audit.Grant, audit.SessionOpen, audit.SessionRefuse, audit.Release}; e.Event != order[i%4] {
				t.Errorf("uid %d: line %d is %+v", uid, i, e)
			}
		}
	}
}

// Any user may have the audit log read, but not so often that the node does nothing else.
func TestExplainIsBounded(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	explain := func(ctx context.Context, uid uint32) error {
		_, err := s.Explain(ctx, rpc.Peer{UID: uid}, "7")
		return err
	}
	busy := func(what string, err error) {
		t.Helper()
		if lease.CodeOf(err) != lease.Down || err == nil || !strings.Contains(err.Error(), "ask again") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.explains.enter(1000); err != nil { // one is being answered
		t.Fatal(err)
	}
	busy("the same user's second", explain(t.Context(), 1000))
	if err := explain(t.Context(), 1001); err != nil {
		t.Error("another user's:", err)
	}
	if err := s.explains.enter(1001); err != nil {
		t.Fatal(err)
	}
	busy("a third", explain(t.Context(), 1002))
	busy("root's", explain(t.Context(), 0))
	s.explains.leave(1000)
	s.explains.leave(1001)
	for range 300 {
		if err := s.log.Write(audit.Event{Event: audit.Refuse, Key: "c/7@node1", UID: audit.UID(5)}); err != nil {
			t.Fatal(err)
		}
	}
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	var e *lease.Error
	if err := explain(late, 1000); !errors.As(err, &e) || e.Code != lease.Down || !strings.Contains(e.Reason, "could not be read within") {
		t.Errorf("out of time: %v", err)
	}
}
