package node

import (
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
)

// A node tells its health to itself and to controllers, and asks for time while it starts.
func TestHealthForControllers(t *testing.T) {
	cfg := config.Default()
	cfg.Node = "gpu01"
	n := &Node{}
	n.cfg.Store(&cfg)
	o := &owner.Owner{}
	o.SetControllers([]string{"ctl"})
	for host, want := range map[string]lease.Code{"ctl": lease.Down, "gpu01": lease.Down, "node07": lease.Denied, "": lease.Denied} {
		if checks, err := (lender{o, n}).Health(t.Context(), host); lease.CodeOf(err) != want || len(checks) > 0 {
			t.Errorf("%q: %v, want %s", host, err, want)
		}
	}
}
