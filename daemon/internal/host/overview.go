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
	// maxRunEnds is how many ends of a job are kept for as long besides the last one.
	maxRunEnds = 15
	// maxRefs is the most leases of one owner, far more than its GPUs can have.
	maxRefs = 1 << 14
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
	wanted map[string]bool // owners that are watched
	past   time.Time       // when old jobs were last forgotten
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
	at    []string // owners
	live  int
	last  uint64    // the latest incarnation
	since time.Time // when its last lease ended
	ends  []runEnd
}

// runEnd is that runs of a job have ended, up to an incarnation, on nodes or, without any, on all.
type runEnd struct {
	upTo  uint64
	nodes []string
}

func (e *runEnd) of(k lease.Key) bool {
	return k.Incarnation <= e.upTo && (len(e.nodes) == 0 || slices.Contains(e.nodes, k.Node))
}

// poolSeen is the GPUs of a pool's owners in one list, less what is claimed.
type poolSeen struct {
	owners []Peer
	gpus   []lease.GPU
	at     map[string][2]int // an owner's part of gpus: first, number
	some   bool              // a few owners have not been heard of, and are missing in gpus
}

// claim is what a placement takes of GPUs until their owner's answers show it.
type claim struct {
	grants []lease.Grant
	id     string    // of the lease, once it is granted
	until  time.Time // zero until then
}

func newOverview() *overview {
	return &overview{owners: make(map[string]*ownerSeen), jobs: make(map[jobName]*jobSeen), pools: make(map[string]*poolSeen), wanted: make(map[string]bool)}
}

// watch says that an owner is watched, or not any more: then what is known of it is forgotten.
func (v *overview) watch(owner string, is bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.wanted[owner] = is; !is {
		delete(v.wanted, owner)
		v.drop(owner)
	}
}

// unwatched forgets what is known of an owner that refuses to be watched.
func (v *overview) unwatched(owner string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.drop(owner)
}

// learn takes an owner's answer. It returns leases of jobs that have ended already. An error means
// that the owner says more than can be true.
func (v *overview) learn(owner string, c lease.Changes) (late []lease.Ref, _ error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.wanted[owner] {
		return nil, nil
	}
	o := v.owners[owner]
	if o == nil {
		o = &ownerSeen{refs: make(map[string]lease.Key), claims: make(map[*claim]bool)}
		v.owners[owner] = o
		clear(v.pools) // a list may lack it
	}
	if n := len(o.refs) + len(c.Leases); n > maxRefs {
		return nil, lease.Errorf(lease.Invalid, "owner %s says that it has %d leases", owner, n)
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
	return late, nil
}

// begin notes a lease. It returns true if its job has ended. mu is held.
func (v *overview) begin(owner string, o *ownerSeen, r lease.Ref) (late bool) {
	j := v.job(jobName{r.Key.Cluster, r.Key.Job})
	j.last = max(j.last, r.Key.Incarnation)
	j.add(owner)
	if _, known := o.refs[r.ID]; !known {
		o.refs[r.ID] = r.Key
		j.live++
	}
	return slices.ContainsFunc(j.ends, func(e runEnd) bool { return e.of(r.Key) })
}

// end notes the end of a lease. mu is held.
func (v *overview) end(owner string, o *ownerSeen, id string, k lease.Key) {
	j := v.job(jobName{k.Cluster, k.Job})
	j.add(owner)
	j.last = max(j.last, k.Incarnation)
	if _, known := o.refs[id]; known {
		delete(o.refs, id)
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

// add notes that an owner has, or had, a lease of the job.
func (j *jobSeen) add(owner string) {
	if !slices.Contains(j.at, owner) {
		j.at = append(j.at, owner)
	}
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

// drop forgets an owner. mu is held.
func (v *overview) drop(owner string) {
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

// mark is how far an owner's answers have come, and whether its last one was one.
func (v *overview) mark(owner string) (at lease.Mark, up bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if o := v.owners[owner]; o != nil {
		return o.at, o.up
	}
	return lease.Mark{}, false
}

// place chooses GPUs of a pool for a request, and takes them off what is free until the claims
// are settled. ready is false if too many of the owners are not known; some says that a few are not.
func (v *overview) place(pool string, owners []Peer, r lease.Request, place lease.Place) (grants []lease.Grant, claims []ownerClaim, ready, some bool, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.pools[pool]
	if p == nil || !slices.Equal(p.owners, owners) {
		if p = v.list(owners); p == nil {
			return nil, nil, false, false, nil
		}
		v.pools[pool] = p
	}
	if grants, err = placement.Place(p.gpus, r, place); err != nil {
		return nil, nil, true, p.some, err
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
	return grants, claims, true, p.some, nil
}

// list makes the list of a pool, nil if too many owners are not known. mu is held.
func (v *overview) list(owners []Peer) *poolSeen {
	p := &poolSeen{owners: slices.Clone(owners), at: make(map[string][2]int, len(owners))}
	n, missing := 0, 0
	for _, peer := range owners {
		if o := v.owners[peer.Name]; o != nil {
			n += len(o.gpus)
		} else {
			missing++
		}
	}
	if missing > few {
		return nil
	}
	p.some = missing > 0
	p.gpus = make([]lease.GPU, n)
	n = 0
	for _, peer := range owners {
		o := v.owners[peer.Name]
		if o == nil {
			continue
		}
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
	return slices.Clone(j.at), j.last
}

// granted notes where a lease is that this daemon has got, before the owners' answers show it.
func (v *overview) granted(l *lease.Lease) {
	v.mu.Lock()
	defer v.mu.Unlock()
	j := v.job(jobName{l.Request.Key.Cluster, l.Request.Key.Job})
	j.last = max(j.last, l.Request.Key.Incarnation)
	for _, name := range lease.Owners(l.Grants) {
		j.add(name)
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
	// Ends of two runs stay apart, as in endName. A job has few within pastTime.
	j.ends = append(j.ends[max(0, len(j.ends)-maxRunEnds):], runEnd{upTo, slices.Clone(nodes)})
	if j.live == 0 {
		j.since = time.Now()
	}
}

// unknown returns the owners that have not been heard of.
func (v *overview) unknown(owners []Peer) (names []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.owners) == len(owners) { // those that are watched: all of them
		return nil
	}
	for _, o := range owners {
		if v.owners[o.Name] == nil {
			names = append(names, o.Name)
		}
	}
	return names
}

// gpus returns the GPUs of the owners that are known and answer, and the owners that have to be asked for theirs.
func (v *overview) gpus(owners []Peer) (all [][]lease.GPU, unknown []Peer) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, p := range owners {
		if o := v.owners[p.Name]; o == nil {
			unknown = append(unknown, p)
		} else if o.up {
			all = append(all, o.gpus)
		}
	}
	return all, unknown
}
