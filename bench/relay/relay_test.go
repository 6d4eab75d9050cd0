package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// startEcho answers every byte, and ends a connection when its peer has.
func startEcho(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				c.Close()
			}()
		}
	}()
	return ln.Addr().String()
}

// startRelay runs the relay as its main does. stop ends it and answers all that
// it printed.
func startRelay(t *testing.T, args ...string) (addr string, stop func() string) {
	t.Helper()
	return startCutRelay(t, nil, args...)
}

// startCutRelay has in as the relay's standard input.
func startCutRelay(t *testing.T, in io.Reader, args ...string) (addr string, stop func() string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	pr, pw := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, args, in, pw)
		pw.Close()
	}()
	var printed strings.Builder
	line := make([]byte, 256)
	n, err := pr.Read(line)
	if err != nil {
		t.Fatalf("relay printed nothing: %v", err)
	}
	if _, err := fmt.Sscanf(string(line[:n]), "listening %s", &addr); err != nil {
		t.Fatalf("relay printed %q", line[:n])
	}
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(&printed, pr)
	}()
	var once string
	stopped := false
	stop = func() string {
		if !stopped {
			stopped = true
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("relay: %v", err)
			}
			<-copied
			once = printed.String()
		}
		return once
	}
	t.Cleanup(func() { stop() })
	return addr, stop
}

func dial(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

func roundTrip(t *testing.T, c net.Conn) time.Duration {
	t.Helper()
	begun := time.Now()
	b := []byte{1}
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	return time.Since(begun)
}

// patience is how long a test looks for one good try: this machine may be busy
// with other things, and then most of them are slow.
const patience = 20 * time.Second

// No round trip may be shorter than what was asked for, and the shortest no
// longer: the others are the scheduler's.
func TestDelay(t *testing.T) {
	echo := startEcho(t)
	for _, rtt := range []time.Duration{200 * time.Microsecond, 2 * time.Millisecond, 20 * time.Millisecond} {
		addr, _ := startRelay(t, "--to", echo, "--rtt", rtt.String(), "--rate", "1G")
		c := dial(t, addr)
		best, most := time.Hour, rtt*11/10+100*time.Microsecond
		for end := time.Now().Add(patience); best > most && time.Now().Before(end); {
			d := roundTrip(t, c)
			if d < rtt {
				t.Errorf("rtt %v: a round trip took %v only", rtt, d)
			}
			best = min(best, d)
		}
		if best > most {
			t.Errorf("rtt %v: the best round trip took %v", rtt, best)
		}
		t.Logf("rtt %v: best %v", rtt, best)
	}
}

// A transfer must never beat the rate, nor fall far behind it, and a delay must
// not lower it: that would mean too small a line.
func TestRate(t *testing.T) {
	for _, c := range []rateCase{
		{"20M", 20e6, 0, 1 << 19, false},
		{"20M", 20e6, 20 * time.Millisecond, 1 << 19, true},
		{"0.1G", 0.1e9, 200 * time.Microsecond, 2 << 20, true},
		{"0.1G", 0.1e9, 100 * time.Millisecond, 2 << 20, false},
	} {
		best := 0.0
		for end := time.Now().Add(patience); best < 0.85 && time.Now().Before(end); {
			ratio := transfer(t, c) / c.bits
			if ratio > 1.02 {
				t.Errorf("%+v: %.3f of the rate", c, ratio)
			}
			best = max(best, ratio)
		}
		if best < 0.85 {
			t.Errorf("%+v: %.3f of the rate at best", c, best)
		}
		t.Logf("%+v: %.3f of the rate", c, best)
	}
}

type rateCase struct {
	rate string
	bits float64
	rtt  time.Duration
	n    int
	back bool // the other direction
}

// transfer takes n bytes through a relay of its own, from near to far or back.
// It answers the bits a second, less the delay of the first byte.
func transfer(t *testing.T, c rateCase) float64 {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	addr, stop := startRelay(t, "--to", ln.Addr().String(), "--rtt", c.rtt.String(), "--rate", c.rate)
	from := net.Conn(dial(t, addr))
	to, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	printed := fmt.Sprintf("total to=%d from=0", c.n)
	if c.back {
		from, to = to, from
		printed = fmt.Sprintf("total to=0 from=%d", c.n)
	}
	data := make([]byte, c.n)
	_, _ = rand.Read(data)
	begun := time.Now()
	go func() {
		_, _ = from.Write(data)
		_ = from.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(to)
	took := (time.Since(begun) - c.rtt/2).Seconds()
	said := stop()
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%+v: %d bytes came, error %v; the relay printed %q", c, len(got), err, said)
	}
	if !strings.Contains(said, printed) {
		t.Errorf("%+v: printed %q, want %q in it", c, said, printed)
	}
	return float64(c.n) * 8 / took
}

// Connections at the same time have the rate together, not each.
func TestRateShared(t *testing.T) {
	const conns, n, bits = 4, 1 << 18, 20e6
	for end := time.Now().Add(patience); ; {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr, stop := startRelay(t, "--to", ln.Addr().String(), "--rate", "20M")
		var all sync.WaitGroup
		begun := time.Now()
		for range conns {
			from := dial(t, addr)
			to, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			all.Go(func() {
				_, _ = from.Write(make([]byte, n))
				_ = from.CloseWrite()
			})
			all.Go(func() {
				defer to.Close()
				if k, err := io.Copy(io.Discard, to); err != nil || k != n {
					t.Errorf("%d bytes came, error %v", k, err)
				}
			})
		}
		all.Wait()
		ratio := conns * n * 8 / time.Since(begun).Seconds() / bits
		stop()
		ln.Close()
		if ratio > 1.02 {
			t.Fatalf("%.3f of the rate", ratio)
		}
		if ratio > 0.85 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%.3f of the rate at best", ratio)
		}
	}
}

func TestNoLimits(t *testing.T) {
	addr, _ := startRelay(t, "--to", startEcho(t))
	c := dial(t, addr)
	for range 3 {
		roundTrip(t, c)
	}
}

// A peer that reads nothing must hold the sender back, not fill our memory.
func TestBackpressure(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	addr, stop := startRelay(t, "--to", ln.Addr().String(), "--rtt", "2ms", "--rate", "1G")
	c := dial(t, addr)
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	_ = c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	n, err := c.Write(make([]byte, 256<<20))
	if err == nil || n > 64<<20 {
		t.Fatalf("%d bytes went into a connection that nobody reads, error %v", n, err)
	}
	if got := stop(); !strings.Contains(got, "total ") { // and it can be stopped meanwhile
		t.Fatalf("printed %q", got)
	}
}

func TestTargetGone(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := ln.Addr().String()
	ln.Close()
	addr, stop := startRelay(t, "--to", gone)
	c := dial(t, addr)
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Fatalf("read %d bytes from nowhere", n)
	}
	if got := stop(); !strings.Contains(got, "connection 1: ") || !strings.Contains(got, "refused") {
		t.Fatalf("printed %q", got)
	}
}

// The end of the far side must reach the near side.
func TestPeerEnds(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	addr, _ := startRelay(t, "--to", ln.Addr().String(), "--rtt", "1ms")
	c := dial(t, addr)
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = far.(*net.TCPConn).SetLinger(0)
	far.Close()
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Fatalf("read: %v", err)
	}
}

func TestArguments(t *testing.T) {
	for _, args := range [][]string{
		{},
		{"--to", "127.0.0.1:1", "extra"},
		{"--to", "127.0.0.1:1", "--rate", "fast"},
		{"--to", "127.0.0.1:1", "--rate", "-1"},
		{"--to", "127.0.0.1:1", "--rtt", "-1ms"},
		{"--to", "127.0.0.1:1", "--listen", "nowhere"},
	} {
		if err := run(context.Background(), args, nil, io.Discard); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
	for s, want := range map[string]float64{"0": 0, "1G": 1e9, "100m": 1e8, "2.5K": 2500, "64000": 64000} {
		if got, err := parseRate(s); err != nil || got != want {
			t.Errorf("rate %q is %v, %v; want %v", s, got, err, want)
		}
	}
}
