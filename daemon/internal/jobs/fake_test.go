package jobs

import (
	"context"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm/slurmtest"
	"github.com/sluice-hpc/sluice/internal/form"
)

// site is what all hosts of a test have in common: the owners.
type site struct {
	mu     sync.Mutex
	epoch  uint64
	leases map[lease.Key]lease.Lease // without incarnation
	tombs  map[lease.Key]uint64
	refuse error // of whoever asks for a lease
	down   error // of whoever attaches
	pools  []rpc.Pool
	extra  []lease.Status
	silent map[string]error
	ended  []lease.Key
	asks   int
	named  int           // most nodes in one end of a job
	hold   chan struct{} // acquisitions wait for it
}

func newSite() *site {
	gpu := func(uuid string) lease.GPU {
		return lease.GPU{Owner: "g1", UUID: uuid, Name: "NVIDIA H200", Mem: 100 << 30, Healthy: true}
	}
	return &site{
		epoch: 1000, leases: map[lease.Key]lease.Lease{}, tombs: map[lease.Key]uint64{},
		pools: []rpc.Pool{{Name: "default", Owners: []rpc.PoolOwner{{Name: "g1", Inventory: lease.Inventory{Owner: "g1", GPUs: []lease.GPU{gpu("a"), gpu("b")}}}}}},
	}
}

func bare(k lease.Key) lease.Key { k.Incarnation = 0; return k }

// fakeHost is one node's host role.
type fakeHost struct {
	reports []lease.Report // what owners say of any job; nil for one of uid 1000
	*site
	node string
	held map[string]lease.Lease // by job
}

func (h *fakeHost) Epoch() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.epoch++
	return h.epoch
}

func (h *fakeHost) LastEpoch(_ context.Context, _, job string) (last uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for k, l := range h.leases {
		if k.Job == job {
			last = max(last, l.Request.Key.Incarnation)
		}
	}
	for k, n := range h.tombs {
		if k.Job == job {
			last = max(last, n)
		}
	}
	return last
}

// get is under mu.
func (h *fakeHost) get(r lease.Request) (lease.Lease, error) {
	h.asks++
	k := bare(r.Key)
	if h.refuse != nil {
		return lease.Lease{}, h.refuse
	}
	if h.tombs[k] >= r.Key.Incarnation {
		return lease.Lease{}, lease.Errorf(lease.Over, "job %s has ended", k)
	}
	if l, ok := h.leases[k]; ok && (l.Request.Restart == r.Restart || l.Request.Key.Incarnation >= r.Key.Incarnation) {
		return l, nil
	}
	l := lease.Lease{ID: form.NewLeaseID(), Request: r, State: lease.Granted, Host: r.Key.Node, Made: time.Now()}
	for i, f := range r.Fractions {
		l.Grants = append(l.Grants, lease.Grant{Owner: "g1", GPU: "a", Percent: f.Percent, Order: i})
	}
	h.leases[k] = l
	return l, nil
}

func (h *fakeHost) Acquire(ctx context.Context, p rpc.Peer, r lease.Request) (lease.Lease, string, error) {
	if h.hold != nil {
		<-h.hold
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.UID != 0 || r.Key.Node != h.node {
		panic("acquired by or for somebody else")
	}
	l, err := h.get(r)
	if err == nil {
		h.held[r.Key.Job] = l
	}
	return l, "/run/sluice/leases/" + l.ID + "/sock", err
}

func (h *fakeHost) Sponsor(_ context.Context, reqs []lease.Request) ([]lease.Lease, error) {
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

func (h *fakeHost) Attach(_ context.Context, key lease.Key) (lease.Lease, bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l, ok := h.leases[bare(key)]
	if h.down != nil {
		return lease.Lease{}, false, h.down
	}
	if ok {
		h.held[key.Job] = l
	}
	return l, ok, nil
}

func (h *fakeHost) Held(key lease.Key) (lease.Lease, string, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l, ok := h.held[key.Job]
	return l, "/run/sluice/leases/" + l.ID + "/sock", ok
}

func (h *fakeHost) Release(_ context.Context, _ rpc.Peer, _ string, key lease.Key, _ string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := bare(key)
	h.tombs[k] = max(h.tombs[k], key.Incarnation)
	h.ended = append(h.ended, key)
	if l, ok := h.leases[k]; ok && l.Request.Key.Incarnation <= key.Incarnation {
		delete(h.leases, k)
	}
	if l, ok := h.held[key.Job]; ok && l.Request.Key.Incarnation <= key.Incarnation {
		delete(h.held, key.Job)
	}
	return nil
}

func (h *fakeHost) EndJob(_ context.Context, cluster, job string, nodes []string, upTo uint64, _ string) ([]string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ended = append(h.ended, lease.Key{Cluster: cluster, Job: job, Incarnation: upTo})
	h.named = max(h.named, len(nodes))
	for k, l := range h.leases {
		if k.Job == job && (len(nodes) == 0 || slices.Contains(nodes, k.Node)) && l.Request.Key.Incarnation <= upTo {
			delete(h.leases, k)
		}
	}
	return nil, nil
}

func (h *fakeHost) Reports(_ context.Context, _, job string) ([]lease.Report, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reports != nil {
		return slices.Clone(h.reports), nil
	}
	return []lease.Report{{Lease: "x", Key: lease.Key{Job: job}, UID: 1000}}, nil
}

func (h *fakeHost) All(context.Context) (map[string][]lease.Status, map[string]error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := slices.Clone(h.extra)
	for _, l := range h.leases {
		out = append(out, lease.Status{Lease: l})
	}
	return map[string][]lease.Status{"g1": out}, h.silent
}

func (h *fakeHost) Pool(context.Context, rpc.Peer, string) ([]rpc.Pool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.pools, nil
}

func (s *site) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.leases)
}

func (s *site) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

type marks struct {
	mu   sync.Mutex
	jobs map[string]bool
}

func (m *marks) Put(job string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.jobs[job] = true
	return nil
}

func (m *marks) Remove(job string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.jobs, job)
}

func (m *marks) Keep(jobs map[string]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.jobs = map[string]bool{}
	for j := range jobs {
		m.jobs[j] = true
	}
}

func (m *marks) has(job string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.jobs[job]
}

// rig is a service and what it talks to.
type rig struct {
	*Service
	t     *testing.T
	host  *fakeHost
	slurm *slurmtest.Fake
	marks *marks
	dir   string
}

var settingsOf = Settings{
	Pools: map[string]Pool{
		"default": {Licence: "rgpu", Types: map[string]string{"h200": "rgpu_h200"}},
		"small":   {Licence: "rgpu_small"},
	},
	Partitions: map[string]Partition{"debug": {Policy: lease.Equal, Place: lease.Spread, Mem: 4 << 30}},
	RoomWait:   20 * time.Millisecond, Report: true, Silence: time.Minute,
}

func newRig(t *testing.T, st *site, node string) *rig {
	t.Helper()
	r := &rig{t: t, dir: t.TempDir(), slurm: slurmtest.New(), marks: &marks{jobs: map[string]bool{}}}
	r.host = &fakeHost{site: st, node: node, held: map[string]lease.Lease{}}
	r.start("boot-1")
	return r
}

// start begins anew with what is on the disk.
func (r *rig) start(boot string) {
	r.t.Helper()
	led, err := ledger.Open(filepath.Join(r.dir, "host.db"), r.host.node, ledger.Options{NoSync: true})
	if err != nil {
		r.t.Fatal(err)
	}
	r.Service, err = New(r.t.Context(), Config{
		Node: r.host.node, Cluster: "cluster", Controller: r.host.node == "ctl", User: 64030, Lib: "/usr/lib/sluice", Spool: r.dir + "/%n",
		Boot: boot, Host: r.host, Slurm: r.slurm, Ledger: led, Marks: r.marks, Settings: settingsOf,
		Line: func(l []lease.Report) string {
			if len(l) == 0 {
				return ""
			}
			return "used by " + l[0].Key.Job
		},
		Retry: time.Millisecond, Gone: time.Minute,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	s := r.Service
	r.t.Cleanup(func() { s.Close(); _ = led.Close() })
}

// restart is another process with the same disk.
func (r *rig) restart(boot string) {
	r.t.Helper()
	r.Close()
	_ = r.cfg.Ledger.Close()
	r.start(boot)
}

// job is one that runs on n1 with 50 percent.
func job(id string) slurm.Job {
	return slurm.Job{
		ID: id, JobState: slurm.JobState{State: "RUNNING", Nodes: []string{"n1"}}, UID: 1000, GID: 1000, Batch: true, Requeue: true,
		Partition: "main", Licences: slurm.Counts{"rgpu": 50}, Gres: []slurm.Gres{{Name: "rgpu", Count: 50}},
	}
}

func runOf(j slurm.Job) rpc.JobRun {
	return rpc.JobRun{Job: j.ID, Restart: j.Restarts, UID: j.UID, GID: j.GID, Nodes: j.Nodes}
}

func (r *rig) prolog(run rpc.JobRun, want rpc.JobOutcome) rpc.JobAnswer {
	r.t.Helper()
	a, err := r.Prolog(r.t.Context(), rpc.Peer{}, run)
	if err != nil || a.Outcome != want {
		r.t.Fatalf("prolog: %+v, %v; want %s", a, err, want)
	}
	return a
}
