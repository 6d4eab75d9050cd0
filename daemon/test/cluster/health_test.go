package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// TestHealthAll asks all owners from the controller's node, while one of them is dead. Another node is refused by the owners, and a user by
// the daemon.
func TestHealthAll(t *testing.T) {
	s := start(t, site.Options{Hosts: 2, Owners: 3, GPUs: 1, Config: map[string]string{"slurm.controllers": "[host00]", "slurm.bin": "/nonexistent"}})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ask := func(d *site.Daemon, uid int) string {
		t.Helper()
		out, err := d.Node.Run(ctx, sluice(s, d, uid, "health", "--all", "--config", d.Config))
		if err == nil {
			t.Errorf("exit status 0: %s", out)
		}
		return out
	}
	if err := s.Owners[2].Kill(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		from *site.Daemon
		uid  int
		want []string
	}{
		{s.Hosts[0], 0, []string{"fail  gpu02: silent: no answer (gpu02: owner gpu02 cannot be asked: ", "4 nodes asked: ", ", 1 without an answer\n"}},
		{s.Hosts[1], 0, []string{"warn  gpu[00-01]: refused: refuses to tell (gpu00: host01 asks for the health of gpu00: only a controller may", "4 nodes asked: ", ", 3 without an answer\n"}},
		{s.Hosts[0], user, []string{"is for root and SlurmUser"}},
	} {
		out := ask(c.from, c.uid)
		for _, want := range c.want {
			if !strings.Contains(out, want) {
				t.Errorf("%s as %d: no %q in\n%s", c.from.Node.Name, c.uid, want, out)
			}
		}
		t.Log(out)
	}
	if _, err := s.Owners[2].Up(ctx); err != nil {
		t.Fatal(err)
	}
	// One that is back is asked, though it was silent a moment ago.
	eventually(t, 30*time.Second, "all answer", func() error {
		out, err := s.Hosts[0].Node.Run(ctx, sluice(s, s.Hosts[0], 0, "health", "--all", "--config", s.Hosts[0].Config))
		if !strings.Contains(out, ", 0 without an answer") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
}
