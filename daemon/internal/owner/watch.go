package owner

// Large pools: this owner tells controllers what changes, so that they need not ask again and again, and
// tells the nodes of a job at which owners its leases are.

import (
	"context"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// maxWatch is the longest time before an answer without a change.
	maxWatch = 30 * time.Second
	// deviceLook is how soon a watching controller hears of a change of the GPUs themselves.
	deviceLook = time.Second
	// journalSize is how many changes are kept for controllers that watch. One that has missed more
	// gets all live leases.
	journalSize = 256
	// The whereabouts of a job are kept for at least whereTime and at most twice as long, those of at most maxWhere jobs
	// in each such time.
	whereTime = 10 * time.Minute
	maxWhere  = 1 << 15
)

// journal is the last changes of an owner's leases. Owner.mu guards it.
type journal struct {
	seq     uint64
	ring    [journalSize]change // change n is at n % journalSize
	changed chan struct{}       // closed with the next change
	devices []lease.GPU         // as they were last seen
}

// change is one of them.
type change struct {
	lease.Ref        // without an id: of no lease
	by        string // the controller that has got the lease, which need not be told
	quiet     bool   // it can wait for the next news: nothing has changed on the GPUs
}

// add notes a change. mu is held for writing.
func (j *journal) add(c change) {
	j.seq++
	j.ring[j.seq%journalSize] = c
	j.wake()
}

// wake has those who watch look again. mu is held for writing.
func (j *journal) wake() {
	if j.changed != nil {
		close(j.changed)
		j.changed = nil
	}
}

// wait returns a channel that the next change closes. mu is held for writing.
func (j *journal) wait() <-chan struct{} {
	if j.changed == nil {
		j.changed = make(chan struct{})
	}
	return j.changed
}

// since returns the changes after seq, false if some are no longer kept.
func (j *journal) since(seq uint64) (refs []lease.Ref, ok bool) {
	if seq > j.seq || j.seq-seq > journalSize {
		return nil, false
	}
	for n := seq + 1; n <= j.seq; n++ {
		if c := j.ring[n%journalSize]; c.ID != "" {
			refs = append(refs, c.Ref)
		}
	}
	return refs, true
}

// news says whether there are changes after seq that host has not made itself.
func (j *journal) news(seq uint64, host string) bool {
	if seq > j.seq || j.seq-seq > journalSize {
		return true
	}
	for n := seq + 1; n <= j.seq; n++ {
		if c := &j.ring[n%journalSize]; !c.quiet && c.by != host {
			return true
		}
	}
	return false
}

// Watch implements lease.Watchable.
func (o *Owner) Watch(ctx context.Context, host string, since lease.Mark, wait time.Duration) (lease.Changes, error) {
	if !o.Controller(host) {
		return lease.Changes{}, lease.Errorf(lease.Denied, "%s asks to be told of all leases: only a controller may; see slurm.controllers in sluice.yaml of %s", host, o.cfg.Name)
	}
	until := time.NewTimer(max(0, min(wait, maxWatch)))
	defer until.Stop()
	for {
		news, next := o.news(host, since)
		if news {
			return o.changes(since), nil
		}
		look := time.NewTimer(deviceLook)
		select {
		case <-next:
		case <-look.C:
		case <-until.C:
			look.Stop()
			return o.changes(since), nil
		case <-ctx.Done():
			look.Stop()
			return lease.Changes{}, lease.Errorf(lease.Down, "the caller gave up")
		case <-o.ctx.Done():
			look.Stop()
			return lease.Changes{}, lease.Errorf(lease.Down, "owner %s is stopping", o.cfg.Name)
		case <-o.unwatch:
			look.Stop()
			return lease.Changes{}, lease.Errorf(lease.Down, "owner %s is stopping", o.cfg.Name)
		}
		look.Stop()
	}
}

// StopWatches ends the watches that wait, and all later ones. It may be called once.
func (o *Owner) StopWatches() { close(o.unwatch) }

// news says, after a look at the GPUs, whether a controller has to be told of changes since then,
// and returns what is closed with the next change.
func (o *Owner) news(host string, since lease.Mark) (bool, <-chan struct{}) {
	devices, _ := o.cfg.Devices()
	o.mu.Lock()
	defer o.mu.Unlock()
	if !slices.Equal(devices, o.journal.devices) {
		o.journal.devices = slices.Clone(devices)
		o.journal.add(change{})
	}
	return since.Epoch != o.life || o.journal.news(since.Seq, host), o.journal.wait()
}

// changes returns the GPUs and what has changed since then.
func (o *Owner) changes(since lease.Mark) lease.Changes {
	known, age := o.cfg.Devices()
	o.mu.RLock()
	defer o.mu.RUnlock()
	c := lease.Changes{At: lease.Mark{Epoch: o.life, Seq: o.journal.seq}}
	c.Inventory = lease.Inventory{Owner: o.cfg.Name, Version: o.cfg.Version, GPUs: o.whatIsFree(known), Age: age, Time: time.Now()}
	refs, ok := o.journal.since(since.Seq)
	if ok && since.Epoch == c.At.Epoch {
		c.Leases = refs
		return c
	}
	c.Whole = true
	for _, e := range o.leases {
		c.Leases = append(c.Leases, refOf(e, false))
	}
	return c
}

func refOf(e *entry, over bool) lease.Ref {
	return lease.Ref{ID: e.id, Key: e.rec.Lease.Request.Key, Over: over}
}

// whereabouts are the owners of the leases of jobs, for their nodes. What was not renewed for
// whereTime is forgotten with the older of two maps. Owner.mu guards it.
type whereabouts struct {
	young, old map[keyName][]string
	turned     time.Duration // on the clock since boot
}

func (w *whereabouts) put(n keyName, owners []string, now time.Duration) {
	if w.young == nil || len(w.young) >= maxWhere || now-w.turned > whereTime {
		w.young, w.old, w.turned = make(map[keyName][]string), w.young, now
	}
	w.young[n] = owners
}

func (w *whereabouts) get(n keyName, now time.Duration) []string {
	if now-w.turned > 2*whereTime {
		return nil
	}
	if owners, ok := w.young[n]; ok {
		return owners
	}
	return w.old[n]
}

// maxOwners bounds the owners of one lease: each has a GPU of it at least.
const maxOwners = form.MaxDevices

// Register implements lease.Watchable.
func (o *Owner) Register(_ context.Context, host, cluster, job string, leases []lease.Whereabouts) error {
	if !o.Controller(host) {
		return lease.Errorf(lease.Denied, "%s says where leases are: only a controller may; see slurm.controllers in sluice.yaml of %s", host, o.cfg.Name)
	}
	tooLong := func(s string) bool { return s == "" || len(s) > form.MaxName }
	bad := tooLong(cluster) || tooLong(job)
	for _, l := range leases {
		bad = bad || tooLong(l.Node) || len(l.Owners) > maxOwners || slices.ContainsFunc(l.Owners, tooLong)
	}
	if bad {
		return lease.Errorf(lease.Invalid, "whereabouts of a job: want names of 1 to %d bytes, and at most %d owners of a lease", form.MaxName, maxOwners)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, l := range leases {
		o.where.put(keyName{cluster, job, l.Node}, slices.Clone(l.Owners), o.clock.Up())
	}
	return nil
}

// Where implements lease.Watchable.
func (o *Owner) Where(_ context.Context, host, cluster, job string) ([]string, error) {
	n := keyName{cluster, job, host}
	o.mu.RLock()
	defer o.mu.RUnlock()
	owners := slices.Clone(o.where.get(n, o.clock.Up()))
	if o.keys[n] != nil && !slices.Contains(owners, o.cfg.Name) {
		owners = append(owners, o.cfg.Name)
	}
	return owners, nil
}

var _ lease.Watchable = (*Owner)(nil)
