package syslog

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until ok says so.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within 20 s: ", what)
		}
	}
}

// logged is a log that may be read while it is written.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) { l.mu.Lock(); defer l.mu.Unlock(); return l.b.Write(p) }
func (l *logged) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// sender is a Sender that runs until stop is called, at the latest by the test's end.
func sender(t *testing.T, network, addr string) (s *Sender, log *logged, stop func()) {
	t.Helper()
	log = &logged{}
	s = New(Target{network, addr}, "gpu01", slog.New(slog.NewTextHandler(log, nil)))
	s.pause, s.longest = 5*time.Millisecond, 20*time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Run(ctx) }()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return s, log, stop
}

func send(s *Sender, from, to int) {
	for i := from; i < to; i++ {
		s.Send(Message{Time: time.Date(2026, 1, 2, 3, 4, 5, 678900000, time.UTC), ID: "grant", Severity: Info, Text: fmt.Appendf(nil, `{"seq":%d}`, i), Fill: 100})
	}
}

// readFrame reads one counted frame.
func readFrame(r *bufio.Reader) (string, error) {
	n, err := r.ReadString(' ')
	if err != nil {
		return "", err
	}
	size, err := strconv.Atoi(strings.TrimSuffix(n, " "))
	if err != nil {
		return "", err
	}
	b := make([]byte, size)
	_, err = io.ReadFull(r, b)
	return string(b), err
}

// seq is the number at a frame's end.
func seq(t *testing.T, frame string) int {
	t.Helper()
	var n int
	_, text, _ := strings.Cut(frame, `{"seq":`)
	if _, err := fmt.Sscanf(text, "%d", &n); err != nil {
		t.Fatalf("%q: %v", frame, err)
	}
	return n
}

// inOrder reads counted frames until the one with the number last, and wants them to be from, from+1, ...
func inOrder(t *testing.T, r *bufio.Reader, from, last int) {
	t.Helper()
	for i := from; i <= last; i++ {
		f, err := readFrame(r)
		must(t, err)
		if got := seq(t, f); got != i {
			t.Fatalf("frame %d came for %d", got, i)
		}
	}
}

func listen(t *testing.T, addr string) *net.TCPListener {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	must(t, err)
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func accept(t *testing.T, l *net.TCPListener) *net.TCPConn {
	t.Helper()
	must(t, l.SetDeadline(time.Now().Add(20*time.Second)))
	c, err := l.AcceptTCP()
	must(t, err)
	must(t, c.SetDeadline(time.Now().Add(20*time.Second)))
	t.Cleanup(func() { c.Close() })
	return c
}

var (
	remote = regexp.MustCompile(`^<86>1 2026-01-02T03:04:05\.678900Z gpu01 sluiced ` + strconv.Itoa(os.Getpid()) + ` grant - \{"seq":\d+\}$`)
	local  = regexp.MustCompile(`^<86>Jan  [123] \d\d:\d\d:05 sluiced\[` + strconv.Itoa(os.Getpid()) + `\]: \{"seq":\d+\}$`)
)

func TestTCP(t *testing.T) {
	l := listen(t, "127.0.0.1:0")
	s, _, stop := sender(t, "tcp", l.Addr().String())
	c := accept(t, l)
	send(s, 0, 1)
	r := bufio.NewReader(c)
	f, err := readFrame(r)
	must(t, err)
	if !remote.MatchString(f) {
		t.Errorf("%q", f)
	}
	send(s, 1, 3000)
	stop() // what waits is sent first
	inOrder(t, r, 1, 2999)
	if st := s.State(); st.Forwarded != 3000 || st.Dropped != 0 || st.Waiting != 0 {
		t.Errorf("%+v", st)
	}
}

// Datagrams to a network's port and to a socket of this machine.
func TestDatagrams(t *testing.T) {
	for network, want := range map[string]*regexp.Regexp{"udp": remote, "unixgram": local} {
		addr := "127.0.0.1:0"
		if network == "unixgram" {
			addr = filepath.Join(t.TempDir(), "log")
		}
		l, err := net.ListenPacket(network, addr)
		must(t, err)
		defer l.Close()
		must(t, l.SetReadDeadline(time.Now().Add(20*time.Second)))
		s, _, _ := sender(t, network, l.LocalAddr().String())
		send(s, 0, 3)
		s.Send(Message{Text: make([]byte, 1<<20), Fill: 100}) // longer than any datagram, and no reason to stop
		send(s, 3, 5)
		b := make([]byte, 4096)
		for i := range 5 {
			n, _, err := l.ReadFrom(b)
			must(t, err)
			if got := string(b[:n]); !want.MatchString(got) || seq(t, got) != i {
				t.Errorf("%s: datagram %d is %q", network, i, got)
			}
		}
		eventually(t, "the counts are there", func() bool { st := s.State(); return st.Forwarded == 5 && st.Dropped == 1 && st.Waiting == 0 })
	}
}

// A collector that is away at the start, comes, goes and comes back gets everything, in order.
func TestAwayAndBack(t *testing.T) {
	l := listen(t, "127.0.0.1:0")
	addr := l.Addr().String()
	must(t, l.Close())
	s, log, _ := sender(t, "tcp", addr)
	s.Send(Message{Text: []byte(`{"seq":0}`), Fill: 100})
	eventually(t, "it is away", func() bool { return s.State().Away != nil })
	from := 0
	for life := range 3 {
		send(s, 100*life+1, 100*life+51)
		l = listen(t, addr)
		c := accept(t, l)
		r := bufio.NewReader(c)
		inOrder(t, r, from, 100*life+50)
		send(s, 100*life+51, 100*life+101)
		inOrder(t, r, 100*life+51, 100*life+100)
		from = 100*life + 101
		must(t, l.Close())
		must(t, c.Close()) // while nothing is sent: the next line is not written to it
		eventually(t, "its end is noticed", func() bool { return s.State().Away != nil })
	}
	if st := s.State(); st.Forwarded != 301 || st.Dropped != 0 {
		t.Errorf("%+v", st)
	}
	if away, back := log.count("is away"), log.count("is back"); away != 1 || back != 1 {
		t.Errorf("%d lines say that it is away, %d that it is back, within a minute", away, back)
	}
}

// The collector on a local socket is restarted; the sender connects to the new one.
func TestSocketComesBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	s, _, _ := sender(t, "unixgram", path)
	b := make([]byte, 4096)
	for life := range 2 {
		send(s, life, life+1)
		eventually(t, "it is away", func() bool { return s.State().Away != nil })
		l, err := net.ListenPacket("unixgram", path)
		must(t, err)
		must(t, l.SetReadDeadline(time.Now().Add(20*time.Second)))
		n, _, err := l.ReadFrom(b)
		must(t, err)
		if got := seq(t, string(b[:n])); got != life {
			t.Errorf("%d came for %d", got, life)
		}
		must(t, l.Close())
		_ = os.Remove(path)
	}
}

// What was written to a connection and had not arrived when it was lost is written to the next one.
func TestUnacknowledged(t *testing.T) {
	lc := net.ListenConfig{}
	nl, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	l := nl.(*net.TCPListener)
	defer l.Close()
	s, _, _ := sender(t, "tcp", l.Addr().String())
	c := accept(t, l)
	must(t, c.SetReadBuffer(4<<10))
	const lines = 20000
	send(s, 0, lines)
	r := bufio.NewReader(c)
	inOrder(t, r, 0, 99)
	settled := 0
	eventually(t, "the sender waits", func() bool {
		w := s.State().Waiting
		ok := w == settled && w < lines-200
		settled = w
		return ok
	})
	must(t, c.Close())
	r = bufio.NewReader(accept(t, l))
	f, err := readFrame(r)
	must(t, err)
	first := seq(t, f)
	inOrder(t, r, first+1, lines-1)
	missing := (first - 100) * len(f)
	if gone := (lines - settled - 100) * len(f); missing > 3*gone/4 {
		t.Errorf("%d bytes are missing of %d that were written", missing, gone)
	}
}

// If the collector never reads, the queue stays within its size, each kind of message within its part, and neither Send nor Run waits.
func TestNeverReads(t *testing.T) {
	l := listen(t, "127.0.0.1:0")
	s, log, stop := sender(t, "tcp", l.Addr().String())
	s.mu.Lock()
	s.size = 1 << 20
	s.mu.Unlock()
	c := accept(t, l)
	must(t, c.SetReadBuffer(4<<10))
	text := bytes.Repeat([]byte("x"), 500)
	sent := 0
	fill := func(percent int) {
		for range 20000 {
			s.Send(Message{Text: text, Fill: percent})
			sent++
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.bytes > s.size/100*percent {
			t.Errorf("%d bytes in the queue, with %d%% of %d", s.bytes, percent, s.size)
		}
	}
	begun := time.Now()
	fill(50)
	fill(50) // the kernel's buffers are full too
	before := s.State()
	s.Send(Message{Text: text, Fill: 100})
	sent++
	if st := s.State(); st.Dropped != before.Dropped || before.Dropped == 0 {
		t.Errorf("dropped before: %d, with a message that has room: %d", before.Dropped, st.Dropped)
	}
	fill(100)
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("60,000 messages took %v", took)
	}
	begun = time.Now()
	stop()
	if took := time.Since(begun); took > lastWait+5*time.Second {
		t.Errorf("the end took %v", took)
	}
	st := s.State()
	if lost := uint64(sent) - st.Forwarded; st.Dropped < lost || st.Dropped > lost+inFlight*4/500 { // what the kernel had and the collector's did not is counted both ways
		t.Errorf("%d sent: %+v", sent, st)
	}
	if n := log.count("were not forwarded"); n != 1 {
		t.Errorf("%d reports", n)
	}
}

// A slow collector gets all that has room, in order.
func TestSlow(t *testing.T) {
	l := listen(t, "127.0.0.1:0")
	s, _, _ := sender(t, "tcp", l.Addr().String())
	c := accept(t, l)
	must(t, c.SetReadBuffer(64<<10))
	send(s, 0, 20000)
	eventually(t, "the sender has filled the kernel's buffers", func() bool { return s.State().Waiting < 20000 })
	inOrder(t, bufio.NewReader(c), 0, 19999)
}

// Drops are reported once per interval, and counted.
func TestReports(t *testing.T) {
	log := &logged{}
	s := New(Target{"unixgram", "/nowhere/log"}, "gpu01", slog.New(slog.NewTextHandler(log, nil)))
	s.size, s.report = 1000, 50*time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	begun := time.Now()
	go func() { done <- s.Run(ctx) }()
	for i := range 3 {
		for range 1000 {
			s.Send(Message{Text: []byte("x"), Fill: 100})
		}
		eventually(t, "a report", func() bool { return log.count("were not forwarded") > i })
	}
	cancel()
	must(t, <-done)
	most := int(time.Since(begun)/s.report) + 1 // and one at the end
	if st := s.State(); st.Dropped != 3000 || log.count("were not forwarded") > most {
		t.Errorf("%+v, %d reports, and %d is the most", st, log.count("were not forwarded"), most)
	}
}
