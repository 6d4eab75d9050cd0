package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// refuses starts sluiced once more on a daemon's node, with more configuration, and
// returns what it said. It fails the test if sluiced does not end by itself.
func refuses(t *testing.T, s *site.Site, d *site.Daemon, what string, more map[string]string) string {
	t.Helper()
	config := d.Config
	if more != nil {
		old, err := os.ReadFile(config)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Configure(more); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := os.WriteFile(config, old, 0o644); err != nil {
				t.Error(err)
			}
		}()
	}
	out := filepath.Join(t.TempDir(), "out")
	p, err := d.Node.Start(node.Command{Argv: []string{s.Opt("bin/sluiced"), "--config", config}, Env: d.Env(), Dir: "/", Stdout: out, Stderr: out})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	if err := p.Wait(ctx); p.Status() != 1 {
		t.Errorf("%s: sluiced is not refused: %v: %s", what, err, site.Tail(out, 6))
	}
	return site.Tail(out, 6)
}

// TestOtherState starts daemons that must not run on a node: they are refused with the
// remedy, and no session notices.
func TestOtherState(t *testing.T) {
	t.Parallel()
	s := start(t, site.Options{Hosts: 1, Owners: 1, GPUs: 2, Config: map[string]string{"log.level": "info"}})
	h, o := s.Hosts[0], s.Owners[0]
	j := steady(t, s, h, "steady", 30)
	says := func(what, said string, want ...string) {
		t.Helper()
		for _, w := range want {
			if !strings.Contains(said, w) {
				t.Errorf("%s: %q is not in what sluiced said: %s", what, w, said)
			}
		}
		if err := j.lost(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	elsewhere := map[string]string{
		"state_dir": filepath.Join(o.Node.Dir, "state2"), "audit.file": filepath.Join(o.Node.Dir, "log2", "audit.log"),
		"listen.control": ":8071", "listen.data": ":8072", "listen.metrics": "off",
	}
	says("a second daemon", refuses(t, s, o, "a second daemon", nil), "another sluiced uses it")
	says("a second daemon with another state_dir", refuses(t, s, o, "a second daemon with another state_dir", elsewhere), "another sluiced uses it")

	// The only daemon, whose state_dir is mistyped, or not mounted. The session must
	// outlive it, and the next daemon must find the session.
	if err := o.Kill(); err != nil {
		t.Fatal(err)
	}
	const remedy = "is mounted and spelled right"
	says("state_dir mistyped", refuses(t, s, o, "state_dir mistyped", elsewhere), remedy, "/run/sluice/owner.db.id")
	state := filepath.Join(o.Node.Dir, "state")
	if err := os.Rename(state, state+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	says("state_dir not mounted", refuses(t, s, o, "state_dir not mounted", nil), remedy)
	if err := os.Remove(state); err != nil { // and nothing was made in it
		t.Error(err)
	}
	if err := os.Rename(state+".away", state); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := o.Up(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "the session is found again", func() error {
		all, err := list(h)
		if err == nil && (len(all) != 1 || all[0].ID != j.lease.ID || len(all[0].Sessions) != 1) {
			err = fmt.Errorf("%+v", all)
		}
		return err
	})
	says("its own daemon", "")
	j.stop(t)
	allFree(t, s, nil)
}
