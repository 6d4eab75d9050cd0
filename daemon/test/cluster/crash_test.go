package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/fault"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// quick makes what depends on time happen soon.
var quick = map[string]string{"lease.renew": "300ms", "lease.silence": "3s", "lease.reserve": "2s", "lease.tombstone": "1m", "log.level": "info"}

// keeper restarts a daemon whenever it ends, as systemd does, and notes how long it took to be ready.
type keeper struct {
	d     *site.Daemon
	stop  chan struct{}
	done  chan struct{}
	again chan struct{} // told of each start
	err   error
	died  atomic.Int64 // by signal 9
	times []time.Duration
}

func keep(d *site.Daemon) *keeper {
	k := &keeper{d: d, stop: make(chan struct{}), done: make(chan struct{}), again: make(chan struct{}, 1)}
	go func() {
		defer close(k.done)
		for {
			p := d.Process()
			select {
			case <-p.Done():
			case <-k.stop:
				return
			}
			if p.Status() != 128+int(syscall.SIGKILL) {
				k.err = fmt.Errorf("node %s: sluiced ended by itself: %w:\n%s", d.Node.Name, p.Err(), site.Tail(d.Log, 30))
				return
			}
			k.died.Add(1)
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			took, err := d.Up(ctx)
			waited := d.Waited()
			cancel()
			if err != nil && d.Process().Ended() && d.Process().Status() == 128+int(syscall.SIGKILL) {
				continue // killed before it was ready
			}
			if err != nil {
				k.err = err
				return
			}
			k.times = append(k.times, took-waited)
			select {
			case k.again <- struct{}{}:
			default:
			}
		}
	}()
	return k
}

func (k *keeper) end() error {
	close(k.stop)
	<-k.done
	return k.err
}

// again asks until it is answered well: whoever meets a daemon that is just starting asks once more.
func again(ctx context.Context, f func(context.Context) error) error {
	for {
		try, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := f(try)
		cancel()
		if err == nil || ctx.Err() != nil {
			return err
		}
		var le *lease.Error
		if errors.As(err, &le) && (le.Code == lease.Invalid || le.Code == lease.Never || le.Code == lease.Denied || le.Code == lease.Over) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestFaultPoints kills an owner, or the host, at every numbered step of a lease's life.
func TestFaultPoints(t *testing.T) {
	t.Parallel()
	names := slices.DeleteFunc(fault.Names(), ofJobs) // those are in jobs_test.go
	if len(names) == 0 {
		t.Fatal("there are no fault points")
	}
	const sites = 3
	var mu sync.Mutex
	hit := make(map[string]int)
	t.Run("sites", func(t *testing.T) {
		for n := range sites {
			t.Run(strconv.Itoa(n), func(t *testing.T) {
				t.Parallel()
				s := start(t, site.Options{Hosts: 1, Owners: 2, GPUs: 2, Faults: true, Config: quick})
				j := steady(t, s, s.Hosts[0], "steady", 30, 30, 30)
				for i := n; i < len(names); i += sites {
					for _, pass := range []int{1, 2} {
						died := faultAt(t, s, names[i], pass)
						mu.Lock()
						hit[names[i]] += died
						mu.Unlock()
						if err := j.lost(); err != nil {
							t.Fatalf("%s:%d: %v", names[i], pass, err)
						}
						if t.Failed() {
							return
						}
					}
				}
				j.stop(t)
				allFree(t, s, nil)
			})
		}
	})
	for _, name := range names {
		if hit[name] == 0 && !t.Failed() {
			t.Errorf("point %s was never passed", name)
		}
	}
	t.Logf("%d points, daemons killed at each: %v", len(names), hit)
}

// onlySteady says what of the pool is held beside the steady job, which has 30 % of three GPUs.
func onlySteady(h *site.Daemon) error {
	gpus, err := pool(h)
	if err != nil {
		return err
	}
	held := 0
	for _, g := range gpus {
		held += int(100 - g.FreePercent)
	}
	if held != 90 {
		return fmt.Errorf("%d%% are held, the steady job has 90%%", held)
	}
	return nil
}

// faultAt arms one owner and the host, and leads leases through their lives. It answers how many daemons died.
func faultAt(t *testing.T, s *site.Site, name string, pass int) int {
	t.Helper()
	where := fmt.Sprintf("%s:%d", name, pass)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	h, o := s.Hosts[0], s.Owners[0]
	var keepers []*keeper
	for _, d := range []*site.Daemon{o, h} {
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		// It may die before it is ready: whatever it takes up again passes the same points.
		_, err := d.Up(ctx, "SLUICE_FAULT="+where)
		if err != nil && !d.Process().Ended() {
			t.Fatalf("%s: %v", where, err)
		}
		keepers = append(keepers, keep(d))
	}
	job := fmt.Sprintf("fault-%s-%d", name, pass)
	var l lease.Lease
	var socket string
	err := again(ctx, func(ctx context.Context) (err error) {
		l, socket, err = acquire(ctx, h, job, user, 50, 50, 50)
		return err
	})
	if err != nil {
		t.Fatalf("%s: acquire: %v", where, err)
	}
	good, failed := 0, 0
	for {
		out, err := h.Node.Run(ctx, onLease(s, h, socket, user, s.Program("vecadd")))
		if err == nil && strings.Contains(out, "PASS") {
			if good++; good == 2 {
				break
			}
			continue
		}
		failed++
		if failed == 5 || ctx.Err() != nil {
			t.Fatalf("%s: program: %v", where, err)
		}
	}
	if failed > 1 {
		t.Errorf("%s: the program failed %d times; the daemon died once", where, failed)
	}
	// Twice the same key: the same lease, whatever died meanwhile.
	err = again(ctx, func(ctx context.Context) error {
		b, _, err := acquire(ctx, h, job, user, 50, 50, 50)
		if err == nil && b.ID != l.ID {
			t.Errorf("%s: job %s has lease %s, then %s", where, job, l.ID, b.ID)
		}
		return err
	})
	if err != nil {
		t.Fatalf("%s: acquire again: %v", where, err)
	}
	// A change is made once it is answered, at the owner and for good.
	err = again(ctx, func(ctx context.Context) error {
		c, err := h.Local()
		if err == nil {
			_, err = c.Set(ctx, lease.Change{Lease: l.ID, Shares: []uint32{40}, Policy: lease.Fixed})
		}
		return err
	})
	if err != nil {
		t.Fatalf("%s: set: %v", where, err)
	}
	err = again(ctx, func(context.Context) error {
		ls, err := list(h)
		for _, x := range ls {
			if x.ID == l.ID && (x.Request.Policy != lease.Fixed || slices.ContainsFunc(x.Grants, func(g lease.Grant) bool { return g.Percent != 40 || g.Paid() != 50 })) {
				t.Errorf("%s: after a change: %s, %+v", where, x.Request.Policy, x.Grants)
			}
		}
		return err
	})
	if err != nil {
		t.Fatalf("%s: list: %v", where, err)
	}
	if err := again(ctx, func(ctx context.Context) error { return release(ctx, h, l) }); err != nil {
		t.Fatalf("%s: release: %v", where, err)
	}
	if name == "acquire-6-undone" {
		undo(ctx, t, s, job)
	}
	// One that ends by its life, by the host's word or, if the host is away, by the owner's.
	c, err := h.Local()
	if err != nil {
		t.Fatal(err)
	}
	err = again(ctx, func(ctx context.Context) (err error) {
		_, _, err = c.Acquire(ctx, lease.Request{Key: key(h, job+"-life"), Fractions: fractions(20, 20, 20), UID: user, GID: user, Life: time.Second})
		return err
	})
	var le *lease.Error
	if err != nil && (!errors.As(err, &le) || le.Code != lease.Over) { // it may have lived its second before the answer came
		t.Fatalf("%s: acquire for a second: %v", where, err)
	}
	if strings.HasPrefix(name, "reclaim") {
		if err := keepers[1].end(); err != nil {
			t.Fatalf("%s: %v", where, err)
		}
		keepers = keepers[:1]
		if err := h.Kill(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-keepers[0].again:
		case <-time.After(2500 * time.Millisecond):
		}
		if _, err := h.Up(ctx); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, 20*time.Second, where+": all has ended but the steady job", func() error {
		ls, err := list(h)
		if err != nil {
			return err
		}
		for _, l := range ls {
			if l.Request.Key.Job != "steady" {
				return fmt.Errorf("lease %s of %s is %s", l.ID, l.Request.Key, l.State)
			}
		}
		return onlySteady(h)
	})
	died := 0
	for _, k := range keepers {
		if err := k.end(); err != nil {
			t.Fatalf("%s: %v", where, err)
		}
		died += int(k.died.Load())
		for _, took := range k.times {
			if took > time.Second {
				t.Errorf("%s: %s needed %v to be ready, waits for a processor apart", where, k.d.Node.Name, took)
			}
		}
	}
	return died
}

// undo has an acquisition fail halfway: one of its owners stands still while the other reserves.
func undo(ctx context.Context, t *testing.T, s *site.Site, job string) {
	t.Helper()
	h, still := s.Hosts[0], s.Owners[1].Process()
	if _, err := pool(h); err != nil { // the host places by this for a moment
		t.Fatal(err)
	}
	if err := still.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	try, cancel := context.WithTimeout(ctx, 8*time.Second)
	l, _, err := acquire(try, h, job+"-undo", user, 60, 60, 60)
	cancel()
	if err == nil {
		t.Errorf("lease %s was granted by an owner that stands still", l.ID)
	}
	if err := still.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	err = again(ctx, func(ctx context.Context) error {
		return release(ctx, h, lease.Lease{Request: lease.Request{Key: key(h, job+"-undo")}})
	})
	if err != nil {
		t.Error(err)
	}
}

// TestRandomKills kills daemons at random moments under load: nothing may be leaked, doubled or lost.
func TestRandomKills(t *testing.T) {
	t.Parallel()
	kills := 2000
	if testing.Short() {
		kills = 100
	}
	if v, err := strconv.Atoi(os.Getenv("SLUICE_TEST_KILLS")); err == nil {
		kills = v
	}
	seed := uint64(time.Now().UnixNano())
	if v, err := strconv.ParseUint(os.Getenv("SLUICE_TEST_SEED"), 10, 64); err == nil {
		seed = v
	}
	t.Logf("seed %d, %d kills", seed, kills)
	s := start(t, site.Options{Hosts: 3, Owners: 3, GPUs: 4, Config: map[string]string{
		"lease.renew": "1s", "lease.silence": "10s", "lease.reserve": "3s", "log.level": "warn"}})
	var jobs []*job
	for i, h := range s.Hosts {
		jobs = append(jobs, steady(t, s, h, fmt.Sprint("one", i), 20), steady(t, s, h, fmt.Sprint("many", i), 10, 10, 10, 10, 10))
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var granted, refused, sessions, failed atomic.Int64
	var load, killers sync.WaitGroup
	var left sync.Map // leases whose release nobody confirmed
	for i, h := range s.Hosts {
		for n := range 3 {
			r := rand.New(rand.NewPCG(seed, uint64(100+10*i+n)))
			load.Go(func() {
				for turn := 0; ctx.Err() == nil; turn++ {
					var shares []uint32
					for range 1 + r.IntN(4) {
						shares = append(shares, 1+r.Uint32N(60))
					}
					try, done := context.WithTimeout(ctx, 5*time.Second)
					k := fmt.Sprintf("load-%d-%d", n, turn)
					l, socket, err := acquire(try, h, k, user, shares...)
					done()
					if err != nil {
						refused.Add(1)
						// Nobody knows whether it was granted: a release by key makes sure.
						l.Request.Key = key(h, k)
						time.Sleep(10 * time.Millisecond)
					} else {
						granted.Add(1)
						if n == 0 && r.IntN(8) == 0 {
							out, err := h.Node.Run(ctx, onLease(s, h, socket, user, s.Program("vecadd")))
							sessions.Add(1)
							if (err != nil || !strings.Contains(out, "PASS")) && ctx.Err() == nil {
								failed.Add(1)
							}
						}
					}
					left.Store(l.Request.Key.String(), true)
					end, done := context.WithTimeout(context.Background(), 60*time.Second)
					err = again(end, func(ctx context.Context) error {
						err := release(ctx, h, l)
						var le *lease.Error
						if errors.As(err, &le) && (le.Code == lease.NotFound || le.Code == lease.Over) {
							return nil
						}
						return err
					})
					done()
					if err != nil {
						t.Errorf("release of %s: %v", l.Request.Key, err)
						return
					}
					left.Delete(l.Request.Key.String())
				}
			})
		}
	}

	began := time.Now()
	var count atomic.Int64
	var mu sync.Mutex
	var times []time.Duration
	for i, d := range s.Daemons() {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		killers.Go(func() {
			for ctx.Err() == nil && count.Add(1) <= int64(kills) {
				if err := d.Kill(); err != nil {
					t.Error(err)
					return
				}
				if r.IntN(5) == 0 { // once more before it is ready
					if _, _, err := d.Start(); err != nil {
						t.Error(err)
						return
					}
					time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
					continue
				}
				up, done := context.WithTimeout(ctx, 30*time.Second)
				took, err := d.Up(up)
				waited := d.Waited()
				done()
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				times = append(times, took-waited)
				mu.Unlock()
				time.Sleep(time.Duration(r.IntN(500)) * time.Millisecond)
			}
		})
	}
	killers.Wait()
	took := time.Since(began)
	up, done := context.WithTimeout(t.Context(), 60*time.Second)
	defer done()
	if err := s.Up(up); err != nil {
		t.Fatal(err)
	}
	cancel()
	load.Wait()
	keepers := make(map[string]bool)
	for _, j := range jobs {
		keepers[j.lease.ID] = true
		if err := j.lost(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, 60*time.Second, "only the steady jobs are left", func() error {
		for _, h := range s.Hosts {
			ls, err := list(h)
			if err != nil {
				return err
			}
			for _, l := range ls {
				if !keepers[l.ID] {
					return fmt.Errorf("%s has lease %s of %s (%s)", h.Node.Name, l.ID, l.Request.Key, l.State)
				}
			}
		}
		gpus, err := pool(s.Hosts[0])
		if err != nil {
			return err
		}
		held := 0
		for _, g := range gpus {
			held += int(100 - g.FreePercent)
		}
		if held != 3*70 {
			return fmt.Errorf("%d%% are held, the steady jobs have %d%%", held, 3*70)
		}
		return nil
	})
	checkHistory(t, s, keepers)
	for _, j := range jobs {
		j.stop(t)
	}
	allFree(t, s, nil)
	slices.Sort(times)
	median, p99, longest := times[len(times)/2], times[len(times)*99/100], times[len(times)-1]
	t.Logf("%d kills in %v, under %d grants, %d refusals, %d short sessions (%d met a dead daemon); ready again after %v (median), %v (99 %%), %v (longest), waits for a processor apart",
		kills, took.Round(time.Second), granted.Load(), refused.Load(), sessions.Load(), failed.Load(), median, p99, longest)
	if p99 > time.Second {
		t.Errorf("one start in a hundred took longer than %v", p99)
	}
}

// TestSilence: an owner takes back what a silent host held, and nothing that is in use.
func TestSilence(t *testing.T) {
	t.Parallel()
	s := start(t, site.Options{Hosts: 2, Owners: 1, GPUs: 1, Config: quick})
	h := s.Hosts[0]
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	j := steady(t, s, h, "steady", 30)
	if _, _, err := acquire(ctx, h, "idle", user, 40); err != nil {
		t.Fatal(err)
	}
	if err := s.Net.Cut(h.Node, true); err == nil {
		// The session's own connection is cut too, and must live on when the cable is back in time.
		err = s.Net.Cut(h.Node, false)
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "the idle lease is taken back and the other is not", func() error {
		gpus, err := pool(s.Hosts[1])
		if err != nil {
			return err
		}
		if gpus[0].FreePercent != 70 {
			return fmt.Errorf("%d%% are free", gpus[0].FreePercent)
		}
		return nil
	})
	time.Sleep(4 * time.Second) // more than the silence that is allowed: in use, it must stay
	if gpus, err := pool(s.Hosts[1]); err != nil || gpus[0].FreePercent != 70 {
		t.Errorf("%+v, %v", gpus, err)
	}
	if _, err := h.Up(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the host knows that its idle lease is gone", func() error {
		ls, err := list(h)
		if err == nil && (len(ls) != 1 || ls[0].ID != j.lease.ID || len(ls[0].Sessions) != 1) {
			err = fmt.Errorf("%+v", ls)
		}
		return err
	})
	j.stop(t)
	allFree(t, s, nil)
}
