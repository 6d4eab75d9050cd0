package node

import (
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/host"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// A collector that is away is a warning of health, which metrics count; it gets the lines once it is back, the last ones too.
func TestAuditForward(t *testing.T) {
	dir := t.TempDir()
	c := testConfig(dir)
	c.Audit.Forward = filepath.Join(dir, "collector")
	must(t, Prepare(c))
	n := &Node{log: slog.New(slog.DiscardHandler), jobs: jobs.NewState(settings(c)), host: new(host.Host)}
	n.cfg.Store(c)
	must(t, n.startAudit())
	defer n.Stop()
	away := func() bool {
		for _, h := range n.health(t.Context()) {
			if h.Name == "audit" && h.Level == rpc.Warn && strings.Contains(h.Text, c.Audit.Forward+" is away") && strings.Contains(h.Remedy, "audit.forward") {
				return true
			}
		}
		return false
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("not within 20 s: ", what)
			}
		}
	}
	counters := func() (waiting, forwarded uint64) {
		for _, m := range n.counters() {
			switch m.Name {
			case "audit_forward_waiting":
				waiting = m.Value
			case "audit_forwarded_total":
				forwarded = m.Value
			}
		}
		return waiting, forwarded
	}
	must(t, n.audit.Write(audit.Event{Event: audit.Grant, Lease: "first"}))
	until("health warns", away)
	if waiting, forwarded := counters(); waiting != 1 || forwarded != 0 {
		t.Errorf("%d wait, %d were forwarded", waiting, forwarded)
	}
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: c.Audit.Forward})
	must(t, err)
	defer socket.Close()
	until("the collector is back", func() bool { return !away() })
	must(t, n.audit.Write(audit.Event{Event: audit.Release, Lease: "last"}))
	n.Stop()
	must(t, socket.SetReadDeadline(time.Now().Add(20*time.Second)))
	b := make([]byte, 4096)
	for _, want := range []string{"first", "last"} {
		size, err := socket.Read(b)
		must(t, err)
		if got := string(b[:size]); !strings.Contains(got, `"lease":"`+want+`"`) {
			t.Errorf("%q, want lease %s", got, want)
		}
	}
	if waiting, forwarded := counters(); waiting != 0 || forwarded != 2 {
		t.Errorf("%d wait, %d were forwarded", waiting, forwarded)
	}
}
