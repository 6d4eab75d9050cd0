package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// cutLink is a relay whose network a test cuts and mends.
type cutLink struct {
	t    *testing.T
	addr string
	stop func() string
	in   *io.PipeWriter
}

func newCutLink(t *testing.T) *cutLink {
	r, w := io.Pipe()
	addr, stop := startCutRelay(t, r, "--to", startEcho(t), "--cuts")
	t.Cleanup(func() { w.Close() })
	return &cutLink{t: t, addr: addr, stop: stop, in: w}
}

// become returns once the relay has taken the line before: a pipe hands a line over when it is read.
func (c *cutLink) become(to outage) {
	c.t.Helper()
	for _, line := range []outage{to, ""} {
		if _, err := fmt.Fprintln(c.in, line); err != nil {
			c.t.Fatal(err)
		}
	}
}

// unheard has a connection that stood, and one that is made now, each send a byte, of which nothing is heard within a tenth of a second.
func (c *cutLink) unheard(old net.Conn) []net.Conn {
	c.t.Helper()
	both := []net.Conn{old, dial(c.t, c.addr)}
	for _, conn := range both {
		if _, err := conn.Write([]byte{7}); err != nil {
			c.t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			c.t.Fatalf("heard during a cut: %v", err)
		}
		_ = conn.SetReadDeadline(time.Time{})
	}
	return both
}

func wantReset(t *testing.T, what string, conn net.Conn) {
	t.Helper()
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: %v, want a reset", what, err)
	}
}

func TestReset(t *testing.T) {
	link := newCutLink(t)
	old := dial(t, link.addr)
	roundTrip(t, old)
	link.become(reset)
	wantReset(t, "a connection that stood", old)
	wantReset(t, "a connection that is made during the cut", dial(t, link.addr))
	link.become(mended)
	roundTrip(t, dial(t, link.addr))
}

func TestSilence(t *testing.T) {
	link := newCutLink(t)
	old := dial(t, link.addr)
	roundTrip(t, old)
	link.become(silence)
	both := link.unheard(old)
	link.become(mended)
	for _, c := range both {
		b := []byte{0}
		if _, err := io.ReadFull(c, b); err != nil || b[0] != 7 {
			t.Fatalf("after the silence: %d, %v", b[0], err)
		}
	}
}

func TestDrop(t *testing.T) {
	link := newCutLink(t)
	old := dial(t, link.addr)
	roundTrip(t, old)
	link.become(drop)
	both := link.unheard(old)
	link.become(mended)
	wantReset(t, "a connection that lost bytes", both[0])
	wantReset(t, "a connection that was made meanwhile", both[1])
	roundTrip(t, dial(t, link.addr))
	if got := link.stop(); !strings.Contains(got, "network drop") || !strings.Contains(got, `"" is none of`) {
		t.Errorf("printed %q", got)
	}
}
