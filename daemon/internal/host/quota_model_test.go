package host

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
)

// A model of quotas in a large pool in which everything fails that may: messages between controllers and owners are late or lost, their links are cut,
// controllers and owners are started again, some owners make no promises, and some nodes ask all owners, both as of an earlier release. What
// no user may ever have is more than the quota.
//
// Only the links between nodes and owners lose nothing: an owner that does not answer a node is left out by that node, and that is the rule.

// chaos is such a pool.
type chaos struct {
	*metropolis
	wild bool // messages are lost; guarded by mu, as all below
	ends map[string]func()
	cuts map[[2]string]time.Time // controller and owner: until then
	ctls map[string]*Host
	asks map[string]int // what nodes ask
	past bool           // a quota was exceeded
}

// link is a way from a host to an owner, whatever process of it runs.
type link struct {
	c          *chaos
	from, name string
}

// linked calls an owner over a link.
func linked[T any](ctx context.Context, l link, f func(*owner.Owner) (T, error)) (v T, _ error) {
	ctl := strings.HasPrefix(l.from, "ctl")
	lost := lease.Errorf(lease.Down, "lost")
	if !l.pass(ctx, ctl) {
		return v, lost
	}
	l.c.mu.Lock()
	o := l.c.owners[l.name]
	l.c.mu.Unlock()
	v, err := f(o)
	if !l.pass(ctx, ctl) {
		return v, lost
	}
	if !ctl && lease.CodeOf(err) == lease.Down && err != nil { // its daemon was started again meanwhile: no silence
		err = lease.Errorf(lease.Internal, "%v", err)
	}
	return v, err
}

// pass takes a message over the link.
func (l link) pass(ctx context.Context, ctl bool) bool {
	l.c.mu.Lock()
	cut, wild := l.c.cuts[[2]string{l.from, l.name}], l.c.wild
	l.c.mu.Unlock()
	d := rand.N(5 * time.Millisecond)
	if ctl && wild && rand.IntN(10) == 0 {
		d = rand.N(300 * time.Millisecond)
	}
	time.Sleep(d)
	if ctl && (time.Now().Before(cut) || wild && rand.IntN(20) == 0) {
		<-ctx.Done()
		return false
	}
	return true
}

func nothingOf(err error) (struct{}, error) { return struct{}{}, err }

func (l link) Inventory(ctx context.Context) (lease.Inventory, error) {
	return linked(ctx, l, func(o *owner.Owner) (lease.Inventory, error) { return o.Inventory(ctx) })
}
func (l link) Reserve(ctx context.Context, host string, x lease.Lease, ttl time.Duration) (lease.Lease, error) {
	return linked(ctx, l, func(o *owner.Owner) (lease.Lease, error) { return o.Reserve(ctx, host, x, ttl) })
}
func (l link) Confirm(ctx context.Context, host, id string) error {
	_, err := linked(ctx, l, func(o *owner.Owner) (struct{}, error) { return nothingOf(o.Confirm(ctx, host, id)) })
	return err
}
func (l link) Claim(ctx context.Context, host, id string) error {
	_, err := linked(ctx, l, func(o *owner.Owner) (struct{}, error) { return struct{}{}, o.Claim(ctx, host, id) })
	return err
}

func (l link) Renew(ctx context.Context, host string, ids []string) ([]string, error) {
	return linked(ctx, l, func(o *owner.Owner) ([]string, error) { return o.Renew(ctx, host, ids) })
}
func (l link) Release(ctx context.Context, host, id string, key lease.Key, reason string) error {
	_, err := linked(ctx, l, func(o *owner.Owner) (struct{}, error) { return nothingOf(o.Release(ctx, host, id, key, reason)) })
	return err
}
func (l link) List(ctx context.Context, host string) ([]lease.Status, error) {
	return linked(ctx, l, func(o *owner.Owner) ([]lease.Status, error) { return o.List(ctx, host) })
}
func (l link) Reports(ctx context.Context, host, cluster, job string) ([]lease.Report, error) {
	return linked(ctx, l, func(o *owner.Owner) ([]lease.Report, error) { return o.Reports(ctx, host, cluster, job) })
}
func (l link) Set(context.Context, string, lease.Change) (lease.Lease, error)       { panic("unused") }
func (l link) Drain(context.Context, string, lease.DrainOrder) ([]lease.GPU, error) { panic("unused") }
func (l link) Offer(context.Context, string, lease.SessionRequest) (lease.Offer, error) {
	panic("unused")
}
func (l link) Held(ctx context.Context, host string, of []lease.Holding) ([]lease.Held, error) {
	l.c.note("an owner")
	return linked(ctx, l, func(o *owner.Owner) ([]lease.Held, error) { return o.Held(ctx, host, of) })
}
func (l link) Watch(ctx context.Context, host string, since lease.Mark, wait time.Duration) (lease.Changes, error) {
	return linked(ctx, l, func(o *owner.Owner) (lease.Changes, error) { return o.Watch(ctx, host, since, wait) })
}
func (l link) Register(ctx context.Context, host, cluster, job string, at []lease.Whereabouts) error {
	_, err := linked(ctx, l, func(o *owner.Owner) (struct{}, error) { return nothingOf(o.Register(ctx, host, cluster, job, at)) })
	return err
}
func (l link) Where(ctx context.Context, host, cluster, job string) ([]string, error) {
	return linked(ctx, l, func(o *owner.Owner) ([]string, error) { return o.Where(ctx, host, cluster, job) })
}

// newLink is a link to an owner of this release.
type newLink struct{ link }

func (l newLink) WatchHeld(ctx context.Context, host string, q lease.HeldWatch) (lease.HeldChanges, error) {
	return linked(ctx, l.link, func(o *owner.Owner) (lease.HeldChanges, error) { return o.WatchHeld(ctx, host, q) })
}
func (l newLink) HeldEverywhere(ctx context.Context, host string, q lease.HeldQuestion) (lease.HeldSum, error) {
	s, err := linked(ctx, l.link, func(o *owner.Owner) (lease.HeldSum, error) { return o.HeldEverywhere(ctx, host, q) })
	if err == nil {
		l.c.note("a controller")
	}
	return s, err
}

func (c *chaos) note(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asks[what]++
}

// beyond fails the test if a user has more than one GPU.
func (c *chaos) beyond() {
	c.mu.Lock()
	owners := make([]*owner.Owner, 0, len(c.owners))
	for _, o := range c.owners {
		owners = append(owners, o)
	}
	c.mu.Unlock()
	has := make(map[uint32]uint32)
	var text []string
	for _, o := range owners {
		list, _ := o.List(context.Background(), "")
		for _, s := range list {
			if s.State == lease.Granted {
				has[s.Request.UID] += s.Grants[0].Percent
				text = append(text, fmt.Sprintf("%d: %s on %s of %d%%, made %v", s.Request.UID, s.Request.Key, s.Grants[0].Owner, s.Grants[0].Percent, s.Made))
			}
		}
	}
	for uid, p := range has {
		c.mu.Lock()
		if p > 100 && !c.past {
			c.past = true
			slices.Sort(text)
			c.t.Errorf("user %d has %d%%:\n%s", uid, p, strings.Join(text, "\n"))
		}
		c.mu.Unlock()
	}
}

// restart starts a daemon again.
func (c *chaos) restart(name string) {
	c.mu.Lock()
	end := c.ends[name]
	c.mu.Unlock()
	if strings.HasPrefix(name, "gpu") {
		end()
		o, end := c.owner(name)
		o.SetControllers([]string{"ctl", "ctl2"})
		c.mu.Lock()
		defer c.mu.Unlock()
		c.owners[name], c.ends[name] = o, end
		return
	}
	end()
	time.Sleep(rand.N(10 * time.Second))
	h, end := c.start(name, true, 0)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ctls[name], c.ends[name] = h, end
}

// trouble does something bad every now and then until stop is closed.
func (c *chaos) trouble(stop chan struct{}) {
	var busy sync.WaitGroup
	defer busy.Wait()
	var down sync.Map
	names := []string{"ctl", "ctl2"}
	for _, p := range c.pool.Owners {
		names = append(names, p.Name)
	}
	for {
		select {
		case <-stop:
			return
		case <-time.After(rand.N(2 * time.Second)):
		}
		if rand.IntN(2) == 0 {
			c.mu.Lock()
			for range 1 + rand.IntN(4) {
				c.cuts[[2]string{names[rand.IntN(2)], names[2+rand.IntN(len(names)-2)]}] = time.Now().Add(rand.N(10 * time.Second))
			}
			c.mu.Unlock()
			continue
		}
		name := names[rand.IntN(len(names))]
		if _, is := down.LoadOrStore(name, true); is {
			continue
		}
		busy.Go(func() { c.restart(name); down.Delete(name) })
	}
}

// user asks from nodes by chance, and gives back, until stop is closed.
func (c *chaos) user(uid uint32, worker int, stop chan struct{}) (granted, refused int) {
	for n := 0; ; n++ {
		select {
		case <-stop:
			return granted, refused
		case <-time.After(rand.N(200 * time.Millisecond)):
		}
		node := c.nodes[rand.IntN(len(c.nodes))]
		l, err := c.run(node, uid, fmt.Sprintf("run-%d-%d-%d", uid, worker, n), uint32(20+rand.IntN(5)*10))
		if err != nil {
			if lease.CodeOf(err) != lease.NoRoom && lease.CodeOf(err) != lease.Conflict && lease.CodeOf(err) != lease.Down && lease.CodeOf(err) != lease.Over && lease.CodeOf(err) != lease.Internal {
				c.t.Errorf("%s: %v", lease.CodeOf(err), err)
			}
			refused++
			continue
		}
		granted++
		c.beyond()
		time.Sleep(rand.N(time.Second))
		if err := node.Release(context.Background(), root, l.ID, lease.Key{}, "test"); err != nil {
			c.t.Error(err)
		}
	}
}

// TestQuotaModel runs for some seconds of the model's time. SLUICE_MODEL=3600 runs it for an hour of it.
func TestQuotaModel(t *testing.T) {
	seconds, err := strconv.Atoi(os.Getenv("SLUICE_MODEL"))
	if err != nil {
		seconds = 60
	}
	const owners, nodes, users = 12, 6, 3
	synctest.Test(t, func(t *testing.T) {
		m := emptyMetropolis(t, owners, 2)
		c := &chaos{metropolis: m, ends: make(map[string]func()), cuts: make(map[[2]string]time.Time), ctls: make(map[string]*Host), asks: make(map[string]int)}
		defer m.end()
		m.quotas = []Quota{oneGPU}
		for i, p := range m.pool.Owners {
			m.owners[p.Name].SetControllers([]string{"ctl", "ctl2"})
			c.ends[p.Name] = m.closes[1+i]
			m.closes[1+i] = func() { c.ends[p.Name]() }
		}
		m.dial = func(from, name string) lease.Owner {
			l := link{c, from, name}
			if name == "gpu0003" || name == "gpu0004" {
				return l // of an earlier release
			}
			return newLink{l}
		}
		for _, name := range []string{"ctl", "ctl2"} {
			c.ctls[name], c.ends[name] = m.start(name, true, 0)
			m.closes = append(m.closes, func() { c.ends[name]() })
		}
		for i := range nodes {
			few := 0
			if i == 0 {
				few = 1000 // a node of an earlier release asks all
			}
			h, end := m.start(fmt.Sprintf("n%05d", i), false, few)
			m.nodes, m.closes = append(m.nodes, h), append(m.closes, end)
		}
		m.promised(c.ctls["ctl"], 2)
		c.mu.Lock()
		c.wild = true
		c.mu.Unlock()
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() { c.trouble(stop) })
		var granted, refused int
		for uid := range uint32(users) {
			for worker := range 4 {
				wg.Go(func() {
					g, r := c.user(1000+uid, worker, stop)
					c.mu.Lock()
					defer c.mu.Unlock()
					granted, refused = granted+g, refused+r
				})
			}
		}
		time.Sleep(time.Duration(seconds) * time.Second)
		close(stop)
		wg.Wait()
		c.mu.Lock()
		c.wild = false
		clear(c.cuts)
		t.Logf("%d granted, %d refused; asked: %v", granted, refused, c.asks)
		if granted < seconds || c.asks["a controller"] < seconds {
			t.Error("too little happened")
		}
		c.mu.Unlock()
		time.Sleep(time.Minute)
		// Nobody has anything now, and nothing is in the way.
		for uid := range uint32(users) {
			for i, n := range m.nodes[:3] {
				l, err := c.run(n, 1000+uid, fmt.Sprintf("run-last-%d-%d", uid, i), 100)
				if err != nil {
					t.Errorf("user %d: %v", 1000+uid, err)
					continue
				}
				if _, err := c.run(m.nodes[3], 1000+uid, fmt.Sprintf("run-more-%d-%d", uid, i), 10); lease.CodeOf(err) != lease.NoRoom {
					t.Errorf("user %d: %v", 1000+uid, err)
				}
				if err := n.Release(t.Context(), root, l.ID, lease.Key{}, "test"); err != nil {
					t.Error(err)
				}
			}
		}
	})
}
