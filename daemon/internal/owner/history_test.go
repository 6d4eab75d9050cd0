package owner

// The history check: owners and hosts, between them a network that loses,
// doubles, delays and cuts, daemons that are killed at any of their points, clocks
// that jump; and then the owners' audit logs are held against the rules.
//
//	SLUICE_HISTORY_OPS=N    operations (100,000; 8,000 under the race detector,
//	                        which makes them six times as long; 10,000 with -short)
//	SLUICE_HISTORY_SEED=N   the seed that a failure printed

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/placement"
	"github.com/sluice-hpc/sluice/internal/form"
)

// world is what the check plays with. One goroutine, so a seed gives one history
// (but for the ids of leases).
type world struct {
	t     *testing.T
	rng   *rand.Rand
	nodes []*node
	hosts []*modelHost
	cut   map[[2]string]bool // host and owner that do not hear each other
	late  []func()           // messages that are still on their way
	jobs  int
	ctl   *modelHost                  // the controller's daemon
	runs  []*run                      // of jobs that it got leases for, and whose end it has not told
	over  map[*node]map[string]uint64 // jobs that it has ended there, up to this epoch
	epoch uint64
	stats map[string]int
}

// modelHost is a host daemon as far as owners can see it: it writes down what it is
// about to ask, and goes on releasing until it is heard.
type modelHost struct {
	name  string
	held  []*hostLease
	owed  []owed // releases that are to be delivered
	ended []lease.Key
}

type hostLease struct {
	id     string
	key    lease.Key
	grants map[*node][]lease.Grant
}

type owed struct {
	n   *node
	id  string
	key lease.Key
}

var errNet = errors.New("no answer")

func (w *world) chance(percent int) bool { return w.rng.IntN(100) < percent }

// call carries one message and its answer over the network.
func (w *world) call(h *modelHost, n *node, f func()) error {
	w.stats["messages"]++
	if w.cut[[2]string{h.name, n.name}] {
		w.stats["cut"]++
		return errNet
	}
	again := f
	switch p := w.rng.IntN(100); {
	case p < 4: // lost
		w.stats["lost"]++
		return errNet
	case p < 8: // late, when the host has given up
		w.stats["late"]++
		w.late = append(w.late, func() { w.run(n, again) })
		return errNet
	case p < 14: // and once more, late
		w.stats["doubled"]++
		w.late = append(w.late, func() { w.run(n, again) })
	}
	if w.run(n, f) || w.chance(4) { // killed, or the answer is lost
		w.stats["unanswered"]++
		return errNet
	}
	return nil
}

// run runs f at owner n, which may be killed at any point of it.
func (w *world) run(n *node, f func()) (killed bool) {
	n.crashIn = 0
	if w.rng.IntN(1000) < 6 {
		n.crashAt, n.crashIn = "any", 1+w.rng.IntN(5)
	}
	killed = n.do(f)
	n.crashIn = 0
	if killed {
		w.stats["killed"]++
	}
	return killed
}

func (w *world) acquire(h *modelHost, key lease.Key) { w.get(h, w.request(key)) }

func (w *world) request(key lease.Key) lease.Request {
	r := lease.Request{Key: key, UID: 1000, SameOwner: w.chance(30), Restart: uint32(key.Incarnation)}
	for range 1 + w.rng.IntN(3) {
		f := lease.Fraction{Percent: uint32(1 + w.rng.IntN(60))}
		if w.chance(30) {
			f.Mem = uint64(1+w.rng.IntN(30)) * gib
		}
		r.Fractions = append(r.Fractions, f)
	}
	if w.chance(20) {
		r.Life = time.Duration(1+w.rng.IntN(60)) * time.Minute
	}
	return r
}

// get acquires for h's own node or, if h is the controller's daemon, for another.
func (w *world) get(h *modelHost, r lease.Request) {
	key := r.Key
	var gpus []lease.GPU
	for _, n := range w.nodes {
		_ = w.call(h, n, func() {
			inv, _ := n.Inventory(ctx)
			gpus = append(gpus, inv.GPUs...)
		})
	}
	slices.SortStableFunc(gpus, func(a, b lease.GPU) int { return cmpGPU(a, b) })
	gpus = slices.CompactFunc(gpus, func(a, b lease.GPU) bool { return a.UUID == b.UUID })
	grants, err := placement.Place(gpus, r, []lease.Place{lease.BestFit, lease.Spread}[w.rng.IntN(2)])
	if err != nil {
		w.stats["no place"]++
		return
	}
	l := &hostLease{id: form.NewLeaseID(), key: key, grants: make(map[*node][]lease.Grant)}
	var order []*node
	for _, n := range w.nodes {
		for _, g := range grants {
			if g.Owner == n.name {
				l.grants[n] = append(l.grants[n], g)
			}
		}
		if len(l.grants[n]) > 0 {
			order = append(order, n)
		}
	}
	ttl := 15 * time.Second
	if len(order) == 1 {
		ttl = 0
	}
	ok := true
	for _, n := range order {
		var err error
		asked := lease.Lease{ID: l.id, Request: r, Grants: l.grants[n], Host: key.Node}
		if h == w.ctl {
			asked.Sponsor = h.name
		}
		var have lease.Lease
		if e := w.call(h, n, func() {
			if have, err = n.Reserve(ctx, h.name, asked, ttl); err == nil && w.over[n][key.Job] >= max(1, key.Incarnation) && have.State == lease.Granted {
				w.t.Errorf("owner %s grants job %s of epoch %d, which ended at %d", n.name, key.Job, key.Incarnation, w.over[n][key.Job])
			}
		}); e != nil || err != nil || have.ID != l.id {
			ok = false
			break
		}
	}
	if ok && ttl > 0 && w.chance(3) { // the host is killed: it has its note, and nothing else
		ok = false
	}
	if ok && ttl > 0 {
		for _, n := range order {
			var err error
			if e := w.call(h, n, func() { err = n.Confirm(ctx, h.name, l.id) }); e != nil || err != nil {
				ok = false
				break
			}
		}
	}
	if !ok {
		w.stats["taken back"]++
		for _, n := range order {
			h.owed = append(h.owed, owed{n, l.id, lease.Key{}})
		}
		w.deliver(h)
		return
	}
	w.stats["acquired"]++
	h.held = append(h.held, l)
}

func cmpGPU(a, b lease.GPU) int {
	if a.UUID < b.UUID {
		return -1
	} else if a.UUID > b.UUID {
		return 1
	}
	return 0
}

// deliver tries the host's releases once.
func (w *world) deliver(h *modelHost) {
	var left []owed
	for _, d := range h.owed {
		var err error
		if e := w.call(h, d.n, func() { err = d.n.Release(ctx, h.name, d.id, d.key, "job ended") }); e != nil || err != nil {
			left = append(left, d)
		} else if h == w.ctl && d.id == "" {
			w.over[d.n][d.key.Job] = max(w.over[d.n][d.key.Job], d.key.Incarnation)
		}
	}
	h.owed = left
}

func (w *world) release(h *modelHost, i int) {
	l := h.held[i]
	h.held = slices.Delete(h.held, i, i+1)
	if h.ended = append(h.ended, l.key); len(h.ended) > 50 {
		h.ended = h.ended[1:]
	}
	for _, n := range w.nodes {
		if l.grants[n] != nil {
			h.owed = append(h.owed, owed{n, l.id, l.key})
		}
	}
	w.deliver(h)
}

func (w *world) renew(h *modelHost) {
	for _, n := range w.nodes {
		var ids, known []string
		for _, l := range h.held {
			if l.grants[n] != nil {
				ids = append(ids, l.id)
			}
		}
		if len(ids) == 0 || w.call(h, n, func() { known, _ = n.Renew(ctx, h.name, ids) }) != nil {
			continue
		}
		for i := len(h.held) - 1; i >= 0; i-- {
			if l := h.held[i]; l.grants[n] == nil || slices.Contains(known, l.id) {
				continue
			}
			if h == w.ctl { // its node has it
				w.stats["entrusted"]++
				h.held = slices.Delete(h.held, i, i+1)
				continue
			}
			w.stats["lost by host"]++
			w.release(h, i)
		}
	}
}

func (w *world) session(h *modelHost) {
	if len(h.held) == 0 {
		return
	}
	l := h.held[w.rng.IntN(len(h.held))]
	for _, n := range w.nodes {
		if l.grants[n] == nil {
			continue
		}
		var err error
		if e := w.call(h, n, func() { _, err = n.Offer(ctx, h.name, request(l.id)) }); e != nil || err != nil {
			return
		}
		admit := func() { _ = n.admitOne(l.id) }
		if w.chance(10) { // the data connection comes late
			w.late = append(w.late, func() { w.run(n, admit) })
			continue
		}
		if !w.run(n, admit) {
			w.stats["sessions"]++
		}
	}
}

// set changes a lease, as root or not, to what is possible or not.
func (w *world) set(h *modelHost) {
	if len(h.held) == 0 {
		return
	}
	l := h.held[w.rng.IntN(len(h.held))]
	for _, n := range w.nodes {
		if l.grants[n] == nil {
			continue
		}
		c := lease.Change{Lease: l.id, Policy: lease.Fixed, Beyond: w.chance(50)}
		for range 3 {
			c.Shares = append(c.Shares, uint32(1+w.rng.IntN(60)))
		}
		c.Shares = c.Shares[:1+l.grants[n][len(l.grants[n])-1].Order]
		var err error
		if e := w.call(h, n, func() { _, err = n.Set(ctx, h.name, c) }); e == nil && err == nil {
			w.stats["set"]++
		}
	}
}

// exit ends a client process.
func (w *world) exit(n *node) {
	ids := n.workers.Leases()
	if len(ids) == 0 {
		return
	}
	id := slices.Min(ids)
	if s := n.workers.Sessions(id); len(s) > 0 {
		n.workers.exit(id, w.rng.IntN(len(s)))
	}
}

func (w *world) step() {
	for len(w.late) > 100 {
		f := w.late[0]
		w.late = w.late[1:]
		f()
	}
	h, n := w.hosts[w.rng.IntN(len(w.hosts))], w.nodes[w.rng.IntN(len(w.nodes))]
	switch p := w.rng.IntN(1200); {
	case p >= 1180:
		w.set(h)
	case p >= 1140:
		w.sponsor(h)
	case p >= 1090:
		w.attach()
	case p >= 1050:
		if len(w.runs) > 0 {
			w.endJob(w.rng.IntN(len(w.runs)))
		}
	case p >= 1020:
		w.deliver(w.ctl)
	case p >= 1000:
		w.renew(w.ctl)
	case p < 260:
		w.jobs++
		w.acquire(h, lease.Key{Cluster: "c", Job: fmt.Sprint(w.jobs), Node: h.name})
	case p < 290: // a job of before asks again: it is over
		if len(h.ended) > 0 {
			w.acquire(h, h.ended[w.rng.IntN(len(h.ended))])
		}
	case p < 320: // a job is requeued, and its epilog did not run
		if len(h.held) > 0 {
			i := w.rng.IntN(len(h.held))
			key := h.held[i].key
			key.Incarnation++
			h.held = slices.Delete(h.held, i, i+1)
			w.acquire(h, key)
		}
	case p < 560:
		if len(h.held) > 0 {
			w.release(h, w.rng.IntN(len(h.held)))
		}
	case p < 640:
		w.renew(h)
	case p < 760:
		w.session(h)
	case p < 820:
		w.exit(n)
	case p < 860:
		w.deliver(h)
	case p < 940:
		if len(w.late) > 0 {
			i := w.rng.IntN(len(w.late))
			f := w.late[i]
			w.late = slices.Delete(w.late, i, i+1)
			f()
		}
	case p < 970:
		for _, n := range w.nodes {
			n.clock.pass(time.Duration(w.rng.IntN(20000)) * time.Millisecond)
		}
	case p < 985:
		w.run(n, func() { _ = n.Sweep(ctx) })
	case p < 990:
		clear(w.cut)
		if w.chance(40) {
			w.cut[[2]string{h.name, n.name}] = true
		}
	case p < 993: // a long silence
		n.clock.pass(time.Duration(w.rng.IntN(10)) * time.Minute)
	case p < 996:
		n.clock.set(time.Unix(w.rng.Int64N(4e9), 0))
	case p < 998: // the host's node is started anew and has forgotten its leases
		for len(h.held) > 0 && w.chance(70) {
			h.held = h.held[1:]
		}
	default:
		n.kill()
		w.stats["killed"]++
	}
}

// raced says that the race detector watches.
var raced bool

func TestHistory(t *testing.T) {
	ops, seed := 100_000, uint64(time.Now().UnixNano())
	switch {
	case testing.Short():
		ops = 10_000
	case raced:
		ops = 8_000 // the whole runs without it, beside
	}
	if v, err := strconv.Atoi(os.Getenv("SLUICE_HISTORY_OPS")); err == nil {
		ops = v
	}
	if v, err := strconv.ParseUint(os.Getenv("SLUICE_HISTORY_SEED"), 10, 64); err == nil {
		seed = v
	}
	t.Logf("%d operations, seed %d (SLUICE_HISTORY_SEED=%d)", ops, seed, seed)
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 0)), cut: make(map[[2]string]bool), stats: make(map[string]int), ctl: &modelHost{name: "ctl"}, over: make(map[*node]map[string]uint64)}
	for i := range 3 {
		n := control(newNode(t, fmt.Sprint("gpu", i), 4))
		w.over[n] = make(map[string]uint64)
		n.limits.Tombstone = 2 * time.Hour // far more than a message here is late by
		n.SetLimits(n.limits)
		w.nodes = append(w.nodes, n)
		w.hosts = append(w.hosts, &modelHost{name: fmt.Sprint("host", i)})
	}
	begun := time.Now()
	for i := range ops {
		w.step()
		if i%1000 == 0 {
			for _, n := range w.nodes {
				for g := range n.devices {
					used := n.used(n.devices[g].UUID)
					if used.Percent > 100 || used.Mem > n.devices[g].Mem {
						t.Fatalf("operation %d: gpu %d of %s holds %d%% and %d bytes", i, g, n.name, used.Percent, used.Mem)
					}
				}
			}
		}
	}
	// The end: everything arrives, every host lets go, and what no host knows of
	// is reclaimed once its sessions have ended.
	clear(w.cut)
	for _, f := range w.late {
		f()
	}
	for len(w.runs) > 0 {
		w.endJob(0)
	}
	for _, h := range append(w.hosts, w.ctl) {
		for len(h.held) > 0 {
			w.release(h, 0)
		}
		for len(h.owed) > 0 {
			w.deliver(h)
		}
	}
	lines := 0
	for _, n := range w.nodes {
		for _, id := range n.workers.Leases() {
			for len(n.workers.Sessions(id)) > 0 {
				n.workers.exit(id, 0)
			}
		}
		n.clock.pass(10 * time.Minute)
		must(t, n.Sweep(ctx))
		if list, _ := n.List(ctx, ""); len(list) != 0 {
			t.Errorf("owner %s still has %d leases, one of %+v", n.name, len(list), list[0])
		}
		n.kill()
		n.check(true)
		lines += len(n.history())
	}
	t.Logf("%.1f s, %d lines, %v", time.Since(begun).Seconds(), lines, w.stats)
	if ops >= 10_000 && (w.stats["acquired"] < ops/40 || w.stats["sessions"] < ops/100 || w.stats["killed"] < ops/1000 || w.stats["taken back"] < ops/200 || w.stats["attached"] < ops/800 || w.stats["ended"] < ops/100 || w.stats["set"] < ops/800) {
		t.Error("the check did not do what it is for")
	}
}

// used sums what the leases in memory hold of a GPU.
func (n *node) used(gpu string) (sum lease.Grant) {
	list, _ := n.List(ctx, "")
	for _, l := range list {
		for _, g := range l.Grants {
			if g.GPU == gpu {
				sum.Percent += g.Percent
				sum.Mem += g.Mem
			}
		}
	}
	return sum
}
