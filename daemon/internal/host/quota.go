package host

// Quotas: what a user, or an account's jobs together, may hold of a pool or of all pools.
//
// No daemon knows all leases of a user: each owner knows those on its GPUs, each host those of its node. So the host that asks
// for a lease adds up what all owners say, after its own lease has been reserved at the owners that are to grant it:
//
//	before   check what is held and what placement chose together, so that a refusal writes nothing at the owners
//	reserve  all owners of the lease have it, for a while
//	after    the sum again; beyond the quota the reservation is taken back
//	confirm  the lease is granted
//
// Each host reserves before it adds up. So if two ask at the same time, the one that adds up last sees the other's lease, and they
// cannot both get what only one of them may have. Both may be refused. Each then waits a moment and tries again, as long as the
// leases in its way are only reserved.
//
// In large pools a controller's daemon says what most owners have, see holdings.go; that counts as much as if they were asked.
//
// Leases at an owner that does not answer are not counted, except for this node's own. Owners trust the host's sum, as
// they trust the user name that it gives.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Quota bounds what is held at the same time.
type Quota struct {
	User, Group string // name or number; the group's members each by itself; "" both: each user
	Account     string // all jobs of it in the host's cluster together; lease.EachAccount: of any that has no quota of its own
	Pool        string // "" all pools together
	Jobs        bool   // leases of Slurm's jobs count and are refused too
	Percent     *uint64
	Mem         *uint64 // bytes
	Leases      *int
	Whose, Of   string // as refusals say it
}

// Who describes a user as this node's directory knows it.
type Who struct {
	Name   string   // "" is not known here
	Groups []string // names and numbers
}

// whoTime is how long the directory of users may take to answer.
const whoTime = 3 * time.Second

// quotaTries is how often a request that met only reservations of others is tried again.
const quotaTries = 8

// directory is this node's directory of users. It may be on a network and hang, so at most whoMost questions wait for it at a time.
type directory chan struct{}

// whoMost is how many questions may wait for the directory.
const whoMost = 16

func newDirectory() directory { return make(directory, whoMost) }

// who asks the directory.
func (d directory) who(ctx context.Context, uid uint32) (Who, error) {
	ctx, cancel := context.WithTimeout(ctx, whoTime)
	defer cancel()
	select {
	case d <- struct{}{}:
	case <-ctx.Done():
		return Who{}, fmt.Errorf("the directory of users does not answer: %d questions wait: %w", whoMost, ctx.Err())
	}
	type answer struct {
		who Who
		err error
	}
	got := make(chan answer, 1) // the caller does not wait for a directory that hangs
	go func() {
		defer func() { <-d }()
		var a answer
		a.who, a.err = lookUp(uid)
		got <- a
	}()
	select {
	case a := <-got:
		return a.who, a.err
	case <-ctx.Done():
		return Who{}, fmt.Errorf("the directory of users does not answer: %w", ctx.Err())
	}
}

func lookUp(uid uint32) (Who, error) {
	u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10))
	if err != nil {
		return Who{}, err
	}
	w := Who{Name: u.Username}
	ids, err := u.GroupIds()
	for _, id := range ids {
		w.Groups = append(w.Groups, id)
		if g, err := user.LookupGroupId(id); err == nil {
			w.Groups = append(w.Groups, g.Name)
		}
	}
	return w, err
}

// SetQuotas replaces the quotas. Leases that are beyond a new one stay.
func (h *Host) SetQuotas(all []Quota) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.quotas = all
}

// quotasOf returns the quotas that a request has to keep: of those for the same pools and the same kind of leases the one that names
// the user, else the first one of a group that the user is in, else the one for everybody; and likewise of accounts.
func (h *Host) quotasOf(ctx context.Context, r *lease.Request) []Quota {
	h.mu.Lock()
	all := h.quotas
	h.mu.Unlock()
	run := form.IsRunJob(r.Key.Job)
	type scope struct {
		pool          string
		jobs, account bool
	}
	best := make(map[scope]int) // how close
	chosen := make(map[scope]Quota)
	var order []scope
	var who *Who
	for _, q := range all {
		if q.Pool != "" && q.Pool != r.Pool || !run && !q.Jobs || q.Account != "" && (run || r.Account == "") {
			continue
		}
		if who == nil && (q.User != "" || q.Group != "") {
			who = h.who(ctx, r.UID)
		}
		near := q.near(r, who)
		s := scope{q.Pool, q.Jobs, q.Account != ""}
		if near == 0 || near <= best[s] {
			continue
		}
		if best[s] == 0 {
			order = append(order, s)
		}
		best[s], chosen[s] = near, q
	}
	out := make([]Quota, 0, len(order))
	for _, s := range order {
		out = append(out, chosen[s])
	}
	return out
}

// near says how closely a quota is the request's, 0 for not at all.
func (q *Quota) near(r *lease.Request, who *Who) int {
	number := strconv.FormatUint(uint64(r.UID), 10)
	switch {
	case q.Account == lease.EachAccount:
		return 1
	case q.Account != "":
		return yes(q.Account == r.Account, 3)
	case q.User != "":
		return yes(q.User == number || who.Name != "" && q.User == who.Name, 3)
	case q.Group != "":
		return yes(slices.Contains(who.Groups, q.Group), 2)
	}
	return 1
}

func yes(is bool, n int) int {
	if is {
		return n
	}
	return 0
}

// who returns the user of that number. A user whom this node does not know has no name and no groups.
func (h *Host) who(ctx context.Context, uid uint32) *Who {
	w, err := h.cfg.Who(ctx, uid)
	var unknown user.UnknownUserIdError
	if err != nil && !errors.As(err, &unknown) {
		h.log.Warn("a user's groups are not known here; quotas of groups that the user is in do not hold for this request", "uid", uid, "error", err)
	}
	return &w
}

func (q *Quota) holding(r *lease.Request, except string) lease.Holding {
	of := lease.Holding{UID: r.UID, Pool: q.Pool, Jobs: q.Jobs, Except: except}
	if q.Account != "" {
		of.UID, of.Account, of.Cluster = 0, r.Account, r.Key.Cluster
	}
	return of
}

// asked is what a request's job asks for on all its nodes, as far as the request says it itself.
func asked(r *lease.Request) (a lease.Held) {
	n := max(1, int(r.Nodes))
	for _, f := range r.Fractions {
		a.Percent += uint64(n) * uint64(f.Percent)
		a.Mem += uint64(n) * min(f.Mem, form.MaxGPUMem)
	}
	a.Leases = n
	return a
}

// never refuses a request that exceeds a quota even if nothing else is held.
func never(quotas []Quota, a lease.Held) error {
	for i := range quotas {
		if what := quotas[i].beyond(lease.Held{}, a); what != "" {
			return lease.Errorf(lease.Never, "quota: %s: no lease that ends will make room; ask for less, or ask your site for quotas in sluice.yaml", what)
		}
	}
	return nil
}

// beyond says what of a quota would be exceeded, "" for nothing.
func (q *Quota) beyond(held, a lease.Held) string {
	say := func(most, has, asks string) string {
		text := fmt.Sprintf("%s may hold %s of %s", q.Whose, most, q.Of)
		if held != (lease.Held{}) {
			text += ", " + has + " held"
		}
		return text + ", " + asks + " asked"
	}
	switch {
	case q.Percent != nil && held.Percent+a.Percent > *q.Percent:
		return say(fmt.Sprintf("%d%% of GPUs", *q.Percent), fmt.Sprintf("%d%%", held.Percent), fmt.Sprintf("%d%%", a.Percent))
	case q.Mem != nil && held.Mem+a.Mem > *q.Mem:
		return say(mib(*q.Mem), mib(held.Mem), mib(a.Mem))
	case q.Leases != nil && held.Leases+a.Leases > *q.Leases:
		return say(plural(*q.Leases, "lease"), strconv.Itoa(held.Leases), strconv.Itoa(a.Leases))
	}
	return ""
}

func mib(n uint64) string { return fmt.Sprintf("%d MiB", form.MiB(n)) }

// withinQuotas refuses grants beyond a quota. lessThis is the id of the lease that has them already, "" before. again says that only
// reservations of others are in the way, which may pass within milliseconds.
func (h *Host) withinQuotas(ctx context.Context, quotas []Quota, r *lease.Request, grants []lease.Grant, lessThis string) (again bool, _ error) {
	if len(quotas) == 0 {
		return false, nil
	}
	a := lease.HeldBy(&lease.Lease{}, grants)
	a.Leases = 1
	if err := never(quotas, a); err != nil {
		return false, err
	}
	of := make([]lease.Holding, len(quotas))
	for i := range quotas {
		of[i] = quotas[i].holding(r, lessThis)
	}
	sum := h.sumHeld(ctx, of, lease.Owners(grants))
	i, what := firstBeyond(quotas, sum.held, a)
	if what != "" && len(sum.at) > 0 { // what has ended since may not be known to the controller yet
		if now := h.saidHeld(ctx, of, sum.at); len(now.silent) == 0 {
			sum.held = added(sum.said, now.held)
			i, what = firstBeyond(quotas, sum.held, a)
		}
	}
	if what != "" && sum.many { // there are too many of them to name
		sum = h.saidHeld(ctx, of, h.owners())
		i, what = firstBeyond(quotas, sum.held, a)
	}
	if err := ctx.Err(); err != nil {
		return false, lease.Errorf(lease.Down, "job %s: the request was given up", r.Key)
	}
	if what != "" {
		text := "quota: " + what + "; wait until a lease ends (see sluice list), ask for less, or ask your site for quotas in sluice.yaml"
		if len(sum.silent) > 0 {
			text += "; not asked: " + strings.Join(sum.silent, "; ")
		}
		return sum.held[i].Reserved > 0, lease.Errorf(lease.NoRoom, "%s", text)
	}
	if len(sum.silent) > 0 {
		h.log.Warn("quotas were kept without owners that do not answer", "job", r.Key.String(), "uid", r.UID, "silent", strings.Join(sum.silent, "; "))
	}
	return false, nil
}

// firstBeyond says which quota would be exceeded, and what of it, "" for none.
func firstBeyond(quotas []Quota, held []lease.Held, a lease.Held) (int, string) {
	for i := range quotas {
		if what := quotas[i].beyond(held[i], a); what != "" {
			return i, what
		}
	}
	return 0, ""
}

// tally is what leases have at all owners.
type tally struct {
	held   []lease.Held
	silent []string // owners that could not say it

	// Where a controller said what most owners have: what the others said, and the owners in the controller's sum that have some of it.
	said []lease.Held
	at   []*peer
	many bool // there are more of those than the controller names
}

// sumHeld adds up what all owners have: as a controller knows it, else as each owner says. near are owners that pass a question on to a
// controller.
func (h *Host) sumHeld(ctx context.Context, of []lease.Holding, near []string) tally {
	s := h.everywhere(ctx, of, near)
	if !s.Known {
		return h.saidHeld(ctx, of, h.owners())
	}
	t := h.saidHeld(ctx, of, h.named(s.Unsure))
	t.said, t.held = t.held, added(t.held, s.Held)
	t.at, t.many = h.named(s.At), s.Many
	return t
}

// added is the sums of two lists.
func added(a, b []lease.Held) []lease.Held {
	sum := slices.Clone(a)
	for i := range sum {
		sum[i] = sum[i].Add(b[i])
	}
	return sum
}

// saidHeld adds up what owners say.
func (h *Host) saidHeld(ctx context.Context, of []lease.Holding, owners []*peer) tally {
	t := tally{held: make([]lease.Held, len(of))}
	answers := askAll(ctx, h, owners, false, func(ctx context.Context, o lease.Owner) ([]lease.Held, error) {
		c, ok := o.(lease.Counter)
		if !ok {
			return nil, lease.Errorf(lease.WrongPeer, "the owner's release knows no quotas")
		}
		return c.Held(ctx, h.cfg.Node, of)
	})
	for _, a := range answers {
		if a.err != nil {
			t.silent = append(t.silent, a.peer.name+": "+a.err.Error())
			h.addOwn(t.held, of, a.peer.name)
			continue
		}
		t.held = added(t.held, a.v)
	}
	return t
}

// addOwn adds what leases of this node have at an owner that did not say it.
func (h *Host) addOwn(sum []lease.Held, of []lease.Holding, owner string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, hd := range h.leases {
		l := &hd.rec.Lease
		var there []lease.Grant
		for _, g := range l.Grants {
			if g.Owner == owner {
				there = append(there, g)
			}
		}
		part := lease.HeldPartOf(l, there)
		for i := range of {
			if of[i].Counts(&part) {
				sum[i] = sum[i].Add(part.Held)
			}
		}
	}
}

// quotaRest waits before a request that met only reservations of others is tried again.
func quotaRest(ctx context.Context, try int) {
	pause(ctx, rand.N(time.Duration(try+1)*10*time.Millisecond))
}
