package owner

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// Everything at once, for the race detector and for what must always hold.
func TestConcurrent(t *testing.T) {
	n := newNode(t, "gpu01", 4)
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	var wg sync.WaitGroup
	for h := range 4 {
		wg.Go(func() {
			host := fmt.Sprint("h", h)
			rng := rand.New(rand.NewPCG(1, uint64(h)))
			for i := range rounds {
				l := n.want(host, fmt.Sprint(i), uint32(1+rng.IntN(50)), uint32(1+rng.IntN(50)))
				ttl := time.Duration(rng.IntN(2)) * time.Minute
				have, err := n.Reserve(ctx, host, l, ttl)
				if err != nil {
					continue
				}
				if ttl > 0 {
					_ = n.Confirm(ctx, host, have.ID)
				}
				for range rng.IntN(3) {
					wg.Go(func() { _ = n.admitOne(have.ID) })
				}
				_, _ = n.Renew(ctx, host, []string{have.ID})
				_, _ = n.List(ctx, "")
				_ = n.Sweep(ctx)
				for range 2 {
					wg.Go(func() {
						if err := n.Release(ctx, host, have.ID, have.Request.Key, ""); err != nil {
							t.Error(err)
						}
					})
				}
			}
		})
	}
	wg.Wait()
	if p, _ := n.free(0); p != 100 || len(n.workers.Leases()) != 0 {
		t.Error(p, n.workers.Leases())
	}
	n.check(true)
}

// The daemon is killed at each of its points, at the first and at a later pass;
// whoever asked asks again. Nothing leaks, nothing is doubled, no session is lost.
func TestCrashAtEachPoint(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "fault", "names.go"))
	must(t, err)
	points := []string{"reserve-1-checked", "reserve-2-written", "reserve-3-answer", "confirm-1-checked", "grant-1-written", "grant-2-audited", "renew-1-noted", "open-1-offered",
		"open-2-started", "open-3-audited", "release-0-checked", "release-1-marked", "release-2-killed", "release-3-freed", "release-4-audited", "release-5-answer", "set-1-checked", "set-2-written", "set-3-audited", "set-4-answer", "reclaim-1-found", "endjob-1-remembered", "endjob-2-answer"}
	for _, p := range points {
		if !strings.Contains(string(b), `"`+p+`"`) {
			t.Errorf("point %s is not among the sources' points", p)
		}
		for pass := 1; pass <= 3; pass++ {
			t.Run(fmt.Sprintf("%s:%d", p, pass), func(t *testing.T) { crash(t, p, pass) })
		}
	}
}

func crash(t *testing.T, point string, pass int) {
	n := control(newNode(t, "gpu01", 2))
	n.crashAt, n.crashIn = point, pass
	crashes := 0
	// again does f until the daemon lived through it.
	again := func(f func() error) (err error) {
		for n.do(func() { err = f() }) {
			crashes++
		}
		return err
	}
	for i := range 4 {
		direct, two := n.want("h1", fmt.Sprint("d", i), 30), n.want("h1", fmt.Sprint("t", i), 20, 20)
		must(t, again(func() error { _, err := n.Reserve(ctx, "h1", direct, 0); return err }))
		must(t, again(func() error { _, err := n.Reserve(ctx, "h1", two, time.Minute); return err }))
		must(t, again(func() error { return n.Confirm(ctx, "h1", two.ID) }))
		must(t, again(func() error { _, err := n.Renew(ctx, "h1", []string{direct.ID, two.ID}); return err }))
		must(t, again(func() error { _, err := n.Offer(ctx, "h1", request(two.ID)); return err }))
		must(t, again(func() error { return n.admitOne(two.ID) }))
		if s := n.workers.Sessions(two.ID); len(s) == 0 {
			t.Fatal("a session was lost")
		}
		if list, _ := n.List(ctx, "h1"); len(list) != 2 || list[0].State != lease.Granted || list[1].State != lease.Granted {
			t.Fatal("a lease was lost")
		}
		if p, _ := n.free(0); p != 50 {
			t.Fatalf("%d%% free, want 50", p)
		}
		change := lease.Change{Lease: two.ID, Shares: []uint32{10, 90}, Policy: lease.Fixed, Lend: lease.LendYes, Beyond: true}
		must(t, again(func() error { _, err := n.Set(ctx, "h1", change); return err }))
		if p, _ := n.free(0); p != 60 {
			t.Fatalf("%d%% free after a change, want 60", p)
		}
		n.shared(two.ID, "fixed-lend", 10, 90)
		must(t, again(func() error { return n.Release(ctx, "h1", two.ID, two.Request.Key, "job ended") }))
		// The same by a controller, for two nodes at once.
		job := fmt.Sprint("s", i)
		for _, h := range []string{"h1", "h2"} {
			l := n.sponsored(h, job, 100, 0, 20)
			must(t, again(func() error { _, err := n.Reserve(ctx, "ctl", l, 0); return err }))
			must(t, again(func() error { _, err := n.Renew(ctx, "ctl", []string{l.ID}); return err }))
			must(t, again(func() error { return n.admitOne(l.ID) }))
		}
		must(t, again(func() error {
			return n.Release(ctx, "ctl", "", lease.Key{Cluster: "c", Job: job, Incarnation: 100}, "job ended")
		}))
		if list, _ := n.List(ctx, ""); len(list) != 1 {
			t.Fatalf("%d leases outlived their job", len(list)-1)
		}
		reports, err := n.Reports(ctx, "ctl", "c", job)
		must(t, err)
		for _, r := range reports {
			if r.Sessions == 0 || r.Ended.IsZero() {
				t.Errorf("%+v", r)
			}
		}
		if len(reports) != 2 {
			t.Errorf("%d reports of 2 leases", len(reports))
		}
		must(t, again(func() error {
			n.clock.pass(6 * time.Minute) // of silence, which counts from a start too
			return n.Sweep(ctx)
		}))
		if p, m := n.free(0); p != 100 || m != n.devices[0].Mem {
			t.Fatalf("leaked: %d%% free", p)
		}
		if ids := n.workers.Leases(); len(ids) != 0 {
			t.Fatal("sessions outlived their leases:", ids)
		}
	}
	if crashes != 1 {
		t.Fatalf("%d crashes, want 1", crashes)
	}
	n.kill()
	must(t, n.Sweep(ctx))
	n.check(true)
	ends := 0
	for _, e := range n.history() {
		if e.Event == audit.Release || e.Event == audit.Reclaim {
			ends++
		}
	}
	if ends != 16 {
		t.Errorf("%d ends of 16 leases", ends)
	}
}
