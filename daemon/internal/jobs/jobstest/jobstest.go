// Package jobstest has what tests of the services for Slurm's jobs run against: owners and
// the host role of a node, in memory.
package jobstest

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobs"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm/slurmtest"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Site is what all hosts of a test have in common: the owners. Tests read and write its
// fields directly when no service runs, else in Set.
type Site struct {
	mu     sync.Mutex
	epoch  uint64
	Leases map[lease.Key]lease.Lease // without incarnation
	Tombs  map[lease.Key]uint64      // the epochs up to which leases have ended
	Refuse error                     // of whoever asks for a lease
	Down   error                     // of whoever attaches
	Pools  []rpc.Pool
	Extra  []lease.Status
	Silent map[string]error
	Ended  []lease.Key
	Asks   int
	Named  int           // most nodes in one end of a job
	Hold   chan struct{} // acquisitions wait for it
	// Refusals are what Refused was told.
	Refusals []string
}

// NewSite returns a site with one pool of two GPUs, of one owner.
func NewSite() *Site {
	gpu := func(uuid string) lease.GPU {
		return lease.GPU{Owner: "g1", UUID: uuid, Name: "NVIDIA H200", Mem: 100 << 30, Healthy: true}
	}
	return &Site{
		epoch: 1000, Leases: map[lease.Key]lease.Lease{}, Tombs: map[lease.Key]uint64{},
		Pools: []rpc.Pool{{Name: "default", Owners: []rpc.PoolOwner{{Name: "g1", Inventory: lease.Inventory{Owner: "g1", GPUs: []lease.GPU{gpu("a"), gpu("b")}}}}}},
	}
}

func bare(k lease.Key) lease.Key { k.Incarnation = 0; return k }

// Host is one node's host role.
type Host struct {
	*Site
	Node string
	Has  map[string]lease.Lease // the leases it holds, by job
	Told []lease.Report         // the reports of any job; nil for one of uid 1000

	Parts []lease.Part // of one job
}

// Epoch returns a later epoch each time.
func (h *Host) Epoch() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.epoch++
	return h.epoch
}

// LastEpoch is the latest epoch of any lease of the job, ended ones too.
func (h *Host) LastEpoch(_ context.Context, _, job string) (last uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for k, l := range h.Leases {
		if k.Job == job {
			last = max(last, l.Request.Key.Incarnation)
		}
	}
	for k, n := range h.Tombs {
		if k.Job == job {
			last = max(last, n)
		}
	}
	return last
}

// get is under mu.
func (h *Host) get(r lease.Request) (lease.Lease, error) {
	h.Asks++
	k := bare(r.Key)
	if h.Refuse != nil {
		return lease.Lease{}, h.Refuse
	}
	if h.Tombs[k] >= r.Key.Incarnation {
		return lease.Lease{}, lease.Errorf(lease.Over, "job %s has ended", k)
	}
	if l, ok := h.Leases[k]; ok && (l.Request.Restart == r.Restart || l.Request.Key.Incarnation >= r.Key.Incarnation) {
		return l, nil
	}
	l := lease.Lease{ID: form.NewLeaseID(), Request: r, State: lease.Granted, Host: r.Key.Node, Made: time.Now()}
	for i, f := range r.Fractions {
		l.Grants = append(l.Grants, lease.Grant{Owner: "g1", GPU: "a", Percent: f.Percent, Mem: uint64(f.Percent) << 30, Order: i})
	}
	h.Leases[k] = l
	return l, nil
}

// GivePart implements jobnode.Host; Parts has what steps have.
func (h *Host) GivePart(key lease.Key, part lease.Part, here func(uint32) bool) (lease.Part, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.Has[key.Job]
	parts := slices.DeleteFunc(slices.Clone(h.Parts), func(p lease.Part) bool { return p.Step != part.Step && !here(p.Step) })
	left := l.Grants[0].Percent
	for _, p := range parts {
		if p.Step != part.Step {
			left -= p.Percent
		}
	}
	switch {
	case len(l.Grants) > 1 && part.Percent > 0:
		var err error
		if part, err = l.ChooseGPUs(part, parts); err != nil {
			return part, err
		}
	case part.Percent > left:
		return part, lease.Errorf(lease.NoRoom, "%d%% left", left)
	}
	h.Parts = append(slices.DeleteFunc(h.Parts, func(p lease.Part) bool { return p.Step == part.Step }), part)
	return part, nil
}

// DropParts implements jobnode.Host.
func (h *Host) DropParts(_ lease.Key, here func(uint32) bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Parts = slices.DeleteFunc(h.Parts, func(p lease.Part) bool { return !here(p.Step) })
	return nil
}

// Acquire grants a lease, or returns Refuse.
func (h *Host) Acquire(ctx context.Context, p rpc.Peer, r lease.Request) (lease.Lease, string, error) {
	if h.Hold != nil {
		<-h.Hold
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.UID != 0 || r.Key.Node != h.Node {
		panic("acquired by or for somebody else")
	}
	l, err := h.get(r)
	if err == nil {
		h.Has[r.Key.Job] = l
	}
	return l, "/run/sluice/leases/" + l.ID + "/sock", err
}

// Sponsor grants a lease for each request.
func (h *Host) Sponsor(_ context.Context, reqs []lease.Request) ([]lease.Lease, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []lease.Lease
	for _, r := range reqs {
		l, err := h.get(r)
		if err != nil {
			return nil, err
		}
		out = append(out, l)
	}
	return out, nil
}

// Withdraw ends one of Extra that has a sponsor.
func (h *Host) Withdraw(_ context.Context, id, _ string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := len(h.Extra)
	h.Extra = slices.DeleteFunc(h.Extra, func(s lease.Status) bool { return s.ID == id && s.Sponsor == h.Node })
	return len(h.Extra) < n
}

// Refused notes a refusal in Refusals.
func (h *Host) Refused(k lease.Key, uid uint32, err error, times int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Refusals = append(h.Refusals, fmt.Sprintf("%s of %d: %v, %d times", k.Job, uid, err, times))
}

// Attach finds a lease that is there, or returns Down.
func (h *Host) Attach(_ context.Context, key lease.Key) (lease.Lease, bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l, ok := h.Leases[bare(key)]
	if h.Down != nil {
		return lease.Lease{}, false, h.Down
	}
	if ok {
		h.Has[key.Job] = l
	}
	return l, ok, nil
}

// Held returns the lease that the host holds for a job.
func (h *Host) Held(key lease.Key) (lease.Lease, string, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l, ok := h.Has[key.Job]
	return l, "/run/sluice/leases/" + l.ID + "/sock", ok
}

// Release ends a lease of the node, and notes the key in Ended.
func (h *Host) Release(_ context.Context, _ rpc.Peer, _ string, key lease.Key, _ string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := bare(key)
	h.Tombs[k] = max(h.Tombs[k], key.Incarnation)
	h.Ended = append(h.Ended, key)
	if l, ok := h.Leases[k]; ok && l.Request.Key.Incarnation <= key.Incarnation {
		delete(h.Leases, k)
	}
	if l, ok := h.Has[key.Job]; ok && l.Request.Key.Incarnation <= key.Incarnation {
		delete(h.Has, key.Job)
	}
	return nil
}

// EndJob ends the leases of a job, and notes its key in Ended.
func (h *Host) EndJob(_ context.Context, cluster, job string, nodes []string, upTo uint64, _ string) ([]string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Ended = append(h.Ended, lease.Key{Cluster: cluster, Job: job, Incarnation: upTo})
	h.Named = max(h.Named, len(nodes))
	for k, l := range h.Leases {
		if k.Job == job && (len(nodes) == 0 || slices.Contains(nodes, k.Node)) && l.Request.Key.Incarnation <= upTo {
			delete(h.Leases, k)
		}
	}
	return nil, nil
}

// Reports returns Told.
func (h *Host) Reports(_ context.Context, _, job string) ([]lease.Report, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.Told != nil {
		return slices.Clone(h.Told), nil
	}
	return []lease.Report{{Lease: "x", Key: lease.Key{Job: job}, UID: 1000}}, nil
}

// All returns every lease there is, and Extra.
func (h *Host) All(context.Context) (map[string][]lease.Brief, map[string]error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []lease.Brief
	for i := range h.Extra {
		out = append(out, h.Extra[i].Brief())
	}
	for _, l := range h.Leases {
		s := lease.Status{Lease: l}
		out = append(out, s.Brief())
	}
	return map[string][]lease.Brief{"g1": out}, h.Silent
}

// Pool returns Pools.
func (h *Host) Pool(context.Context, rpc.Peer, string) ([]rpc.Pool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.Pools, nil
}

// GPUs returns those of Pools.
func (h *Host) GPUs(context.Context, string, bool) (all [][]lease.GPU, _ error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.Pools {
		for _, o := range p.Owners {
			all = append(all, o.Inventory.GPUs)
		}
	}
	return all, nil
}

// Count returns the number of leases.
func (s *Site) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.Leases)
}

// Set calls f while no host reads the site.
func (s *Site) Set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// Marks are the marks of jobs, in memory.
type Marks struct {
	mu   sync.Mutex
	jobs map[string]bool
}

// Put marks a job.
func (m *Marks) Put(job string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.jobs[job] = true
	return nil
}

// Remove unmarks a job.
func (m *Marks) Remove(job string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.jobs, job)
}

// Keep leaves the marks of these jobs alone.
func (m *Marks) Keep(jobs map[string]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.jobs = map[string]bool{}
	for j := range jobs {
		m.jobs[j] = true
	}
}

// Has says whether a job is marked.
func (m *Marks) Has(job string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.jobs[job]
}

// Settings are those of the services under test. A GPU of pool default is a licence of 100.
var Settings = jobs.Settings{
	Pools: map[string]jobs.Pool{
		"default": {Licence: "rgpu", Types: map[string]string{"h200": "rgpu_h200"}},
		"small":   {Licence: "rgpu_small"},
	},
	Partitions: map[string]jobs.Partition{"debug": {Policy: lease.Equal, Place: lease.Spread, Mem: 4 << 30}},
	RoomWait:   20 * time.Millisecond, Report: true, Silence: time.Minute,
}

// Node is what the services of one node talk to.
type Node struct {
	Host  *Host
	Slurm *slurmtest.Fake
	Marks *Marks
	State *jobs.State
	Dir   string // its disk

	t   *testing.T
	led *ledger.Ledger
}

// NewNode returns a node of the site, of which nothing is on the disk yet.
func NewNode(t *testing.T, st *Site, name string) *Node {
	return &Node{
		t: t, Dir: t.TempDir(), Slurm: slurmtest.New(), Marks: &Marks{jobs: map[string]bool{}},
		Host: &Host{Site: st, Node: name, Has: map[string]lease.Lease{}},
	}
}

// Start begins another process on the node: its state is new, and the ledger that it returns
// has what is on the disk.
func (n *Node) Start() *ledger.Ledger {
	n.t.Helper()
	if n.led != nil {
		_ = n.led.Close()
	}
	n.State = jobs.NewState(Settings)
	led, err := ledger.Open(filepath.Join(n.Dir, "host.db"), n.Host.Node, ledger.Options{NoSync: true})
	if err != nil {
		n.t.Fatal(err)
	}
	n.led = led
	n.t.Cleanup(func() { _ = led.Close() })
	return led
}

// Job is one that runs on n1 with 50 percent.
func Job(id string) slurm.Job {
	return slurm.Job{
		ID: id, JobState: slurm.JobState{State: "RUNNING", Nodes: []string{"n1"}}, UID: 1000, GID: 1000, Batch: true, Requeue: true,
		Partition: "main", Licences: slurm.Counts{"rgpu": 50}, Gres: []slurm.Gres{{Name: "rgpu", Count: 50}},
	}
}

// RunOf is what the scripts of the job pass.
func RunOf(j slurm.Job) rpc.JobRun {
	return rpc.JobRun{Job: j.ID, Restart: j.Restarts, UID: j.UID, GID: j.GID, Nodes: j.Nodes}
}
