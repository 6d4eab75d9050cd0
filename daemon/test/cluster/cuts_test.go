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
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// TestCutsAndDaemons takes out the owner's cable at random moments while programs compute, for random times, and kills a daemon or both in every third cut
// or so. The programs check what they compute, each has one session throughout, and nothing stays in use. SLUICE_CUTS sets the number of cuts.
func TestCutsAndDaemons(t *testing.T) {
	t.Parallel()
	most := 10
	if n, err := strconv.Atoi(os.Getenv("SLUICE_CUTS")); err == nil {
		most = n
	}
	s := pausing(t, nil)
	h, o := s.Hosts[0], s.Owners[0]
	rnd := rand.New(rand.NewPCG(uint64(most), 22))
	cuts, kills, programs := 0, 0, 0
	for ; cuts < most && !t.Failed(); programs++ {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		done := make(chan error, 1)
		go func(seed int) {
			out, err := h.Node.Run(ctx, h.Run(user, "--fraction", "50", "--", s.Program("paused"), strconv.Itoa(seed), "800"))
			if err == nil && !strings.Contains(out, "PASS") {
				err = fmt.Errorf("no PASS: %s", out)
			}
			done <- err
		}(programs)
		eventually(t, 30*time.Second, "the program has a session", func() error {
			if n, err := sessions(s); err != nil || n != 1 && len(done) == 0 {
				return fmt.Errorf("%d sessions, %w", n, err)
			}
			return nil
		})
		for len(done) == 0 && cuts < most {
			time.Sleep(time.Duration(rnd.IntN(1000)) * time.Millisecond)
			if err := s.Net.Cut(o.Node, true); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(rnd.IntN(2000)) * time.Millisecond)
			for i, d := range []*site.Daemon{h, o} {
				if victim := rnd.IntN(8); victim != i && victim != 2 {
					continue
				}
				if err := d.Kill(); err != nil {
					t.Error(err)
				}
				if _, err := d.Up(ctx); err != nil {
					t.Fatal(err)
				}
				kills++
			}
			if err := s.Net.Cut(o.Node, false); err != nil {
				t.Fatal(err)
			}
			cuts++
		}
		if err := <-done; err != nil {
			t.Errorf("program %d, after %d cuts and %d kills: %v", programs, cuts, kills, err)
		}
		cancel()
	}
	if n := audited(t, o, audit.SessionOpen); n != programs {
		t.Errorf("%d programs had %d sessions", programs, n)
	}
	t.Logf("%d programs, %d cuts, %d daemons killed in them", programs, cuts, kills)
	allFree(t, s, nil)
}
