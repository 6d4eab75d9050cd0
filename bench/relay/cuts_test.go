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

// hears reports what a read of conn gives within a tenth of a second.
func hears(conn net.Conn) error {
	_ = conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	defer conn.SetReadDeadline(time.Time{})
	_, err := conn.Read(make([]byte, 1))
	return err
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
	fresh := dial(t, link.addr)
	for _, c := range []net.Conn{old, fresh} {
		if _, err := c.Write([]byte{7}); err != nil {
			t.Fatal(err)
		}
		if err := hears(c); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("heard during a silence: %v", err)
		}
	}
	link.become(mended)
	for _, c := range []net.Conn{old, fresh} {
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
	fresh := dial(t, link.addr)
	for _, c := range []net.Conn{old, fresh} {
		if _, err := c.Write([]byte{7}); err != nil {
			t.Fatal(err)
		}
		if err := hears(c); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("heard while bytes are lost: %v", err)
		}
	}
	link.become(mended)
	wantReset(t, "a connection that lost bytes", old)
	wantReset(t, "a connection that was made meanwhile", fresh)
	roundTrip(t, dial(t, link.addr))
	if got := link.stop(); !strings.Contains(got, "network drop") || !strings.Contains(got, `"" is none of`) {
		t.Errorf("printed %q", got)
	}
}
