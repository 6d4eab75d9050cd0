package audit

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/syslog"
)

// collected opens a log that forwards to a socket, which is returned as well.
func collected(t *testing.T) (path string, l *Log, s *syslog.Sender, socket *net.UnixConn) {
	t.Helper()
	dir := t.TempDir()
	path = filepath.Join(dir, "audit.log")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: filepath.Join(dir, "log")})
	must(t, err)
	t.Cleanup(func() { socket.Close() })
	must(t, socket.SetReadDeadline(time.Now().Add(20*time.Second)))
	s = syslog.New(syslog.Target{Network: "unixgram", Addr: socket.LocalAddr().String()}, "gpu01", slog.New(slog.DiscardHandler))
	l, err = Open(path, Options{MaxSize: 1 << 30, Forward: s})
	must(t, err)
	t.Cleanup(func() { l.Close() })
	return path, l, s, socket
}

// The collector gets the lines as the files have them, in the order of their numbers, and none that was not written.
func TestForward(t *testing.T) {
	path, l, s, socket := collected(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	events := []string{Grant, SessionOpen, Refuse, Set, TicketRefuse, SessionEnd, Release}
	for i, e := range events {
		if i == 3 {
			f := l.series[leases].f
			l.series[leases].f = noRoom{f}
			if err := l.Write(Event{Event: Grant, Lease: "never written"}); err == nil {
				t.Error("written")
			}
			l.series[leases].f = f
		}
		must(t, l.Write(Event{Event: e, Lease: "x", Program: "ä\nb"}))
	}
	cancel()
	var files []byte
	for _, c := range classes {
		b, err := os.ReadFile(path + string(c))
		must(t, err)
		files = append(files, b...)
	}
	b := make([]byte, maxLine)
	for i, e := range events {
		n, err := socket.Read(b)
		must(t, err)
		pri := "<86>"
		if classOf(e) == refusals {
			pri = "<85>"
		}
		head, line, _ := strings.Cut(string(b[:n]), ": ")
		if !strings.HasPrefix(head, pri) || !bytes.Contains(files, []byte(line+"\n")) || !strings.Contains(line, `"event":"`+e+`"`) {
			t.Errorf("line %d is %s: %s; the files have\n%s", i, head, line, files)
		}
	}
	must(t, <-done)
	if st := s.State(); st.Forwarded != uint64(len(events)) || st.Dropped != 0 {
		t.Errorf("%+v", st)
	}
}

// noRoom is a file on a full disk.
type noRoom struct{ file }

func (noRoom) Write([]byte) (int, error) { return 0, errors.New("no room") }

// While the collector is away, sessions and refusals leave room for who had which GPU.
func TestForwardKeepsRoom(t *testing.T) {
	_, l, s, _ := collected(t) // and nobody runs it
	reason := strings.Repeat("x", 3000)
	dropped := func(event string, lines int) uint64 {
		before := s.State().Dropped
		for range lines {
			must(t, l.Write(Event{Event: event, Reason: reason}))
		}
		return s.State().Dropped - before
	}
	for _, e := range []string{Refuse, SessionRefuse, TicketRefuse, PeerRefuse} {
		dropped(e, 1000)
	}
	if n := dropped(SessionOpen, 10); n > 0 {
		t.Errorf("after refusals, %d of 10 sessions were dropped", n)
	}
	for _, e := range []string{SessionOpen, SessionEnd, Overrun, Idle} {
		dropped(e, 1000)
	}
	if n := dropped(Grant, 100); n > 0 {
		t.Errorf("after sessions, %d of 100 grants were dropped", n)
	}
	if n := dropped(Refuse, 1); n != 1 {
		t.Error("a refusal had room beyond that of refusals")
	}
	if s.State().Waiting == 0 || s.State().Dropped == 0 {
		t.Errorf("%+v", s.State())
	}
}
