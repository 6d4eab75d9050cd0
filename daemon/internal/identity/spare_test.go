package identity

import (
	"net"
	"strings"
	"testing"
	"time"
)

// TestSpare: a connection that is closed without a word is no refused daemon: a daemon makes a few beside the one that it uses. One that has said
// something, or stays and says nothing, is reported.
func TestSpare(t *testing.T) {
	var reports []string
	cfg := newSite(t).config(t, "gpu01", time.Now())
	cfg.Refused = func(_ net.Addr, _, reason string) { reports = append(reports, reason) }
	owner := mustNew(t, cfg)
	for _, c := range []struct {
		what, says string
		reset      bool
		stays      bool
		want       string // in the report; "": there is none
	}{
		{what: "closed"},
		{what: "reset", reset: true},
		{what: "closed within a record", says: "\x16\x03\x01", want: "EOF"},
		{what: "no TLS", says: "GET / HTTP/1.1\r\n\r\n", want: "TLS"},
		{what: "silent", stays: true, want: "timeout"},
	} {
		reports = nil
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		client, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		server, err := l.Accept()
		l.Close()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Write([]byte(c.says)); err != nil {
			t.Fatal(err)
		}
		if c.reset {
			_ = client.(*net.TCPConn).SetLinger(0)
		}
		if !c.stays {
			client.Close()
		}
		_ = server.SetDeadline(time.Now().Add(100 * time.Millisecond))
		if _, _, err := owner.Server().ServerHandshake(server); err == nil {
			t.Errorf("%s: it was let in", c.what)
		}
		client.Close()
		if got := strings.Join(reports, "; "); (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: reported %q, want %q", c.what, got, c.want)
		}
	}
}
