package host

// What a controller's daemon knows of the owners of large pools without asking them: what each
// has free, and which owners have, or had until lately, leases of a job. watch.go keeps it.

import (
	"slices"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/placement"
)

const (
	// pastTime is how long it is known which owners had the leases of a job, for its report.
	pastTime = 2 * time.Minute
	// claimTime is how long a grant that its owner has made is taken off what the owner said before. An owner does not tell
	// of it by itself, but with the next news.
	claimTime = 2 * watchWait
)

// jobName is a key of any node and incarnation.
type jobName struct{ cluster, job string }

// overview is what is known. The zero value is not ready; newOverview makes one.
type overview struct {
	mu     sync.Mutex
	owners map[string]*ownerSeen
	jobs   map[jobName]*jobSeen
	pools  map[string]*poolSeen
	past   time.Time // when old jobs were last forgotten
}

// ownerSeen is an owner.
type ownerSeen struct {
	at     lease.Mark
	up     bool        // its last answer is recent
	gpus   []lease.GPU // as it said
	refs   map[string]lease.Key
	claims map[*claim]bool
}

// jobSeen is where a job has leases, and where it had some. A job has few owners.
type jobSeen struct {
	at    []jobAt
	live  int
	last  uint64    // the latest incarnation
	since time.Time // when its last lease ended
	// upTo is the incarnation up to which the job has ended on nodes, or on all where there are none.
	upTo  uint64
	nodes []string
}

type jobAt struct {
	owner string
	live  int
}

// poolSeen is the GPUs of a pool's owners in one list, less what is claimed.
type poolSeen struct {
	owners []Peer
	gpus   []lease.GPU
	at     map[string][2]int // an owner's part of gpus: first, number
}

// claim is what a placement takes of GPUs until their owner's answers show it.
type claim struct {
	grants []lease.Grant
	id     string    // of the lease, once it is granted
	until  time.Time // zero until then
}

func newOverview() *overview {
	return &overview{owners: make(map[string]*ownerSeen), jobs: make(map[jobName]*jobSeen), pools: make(map[string]*poolSeen)}
}

// learn takes an owner's answer. It returns leases of jobs that have ended already.
func (v *overview) learn(owner string, c lease.Changes) (late []lease.Ref) {
	v.mu.Lock()
	defer v.mu.Unlock()
	o := v.owners[owner]
	if o == nil {
		o = &ownerSeen{refs: make(map[string]lease.Key), claims: make(map[*claim]bool)}
		v.owners[owner] = o
	}
	if c.Whole {
		live := make(map[string]bool, len(c.Leases))
		for _, r := range c.Leases {
			live[r.ID] = true
		}
		for id, k := range o.refs {
			if !live[id] {
				v.end(owner, o, id, k)
			}
		}
	}
	told := make(map[string]bool, len(c.Leases))
	for _, r := range c.Leases {
		told[r.ID] = true
		if r.Over {
			v.end(owner, o, r.ID, r.Key)
		} else if v.begin(owner, o, r) {
			late = append(late, r)
		}
	}
	now := time.Now()
	for cl := range o.claims {
		if _, shown := o.refs[cl.id]; shown || told[cl.id] || !cl.until.IsZero() && now.After(cl.until) {
			delete(o.claims, cl)
		}
	}
	o.at, o.up, o.gpus = c.At, true, c.Inventory.GPUs
	v.show(owner, o)
	if now.Sub(v.past) > pastTime/4 {
		v.past = now
		for n, j := range v.jobs {
			if j.live == 0 && now.Sub(j.since) > pastTime {
				delete(v.jobs, n)
			}
		}
	}
	return late
}

// begin notes a lease. It returns true if its job has ended. mu is held.
func (v *overview) begin(owner string, o *ownerSeen, r lease.Ref) (late bool) {
	j := v.job(jobName{r.Key.Cluster, r.Key.Job})
	j.last = max(j.last, r.Key.Incarnation)
	if _, known := o.refs[r.ID]; !known {
		o.refs[r.ID] = r.Key
		j.of(owner).live++
		j.live++
	}
	return j.upTo > 0 && r.Key.Incarnation <= j.upTo && (len(j.nodes) == 0 || slices.Contains(j.nodes, r.Key.Node))
}

// end notes the end of a lease. mu is held.
func (v *overview) end(owner string, o *ownerSeen, id string, k lease.Key) {
	j := v.job(jobName{k.Cluster, k.Job})
	at := j.of(owner)
	j.last = max(j.last, k.Incarnation)
	if _, known := o.refs[id]; known {
		delete(o.refs, id)
		at.live--
		j.live--
	}
	if j.live == 0 {
		j.since = time.Now()
	}
}

// job returns what is known of a job, and begins with nothing. mu is held.
func (v *overview) job(n jobName) *jobSeen {
	j := v.jobs[n]
	if j == nil {
		j = &jobSeen{since: time.Now()}
		v.jobs[n] = j
	}
	return j
}

// of returns the entry of an owner, until the next call.
func (j *jobSeen) of(owner string) *jobAt {
	for i := range j.at {
		if j.at[i].owner == owner {
			return &j.at[i]
		}
	}
	j.at = append(j.at, jobAt{owner: owner})
	return &j.at[len(j.at)-1]
}

// show brings the owner's part of the pools' lists up to date. mu is held.
func (v *overview) show(owner string, o *ownerSeen) {
	for name, p := range v.pools {
		at, ok := p.at[owner]
		switch {
		case !ok:
		case at[1] != len(o.gpus):
			delete(v.pools, name) // it is made again when it is asked for
		default:
			o.copyTo(p.gpus[at[0] : at[0]+at[1]])
		}
	}
}

// copyTo writes the owner's GPUs, less its claims. mu is held.
func (o *ownerSeen) copyTo(gpus []lease.GPU) {
	copy(gpus, o.gpus)
	for c := range o.claims {
		for _, gr := range c.grants {
			for i := range gpus {
				if g := &gpus[i]; g.UUID == gr.GPU {
					g.FreePercent -= min(gr.Percent, g.FreePercent)
					g.FreeMem -= min(gr.Mem, g.FreeMem)
					g.Leases++
				}
			}
		}
	}
	if o.up {
		return
	}
	for i := range gpus {
		gpus[i].Healthy, gpus[i].Why = false, "its owner does not answer"
	}
}

// lost notes that an owner does not answer. Nothing of it is placed until it does.
func (v *overview) lost(owner string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if o := v.owners[owner]; o != nil && o.up {
		o.up = false
		v.show(owner, o)
	}
}

// drop forgets an owner.
func (v *overview) drop(owner string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	o := v.owners[owner]
	if o == nil {
		return
	}
	for id, k := range o.refs {
		v.end(owner, o, id, k)
	}
	delete(v.owners, owner)
	clear(v.pools)
}

// correct takes an owner's inventory, which it was asked for out of turn.
func (v *overview) correct(owner string, gpus []lease.GPU, asked time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if o := v.owners[owner]; o != nil {
		o.gpus = gpus
		for c := range o.claims {
			if !c.until.IsZero() && c.until.Add(-claimTime).Before(asked) {
				delete(o.claims, c)
			}
		}
		v.show(owner, o)
	}
}

// mark is how far an owner's answers have come.
func (v *overview) mark(owner string) lease.Mark {
	v.mu.Lock()
	defer v.mu.Unlock()
	if o := v.owners[owner]; o != nil {
		return o.at
	}
	return lease.Mark{}
}

// place chooses GPUs of a pool for a request, and takes them off what is free until the claims
// are settled. ready is false if nothing has been heard of some of the owners yet.
func (v *overview) place(pool string, owners []Peer, r lease.Request, place lease.Place) (grants []lease.Grant, claims []ownerClaim, ready bool, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.pools[pool]
	if p == nil || !slices.Equal(p.owners, owners) {
		if p = v.list(owners); p == nil {
			return nil, nil, false, nil
		}
		v.pools[pool] = p
	}
	if grants, err = placement.Place(p.gpus, r, place); err != nil {
		return nil, nil, true, err
	}
	for _, name := range lease.Owners(grants) {
		c := &claim{}
		for _, g := range grants {
			if g.Owner == name {
				c.grants = append(c.grants, g)
			}
		}
		o := v.owners[name]
		o.claims[c] = true
		v.show(name, o)
		claims = append(claims, ownerClaim{name, c})
	}
	return grants, claims, true, nil
}

// list makes the list of a pool, nil if not all owners are known. mu is held.
func (v *overview) list(owners []Peer) *poolSeen {
	p := &poolSeen{owners: slices.Clone(owners), at: make(map[string][2]int, len(owners))}
	n := 0
	for _, peer := range owners {
		o := v.owners[peer.Name]
		if o == nil {
			return nil
		}
		n += len(o.gpus)
	}
	p.gpus = make([]lease.GPU, n)
	n = 0
	for _, peer := range owners {
		o := v.owners[peer.Name]
		p.at[peer.Name] = [2]int{n, len(o.gpus)}
		o.copyTo(p.gpus[n : n+len(o.gpus)])
		n += len(o.gpus)
	}
	return p
}

// ownerClaim is a claim and whose GPUs it is on.
type ownerClaim struct {
	owner string
	claim *claim
}

// settle ends claims: at once if the grants were not made, else when the owners' answers show
// the lease.
func (v *overview) settle(claims []ownerClaim, id string, granted bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, c := range claims {
		o := v.owners[c.owner]
		if o == nil {
			continue
		}
		if _, shown := o.refs[id]; !granted || shown {
			delete(o.claims, c.claim)
			v.show(c.owner, o)
			continue
		}
		c.claim.id, c.claim.until = id, time.Now().Add(claimTime)
	}
}

// whose returns the owners that have leases of a job, or had some lately, and the job's latest
// incarnation.
func (v *overview) whose(cluster, job string) (owners []string, last uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	j := v.jobs[jobName{cluster, job}]
	if j == nil {
		return nil, 0
	}
	for _, at := range j.at {
		owners = append(owners, at.owner)
	}
	return owners, j.last
}

// granted notes where a lease is that this daemon has got, before the owners' answers show it.
func (v *overview) granted(l *lease.Lease) {
	v.mu.Lock()
	defer v.mu.Unlock()
	j := v.job(jobName{l.Request.Key.Cluster, l.Request.Key.Job})
	j.last = max(j.last, l.Request.Key.Incarnation)
	for _, name := range lease.Owners(l.Grants) {
		j.of(name)
	}
	if j.live == 0 {
		j.since = time.Now()
	}
}

// ended notes that a job has ended up to an incarnation, on nodes or, without any, on all.
func (v *overview) ended(cluster, job string, nodes []string, upTo uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	j := v.job(jobName{cluster, job})
	if j.upTo > 0 && (len(j.nodes) == 0 || len(nodes) == 0) {
		nodes = nil
	} else {
		nodes = append(slices.Clone(nodes), j.nodes...)
	}
	j.upTo, j.nodes = max(j.upTo, upTo), nodes
	if j.live == 0 {
		j.since = time.Now()
	}
}

// knows says whether what a pool's owners have free is known.
func (v *overview) knows(pool string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.pools[pool] != nil
}

// complete says whether every one of so many owners has been heard of.
func (v *overview) complete(owners int) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.owners) >= owners
}
