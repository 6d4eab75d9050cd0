package node

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/host"
	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// A reload that fails is seen by health and metrics, since the daemon would not start with that file.
func TestReloadFails(t *testing.T) {
	c := testConfig(t.TempDir())
	must(t, Prepare(c))
	log, err := audit.Open(c.Audit.File, audit.Options{MaxSize: 1 << 20, Keep: 1, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	defer log.Close()
	n := &Node{log: slog.New(slog.DiscardHandler), audit: log, jobs: jobs.NewState(settings(c)), host: new(host.Host)}
	n.cfg.Store(c)
	said := func() (text string, metric uint64) {
		for _, h := range n.health(t.Context()) {
			if h.Name == "config" && h.Level == rpc.Fail {
				text = h.Text
			}
		}
		for _, m := range n.counters() {
			if m.Name == "config_reload_failed" {
				metric = m.Value
			}
		}
		return text, metric
	}
	if text, metric := said(); text != "" || metric != 0 {
		t.Errorf("at the start: %q, %d", text, metric)
	}
	n.reload(func() (*config.Config, error) { return nil, errors.New("sluice.yaml:7: unknown key x") })
	if text, metric := said(); !strings.Contains(text, "unknown key x") || metric != 1 {
		t.Errorf("after a reload that failed: %q, %d", text, metric)
	}
}
