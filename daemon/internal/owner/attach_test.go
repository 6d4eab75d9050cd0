package owner

import (
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// attachers are workers whose sessions outlive their connections: session 0 of each lease is process 7's.
type attachers struct {
	*workers
	mu    sync.Mutex
	given []string // leases whose session was given a connection
	ended []uint32 // processes whose sessions were to end
}

func (a *attachers) Attachable(id string, n int, client uint32) error {
	if n != 0 || client != 7 {
		return lease.Errorf(lease.Denied, "session %d is not of process %d", n, client)
	}
	return nil
}

func (a *attachers) Attach(id string, n int, _ *os.File) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.given = append(a.given, id)
	return nil
}

func (a *attachers) Bulk(string, int, *os.File) error     { return nil }
func (a *attachers) Trace(string, uint32, *os.File) error { return nil }
func (a *attachers) EndClient(_ string, pid uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = append(a.ended, pid)
}

// TestAttach: a lost connection is made again by the session's own process, from the lease's node, for as long as there is the lease: also when the
// GPU is drained, when the lease has as many sessions as it may, and after the daemon was killed. Nobody else gets it, nor ends the session.
func TestAttach(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	with := func() *attachers {
		a := &attachers{workers: n.workers}
		n.Owner.cfg.Workers = a
		return a
	}
	a := with()
	held, other := n.granted("h1", "1", 50), n.granted("h2", "2", 50)
	again := func(host, id string, session, pid uint32) error {
		t.Helper()
		r := lease.SessionRequest{Lease: id, Kind: wire.AttachKind(session), PID: pid, UID: held.Request.UID, Program: "p"}
		if _, err := n.Offer(ctx, host, r); err != nil {
			return err
		}
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		return n.Admit(ctx, r, f)
	}
	code(t, again("h1", held.ID, 0, 7), "")
	code(t, again("h1", held.ID, 0, 8), lease.Denied)
	code(t, again("h1", held.ID, 1, 7), lease.Denied)
	code(t, again("h2", held.ID, 0, 7), lease.Denied)
	code(t, again("h1", other.ID, 0, 7), lease.Denied)
	code(t, again("h1", "none", 0, 7), lease.NotFound)
	if !slices.Equal(a.given, []string{held.ID}) {
		t.Errorf("connections were given to %v", a.given)
	}
	code(t, n.Gone(ctx, "h2", held.ID, 7), lease.NotFound)
	code(t, n.Gone(ctx, "h1", held.ID, 0), "")
	if len(a.ended) > 0 {
		t.Errorf("another node, or nobody, has ended the sessions of %v", a.ended)
	}
	code(t, n.Gone(ctx, "h1", held.ID, 7), "")
	if !slices.Equal(a.ended, []uint32{7}) {
		t.Errorf("the node has ended the sessions of %v", a.ended)
	}

	if _, err := n.Drain(ctx, "ctl", lease.DrainOrder{Owner: "gpu01", Reason: "upgrade"}); err != nil {
		t.Fatal(err)
	}
	code(t, again("h1", held.ID, 0, 7), "")
	n.limits.Sessions = 1
	n.SetLimits(n.limits)
	n.workers.live[held.ID] = []lease.Session{{ID: "s", Lease: held.ID, Client: 7}}
	code(t, again("h1", held.ID, 0, 7), "")
	n.kill()
	a = with()
	code(t, again("h1", held.ID, 0, 7), "")
	n.clock.pass(time.Minute)
	must(t, n.Release(ctx, "h1", held.ID, lease.Key{}, "done"))
	must(t, n.Sweep(ctx))
	if err := again("h1", held.ID, 0, 7); lease.CodeOf(err) != lease.NotFound && lease.CodeOf(err) != lease.Over {
		t.Errorf("after the end of the lease: %v", err)
	}
	if !slices.Equal(a.given, []string{held.ID}) {
		t.Errorf("the daemon that was started anew has given connections to %v", a.given)
	}
	refused := 0
	for _, e := range n.history() {
		if e.Event == audit.SessionRefuse {
			refused++
		}
	}
	if refused < 5 {
		t.Errorf("%d refusals are in the audit log", refused)
	}
}
