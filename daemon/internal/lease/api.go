package lease

import (
	"context"
	"os"
	"time"
)

// Owner is a daemon that owns GPUs, in this process or over the network. Every
// method may be called twice with the same arguments, and late, without harm.
// host is the node name of the caller, proven by its connection. Errors are *Error.
type Owner interface {
	// Inventory is what the owner has and has left.
	Inventory(ctx context.Context) (Inventory, error)
	// Reserve writes l (its Grants are this owner's) into the ledger, reserved
	// for ttl, or granted at once when ttl is 0. The key's live lease, if there
	// is one of another id, comes back with code Conflict. A lease of this id
	// that exists already is answered as it stands.
	Reserve(ctx context.Context, host string, l Lease, ttl time.Duration) (Lease, error)
	// Confirm makes a reserved lease a granted one.
	Confirm(ctx context.Context, host, id string) error
	// Renew says that the host still uses these leases. Those that are missing
	// from the answer are not known here, or have ended.
	Renew(ctx context.Context, host string, ids []string) (known []string, err error)
	// Claim says that the lease's own host has attached it for its job. From then
	// on its sponsor cannot take it back, see Release. The error is Over if the
	// lease has ended, or never was. It renews the lease, too.
	Claim(ctx context.Context, host, id string) error
	// Release ends a lease, its sessions first, and remembers the key for the
	// tombstone time, so that a late Reserve of it is refused. id may be "" and
	// the key name the lease. Unknown leases are no error. A sponsor that gives
	// the id alone takes back what it could not get whole; if the lease's own
	// host has claimed the lease, or got it by itself, it stays, and the error is
	// Conflict.
	Release(ctx context.Context, host, id string, key Key, reason string) error
	// List is every lease whose host is host, "" for all.
	List(ctx context.Context, host string) ([]Status, error)
	// Reports is what became of a job's leases at this owner: those that live, and
	// those that ended less than the tombstone time ago, oldest first. host is a
	// controller's, or sees its own only. One without a lease tells up to which
	// epoch the job has ended, if none of its leases does.
	Reports(ctx context.Context, host, cluster, job string) ([]Report, error)
	// Set changes share or policy of a lease of host, or of any for the owner's own
	// node, and answers this owner's part of it as it is then.
	Set(ctx context.Context, host string, c Change) (Lease, error)
	// Drain has new leases get no GPU of the owner, or one of them, or get it again, and
	// answers all its GPUs as they are then.
	Drain(ctx context.Context, host string, d DrainOrder) ([]GPU, error)
	// Offer prepares a session and says how its data connection is opened.
	Offer(ctx context.Context, host string, r SessionRequest) (Offer, error)
}

// Mourner is an owner that accepts reports that a process has ended.
type Mourner interface {
	// Gone ends the sessions that a process of host, which has ended, had in a lease of host.
	Gone(ctx context.Context, host, id string, pid uint32) error
}

// LocalOwner is the owner in this process, which can hand over a socket.
type LocalOwner interface {
	Owner
	// Open starts a session and returns the client's end of its socket pair.
	Open(ctx context.Context, r SessionRequest) (*os.File, error)
}

// Inventory is an owner's GPUs.
type Inventory struct {
	Owner   string        `json:"owner"`
	Version string        `json:"version"` // Sluice's
	GPUs    []GPU         `json:"gpus"`
	Age     time.Duration `json:"age"`           // of what NVML said
	Time    time.Time     `json:"time,omitzero"` // the owner's clock when it answered; zero of an older owner
}

// SessionRequest asks for a session, after the host has seen who asks.
type SessionRequest struct {
	Lease   string `json:"lease"`
	Kind    uint32 `json:"kind"` // wire.SessionCompute or wire.SessionObserve
	PID     uint32 `json:"pid"`  // in the host's own PID namespace
	UID     uint32 `json:"uid"`
	Program string `json:"program"`
	Encrypt bool   `json:"encrypt"`
	// CertHash is the SHA-256 of the certificate that the host's end of an
	// encrypted connection will show.
	CertHash []byte `json:"cert_hash,omitempty"`
	// Part is what the session's step may have of the lease, nil for all of it.
	Part *Part `json:"part,omitempty"`
	// Step is the step of Slurm's that asks, as the kernel shows it. It is known on the host alone.
	Step string `json:"-"`
}

// Offer is the answer: where to connect, and the ticket for it.
type Offer struct {
	Addr     string `json:"addr"` // HOST:PORT; an empty host is the owner's own
	Ticket   [16]byte
	Secret   [32]byte
	CertHash []byte // of the owner's end, encrypted connections only
	Part     bool   // the part that was asked for will be kept to; an owner that knows of no parts does not say so
}

// Session is a live session as its owner sees it.
type Session struct {
	ID      string    `json:"id"`
	Lease   string    `json:"lease"`
	Worker  Process   `json:"worker"`
	Client  uint32    `json:"client_pid"`
	Program string    `json:"program"`
	Kind    uint32    `json:"kind"`
	Started time.Time `json:"started"`
	Use     []Use     `json:"use"` // one for each of the lease's grants here
	Counts  Counts    `json:"counts"`
	Link    Link      `json:"link"`
	Part    *Part     `json:"part,omitempty"` // of the lease, for a session of one
}

// Link is a session's connection to its client as the kernel of the owner measures it. All is 0 where that connection is a
// Unix socket: within a node, and where daemons relay an encrypted one.
type Link struct {
	RoundTrip time.Duration `json:"round_trip"` // the shortest of the last minutes
	Resent    uint64        `json:"resent"`     // segments that were lost on the way to the client, or seemed to be, since it was made
}

// Use is the memory account of one grant, in bytes.
type Use struct {
	Granted  uint64 `json:"granted"` // 0 in a Status: the grant's owner did not answer
	Used     uint64 `json:"used"`    // overhead included
	Overhead uint64 `json:"overhead"`
	Peak     uint64 `json:"peak"`
}

// Counts are what a session has done so far.
type Counts struct {
	Calls    uint64        `json:"calls"`
	Waits    uint64        `json:"waits"`
	BytesIn  uint64        `json:"bytes_in"`  // from the client
	BytesOut uint64        `json:"bytes_out"` // to the client
	Launches uint64        `json:"launches"`
	Errors   uint64        `json:"errors"`
	Throttle time.Duration `json:"throttle"`
	Cuts     uint64        `json:"cuts"`     // of the connection to the client that are over
	CutTime  time.Duration `json:"cut_time"` // without the client
	Saved    uint64        `json:"saved"`    // bytes less from the client, because it compressed what it copied to the GPU, or the owner had that stored
}

// Total is what a lease has used over its whole life on one owner.
type Total struct {
	Use      []Use // one for each grant, none if there never was a session
	Counts   Counts
	Sessions uint64        // how many there were
	GPUTime  time.Duration // busy time of its GPUs
	Failed   uint64        // see Report
	Failure  string
}

// Report is what one owner knows of a lease and of what was done with it.
type Report struct {
	Lease    string        `json:"lease"`
	Key      Key           `json:"key"`
	Owner    string        `json:"owner"`
	UID      uint32        `json:"uid"`
	Account  string        `json:"account,omitempty"`
	JobName  string        `json:"job_name,omitempty"`
	Asked    []Fraction    `json:"asked"`             // all of the lease's fractions
	Grants   []Grant       `json:"grants"`            // this owner's
	Use      []Use         `json:"use"`               // one for each of Grants; Peak is over the whole life
	Counts   Counts        `json:"counts"`            // all sessions that were
	Sessions uint64        `json:"sessions"`          // how many there were
	GPUTime  time.Duration `json:"gpu_time"`          // busy time of its GPUs
	Failed   uint64        `json:"failed,omitempty"`  // how many of Sessions did not end by themselves, nor with their client or the lease
	Failure  string        `json:"failure,omitempty"` // the last of these: the program and why it ended
	Lost     bool          `json:"lost"`              // the owner's machine was started again since Made: Use, Counts, Sessions and GPUTime are only of the time after that
	Shares   []Share       `json:"shares"`            // one for each of Grants; none where the owner shares no time
	Policy   Policy        `json:"policy,omitempty"`
	Lend     Lend          `json:"lend,omitempty"`
	Made     time.Time     `json:"made"`
	Ended    time.Time     `json:"ended,omitzero"` // zero while it lives
	Reason   string        `json:"reason,omitempty"`
}

// Status is a lease with what lives on it.
type Status struct {
	Lease
	Use      []Use     `json:"use"`              // one for each grant, all sessions together
	Shares   []Share   `json:"shares,omitempty"` // one for each grant; none where the owner shares no time
	Sessions []Session `json:"sessions"`
	Renewed  time.Time `json:"renewed"`
	// Idle is for how long no session has had work for the GPU, 0 while one has. It counts from the start of the owner's daemon at the
	// earliest. IdleNoted says that it has been longer than the owner's site says, lease.idle in sluice.yaml.
	Idle      time.Duration `json:"idle"`
	IdleNoted bool          `json:"idle_noted,omitempty"`
}

// Brief is what a controller compares of a lease with Slurm's jobs and licences. It has tens of thousands of them at a time.
type Brief struct {
	ID        string
	Key       Key
	Restart   uint32
	UID       uint32
	State     State
	Grants    []BriefGrant
	Idle      time.Duration // as in Status
	IdleNoted bool
}

// BriefGrant is a grant of a Brief.
type BriefGrant struct {
	GPU     string
	Percent uint32
}

// Brief returns what is compared of it.
func (s *Status) Brief() Brief {
	b := Brief{ID: s.ID, Key: s.Request.Key, Restart: s.Request.Restart, UID: s.Request.UID, State: s.State, Idle: s.Idle, IdleNoted: s.IdleNoted, Grants: make([]BriefGrant, len(s.Grants))}
	for i, g := range s.Grants {
		b.Grants[i] = BriefGrant{g.GPU, g.Percent}
	}
	return b
}
