package host

// What users hold, as a controller's daemon knows it: of each owner that has promised to tell of a reservation before it answers it
// (lease.Promiser). While the promise holds, what is known here counts as the owner's own answer would. watch.go keeps it.

import (
	"context"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// holdings is what is known.
type holdings struct {
	up func() time.Duration // since boot: a promise runs out while this machine sleeps

	mu       sync.Mutex
	owners   map[string]*ownerHolds
	users    map[uint32]map[*holds]bool
	accounts map[account]map[*holds]bool
}

// account is that of Slurm's jobs in a cluster.
type account struct{ cluster, name string }

// ownerHolds is an owner. The watch that made it alone changes it, so that what an earlier watch hears late changes nothing.
type ownerHolds struct {
	name  string
	until time.Duration // its promise holds until then
	parts map[string]*holds
}

// holds is a lease's part of an owner.
type holds struct {
	owner *ownerHolds
	part  lease.HeldPart
}

func newHoldings(up func() time.Duration) *holdings {
	return &holdings{up: up, owners: make(map[string]*ownerHolds), users: make(map[uint32]map[*holds]bool), accounts: make(map[account]map[*holds]bool)}
}

// begin makes what a new watch of an owner fills.
func (h *holdings) begin(owner string) *ownerHolds {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(owner)
	o := &ownerHolds{name: owner, parts: make(map[string]*holds)}
	h.owners[owner] = o
	return o
}

// end forgets what a watch has filled.
func (h *holdings) end(o *ownerHolds) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.owners[o.name] == o {
		h.drop(o.name)
	}
}

// drop forgets an owner. mu is held.
func (h *holdings) drop(owner string) {
	o := h.owners[owner]
	if o == nil {
		return
	}
	for id := range o.parts {
		h.remove(o, id)
	}
	delete(h.owners, owner)
}

// learn takes an owner's answer to a question that was sent at a time. The promise begins when the owner answered, which is no earlier than
// when it was asked and the time that it waited. An error means that the owner says more than can be true.
func (h *holdings) learn(o *ownerHolds, sent time.Duration, c *lease.HeldChanges) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.owners[o.name] != o {
		return nil
	}
	if n := len(o.parts) + len(c.Parts); n > maxRefs {
		return lease.Errorf(lease.Invalid, "owner %s says that it has %d leases", o.name, n)
	}
	if c.Whole {
		for id := range o.parts {
			h.remove(o, id)
		}
	}
	for _, r := range c.Leases {
		h.remove(o, r.ID) // it is below, if it lives
	}
	for _, p := range c.Parts {
		h.remove(o, p.ID)
		x := &holds{o, p}
		o.parts[p.ID] = x
		if h.users[p.UID] == nil {
			h.users[p.UID] = make(map[*holds]bool)
		}
		h.users[p.UID][x] = true
		if a := (account{p.Cluster, p.Account}); p.Account != "" {
			if h.accounts[a] == nil {
				h.accounts[a] = make(map[*holds]bool)
			}
			h.accounts[a][x] = true
		}
	}
	o.until = sent + c.Waited + c.Promise*7/8 // the two machines' clocks may run at different rates
	return nil
}

// remove forgets a part. mu is held.
func (h *holdings) remove(o *ownerHolds, id string) {
	x := o.parts[id]
	if x == nil {
		return
	}
	delete(o.parts, id)
	if u := h.users[x.part.UID]; u != nil {
		if delete(u, x); len(u) == 0 {
			delete(h.users, x.part.UID)
		}
	}
	a := account{x.part.Cluster, x.part.Account}
	if u := h.accounts[a]; u != nil {
		if delete(u, x); len(u) == 0 {
			delete(h.accounts, a)
		}
	}
}

// sum adds up what these owners have. It is not known if too many of them have not promised anything.
func (h *holdings) sum(of []lease.Holding, owners []Peer) lease.HeldSum {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.up()
	s := lease.HeldSum{Known: true, Held: make([]lease.Held, len(of))}
	for _, p := range owners {
		if o := h.owners[p.Name]; o == nil || now >= o.until {
			if len(s.Unsure) == lease.MaxUnsure {
				return lease.HeldSum{}
			}
			s.Unsure = append(s.Unsure, p.Name)
		}
	}
	at := make(map[string]bool)
	for i := range of {
		some := h.users[of[i].UID]
		if of[i].Account != "" {
			some = h.accounts[account{of[i].Cluster, of[i].Account}]
		}
		for x := range some {
			if now < x.owner.until && of[i].Counts(&x.part) {
				s.Held[i] = s.Held[i].Add(x.part.Held)
				at[x.owner.name] = true
			}
		}
	}
	if s.Many = len(at) > lease.MaxAt; !s.Many {
		for name := range at {
			s.At = append(s.At, name)
		}
		slices.Sort(s.At)
	}
	return s
}

// maxRelays is how many owners are asked for a controller's answer, before all owners are asked.
const maxRelays = 3

// everywhere returns what leases have at all owners as a controller's daemon knows it: this one, or one that answers by way of an owner, of
// those that are near or of some by chance. It is not known where pools are small, or no controller has the quotas and the same owners.
func (h *Host) everywhere(ctx context.Context, of []lease.Holding, near []string) lease.HeldSum {
	owners := h.inPools()
	if len(owners) <= h.cfg.few {
		return lease.HeldSum{}
	}
	if h.controller.Load() {
		if s := h.holds.sum(of, owners); s.Known {
			return s
		}
	}
	relays := slices.Clone(near)
	for _, o := range h.sample(owners) {
		if !slices.Contains(near, o.Name) {
			relays = append(relays, o.Name)
		}
	}
	q := lease.HeldQuestion{Holdings: of, Owners: sumOf(owners)}
	asked := 0
	for _, p := range h.named(relays) {
		if p.down() != nil {
			continue
		}
		s, err := question(ctx, h, p, func(ctx context.Context, o lease.Owner) (lease.HeldSum, error) {
			if pr, ok := o.(lease.Promiser); ok {
				return pr.HeldEverywhere(ctx, h.cfg.Node, q)
			}
			return lease.HeldSum{}, lease.Errorf(lease.WrongPeer, "the owner's release passes no questions on")
		})
		if err == nil && s.Known && len(s.Held) == len(of) {
			return s
		}
		if asked++; asked == maxRelays || ctx.Err() != nil {
			break
		}
	}
	return lease.HeldSum{}
}

// promised is the watch of one owner that promises to tell of reservations.
type promised struct {
	holds   *ownerHolds
	since   lease.Mark // of what holds has
	answers []lease.HeldAnswer
	plain   time.Time // until then the owner is only watched: it promises nothing, as one of an earlier release
}

// askPromise waits for an owner's next answer, with a promise if this daemon keeps quotas and the owner's release makes promises. rested says
// that the owner lets changes gather before it answers.
func (h *Host) askPromise(ctx context.Context, p *peer, w *promised) (c lease.Changes, rested bool, _ error) {
	o, ok := p.owner.(lease.Promiser)
	h.mu.Lock()
	ok = ok && len(h.quotas) > 0
	h.mu.Unlock()
	if !ok || time.Now().Before(w.plain) {
		w.since, w.answers = lease.Mark{}, nil
		c, err := h.ask(ctx, p)
		return c, false, err
	}
	q := lease.HeldWatch{Since: w.since, Wait: promiseWait, Gap: watchGap, Answers: w.answers}
	if _, up := h.view.mark(p.name); !up {
		q.Wait, q.Gap = 0, 0 // that it answers is news
	}
	sent := h.holds.up()
	got, err := poll(ctx, h, p, promiseWait, func(ctx context.Context) (lease.HeldChanges, error) { return o.WatchHeld(ctx, h.cfg.Node, q) })
	w.answers = nil
	if err != nil && lease.CodeOf(err) != lease.Down {
		w.plain = time.Now().Add(unwatchable)
		c, err := h.ask(ctx, p)
		return c, false, err
	}
	if err == nil {
		err = h.holds.learn(w.holds, sent, &got)
	}
	if err != nil {
		return lease.Changes{}, false, err
	}
	w.since = got.At
	owners := h.inPools()
	for _, q := range got.Questions {
		a := lease.HeldAnswer{ID: q.ID}
		if q.Owners == sumOf(owners) {
			a.Sum = h.holds.sum(q.Holdings, owners)
		}
		w.answers = append(w.answers, a)
	}
	return got.Changes, true, nil
}

// sumOf is a sum of the owners' names, which are sorted.
func sumOf(owners []Peer) uint64 {
	f := fnv.New64a()
	for _, o := range owners {
		_, _ = f.Write([]byte(o.Name + "\x00"))
	}
	return f.Sum64()
}
