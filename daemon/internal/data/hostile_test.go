package data

import (
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// speak is a client that the test writes by hand: it answers the server's last
// word, or the error.
func (g *rig) speak(t *testing.T, o lease.Offer, spoil func(hello *[helloSize]byte, answer *[32]byte)) error {
	t.Helper()
	c, err := net.Dial("tcp", g.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	h := hello{ticket: o.Ticket}
	first := h.encode()
	none := [32]byte{}
	spoil(&first, &none)
	if _, err := c.Write(first[:]); err != nil {
		return err
	}
	var ch [challengeSize]byte
	if _, err := io.ReadFull(c, ch[:]); err != nil {
		return err
	}
	nonce := [32]byte(ch[:32])
	answer := proof(&o.Secret, roleClient, &first, &nonce)
	spoil(&[helloSize]byte{}, &answer)
	if _, err := c.Write(answer[:]); err != nil {
		return err
	}
	return readResult(c)
}

func TestTickets(t *testing.T) {
	g := newRig(t, limit.Bounds{})
	g.reports.PerSecond = 1000
	plain := func(*[helloSize]byte, *[32]byte) {}
	wrong := func(_ *[helloSize]byte, a *[32]byte) { a[5] ^= 1 }
	offer := func() lease.Offer {
		o, err := g.Server.Offer(lease.SessionRequest{Lease: "l1"})
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	mustNot := func(err error, words string) {
		t.Helper()
		if err == nil {
			t.Error("it is let in")
		}
		g.last(t, words)
	}
	o := offer()
	must(g.speak(t, o, plain))
	mustNot(g.speak(t, o, plain), "unknown or has been used") // replayed

	// A wrong answer does not take the ticket from its owner, but three do.
	o = offer()
	mustNot(g.speak(t, o, wrong), "number 1")
	mustNot(g.speak(t, o, wrong), "number 2")
	must(g.speak(t, o, plain))
	o = offer()
	for range maxWrong {
		mustNot(g.speak(t, o, wrong), "wrong answer")
	}
	mustNot(g.speak(t, o, plain), "unknown")

	mustNot(g.speak(t, lease.Offer{Ticket: [16]byte{9}}, plain), "unknown")
	o = offer()
	mustNot(g.speak(t, o, func(h *[helloSize]byte, _ *[32]byte) { h[12] = flagEncrypted }), "the ticket says false")
	mustNot(g.speak(t, o, func(h *[helloSize]byte, _ *[32]byte) { h[12] = 0x80 }), "unknown flags")
	mustNot(g.speak(t, o, func(h *[helloSize]byte, _ *[32]byte) { h[8] = 2 }), "version 2")
	mustNot(g.speak(t, o, func(h *[helloSize]byte, _ *[32]byte) { h[0] = 'x' }), "does not begin")
	must(g.speak(t, o, plain))

	// The two answers of a race: one is let in.
	o = offer()
	var wg sync.WaitGroup
	res := make([]error, 8)
	for i := range res {
		wg.Add(1)
		go func() { defer wg.Done(); res[i] = g.speak(t, o, plain) }()
	}
	wg.Wait()
	in := 0
	for _, err := range res {
		if err == nil {
			in++
		}
	}
	if in != 1 {
		t.Errorf("one ticket let %d in", in)
	}

	// Late, by the clock that does not jump. A lease has its tickets back then.
	for range 4 {
		o = offer()
	}
	if _, err := g.Server.Offer(lease.SessionRequest{Lease: "l1"}); err == nil {
		t.Error("a lease has five tickets out, of four")
	}
	if _, err := g.Server.Offer(lease.SessionRequest{Lease: "l2"}); err != nil {
		t.Errorf("another lease suffers: %v", err)
	}
	for i := range maxBulkTickets + 1 { // which count for themselves
		if _, err := g.Server.Offer(lease.SessionRequest{Lease: "l1", Kind: wire.BulkKind(7)}); (err == nil) != (i < maxBulkTickets) {
			t.Errorf("bulk connection %d: %v", i, err)
		}
	}
	g.tickets.mu.Lock()
	g.tickets.now = func() time.Time { return time.Now().Add(11 * time.Second) }
	g.tickets.mu.Unlock()
	mustNot(g.speak(t, o, plain), "older than 10s")
	offer()
	if n := len(g.tickets.out); n != 1 || len(g.tickets.count) != 1 {
		t.Errorf("%d tickets are kept", n)
	}
}

// 2,000 connections that say nothing, rubbish or half of it: the honest one gets
// through, and the log gets some lines, not 2,000.
func TestFlood(t *testing.T) {
	g := newRig(t, limit.Bounds{Pending: 200, PendingKey: 100})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var open []net.Conn
			for i := range 500 {
				c, err := net.Dial("tcp", g.addr)
				if err != nil {
					continue
				}
				junk := make([]byte, i%100)
				_, _ = rand.Read(junk)
				_, _ = c.Write(junk)
				open = append(open, c)
			}
			<-stop
			for _, c := range open {
				_ = c.Close()
			}
		}()
	}
	for range 20 {
		c, err := g.open(t, Dialer{})
		if err != nil {
			t.Error(err)
			continue
		}
		roundTrip(t, c, 1000)
		_ = c.Close()
	}
	close(stop)
	wg.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(g.refused); n == 0 || n > 200 {
		t.Errorf("%d reports", n)
	}
}

// A connection on which nothing comes, or half of a message, is closed in time.
func TestHalfOpen(t *testing.T) {
	t.Parallel()
	g := newRig(t, limit.Bounds{})
	o, err := g.Server.Offer(lease.SessionRequest{Lease: "l1"})
	if err != nil {
		t.Fatal(err)
	}
	first := (&hello{ticket: o.Ticket}).encode()
	var wg sync.WaitGroup
	for _, said := range [][]byte{nil, first[:30], first[:]} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c, err := net.Dial("tcp", g.addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_, _ = c.Write(said)
			_ = c.SetReadDeadline(time.Now().Add(2 * handshakeTime))
			if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("still open after %v", 2*handshakeTime)
			}
		}()
	}
	wg.Wait()
}
