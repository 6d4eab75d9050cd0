package data

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
)

// pair is a connected pair of Unix sockets.
func pair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	fa, fb, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	for f, c := range map[*os.File]*net.Conn{fa: &a, fb: &b} {
		if *c, err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return a, b
}

// A worker that ends while its client is still sending is heard to the end: its last
// words say why.
func TestLastWords(t *testing.T) {
	for range 20 {
		client, ra := pair(t)
		rb, worker := pair(t)
		done := make(chan error, 1)
		go func() { done <- pump(ra, rb) }()
		go func() { // an upload that nobody reads any more
			b := make([]byte, 64<<10)
			for {
				if _, err := client.Write(b); err != nil {
					return
				}
			}
		}()
		if _, err := io.ReadFull(worker, make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
		words := bytes.Repeat([]byte("the lease is over"), 20000)
		go func() {
			_, _ = worker.Write(words)
			_ = worker.Close()
		}()
		time.Sleep(50 * time.Millisecond)
		_ = client.SetReadDeadline(time.Now().Add(5 * time.Second))
		got, err := io.ReadAll(client)
		if len(got) != len(words) {
			t.Errorf("%d of %d bytes: %v", len(got), len(words), err)
		}
		_ = client.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// A worker may take longer to start than a relay waits for TLS.
func TestSlowWorker(t *testing.T) {
	g := newRig(t, limit.Bounds{})
	admit := g.cfg.Admit
	g.cfg.Admit = func(ctx context.Context, r lease.SessionRequest, f *os.File) error {
		time.Sleep(relayTime + time.Second)
		return admit(ctx, r, f)
	}
	t.Parallel()
	c, err := g.open(t, Dialer{Encrypt: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	roundTrip(t, c, 1000)
}

// Where a relay cannot be started the session ends at both sides.
func TestNoRelay(t *testing.T) {
	none := Relay{Command: []string{"/nowhere/sluiced", "relay"}}
	for _, at := range []string{"owner", "host"} {
		g := newRig(t, limit.Bounds{})
		ended := make(chan error, 1)
		g.worker = func(c net.Conn) {
			_, err := io.Copy(io.Discard, c)
			ended <- err
		}
		d := Dialer{Encrypt: true}
		if at == "owner" {
			g.cfg.Relay = none
		} else {
			d.Relay = none
		}
		c, err := g.open(t, d)
		if err == nil {
			_ = c.Close()
			t.Errorf("none at the %s, and the session opens", at)
		}
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(5 * time.Second):
			t.Errorf("none at the %s, and the worker waits for ever", at)
		}
	}
}
