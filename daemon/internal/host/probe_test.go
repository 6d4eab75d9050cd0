package host

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/probe"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func (f *fakeOwner) Probe(context.Context, string, lease.ProbeRequest) ([]lease.Offer, error) {
	leave, err := f.enter("probe")
	if err == nil {
		leave()
	}
	return nil, err
}

// A probe that cannot be made is refused with the reason. One user probes at a time, and root need not wait for users.
func TestProbe(t *testing.T) {
	s := newSite(t, newFake("a", 1), newFake("b", 1))
	root, user, other := rpc.Peer{PID: os.Getpid()}, rpc.Peer{UID: 1000, PID: os.Getpid()}, rpc.Peer{UID: 1001, PID: os.Getpid()}
	refused := func(p rpc.Peer, owner string, want lease.Code, text string) {
		t.Helper()
		if _, err := s.Probe(t.Context(), p, owner); lease.CodeOf(err) != want || err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %s: %s", err, want, text)
		}
	}
	refused(root, "a", lease.Internal, "cannot call the data ports")
	var fail error
	held, hold := make(chan lease.ProbeRequest, 4), make(chan struct{})
	s.Host.cfg.DialProbe = func(ctx context.Context, o lease.Prober, addr, host string, r lease.ProbeRequest) ([]*probe.Conn, bool, error) {
		if addr != "a:7071" || host != "node1" {
			t.Errorf("%s from %s", addr, host)
		}
		if fail != nil {
			return nil, false, fail
		}
		held <- r
		select {
		case <-hold:
		case <-ctx.Done():
		}
		_, err := o.Probe(ctx, host, r)
		return nil, false, errors.Join(errors.New("end of the test"), err)
	}
	refused(root, "c", lease.NotFound, "c is not an owner of this node's pools; their owners are a, b")
	refused(root, "", lease.NotFound, "is not an owner of this node's pools")
	fail = lease.Errorf(lease.WrongPeer, "owner a runs a release that has no probe; install")
	refused(root, "a", lease.WrongPeer, "no probe")
	fail = errors.New("data connection: refused; is the data port open between the nodes?")
	refused(root, "a", lease.Down, "owner a: data connection: refused; is")
	if p, err := s.peer("a", ""); err != nil || p.down() != nil {
		t.Errorf("a data port that is shut makes the owner silent: %v, %v", p.down(), err)
	}
	fail = nil
	done := make(chan error, 2)
	for _, p := range []rpc.Peer{user, root} {
		go func() {
			_, err := s.Probe(t.Context(), p, "a")
			done <- err
		}()
		if r := <-held; r.UID != p.UID || r.Connections != probe.Connections {
			t.Errorf("%+v for %d", r, p.UID)
		}
	}
	refused(other, "a", lease.Conflict, "user 1000 probes from this node")
	refused(user, "b", lease.Down, "1 requests of user 1000 are probing already; ask again")
	close(hold)
	for range 2 {
		if err := <-done; err == nil || !strings.Contains(err.Error(), "end of the test") {
			t.Error(err)
		}
	}
	// A user's next one waits for its turn, and a caller who leaves meanwhile is not waited for. One whose turn is far is told when it is.
	after := func(rest time.Duration) {
		t.Helper()
		leave, busy := s.userProbes.Enter("user 1000", 0, time.Hour)
		if busy != nil {
			t.Fatalf("%+v", busy)
		}
		leave(probe.Rests{Users: rest})
	}
	after(probeWait)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Probe(ctx, other, "a"); lease.CodeOf(err) != lease.Down || !strings.Contains(err.Error(), "gave up") {
		t.Errorf("%v", err)
	}
	after(time.Hour)
	refused(other, "a", lease.Conflict, "a user has just probed from this node; try again in 1h0m0s: ")
	after(time.Millisecond)
	refused(other, "a", lease.Down, "end of the test")
	refused(other, "a", lease.Down, "end of the test") // nothing was sent: no pause
}
