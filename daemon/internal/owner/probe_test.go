package owner

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// probeTickets are those of a data port.
type probeTickets struct {
	tickets
	err  error
	take func(conn, tcp *os.File) (func(), error)
}

func (p *probeTickets) OfferProbe(r lease.ProbeRequest, take func(conn, tcp *os.File) (func(), error)) ([]lease.Offer, error) {
	p.take = take
	return make([]lease.Offer, r.Connections), p.err
}

// An owner lets one probe in at a time, from any node, and one that could not be offered is over at once.
func TestProbe(t *testing.T) {
	n := newNode(t, "gpu01", 1)
	r := lease.ProbeRequest{UID: 1000, Connections: 4}
	if _, err := n.Probe(t.Context(), "node01", r); lease.CodeOf(err) != lease.Down || !strings.Contains(err.Error(), "does not listen for data yet") {
		t.Errorf("%v", err)
	}
	p := &probeTickets{err: lease.Errorf(lease.Denied, "encrypted only")}
	n.SetTickets(p)
	if _, err := n.Probe(t.Context(), "node01", r); lease.CodeOf(err) != lease.Denied {
		t.Errorf("%v", err)
	}
	p.err = nil
	// Nothing was sent, so a user's next one has no pause to wait for.
	offers, err := n.Probe(t.Context(), "node01", r)
	if err != nil {
		t.Fatal(err)
	}
	if len(offers) != 4 {
		t.Errorf("%d offers", len(offers))
	}
	if _, err := n.Probe(t.Context(), "node02", r); lease.CodeOf(err) != lease.Conflict || !strings.Contains(err.Error(), "owner gpu01 is being probed from node01; try again") {
		t.Errorf("%v", err)
	}
	if _, err := n.Probe(t.Context(), "node02", lease.ProbeRequest{Connections: 40}); lease.CodeOf(err) != lease.Invalid {
		t.Errorf("%v", err)
	}
	// The end of the owner ends the probe.
	n.Close()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		a, b, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.take(a, b)
		if err != nil && strings.Contains(err.Error(), "over") {
			if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrClosed) {
				t.Errorf("the connection of a probe that is over: %v", err)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}
