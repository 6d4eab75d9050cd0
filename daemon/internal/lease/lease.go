// Package lease holds the nouns of the daemon: what a job asks for, what an
// owner grants, and what a GPU has left. Sizes are bytes, shares are percent of
// one GPU. Nothing here does I/O.
package lease

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Granule is the unit of device memory, in bytes.
const Granule = form.Granule

// Key names the job part that a lease belongs to. One lease exists for a key at a
// time, so that a request that is repeated gets the same.
type Key struct {
	Cluster string `json:"cluster"`
	Job     string `json:"job"`  // Slurm's job id, or form.NewRunJob of sluice run
	Node    string `json:"node"` // the node whose processes use the lease
	// Incarnation tells a requeued job from its earlier life; a greater one
	// is later. For Slurm's jobs it is an epoch in milliseconds since 1970, given
	// by the daemon that first hears of a run and never used twice by it. It is not
	// Slurm's restart count: an Epilog is told that of the next run already.
	Incarnation uint64 `json:"incarnation,omitempty"`
}

func (k Key) String() string { return k.Cluster + "/" + k.Job + "@" + k.Node }

// Fraction is a share of one GPU as it is asked for.
type Fraction struct {
	Percent uint32 `json:"percent"`       // 1..100
	Mem     uint64 `json:"mem,omitempty"` // bytes; 0: Percent of the GPU's memory
}

// Policy says what becomes of the compute share.
type Policy string

// The policies.
const (
	BestEffort Policy = "best-effort"
	Equal      Policy = "equal"
	Fixed      Policy = "fixed"
)

// Place says which GPUs are taken first.
type Place string

// The placements.
const (
	BestFit Place = "best-fit" // the fullest GPU that still holds it
	Spread  Place = "spread"   // the emptiest
)

// Places are all of them as they are written.
var Places = []string{string(BestFit), string(Spread)}

// Process is a process of this machine, named so that its number cannot be
// mistaken for a later one's.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // field 22 of /proc/PID/stat
}

// NoGrace is the Request.Grace of a lease whose sessions end with their connection, and MaxGrace the longest.
const (
	NoGrace  time.Duration = -1
	MaxGrace               = 24 * time.Hour
)

// GraceOf is a time that somebody has given, as a Request.Grace: 0 is not at all.
func GraceOf(d time.Duration) time.Duration {
	if d == 0 {
		return NoGrace
	}
	return d
}

// Request asks for fractions, all or nothing. Fractions of one lease are on GPUs
// that differ, because each is a device of its own to the program.
type Request struct {
	Key       Key           `json:"key"`
	Fractions []Fraction    `json:"fractions"`
	Type      string        `json:"type,omitempty"`    // as GPU.IsType takes it; "" any
	MinMem    uint64        `json:"min_mem,omitempty"` // bytes that the whole GPU has at least
	SameOwner bool          `json:"same_owner,omitempty"`
	UID       uint32        `json:"uid"`
	GID       uint32        `json:"gid"`
	Policy    Policy        `json:"policy,omitempty"` // "" best effort
	Lend      Lend          `json:"lend,omitempty"`
	Place     Place         `json:"place,omitempty"` // "" as the pool says
	Pool      string        `json:"pool,omitempty"`  // "" the pool named default
	Life      time.Duration `json:"life,omitempty"`  // 0: until released
	Grace     time.Duration `json:"grace,omitempty"` // how long sessions wait for a program whose connection was lost; 0: as the pool or the owner's site says, NoGrace: not at all
	Account   string        `json:"account,omitempty"`
	JobName   string        `json:"job_name,omitempty"`
	// Restart is Slurm's restart count as the job's Prolog is told it: two runs of
	// a job differ in it, two Prologs of one run do not.
	Restart uint32 `json:"restart,omitempty"`
	// Nodes is on how many nodes the job asks for the same, 0 for one. A quota that the whole job would exceed refuses it on each.
	Nodes uint32 `json:"nodes,omitempty"`
	// Holder is the process whose end ends the lease; zero for Slurm jobs.
	Holder Process `json:"holder,omitzero"`
}

// SameRun says that two requests are of one run of a job, whatever their keys'
// incarnations: a script of Slurm's was repeated, by another daemon perhaps.
func (r Request) SameRun(o Request) bool {
	return r.Key.Cluster == o.Key.Cluster && r.Key.Job == o.Key.Job && r.Key.Node == o.Key.Node &&
		r.Restart == o.Restart && r.UID == o.UID && r.Type == o.Type && slices.Equal(r.Fractions, o.Fractions)
}

// Grant is one fraction on one GPU.
type Grant struct {
	Owner   string `json:"owner"` // node name of the daemon that owns the GPU
	GPU     string `json:"gpu"`   // UUID, "GPU-..."
	Percent uint32 `json:"percent"`
	Mem     uint64 `json:"mem"`   // bytes, whole granules
	Order   int    `json:"order"` // place among the lease's fractions, from 0
	// First is the percent at first, of a grant that has been given another since.
	First uint32 `json:"first,omitempty"`
}

// State of a lease.
type State string

// The states. Reserved becomes Granted by Confirm, or ends by itself.
const (
	Reserved State = "reserved"
	Granted  State = "granted"
	Ended    State = "ended"
)

// Lease is what an owner keeps for its part of it (Grants are then that owner's),
// and the host for all of it.
type Lease struct {
	ID      string    `json:"id"` // as form.ParseLeaseID takes it; the same at every owner
	Request Request   `json:"request"`
	Grants  []Grant   `json:"grants"` // in the order of the request's fractions
	State   State     `json:"state"`
	Made    time.Time `json:"made"`
	Expires time.Time `json:"expires,omitzero"` // by Life or, reserved, by the reservation's time
	Host    string    `json:"host"`             // node name of the daemon that asked
	Epoch   uint64    `json:"epoch"`            // the owner's: counts its ledger's openings
	// Sponsor is the node of the controller's daemon that asked for it on behalf
	// of Host, "" if Host itself did. It renews the lease until Host has it.
	Sponsor string `json:"sponsor,omitempty"`
}

// GPU is what an owner knows of a GPU.
type GPU struct {
	Owner    string `json:"owner"`
	UUID     string `json:"uuid"`
	Index    int    `json:"index"` // in PCI order
	Name     string `json:"name"`
	PCI      string `json:"pci"`
	Mem      uint64 `json:"mem"`      // bytes that can be granted
	Overhead uint64 `json:"overhead"` // bytes that one session's context takes of its grant
	Healthy  bool   `json:"healthy"`
	Why      string `json:"why,omitempty"` // it is not healthy
	// FreePercent and FreeMem are what no lease holds.
	FreePercent uint32 `json:"free_percent"`
	FreeMem     uint64 `json:"free_mem"`
	Leases      int    `json:"leases"`
	Drain       Drain  `json:"drain,omitzero"`
}

// IsType says whether the GPU is of a type as users name it: part of its name, without
// regard to case. Every GPU is of type "".
func (g *GPU) IsType(typ string) bool {
	return strings.Contains(strings.ToLower(g.Name), strings.ToLower(typ))
}

// Error is a refusal that the user reads: it names the thing and the remedy.
type Error struct {
	Code   Code
	Reason string
}

func (e *Error) Error() string { return e.Reason }

// Code says of what sort a refusal is.
type Code string

// The codes. Each has one gRPC status, see package rpc.
const (
	Invalid   Code = "invalid"     // the request makes no sense
	NoRoom    Code = "no-room"     // it does not fit now
	Never     Code = "never"       // it cannot fit this pool at all
	NotFound  Code = "not-found"   // no such lease, pool, GPU
	Denied    Code = "denied"      // not yours
	Over      Code = "over"        // the lease or job has ended
	Conflict  Code = "conflict"    // state changed meanwhile; ask again
	Down      Code = "unavailable" // an owner cannot be asked
	Internal  Code = "internal"    // disk full and such
	WrongPeer Code = "wrong-version"
)

// Errorf makes an *Error.
func Errorf(code Code, format string, a ...any) error {
	return &Error{code, fmt.Sprintf(format, a...)}
}

// Owners is the owners of grants in the order in which they first appear: the
// number of an owner in the lease socket's protocol is its place here.
func Owners(grants []Grant) []string {
	var names []string
	seen := make(map[string]bool, 2)
	for _, g := range grants {
		if !seen[g.Owner] {
			seen[g.Owner] = true
			names = append(names, g.Owner)
		}
	}
	return names
}

// CodeOf is the code of err; what is no *Error means that the owner could
// not be asked.
func CodeOf(err error) Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return Down
}

// ParseKey reverses Key.String, as far as that is possible: a job has no slash.
func ParseKey(s string, incarnation uint64) Key {
	rest, node := s, ""
	if i := strings.LastIndexByte(s, '@'); i >= 0 {
		rest, node = s[:i], s[i+1:]
	}
	i := strings.LastIndexByte(rest, '/')
	if i < 0 {
		return Key{}
	}
	return Key{Cluster: rest[:i], Job: rest[i+1:], Node: node, Incarnation: incarnation}
}
