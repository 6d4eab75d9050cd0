package data

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/probe"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// prober is an owner that lets every probe in, and sends back what comes.
type prober struct {
	*rig
	offers int // instead of as many as are asked for
	take   taker
}

func (p *prober) Probe(_ context.Context, _ string, r lease.ProbeRequest) ([]lease.Offer, error) {
	offers, err := p.Server.OfferProbe(r, p.take)
	if p.offers > 0 && err == nil {
		offers = offers[:p.offers]
	}
	return offers, err
}

func linked(t *testing.T, f *os.File) {
	t.Helper()
	if err := control(f, func(fd int) error { _, err := wire.LinkOf(fd); return err }); err != nil {
		t.Errorf("what carries a probe's connection: %v", err)
	}
}

// The connections of a probe reach who measures, never a worker, also encrypted; both ends see the connection of TCP below.
func TestProbe(t *testing.T) {
	g := newRig(t, limit.Bounds{})
	p := &prober{rig: g, take: func(conn, tcp *os.File) (func(), error) {
		defer conn.Close()
		defer tcp.Close()
		linked(t, tcp)
		c, err := net.FileConn(conn)
		if err != nil {
			return nil, err
		}
		go func() {
			defer c.Close()
			echo(c)
		}()
		return func() {}, nil
	}}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, encrypt := range []bool{false, true} {
		d := Dialer{Encrypt: encrypt}
		conns, err := d.Probe(ctx, p, g.addr, "node01", lease.ProbeRequest{UID: 1234, Connections: 2})
		if err != nil || len(conns) != 2 {
			t.Fatalf("encrypt %v: %d connections, %v", encrypt, len(conns), err)
		}
		for _, f := range conns {
			linked(t, f.TCP)
			c, err := net.FileConn(f.Conn)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = f.Conn.Close(), f.TCP.Close()
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			got := make([]byte, 5)
			if _, err := c.Write([]byte("hello")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, []byte("hello")) {
				t.Errorf("encrypt %v: %q, %v", encrypt, got, err)
			}
			_ = c.Close()
		}
	}
	if g.admits != 0 {
		t.Errorf("%d connections reached a worker", g.admits)
	}

	d := Dialer{}
	p.offers = 1
	if _, err := d.Probe(ctx, p, g.addr, "node01", lease.ProbeRequest{Connections: 2}); err == nil || !strings.Contains(err.Error(), "2 connections was offered 1") {
		t.Errorf("fewer offers than connections: %v", err)
	}
	p.offers, p.take = 0, func(conn, tcp *os.File) (func(), error) {
		_, _ = conn.Close(), tcp.Close()
		return nil, errors.New("the probe is over")
	}
	if _, err := d.Probe(ctx, p, g.addr, "node01", lease.ProbeRequest{Connections: 2}); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "the probe is over") {
		t.Errorf("a probe that is over: %v", err)
	}
	// The host may have its answer before the owner's log has it.
	var refused []string
	for until := time.Now().Add(10 * time.Second); len(refused) == 0 && time.Now().Before(until); time.Sleep(time.Millisecond) {
		g.mu.Lock()
		refused = slices.Clone(g.refused)
		g.mu.Unlock()
	}
	if n := len(refused); n == 0 || !strings.Contains(refused[n-1], "a probe's connection: ") {
		t.Errorf("the owner's own log says %q", refused)
	}
}

func dropped(conn, tcp *os.File) (func(), error) {
	return func() {}, errors.Join(conn.Close(), tcp.Close())
}

// Tickets that probes left unused do not take the room of sessions.
func TestProbeTickets(t *testing.T) {
	s := NewServer(Config{PerLease: 1})
	r := lease.ProbeRequest{Connections: 4}
	var err error
	n := 0
	for ; err == nil && n <= maxProbes; n++ {
		_, err = s.OfferProbe(r, dropped)
	}
	if lease.CodeOf(err) != lease.Conflict || n != maxProbes/4+1 || !strings.Contains(err.Error(), "try again in 10s") {
		t.Errorf("%d probes: %v", n, err)
	}
	if _, err := s.Offer(lease.SessionRequest{Lease: "l1"}); err != nil {
		t.Error(err)
	}
	s = NewServer(Config{Encrypt: func() bool { return true }})
	if _, err := s.OfferProbe(r, dropped); lease.CodeOf(err) != lease.Denied {
		t.Errorf("a probe in the clear where sessions are encrypted: %v", err)
	}
	r = lease.ProbeRequest{Connections: 1, Encrypt: true, CertHashes: [][]byte{{1}}}
	if _, err := s.OfferProbe(r, dropped); lease.CodeOf(err) != lease.Invalid {
		t.Errorf("a hash of one byte: %v", err)
	}
}

// relays are the user ids of this process's relays.
func relays(t *testing.T) (uids []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		field := func(name string) []string {
			_, after, _ := strings.Cut(string(b), "\n"+name+":")
			line, _, _ := strings.Cut(after, "\n")
			return append(strings.Fields(line), "")
		}
		if field("PPid")[0] == strconv.Itoa(os.Getpid()) {
			uids = append(uids, field("Uid")[0])
		}
	}
	return uids
}

// However often a node begins encrypted probes and never says a word of TLS, the owner has no more relays than those of one probe. They run
// as nobody, whatever user the node names.
func TestProbeRelays(t *testing.T) {
	g := newRig(t, limit.Bounds{})
	a := probe.NewAdmission("gpu01", slog.New(slog.DiscardHandler))
	for end := time.Now().Add(30 * time.Second); len(relays(t)) > 0; time.Sleep(time.Millisecond) { // other tests'
		if time.Now().After(end) {
			t.Fatal("other tests' relays do not end")
		}
	}
	for _, uid := range []uint32{0, 1234} {
		_, hash, err := newKey()
		if err != nil {
			t.Fatal(err)
		}
		r := lease.ProbeRequest{UID: uid, Connections: 4, Encrypt: true, CertHashes: [][]byte{hash, hash, hash, hash}}
		a.Await(t.Context(), "node01", uid)
		slot, err := a.Begin(t.Context(), "node01", r)
		for end := time.Now().Add(30 * time.Second); err != nil && time.Now().Before(end); slot, err = a.Begin(t.Context(), "node01", r) {
			time.Sleep(time.Millisecond)
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := len(relays(t)); n > 0 {
			t.Errorf("%d relays of the last probe when the next one begins", n)
		}
		offers, err := g.OfferProbe(r, slot.Take)
		if err != nil {
			t.Fatal(err)
		}
		var conns []net.Conn
		for _, o := range offers {
			c, err := net.Dial("tcp", g.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(30 * time.Second))
			if err := respond(c, o.Ticket, o.Secret, true); err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
		want := strconv.Itoa(os.Getuid())
		if os.Getuid() == 0 {
			want = strconv.Itoa(nobody)
		}
		if got := relays(t); !slices.Equal(got, []string{want, want, want, want}) {
			t.Errorf("relays of users %q, want four of %s", got, want)
		}
		_ = conns[1].Close()
		for i, c := range conns { // the owner ends the others
			if i != 1 {
				_, _ = io.Copy(io.Discard, c)
			}
		}
	}
}
