package host

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// dialed is a connection to an owner that knows whether it has been closed.
type dialed struct {
	*fakeOwner
	closed int
}

func (d *dialed) Close() error { d.closed++; return nil }

// Sessions that attach at the same time share a connection of their own to the owner, for a while. Its last user closes it,
// also after a failure.
func TestAttachConnection(t *testing.T) {
	s := newSite(t, newFake("gpu01", 1))
	var made []*dialed
	s.Host.cfg.DialOwner = func(string, string) (lease.Owner, error) {
		made = append(made, &dialed{fakeOwner: s.owners["gpu01"]})
		return made[len(made)-1], nil
	}
	p := &peer{name: "gpu01", addr: "gpu01:7071"}
	a, doneA, errA := s.Host.dialAttach(p)
	b, doneB, errB := s.Host.dialAttach(p)
	if err := errors.Join(errA, errB); err != nil || a != b || len(made) != 1 {
		t.Fatalf("%d connections, %v", len(made), err)
	}
	s.Host.attaching["gpu01"].made = time.Now().Add(-2 * attachShare)
	c, doneC, err := s.Host.dialAttach(p)
	if err != nil || c == a || len(made) != 2 {
		t.Fatalf("an old connection is shared: %d connections, %v", len(made), err)
	}
	doneA()
	if made[0].closed != 0 {
		t.Error("closed under its second user")
	}
	doneB()
	if made[0].closed != 1 || made[1].closed != 0 || s.Host.attaching["gpu01"] == nil {
		t.Errorf("closed %d and %d times", made[0].closed, made[1].closed)
	}
	doneC()
	if made[1].closed != 1 || len(s.Host.attaching) != 0 {
		t.Errorf("closed %d times, %d are left", made[1].closed, len(s.Host.attaching))
	}

	// An ordinary session uses the daemons' connection, an attach its own.
	s.Host.cfg.DialData = func(_ context.Context, o lease.Owner, _, _ string, _ lease.SessionRequest) (*os.File, error) {
		if _, own := o.(*dialed); own {
			return nil, errors.New("its own")
		}
		return nil, errors.New("the daemons'")
	}
	made = nil
	if _, _, err := s.Host.session(t.Context(), "gpu01", lease.SessionRequest{Kind: wire.SessionCompute}); err == nil || err.Error() != "owner gpu01: the daemons'" {
		t.Errorf("a session: %v", err)
	}
	if _, _, err := s.Host.session(t.Context(), "gpu01", lease.SessionRequest{Kind: wire.AttachKind(3)}); err == nil || err.Error() != "owner gpu01: its own" {
		t.Errorf("an attach: %v", err)
	}
	if len(made) != 1 || made[0].closed != 1 || len(s.Host.attaching) != 0 {
		t.Errorf("after a failure: %d connections, %d are left", len(made), len(s.Host.attaching))
	}
	s.Host.cfg.DialOwner = func(string, string) (lease.Owner, error) { return nil, errors.New("no address") }
	if _, _, err := s.Host.session(t.Context(), "gpu01", lease.SessionRequest{Kind: wire.AttachKind(3)}); err == nil || err.Error() != "owner gpu01: no address" {
		t.Errorf("an owner that cannot be dialled: %v", err)
	}
}
