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

// destroy has the kernel of a node end every connection between the two nodes' daemons and sessions that carries data. It says how many
// there were.
func destroy(ctx context.Context, d *site.Daemon, port string) (int, error) {
	out, err := d.Node.Run(ctx, node.Command{Argv: []string{"ss", "-K", "-H", "-t", "state", "established", port, "=", fmt.Sprintf(":%d", site.Data)}})
	return strings.Count(out, fmt.Sprintf(":%d", site.Data)), err
}

// TestCutsAndDaemons has the kernel end the connections of a program's session, now at its node and now at its owner's, again and again. After
// every tenth cut a daemon is killed and started anew. The program goes on, and computes what it computes without.
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
			programs := 0
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
				if err != nil || checksum(got) != checksum(want) {
					t.Errorf("seed %d, %d cuts, %d daemons killed: %v: %s\nuncut: %s", seed, c.cuts, c.killed, err, got, want)
				}
				allFree(t, s, nil)
			}
			if n := audited(t, s.Owners[0], audit.SessionOpen); n != programs {
				t.Errorf("%d programs had %d sessions", programs, n)
			}
			t.Logf("%d programs, %d cuts, %d daemons killed", programs, c.cuts, c.killed)
		})
	}
}

// checksum is what the program paused says of its memory.
func checksum(out string) string {
	_, sum, _ := strings.Cut(out, "checksum")
	return sum
}

// cutting cuts a site's data connections and kills its daemons.
type cutting struct {
	s            *site.Site
	rnd          *rand.Rand
	cuts, killed int
}

// until cuts up to so many connections until it is told to stop; all daemons run when it returns. Half of the cuts come while what was cut
// before is hardly made again.
func (c *cutting) until(ctx context.Context, most int, stop chan struct{}) error {
	host, owner := c.s.Hosts[0], c.s.Owners[0]
	for works := false; !works; { // before its WELCOME a session knows no grace, and a program gives up after a few attempts
		select {
		case <-stop:
			return nil
		case <-time.After(10 * time.Millisecond):
		}
		ls, err := list(owner)
		if err != nil {
			return err
		}
		works = len(ls) == 1 && len(ls[0].Sessions) == 1 && ls[0].Sessions[0].Counts.Launches > 0
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
