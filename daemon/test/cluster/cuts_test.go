package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// destroy has the kernel end all connections of a node's data port, and returns how many there were. port is "sport" at the owner and "dport" at
// its hosts.
func destroy(ctx context.Context, d *site.Daemon, port string) (int, error) {
	out, err := d.Node.Run(ctx, node.Command{Argv: []string{"ss", "-K", "-H", "-t", "state", "established", port, "=", fmt.Sprintf(":%d", site.Data)}})
	return strings.Count(out, fmt.Sprintf(":%d", site.Data)), err
}

// TestCutsAndDaemons has the kernel end the connections of a program's session again and again, at either end. After every tenth cut it kills a daemon
// and restarts it. The program goes on, and its result is that of a run without cuts.
// SLUICE_CUTS sets the number of cuts.
func TestCutsAndDaemons(t *testing.T) {
	t.Parallel()
	most := 20
	if n, err := strconv.Atoi(os.Getenv("SLUICE_CUTS")); err == nil {
		most = n
	}
	for _, encrypt := range []string{"false", "true"} {
		t.Run("encrypt="+encrypt, func(t *testing.T) {
			t.Parallel()
			s := pausing(t, map[string]string{"encrypt": encrypt})
			c := &cutting{s: s, rnd: rand.New(rand.NewPCG(1, 21))}
			program := func(seed int) (string, error) {
				return s.Hosts[0].Node.Run(t.Context(), s.Hosts[0].Run(user, "--fraction", "50", "--", s.Program("paused"), strconv.Itoa(seed), "800"))
			}
			programs, back := 0, 0
			for seed := 0; c.cuts < most/2 && !t.Failed(); seed++ {
				want, err := program(seed)
				if err != nil {
					t.Fatalf("uncut: %v: %s", err, want)
				}
				programs += 2
				stop, stopped := make(chan struct{}), make(chan error, 1)
				go func() { stopped <- c.until(t.Context(), min(most/2, 50), stop) }()
				got, err := program(seed)
				close(stop)
				if cut := <-stopped; cut != nil {
					t.Fatal(cut)
				}
				back += strings.Count(got, " is back after ")
				if err != nil || checksum(got) != checksum(want) {
					t.Errorf("seed %d, %d cuts, %d daemons killed: %v: %s\nuncut: %s", seed, c.cuts, c.killed, err, got, want)
				}
				allFree(t, s, nil)
			}
			if n := audited(t, s.Owners[0], audit.SessionOpen); n != programs {
				t.Errorf("%d programs had %d sessions", programs, n)
			}
			if back == 0 {
				t.Error("no program lost its connection: does the kernel end connections (ss -K)?")
			}
			t.Logf("%d programs, %d cuts, %d pauses, %d daemons killed", programs, c.cuts, back, c.killed)
		})
	}
}

// cutting cuts a site's data connections and kills its daemons.
type cutting struct {
	s            *site.Site
	rnd          *rand.Rand
	cuts, killed int
}

// until cuts at most so many connections, and returns when stop is closed; all daemons run then. Half of the gaps between cuts are too short for
// a connection to be made again.
func (c *cutting) until(ctx context.Context, most int, stop chan struct{}) error {
	host, owner := c.s.Hosts[0], c.s.Owners[0]
	for works := false; !works; { // before its WELCOME a session knows no grace, and a program gives up after a few attempts
		select {
		case <-stop:
			return nil
		case <-time.After(10 * time.Millisecond):
		}
		works = working(c.s) == nil
	}
	for last := c.cuts + most; c.cuts < last; {
		gap := []int{20, 200}[c.rnd.IntN(2)]
		select {
		case <-stop:
			return nil
		case <-time.After(time.Duration(c.rnd.IntN(gap)) * time.Millisecond):
		}
		at, port := host, "dport"
		if c.rnd.IntN(2) == 0 {
			at, port = owner, "sport"
		}
		n, err := destroy(ctx, at, port)
		if err != nil {
			return err
		}
		before := c.cuts / 10
		if c.cuts += n; c.cuts/10 == before {
			continue
		}
		d := []*site.Daemon{host, owner}[c.rnd.IntN(2)]
		if err := d.Kill(); err != nil {
			return err
		}
		c.killed++
		time.Sleep(time.Duration(c.rnd.IntN(200)) * time.Millisecond)
		if _, err := d.Up(ctx); err != nil {
			return err
		}
	}
	<-stop
	return nil
}
