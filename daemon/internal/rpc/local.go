package rpc

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// Peer is the caller. On the local socket UID, GID and PID come from the kernel (SO_PEERCRED)
// and Node is ""; between daemons Node is the verified name of the other node, and the rest is
// zero.
type Peer struct {
	UID  uint32
	GID  uint32
	PID  int
	Node string
}

// May says whether the caller may see and end what is uid's: root everything, a user only the user's own.
func (p Peer) May(uid uint32) bool { return p.UID == 0 || p.UID == uid }

// LocalService is what a daemon does for the users of its node. Methods check by themselves
// what the peer may do, see Peer.May. Errors are
// *lease.Error; the caller sees any other error as internal.
type LocalService interface {
	// Acquire returns the lease and the path of its socket. A repeated call with the same key
	// returns the same lease.
	Acquire(ctx context.Context, peer Peer, r lease.Request) (l lease.Lease, socket string, err error)
	// Release ends a lease, named by its id or, with id "", by its key.
	Release(ctx context.Context, peer Peer, id string, key lease.Key, reason string) error
	// List returns the leases of this node that peer may see.
	List(ctx context.Context, peer Peer) ([]lease.Status, error)
	// Pool returns the owners of the pool of that name, or of all pools for "".
	Pool(ctx context.Context, peer Peer, name string) ([]Pool, error)
	// Health returns this daemon's findings, the worst first.
	Health(ctx context.Context, peer Peer) ([]Check, error)
	// HealthAll returns the findings of this node and of all owners of the pools; for root and SlurmUser.
	HealthAll(ctx context.Context, peer Peer) (HealthAll, error)
	// Explain returns what this node's audit log and the owners know about a job, oldest first.
	Explain(ctx context.Context, peer Peer, job string) ([]Event, error)
	// Stats returns the live state of this node's GPUs and leases.
	Stats(ctx context.Context, peer Peer) (Stats, error)
	// Set changes share or policy of a lease, and returns the changed lease. Only root may give
	// more than was granted at first.
	Set(ctx context.Context, peer Peer, c lease.Change) (lease.Lease, error)
	// Drain has new leases get no GPU of an owner, or one of them, or get it again; for root
	// of the owner's node and of a controller's. It returns the owner's GPUs as they are then.
	Drain(ctx context.Context, peer Peer, d lease.DrainOrder) ([]lease.GPU, error)
	// Probe measures the link from this node to an owner, for some seconds. A user's probe is shorter than root's.
	Probe(ctx context.Context, peer Peer, owner string) (lease.Probe, error)
}

// Pool is a pool with what its owners have.
type Pool struct {
	Name   string      `json:"name"`
	Place  lease.Place `json:"place"`
	Owners []PoolOwner `json:"owners"`
}

// PoolOwner is one owner of a pool. With Error set there is no Inventory.
type PoolOwner struct {
	Name      string          `json:"name"`
	Inventory lease.Inventory `json:"inventory,omitzero"`
	Error     string          `json:"error,omitempty"`
}

// Level of a Check.
type Level string

// The levels.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Fail Level = "fail"
)

// Rank is 0 for the worst level. One that only a later release knows is taken for that.
func (l Level) Rank() int {
	switch l {
	case OK:
		return 2
	case Warn:
		return 1
	}
	return 0
}

// Check is one finding about the daemon's health.
type Check struct {
	Name   string `json:"name"`
	Level  Level  `json:"level"`
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
	// Node: jobs with fractions fail on this node, or on its GPUs, until an administrator mends it here. Never said of
	// what another node or a job has done.
	Node bool `json:"node,omitempty"`
	// Unknown: the daemon could not look, so failures that drain the node may be there. A node that is drained stays so.
	Unknown bool `json:"unknown,omitempty"`
}

// ResetGPU says how an administrator resets a GPU of an owner. NVML's process and the workers hold its device files until sluiced ends.
func ResetGPU(owner string, index int, uuid string) string {
	return fmt.Sprintf("sluice drain %s:%d; once no job uses %[1]s, systemctl stop sluiced, nvidia-smi --gpu-reset -i %[3]s, systemctl start sluiced, and sluice resume %[1]s:%[2]d", owner, index, uuid)
}

// NodesCheck is a finding of several nodes, the same of each but for numbers, UUIDs and names: the text is the first
// node's.
type NodesCheck struct {
	Check
	Nodes []string `json:"nodes"`
}

// HealthAll is what many nodes have found of themselves: warnings and failures, the worst first.
type HealthAll struct {
	Findings []NodesCheck `json:"findings"`
	Asked    int          `json:"asked"` // nodes: the sum of the next four
	Well     int          `json:"well"`
	Warned   int          `json:"warned"` // have warnings, and no failure
	Failed   int          `json:"failed"`
	Unheard  int          `json:"unheard"`  // did not answer, or refused to
	LeftOut  int          `json:"left_out"` // different findings beyond what one answer has, warnings before failures
}

// NodeHealth is an owner whose node's health another node may ask for.
type NodeHealth interface {
	// Health returns what the owner's node has found of itself; for that node and for controllers.
	Health(ctx context.Context, host string) ([]Check, error)
}

// SortChecks puts the worst first, and those of a level in the order of their names.
func SortChecks(cs []Check) {
	slices.SortStableFunc(cs, func(a, b Check) int {
		return cmp.Or(cmp.Compare(a.Level.Rank(), b.Level.Rank()), cmp.Compare(a.Name, b.Name))
	})
}

// Event is what happened to a lease or a request: a line of this node's audit log, or what an
// owner has told of it.
type Event struct {
	Time   time.Time `json:"time"`
	Seq    uint64    `json:"seq"`
	Event  string    `json:"event"`
	Node   string    `json:"node,omitempty"` // whose audit log
	Lease  string    `json:"lease,omitempty"`
	Key    lease.Key `json:"key,omitzero"`
	UID    uint32    `json:"uid"`
	Host   string    `json:"host,omitempty"`
	Owner  string    `json:"owner,omitempty"`
	GPUs   []string  `json:"gpus,omitempty"`
	Reason string    `json:"reason,omitempty"`
	// Grants are the GPUs again, with how much of each.
	Grants []lease.Grant `json:"grants,omitempty"`
	// Times is how often that was, for what a daemon tried several times; 0 is once.
	Times uint64 `json:"times,omitempty"`
}

// Stats returns the live state of this node's GPUs and leases.
type Stats struct {
	Node    string         `json:"node"`
	Version string         `json:"version"`
	Time    time.Time      `json:"time"`
	GPUs    []GPUStats     `json:"gpus"`
	Leases  []lease.Status `json:"leases"`
}

// GPUStats is what NVML said of a GPU Age ago, and what the ledger and the
// sessions' accounts say. Without Known NVML has not answered yet and its four
// figures (Utilisation, MemUsed, MemTotal, Age) mean nothing.
type GPUStats struct {
	GPU         lease.GPU     `json:"gpu"`
	Known       bool          `json:"known"`
	Utilisation uint32        `json:"utilisation"` // percent of time
	MemUsed     uint64        `json:"mem_used"`    // bytes
	MemTotal    uint64        `json:"mem_total"`   // bytes
	Age         time.Duration `json:"age"`
	GrantedMem  uint64        `json:"granted_mem"` // bytes
	UsedMem     uint64        `json:"used_mem"`    // bytes
}
