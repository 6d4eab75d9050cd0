package host

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
)

// oneGPU is a quota of each user: as much as one GPU, jobs included.
var oneGPU = Quota{Percent: some[uint64](100), Jobs: true, Whose: "each user", Of: "all pools together"}

// promised waits until a controller has a promise of all owners but so many.
func (m *metropolis) promised(h *Host, but int) {
	m.t.Helper()
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if s := h.holds.sum(nil, m.pool.Owners); s.Known && len(s.Unsure) == but {
			return
		}
		if time.Since(begun) > time.Minute {
			m.t.Fatalf("promises are missing: %+v", h.holds.sum(nil, m.pool.Owners))
		}
	}
}

// run is `sluice run` by a user on a node.
func (m *metropolis) run(n *Host, uid uint32, job string, percent uint32) (lease.Lease, error) {
	r := ask(job, percent)
	r.UID, r.Key.Incarnation = uid, 1
	l, _, err := n.Acquire(context.Background(), root, r)
	return l, err
}

// TestQuotaMessages counts what requests cost that quotas hold for, and jobs with --rgpu-mem. SLUICE_OWNERS=1000 is the size of
// bench/logs/simulated/quota.txt.
func TestQuotaMessages(t *testing.T) {
	owners, err := strconv.Atoi(os.Getenv("SLUICE_OWNERS"))
	if err != nil {
		owners = 100
	}
	const nodes, users, rounds = 20, 40, 10
	synctest.Test(t, func(t *testing.T) {
		m := emptyMetropolis(t, owners, 8)
		defer m.end()
		m.quotas = []Quota{oneGPU}
		m.ctl = m.host("ctl", true)
		for i := range nodes {
			m.nodes = append(m.nodes, m.host(fmt.Sprintf("n%05d", i), false))
		}
		m.heard(m.ctl)
		m.promised(m.ctl, 0)
		count := func(what string, most float64, times int, f func(i int)) {
			t.Helper()
			idle := m.sent()
			time.Sleep(10 * time.Second)
			before := m.sent()
			quiet := float64(before[renewed]-idle[renewed]) / 10
			var took []time.Duration
			for i := range times {
				at := time.Now()
				f(i)
				took = append(took, time.Since(at))
				time.Sleep(time.Second) // the owners tell the controller what has changed
			}
			after := m.sent()
			delete(after, "Renew") // nodes renew the leases that they hold, whoever asks for more
			delete(after, renewed)
			var total float64
			var each []string
			for _, k := range slices.Sorted(maps.Keys(after)) {
				if n := float64(after[k]-before[k]) / float64(times); n >= 0.005 {
					total += n
					each = append(each, fmt.Sprintf("%s %.2f", k, n))
				}
			}
			t.Logf("%d owners: messages for %s: %.2f: %s; within p50 %v p99 %v; %.0f a second while nothing is asked", owners, what, total, strings.Join(each, ", "), centile(took, 50), centile(took, 99), quiet)
			if total > most {
				t.Errorf("%s costs %.2f messages, want at most %v", what, total, most)
			}
		}
		ids := make(map[int]string)
		count("sluice run within a quota", 14.5, users, func(i int) {
			l, err := m.run(m.nodes[i%nodes], uint32(1000+i), fmt.Sprint("run-", i), 60)
			if err != nil {
				t.Fatal(err)
			}
			ids[i] = l.ID
		})
		count("sluice run beyond a quota", 12.5, users, func(i int) {
			if _, err := m.run(m.nodes[(i+1)%nodes], uint32(1000+i), fmt.Sprint("run-more-", i), 50); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "60% held, 50% asked") {
				t.Fatal(err)
			}
		})
		for i, id := range ids { // what has ended counts no more, however soon it is asked
			if err := m.nodes[i%nodes].Release(t.Context(), root, id, lease.Key{}, "test"); err != nil {
				t.Fatal(err)
			}
			if _, err := m.run(m.nodes[(i+7)%nodes], uint32(1000+i), fmt.Sprint("run-again-", i), 80); err != nil {
				t.Fatal(err)
			}
		}
		count("a job within a quota", 6, users, func(i int) {
			r := job(fmt.Sprint(100+i), 0, []string{"n00001"}, 60)
			r[0].UID = uint32(2000 + i)
			if _, err := m.ctl.Sponsor(t.Context(), r); err != nil {
				t.Fatal(err)
			}
		})
		count("the GPUs' sizes at a controller, for --rgpu-mem", 0.5, rounds, func(int) { m.sizes(m.ctl, owners) })
		m.sizes(m.nodes[0], owners)
		count("the same at a node that has asked once", 0.5, rounds, func(int) { m.sizes(m.nodes[0], owners) })
	})
}

// sizes looks at a pool's GPUs as a job with --rgpu-mem does.
func (m *metropolis) sizes(h *Host, owners int) {
	m.t.Helper()
	all, err := h.GPUs(context.Background(), "default", false)
	if err != nil || len(all) != owners || len(all[0]) != m.gpus || all[owners-1][0].Mem != fakeMem {
		m.t.Errorf("%d owners, %v", len(all), err)
	}
}

// What a controller has heard of an owner counts while the owner's promise holds, even if the owner does not answer. From then on the owner is
// left out, as in a small pool.
func TestQuotaOfSilentOwnerInLargePool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := emptyMetropolis(t, 12, 1)
		defer m.end()
		m.quotas = []Quota{oneGPU}
		m.ctl = m.host("ctl", true)
		m.nodes = []*Host{m.host("n00000", false)}
		m.promised(m.ctl, 0)
		l, err := m.run(m.nodes[0], 1000, "run-1", 60)
		if err != nil {
			t.Fatal(err)
		}
		n := m.host("n00001", false)
		m.kill(l.Grants[0].Owner, true)
		if _, err := m.run(n, 1000, "run-2", 50); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "60% held, 50% asked") {
			t.Error(err)
		}
		time.Sleep(5 * time.Second)
		if _, err := m.run(n, 1000, "run-3", 50); err != nil {
			t.Error(err)
		}
		m.kill(l.Grants[0].Owner, false)
		time.Sleep(time.Minute)
		if _, err := m.run(n, 1000, "run-4", 10); lease.CodeOf(err) != lease.NoRoom || !strings.Contains(err.Error(), "110% held, 10% asked") {
			t.Error(err)
		}
	})
}

// A controller that falls silent holds up reservations until its promise is over, and the owner's next process keeps the promise.
func TestPromise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := emptyMetropolis(t, 1, 1)
		defer m.end()
		o := m.owners["gpu0000"]
		inv, _ := o.Inventory(t.Context())
		n := 0
		reserve := func(o *owner.Owner, ttl time.Duration) (lease.Lease, time.Duration) {
			n++
			l := lease.Lease{ID: fmt.Sprintf("%032x", n), Request: ask(fmt.Sprint("run-", n), 10), State: lease.Reserved, Host: "n1"}
			l.Request.Key.Cluster, l.Request.Key.Node = "c", "n1"
			l.Grants = []lease.Grant{{Owner: "gpu0000", GPU: inv.GPUs[0].UUID, Percent: 10, Mem: fakeMem / 10 / lease.Granule * lease.Granule}}
			begun := time.Now()
			got, err := o.Reserve(context.Background(), "n1", l, ttl)
			if err != nil {
				t.Error(err)
			}
			return got, time.Since(begun)
		}
		watch := func(o *owner.Owner, q lease.HeldWatch) lease.HeldChanges {
			c, err := o.WatchHeld(context.Background(), "ctl", q)
			if err != nil {
				t.Error(err)
			}
			return c
		}
		if _, err := o.WatchHeld(t.Context(), "n1", lease.HeldWatch{}); lease.CodeOf(err) != lease.Denied {
			t.Error(err)
		}
		if _, took := reserve(o, 10*time.Second); took > 0 {
			t.Errorf("nobody was promised anything, and it took %v", took)
		}
		c := watch(o, lease.HeldWatch{Wait: time.Minute, Gap: time.Minute})
		if !c.Whole || len(c.Parts) != 1 || c.Parts[0].Held != (lease.Held{Percent: 10, Mem: fakeMem / 10 / lease.Granule * lease.Granule, Leases: 1, Reserved: 1}) || c.Promise <= 0 {
			t.Errorf("%+v", c)
		}
		// A reservation has the watch answer at once, and waits for the next one.
		done := make(chan time.Duration)
		go func() { _, took := reserve(o, 10*time.Second); done <- took }()
		time.Sleep(time.Millisecond)
		c = watch(o, lease.HeldWatch{Since: c.At, Wait: time.Minute, Gap: time.Minute})
		if len(c.Parts) != 1 || c.Waited > 0 {
			t.Errorf("%+v", c)
		}
		select {
		case <-done:
			t.Error("it was answered before the controller had heard of it")
		case <-time.After(time.Second):
		}
		c = watch(o, lease.HeldWatch{Since: c.At})
		if took := <-done; took != time.Second+time.Millisecond {
			t.Errorf("it took %v", took)
		}
		// So does a question, whose answer the next watch brings.
		sums := make(chan lease.HeldSum)
		go func() {
			s, err := o.HeldEverywhere(context.Background(), "n1", lease.HeldQuestion{Holdings: make([]lease.Holding, 2), Owners: 7})
			if err != nil {
				t.Error(err)
			}
			sums <- s
		}()
		c = watch(o, lease.HeldWatch{Since: c.At, Wait: time.Minute, Gap: time.Minute})
		if len(c.Questions) != 1 || len(c.Questions[0].Holdings) != 2 || c.Questions[0].Owners != 7 {
			t.Fatalf("%+v", c)
		}
		go watch(o, lease.HeldWatch{Since: c.At, Answers: []lease.HeldAnswer{{ID: c.Questions[0].ID - 1}, {ID: c.Questions[0].ID, Sum: lease.HeldSum{Known: true, At: []string{"x"}}}}})
		if s := <-sums; !s.Known || len(s.At) != 1 {
			t.Errorf("%+v", s)
		}
		// A lease that is granted in one step does not wait for controllers; a change that no call waits for is sent with later ones.
		if _, took := reserve(o, 0); took > 0 {
			t.Errorf("a grant took %v", took)
		}
		if c = watch(o, lease.HeldWatch{Since: c.At, Wait: time.Minute, Gap: 500 * time.Millisecond}); c.Waited == 0 || c.Waited > 500*time.Millisecond || len(c.Parts) != 1 {
			t.Errorf("%+v", c)
		}
		// The controller falls silent.
		time.Sleep(time.Second)
		if _, took := reserve(o, 10*time.Second); took != 3*time.Second {
			t.Errorf("it took %v", took)
		}
		if _, took := reserve(o, 10*time.Second); took != 0 {
			t.Errorf("the promise is over, and it took %v", took)
		}
		if _, err := o.HeldEverywhere(t.Context(), "n1", lease.HeldQuestion{}); lease.CodeOf(err) != lease.NotFound {
			t.Error(err)
		}
		// It has a promise again, and the owner's daemon is started again.
		c = watch(o, lease.HeldWatch{Since: c.At})
		m.closes[len(m.closes)-1]()
		o, m.closes[len(m.closes)-1] = m.owner("gpu0000")
		if _, took := reserve(o, 10*time.Second); took != 4*time.Second {
			t.Errorf("it took %v", took)
		}
		if c = watch(o, lease.HeldWatch{Since: c.At}); !c.Whole {
			t.Errorf("%+v", c)
		}
		if _, err := o.HeldEverywhere(t.Context(), "n1", lease.HeldQuestion{}); lease.CodeOf(err) != lease.NotFound {
			t.Error("nobody answers:", err)
		}
		// A controller that asks no more is forgotten: a later start waits for nobody.
		time.Sleep(2 * time.Minute)
		m.closes[len(m.closes)-1]()
		o, m.closes[len(m.closes)-1] = m.owner("gpu0000")
		if _, took := reserve(o, 10*time.Second); took != 0 {
			t.Errorf("it took %v", took)
		}
	})
}

// What a controller's daemon says of owners is no more than what it knows.
func TestHoldings(t *testing.T) {
	var now time.Duration
	h := newHoldings(func() time.Duration { return now })
	pool := []Peer{{"a", "a:1"}, {"b", "b:1"}}
	part := func(id string, uid uint32, account string, percent uint64) lease.HeldPart {
		return lease.HeldPart{ID: id, UID: uid, Cluster: "c", Account: account, Held: lease.Held{Percent: percent, Leases: 1}}
	}
	learn := func(o *ownerHolds, sent time.Duration, whole bool, over string, parts ...lease.HeldPart) {
		t.Helper()
		c := &lease.HeldChanges{Changes: lease.Changes{Whole: whole}, Parts: parts, Promise: 4, Waited: 1}
		for _, p := range parts {
			c.Leases = append(c.Leases, lease.Ref{ID: p.ID})
		}
		if over != "" {
			c.Leases = append(c.Leases, lease.Ref{ID: over, Over: true})
		}
		if err := h.learn(o, sent, c); err != nil {
			t.Error(err)
		}
	}
	expect := func(of lease.Holding, percent uint64, at, unsure string) {
		t.Helper()
		s := h.sum([]lease.Holding{of}, pool)
		if !s.Known || s.Held[0].Percent != percent || strings.Join(s.At, " ") != at || strings.Join(s.Unsure, " ") != unsure {
			t.Errorf("%+v, want %d%% at %q without %q", s, percent, at, unsure)
		}
	}
	user, phys := lease.Holding{UID: 7, Jobs: true}, lease.Holding{Account: "phys", Cluster: "c"}
	expect(user, 0, "", "a b")
	a, b := h.begin("a"), h.begin("b")
	expect(user, 0, "", "a b")
	learn(a, 10, true, "", part("x", 7, "phys", 50), part("y", 8, "phys", 20))
	learn(b, 12, true, "", part("z", 7, "chem", 30))
	expect(user, 80, "a b", "")
	expect(phys, 70, "a", "")
	user.Except = "x"
	expect(user, 30, "b", "")
	user.Except = ""
	learn(a, 13, false, "x", part("y", 8, "phys", 40))
	expect(user, 30, "b", "")
	expect(phys, 40, "a", "")
	now = 16 // b's promise, of an answer at 13 at the earliest, is over but for an eighth
	expect(user, 0, "", "b")
	now = 17
	expect(phys, 0, "", "a b")
	now = 0
	learn(b, 20, true, "")
	expect(user, 0, "", "")
	// What an earlier watch hears late changes nothing, nor does its end.
	again := h.begin("b")
	learn(b, 30, true, "", part("z", 7, "chem", 30))
	h.end(b)
	expect(user, 0, "", "b")
	learn(again, 30, true, "", part("z", 7, "chem", 60))
	expect(user, 60, "b", "")
	if err := h.learn(again, 0, &lease.HeldChanges{Parts: make([]lease.HeldPart, maxRefs)}); lease.CodeOf(err) != lease.Invalid {
		t.Error(err)
	}
	h.end(again)
	h.end(a)
	if len(h.users)+len(h.accounts)+len(h.owners) > 0 {
		t.Error("something is kept")
	}
	pool = nil
	for i := range lease.MaxUnsure + 1 {
		pool = append(pool, Peer{Name: fmt.Sprint(i)})
	}
	if h.sum([]lease.Holding{user}, pool).Known {
		t.Error("hardly an owner is known")
	}
	for _, p := range pool {
		learn(h.begin(p.Name), 0, true, "", part("l"+p.Name, 7, "", 1))
	}
	if s := h.sum([]lease.Holding{user}, pool); !s.Known || !s.Many || len(s.At) > 0 || s.Held[0].Percent != uint64(len(pool)) {
		t.Errorf("%+v", s)
	}
}
